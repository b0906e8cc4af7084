"""Hints to the kernel about which bytes of a file it should have in memory.

Hints only: what cannot be opened or asked is left as it is, and where the system has no such call nothing is done.
Descriptors are closed at once, so never lock.mdb: closing one would drop the locks that LMDB holds on it.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

_READ_BYTES = 128 << 10
"""Bytes that are asked for in one call: of more Linux reads no more than a device's read-ahead, which is often this."""


def drop(file: Path, begin: int, end: int) -> None:
    """Have the kernel forget the bytes from `begin` up to `end`, where they are on disk and no process maps them."""
    if hasattr(os, "posix_fadvise"):
        _advise(file, begin, end, end - begin, os.POSIX_FADV_DONTNEED)


def fetch(file: Path, begin: int, end: int, within_s: float) -> int:
    """Have the kernel begin to read the bytes from `begin` up to `end`, where it has not got them; up to where.

    Does not wait for them, and stops after `within_s` seconds: where many reads are on their way, asking takes long.
    """
    if hasattr(os, "posix_fadvise"):
        return _advise(file, begin, end, _READ_BYTES, os.POSIX_FADV_WILLNEED, time.perf_counter() + within_s)
    return end


def fetch_all(file: Path) -> None:
    """Have the kernel read a file that somebody is about to read all of; no more than a quarter of memory holds."""
    try:
        size = file.stat().st_size
    except OSError:
        return
    fetch(file, 0, min(size, physical_bytes() // 4), math.inf)


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
