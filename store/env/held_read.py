"""One environment as of one commit, for as long as it is held; a backup copies it beside readers and writers.

Meanwhile the environment's map does not move, its file reuses no page that the commit can reach, and closing the
environment waits. Any thread may renew or release it, one at a time.
"""

import os
from collections.abc import Callable
from pathlib import Path

import lmdb

from ..errors import BrokenInvariant
from ..files.directory import sync_directory
from ..files.system_errors import explained
from .reader_gate import ReaderGate


class HeldRead:
    """A read transaction that outlives the call that began it."""

    def __init__(
        self,
        environment: lmdb.Environment,
        gate: ReaderGate,
        begin: Callable[[], lmdb.Transaction | None],
        follow: Callable[[], None],
    ) -> None:
        """`begin` gives None where another process has grown the file; `follow` takes over the new size.

        REQUIRES: the caller has entered `gate`; `release` leaves it.
        """
        self._environment = environment
        self._gate = gate
        self._begin = begin
        self._follow = follow
        self._raw: lmdb.Transaction | None = None
        self.renew()

    @property
    def raw(self) -> lmdb.Transaction:
        """The transaction. Its values are memoryviews, valid until `renew` or `release`."""
        if self._raw is None:
            raise BrokenInvariant("a held read is used after its release")
        return self._raw

    def renew(self) -> None:
        """Move on to the newest commit. Takes some us."""
        self._abort()
        while (raw := self._begin()) is None:
            self._gate.leave()
            try:
                self._follow()
            finally:
                self._gate.enter()
        self._raw = raw

    def moved(self) -> bool:
        """True where any process has committed after the commit that it sees. About 1 us."""
        newest: int = self._environment.info()["last_txnid"]
        return newest != self.raw.id()

    def copy(self, path: Path) -> None:
        """Copy the environment as it sees it into `path`, an existing empty directory, compacted and on disk.

        Raises StoreFull, ResourceShortage, StoreUnavailable.
        """
        with explained(path):
            self._environment.copy(os.fspath(path), compact=True, txn=self.raw)
            with (path / "data.mdb").open("rb") as file:
                os.fsync(file.fileno())
            sync_directory(path)

    def release(self) -> None:
        """Let the environment go on; a second call does nothing."""
        if self._raw is not None:
            self._abort()
            self._gate.leave()

    def _abort(self) -> None:
        if self._raw is not None:
            self._raw.abort()
            self._raw = None
