"""The face that a group of the write-ahead log and a commit of LMDB show to a unit of work, and that of LMDB.

It commits nothing itself: the environment, or the writer of the log, does, and says what a unit of work may do.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar

import lmdb

from ..codec.bits import BitChange, Bits, bits_of
from ..codec.bodies import Buffer
from ..codec.format import NOT_COPIED, copy_key, seal, unseal
from ..codec.run import ReadBodies
from ..errors import BrokenInvariant
from .memtable import Applied, Memtable, Reads, ReadTransaction, Unapplied, apply_rows


class Staged(Protocol):
    """The state of a log as a transaction leaves it."""

    def committed(self) -> None:
        """The transaction is on disk; runs in commit order."""


O = TypeVar("O")  # noqa: E741
S = TypeVar("S", bound=Staged)
T = TypeVar("T")


class Staging:
    """The logs, and what else follows the disk, as a transaction leaves them."""

    __slots__ = ("_staged",)

    def __init__(self) -> None:
        self._staged: dict[object, Staged] = {}

    def stage(self, owner: O, make: Callable[[O], S]) -> S:
        """Return the state of the log `owner`, made of it at first use; an owner has states of one type."""
        staged = self._staged.get(owner)
        if staged is None:
            staged = self._staged[owner] = make(owner)
        return staged  # type: ignore[return-value]


class Transaction(Staging, ABC):
    """Reads and writes of one environment that take effect together, or not at all."""

    __slots__ = ("_after",)

    def __init__(self) -> None:
        super().__init__()
        self._after: list[Callable[[], object]] = []

    @property
    @abstractmethod
    def raw(self) -> Reads:
        """A view of the environment, with the small records that this transaction has changed."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Read and verify the fields of a small record. Raises CorruptRecord."""

    @abstractmethod
    def put(self, key: bytes, fields: bytes) -> None:
        """Store a small record, replacing what is there."""

    @abstractmethod
    def delete(self, key: bytes) -> bool:
        """Remove a small record; False when it is not there."""

    def unite(self, key: bytes, members: Bits) -> Bits:
        """Unite a record that is a bitmap with members; those that it had not. Raises CorruptRecord."""
        fresh = members - bits_of(key, self.get(key))
        if fresh:
            self.change_bits(key, BitChange(fresh, bits_of(key, None)))
        return fresh

    def change_bits(self, key: bytes, change: BitChange) -> None:
        """Change a record that is a bitmap."""
        fields = change.fields(key, self.get(key))
        if fields is None:
            self.delete(key)
        else:
            self.put(key, fields)

    @abstractmethod
    def insert_run(self, key: bytes, value: Buffer, count: int) -> None:
        """Store a run of `count` entries under a key that must be new."""

    def to(self, start_ms: int, memtable: Memtable) -> "Transaction":
        """The rows of a partition's environment, which take effect with these: of a group of the log alone."""
        raise BrokenInvariant(f"a commit of LMDB writes to partition {start_ms}")

    @property
    def main(self) -> "Transaction":
        """The rows of the main environment, which take effect with these: of a group of the log alone."""
        raise BrokenInvariant("a commit of LMDB writes to the main environment of a group")

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Have `callback` run by the leader once the transaction is durable; it must not raise."""
        self._after.append(callback)


Work = Callable[[Transaction], T]
"""A unit of work; it may run more than once, and what it did before counts for nothing then."""


class LmdbTransaction(Transaction):
    """A write transaction of LMDB; it seals the records that it stores.

    Its first work is to apply the environment's unapplied rows.
    """

    __slots__ = ("_applied", "_lmdb", "_memtable", "_read_bodies", "entries", "last_run")

    def __init__(
        self,
        transaction: lmdb.Transaction,
        last_run: bytes,
        memtable: Memtable | None = None,
        read_bodies: ReadBodies | None = None,
    ) -> None:
        super().__init__()
        self._read_bodies = read_bodies
        self.entries = 0
        """Entries appended to ledgers."""
        self._lmdb = transaction
        self.last_run = last_run
        """Key of the last run of the environment, or a bound below every run."""
        self._memtable = memtable
        self._applied = None if memtable is None else Applied(memtable)
        self.apply()

    @property
    def raw(self) -> lmdb.Transaction:
        """The transaction of LMDB, to write to as well."""
        return self._lmdb

    @property
    def reads(self) -> ReadTransaction:
        """A read transaction of what it sees, with the bodies of large runs."""
        return ReadTransaction(self._lmdb, Unapplied.nothing(), self._read_bodies)

    def apply(self) -> None:
        """Apply the rows that are not applied yet.

        Also once all work is done: so no commit refers to an entry of this environment that is not applied by it or
        before it.
        """
        if self._memtable and self._applied is not None:
            apply_rows(self._applied, self._memtable, self)

    def get(self, key: bytes) -> bytes | None:
        """Read and verify the fields of a small record. Raises CorruptRecord."""
        value = self._lmdb.get(key)
        return None if value is None else unseal(key, value)

    def put(self, key: bytes, fields: bytes) -> None:
        """Store a small record with its checksum, and its copy, replacing what is there."""
        self._lmdb.put(key, seal(key, fields))
        if key[0] not in NOT_COPIED:
            copy = copy_key(key)
            self._lmdb.put(copy, seal(copy, fields))

    def delete(self, key: bytes) -> bool:
        """Remove a record and its copy; False when it is not there."""
        if key[0] not in NOT_COPIED:
            self._lmdb.delete(copy_key(key))
        return bool(self._lmdb.delete(key))

    def insert_run(self, key: bytes, value: Buffer, count: int) -> None:
        """Store a run under a key that must be new, appended where it is past every other key.

        Invariant: LMDB answers True; False would mean that nothing was stored.
        """
        at_end = key > self.last_run
        if not self._lmdb.put(key, value, overwrite=False, append=at_end):
            raise BrokenInvariant(f"key {key.hex()} is there already or out of order")
        if at_end:
            self.last_run = key
        self.entries += count

    def committed(self) -> None:
        """Have the memtable forget the applied rows, and memory hear of the rest, in order. For the environment."""
        if self._applied is not None:
            self._applied.committed()
        for staged in self._staged.values():
            staged.committed()
        for callback in self._after:
            callback()
