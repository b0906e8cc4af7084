"""A topic's main log: a list of ledgers, appended at the end, rolled over, trimmed from the front.

The list in memory is what is committed. It is replaced, never changed in place, by the leader of a
commit; readers of any thread see the old list or the new one.

Invariant: ledger ids ascend; every ledger but the last is closed and not empty. A ledger that is full
is closed in the commit that fills it, so that it can be trimmed as soon as every subscription has passed it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ..codec.bodies import Bodies
from ..codec.format import MAX_ENTRY_ID, LedgerRecord, LedgerState, ledger_key, run_key
from ..codec.run import Int64s, RunLimits, UInt32s, seal_run
from ..env.memtable import Reads
from ..env.transaction import Transaction
from ..errors import BrokenInvariant, CorruptRecord
from ..position import Position
from . import catalog
from .ledger import Ledger, find_tail, insert_markers, insert_messages
from .scan import measured


class LedgerLimits(NamedTuple):
    """Limits at which a ledger is full (StoreConfig.ledger_max_*)."""

    entries: int
    bytes: int
    age_ms: int


class LedgerInfo(NamedTuple):
    """A ledger of the list; `entries` and `stored_bytes` are final when `closed`.

    closed_ms: when it was closed and all its messages were due: the latest due time of the inline ones.
    """

    ledger_id: int
    created_ms: int
    closed_ms: int
    entries: int
    stored_bytes: int
    closed: bool


class Segment(NamedTuple):
    """The place of consecutive entries of an append: [first_entry, first_entry + count) of one ledger."""

    ledger_id: int
    first_entry: int
    length: int


@dataclass(frozen=True, slots=True)
class _View:
    """The committed list: closed ledgers, and the open one at the end."""

    closed: tuple[LedgerInfo, ...]
    tail: Ledger
    tail_created_ms: int
    by_id: dict[int, LedgerInfo] = field(default_factory=dict)


class LedgerSnapshot(NamedTuple):
    """The committed list at one instant, or the beginning of it."""

    view: _View
    end: Position
    """One past the last entry; its ledger is in the list."""

    def entries_of(self, ledger_id: int) -> int | None:
        """Entries of a ledger before the end; None when it is not in the list, or after the end."""
        if ledger_id >= self.end.ledger_id:
            return self.end.entry_id if ledger_id == self.end.ledger_id else None
        info = self.view.by_id.get(ledger_id)
        return None if info is None else info.entries

    def following(self, ledger_id: int) -> int | None:
        """The id of the first ledger after `ledger_id`, which need not be there itself; None past the last."""
        view = self.view
        if ledger_id >= self.end.ledger_id:
            return None
        at = bisect_right(view.closed, ledger_id, key=attrgetter("ledger_id"))
        return view.closed[at].ledger_id if at < len(view.closed) else view.tail.ledger_id

    def ranges(self, start: Position, limit: Position) -> Iterator[tuple[int, int, int]]:
        """(ledger id, first entry, limit) of each ledger from `start` on and before `limit`."""
        ledger_id, first = start
        following: int | None = ledger_id
        while following is not None and (following, first) < limit:
            entries = self.entries_of(following) or 0
            yield following, first, min(entries, limit.entry_id) if following == limit.ledger_id else entries
            following, first = self.following(following), 0


class ManagedLedger:
    """The main log of one topic. Reading its list is thread-safe; it is changed in transactions only."""

    def __init__(
        self,
        topic_id: int,
        view: _View,
        runs_: RunLimits,
        limits: LedgerLimits,
        changed: Callable[[int, bool], None] | None = None,
    ) -> None:
        """`changed` is called in the leader's thread after each commit that touched the log; takes leaf locks only.

        Its arguments: the topic id, and whether a ledger was closed or trimmed, or the open one got its first entry.
        """
        self.topic_id = topic_id
        self._view = view
        self._runs = runs_
        self._limits = limits._replace(entries=min(limits.entries, MAX_ENTRY_ID))
        self._changed = changed
        self._hidden: tuple[Hidden, ...] = ()
        """Entries that are not yet visible: nothing from `first` on is read before `due_ms`. Both ascend."""

    @classmethod
    def load(
        cls,
        raw: Reads,
        environment: str,
        topic_id: int,
        runs_: RunLimits,
        limits: LedgerLimits,
        changed: Callable[[int, bool], None] | None = None,
    ) -> "ManagedLedger":
        """Load the main log that the catalog has; reads the headers of the open ledger's runs."""
        closed: list[LedgerInfo] = []
        tail: Ledger | None = None
        created_ms = 0
        for ledger_id, record in catalog.ledgers(raw, topic_id):
            if record.state is LedgerState.OPEN:
                size, due_by_ms = measured(raw, environment, ledger_id)
                tail = Ledger(ledger_id, find_tail(raw, environment, ledger_id), size)
                tail.due_by_ms = due_by_ms
                created_ms = record.created_ms
            elif record.state is LedgerState.CLOSED:
                closed.append(_info(ledger_id, record))
        if tail is None:
            raise CorruptRecord(f"topic {topic_id} has no open ledger")
        return cls(topic_id, _view(tuple(closed), tail, created_ms), runs_, limits, changed)

    # -- the list --------------------------------------------------------------------------------

    def ledgers(self) -> list[LedgerInfo]:
        """Every ledger, oldest first, the open one last."""
        view = self._view
        tail = view.tail
        return [
            *view.closed,
            LedgerInfo(tail.ledger_id, view.tail_created_ms, 0, tail.entries, tail.stored_bytes, closed=False),
        ]

    def entries_of(self, ledger_id: int) -> int | None:
        """Committed entries of a ledger; None when it is not in the list."""
        view = self._view
        tail = view.tail
        if ledger_id >= tail.ledger_id:
            return tail.entries if ledger_id == tail.ledger_id else None
        info = view.by_id.get(ledger_id)
        return None if info is None else info.entries

    def following(self, ledger_id: int) -> int | None:
        """The id of the first ledger after `ledger_id`, which need not be there itself; None past the last."""
        return self.snapshot().following(ledger_id)

    def snapshot(self) -> LedgerSnapshot:
        """The list as it is now. A read transaction begun after this sees everything in it."""
        view = self._view
        return LedgerSnapshot(view, Position(view.tail.ledger_id, view.tail.entries))

    def visible(self, now_ms: int) -> LedgerSnapshot:
        """The part that may be read at `now_ms`. REQUIRES: a time that never goes back while `hides_some`."""
        all_of_it = self.snapshot()  # first: what it shows is waited for by then
        first = first_hidden(self._hidden, now_ms)
        return all_of_it if first is None else LedgerSnapshot(all_of_it.view, min(all_of_it.end, first.first))

    @property
    def hides_some(self) -> bool:
        """True while an entry was written that is not yet visible, and until the first firing after it is."""
        return bool(self._hidden)

    def next_visible_ms(self, now_ms: int) -> int | None:
        """Time from which more may be read than at `now_ms`, if nothing more is appended; None: never."""
        first = first_hidden(self._hidden, now_ms)
        return None if first is None else first.due_ms

    def first_undue(self, now_ms: int) -> Position | None:
        """The beginning of the first ledger with a message not yet visible at `now_ms`; None: there is none.

        O(ledgers).
        """
        view = self._view
        for info in view.closed:
            if info.closed_ms > now_ms:
                return Position(info.ledger_id, 0)
        return Position(view.tail.ledger_id, 0) if view.tail.due_by_ms > now_ms else None

    @property
    def first_ledger(self) -> int:
        view = self._view
        return view.closed[0].ledger_id if view.closed else view.tail.ledger_id

    @property
    def end(self) -> Position:
        """The position that the next append gets."""
        tail = self._view.tail
        return Position(tail.ledger_id, tail.entries)

    # -- changes ---------------------------------------------------------------------------------

    def append_message(
        self, transaction: Transaction, due_ms: int, fields: bytes, body: bytes, now_ms: int
    ) -> tuple[int, int]:
        """Append one message (`fields_of_message`, early where it is not due); returns its ledger id and entry id."""
        staged = self._staged(transaction)
        staged.roll_if_full(transaction, now_ms)  # by a limit that is lower since the store was opened again
        ledger_id, entry_id = staged.ledger.ledger_id, staged.next_entry
        key = run_key(ledger_id, entry_id)
        value = seal_run(key, fields, (body,))
        transaction.insert_run(key, value, 1)
        if due_ms > now_ms:
            staged.due_by_ms = max(staged.due_by_ms, due_ms)
        staged.next_entry = entry_id + 1
        staged.bytes += len(value)
        staged.roll_if_full(transaction, now_ms)
        return ledger_id, entry_id

    def append_messages(
        self, transaction: Transaction, dues: Int64s, bodies: Sequence[bytes], now_ms: int
    ) -> list[Segment]:
        """Append messages; returns where they went, more than one segment where ledgers roll over."""
        staged = self._staged(transaction)
        segments, start, before = [], 0, 0
        ends = np.cumsum(Bodies.of(bodies).sizes())
        while start < len(bodies):
            capacity = staged.capacity(transaction, now_ms)
            full = int(np.searchsorted(ends, before + self._limits.bytes - staged.bytes)) + 1
            limit = max(min(full, start + capacity, len(bodies)), start + 1)
            part, last_ms = dues[start:limit], int(dues[start:limit].max())
            early = last_ms > now_ms
            if early:
                staged.due_by_ms = max(staged.due_by_ms, last_ms)
            ledger_id, first = staged.ledger.ledger_id, staged.next_entry
            size = insert_messages(
                transaction, ledger_id, first, part, bodies[start:limit], None, self._runs, early=early
            )
            segments.append(staged.took(limit - start, size))
            start, before = limit, int(ends[limit - 1])
        staged.roll_if_full(transaction, now_ms)
        return segments

    def append_markers(
        self,
        transaction: Transaction,
        target: int,
        base_ms: int,
        entries: UInt32s,
        dues: Int64s,
        now_ms: int,
        early_from_ms: int | None = None,
    ) -> list[Segment]:
        """Append markers of entries of one partition log, fired at `now_ms`; returns where they went.

        early_from_ms: the time now, where `now_ms` is yet to come: an entry due later is not read before it is due, nor
        is what comes after it (`visible`).
        """
        staged = self._staged(transaction)
        segments = []
        start = 0
        while start < len(entries):
            limit = min(start + staged.capacity(transaction, now_ms), len(entries))
            ledger_id, first = staged.ledger.ledger_id, staged.next_entry
            size = insert_markers(
                transaction, ledger_id, first, target, base_ms, entries[start:limit], dues[start:limit], now_ms
            )
            segments.append(staged.took(limit - start, size))
            start = limit
        staged.roll_if_full(transaction, now_ms)
        if early_from_ms is not None:
            staged.hide(segments, dues, early_from_ms)
        return segments

    def latest(self, now_ms: int) -> Position:
        """The read limit: the first position that is not visible yet, or not appended; in a ledger that is kept."""
        return max(self.visible(now_ms).end, Position(self.first_ledger, 0))

    def first_in(self, transaction: Transaction) -> int:
        """Id of the first ledger kept, what this transaction trims not counted."""
        staged = self._staged(transaction)
        return staged.closed[0].ledger_id if staged.closed else staged.ledger.ledger_id

    def roll(self, transaction: Transaction, now_ms: int) -> bool:
        """Close the open ledger and begin the next one; False when it is empty."""
        staged = self._staged(transaction)
        if not staged.next_entry:
            return False
        staged.roll(transaction, now_ms)
        return True

    def begin_ledger(self, transaction: Transaction, now_ms: int) -> None:
        """Close the open ledger, remove it where it is empty, and begin the next one."""
        staged = self._staged(transaction)
        if staged.next_entry:
            staged.roll(transaction, now_ms)
        else:
            staged.replace(transaction, now_ms)

    def age_due_ms(self) -> int | None:
        """Time at which the open ledger is rolled for its age; None while it is empty."""
        view = self._view
        return view.tail_created_ms + self._limits.age_ms if view.tail.entries else None

    def trim(self, transaction: Transaction, first_kept: int) -> list[int]:
        """Record that the closed ledgers before `first_kept` are to be removed; returns their ids."""
        staged = self._staged(transaction)
        trimmed = [info for info in staged.closed if info.ledger_id < first_kept]
        staged.closed = tuple(info for info in staged.closed if info.ledger_id >= first_kept)
        staged.changed = True
        for info in trimmed:
            record = LedgerRecord(
                info.created_ms, info.closed_ms, info.entries, info.stored_bytes, LedgerState.TRIMMING
            )
            transaction.put(ledger_key(self.topic_id, info.ledger_id), record.pack())
        return [info.ledger_id for info in trimmed]

    def _staged(self, transaction: Transaction) -> "_StagedLog":
        return transaction.stage(self, _StagedLog)

    def _publish(self, view: _View | None, look: bool) -> None:
        if view is not None:
            self._view = view
        if self._changed is not None:
            self._changed(self.topic_id, look)


def _info(ledger_id: int, record: LedgerRecord) -> LedgerInfo:
    return LedgerInfo(ledger_id, record.created_ms, record.closed_ms, record.entries, record.stored_bytes, closed=True)


def _view(closed: tuple[LedgerInfo, ...], tail: Ledger, created_ms: int) -> _View:
    return _View(closed, tail, created_ms, {info.ledger_id: info for info in closed})


class _StagedLog:
    """The list as one transaction leaves it."""

    __slots__ = (
        "_limits", "_log", "_was_empty", "bytes", "changed", "closed", "created_ms",
        "due_by_ms", "hidden", "ledger", "next_entry",
    )  # fmt: skip

    def __init__(self, log: ManagedLedger) -> None:
        view = log._view
        self._log = log
        self._limits = log._limits
        self.closed = view.closed
        self.created_ms = view.tail_created_ms
        self.ledger = view.tail
        """The open ledger; below, what it is to be."""
        self.next_entry = view.tail.entries
        self._was_empty = not self.next_entry
        self.bytes = view.tail.stored_bytes
        self.due_by_ms = view.tail.due_by_ms
        self.changed = False
        self.hidden = log._hidden

    def hide(self, segments: list[Segment], dues: Int64s, now_ms: int) -> None:
        """Make entries visible from their due times on; forget those that are visible by now."""
        places = [Position(segment.ledger_id, segment.first_entry) for segment in segments]
        lengths = [segment.length for segment in segments]
        self.hidden = still_hidden(self.hidden, places, lengths, dues, now_ms)

    def capacity(self, transaction: Transaction, now_ms: int) -> int:
        """Entries that the open ledger still takes, a new one begun where it is full; at least 1."""
        self.roll_if_full(transaction, now_ms)
        return self._limits.entries - self.next_entry

    def took(self, count: int, size: int) -> Segment:
        """Count entries that were inserted, as runs of `size` bytes."""
        first = self.next_entry
        self.next_entry = first + count
        self.bytes += size
        return Segment(self.ledger.ledger_id, first, count)

    def roll_if_full(self, transaction: Transaction, now_ms: int) -> None:
        if self.next_entry >= self._limits.entries or (self.next_entry and self.bytes >= self._limits.bytes):
            self.roll(transaction, now_ms)

    def roll(self, transaction: Transaction, now_ms: int) -> None:
        ledger_id = self.ledger.ledger_id
        # A ledger is not complete, so nothing trims it, before its last message is visible.
        closed_ms = max(now_ms, self.due_by_ms, 0)
        record = LedgerRecord(self.created_ms, closed_ms, self.next_entry, self.bytes, LedgerState.CLOSED)
        transaction.put(ledger_key(self._log.topic_id, ledger_id), record.pack())
        self.closed = (*self.closed, _info(ledger_id, record))
        self.begin(transaction, now_ms)

    def replace(self, transaction: Transaction, now_ms: int) -> None:
        """Begin a ledger in place of the open one. REQUIRES: that is empty."""
        transaction.delete(ledger_key(self._log.topic_id, self.ledger.ledger_id))
        self.begin(transaction, now_ms)

    def begin(self, transaction: Transaction, now_ms: int) -> None:
        self.ledger = Ledger(catalog.add_ledger(transaction, self._log.topic_id, now_ms))
        self.created_ms = max(now_ms, 0)
        self.next_entry = self.bytes = self.due_by_ms = 0
        self.changed = True

    def committed(self) -> None:
        log, ledger = self._log, self.ledger
        look = self.changed or self._was_empty
        log._hidden = self.hidden  # before readers can find anything more
        ledger.due_by_ms = self.due_by_ms  # likewise
        ledger.entries = self.next_entry
        ledger.stored_bytes = self.bytes
        log._publish(_view(self.closed, ledger, self.created_ms) if self.changed else None, look)


class Hidden(NamedTuple):
    """Nothing of a log from `first` on is read before `due_ms`."""

    due_ms: int
    first: Position


def first_hidden(hidden: Iterable[Hidden], now_ms: int) -> Hidden | None:
    """The first of ascending `hidden` that is not visible at `now_ms`; None: all are."""
    return next((wait for wait in hidden if wait.due_ms > now_ms), None)


def still_hidden(
    hidden: Iterable[Hidden], firsts: Sequence[Position], lengths: Sequence[int], dues: Int64s, now_ms: int
) -> tuple[Hidden, ...]:
    """Return those of `hidden` that are not visible at `now_ms`, and those of entries appended after them.

    The entries lie at `firsts`, so many in a row as `lengths` says, and are due at `dues`. An entry is not
    visible before those in front of it are, so that a log is read in order.
    """
    kept = [wait for wait in hidden if wait.due_ms > now_ms]
    before_ms = kept[-1].due_ms if kept else now_ms
    due_by = np.maximum.accumulate(np.maximum(dues, before_ms))
    ends = np.cumsum(lengths)
    for index in np.flatnonzero(np.diff(due_by, prepend=before_ms)).tolist():
        at = int(np.searchsorted(ends, index, side="right"))
        ledger_id, entry_id = firsts[at]
        kept.append(Hidden(int(due_by[index]), Position(ledger_id, entry_id + index - int(ends[at]) + lengths[at])))
    # Invariant: what is later in the log is visible later.
    for one, other in pairwise(kept):
        if not (one.due_ms < other.due_ms and one.first < other.first):
            raise BrokenInvariant(f"{other} behind {one}")
    return tuple(kept)
