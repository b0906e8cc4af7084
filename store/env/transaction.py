"""A write transaction shared by the work of several callers; it seals the records that it stores.

It commits nothing itself: the environment does, and says what a unit of work may do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import lmdb

from ..codec.bodies import Buffer
from ..codec.format import NOT_COPIED, copy_key, seal, unseal
from ..errors import BrokenInvariant
from .claims import Claims
from .memtable import Applied, Memtable, apply_rows


class Staged(Protocol):
    """Something that collects during a transaction and is written once at its end."""

    def flush(self, transaction: StagingTransaction) -> None:
        """Write what was collected; runs once all work of the commit is done."""

    def committed(self) -> None:
        """The transaction is on disk; runs in commit order."""


S = TypeVar("S", bound=Staged)


class StagingTransaction(ABC):
    """The face that a commit of an environment and a group of the write-ahead log show to a unit of work."""

    __slots__ = ("_after", "_claims", "_owners", "_staged", "entries")

    def __init__(self, claims: Claims | None) -> None:
        """`claims` are those on the logs that are appended to; None where there is no write-ahead log."""
        self._claims = claims
        self._owners: list[object] = []
        self.entries = 0
        """Entries appended to ledgers; counted when they are written, at the end."""
        self._staged: dict[object, Staged] = {}
        self._after: list[Callable[[], None]] = []

    @abstractmethod
    def put(self, key: bytes, fields: bytes) -> None:
        """Store a small record, replacing what is there."""

    @abstractmethod
    def insert_run(self, key: bytes, value: Buffer) -> None:
        """Store a run under a key that must be new."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Read the fields of a small record."""

    @abstractmethod
    def claim(self, owner: object) -> None:
        """Reserve `owner`, a log or a record, for this transaction until it ends."""

    def stage(self, owner: object, make: Callable[[], S]) -> S:
        """Return the collector of the log `owner`, made at first use; an owner has collectors of one type."""
        staged = self._staged.get(owner)
        if staged is None:
            self.claim(owner)
            staged = self._staged[owner] = make()
        return cast(S, staged)

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Have `callback` run by the leader once the transaction is durable; it must not raise."""
        self._after.append(callback)

    def flush(self) -> None:
        """Write what was staged, once all work is done. For the leader."""
        for staged in self._staged.values():
            staged.flush(self)

    def committed(self) -> None:
        """Run the `after_commit` callbacks, in order. For the leader."""
        for staged in self._staged.values():
            staged.committed()
        for callback in self._after:
            callback()

    def release(self) -> None:
        """Give the claims back, whatever has become of the transaction. For the leader; twice does nothing."""
        if self._claims is not None and self._owners:
            self._claims.release(self, self._owners)
            self._owners = []


class Transaction(StagingTransaction):
    """A write transaction of LMDB shared by the work of several callers.

    Its first work is to apply the environment's unapplied rows; those of a log are applied before it is appended to.
    """

    __slots__ = ("_applied", "_memtable", "last_run", "raw")

    def __init__(self, raw: lmdb.Transaction, last_run: bytes, memtable: Memtable | None = None) -> None:
        super().__init__(None if memtable is None else memtable.claims)
        self.raw = raw
        self.last_run = last_run
        """Key of the last run of the environment, or a bound below every run."""
        self._memtable = memtable
        self._applied = None if memtable is None else Applied(memtable)
        self._apply()

    def claim(self, owner: object) -> None:
        """Reserve `owner`, a log or a record, for this transaction, and apply its unapplied rows."""
        if self._claims is not None:
            self._owners.append(owner)
            self._claims.take(owner, self)
            self._apply()

    def _apply(self) -> None:
        if self._memtable and self._applied is not None:
            apply_rows(self._applied, self._memtable, self)

    def flush(self) -> None:
        """Apply the rows that came in while the work was done, then write what was staged.

        So no commit refers to an entry of this environment that is not applied by it or before it.
        """
        self._apply()
        super().flush()

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

    def insert_run(self, key: bytes, value: Buffer) -> None:
        """Store a run under a key that must be new, appended where it is past every other key.

        Invariant: LMDB answers True; False would mean that nothing was stored.
        """
        at_end = key > self.last_run
        if not self.raw.put(key, value, overwrite=False, append=at_end):
            raise BrokenInvariant(f"key {key.hex()} is there already or out of order")
        if at_end:
            self.last_run = key

    def committed(self) -> None:
        """Have the memtable forget the applied rows, and run the callbacks. For the environment."""
        if self._applied is not None:
            self._applied.committed()
        super().committed()
