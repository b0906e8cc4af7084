"""Write batch: rows for several environments on their way into one group of the write-ahead log.

A unit of work appends to logs as it does in a transaction of LMDB (store/env/transaction.py). Its rows are durable when
the group is flushed; then they are added to the memtables of their environments, and memory hears of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

from pyroaring import BitMap64

from ..codec.bodies import Buffer
from ..codec.format import run_key, split_run_key
from ..codec.run import HEADER
from ..codec.run_lengths import WholeRun
from ..codec.scattered import ScatteredBatch
from ..env.claims import Claims
from ..env.memtable import Memtable, Unapplied
from ..env.transaction import StagingTransaction
from .segment import Group, Row, RowKind


class EnvironmentBatch(StagingTransaction):
    """The rows of one environment in a batch."""

    __slots__ = ("_claim_in_group", "_put", "_read", "memtable", "rows", "start_ms")

    def __init__(
        self,
        claim: Callable[[object], None],
        start_ms: int,
        memtable: Memtable,
        read: Callable[[bytes], bytes | None],
    ) -> None:
        """`claim` has a log or a record be changed by the batch alone; `read` gives a small record's fields."""
        super().__init__(None)
        self._claim_in_group = claim
        self._read = read
        self._put: dict[bytes, bytes] | None = None
        self.start_ms = start_ms
        self.memtable = memtable
        self.rows: list[Row] = []

    def get(self, key: bytes) -> bytes | None:
        """Fields of a small record. REQUIRES: a claim on what may change it."""
        fields = None if self._put is None else self._put.get(key)
        return self._read(key) if fields is None else fields

    def claim(self, owner: object) -> None:
        """Reserve `owner`, a log or a record, for the group. Raises Conflict."""
        self._claim_in_group(owner)

    def put(self, key: bytes, fields: bytes) -> None:
        """Store a small record, replacing what is there."""
        if self._put is None:
            self._put = {}
        self._put[key] = fields
        self.rows.append(Row(RowKind.RECORD, self.start_ms, key, fields))

    def insert_run(self, key: bytes, value: Buffer) -> None:
        """Store a run under a key that must be new."""
        self.rows.append(Row(RowKind.RUN, self.start_ms, key, value))

    def add_numbers(self, key: bytes, numbers: BitMap64) -> None:
        """Unite numbers with the record of a key."""
        self.rows.append(Row(RowKind.NUMBERS, self.start_ms, key, bytes(numbers.serialize())))

    def publish(self, position: int) -> None:
        """Add the rows to the memtable and run the callbacks: the group at `position` is durable."""
        claims = self.memtable.claims
        with claims.publishing:
            claims.torn = True
            self.memtable.position = position
            for row in self.rows:
                add_row(self.memtable, row)
            self.committed()
            claims.torn = False


class WriteBatch:
    """The rows of one group, by environment."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._owners: list[object] = []
        self._batches: dict[int, EnvironmentBatch] = {}
        self._after: list[Callable[[], None]] = []

    def to(
        self, start_ms: int, memtable: Memtable, read: Callable[[bytes], bytes | None] = lambda _: None
    ) -> EnvironmentBatch:
        """The rows of the environment of a partition, or of the main one (MAIN); `read` reads its small records."""
        batch = self._batches.get(start_ms)
        if batch is None:
            batch = self._batches[start_ms] = EnvironmentBatch(self._claim, start_ms, memtable, read)
        return batch

    def _claim(self, owner: object) -> None:
        self._owners.append(owner)  # first: an interrupt leaves no claim behind
        self._claims.try_take(owner, self)

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Have `callback` run once the group is durable and memory knows its rows; it must not raise."""
        self._after.append(callback)

    def flush(self) -> list[Row]:
        """Return all rows, once all work is done."""
        rows: list[Row] = []
        for batch in self._batches.values():
            batch.flush()
            rows += batch.rows
        return rows

    @property
    def entries(self) -> int:
        """Entries appended to ledgers; complete after `flush`."""
        return sum(batch.entries for batch in self._batches.values())

    def publish(self, position: int) -> None:
        """Publish the rows environment by environment: the group at `position` is durable."""
        for batch in self._batches.values():
            batch.publish(position)
        for callback in self._after:
            callback()

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
    else:
        memtable.add_numbers(row.key, BitMap64.deserialize(bytes(row.value)))
