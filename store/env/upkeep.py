"""What follows from commits to one environment besides their data: the care for its file and its readers.

Now and then, so that a commit of one message does not pay for it. For the one thread that commits.

Preallocation, of a file that grows little by little: a synced write that makes a file longer has the file system write
its journal as well; one into blocks that are there does not, and is waited for half as long. LMDB makes its file longer
page by page. So where commits are small, zeros are written past the end of the file now and then, for LMDB to
overwrite; what lies past its last page it never looks at. Never more than an eighth of the file, or 64 KiB, nor where
the disk is nearly full: then LMDB is left to itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb

from .eviction import Eviction

COMMITS_A_LOOK = 16
"""Commits from one look at the length of the file to the next."""

_COMMITS_A_READER_CHECK = 1_000
"""Commits between two looks for readers that were killed inside a transaction: they would hold pages for ever."""

_SMALL_BYTES = 16 << 10
"""Commits that make the file longer by less, on average, are small."""

_LEAST_BYTES = 64 << 10
_MOST_BYTES = 1 << 20
_FREE_TIMES = 256
"""The disk must have so many times the bytes that are written."""


class Preallocation:
    """Preallocates the file of one environment. For the one thread that commits."""

    def __init__(self, path: Path, used: int) -> None:
        """`path` is the directory of the environment; `used`: the bytes of its file that are in use."""
        self._file = path / "data.mdb"
        self._used = used
        self._end = 0

    def look(self, used: int, commits: int) -> None:
        """Preallocate space for commits to come, after so many since the last time."""
        before, self._used = self._used, used
        grown = used - before
        if 0 < grown < commits * _SMALL_BYTES and self._used + 2 * grown > self._end:
            self._write_zeros(min(max(_LEAST_BYTES, self._used // 8), _MOST_BYTES))

    def _write_zeros(self, size: int) -> None:
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self._end = os.fstat(descriptor).st_size
            space = os.fstatvfs(descriptor)
            short = self._used + size - self._end
            if short > 0 and space.f_bavail * space.f_frsize >= _FREE_TIMES * size:
                self._end += os.pwrite(descriptor, bytes(short), self._end)
        except OSError:  # no free space after all: LMDB says so when it needs it
            pass
        finally:
            os.close(descriptor)


class Upkeep:
    """The upkeep of one environment that is open for writing."""

    def __init__(
        self,
        path: Path,
        environment: lmdb.Environment,
        map_anew: Callable[[], bool],
        *,
        synced: bool,
        evicts: bool,
    ) -> None:
        """`path` is its directory; `synced`: commits wait for the disk; `map_anew`, `evicts`: see Eviction."""
        self._environment = environment
        self._page_bytes: int = environment.stat()["psize"]
        self._commits = 0
        self._preallocation = Preallocation(path, self._used_bytes()) if synced else None
        self._eviction = Eviction(path, 2 * self._page_bytes, map_anew) if synced and evicts else None

    def _used_bytes(self) -> int:
        used: int = (self._environment.info()["last_pgno"] + 1) * self._page_bytes
        return used

    def committed(self) -> None:
        """Count a commit, and do what is to be done after it."""
        self._commits += 1
        if self._preallocation is not None and not self._commits % COMMITS_A_LOOK:
            used = self._used_bytes()
            self._preallocation.look(used, COMMITS_A_LOOK)
            if self._eviction is not None:
                self._eviction.look(used)
        if not self._commits % _COMMITS_A_READER_CHECK:
            with suppress(lmdb.Error):  # what is committed stays committed, whatever becomes of this
                self._environment.reader_check()

    def stop_evicting(self) -> None:
        """Drop nothing of the file from the page cache any more."""
        if self._eviction is not None:
            self._eviction.stop()
