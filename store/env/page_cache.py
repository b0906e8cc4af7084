"""Hints to the kernel about which bytes of a file it should have in memory.

Hints only: what cannot be opened or asked is left as it is, and where the system has no such call nothing is done.
Descriptors are closed at once, so never lock.mdb: closing one would drop the locks that LMDB holds on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

_READ_BYTES = 128 << 10
"""Bytes that are asked for in one call: of more Linux reads no more than a device's read-ahead, which is often this."""


def drop(file: Path, begin: int, end: int) -> None:
    """Have the kernel forget the bytes from `begin` up to `end`, where they are on disk and no process maps them."""
    if hasattr(os, "posix_fadvise"):
        _advise(file, begin, end, end - begin, os.POSIX_FADV_DONTNEED)


def prefetch(file: Path, step_s: float = 0.004) -> Iterator[None]:
    """Have the kernel begin to read a file, where it has not got it, up to what a quarter of memory holds.

    Does not wait for the bytes. A step takes `step_s` seconds: where many reads are on their way, asking takes long.
    """
    if not hasattr(os, "posix_fadvise") or not file.is_file():
        return
    at, end = 0, min(file.stat().st_size, physical_bytes() // 4)
    while at < end:
        at = _advise(file, at, end, _READ_BYTES, os.POSIX_FADV_WILLNEED, time.perf_counter() + step_s)
        yield


def _advise(file: Path, begin: int, end: int, step: int, advice: int, until: float | None = None) -> int:
    """How far it came; `end` where the kernel refuses, for it will not be persuaded."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return end
    try:
        for at in range(begin, end, step):
            os.posix_fadvise(descriptor, at, min(step, end - at), advice)
            if until is not None and time.perf_counter() >= until:
                return min(at + step, end)
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return end


def physical_bytes() -> int:
    """Bytes of memory that the machine has; 0 where it does not say."""
    try:
        return max(os.sysconf("SC_PHYS_PAGES"), 0) * max(os.sysconf("SC_PAGE_SIZE"), 0)
    except (ValueError, OSError):
        return 0
