"""Preallocated space at the end of an LMDB file that grows little by little.

A synced write that makes a file longer has the file system write its journal as well; one into blocks that are there
does not, and is waited for half as long. LMDB makes its file longer page by page. So where commits are small, zeros are
written past the end of the file now and then, for LMDB to overwrite; what lies past its last page it never looks at.

Never more than an eighth of the file, or 64 KiB, nor where the disk is nearly full: then LMDB is left to itself.
"""

from __future__ import annotations

import os
from pathlib import Path

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
