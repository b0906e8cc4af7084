"""Calls of Linux, and what does their work where a system has no such call: a Mac is enough to develop on."""

import ctypes
import fcntl
import functools
import os
import time

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_BYTES = 1 << 20
_KEPT_BYTES = 16 << 20
"""Free memory at the end of the heap that a process keeps; glibc keeps twice the largest block that was mapped."""


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


@functools.cache
def map_large_blocks() -> None:
    """Have memory blocks of 1 MiB and more be mapped each by itself: they take memory as far as they are written.

    LMDB asks for 1 and 2 MiB for each environment that it opens, and hardly writes to them. glibc maps them at first;
    but once one has been freed it takes them from the heap, and clears them: 2 MiB and 0.3 ms an environment. Other
    systems, and a process whose environment sets the limit (MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES), are left as they
    are.
    """
    libc = ctypes.CDLL(None)
    is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if hasattr(libc, "gnu_get_libc_version") and not is_set:
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def since_boot_s() -> float:
    """A clock in seconds that never goes back, and goes on while the machine sleeps."""
    on_mac = time.CLOCK_MONOTONIC  # which does so there
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", on_mac))
