"""The topic-level tracker (PIP-448): messages that wait in the main log itself, one index for all subscriptions.

A delay shorter than `inline_delay_ms` is not worth two writes: such a message goes into the main log at
once. A subscription that comes by before it is due passes it over, and gets it from here when it is. The
tracker reads the log with a cursor of its own, once, whatever the number of subscriptions; what each of
them adds is a SubscriptionView: the time up to which entries were delivered to it.

Why nothing is lost or doubled: an entry at position P, due at D, is handed to a view when it reads P at a
time not before D; else, when a later `take` moves its time past D and P lies behind its read position.
Exactly one of the two happens, since a view's time never goes back. What is due at or before the time of
every view needs no index any more and is pruned; a seek back reads the log again, where it is due.

Against the code under review for PIP-448: reads do not depend on mark-delete moving, so nothing starves
behind it; pruning goes by the views' own time, so a view without a mark-delete cannot stop it; a view is
registered under the lock under which an idle tracker is freed; nothing is bucketed before it is exact, so
nothing fires a tick early; and there is no timer here: `next_due_ms` is asked again before every wait.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap

from ..store.codec.run import Int64s, Run, RunKind, UInt32s
from ..store.env.environment import Environment
from ..store.errors import CorruptEntry
from ..store.log.managed_ledger import ManagedLedger
from ..store.log.scan import runs
from ..store.message import MAX_DUE_MS
from ..store.position import Position, position_at
from .reader import Unacknowledged
from .waiting import Stretch, WaitingEntries

_PRUNE_ENTRIES = 10_000
"""When this many entries more are indexed than after the last pruning, its interval is not waited for."""

_PAST = Position(2**63, 0)


FellDue = Callable[[Int64s, int], object]
"""Told (due times, now) of entries that have become due; takes leaf locks only."""


class SubscriptionView:
    """One subscription's share of the tracker: every indexed entry at or before `done` was its business already."""

    __slots__ = ("done_ms", "done_position", "tracker")

    def __init__(self, tracker: "TopicDelayTracker", done_ms: int) -> None:
        self.tracker = tracker
        self.done_ms = done_ms
        self.done_position = _PAST
        """Within the due time `done_ms`, the last position delivered; past every position: all of them."""


@dataclass(eq=False, repr=False)
class TopicDelayTracker:
    """The entries of a main log that are not due yet, each once. Thread-safe.

    `_fell_due` is told of each entry once, when the first view comes by at its due time or later. `_prune_interval_ms`,
    `_prune_ratio`: `StoreConfig.tracker_prune_interval_ms`, `StoreConfig.tracker_prune_ratio`.
    """

    _main: Environment
    _log: ManagedLedger
    _quarantine: Callable[[CorruptEntry], object]
    _fell_due: FellDue
    _prune_interval_ms: int
    _prune_ratio: float

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = WaitingEntries(self._read_dues)
        self._views: set[SubscriptionView] = set()
        self._start: Position | None = None
        self._cursor = Position(0, 0)
        self._pruned_ms = 0
        """Entries due before this may be forgotten."""
        self._asked_ms = -1
        """The latest time that it was asked about without a view."""
        self._looked_ms = 0
        self._kept = 0
        self.told_ms = 0
        """`fell_due` was told of what is due until then; 0: of nothing."""
        self.idle_since_ms: int | None = None
        """When the last view closed; None while there is one."""

    def memory_bytes(self) -> int:
        return self._waiting.memory_bytes()

    # -- views -------------------------------------------------------------------------------------

    def open_view(self, read_position: Position, now_ms: int) -> SubscriptionView:
        """A view that has passed over nothing before `read_position` that was due later than `now_ms`."""
        with self._whole_or_anew():
            view = SubscriptionView(self, now_ms)
            self._views.add(view)
            self.idle_since_ms = None
            self.told_ms = self.told_ms or now_ms
            self._cover(read_position, now_ms)
            return view

    def close_view(self, view: SubscriptionView, now_ms: int) -> None:
        """Forget a view. A second call does nothing."""
        with self._whole_or_anew():
            self._views.discard(view)
            if not self._views and self.idle_since_ms is None:
                self.idle_since_ms = now_ms

    def rewind(self, view: SubscriptionView, read_position: Position) -> None:
        """Put a view back to `read_position`: the entries that it will pass again are tracked again."""
        with self._whole_or_anew():
            self._cover(read_position, view.done_ms)

    # -- delivering --------------------------------------------------------------------------------

    def take(
        self, view: SubscriptionView, read_position: Position, limit: int, now_ms: int, skip: Unacknowledged
    ) -> list[Position]:
        """Positions before `read_position` that have become due for this view, by due time, at most `limit`."""
        with self._whole_or_anew():
            before = view.done_ms, view.done_position
            try:
                return self._take(view, read_position, limit, now_ms, skip)
            except BaseException:
                view.done_ms, view.done_position = before
                raise

    def untake(self, view: SubscriptionView, done_ms: int, done_position: Position) -> None:
        """Put the view back to where it was before a `take` whose messages could not be read."""
        with self._whole_or_anew():
            view.done_ms, view.done_position = done_ms, done_position
            if done_ms < self._pruned_ms:
                self._forget()

    def _take(
        self, view: SubscriptionView, read_position: Position, limit: int, now_ms: int, skip: Unacknowledged
    ) -> list[Position]:
        self._catch_up()
        self._tell(now_ms)
        found: list[Position] = []
        for dues, places in self._waiting.after(view.done_ms, view.done_position, now_ms, limit):
            for due_ms, number in zip(dues.tolist(), places.tolist(), strict=True):
                position = position_at(number)
                if position >= read_position:
                    continue
                if len(found) == limit:
                    return found
                view.done_ms, view.done_position = due_ms, position
                if not skip.is_acked(position):
                    found.append(position)
        if now_ms > view.done_ms or len(found) < limit:
            view.done_ms, view.done_position = max(now_ms, view.done_ms), _PAST
        self._prune(now_ms)
        return found

    def _tell(self, now_ms: int) -> None:
        if now_ms > self.told_ms:
            dues = self._waiting.dues_between(self.told_ms, now_ms)
            self.told_ms = now_ms
            if len(dues):
                self._fell_due(dues, now_ms)

    def next_due_ms(self, view: SubscriptionView) -> int | None:
        """When the next entry becomes due that was not delivered to the view; None when none is known."""
        with self._whole_or_anew():
            self._catch_up()
            return self._waiting.next_due_ms(view.done_ms, inclusive=view.done_position < _PAST)

    def unseen(
        self, view: SubscriptionView, read_position: Position, limit: Position, now_ms: int
    ) -> dict[int, BitMap]:
        """Entries before `limit`, by ledger id, that the view's subscription cannot have been given.

        Those before `read_position` that it passed over and has not got since, and those not due at `now_ms`.
        """
        with self._whole_or_anew():
            self._catch_up()
            found = self._waiting.after_by_ledger(view.done_ms, view.done_position, min(read_position, limit))
            if read_position < limit:
                for ledger_id, entries in self._waiting.after_by_ledger(now_ms, _PAST, limit).items():
                    found[ledger_id] = found.get(ledger_id, BitMap()) | entries
            return found

    # -- asking, with or without a view ------------------------------------------------------------

    def waiting(self, start: Position, now_ms: int) -> dict[int, BitMap]:
        """Entries from `start` on that are due after `now_ms`, by ledger id; no bitmap is empty."""
        with self._asking(start, now_ms):
            return self._waiting.after_by_ledger(now_ms, _PAST)

    def count(self, start: Position, now_ms: int) -> int:
        """How many those are. O(log n) once they are indexed."""
        with self._asking(start, now_ms):
            return self._waiting.count_after(now_ms)

    def dues(self, start: Position, now_ms: int) -> Int64s:
        """Due times of those, in no order."""
        with self._asking(start, now_ms):
            return self._waiting.dues_between(now_ms, MAX_DUE_MS)

    def listed(self, start: Position, now_ms: int, start_ms: int, limit_ms: int) -> list[Position]:
        """Where those lie that are due in [start_ms, limit_ms), by due time and then in log order."""
        with self._asking(start, now_ms):
            after_ms = max(now_ms, start_ms - 1)
            found = self._waiting.after(after_ms, _PAST, limit_ms - 1, len(self._waiting))
            return [position_at(number) for _, places in found for number in places.tolist()]

    @contextmanager
    def _asking(self, start: Position, now_ms: int) -> Iterator[None]:
        """The lock, with everything indexed from `start` on that is due after `now_ms`."""
        with self._whole_or_anew():
            self._asked_ms = max(self._asked_ms, now_ms)
            self._cover(start, min(self._floor(), now_ms))
            yield

    # -- inside ------------------------------------------------------------------------------------

    @contextmanager
    def _whole_or_anew(self) -> Iterator[None]:
        """Hold the lock; an interrupt or a failed read inside has the index read again."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._forget()
                raise

    def _forget(self) -> None:
        """Have the log read again from where the index begins."""
        self._waiting.clear()
        self._cursor = self._start or self._cursor
        self._pruned_ms = 0

    # -- inside: the cursor over the log -------------------------------------------------------------

    def _floor(self) -> int:
        """Nothing due by then has to be indexed."""
        return min((view.done_ms for view in self._views), default=self._asked_ms)

    def _cover(self, position: Position, floor_ms: int) -> None:
        """See to it that everything from `position` on that is due after `floor_ms` is indexed."""
        if self._start is None:
            self._start = self._cursor = position
        elif floor_ms + 1 < self._pruned_ms:  # forgotten entries are asked for: read all of it again
            self._start = min(position, self._start)
            self._forget()
        elif position < self._start:
            self._index(position, self._start, floor_ms)
            self._start = position
        self._catch_up()

    def _catch_up(self) -> None:
        end = self._log.end
        if self._start is not None and self._cursor < end:
            self._cursor = self._index(self._cursor, end, self._floor())

    def _index(self, start: Position, limit: Position, floor_ms: int) -> Position:
        """Index the entries of [start, limit) due after `floor_ms`, none of which is indexed; returns `limit`."""
        log = self._log.snapshot()
        self._pruned_ms = max(self._pruned_ms, floor_ms + 1)
        with self._main.read() as raw:
            for ledger_id, first, end in log.ranges(start, limit):
                for run in runs(raw, self._main.name, ledger_id, first, end):
                    if isinstance(run, CorruptEntry):
                        self._quarantine(run)
                    elif run.kind == RunKind.MESSAGES and run.early:
                        self._add(run, first, end, floor_ms)
        return limit

    def _add(self, run: Run, start: int, end: int, floor_ms: int) -> None:
        first, limit = max(run.first_entry, start), min(run.limit, end)
        dues = run.dues()[first - run.first_entry : limit - run.first_entry]
        wanted = dues > floor_ms
        if wanted.all():
            self._waiting.add(run.ledger_id, first, dues)
        else:
            at = np.flatnonzero(wanted)
            self._waiting.add_some(run.ledger_id, (at + first).astype(np.uint32), dues[at])

    def _read_dues(self, stretch: Stretch) -> tuple[UInt32s, Int64s]:
        entries: list[UInt32s] = [np.empty(0, np.uint32)]
        dues: list[Int64s] = [np.empty(0, np.int64)]
        with self._main.read() as raw:
            for run in runs(raw, self._main.name, stretch.ledger_id, stretch.first, stretch.limit):
                if isinstance(run, CorruptEntry):
                    self._quarantine(run)
                    continue
                first, limit = max(run.first_entry, stretch.first), min(run.limit, stretch.limit)
                entries.append(np.arange(first, limit, dtype=np.uint32))
                dues.append(run.dues()[first - run.first_entry : limit - run.first_entry])
        return np.concatenate(entries), np.concatenate(dues)

    def _prune(self, now_ms: int) -> None:
        """Forget entries delivered to every view, if it is time to look and enough of them have moved on."""
        soon = now_ms < self._looked_ms + self._prune_interval_ms
        if soon and len(self._waiting) < self._kept + _PRUNE_ENTRIES:
            return
        self._looked_ms = now_ms
        self._kept = len(self._waiting)
        moved = sum(view.done_ms > self._pruned_ms for view in self._views)
        if moved < self._prune_ratio * len(self._views):
            return
        floor_ms = self._floor()
        self._pruned_ms = max(floor_ms, self._pruned_ms)
        self._waiting.prune(floor_ms)
        self._kept = len(self._waiting)

    def forget_before(self, ledger_id: int) -> None:
        with self._whole_or_anew():
            self._waiting.forget_before(ledger_id)
