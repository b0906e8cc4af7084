"""The page cache: which bytes of a file the kernel is asked to have in memory, or to forget.

Messages of days to come would push out of memory what is read today, count towards a container's limit, and need
memory that the kernel has to find. So an environment that `evicts` drops what it has written, piece by piece, up to
the last `KEPT_BYTES` of its file, which LMDB goes on reading to append to it. LMDB maps the file again before: pages
that are mapped stay, and the kernel maps those around the ones that are read. While a reader is inside, eviction waits.
It only goes forward: pages before the last one evicted that LMDB writes again stay in memory. The main environment
evicts nothing, nor does a partition from `preload_ms` before its beginning on, nor durability "none", whose pages are
not on disk.

Everything here is a hint: a file that cannot be opened or asked about is left as it is, and where the system has no
such call nothing is done. Descriptors are closed at once, so never pass lock.mdb: closing one would drop the locks that
LMDB holds on it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import BrokenInvariant

PIECE_BYTES = 8 << 20
"""Eviction drops this many bytes at once, or a multiple of it."""

KEPT_BYTES = 32 << 20
"""Eviction keeps at least this many bytes before the end of the file."""

_READ_BYTES = 128 << 10
"""Bytes that one call asks for: of more, Linux reads no more than a device's read-ahead, which is often this."""


def drop(file: Path, begin: int, end: int) -> None:
    """Have the kernel forget the bytes from `begin` up to `end`, where they are on disk and no process maps them."""
    if hasattr(os, "posix_fadvise"):
        _advise(file, begin, end, end - begin, os.POSIX_FADV_DONTNEED)


def prefetch(file: Path, step_s: float = 0.004) -> Iterator[None]:
    """Have the kernel begin to read a file that it does not hold, up to a quarter of the machine's memory.

    It does not wait for the bytes. A step takes `step_s` seconds: with many reads under way, asking takes long.
    """
    if not hasattr(os, "posix_fadvise") or not file.is_file():
        return
    at, end = 0, min(file.stat().st_size, physical_bytes() // 4)
    while at < end:
        at = _advise(file, at, end, _READ_BYTES, os.POSIX_FADV_WILLNEED, time.perf_counter() + step_s)
        yield


def _advise(file: Path, begin: int, end: int, step: int, advice: int, until: float | None = None) -> int:
    """Advise on `step` bytes at a time; returns how far it came, and `end` where the kernel refuses."""
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
    """Return the machine's memory in bytes; 0 where it does not say."""
    try:
        return max(os.sysconf("SC_PHYS_PAGES"), 0) * max(os.sysconf("SC_PAGE_SIZE"), 0)
    except (ValueError, OSError):
        return 0


class Eviction:
    """Drops the pages that one environment has written. Only its committing thread calls `look`; any calls `stop`."""

    def __init__(self, path: Path, first: int, remap: Callable[[], bool]) -> None:
        """Keep the bytes before `first`, the root pages, of the environment in the directory `path`.

        `remap` has LMDB map the file again; False where it cannot because a thread reads.
        """
        self._file = path / "data.mdb"
        self._dropped = first
        self._remap = remap
        self._lock = threading.Lock()
        self._stopped = False

    def look(self, used: int) -> None:
        """Evict what is far enough before `used`, the bytes of the file in use; the rest later."""
        end = (used - KEPT_BYTES) // PIECE_BYTES * PIECE_BYTES
        if self._stopped or end <= self._dropped:
            return
        with self._lock:
            if self._stopped or not self._remap():
                return
            if not self._dropped < end <= used - KEPT_BYTES:
                raise BrokenInvariant(f"{self._file}: dropping from {self._dropped} to {end} of {used}")
            drop(self._file, self._dropped, end)
            self._dropped = end

    def stop(self) -> None:
        """Drop nothing any more, and wait for a drop that is under way."""
        if not self._stopped:
            with self._lock:
                self._stopped = True
