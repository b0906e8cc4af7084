"""Sealed generations scanned by column: the plan in slices, then the headers of entries, many thousand rows at a time.

Everything that comes from the main environment is read by the plan, in one read transaction: which generations there
are, what their topics are called, which entries never fire. A slice carries what its task needs of it, is picklable,
and its task touches the generation's directory only.

No object is made per entry: runs give their columns as they lie, a batch joins them. Payloads are not touched, nor
verified; scan_arrow.py reads those. A run that cannot be read comes as one row with the run's first entry id,
UNREADABLE_DUE for its due time, and its reason in `Batch.damage`; what is in it otherwise says nothing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from math import isnan
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ...cleanup.log_claims import ids_of
from ...opening import Identity
from ...partitions import cancellations
from ...partitions.timespan import parse_directory_name
from ...store.codec import format as fmt
from ...store.codec.format import LedgerRecord, LedgerState, Table
from ...store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from ...store.codec.run import Int64s, Run, RunKind
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.errors import CorruptEntry, InvalidArgument, checked_list
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.log.scan import runs
from ...store.message import MAX_DUE_MS
from ...store.names import TopicName
from ...survey.contents import read_logs
from .sealed import Sealed, open_generation, read_sealed


class Sizes(NamedTuple):
    """About how much one task reads: entries, or bytes of a file."""

    entries: int = 1 << 20
    bytes: int = 64 << 20


USUAL = Sizes()


class LogRange(NamedTuple):
    """Entries [start, limit) of one partition log.

    topic: its full name; None: the topic was deleted. cancelled, admitted: serialised bitmaps of what main says of
    the log's entries (cancelled or replaced; conditional ones that may fire), None where not asked for. frontier, of a
    scan of what is pending: what has fired; None: nothing. known: entries from here on count only if they are admitted.
    """

    topic_id: int
    topic: str | None
    ledger_id: int
    start: int
    limit: int
    cancelled: bytes | None = None
    admitted: bytes | None = None
    frontier: FrontierRecord | None = None
    known: int = 0


class Slice(NamedTuple):
    """The part of a scan that one task reads: ranges of the logs of one sealed generation."""

    sealed: Sealed
    store_id: bytes
    ranges: tuple[LogRange, ...]

    @property
    def entries(self) -> int:
        return sum(each.limit - each.start for each in self.ranges)


class Wanted(NamedTuple):
    """The rows that a scan is asked for; those outside it are not read.

    topics: full names; partitions: directory names; None: all. due_from_ms is inclusive, due_until_ms exclusive.
    """

    topics: frozenset[str] | None = None
    partitions: frozenset[str] | None = None
    due_from_ms: int = 0
    due_until_ms: int = MAX_DUE_MS + 1

    @classmethod
    def of(
        cls,
        topics: Collection[str] | None = None,
        partitions: Collection[str] | None = None,
        due_from_ms: int | None = None,
        due_until_ms: int | None = None,
    ) -> Self:
        """Checked: topic names in any form, partition names. Raises InvalidArgument."""
        if partitions is not None:
            for name in checked_list("partitions", partitions, "names of partitions"):
                parse_directory_name(name)
        for field, value in (("due_from_ms", due_from_ms), ("due_until_ms", due_until_ms)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or isnan(value)):
                raise InvalidArgument(field, value, "expected milliseconds since 1970")
        if due_from_ms is not None and due_until_ms is not None and due_until_ms < due_from_ms:
            raise InvalidArgument("due_until_ms", due_until_ms, f"is before due_from_ms={due_from_ms}")
        names = None if topics is None else map(TopicName.parse, checked_list("topics", topics, "names of topics"))
        return cls(
            None if names is None else frozenset(map(str, names)),
            None if partitions is None else frozenset(partitions),
            0 if due_from_ms is None else due_from_ms,
            MAX_DUE_MS + 1 if due_until_ms is None else due_until_ms,
        )

    @property
    def every_due(self) -> bool:
        """True where no due time is left out, that of entries that cannot be read included."""
        return self.due_from_ms <= 0 and self.due_until_ms > MAX_DUE_MS

    def has_topic(self, topic: str | None) -> bool:
        return self.topics is None or topic in self.topics

    def has_partition(self, sealed: Sealed) -> bool:
        if self.partitions is not None and sealed.partition not in self.partitions:
            return False
        return sealed.start_ms < self.due_until_ms and self.due_from_ms < sealed.end_ms


def plan_scan(store: Path, wanted: Wanted | None = None, *, claims: bool = False, sizes: Sizes = USUAL) -> list[Slice]:
    """Slices of everything `wanted` that is sealed.

    `claims`: read what main says of cancelled and admitted entries too. O(partition logs).
    """

    def plan(raw: Reads, identity: Identity, generations: list[Sealed]) -> list[Slice]:
        return plan_in(raw, identity.store_id, generations, wanted or Wanted(), claims, sizes)

    return read_sealed(store, plan)


def plan_in(
    raw: Reads, store_id: bytes, generations: Iterable[Sealed], wanted: Wanted, claims: bool, sizes: Sizes = USUAL
) -> list[Slice]:
    """The same in a read transaction of the caller's (`read_sealed`)."""
    found: list[Slice] = []
    for sealed in generations:
        if wanted.has_partition(sealed):
            with open_generation(sealed, store_id) as environment:
                logs = logs_of(environment)
            ranges = _ranges(raw, logs, wanted, claims)
            found += [Slice(sealed, store_id, part) for part in cut(ranges, sealed.file_bytes, sizes)]
    return found


def kept_ledgers(raw: Reads, wanted: Wanted) -> Iterator[tuple[int, str, int, LedgerRecord]]:
    """(topic id, topic, ledger id, record) of the ledgers of main logs that are wanted, but for those being removed."""
    for key, fields in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
        topic_id, record = fmt.leading_u32(key), LedgerRecord.unpack(fields)
        topic = catalog.topic_name(raw, topic_id)
        if record.state is not LedgerState.TRIMMING and topic is not None and wanted.has_topic(topic):
            yield topic_id, topic, fmt.trailing_u64(key), record


Logs = list[tuple[int, int, int]]
"""(topic id, ledger id, tail) of partition logs."""


def logs_of(environment: Environment) -> Logs:
    """(topic id, ledger id, tail) of every partition log of a generation. The tail is one past the last entry."""
    with environment.read() as raw:
        return [(topic_id, each, find_tail(raw, environment.name, each)) for topic_id, each in read_logs(raw).items()]


def _ranges(raw: Reads, logs: Logs, wanted: Wanted, claims: bool) -> Iterator[LogRange]:
    for topic_id, ledger_id, tail in logs:
        topic = catalog.topic_name(raw, topic_id)
        if tail and wanted.has_topic(topic):
            log = LogRange(topic_id, topic, ledger_id, 0, tail)
            if claims:
                cancelled = cancellations.members(raw, Table.CANCELLED, ledger_id).serialize()
                admitted = cancellations.members(raw, Table.ADMITTED, ledger_id).serialize()
                log = log._replace(cancelled=cancelled, admitted=admitted)
            yield log


def cut(ranges: Iterable[LogRange], file_bytes: int, sizes: Sizes) -> Iterator[tuple[LogRange, ...]]:
    """The ranges in parts of at most as many entries as `sizes` allow, their bytes at the file's average.

    file_bytes: the length of the file that they all lie in.
    """
    ranges = list(ranges)
    entries = sum(each.limit - each.start for each in ranges)
    most = max(1, min(sizes.entries, entries * sizes.bytes // max(file_bytes, 1)))
    most = -(-entries // max(1, -(-entries // most)))  # the last part is no smaller than the others
    part: list[LogRange] = []
    room = most
    for each in ranges:
        start = each.start
        while start < each.limit:
            limit = min(each.limit, start + room)
            part.append(each._replace(start=start, limit=limit))
            room -= limit - start
            start = limit
            if not room:
                yield tuple(part)
                part, room = [], most
    if part:
        yield tuple(part)


BATCH_ROWS = 1 << 17
BATCH_BYTES = 16 << 20
"""A batch ends after the run that reaches one of these (the second: bodies, where they are read)."""

Bools = npt.NDArray[np.bool_]
Column = npt.NDArray[Any]
Ranges = tuple[LogRange, ...]

_ZERO = np.zeros(1, dtype="<u4")


class Piece(NamedTuple):
    """Entries [low, high) of one run, by their places in the run; `run` None: the run is damaged."""

    place: int
    run: Run | None
    ledger_id: int
    first_entry: int
    low: int
    high: int
    reason: str | None


def pieces(raw: Reads, environment: str, ranges: Ranges, only: Callable[[Run], bool] | None = None) -> Iterator[Piece]:
    """Every run of messages that the ranges touch and `only` wants, in order of range (`place`) and entry."""
    for place, (_, _, ledger_id, start, limit, *_) in enumerate(ranges):
        for run in runs(raw, environment, ledger_id, start, limit):
            if isinstance(run, CorruptEntry):
                if run.entry_id >= start:  # else it is reported by the slice before
                    yield Piece(place, None, ledger_id, run.entry_id, 0, 1, run.reason)
                continue
            if run.kind != RunKind.MESSAGES or (only is not None and not only(run)):
                continue
            first = run.first_entry
            low = start - first if start > first else 0
            high = limit - first if limit < first + run.count else run.count
            yield Piece(place, run, ledger_id, first + low, low, high, None)


class Batch:
    """Columns of the entries of many runs. Valid inside the transaction that the runs came from.

    `dues` has every row; the other columns have those that `keep` leaves, once it was called.
    """

    def __init__(self, found: list[Piece], ranges: Ranges) -> None:
        self.pieces = found
        self.ranges = ranges
        self._counts = np.fromiter((each.high - each.low for each in found), dtype=np.int64, count=len(found))
        self._ends = np.cumsum(self._counts)
        offsets = [_ZERO if run is None else run.due_offsets()[low:high] for _, run, _, _, low, high, _ in found]
        bases = np.fromiter(
            (UNREADABLE_DUE if each.run is None else each.run.base_ms for each in found),
            dtype=np.int64,
            count=len(found),
        )
        self.dues: Int64s = np.concatenate(offsets).astype(np.int64)
        self.dues += bases[0] if (bases == bases[0]).all() else np.repeat(bases, self._counts)
        self.kept: npt.NDArray[np.intp] | None = None

    def rest(self) -> Ranges:
        """The part of the ranges that comes after the batch."""
        place, _, _, first, low, high, _ = self.pieces[-1]
        return (self.ranges[place]._replace(start=first + high - low), *self.ranges[place + 1 :])

    @property
    def rows(self) -> int:
        return len(self.dues)

    def keep(self, mask: Bools) -> None:
        """Leave only some of the rows; `mask` has a value for each that is left as yet."""
        if not mask.all():
            kept = np.flatnonzero(mask)
            self.kept = kept if self.kept is None else self.kept[kept]
            self.dues = self.dues[kept]

    def keep_due(self, wanted: Wanted) -> None:
        """Leave only rows that are due when `wanted` says."""
        if not wanted.every_due:
            self.keep((self.dues >= wanted.due_from_ms) & (self.dues < wanted.due_until_ms))

    def _left(self, column: Column) -> Column:
        return column if self.kept is None else column[self.kept]

    def _each(self, values: list[int], dtype: npt.DTypeLike) -> Column:
        return self._left(np.repeat(np.array(values, dtype=dtype), self._counts))

    def places(self) -> npt.NDArray[np.int32]:
        """The number of each row's range in the slice."""
        return self._each([each.place for each in self.pieces], np.int32)

    def ledger_ids(self) -> Int64s:
        return self._each([each.ledger_id for each in self.pieces], np.int64)

    def entry_ids(self) -> Int64s:
        firsts = np.fromiter((each.first_entry for each in self.pieces), dtype=np.int64, count=len(self.pieces))
        firsts -= self._ends - self._counts
        ids: Int64s = np.repeat(firsts, self._counts)
        ids += np.arange(len(ids))
        return self._left(ids)

    def conditional(self) -> Bools:
        """True for entries that fire only if their reschedule was recorded."""
        return self._each([each.run is not None and each.run.conditional for each in self.pieces], np.bool_)

    def body_spans(self) -> tuple[Int64s, Int64s]:
        """(start, size) of each row's body, counted from where the bodies of its run begin."""
        ends = [_ZERO if run is None else run.ends()[low:high] for _, run, _, _, low, high, _ in self.pieces]
        limits = np.concatenate(ends).astype(np.int64)
        starts = np.empty_like(limits)
        starts[1:] = limits[:-1]
        heads = [0 if run is None or not low else int(run.ends()[low - 1]) for _, run, _, _, low, *_ in self.pieces]
        starts[self._ends - self._counts] = heads
        return self._left(starts), self._left(limits - starts)

    def dropped(self, sizes: Int64s) -> Bools:
        """True where compaction dropped the body, from the sizes that `body_spans` gives."""
        gone: Bools = (sizes == 0) & (self.dues != UNREADABLE_DUE)
        return gone

    def replaced(self) -> tuple[Int64s, Int64s]:
        """(ledger id, entry id) that each conditional entry replaces; of others 0."""
        ledgers = np.zeros(int(self._ends[-1]), dtype=np.int64)
        entries = np.zeros(int(self._ends[-1]), dtype=np.int64)
        for (_, run, _, _, low, high, _), end in zip(self.pieces, self._ends.tolist(), strict=True):
            if run is not None and run.conditional:
                old_ledgers, old_entries = run.replaced()
                ledgers[end - (high - low) : end] = old_ledgers[low:high]
                entries[end - (high - low) : end] = old_entries[low:high]
        return self._left(ledgers), self._left(entries)

    def withdrawn(self) -> Bools:
        """True for entries that never fire: cancelled, replaced, or a reschedule that was not recorded.

        REQUIRES: the slice was planned with `claims`.
        """
        ids, places, never = self.entry_ids(), self.places(), self.conditional()
        for place in np.unique(places).tolist():
            rows = np.flatnonzero(places == place)
            first, limit = int(ids[rows[0]]), int(ids[rows[-1]]) + 1
            cancelled, admitted = (
                mask(BitMap() if members is None else BitMap.deserialize(members), first, limit)[ids[rows] - first]
                for members in (self.ranges[place].cancelled, self.ranges[place].admitted)
            )
            never[rows] = (never[rows] & ~admitted) | cancelled
        never &= self.dues != UNREADABLE_DUE
        return never

    def damage(self) -> list[tuple[int, str]]:
        """(row, reason) of the runs that cannot be read, among the rows that are left."""
        limits = self._ends.tolist()
        found = [
            (limit - 1, each.reason) for each, limit in zip(self.pieces, limits, strict=True) if each.reason is not None
        ]
        if self.kept is None or not found:
            return found
        left = {row: at for at, row in enumerate(self.kept.tolist())}
        return [(left[row], reason) for row, reason in found if row in left]


def mask(members: BitMap, start: int, limit: int) -> Bools:
    """True for those of the entries [start, limit) that are members."""
    found = np.zeros(limit - start, dtype=np.bool_)
    if members:
        wanted = BitMap()
        wanted.add_range(start, limit)
        found[ids_of(members & wanted) - np.uint32(start)] = True
    return found


def batches(
    raw: Reads,
    environment: str,
    ranges: Ranges,
    *,
    rows: int = BATCH_ROWS,
    bodies: bool = False,
    only: Callable[[Run], bool] | None = None,
) -> Iterator[Batch]:
    """The rows of ranges of an environment's logs, in order of range and entry; no batch is empty.

    only: which runs are wanted; None: all that have messages.
    """
    found: list[Piece] = []
    count = size = 0
    for piece in pieces(raw, environment, ranges, only):
        found.append(piece)
        count += piece.high - piece.low
        if bodies and piece.run is not None:
            size += piece.run.stored_bytes
        if count >= rows or size >= BATCH_BYTES:
            yield Batch(found, ranges)
            found, count, size = [], 0, 0
    if found:
        yield Batch(found, ranges)
