"""Acknowledgements of a subscription: the mark-delete position and a roaring bitmap for each ledger after it.

Owns the arithmetic and the serialised form of the bitmaps; forgets no acknowledgement for want of
space: there is no cap on ranges or entries. Deliberately without storage and without a lock: the caller writes what
``changes`` gives into one transaction, and holds the subscription's lock.

Normal form, kept after every call:

- no bitmap is empty or holds an entry at or before the mark-delete position;
- the entry after the mark-delete position is not acknowledged. After the last entry of a closed ledger that is the
  first entry of the ledger that follows, so the mark-delete position stays at ``(ledger, entries - 1)`` until that
  one is acknowledged. A ledger and all before it are acknowledged in full if and only if it is there or later.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from pyroaring import BitMap

from ..store.codec.bits import BitChange
from ..store.errors import BrokenInvariant, InvalidArgument
from ..store.position import BEFORE_FIRST, Position

_NONE = BitMap()


class LedgerList(Protocol):
    """A topic's ledgers: ids increase, each holds entries 0 to n - 1, only the last may be empty or still grow."""

    def entries_of(self, ledger_id: int) -> int | None:
        """Committed number of entries; None if there is no such ledger (it was trimmed or never existed)."""

    def following(self, ledger_id: int) -> int | None:
        """The least ledger id over ``ledger_id``, which may be any number; None if there is none."""


class AckChanges(NamedTuple):
    """The writes that bring the disk to the acknowledgements as they were when this was taken.

    acked: by ledger id, the change of the bitmap that is stored.
    """

    mark_delete_changed: bool
    mark_delete: Position
    acked: Mapping[int, BitChange]

    def __bool__(self) -> bool:
        return self.mark_delete_changed or bool(self.acked)


class AckSet:
    """Mark-delete position and the acknowledged entries after it. Not thread-safe.

    A mark-delete position with the entry id BEFORE_FIRST acknowledges nothing of its ledger.
    """

    def __init__(self, mark_delete: Position, acked: Mapping[int, BitMap] | None = None) -> None:
        """Take over what was stored; the bitmaps are copied.

        Call ``trim_to`` once with the topic's first ledger if ledgers may have gone since it was stored.
        """
        self._mark_delete = _valid(mark_delete)
        self._acked: dict[int, BitMap] = {}
        self._stored = {ledger_id: entries.copy() for ledger_id, entries in (acked or {}).items()}
        """The bitmaps as they are on disk."""
        self._dirty: set[int] = set()
        self._mark_dirty = False
        for ledger_id, entries in (acked or {}).items():
            kept = entries.copy()
            if ledger_id < mark_delete.ledger_id:
                kept.clear()
            elif ledger_id == mark_delete.ledger_id:
                kept.remove_range(0, mark_delete.entry_id + 1)
            if kept:
                self._acked[ledger_id] = kept
            if len(kept) != len(entries) or not kept:
                self._dirty.add(ledger_id)

    @classmethod
    def load(cls, mark_delete: Position, rows: Mapping[int, bytes]) -> "AckSet":
        """The inverse of writing every ``AckChanges``: mark-delete and the stored rows by ledger id.

        Raises ValueError if a row is no bitmap; telling a flipped bit from a good row is the checksum's work.
        """
        return cls(mark_delete, {ledger_id: BitMap.deserialize(row) for ledger_id, row in rows.items()})

    def copy(self) -> "AckSet":
        """An independent set that is equal, and has the same changes to write. O(bytes of the bitmaps)."""
        other = AckSet.__new__(AckSet)
        other._mark_delete, other._mark_dirty = self._mark_delete, self._mark_dirty
        other._acked = {ledger_id: entries.copy() for ledger_id, entries in self._acked.items()}
        other._stored, other._dirty = self._stored.copy(), self._dirty.copy()
        return other

    # -- asking --------------------------------------------------------------------------------

    @property
    def mark_delete(self) -> Position:
        """Everything at or before it is acknowledged."""
        return self._mark_delete

    @property
    def changed(self) -> bool:
        """True if ``changes`` may have anything to write. O(1)."""
        return self._mark_dirty or bool(self._dirty)

    def has_ended_ledger(self, before: Position, ledgers: LedgerList) -> bool:
        """Return whether mark-delete, which was at ``before``, has come to the end of a ledger: it may be trimmed."""
        after = self._mark_delete
        if after.ledger_id != before.ledger_id:
            return True
        return after != before and ledgers.entries_of(after.ledger_id) == after.entry_id + 1

    def is_acked(self, position: Position) -> bool:
        """Return True if ``position`` is acknowledged. It does not check that the position exists. O(1)."""
        if position <= self._mark_delete:
            return True
        entries = self._acked.get(position[0])
        return entries is not None and position[1] in entries

    def unacked(self, ledger_id: int, start: int, limit: int) -> BitMap:
        """The unacknowledged entry ids of ``[start, limit)``, whether or not those entries exist yet."""
        return self.unacked_of(ledger_id, BitMap(range(start, limit)))

    def unacked_of(self, ledger_id: int, entries: BitMap) -> BitMap:
        """Those of ``entries`` that are not acknowledged."""
        marked_ledger, marked_entry = self._mark_delete
        if ledger_id < marked_ledger:
            return BitMap()
        found = entries.copy()
        if ledger_id == marked_ledger:
            found.remove_range(0, marked_entry + 1)
        acked = self._acked.get(ledger_id)
        if acked is not None:
            found -= acked
        return found

    def backlog(self, ledgers: LedgerList) -> int:
        """Number of unacknowledged entries up to the end of the log. O(ledgers after mark-delete)."""
        ledger_id: int | None
        ledger_id, marked_entry = self._mark_delete
        count = 0
        start = marked_entry + 1
        while ledger_id is not None:
            entries = ledgers.entries_of(ledger_id)
            if entries is not None:
                count += entries - start
                acked = self._acked.get(ledger_id)
                if acked is not None:
                    count -= len(acked)
            ledger_id = ledgers.following(ledger_id)
            start = 0
        return count

    # -- acknowledging -------------------------------------------------------------------------

    def validate(self, ledger_id: int, last_entry: int, ledgers: LedgerList) -> int | None:
        """Number of entries of the ledger, or None if it was trimmed.

        Raises InvalidArgument if the topic has no such ledger, or ``last_entry`` is past the ledger's end.
        """
        entries = ledgers.entries_of(ledger_id)
        if entries is None:
            first = ledgers.following(-1)
            if ledger_id > self._mark_delete[0] and (first is None or ledger_id > first):
                raise InvalidArgument("ledger_id", ledger_id, "the topic has no such ledger")
        elif last_entry >= entries:
            raise InvalidArgument("entry_id", last_entry, f"ledger {ledger_id} has {entries} entries")
        return entries

    def ack(self, ledger_id: int, entries: BitMap, ledgers: LedgerList) -> int:
        """Acknowledge entries of one ledger; the number that were not acknowledged before.

        Entries of a trimmed ledger count as acknowledged. Raises InvalidArgument as ``validate`` does; nothing is
        acknowledged then. Costs a few bitmap operations whatever the number of entries, and amortised O(1) for
        each entry that mark-delete moves over.
        """
        size = len(entries)
        if not size:
            return 0
        start = entries.min()
        last = start if size == 1 else entries.max()
        length = self.validate(ledger_id, last, ledgers)
        marked_ledger, marked_entry = self._mark_delete
        if length is None or ledger_id < marked_ledger:
            return 0
        held = self._acked.get(ledger_id)
        marked = ledger_id == marked_ledger
        if marked and start == marked_entry + 1 and last - start + 1 == size:  # in order: no bitmap has to grow
            newly = size
            if held is not None and size > 1:
                newly -= held.intersection_cardinality(entries)
                if newly != size:
                    held -= entries
                    self._changed(ledger_id, held)
            self._move_mark(Position(ledger_id, last))
            if held is not None or last + 1 == length:
                self._advance(ledgers)
            return newly
        before = 0
        if held is None:
            held = entries.copy()
        else:
            before = len(held)
            held |= entries
        if marked and start <= marked_entry:
            held.remove_range(0, marked_entry + 1)
        newly = len(held) - before
        if not newly:
            return 0
        self._acked[ledger_id] = held
        self._dirty.add(ledger_id)
        if start == 0 or marked:
            self._advance(ledgers)
        return newly

    def ack_cumulative(self, position: Position, ledgers: LedgerList, but: Mapping[int, BitMap] | None = None) -> int:
        """Acknowledge everything at or before ``position``; the number of entries that were not before.

        An entry id of -1 acknowledges what stands before that ledger. but: entries by ledger id, none of the bitmaps
        empty, that stay as they are. Raises InvalidArgument as ``validate`` does. O(ledgers between).
        """
        first = None if but is None else _least(but)
        if but is not None and first is not None and first <= position:
            return self._ack_all_but(position, first, but, ledgers)
        ledger_id, entry_id = _valid(position)
        length = self.validate(ledger_id, entry_id, ledgers)
        at, marked_entry = self._mark_delete
        if length is None or position <= self._mark_delete:
            return 0
        newly = 0
        start = marked_entry + 1
        while at < ledger_id:
            newly += max((ledgers.entries_of(at) or 0) - start, 0)
            following = ledgers.following(at)
            if following is None:
                raise BrokenInvariant(f"ledger {ledger_id} has entries but does not follow ledger {at}")
            at, start = following, 0
        newly += entry_id + 1 - start
        for held_ledger in [held_ledger for held_ledger in self._acked if held_ledger <= ledger_id]:
            held = self._acked[held_ledger]
            before = len(held)
            if held_ledger < ledger_id:
                held.clear()
            else:
                held.remove_range(0, entry_id + 1)
            if len(held) != before:
                newly -= before - len(held)
                self._changed(held_ledger, held)
        self._move_mark(Position(ledger_id, entry_id))
        self._advance(ledgers)
        return newly

    def _ack_all_but(self, position: Position, first: Position, but: Mapping[int, BitMap], ledgers: LedgerList) -> int:
        """``ack_cumulative`` where ``first``, the least of ``but``, is at or before ``position``."""
        self.validate(*position, ledgers)
        newly = self.ack_cumulative(Position(first.ledger_id, first.entry_id - 1), ledgers)
        ledger_id: int | None = first.ledger_id
        start = first.entry_id
        while ledger_id is not None and ledger_id <= position.ledger_id:
            limit = position.entry_id + 1 if ledger_id == position.ledger_id else ledgers.entries_of(ledger_id) or 0
            newly += self.ack(ledger_id, BitMap(range(start, limit)) - but.get(ledger_id, BitMap()), ledgers)
            ledger_id, start = ledgers.following(ledger_id), 0
        return newly

    def mend(self, ledgers: LedgerList) -> None:
        """Restore the normal form after a change that did not come to its end, and have all of it written."""
        mended = AckSet(self._mark_delete, self._acked)
        self._dirty.update(self._acked, mended._dirty, self._stored)
        self._acked = mended._acked
        self._mark_dirty = True
        self._advance(ledgers)

    def trim_to(self, first_ledger_id: int, ledgers: LedgerList) -> None:
        """Forget the ledgers before ``first_ledger_id``, which are gone, and restore the normal form.

        A mark-delete position before that ledger moves to its start, and on over what is acknowledged there.
        """
        for ledger_id in [ledger_id for ledger_id in self._acked if ledger_id < first_ledger_id]:
            del self._acked[ledger_id]
            self._dirty.add(ledger_id)
        if self._mark_delete[0] < first_ledger_id:
            self._move_mark(Position(first_ledger_id, BEFORE_FIRST))
        self._advance(ledgers)

    def reset(self, mark_delete: Position) -> None:
        """Seek: everything at or before ``mark_delete`` is acknowledged, everything after it is not."""
        self._move_mark(_valid(mark_delete))
        self._dirty.update(self._acked)
        self._acked.clear()

    def begin(self, mark_delete: Position, but: Mapping[int, BitMap], ledgers: LedgerList) -> None:
        """``reset`` where entries at or before ``mark_delete`` are not acknowledged: those of ``but``, by ledger id."""
        first = _least(but)
        if first is None or first > mark_delete:
            self.reset(mark_delete)
        else:
            self.reset(Position(first.ledger_id, first.entry_id - 1))
            self.ack_cumulative(mark_delete, ledgers, but)

    # -- persisting ----------------------------------------------------------------------------

    def take_changes(self) -> AckChanges:
        """Return the changes to write, which count as written."""
        changes = self.changes()
        self.wrote(changes)
        return changes

    def changes(self) -> AckChanges:
        """Return what is to be written in one transaction; ``wrote`` says that it was."""
        acked: dict[int, BitChange] = {}
        for ledger_id in sorted(self._dirty):
            entries, stored = self._acked.get(ledger_id, _NONE), self._stored.get(ledger_id, _NONE)
            if entries == stored:
                self._dirty.discard(ledger_id)
            else:
                acked[ledger_id] = BitChange(entries - stored, stored - entries)
        return AckChanges(self._mark_dirty, self._mark_delete, acked)

    def wrote(self, changes: AckChanges) -> None:
        """``changes``, of this set or of a copy, are on disk; what has changed since is still to be written."""
        for ledger_id, change in changes.acked.items():
            stored = BitMap(change.members(self._stored.pop(ledger_id, _NONE)))
            if stored:
                self._stored[ledger_id] = stored
            if stored == self._acked.get(ledger_id, _NONE):
                self._dirty.discard(ledger_id)
            else:
                self._dirty.add(ledger_id)
        self._mark_dirty = changes.mark_delete != self._mark_delete

    # -- inside --------------------------------------------------------------------------------

    def _move_mark(self, position: Position) -> None:
        self._mark_delete = position
        self._mark_dirty = True

    def _changed(self, ledger_id: int, held: BitMap) -> None:
        self._dirty.add(ledger_id)
        if not held:
            del self._acked[ledger_id]

    def _advance(self, ledgers: LedgerList) -> None:
        """Move mark-delete over the acknowledged entries right after it, across ledgers."""
        ledger_id, entry_id = self._mark_delete
        while True:
            held = self._acked.get(ledger_id)
            if held is not None and entry_id + 1 in held:
                limit = _first_missing(held, entry_id + 1)
                held.remove_range(entry_id + 1, limit)
                self._changed(ledger_id, held)
                entry_id = limit - 1
                self._move_mark(Position(ledger_id, entry_id))
            length = ledgers.entries_of(ledger_id)
            if length is not None and entry_id + 1 < length:
                return
            following = ledgers.following(ledger_id)
            if following is None or 0 not in self._acked.get(following, ()):
                return
            ledger_id, entry_id = following, BEFORE_FIRST

    def _check(self, ledgers: LedgerList) -> None:
        """Raise BrokenInvariant unless the normal form holds and every acknowledged entry exists."""
        for ledger_id, entries in self._acked.items():
            if not entries:
                raise BrokenInvariant(f"empty bitmap of ledger {ledger_id}")
            if (ledger_id, entries.min()) <= self._mark_delete:
                raise BrokenInvariant(f"ledger {ledger_id} entry {entries.min()} is not after {self._mark_delete}")
            length = ledgers.entries_of(ledger_id)
            if length is None or entries.max() >= length:
                raise BrokenInvariant(f"ledger {ledger_id} has {length} entries, {entries.max()} is acknowledged")
        ledger_id, entry_id = self._mark_delete
        length = ledgers.entries_of(ledger_id)
        if length is not None and entry_id >= length:
            raise BrokenInvariant(f"mark-delete {self._mark_delete} is past the {length} entries of its ledger")
        if length is None or entry_id + 1 == length:
            following = ledgers.following(ledger_id)
            if following is None:
                return
            ledger_id, entry_id = following, BEFORE_FIRST
        if entry_id + 1 in self._acked.get(ledger_id, ()):
            raise BrokenInvariant(f"the entry after mark-delete {self._mark_delete} is acknowledged")


def _valid(position: Position) -> Position:
    if position.entry_id < BEFORE_FIRST:
        raise InvalidArgument("position", position, f"an entry id starts at {BEFORE_FIRST}")
    return position


def _least(entries: Mapping[int, BitMap]) -> Position | None:
    """The least position of bitmaps by ledger id, none of them empty; None where there is none."""
    if not entries:
        return None
    ledger_id = min(entries)
    return Position(ledger_id, entries[ledger_id].min())


def _first_missing(entries: BitMap, start: int) -> int:
    """The least entry id from ``start`` on, itself a member, that is no member. O(log of the run's length)."""
    if start + 1 not in entries:
        return start + 1
    limits = range(start + 2, start + len(entries) + 1)  # the run has no more members than all of them
    return start + 1 + bisect_left(limits, True, key=lambda limit: not entries.contains_range(start, limit))
