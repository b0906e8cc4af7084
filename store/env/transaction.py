"""A write transaction shared by the work of several callers: sealed records in, sealed records out.

It commits nothing itself; the environment does, and says what a unit of work may do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import lmdb

from ..codec.copies import NOT_COPIED, copy_key
from ..codec.format import seal, unseal
from ..errors import BrokenInvariant


class Staged(Protocol):
    """Something that collects during a transaction and is written once at its end."""

    def flush(self, transaction: Transaction) -> None:
        """Write what was collected; runs once all work of the commit is done."""

    def committed(self) -> None:
        """The transaction is on disk; runs in commit order."""


S = TypeVar("S", bound=Staged)


class Transaction:
    """A write transaction shared by the work of several callers; sealed records in, sealed records out."""

    __slots__ = ("_after", "_staged", "entries", "last_run", "raw")

    def __init__(self, raw: lmdb.Transaction, last_run: bytes) -> None:
        self.raw = raw
        self.last_run = last_run
        """Key of the last run of the environment, or a bound below every run."""
        self.entries = 0
        """Entries appended to ledgers; counted when they are written, at the end."""
        self._staged: dict[object, Staged] = {}
        self._after: list[Callable[[], None]] = []

    def get(self, key: bytes) -> bytes | None:
        """Fields of a small record, verified. Raises CorruptRecord."""
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

    def insert_run(self, key: bytes, value: bytes | bytearray) -> None:
        """Store a run under a key that must be new; past every other key it is appended.

        Invariant: LMDB answers True; False would mean that nothing was stored.
        """
        at_end = key > self.last_run
        if not self.raw.put(key, value, overwrite=False, append=at_end):
            raise BrokenInvariant(f"key {key.hex()} is there already or out of order")
        if at_end:
            self.last_run = key

    def stage(self, owner: object, make: Callable[[], S]) -> S:
        """The collector of `owner` in this transaction, made at first use; an owner has collectors of one type."""
        staged = self._staged.get(owner)
        if staged is None:
            staged = self._staged[owner] = make()
        return cast(S, staged)

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Have `callback` run by the leader once the transaction is on disk; it must not raise."""
        self._after.append(callback)

    def flush(self) -> None:
        """Write what was staged. For the environment, once all work is done."""
        for staged in self._staged.values():
            staged.flush(self)

    def committed(self) -> None:
        """Run the `after_commit` callbacks, in order. For the environment."""
        for staged in self._staged.values():
            staged.committed()
        for callback in self._after:
            callback()
