"""One environment as of one commit, for as long as it is held; a backup copies it beside readers and writers.

Meanwhile the environment's map does not move, its file reuses no page that the commit can reach, this process removes
no body file beside it, and closing the environment waits. Any thread may renew or release it, one at a time.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import lmdb

from ..errors import BrokenInvariant
from ..files.directory import make_directory, sync_directory
from ..files.system_errors import explained
from .body_file import body_file, body_files
from .reader_gate import Reading

_COPIED_AT_ONCE = 1 << 20


class HeldRead:
    """A read transaction that outlives the call that began it."""

    def __init__(
        self,
        lmdb_environment: Callable[[], lmdb.Environment],
        reading: Reading,
        begin: Callable[[], lmdb.Transaction | None],
        follow: Callable[[], None],
        directory: Path,
        released: Callable[[], None],
    ) -> None:
        """`begin` gives None where another process has grown the file; `follow` takes over the new size.

        directory: the environment's. released: called when it is released. REQUIRES: the caller has entered
        `reading`; `release` leaves it.
        """
        self._directory = directory
        self._released = released
        self._bodies: dict[int, BinaryIO] = {}
        """Open body files, by ledger id."""
        self._environment = lmdb_environment
        self._reading = reading
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

    @property
    def is_vacant(self) -> bool:
        """True where the environment had no directory (vacant.py)."""
        return self.raw.id() == 0

    def renew(self) -> None:
        """Move on to the newest commit. Takes some us."""
        self._abort()
        while (raw := self._begin()) is None:
            self._reading.__exit__()
            try:
                self._follow()
            finally:
                self._reading.__enter__()
        self._raw = raw

    def moved(self) -> bool:
        """True where any process has committed after the commit that it sees. About 1 us."""
        newest: int = self._environment().info()["last_txnid"]
        return newest != self.raw.id()

    def copy(self, path: Path) -> None:
        """Copy the environment as it sees it into `path`, an existing empty directory, compacted and on disk.

        Raises StoreFull, ResourceShortage, StoreUnavailable.
        """
        with explained(path):
            self._environment().copy(os.fspath(path), compact=True, txn=self.raw)
            with (path / "data.mdb").open("rb") as file:
                os.fsync(file.fileno())
            sync_directory(path)

    def keep_bodies(self) -> None:
        """Open the body files that there are, so that they can be copied when another process has removed them.

        Raises ResourceShortage.
        """
        with explained(self._directory):
            for ledger_id, path in body_files(self._directory).items():
                if ledger_id not in self._bodies:
                    with suppress(FileNotFoundError):
                        self._bodies[ledger_id] = path.open("rb")

    def copy_bodies(self, path: Path) -> list[Path]:
        """Copy the body files beside the environment in `path`, on disk; the copies. REQUIRES: LMDB's file is copied.

        They have more than what the held commit names where others append to them. Raises as `copy`.
        """
        copies = []
        with explained(path):
            for ledger_id in sorted({*body_files(self._directory), *self._bodies}):
                copy = body_file(path, ledger_id)
                make_directory(copy.parent)
                kept = self._bodies.pop(ledger_id, None)
                with kept or body_file(self._directory, ledger_id).open("rb") as source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target, _COPIED_AT_ONCE)
                    target.flush()
                    os.fsync(target.fileno())
                copies.append(copy)
            if copies:
                sync_directory(copies[0].parent)
        return copies

    def release(self) -> None:
        """Let the environment go on; a second call does nothing."""
        while self._bodies:
            self._bodies.popitem()[1].close()
        if self._raw is not None:
            self._abort()
            self._reading.__exit__()
            self._released()

    def _abort(self) -> None:
        if self._raw is not None:
            self._raw.abort()
            self._raw = None
