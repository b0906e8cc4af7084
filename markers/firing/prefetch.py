"""Reading the files of partitions that have begun into the page cache, ahead of those who read their messages.

What was written to a day to come was dropped from it (`store/env/eviction.py`), and messages that are due are read one
here,
one there: each would wait for the disk. So what this process dropped of a partition is asked for before it is loaded,
and all of its file where there is no snapshot, since loading reads it from beginning to end then, and a process before
this one may have dropped it. The rest is asked for a piece at a time when there is nothing else to do. What is cached
costs next to nothing.

In all files up to a quarter of memory. A file counts until its partition is deleted; but one that has closed, which
somebody may be slow to read, makes room for one that has not.

For the owner of the tick alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from ...store.env import page_cache

PIECE_BYTES = 4 << 20
"""Asked for in one step."""

_STEP_S = 0.004
"""How long a step goes on asking."""


class _File:
    """A file of which the bytes from `at` on have not been asked for."""

    __slots__ = ("at", "path", "size")

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.at = 0


class Warming:
    """The partitions of a store whose files are read ahead."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: of all files together; None: a quarter of the memory of the machine."""
        self._limit = page_cache.physical_bytes() // 4 if limit_bytes is None else limit_bytes
        self._files: dict[int, _File] = {}
        self._left: dict[int, _File] = {}
        self._open: set[int] = set()
        self._counted = 0
        """Bytes of all files before their `at`."""

    def begun(
        self,
        start_ms: int,
        directory: Path,
        dropped: int,
        loading: Iterator[bool],
        reads_all: Callable[[], bool] = lambda: False,
    ) -> Iterator[bool]:
        """The partition at `start_ms` is to be loaded by the steps of `loading`: what its file holds by now is read.

        The first `dropped` bytes of the file, which lies in `directory`, are not in the page cache; `reads_all`, asked
        at the first step: `loading` reads all of it. Returns the steps that ask for them, a few ms each (False: it
        would not pay to fire before the next), and then those of `loading`.
        """
        self.forget(start_ms)
        path = directory / "data.mdb"
        try:
            size = path.stat().st_size
        except OSError:  # loading will say so
            return loading
        file = self._files[start_ms] = self._left[start_ms] = _File(path, size)
        self._open.add(start_ms)
        return chain(self._ask_for(start_ms, file, min(dropped, size), reads_all), loading)

    def _ask_for(self, start_ms: int, file: _File, limit: int, reads_all: Callable[[], bool]) -> Iterator[bool]:
        if reads_all():
            limit = file.size
        while file.at < limit and self._has_room():
            self._ask(start_ms, file)
            yield False

    def closed(self, start_ms: int) -> None:
        """A partition closed; its messages may still be to be read."""
        self._open.discard(start_ms)

    def forget(self, start_ms: int) -> None:
        """A partition was deleted."""
        self._open.discard(start_ms)
        self._left.pop(start_ms, None)
        file = self._files.pop(start_ms, None)
        if file is not None:
            self._counted -= file.at

    def is_due(self) -> bool:
        """Whether `step` has something to do."""
        return self._next() is not None

    def step(self) -> None:
        """Ask for the next piece, if there is one: a few ms."""
        start_ms = self._next()
        if start_ms is None:
            return
        while not self._has_room() and (closed := self._closed_before()) is not None:
            self.forget(closed)
        if self._has_room():
            self._ask(start_ms, self._left[start_ms])

    def _ask(self, start_ms: int, file: _File) -> None:
        before = file.at
        file.at = page_cache.fetch(file.path, before, min(before + PIECE_BYTES, file.size), _STEP_S)
        self._counted += file.at - before
        if file.at >= file.size:
            del self._left[start_ms]

    def _has_room(self) -> bool:
        return self._counted + PIECE_BYTES <= self._limit

    def _next(self) -> int | None:
        """The start of the partition whose turn it is; None: nothing is left, or there is no room for it."""
        if not self._left:
            return None
        if self._has_room():
            return next(iter(self._left))
        if self._closed_before() is None:
            return None
        return min((start_ms for start_ms in self._open if start_ms in self._left), default=None)

    def _closed_before(self) -> int | None:
        """The first partition that has closed and counts."""
        return next((start for start, file in self._files.items() if start not in self._open and file.at), None)
