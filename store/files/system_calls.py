"""Calls of Linux, and what does their work where a system has no such call: a Mac is enough to develop on."""

import fcntl
import os
import time


def sync_data(descriptor: int) -> None:
    """Wait until what was written to a file is on disk. Raises OSError."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # the fsync of a Mac leaves it in the cache of the disk
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    elif hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Have a file be at least `size` bytes long, and have their space on disk as far as that can be. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    length = os.fstat(descriptor).st_size
    while length < size:
        length += os.pwrite(descriptor, bytes(min(size - length, 1 << 20)), length)


def forget_pages(descriptor: int) -> None:
    """Have the next read of a file go to the disk, where a write may have gone past the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def since_boot_s() -> float:
    """A clock in seconds that never goes back, and goes on while the machine sleeps."""
    on_mac = time.CLOCK_MONOTONIC  # which does so there
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", on_mac))
