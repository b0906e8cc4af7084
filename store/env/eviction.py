"""Page-cache eviction: what was written to an environment and will not be read soon leaves the page cache.

Messages of days to come would otherwise push out of memory what is read today, count to a container's limit, and each
of their pages would be one more that the kernel has to find memory for. So before the last `KEPT_BYTES` of the file,
which LMDB goes on reading to append to it, the pages are evicted piece by piece. LMDB's map is made anew before: pages
that are mapped stay, and the kernel maps those round the ones that are read. While a reader is inside, eviction waits.

Only forward: pages before the last one evicted that LMDB writes again stay in memory. Not for the main environment,
nor for a partition from `preload_ms` before its beginning on, nor with durability "none", whose pages are not on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ..errors import BrokenInvariant
from . import page_cache

PIECE_BYTES = 8 << 20
"""Dropped at once, or a multiple of it."""

KEPT_BYTES = 32 << 20
"""At least so much before the end of the file is kept."""


class Eviction:
    """Drops what one environment has written. `look` is for the one thread that commits, `stop` for any."""

    def __init__(self, path: Path, first: int, map_anew: Callable[[], bool]) -> None:
        """`path` is the directory of the environment; its bytes before `first`, the root pages, are kept.

        `map_anew` makes the map anew, or says False where it cannot because a thread reads.
        """
        self._file = path / "data.mdb"
        self._dropped = first
        self._map_anew = map_anew
        self._lock = threading.Lock()
        self._stopped = False

    def look(self, used: int) -> None:
        """Evict what is far enough before `used`, the bytes of the file in use; the rest later."""
        end = (used - KEPT_BYTES) // PIECE_BYTES * PIECE_BYTES
        if self._stopped or end <= self._dropped:
            return
        with self._lock:
            if self._stopped or not self._map_anew():
                return
            if not self._dropped < end <= used - KEPT_BYTES:
                raise BrokenInvariant(f"{self._file}: dropping from {self._dropped} to {end} of {used}")
            page_cache.drop(self._file, self._dropped, end)
            self._dropped = end

    def stop(self) -> None:
        """Drop nothing any more, nor be dropping anything once this returns."""
        if not self._stopped:
            with self._lock:
                self._stopped = True
