"""Scanning slices of sealed generations by column: the headers of entries, many thousand rows at a time.

No object is made per entry: runs give their columns as they lie, a batch joins them. Payloads are not touched, nor
verified; scan_arrow.py reads those. A run that cannot be read comes as one row with the run's first entry id,
UNREADABLE_DUE for its due time, and its reason in `Batch.damage`; what is in it otherwise says nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ...store.codec.frontier import UNREADABLE_DUE
from ...store.codec.run import Int64s, Run, RunKind
from ...store.env.memtable import Reads
from ...store.errors import CorruptEntry
from ...store.log.scan import runs
from .scan_plan import LogRange, Wanted

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
        never = np.zeros(int(self._ends[-1]), dtype=np.bool_)
        at, place = 0, -1
        cancelled = admitted = BitMap()
        for each, end in zip(self.pieces, self._ends.tolist(), strict=True):
            if each.place != place:
                place = each.place
                cancelled = BitMap.deserialize(self.ranges[place].cancelled or BitMap().serialize())
                admitted = BitMap.deserialize(self.ranges[place].admitted or BitMap().serialize())
            if each.run is not None:
                first, limit = each.first_entry, each.first_entry + end - at
                if each.run.conditional:
                    never[at:end] = True
                    _mark(never, admitted, first, limit, at, value=False)
                _mark(never, cancelled, first, limit, at, value=True)
            at = end
        return self._left(never)

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


def _mark(column: Bools, members: BitMap, first: int, limit: int, at: int, *, value: bool) -> None:
    low, high = members.rank(first - 1) if first else 0, members.rank(limit - 1)
    if low < high:
        found = np.fromiter(members[low:high], dtype=np.int64, count=high - low)
        column[found + (at - first)] = value


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
