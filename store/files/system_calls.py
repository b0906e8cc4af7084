"""Calls of Linux, and what does their work where a system has no such call: a Mac is enough to develop on."""

import ctypes
import errno
import fcntl
import functools
import itertools
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence


def sync_data(descriptor: int) -> None:
    """Wait until what was written to a file is on disk. Raises OSError."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # the fsync of a Mac leaves it in the cache of the disk
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    elif hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


class _Iocb(ctypes.Structure):
    """A call that is submitted: linux/aio_abi.h, little-endian."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("descriptor", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 5),
    )


class _Event(ctypes.Structure):
    """The end of one."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("iocb", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


_FDSYNC = 3
_SUBMITTED = 128
_NUMBERS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}
"""By machine, the numbers of io_setup, io_submit, io_getevents."""

_one_syncs = threading.Lock()
_tickets = itertools.count(1)


@functools.cache
def _submission() -> tuple[Callable[..., int], ctypes.c_ulong, int, int] | None:
    """`syscall`, this process's context, and two numbers; None: the system has no such calls, or refuses them."""
    numbers = _NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
    if numbers is None:
        return None
    call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).syscall
    context = ctypes.c_ulong(0)
    return None if call(numbers[0], _SUBMITTED, ctypes.byref(context)) else (call, context, *numbers[1:])


def sync_all(descriptors: Sequence[int]) -> None:
    """Wait until what was written to files is on disk, side by side where that can be. Raises OSError.

    Linux's asynchronous I/O flushes them in the kernel, without a thread of this process for each. Where there is none,
    or another thread is at it, they are flushed one after the other.
    """
    done = 0
    if len(descriptors) > 1 and _one_syncs.acquire(blocking=False):
        try:
            while count := _submit(descriptors[done : done + _SUBMITTED]):
                done += count
        finally:
            _one_syncs.release()
    for descriptor in descriptors[done:]:
        sync_data(descriptor)


def _submit(descriptors: Sequence[int]) -> int:
    """Flush the first of the files, and return how many."""
    submission = _submission()
    if submission is None:
        return 0
    call, context, submit, get_events = submission
    tickets = [next(_tickets) for _ in descriptors]
    blocks = [_Iocb(ticket, 0, 0, _FDSYNC, 0, each) for ticket, each in zip(tickets, descriptors, strict=True)]
    places = (ctypes.c_void_p * len(blocks))(*map(ctypes.addressof, blocks))
    submitted = max(call(submit, context, ctypes.c_long(len(blocks)), places), 0)  # else, after a fork too, without it
    waiting = set(tickets[:submitted])
    events = (_Event * _SUBMITTED)()
    while waiting:
        got = call(get_events, context, ctypes.c_long(1), ctypes.c_long(_SUBMITTED), events, None)
        if got < 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for event in events[: max(got, 0)]:
            if event.data in waiting:  # else one was interrupted before it had waited
                waiting.discard(event.data)
                if event.result < 0:
                    raise OSError(-event.result, os.strerror(-event.result))
    return submitted


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
