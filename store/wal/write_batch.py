"""Write batch: rows for several environments on their way into one group of the write-ahead log.

A unit of work appends to logs as it does in a transaction of LMDB (store/env/transaction.py). Its rows are durable when
the group is flushed; then they are added to the memtables of their environments, and memory hears of them.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from ..codec.bits import BitChange, Bits, bits_of
from ..codec.bodies import Buffer
from ..codec.format import PartitionRecord, PartitionState, Table, run_key, split_run_key, trailing_u64
from ..codec.run import HEADER, has_bodies, set_apart
from ..codec.run_lengths import ScatteredBatch, WholeRun
from ..config import KIB
from ..env.body_file import StagedBodies, body_path, end_of
from ..env.environment import Environment, Read
from ..env.memtable import ABSENT, Entry, LedgerRow, Memtable, ReadTransaction, Unapplied, changed
from ..env.transaction import Transaction
from ..errors import BrokenInvariant
from .segment import MAIN, SEVERAL, Apart, Group, GroupContent, Row, RowKind, pack_row


class EnvironmentBatch(Transaction):
    """The rows of one environment in a batch: of a partition's, which ask for nothing that is there."""

    __slots__ = ("_group", "memtable", "records", "start_ms")

    def __init__(self, group: "WriteBatch", start_ms: int, memtable: Memtable) -> None:
        self._staged, self._after = group._staged, group._after
        self._group = group
        self.records: dict[bytes, Entry] = {}
        """Small records as the group leaves them."""
        self.start_ms = start_ms
        self.memtable = memtable

    @property
    def raw(self) -> ReadTransaction:
        """There is none: who appends to a partition knows the end of its logs from memory."""
        raise BrokenInvariant("a group reads a partition")

    @property
    def main(self) -> "WriteBatch":
        """The rows of the main environment in the same group."""
        return self._group

    def to(self, start_ms: int, memtable: Memtable) -> "EnvironmentBatch":
        """The rows of a partition's environment in the same group."""
        return self._group.to(start_ms, memtable)

    def _entry(self, key: bytes) -> Entry:
        """The unapplied part of a small record, with the changes of the units so far."""
        entry = self.records.get(key, ABSENT)
        return self.memtable.view.records.get(key, ABSENT) if entry is ABSENT else entry

    def get(self, key: bytes) -> bytes | None:
        """Read and verify the fields of a small record. Raises CorruptRecord."""
        entry = self._entry(key)  # without a read, where that is all
        return self.raw.fields(key) if entry is ABSENT or isinstance(entry, BitChange) else entry

    def put(self, key: bytes, fields: bytes) -> None:
        """Store a small record, replacing what is there."""
        self.records[key] = fields
        self._group.add_row(RowKind.RECORD, self.start_ms, key, fields)

    def delete(self, key: bytes) -> bool:
        """Remove a small record; False when it is not there."""
        if self.raw.get(key) is None:
            return False
        self.records[key] = None
        self._group.add_row(RowKind.DELETE, self.start_ms, key, b"")
        return True

    def change_bits(self, key: bytes, change: BitChange) -> None:
        """Change a record that is a bitmap, by rows that say which members."""
        self.records[key] = changed(key, self._entry(key), change)
        if change.taken:
            self._group.add_row(RowKind.SUBTRACT, self.start_ms, key, change.taken.serialize())
        if change.united:
            self._group.add_row(RowKind.UNITE, self.start_ms, key, change.united.serialize())

    def unite(self, key: bytes, members: Bits) -> Bits:
        """Unite a record that is a bitmap with members; those that it had not."""
        entry = self._entry(key)
        before = entry.united if isinstance(entry, BitChange) and entry.whole else bits_of(key, self.get(key))
        fresh = members if members.isdisjoint(before) else members - before
        if fresh:
            self.records[key] = BitChange(before | fresh, bits_of(key, None), True)
            self._group.add_row(RowKind.UNITE, self.start_ms, key, fresh.serialize())
        return fresh

    def insert_run(self, key: bytes, value: Buffer, count: int) -> None:
        """Store a run of `count` entries under a key that must be new."""
        group = self._group
        ledger_id, first = split_run_key(key)
        if count > 1 and self.memtable.directory is not None:  # a message alone waits for one flush
            value = group.set_apart(self.start_ms, self.memtable.directory, ledger_id, key, value)
        group.add_row(RowKind.RUN, self.start_ms, key, value)
        group.runs.append((self.memtable, ledger_id, WholeRun(first, first + count, value)))
        group.entries += count


LARGE_BYTES = 96 * KIB
"""Bodies of so many bytes for one ledger are written once, to its body file: fewer cost less twice than another flush.

One producer of batches for seven logs, 140 KiB each, writes half as much in three quarters of the time, and with two
fifths of its processor's; with one log it is twice as quick.
"""


def is_large(size: int, of: int = 0) -> bool:
    """Return whether bodies of `size` bytes for one ledger go to its body file; `of`: those of a batch over ledgers.

    The files of a batch are flushed side by side, so that a quarter for each is enough where all of it is large.
    """
    return size >= LARGE_BYTES or (of >= LARGE_BYTES and size >= LARGE_BYTES // 4)


_NOTHING_READ = nullcontext()
_LET_GO: Any = None


class WriteBatch(EnvironmentBatch):
    """The rows of one group: of the main environment, and with `to` of partitions'.

    A unit of work writes to it; the leader of the WAL writer does the rest.
    """

    def __init__(self, environment: Environment, memtable: Memtable) -> None:
        """`environment` is the main one, `memtable` its own."""
        self._staged, self._after, self._group = {}, [], self
        self.records, self.start_ms, self.memtable = {}, MAIN, memtable
        self._environment = environment
        self._partitions: dict[int, EnvironmentBatch] = {}
        self._reading: Read | nullcontext[None] = _NOTHING_READ
        self._reads: ReadTransaction | None = None
        self._parts: list[Buffer] = []
        """The rows as they are written, three parts each."""
        self.weight = 0
        """Its rows, weighed by the time that reading them back takes: each log of a batch is half a row."""
        self.bodies: dict[str, StagedBodies] = {}
        """By body file, what is appended to it before the group."""
        self.spread = 0
        """Bytes of the batch over ledgers that is being appended."""
        self.apart: list[Apart] = []
        """Where those bodies lie, in the order of its rows; those that follow each other are one."""
        self.entries = 0
        """Entries appended to ledgers."""
        self.runs: list[tuple[Memtable, int, LedgerRow]] = []
        """The runs that memtables get, with their ledgers' ids; in the order of appends."""

    @property
    def raw(self) -> ReadTransaction:
        """A view of the main environment, with the small records of the units of work so far; until `end_reads`."""
        if self._reads is None:
            self._reading = reading = self._environment.read()  # noted first: an interrupt may come as it has begun
            self._reads = reading.__enter__()
            self._reads.changed = self.records
        return self._reads

    def to(self, start_ms: int, memtable: Memtable) -> EnvironmentBatch:
        """The rows of the environment of a partition."""
        batch = self._partitions.get(start_ms)
        if batch is None:
            batch = self._partitions[start_ms] = EnvironmentBatch(self, start_ms, memtable)
        return batch

    def add_row(self, kind: RowKind, start_ms: int, key: bytes, value: Buffer) -> None:
        """Add a row of one environment."""
        self._parts += (pack_row(kind, start_ms, len(key), len(value)), key, value)
        self.weight += 1

    def add_batch(self, batch: ScatteredBatch, memtables: Iterable[Memtable]) -> None:
        """Store a batch of messages for several logs as one row; `memtables`: of each of its logs."""
        self.add_row(RowKind.BATCH, SEVERAL, b"", batch.value)
        self.runs += zip(memtables, batch.ledger_ids, repeat(batch))
        self.entries += sum(batch.counts)
        self.weight += len(batch.counts) // 2

    @property
    def content(self) -> GroupContent:
        """Its rows as they are written."""
        return GroupContent(len(self._parts) // 3, b"".join(self._parts), self.apart)

    def set_apart(self, start_ms: int, directory: Path, ledger_id: int, key: bytes, value: Buffer) -> Buffer:
        """The value of a run for the log: of a large one without its bodies, which go to a file of their own.

        What follows a large one in its ledger goes there too, since that file is flushed anyway.
        """
        large = is_large(len(value), self.spread)
        if not has_bodies(value) or not (large or self.bodies):
            return value
        path = body_path(directory, ledger_id)
        staged = self.bodies.get(path)
        if staged is None:
            if not large:
                return value
            staged = self.bodies[path] = StagedBodies(end_of(path))
        at = staged.end
        short, bodies = set_apart(key, value, at)
        staged.add(bodies)
        last = self.apart[-1] if self.apart else None
        if last is not None and last[:2] == (start_ms, ledger_id):
            self.apart[-1] = last._replace(length=staged.end - last.at)
        else:
            self.apart.append(Apart(start_ms, ledger_id, at, len(bodies)))
        return short

    def end_reads(self) -> None:
        """End what was read from: who makes space waits for readers."""
        self._reading.__exit__()

    def publish(self, position: int) -> None:
        """The group at `position` is durable: the memtables get its rows, and memory hears of them."""
        self.end_reads()  # who has the lock may be waiting for the gate, and who waits for that to be alone in it
        publication = self.memtable.publication
        with publication.lock:  # all of a group, or nothing
            publication.torn = True
            if self._parts:
                publication.position = position
            for memtable, ledger_id, run in self.runs:
                memtable.position = position
                memtable.view.runs.setdefault(ledger_id, []).append(run)
            for batch in (self, *self._partitions.values()):
                if batch.records:
                    batch.memtable.position = position
                    batch.memtable.view.records.update(batch.records)
            for staged in self._staged.values():
                staged.committed()
            for callback in self._after:
                callback()
            publication.torn = False

    def close(self) -> None:
        """Let go of what refers to the batch, so that nothing is left to the collector; twice does nothing."""
        try:
            self._group = _LET_GO
            self._partitions.clear()
            self._staged.clear()
        finally:  # an interrupt may come first, and a program that has caught it may write
            self._reading.__exit__()


class BatchRow(NamedTuple):
    """A batch that has messages of a ledger of a partition."""

    start_ms: int
    ledger_id: int
    batch: ScatteredBatch


def rows_by_log(group: Group) -> Iterator[Row | BatchRow]:
    """The rows of a group that was read, in order, each for one environment."""
    for row in group.rows():
        if row.kind == RowKind.BATCH:
            batch = ScatteredBatch(row.value)
            yield from map(BatchRow, batch.starts_ms, batch.ledger_ids, repeat(batch))
        else:
            yield row


def single_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Replace each batch among rows by a run for each of its logs."""
    for row in rows:
        if row.kind == RowKind.BATCH:
            for start_ms, ledger_id, run in ScatteredBatch(row.value).by_log():
                yield Row(RowKind.RUN, start_ms, run_key(ledger_id, run.first), run.value)
        else:
            yield row


def add_row(unapplied: Unapplied, row: Row | BatchRow) -> None:
    """Add a row of a group to what is unapplied of its environment."""
    if isinstance(row, BatchRow):
        unapplied.add_run(row.ledger_id, row.batch)
    elif row.kind == RowKind.RUN:
        ledger_id, first = split_run_key(row.key)
        unapplied.add_run(ledger_id, WholeRun(first, first + HEADER.unpack_from(row.value)[4], row.value))
    elif row.kind == RowKind.RECORD:
        unapplied.add_record(row.key, bytes(row.value))
    elif row.kind == RowKind.DELETE:
        unapplied.add_record(row.key, None)
    else:
        unapplied.change_bits(row.key, bit_change(row))


def registered_by(row: Row | BatchRow) -> int | None:
    """The start of the partition that a row registers, or None. No later record says that a partition is open."""
    if isinstance(row, BatchRow) or row.start_ms != MAIN or row.kind != RowKind.RECORD or row.key[0] != Table.PARTITION:
        return None
    return trailing_u64(row.key) if PartitionRecord.unpack(bytes(row.value)).state is PartitionState.OPEN else None


def bit_change(row: Row) -> BitChange:
    """The change that a row UNITE or SUBTRACT makes."""
    nothing, members = bits_of(row.key, None), bits_of(row.key, bytes(row.value))
    return BitChange(nothing, members) if row.kind == RowKind.SUBTRACT else BitChange(members, nothing)
