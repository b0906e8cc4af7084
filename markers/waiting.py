"""The index of a topic-level tracker: the entries of a main log that are not due yet, by due time.

Two forms. **Stretches** of the log whose due times do not go down, as all of them in a topic with a fixed delay, are
in due order as they stand: a stretch is kept by its ends alone, whatever its length, and its due times are read from
the log when the first of it is due. Everything else is in **levels**, sorted columns of 16 bytes an entry, each level
at most half as long as the one before it: what is added is merged with levels of its own size, O(log n) times in all.

Nothing is removed by being delivered, since each subscription reads in its own time; `prune` and `forget_before`
remove. Deliberately without a lock and without the log: the tracker has both.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap
from sortedcontainers import SortedList

from ..store.codec.run import Int64s, UInt32s
from ..store.errors import BrokenInvariant
from ..store.position import Position

Places = npt.NDArray[np.uint64]
"""Positions as ledger_id << 32 | entry_id, so that their order is that of the log."""

_ENTRY_BYTES = 16
_STRETCH_BYTES = 200
_STRETCH_ENTRIES = 8_192
"""So many entries of a stretch become columns at once, when the first is due."""

_SHORTEST = 32
"""Fewer entries in due order are not worth a stretch."""

_LEAST_READ = 1_024

_PAST = 2**64 - 1
"""Past every place."""


class Stretch(NamedTuple):
    """The entries [first, limit) of a ledger, due from `first_due_ms` to `last_due_ms`, in due order."""

    first_due_ms: int
    ledger_id: int
    first: int
    limit: int
    last_due_ms: int


ReadDues = Callable[[Stretch], tuple[UInt32s, Int64s]]
"""Entry ids of a stretch and their due times, those that can be read."""


class _Level(NamedTuple):
    dues: Int64s
    places: Places

    @classmethod
    def merged(cls, *levels: Self) -> Self:
        dues = np.concatenate([level.dues for level in levels])
        places = np.concatenate([level.places for level in levels])
        order = np.lexsort((places, dues))
        return cls(dues[order], places[order])


def place(position: Position) -> int:
    """A position as one number, as `place_of`. Raises BrokenInvariant for a ledger id of more than 32 bits."""
    ledger_id, entry_id = position
    if ledger_id >> 32:
        raise BrokenInvariant(f"ledger id {ledger_id} is wider than 32 bits")
    return ledger_id << 32 | entry_id


class WaitingEntries:
    """Entries of a log by (due time, position). Not thread-safe."""

    def __init__(self, read_dues: ReadDues) -> None:
        self._read_dues = read_dues
        self._stretches: SortedList[Stretch] = SortedList()
        self._last: Stretch | None = None
        self._last_dues: Int64s | None = None
        """Due times of the stretch that was added to last, as long as they are few."""
        self._levels: list[_Level] = []
        self._in_stretches = 0

    def __len__(self) -> int:
        return self._in_stretches + sum(len(level.dues) for level in self._levels)

    def memory_bytes(self) -> int:
        """Bytes of the columns, and an estimate for the stretches. O(levels)."""
        indexed = len(self) - self._in_stretches
        return indexed * _ENTRY_BYTES + len(self._stretches) * _STRETCH_BYTES

    def clear(self) -> None:
        self._stretches.clear()
        self._levels.clear()
        self._last = self._last_dues = None
        self._in_stretches = 0

    def add(self, ledger_id: int, first: int, dues: Int64s) -> None:
        """Add the entries [first, first + len(dues)) of a ledger, none of which is in here."""
        if not len(dues):
            return
        ordered = bool((dues[1:] >= dues[:-1]).all())
        if ordered and self._lengthen(ledger_id, first, dues):
            return
        self._spread_last()
        if ordered:
            self._keep(Stretch(int(dues[0]), ledger_id, first, first + len(dues), int(dues[-1])), dues)
        else:
            self.add_some(ledger_id, np.arange(first, first + len(dues), dtype=np.uint32), dues)

    def add_some(self, ledger_id: int, entries: UInt32s, dues: Int64s) -> None:
        """Add entries of a ledger in any order, none of which is in here."""
        if not len(entries):
            return
        order = np.lexsort((entries, dues))
        places = (entries[order].astype(np.uint64)) | np.uint64(place(Position(ledger_id, 0)))
        level = _Level(dues[order].astype(np.int64), places)
        while self._levels and len(self._levels[-1].dues) <= 2 * len(level.dues):
            level = _Level.merged(self._levels.pop(), level)
        self._levels.append(level)

    def _lengthen(self, ledger_id: int, first: int, dues: Int64s) -> bool:
        """Add to the end of the stretch that was added to last, if that is where the entries belong."""
        last = self._last
        if last is None or (last.ledger_id, last.limit) != (ledger_id, first) or last.last_due_ms > dues[0]:
            return False
        if last.limit - last.first >= _STRETCH_ENTRIES:
            return False
        known = None if self._last_dues is None else np.concatenate((self._last_dues, dues))
        self._drop(last)
        self._keep(last._replace(limit=first + len(dues), last_due_ms=int(dues[-1])), known)
        return True

    def _keep(self, stretch: Stretch, dues: Int64s | None) -> None:
        place(Position(stretch.ledger_id, stretch.first))
        self._stretches.add(stretch)
        self._in_stretches += stretch.limit - stretch.first
        self._last, self._last_dues = stretch, dues if dues is not None and len(dues) < _SHORTEST else None

    def _drop(self, stretch: Stretch) -> None:
        self._stretches.remove(stretch)
        self._in_stretches -= stretch.limit - stretch.first
        if stretch == self._last:
            self._last = self._last_dues = None

    def _spread_last(self) -> None:
        """Turn the entries added last, too few for a stretch, into columns."""
        if self._last is not None and self._last_dues is not None:
            self._spread(self._last)

    def _spread(self, stretch: Stretch) -> None:
        if stretch == self._last and self._last_dues is not None:
            entries, dues = np.arange(stretch.first, stretch.limit, dtype=np.uint32), self._last_dues
        else:
            entries, dues = self._read_dues(stretch)
        self._drop(stretch)
        self.add_some(stretch.ledger_id, entries, dues)

    # -- asking ----------------------------------------------------------------------------------

    def after(self, due_ms: int, delivered: Position, until_ms: int, least: int) -> Iterator[tuple[Int64s, Places]]:
        """Entries after (due_ms, delivered) that are due by `until_ms`, in that order, in batches of about `least`.

        Use the iterator up, or drop it, before anything is added or removed.
        """
        least = max(least, _LEAST_READ)
        key = (due_ms, _place_or_past(delivered))
        more = True
        while more:
            horizon_ms = self._spread_until(key, until_ms, least)
            more = horizon_ms < until_ms
            bound = (horizon_ms, _PAST)
            parts: list[_Level] = []
            for level in self._levels:
                at = _first_after(level, key)
                limit = int(np.searchsorted(level.dues, horizon_ms, side="right"))
                if limit - at > least:
                    limit, more = at + least, True
                    bound = min(bound, (int(level.dues[limit - 1]), int(level.places[limit - 1])))
                if limit > at:
                    parts.append(_Level(level.dues[at:limit], level.places[at:limit]))
            if parts:
                found = parts[0] if len(parts) == 1 else _Level.merged(*parts)
                limit = _first_after(found, bound)
                yield found.dues[:limit], found.places[:limit]
            key = bound

    def _spread_until(self, key: tuple[int, int], until_ms: int, least: int) -> int:
        """Turn into columns the stretches that may hold one of the `least` entries after `key`.

        Returns a time, at most `until_ms`, up to which the columns have everything.
        """
        while self._stretches and self._stretches[0].first_due_ms <= until_ms:
            first_due_ms = self._stretches[0].first_due_ms
            ready = 0
            for level in self._levels:
                ready += max(int(np.searchsorted(level.dues, first_due_ms)) - _first_after(level, key), 0)
            if ready >= least:
                return first_due_ms - 1
            self._spread(self._stretches[0])
        return until_ms

    def next_due_ms(self, due_ms: int, *, inclusive: bool) -> int | None:
        """The earliest due time after `due_ms`, or at it; None when there is none."""
        side: str = "left" if inclusive else "right"
        while True:
            found: int | None = None
            for level in self._levels:
                at = int(np.searchsorted(level.dues, due_ms, side=side))  # type: ignore[call-overload]
                if at < len(level.dues):
                    first = int(level.dues[at])
                    found = first if found is None else min(found, first)
            if not self._stretches:
                return found
            stretch = self._stretches[0]
            if found is not None and found <= stretch.first_due_ms:
                return found
            if stretch.first_due_ms > due_ms or (inclusive and stretch.first_due_ms == due_ms):
                return stretch.first_due_ms
            self._spread(stretch)

    def count_after(self, due_ms: int) -> int:
        """Entries due later than `due_ms`. O(log n), but for stretches that have begun to be due."""
        while self._stretches and self._stretches[0].first_due_ms <= due_ms:
            self._spread(self._stretches[0])
        not_due = sum(
            len(level.dues) - int(np.searchsorted(level.dues, due_ms, side="right")) for level in self._levels
        )
        return self._in_stretches + not_due

    def after_by_ledger(self, due_ms: int, delivered: Position, limit: Position | None = None) -> dict[int, BitMap]:
        """Entries after (due_ms, delivered), in order of due time, that lie before `limit` in the log, by ledger id.

        No bitmap is empty. O(entries of columns + stretches).
        """
        self.count_after(due_ms)
        bound = _PAST if limit is None else place(limit)
        found: dict[int, BitMap] = {}
        for stretch in self._stretches:
            if place(Position(stretch.ledger_id, stretch.first)) < bound:
                end = stretch.limit if limit is None or limit.ledger_id > stretch.ledger_id else limit.entry_id
                found.setdefault(stretch.ledger_id, BitMap()).add_range(stretch.first, min(stretch.limit, end))
        for level in self._levels:
            places = level.places[_first_after(level, (due_ms, _place_or_past(delivered))) :]
            places = places[places < np.uint64(bound)]
            ledgers = places >> np.uint64(32)
            for ledger_id in np.unique(ledgers).tolist():
                entries = BitMap(places[ledgers == ledger_id].astype(np.uint32))
                found[ledger_id] = found.get(ledger_id, BitMap()) | entries
        return found

    def dues_between(self, after_ms: int, until_ms: int) -> Int64s:
        """Due times of the entries due after `after_ms` and by `until_ms`, in no order."""
        self.count_after(until_ms)
        parts = [np.empty(0, np.int64)]
        for dues, _ in self._levels:
            first, limit = np.searchsorted(dues, [after_ms, until_ms], side="right").tolist()
            parts.append(dues[first:limit])
        return np.concatenate(parts)

    # -- removing ----------------------------------------------------------------------------------

    def prune(self, due_ms: int) -> None:
        for stretch in list(self._stretches.irange(maximum=Stretch(due_ms, 0, 0, 0, 0))):
            if stretch.last_due_ms < due_ms:
                self._drop(stretch)
        kept = []
        for level in self._levels:
            at = int(np.searchsorted(level.dues, due_ms))
            if at < len(level.dues):
                kept.append(_tail(level, at))
        self._levels = kept

    def forget_before(self, ledger_id: int) -> None:
        for stretch in [stretch for stretch in self._stretches if stretch.ledger_id < ledger_id]:
            self._drop(stretch)
        bound = np.uint64(place(Position(ledger_id, 0)))
        levels = []
        for level in self._levels:
            keep = level.places >= bound
            if keep.all():
                levels.append(level)
            elif keep.any():
                levels.append(_Level(level.dues[keep], level.places[keep]))
        self._levels = levels


def _place_or_past(position: Position) -> int:
    """`place`, or a number past every place for a position past every one."""
    return _PAST if position.ledger_id >> 32 else place(position)


def _first_after(level: _Level, key: tuple[int, int]) -> int:
    """Where in a level the entries after (due time, place) begin. O(log n)."""
    due_ms, number = key
    low = int(np.searchsorted(level.dues, due_ms, side="left"))
    high = int(np.searchsorted(level.dues, due_ms, side="right"))
    return low + int(np.searchsorted(level.places[low:high], np.uint64(number), side="right"))


def _tail(level: _Level, at: int) -> _Level:
    """A level without its first `at` entries; copied once that frees half of the memory."""
    tail = _Level(level.dues[at:], level.places[at:])
    whole = tail.dues.base
    if whole is not None and len(whole) > 2 * len(tail.dues):
        return _Level(tail.dues.copy(), tail.places.copy())
    return tail
