"""Write batch: rows for several environments on their way into one group of the write-ahead log.

A unit of work appends to logs as it does in a transaction of LMDB (store/env/transaction.py). Its rows are durable when
the group is flushed; then they are added to the memtables of their environments, and memory hears of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol, TypeVar

from pyroaring import BitMap64

from ..codec.bodies import Buffer
from ..codec.format import run_key, split_run_key
from ..codec.run import HEADER
from ..codec.run_lengths import ScatteredBatch, WholeRun
from ..env.claims import Claims
from ..env.memtable import Fields, Memtable, Unapplied
from ..env.transaction import LogEnds, Staged, StagingTransaction
from ..errors import CorruptRecord
from .segment import SEVERAL, Group, Row, RowKind

T = TypeVar("T")


class EnvironmentBatch(StagingTransaction):
    """The rows of one environment in a batch."""

    __slots__ = ("_group", "_put", "_read", "memtable", "start_ms")

    def __init__(
        self, group: WriteBatch, start_ms: int, memtable: Memtable, read: Callable[[bytes], bytes | None]
    ) -> None:
        """`read` gives the fields of a small record."""
        self._ends, self._staged, self._after = group._ends, group._staged, group._after
        self._group = group
        self._read = read
        self._put: dict[bytes, Fields] | None = None
        """Small records as the group leaves them."""
        self.start_ms = start_ms
        self.memtable = memtable

    def get(self, key: bytes) -> bytes | None:
        """Fields of a small record. REQUIRES: a claim on what may change it."""
        return self._put[key] if self._put and key in self._put else self._read(key)

    def claim(self, owner: object) -> None:
        """Reserve `owner`, a log or a record, for the group. Raises Conflict."""
        self._group.claim(owner)

    def put(self, key: bytes, fields: bytes) -> None:
        """Store a small record, replacing what is there."""
        self._change(RowKind.RECORD, key, fields, fields)

    def delete(self, key: bytes) -> bool:
        """Remove a small record; False when it is not there."""
        try:
            if self.get(key) is None:
                return False
        except CorruptRecord:  # it is there, whatever it says
            pass
        self._change(RowKind.DELETE, key, None, b"")
        return True

    def _change(self, kind: RowKind, key: bytes, fields: Fields, value: bytes) -> None:
        if self._put is None:
            self._put = {}
        self._put[key] = fields
        self._group.rows.append(Row(kind, self.start_ms, key, value))
        self._group.published.append(partial(self.memtable.add_record, key, fields))

    def insert_run(self, key: bytes, value: Buffer, count: int, heard: Callable[[], object] | None = None) -> None:
        """Store a run of `count` entries under a key that must be new."""
        group = self._group
        ledger_id, first = split_run_key(key)
        group.rows.append(Row(RowKind.RUN, self.start_ms, key, value))
        group.published.append(partial(self.memtable.add_run, ledger_id, WholeRun(first, first + count, value)))
        group.entries += count
        if heard is not None:
            group.published.append(heard)

    def add_numbers(self, key: bytes, numbers: BitMap64) -> None:
        """Unite numbers with the record of a key."""
        self._group.rows.append(Row(RowKind.NUMBERS, self.start_ms, key, bytes(numbers.serialize())))
        self._group.published.append(partial(self.memtable.add_numbers, key, numbers))

    def appended(self, callback: Callable[[], object]) -> None:
        """Have memory hear of an append once the memtables have it."""
        self._group.published.append(callback)


class GroupWriter(Protocol):
    """A writer that appends groups to the write-ahead log."""

    def write(self, work: Callable[[WriteBatch], T]) -> T:
        """Run `work` and return its value once its rows are as durable as the store's durability says."""

    def main_rows(self, batch: WriteBatch) -> EnvironmentBatch:
        """The rows of the main environment in a batch."""

    def wait_for_groups(self) -> None:
        """Wait until every unit of work that was queued is decided."""

    def flush(self) -> None:
        """Wait until every group is on disk, whatever the store's durability. Raises StoreFailed."""


class WriteBatch(LogEnds):
    """The rows of one group. A unit of work writes to it; the leader of the WAL writer does the rest."""

    def __init__(self, claims: Claims) -> None:
        super().__init__()
        self._claims = claims
        self._owners: list[object] = []
        self._batches: dict[int, EnvironmentBatch] = {}
        self._staged: dict[object, Staged] = {}
        self._after: list[Callable[[], object]] = []
        self.rows: list[Row] = []
        self.entries = 0
        """Entries appended to ledgers."""
        self.published: list[Callable[[], object]] = []
        """Adds a row to its memtable, or has memory hear of an append; in the order of appends."""
        self.position = 0
        """The place of the group, once it is durable."""

    def to(
        self, start_ms: int, memtable: Memtable, read: Callable[[bytes], bytes | None] = lambda _: None
    ) -> EnvironmentBatch:
        """The rows of the environment of a partition, or of the main one (MAIN); `read` reads its small records."""
        batch = self._batches.get(start_ms)
        if batch is None:
            batch = self._batches[start_ms] = EnvironmentBatch(self, start_ms, memtable, read)
        return batch

    def claim(self, owner: object) -> None:
        """Reserve `owner`, a log or a record, for the group. Raises Conflict."""
        self._owners.append(owner)  # first: an interrupt leaves no claim behind
        if not self._claims.is_taken(owner, self):
            self._claims.try_take(owner, self)

    def add_batch(self, value: Buffer, count: int, publish: Callable[[int], None]) -> None:
        """Store `count` entries of several logs as one row; `publish` has memory know, with the group's place."""
        self.rows.append(Row(RowKind.BATCH, SEVERAL, b"", value))
        self.published.append(lambda: publish(self.position))
        self.entries += count

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Have `callback` run once the group is durable and memory knows its rows; it must not raise."""
        self._after.append(callback)

    def publish(self, position: int) -> None:
        """The group at `position` is durable: the memtables get its rows, and memory hears of them."""
        claims, self.position = self._claims, position
        with claims.publishing:  # all of a group, or nothing
            claims.torn = True
            for batch in self._batches.values():
                batch.memtable.position = position
            for add in self.published:
                add()
            for staged in self._staged.values():
                staged.committed()
            for callback in self._after:
                callback()
            claims.torn = False

    def release(self) -> None:
        """Give all claims back; twice does nothing."""
        if self._owners:
            self._claims.release(self, self._owners)
            self._owners = []


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


def add_row(memtable: Memtable | Unapplied, row: Row | BatchRow) -> None:
    """Add a row of a group to the memtable of its environment, or to what is unapplied of it."""
    if isinstance(row, BatchRow):
        memtable.add_run(row.ledger_id, row.batch)
    elif row.kind == RowKind.RUN:
        ledger_id, first = split_run_key(row.key)
        memtable.add_run(ledger_id, WholeRun(first, first + HEADER.unpack_from(row.value)[4], row.value))
    elif row.kind == RowKind.RECORD:
        memtable.add_record(row.key, bytes(row.value))
    elif row.kind == RowKind.DELETE:
        memtable.add_record(row.key, None)
    else:
        memtable.add_numbers(row.key, BitMap64.deserialize(bytes(row.value)))
