"""Memtable: the rows of one environment that are durable in the write-ahead log and not yet applied to LMDB.

Readers find its rows behind those of LMDB. The unapplied runs of a ledger follow its applied ones, and are applied from
the first on. So a reader that takes the memtable's view before it begins its transaction misses nothing, and a row of
the view that it finds in LMDB as well is one that LMDB's last run of the ledger has passed.

A view is never shortened: applying puts a new one in its place.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import lmdb
from sortedcontainers import SortedSet

from ..codec.bits import BitChange, bits_of
from ..codec.format import copy_key, counter_key, pack_u64, run_key, seal, unpack_u64, unseal
from ..codec.run import ReadBodies, RunLimits
from ..codec.run_lengths import BatchRun, ScatteredBatch, WholeRun, merged_runs
from ..errors import CorruptRecord, DamagedStore, StoreFailed

APPLIED_KEY = counter_key("wal_applied")
"""The record of the last group of the write-ahead log whose rows the environment has (`Memtable.position`)."""

PAST = b"\xff" * 512
"""Past every key, and past every rest of a key: LMDB takes up to 511 bytes."""

_ROWS_A_LOOK = 256
"""Records that a scan takes of a memtable at a time."""

T = TypeVar("T")
V = TypeVar("V")

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
    def __getitem__(self, index: slice) -> "LedgerRuns": ...

    def __getitem__(self, index: int | slice) -> "UnappliedRun | LedgerRuns":
        if isinstance(index, slice):
            return LedgerRuns(self._ledger_id, self._rows[index])
        row = self._rows[index]
        return row.run_of(self._ledger_id) if isinstance(row, ScatteredBatch) else row

    def __iter__(self) -> Iterator[UnappliedRun]:
        return map(self.__getitem__, range(len(self._rows)))


Fields = bytes | None
"""The fields of a small record; None: it is deleted."""

Entry = Fields | BitChange
"""The unapplied part of a small record: its fields, or a change of those that LMDB has."""

ABSENT = b"absent"
"""Stands for nothing unapplied, where None is a deletion; told by identity."""


def changed(key: bytes, entry: Entry, change: BitChange) -> BitChange:
    """The unapplied part of a record once a change of its bits follows."""
    if entry is ABSENT:
        return change
    if not isinstance(entry, BitChange):
        entry = BitChange(bits_of(key, entry), bits_of(key, None), whole=True)
    return entry.then(change)


def fields_over(key: bytes, value: bytes | memoryview | None, entry: Entry) -> Fields:
    """The fields of a record of which LMDB has `value`, and `entry` is unapplied. Raises CorruptRecord."""
    if entry is ABSENT or (isinstance(entry, BitChange) and not entry.whole):
        fields = None if value is None else unseal(key, value)
        return entry.fields(key, fields) if isinstance(entry, BitChange) else fields
    return entry.fields(key, None) if isinstance(entry, BitChange) else entry


class Records:
    """Small records by key, and in order. One thread adds, any others read meanwhile; none is taken out.

    Keys are sorted by the scan that comes next, not by who adds them: most tables are never scanned.
    """

    __slots__ = ("_entries", "_keys", "_sorting", "_unsorted", "get")

    def __init__(self, entries: Iterable[tuple[bytes, Entry]] = ()) -> None:
        self._entries = dict(entries)
        self.get: Callable[[bytes, Entry], Entry] = self._entries.get
        """Gives the unapplied part of a record, or what stands for none."""
        self._keys: SortedSet[bytes] | None = None
        """None: none are sorted, or who sorted them was interrupted."""
        self._unsorted: deque[bytes] = deque()
        """Keys that came since."""
        self._sorting = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __setitem__(self, key: bytes, entry: Entry) -> None:
        is_new = key not in self._entries
        self._entries[key] = entry
        if is_new:
            self._unsorted.append(key)

    def update(self, entries: Mapping[bytes, Entry]) -> None:
        """Add records, or replace them. Who reads meanwhile finds none of them, or all: each line is one step of it.

        A scan passes over keys that have no entry yet.
        """
        self._unsorted.extend([key for key in entries if key not in self._entries])
        self._entries.update(entries)

    def items(self) -> list[tuple[bytes, Entry]]:
        """List all, in no order."""
        return list(self._entries.items())

    def between(self, start: bytes, limit: bytes) -> Iterator[tuple[bytes, Entry]]:
        """Iterate over those with keys from `start` on, before `limit`, in order. O(log all) and those read."""
        while self._entries:
            with self._sorting:
                following = self._sorted().irange(start, limit, inclusive=(True, False))
                keys = list(islice(following, _ROWS_A_LOOK))
            for key in keys:
                if (entry := self._entries.get(key, ABSENT)) is not ABSENT:
                    yield key, entry
            if len(keys) < _ROWS_A_LOOK:
                return
            start = keys[-1] + b"\0"

    def _sorted(self) -> SortedSet[bytes]:
        entries, keys, self._keys = self._entries, self._keys, None
        fresh = list(takewhile(entries.__contains__, list(self._unsorted)))  # `update` has the others' entries to come
        if keys is None:
            keys = SortedSet(list(entries))
        keys.update(fresh)
        self._keys = keys
        for _ in fresh:
            self._unsorted.popleft()
        return keys


class Unapplied(NamedTuple):
    """The rows of a memtable; `runs` by ledger id, in order."""

    runs: dict[int, list[LedgerRow]]
    records: Records

    @classmethod
    def nothing(cls) -> "Unapplied":
        return cls({}, Records())

    def copy(self) -> "Unapplied":
        """Copy the rows, so that others may be added."""
        return Unapplied({ledger: list(rows) for ledger, rows in self.runs.items()}, Records(self.records.items()))

    def __bool__(self) -> bool:
        return bool(self.runs or self.records)

    def add_run(self, ledger_id: int, run: LedgerRow) -> None:
        """Add the run that follows the ledger's last, or a batch that has it."""
        self.runs.setdefault(ledger_id, []).append(run)

    def add_record(self, key: bytes, entry: Entry) -> None:
        """Add a small record, in place of what is there, its deletion, or all that changes its bits."""
        self.records[key] = entry

    def change_bits(self, key: bytes, change: BitChange) -> None:
        """Add a change of a record's bits to what is there."""
        self.records[key] = changed(key, self.records.get(key, ABSENT), change)


Look = Callable[[int], Unapplied]
"""Gives the rows of groups after the one at a place, which is the last that a read transaction finds applied."""


class Follow(Protocol):
    """Reads what another process has put into the write-ahead log of an environment."""

    def __call__(self) -> Look:
        """Look at the log, before the transaction begins."""

    def is_registered(self) -> bool:
        """True while the log has the registration of the environment's partition (vacant.py)."""


class Publication:
    """Guards the step in which the memory of a store hears of a group: of all of it, or of nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while a group's rows are added to memtables and memory hears of them, or a memtable's are taken."""
        self.torn = False
        """True where memtables may have a part of a group: while its rows are added, for good where that broke off."""
        self.failed: StoreFailed | None = None
        """Why a group broke off."""
        self.position: int | None = None
        """The place of the last group of the log; None: another process writes it."""


class Memtable:
    """The unapplied rows of one environment, which need not be open. Rows are added by who holds `publishing`."""

    def __init__(self, publication: Publication, limits: RunLimits, directory: Path | None = None) -> None:
        """`limits`: of the runs that several are made one of when they are applied.

        directory: of the environment, where the bodies of large runs lie beside it; None: they go by the log.
        """
        self.directory = directory
        self.publication = publication
        self.limits = limits
        self.view = Unapplied.nothing()
        """Replaced by the rest when some rows are applied; new rows are added in place."""
        self.position = 0
        """The place in the write-ahead log of the last group that added rows here: segment number << 32 | sequence."""
        self.publishing = publication.lock
        """Held while rows are added and memory hears of them, or a view takes another's place."""

    def __bool__(self) -> bool:
        return bool(self.view)


class Applied:
    """The part of a memtable that a transaction has applied."""

    def __init__(self, memtable: Memtable) -> None:
        self._memtable = memtable
        self.position = -1
        """The place of the last group whose rows it was given."""
        self._runs: dict[int, int] = {}
        self._records: dict[bytes, Entry] = {}

    def rows(self) -> Iterator[tuple[int, LedgerRuns]]:
        """The runs, by ledger, that the transaction has not been given yet, and is given now."""
        runs = self._memtable.view.runs
        for ledger_id in list(runs):
            given = self._runs.get(ledger_id, 0)
            following = runs[ledger_id][given:]
            if following:
                self._runs[ledger_id] = given + len(following)
                yield ledger_id, LedgerRuns(ledger_id, following)

    def records(self) -> list[tuple[bytes, Entry]]:
        """The small records that the transaction has not been given yet, and is given now, by key."""
        fresh = list(self._others())
        self._records.update(fresh)
        return fresh

    def _others(self) -> Iterator[tuple[bytes, Entry]]:
        given = self._records
        return (row for row in self._memtable.view.records.items() if given.get(row[0], ABSENT) is not row[1])

    def committed(self) -> None:
        """Have the memtable forget the rows that were given: the transaction is on disk."""
        memtable = self._memtable
        with memtable.publishing:
            if memtable.position == self.position:
                memtable.view = Unapplied.nothing()
                return
            runs = memtable.view.runs.items()
            left = {ledger_id: rest for ledger_id, rows in runs if (rest := rows[self._runs.get(ledger_id, 0) :])}
            memtable.view = Unapplied(left, Records(self._others()))


class ReadTransaction:
    """A read transaction of an environment with its unapplied rows: as lmdb.Transaction, small records merged.

    Runs are merged by store/log/scan.py.
    """

    __slots__ = ("changed", "cursor", "id", "raw", "read_bodies", "unapplied")

    def __init__(self, raw: lmdb.Transaction, unapplied: Unapplied, read_bodies: ReadBodies | None = None) -> None:
        """`read_bodies`: None where no bodies are read."""
        self.raw = raw
        self.unapplied = unapplied
        self.read_bodies = read_bodies
        self.changed: dict[bytes, Entry] | None = None
        """Small records as a group under way leaves them, in place of what `unapplied` has."""
        self.cursor: Callable[[], lmdb.Cursor] = raw.cursor
        self.id: Callable[[], int] = raw.id

    def _entry(self, key: bytes) -> Entry:
        entry: Entry = ABSENT if self.changed is None else self.changed.get(key, ABSENT)
        return self.unapplied.records.get(key, ABSENT) if entry is ABSENT else entry

    def get(self, key: bytes, default: Any = None) -> Any:
        """The value of a key."""
        entry = self._entry(key)
        if entry is ABSENT:
            return self.raw.get(key, default)
        fields = fields_over(key, self.raw.get(key) if isinstance(entry, BitChange) else None, entry)
        return default if fields is None else memoryview(seal(key, fields))

    def fields(self, key: bytes) -> Fields:
        """The fields of a small record. Raises CorruptRecord."""
        entry = self._entry(key)
        is_read = entry is ABSENT or isinstance(entry, BitChange)
        return fields_over(key, self.raw.get(key) if is_read else None, entry)


Reads = lmdb.Transaction | ReadTransaction
"""A transaction that can be read from."""


def applied_position(raw: Reads) -> int:
    """The place of the last group of the write-ahead log that is applied; -1: none is. Raises CorruptRecord."""
    value = raw.get(APPLIED_KEY)
    return -1 if value is None else unpack_u64(unseal(APPLIED_KEY, value))


def refuse_ahead(path: Path, raw: Reads, last: int | None) -> None:
    """Raise DamagedStore for an environment that has applied what is behind the log's `last` group.

    Invariant: LMDB is never ahead of the log. What was lost of the log may be of other environments.
    """
    applied = applied_position(raw)
    if last is not None and applied > last:
        raise DamagedStore(path, f"has {place_text(applied)} of the write-ahead log, which ends at {place_text(last)}")


def place_text(position: int) -> str:
    """A place in the log in words."""
    return f"group {position & 0xFFFFFFFF} of segment {position >> 32}"


def unapplied_runs(raw: Reads, ledger_id: int) -> Sequence[UnappliedRun]:
    """The unapplied runs of a ledger, in order."""
    rows = raw.unapplied.runs.get(ledger_id) if isinstance(raw, ReadTransaction) else None
    return LedgerRuns(ledger_id, rows) if rows else ()


def read_bodies(raw: Reads) -> ReadBodies | None:
    """How bodies beside the environment are read; None: not by this transaction."""
    return raw.read_bodies if isinstance(raw, ReadTransaction) else None


def applied_rows(raw: Reads) -> lmdb.Transaction:
    """The transaction of LMDB alone, which has no unapplied rows."""
    return raw.raw if isinstance(raw, ReadTransaction) else raw


def unapplied_records(
    raw: Reads, prefix: bytes, start: bytes = b"", limit: bytes = PAST
) -> Iterator[tuple[bytes, Entry]]:
    """Iterate over the unapplied parts of records whose keys begin with `prefix`, in [start, limit), in order."""
    if not isinstance(raw, ReadTransaction):
        return iter(())
    start, limit = max(prefix, start), min(prefix + PAST, limit)
    records = raw.unapplied.records.between(start, limit)
    if raw.changed:
        changed = sorted(row for row in raw.changed.items() if start <= row[0] < limit)
        return overlaid(records, iter(changed), _last_of)
    return records


def _last_of(_: bytes, under: Entry | None, over: Entry) -> Entry:
    return under if over is ABSENT else over


def overlaid(
    under: Iterator[tuple[bytes, V]], over: Iterator[tuple[bytes, Entry]], join: Callable[[bytes, V | None, Entry], T]
) -> Iterator[tuple[bytes, T]]:
    """Merge rows by key; `join` makes one of what `under` has, or None, and what `over` has, or ABSENT."""
    following = next(over, None)
    for key, value in under:
        while following is not None and following[0] < key:
            yield following[0], join(following[0], None, following[1])
            following = next(over, None)
        if following is None or following[0] != key:
            yield key, join(key, value, ABSENT)
        else:
            yield key, join(key, value, following[1])
            following = next(over, None)
    while following is not None:
        yield following[0], join(following[0], None, following[1])
        following = next(over, None)


def _stored(raw: lmdb.Transaction, key: bytes) -> Fields:
    """The fields that LMDB has of a record, its copy's where it is damaged: a change of bits holds up no checkpoint."""
    copy = copy_key(key)
    try:
        value = raw.get(key)
        return None if value is None else unseal(key, value)
    except CorruptRecord:
        return unseal(copy, raw.get(copy, b""))


def apply_rows(applied: Applied, memtable: Memtable, transaction: Any) -> None:
    """Have a write transaction store what the memtable holds and it has not stored yet. Raises StoreFailed."""
    with memtable.publishing:  # all of a group, or nothing
        if (publication := memtable.publication).torn:
            raise publication.failed or StoreFailed(Path("wal"), "a group was broken off while memory was told of it")
        position = memtable.position
        if position == applied.position:
            return
        applied.position = position
        records, runs_by_ledger = applied.records(), list(applied.rows())
    if not (records or runs_by_ledger):
        return
    transaction.put(APPLIED_KEY, pack_u64(position))
    for key, entry in records:
        fields = entry.fields(key, _stored(transaction.raw, key)) if isinstance(entry, BitChange) else entry
        if fields is None:
            transaction.delete(key)
        else:
            transaction.put(key, fields)
    for ledger_id, runs in runs_by_ledger:
        for key, value, count in merged_runs(partial(run_key, ledger_id), list(runs), memtable.limits):
            transaction.insert_run(key, value, count)
