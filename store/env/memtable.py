"""Memtable: the rows of one environment that are durable in the write-ahead log and not yet applied to LMDB.

Readers find its rows behind those of LMDB. The unapplied runs of a ledger follow its applied ones, and are applied from
the first on. So a reader that takes the memtable's view before it begins its transaction misses nothing, and a row of
the view that it finds in LMDB as well is one that LMDB's last run of the ledger has passed.

A view is never shortened: applying puts a new one in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import lmdb
from pyroaring import BitMap64

from ..codec.format import Table, counter_key, pack_u64, run_key, seal, unpack_u64, unseal
from ..codec.run import RunLimits
from ..codec.run_lengths import BatchRun, ScatteredBatch, WholeRun, merged_runs
from ..errors import StoreFailed

APPLIED_KEY = counter_key("wal_applied")
"""The record of the last group of the write-ahead log whose rows the environment has (`Memtable.position`)."""

_MANY = frozenset((Table.KEY, Table.NUMBERED))
"""Tables of which each message may have a record: their records lie apart, so that looking for others finds few."""


UnappliedRun = WholeRun | BatchRun
"""A run of entries [first, limit) of a ledger."""

LedgerRow = WholeRun | ScatteredBatch
"""A run of a ledger, or a batch that has one: an object for each of its logs would be followed by the collector."""


class LedgerRuns(Sequence[UnappliedRun]):
    """The runs of a ledger, in order; that of a batch is made at access."""

    __slots__ = ("_ledger_id", "_rows")

    def __init__(self, ledger_id: int, rows: Sequence[LedgerRow]) -> None:
        self._ledger_id = ledger_id
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> UnappliedRun: ...

    @overload
    def __getitem__(self, index: slice) -> LedgerRuns: ...

    def __getitem__(self, index: int | slice) -> UnappliedRun | LedgerRuns:
        if isinstance(index, slice):
            return LedgerRuns(self._ledger_id, self._rows[index])
        row = self._rows[index]
        return row.run_of(self._ledger_id) if isinstance(row, ScatteredBatch) else row

    def __iter__(self) -> Iterator[UnappliedRun]:
        return map(self.__getitem__, range(len(self._rows)))


Fields = bytes | None
"""The fields of a small record; None: it is deleted."""

_ABSENT = b"absent"
"""Stands for no row, where None is a deletion; told by identity."""


class Unapplied(NamedTuple):
    """The rows of a memtable.

    runs: by ledger id, in order. records: fields by key. numbers: bitmaps to be united with the record of their key, in
    order; None: that, and what is before it, is deleted.
    ids: as `records`, of the tables of `_MANY`.
    """

    runs: dict[int, list[LedgerRow]]
    records: dict[bytes, Fields]
    numbers: list[tuple[bytes, BitMap64 | None]]
    ids: dict[bytes, Fields]

    @classmethod
    def nothing(cls) -> Unapplied:
        return cls({}, {}, [], {})

    def copy(self) -> Unapplied:
        """Copy the rows, so that others may be added."""
        return Unapplied(
            {ledger: list(rows) for ledger, rows in self.runs.items()},
            dict(self.records),
            self.numbers[:],
            dict(self.ids),
        )

    def __bool__(self) -> bool:
        return bool(self.runs or self.records or self.numbers or self.ids)

    def add_run(self, ledger_id: int, run: LedgerRow) -> None:
        """Add the run that follows the ledger's last, or a batch that has it."""
        self.runs.setdefault(ledger_id, []).append(run)

    def add_record(self, key: bytes, fields: Fields) -> None:
        """Add a small record, in place of what is there, or its deletion."""
        (self.ids if key[0] in _MANY else self.records)[key] = fields
        if fields is None and key[0] == Table.SEQUENCE:
            self.numbers.append((key, None))

    def get(self, key: bytes, default: Fields) -> Fields:
        """The fields of a small record, None where it is deleted; `default`: no row of it is unapplied."""
        return (self.ids if key[0] in _MANY else self.records).get(key, default)

    def add_numbers(self, key: bytes, numbers: BitMap64) -> None:
        """Add numbers to the record of a key."""
        self.numbers.append((key, numbers))


Look = Callable[[int], Unapplied]
"""Gives the rows of groups after the one at a place, which is the last that a read transaction finds applied."""

Follow = Callable[[], Look]
"""Reads what another process has put into the write-ahead log of an environment; before the transaction begins."""


class Publication:
    """Guards the step in which the memory of a store hears of a group: of all of it, or of nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while a group's rows are added to memtables and memory hears of them, or a memtable's are taken."""
        self.torn = False
        """True where memtables may have a part of a group: while its rows are added, for good where that broke off."""
        self.failed: StoreFailed | None = None
        """Why a group broke off."""

    def refuse_torn(self) -> None:
        """Raise StoreFailed where memtables may have a part of a group. REQUIRES: the lock is held."""
        if self.torn:
            raise self.failed or StoreFailed(Path("wal"), "a group was broken off while memory was told of it")


class Memtable:
    """The unapplied rows of one environment, which need not be open. Rows are added by who holds `publishing`."""

    def __init__(self, publication: Publication, limits: RunLimits) -> None:
        """`limits`: of the runs that several are made one of when they are applied."""
        self.publication = publication
        self.limits = limits
        self.view = Unapplied.nothing()
        """Replaced by the rest when some rows are applied; new rows are added in place."""
        self.position = 0
        """The place in the write-ahead log of the last group whose rows are here: segment number << 32 | sequence."""
        self.publishing = publication.lock
        """Held while rows are added and memory hears of them, or a view takes another's place."""

    def __bool__(self) -> bool:
        return bool(self.view)

    def add_run(self, ledger_id: int, run: LedgerRow) -> None:
        """Add the run that follows the ledger's last, or a batch that has it."""
        self.view.runs.setdefault(ledger_id, []).append(run)

    def add_record(self, key: bytes, fields: Fields) -> None:
        """Add a small record, in place of what is there, or its deletion."""
        self.view.add_record(key, fields)

    def add_numbers(self, key: bytes, numbers: BitMap64) -> None:
        """Add numbers to the record of a key."""
        self.view.add_numbers(key, numbers)


class Applied:
    """The part of a memtable that a transaction has applied."""

    def __init__(self, memtable: Memtable) -> None:
        self._memtable = memtable
        self._runs: dict[int, int] = {}
        self._records: dict[bytes, Fields] = {}
        self._numbers = 0

    def rows(self) -> Iterator[tuple[int, LedgerRuns]]:
        """The runs, by ledger, that the transaction has not been given yet, and is given now."""
        runs = self._memtable.view.runs
        for ledger_id in list(runs):
            given = self._runs.get(ledger_id, 0)
            following = runs[ledger_id][given:]
            if following:
                self._runs[ledger_id] = given + len(following)
                yield ledger_id, LedgerRuns(ledger_id, following)

    def records(self) -> list[tuple[bytes, Fields]]:
        """The small records that the transaction has not been given yet, and is given now: (key, fields)."""
        view = self._memtable.view
        fresh = [
            (key, fields)
            for rows in (view.records, view.ids)
            for key, fields in list(rows.items())
            if self._records.get(key, _ABSENT) is not fields
        ]
        self._records.update(fresh)
        return fresh

    def numbers(self) -> list[tuple[bytes, BitMap64 | None]]:
        """The numbers that the transaction has not been given yet, and is given now: (key, numbers)."""
        fresh = self._memtable.view.numbers[self._numbers :]
        self._numbers += len(fresh)
        return fresh

    def committed(self) -> None:
        """Have the memtable forget the rows that were given: the transaction is on disk."""
        memtable = self._memtable
        with memtable.publishing:
            runs, records, numbers, ids = memtable.view
            memtable.view = Unapplied(
                {ledger: left for ledger, rows in runs.items() if (left := rows[self._runs.get(ledger, 0) :])},
                {key: fields for key, fields in records.items() if self._records.get(key, _ABSENT) is not fields},
                numbers[self._numbers :],
                {key: fields for key, fields in ids.items() if self._records.get(key, _ABSENT) is not fields},
            )


class ReadTransaction:
    """A read transaction of an environment with unapplied rows: as lmdb.Transaction, small records merged.

    Runs are merged by store/log/scan.py.
    """

    __slots__ = ("changed", "cursor", "id", "raw", "stat", "unapplied")

    def __init__(self, raw: lmdb.Transaction, unapplied: Unapplied) -> None:
        self.raw = raw
        self.unapplied = unapplied
        self.changed: dict[bytes, Fields] | None = None
        """Small records as a group under way leaves them, in place of what `unapplied` has."""
        self.cursor: Callable[[], lmdb.Cursor] = raw.cursor
        self.stat = raw.stat
        self.id: Callable[[], int] = raw.id

    def get(self, key: bytes, default: Any = None) -> Any:
        """The value of a key."""
        fields = _ABSENT if self.changed is None else self.changed.get(key, _ABSENT)
        if fields is _ABSENT:
            fields = self.unapplied.get(key, _ABSENT)
        if fields is _ABSENT:
            return self.raw.get(key, default)
        return default if fields is None else memoryview(seal(key, fields))

    def fields(self, key: bytes) -> Fields:
        """The fields of a small record, but for what a group under way changes. Raises CorruptRecord."""
        fields = self.unapplied.get(key, _ABSENT)
        if fields is _ABSENT:
            value = self.raw.get(key)
            return None if value is None else unseal(key, value)
        return fields


Reads = lmdb.Transaction | ReadTransaction
"""A transaction that can be read from."""


def applied_position(raw: Reads) -> int:
    """The place of the last group of the write-ahead log that is applied; -1: none is. Raises CorruptRecord."""
    value = raw.get(APPLIED_KEY)
    return -1 if value is None else unpack_u64(unseal(APPLIED_KEY, value))


def unapplied_runs(raw: Reads, ledger_id: int) -> Sequence[UnappliedRun]:
    """The unapplied runs of a ledger, in order."""
    rows = raw.unapplied.runs.get(ledger_id) if isinstance(raw, ReadTransaction) else None
    return LedgerRuns(ledger_id, rows) if rows else ()


def applied_rows(raw: Reads) -> lmdb.Transaction:
    """The transaction of LMDB alone, which has no unapplied rows."""
    return raw.raw if isinstance(raw, ReadTransaction) else raw


def unapplied_records(raw: Reads, prefix: bytes) -> dict[bytes, Fields]:
    """The unapplied small records whose keys begin with `prefix`: fields by key, None of a deleted one."""
    if not isinstance(raw, ReadTransaction):
        return {}
    _, records, _, ids = raw.unapplied
    wanted = [records, ids] if not prefix else [ids] if prefix[0] in _MANY else [records]
    if raw.changed:
        wanted.append(raw.changed)
    return {key: fields for rows in wanted for key, fields in list(rows.items()) if key.startswith(prefix)}


def unapplied_numbers(raw: Reads, prefix: bytes) -> BitMap64:
    """The unapplied numbers of all keys that begin with `prefix`."""
    by_key: dict[bytes, BitMap64] = {}
    if isinstance(raw, ReadTransaction):
        for key, numbers in raw.unapplied.numbers:
            if key.startswith(prefix):
                by_key[key] = BitMap64() if numbers is None else by_key.get(key, BitMap64()) | numbers
    return BitMap64().union(*by_key.values()) if by_key else BitMap64()


def unapplied_number_keys(raw: Reads, prefix: bytes) -> set[bytes]:
    """The keys that begin with `prefix` and have unapplied numbers."""
    rows = raw.unapplied.numbers if isinstance(raw, ReadTransaction) else ()
    return {key for key, _ in rows if key.startswith(prefix)}


def apply_rows(applied: Applied, memtable: Memtable, transaction: Any) -> None:
    """Have a write transaction store what the memtable holds and it has not stored yet. Raises StoreFailed."""
    with memtable.publishing:  # all of a group, or nothing
        memtable.publication.refuse_torn()
        position = memtable.position
        records, united, runs_by_ledger = applied.records(), applied.numbers(), list(applied.rows())
    if not (records or united or runs_by_ledger):
        return
    transaction.put(APPLIED_KEY, pack_u64(position))
    for key, fields in records:
        if fields is None:
            transaction.delete(key)
        else:
            transaction.put(key, fields)
    for key, numbers in united:
        if numbers is None:
            transaction.delete(key)
            continue
        value = transaction.raw.get(key)
        both = numbers | (BitMap64() if value is None else BitMap64.deserialize(unseal(key, value)))
        both.run_optimize()
        transaction.put(key, bytes(both.serialize()))
    for ledger_id, runs in runs_by_ledger:
        for key, value, count in merged_runs(partial(run_key, ledger_id), list(runs), memtable.limits):
            transaction.insert_run(key, value, count)
