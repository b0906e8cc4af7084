"""A set of positions, one roaring bitmap for each ledger: what dispatching keeps instead of an object per message.

Owns the set operations and nothing else. Entry ids are 32 bits wide (see ``store/codec/format.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter

import numpy as np
from pyroaring import BitMap

from duelog.store.codec.bits import bitmap
from duelog.store.errors import BrokenInvariant, InvalidArgument
from duelog.store.position import ENTRY_MASK, MessageIds, Place, Position, position_at


class PositionSet:
    """Positions in log order. Not thread-safe; do not change it while iterating."""

    __slots__ = ("_ledgers",)

    def __init__(self) -> None:
        self._ledgers: dict[int, BitMap] = {}

    def __len__(self) -> int:
        return sum(map(len, self._ledgers.values()))

    def __bool__(self) -> bool:
        return bool(self._ledgers)

    def __contains__(self, position: tuple[int, int]) -> bool:
        entries = self._ledgers.get(position[0])
        return entries is not None and position[1] in entries

    def __iter__(self) -> Iterator[Position]:
        for ledger_id in sorted(self._ledgers):
            for entry_id in self._ledgers[ledger_id]:
                yield Position(ledger_id, entry_id)

    def first(self, count: int) -> list[Position]:
        return list(islice(self, count))

    def least(self) -> Position | None:
        if not self._ledgers:
            return None
        ledger_id = min(self._ledgers)
        return Position(ledger_id, self._ledgers[ledger_id].min())

    def by_ledger(self) -> Mapping[int, BitMap]:
        """The bitmaps themselves by ledger id, none of them empty: to be read only, and not kept."""
        return self._ledgers

    def shared(self, ledger_id: int, entries: BitMap) -> BitMap | None:
        """Those of ``entries`` that are in the set; None if none is."""
        held = self._ledgers.get(ledger_id)
        if held is None or held.isdisjoint(entries):
            return None
        return held & entries

    def add(self, position: Position) -> None:
        ledger_id, entry_id = position
        held = self._ledgers.get(ledger_id)
        if held is None:
            held = self._ledgers[ledger_id] = BitMap()
        held.add(entry_id)

    def update(self, ledger_id: int, entries: BitMap) -> None:
        """Add entries of one ledger; the bitmap stays the caller's."""
        held = self._ledgers.get(ledger_id)
        if held is not None:
            held |= entries
        elif entries:
            self._ledgers[ledger_id] = entries.copy()

    def discard(self, position: Position) -> bool:
        ledger_id, entry_id = position
        held = self._ledgers.get(ledger_id)
        if held is None or entry_id not in held:
            return False
        held.discard(entry_id)
        if not held:
            del self._ledgers[ledger_id]
        return True

    def remove(self, ledger_id: int, entries: BitMap) -> int:
        held = self._ledgers.get(ledger_id)
        if held is None:
            return 0
        before = len(held)
        held -= entries
        after = len(held)
        if not after:
            del self._ledgers[ledger_id]
        return before - after

    def remove_through(self, position: Position) -> None:
        """Remove everything at or before ``position``; its entry id may be -1."""
        ledger_id, entry_id = position
        for held_ledger in [held_ledger for held_ledger in self._ledgers if held_ledger <= ledger_id]:
            held = self._ledgers[held_ledger]
            if held_ledger == ledger_id:
                held.remove_range(0, entry_id + 1)
            if held_ledger < ledger_id or not held:
                del self._ledgers[held_ledger]

    def clear(self) -> None:
        self._ledgers.clear()

    def _check(self) -> None:
        if not all(self._ledgers.values()):
            raise BrokenInvariant("a set of positions holds an empty bitmap")


_LEDGER, _ENTRY = itemgetter(0), itemgetter(1)
_NUMBERS = {int}


def group_by_ledger(positions: Sequence[tuple[int, int]]) -> dict[int, BitMap]:
    """The entry ids of ``positions`` by ledger id; raises InvalidArgument for an entry id outside 32 bits."""
    if not positions:
        return {}
    if len(positions) == 1:
        ((ledger_id, entry_id),) = positions
        return {ledger_id: _bitmap((entry_id,))}
    first = positions[0][0]
    ledger_ids = list(map(_LEDGER, positions))  # zip(*positions) would make an iterator for each
    if ledger_ids.count(first) == len(ledger_ids):
        return {first: _bitmap(list(map(_ENTRY, positions)))}
    lists: dict[int, list[int]] = {}
    for ledger_id, entry_id in positions:
        lists.setdefault(ledger_id, []).append(entry_id)
    return {ledger_id: _bitmap(entry_list) for ledger_id, entry_list in lists.items()}


def group_places(places: Sequence[Place]) -> dict[int, BitMap]:
    """The entry ids of places by ledger id, as `group_by_ledger`."""
    if places and set(map(type, places)) == _NUMBERS:  # numbers, as the log's reader makes them
        ledger_id = min(places) >> 32  # type: ignore[operator]
        if max(places) >> 32 == ledger_id:  # type: ignore[operator]
            return {ledger_id: bitmap([place & ENTRY_MASK for place in places])}  # type: ignore[operator]
    return group_by_ledger([position_at(place) for place in places])


def group_ids(ids: MessageIds) -> dict[int, BitMap]:
    """The entry ids of ids by ledger id, as `group_by_ledger`, column by column."""
    ledgers, entries = ids.columns()
    if len(ids) and (entries.min() < 0 or entries.max() > ENTRY_MASK):
        return group_by_ledger(ids.to_list())
    found = {}
    for ledger_id in np.unique(ledgers).tolist():
        found[ledger_id] = BitMap(entries[ledgers == ledger_id].astype(np.uint32))
    return found


def _bitmap(entry_ids: Sequence[int]) -> BitMap:
    try:
        return bitmap(entry_ids)
    except OverflowError:
        bad = next(entry_id for entry_id in entry_ids if not 0 <= entry_id < 2**32)
        raise InvalidArgument("entry_id", bad, "an entry id is 0 to 2**32 - 2") from None
