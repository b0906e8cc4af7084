"""Vacant: of a partition's environment that is not on disk yet. It reads as an LMDB without rows, under its memtable.

A partition comes into being by a group of the write-ahead log, which has its registration in the catalog and its first
run. No directory is made for a send: the first commit of its environment makes it, as a rule that of the checkpoint
which applies these rows. Invariant: the directory is on disk before the segment with the registration is released. So
all of a vacant partition is in the log, and a partition whose directory is missing is vacant where the log has its
registration, and damaged where it has not.

Who reads need not know: an `Environment` that is vacant has these in place of LMDB's, and goes over to LMDB where this
process makes the directory, or another has made it by the time of a read. A reader that looks at the log first and for
the directory then misses nothing: where there is none, no row had been applied when it looked.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, cast

import lmdb


class _VacantCursor:
    """A cursor that finds nothing."""

    def _nowhere(self, *_: object) -> bool:
        return False

    set_range = first = last = next = prev = _nowhere

    def key(self) -> bytes:
        return b""

    value = key

    def item(self) -> tuple[bytes, bytes]:
        return b"", b""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(())


class _VacantTransaction:
    """A read transaction without rows, older than the first commit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""

    def get(self, key: bytes, default: Any = None) -> Any:
        return default

    def cursor(self) -> _VacantCursor:
        return _VacantCursor()

    def stat(self) -> dict[str, int]:
        return dict.fromkeys(("psize", "depth", "branch_pages", "leaf_pages", "overflow_pages", "entries"), 0)

    def id(self) -> int:
        return 0

    def abort(self) -> None:
        """Nothing to end."""


class _VacantLmdb:
    """The calls of lmdb.Environment that an environment makes before its first commit."""

    def begin(self, *, buffers: bool) -> _VacantTransaction:
        return _VacantTransaction()

    def stat(self) -> dict[str, int]:
        return _VacantTransaction().stat()

    def info(self) -> dict[str, int]:
        return {"last_txnid": 0, "last_pgno": -1}

    def set_mapsize(self, size: int) -> None:
        """No map to change."""

    def sync(self, force: bool) -> None:
        """No file to sync."""

    def close(self) -> None:
        """No file to close."""


VACANT = cast(lmdb.Environment, _VacantLmdb())
"""LMDB's environment of an `Environment` that is vacant; told by identity."""
