"""Vacant: of a partition's environment that is not on disk yet. It reads as an LMDB without rows, under its memtable.

A partition comes into being by a group of the write-ahead log, which has its registration in the catalog and its first
run. No directory is made for a send: the first commit of its environment makes it, as a rule that of the checkpoint
which applies these rows; it gets its place with the rows in it. Invariant: the directory is on disk before the segment
with the registration is released. So all of a vacant partition is in the log, and a partition whose directory is
missing is vacant where the log has its registration, and damaged where it has not.

Who reads need not know: an `Environment` that is vacant has these in place of LMDB's, and goes over to LMDB where this
process makes the directory, or another has made it by the time of a read. A reader that looks at the log first and for
the directory then misses nothing: where there is none, no row had been applied when it looked.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import lmdb

from ..files.pages import FewPages

if TYPE_CHECKING:
    from .transaction import LmdbTransaction


class Making(Protocol):
    """Makes the directory of a vacant environment."""

    def directory(self) -> AbstractContextManager[Path]:
        """Give the path of a directory that is to be made; when the block ends it is durably in its place, whole.

        After an error of the block, or one of its own (StoreFull, StoreUnavailable), it is gone.
        """

    def describe(self, transaction: "LmdbTransaction") -> None:
        """Store in the first transaction what each such directory has."""


class _VacantLmdb:
    """The calls of lmdb.Environment that an `Environment` makes before its first commit."""

    def begin(self, *, buffers: bool) -> FewPages:
        return FewPages([])

    def info(self) -> dict[str, int]:
        return {"last_txnid": 0}

    def set_mapsize(self, size: int) -> None:
        """No map to change."""

    def sync(self, force: bool) -> None:
        """No file to sync."""

    def close(self) -> None:
        """No file to close."""


VACANT = cast(lmdb.Environment, _VacantLmdb())
"""LMDB's environment of an `Environment` that is vacant; told by identity."""
