"""A write transaction shared by the work of several callers; it seals the records that it stores.

It commits nothing itself: the environment does, and says what a unit of work may do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar

import lmdb

from ..codec.bodies import Buffer
from ..codec.format import NOT_COPIED, copy_key, seal, unseal
from ..errors import BrokenInvariant, StoreFailed
from .claims import Claims
from .memtable import Applied, Memtable, apply_rows


class Staged(Protocol):
    """The state of a log as a transaction leaves it."""

    def committed(self) -> None:
        """The transaction is on disk; runs in commit order."""


class LogEnd(Protocol):
    """The committed end of a ledger."""

    entries: int
    """The id of the next entry."""


class AppendedLog(Protocol):
    """A log of one ledger that transactions append to."""

    @property
    def ledger(self) -> LogEnd: ...


S = TypeVar("S", bound=Staged)


class LogEnds(ABC):
    """The ends of the logs that are appended to."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: dict[AppendedLog, int] = {}
        """By claimed log, the id of the entry that is appended next."""

    @abstractmethod
    def claim(self, owner: object) -> None:
        """Reserve `owner`, a log or a record, until the commit or group ends."""

    def end_of(self, log: AppendedLog) -> int:
        """Return the id of a log's next entry; the log is claimed at first."""
        end = self._ends.get(log)
        if end is None:
            self.claim(log)
            end = log.ledger.entries
        return end

    def move_end(self, log: AppendedLog, end: int) -> None:
        """Append entries of a log up to `end`. REQUIRES: `end_of` was asked."""
        self._ends[log] = end


class StagingTransaction(LogEnds):
    """The face that a commit of an environment and a group of the write-ahead log show to a unit of work."""

    __slots__ = ("_after", "_staged")

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[object, Staged] = {}
        self._after: list[Callable[[], object]] = []

    @abstractmethod
    def put(self, key: bytes, fields: bytes) -> None:
        """Store a small record, replacing what is there."""

    @abstractmethod
    def insert_run(self, key: bytes, value: Buffer, count: int, heard: Callable[[], object] | None = None) -> None:
        """Store a run of `count` entries under a key that must be new; `heard`: as `appended`."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Read the fields of a small record."""

    @abstractmethod
    def appended(self, callback: Callable[[], object]) -> None:
        """Have memory hear of an append once it is durable: callbacks run in the order of appends."""

    def stage(self, owner: object, make: Callable[[], S]) -> S:
        """Return the state of the log `owner`, made at first use; an owner has states of one type."""
        staged = self._staged.get(owner)
        if staged is None:
            self.claim(owner)
            staged = self._staged[owner] = make()
        return staged  # type: ignore[return-value]

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Have `callback` run by the leader once the transaction is durable; it must not raise."""
        self._after.append(callback)

    def committed(self) -> None:
        """Have memory know what was staged, then run the `after_commit` callbacks, in order. For the leader."""
        for staged in self._staged.values():
            staged.committed()
        for callback in self._after:
            callback()


class Transaction(StagingTransaction):
    """A write transaction of LMDB shared by the work of several callers.

    Its first work is to apply the environment's unapplied rows; those of a log are applied before it is appended to.
    """

    __slots__ = ("_applied", "_claims", "_memtable", "_owners", "entries", "last_run", "raw")

    def __init__(self, raw: lmdb.Transaction, last_run: bytes, memtable: Memtable | None = None) -> None:
        super().__init__()
        self._claims: Claims | None = None if memtable is None else memtable.claims
        """Claims on the logs that are appended to; None where there is no write-ahead log."""
        self._owners: list[object] = []
        self.entries = 0
        """Entries appended to ledgers."""
        self.raw = raw
        self.last_run = last_run
        """Key of the last run of the environment, or a bound below every run."""
        self._memtable = memtable
        self._applied = None if memtable is None else Applied(memtable)
        self.apply()

    def claim(self, owner: object) -> None:
        """Reserve `owner`, a log or a record, for this transaction, and apply its unapplied rows."""
        if self._claims is not None:
            self._owners.append(owner)
            self._claims.take(owner, self)
            self.apply()

    def apply(self) -> None:
        """Apply the rows that are not applied yet.

        Also once all work is done: so no commit refers to an entry of this environment that is not applied by it or
        before it.
        """
        if self._memtable and self._applied is not None:
            apply_rows(self._applied, self._memtable, self)

    def get(self, key: bytes) -> bytes | None:
        """Read and verify the fields of a small record. Raises CorruptRecord."""
        value = self.raw.get(key)
        return None if value is None else unseal(key, value)

    def put(self, key: bytes, fields: bytes) -> None:
        """Store a small record with its checksum, and its copy, replacing what is there."""
        self.raw.put(key, seal(key, fields))
        if key[0] not in NOT_COPIED:
            copy = copy_key(key)
            self.raw.put(copy, seal(copy, fields))

    def delete(self, key: bytes) -> bool:
        """Remove a record and its copy; False when it is not there."""
        if key[0] not in NOT_COPIED:
            self.raw.delete(copy_key(key))
        return bool(self.raw.delete(key))

    def insert_run(self, key: bytes, value: Buffer, count: int, heard: Callable[[], object] | None = None) -> None:
        """Store a run under a key that must be new, appended where it is past every other key.

        Invariant: LMDB answers True; False would mean that nothing was stored.
        """
        at_end = key > self.last_run
        if not self.raw.put(key, value, overwrite=False, append=at_end):
            raise BrokenInvariant(f"key {key.hex()} is there already or out of order")
        if at_end:
            self.last_run = key
        self.entries += count
        if heard is not None:
            self._after.append(heard)

    def appended(self, callback: Callable[[], object]) -> None:
        """Have memory hear of an append once it is durable."""
        self._after.append(callback)

    def committed(self) -> None:
        """Have the memtable forget the applied rows, and run the callbacks. For the environment."""
        if self._applied is not None:
            self._applied.committed()
        super().committed()

    def release(self, failed: StoreFailed | None = None) -> None:
        """Give the claims back, see `Claims.release`. For the leader; twice does nothing."""
        if self._claims is not None and self._owners:
            self._claims.release(self, self._owners, failed)
            self._owners = []
