"""The topic-level tracker (PIP-448): messages that wait in the main log itself, one index for all subscriptions.

A delay shorter than `inline_delay_ms` is not worth two writes: such a message goes into the main log at
once. A subscription that comes by before it is due passes it over, and gets it from here when it is. The
tracker reads the log with a cursor of its own, once, whatever the number of subscriptions; what each of
them adds is a SubscriptionView: the time up to which it has been served.

Why nothing is lost or doubled: an entry at position P, due at D, is handed to a view when it reads P at a
time not before D; else, when a later `take` moves its time past D and P lies behind its read position.
Exactly one of the two happens, since a view's time never goes back. What is due at or before the time of
every view needs no index any more and is pruned; a seek back reads the log again, where it is due.

Against the code under review for PIP-448: reads do not depend on mark-delete moving, so nothing starves
behind it; pruning goes by the views' own time, so a view without a mark-delete cannot stop it; a view is
registered under the lock under which an idle tracker is freed; nothing is bucketed before it is exact, so
nothing fires a tick early; and there is no timer here: `next_due_ms` is asked anew before every wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from pyroaring import BitMap
from sortedcontainers import SortedDict

from ..store.environment import Environment
from ..store.errors import CorruptEntry
from ..store.managed_ledger import ManagedLedger
from ..store.position import Position
from ..store.run import Run, RunKind
from ..store.scan import runs

_ENTRY_BYTES = 4
_DUE_BYTES = 400
"""Estimates for `memory_bytes`: of an entry in a bitmap, and of a due time with its dict and bitmap."""

_PRUNE_MS = 1_000


class Unacknowledged(Protocol):
    """What a subscription has not acknowledged (AckSet)."""

    def is_acked(self, position: Position) -> bool: ...


class SubscriptionView:
    """One subscription's share of the tracker: every indexed entry at or before `done` was its business already."""

    __slots__ = ("done_ms", "done_position")

    def __init__(self, done_ms: int) -> None:
        self.done_ms = done_ms
        self.done_position = Position(2**63, 0)
        """Within the due time `done_ms`, the last position served; past every position: all of them."""


class TopicDelayTracker:
    """The entries of a main log that are not due yet, each once. Thread-safe."""

    def __init__(self, main: Environment, log: ManagedLedger, set_aside: Callable[[CorruptEntry], object]) -> None:
        self._main = main
        self._log = log
        self._set_aside = set_aside
        self._lock = threading.Lock()
        self._by_due: SortedDict[int, dict[int, BitMap]] = SortedDict()
        self._count = 0
        self._views: set[SubscriptionView] = set()
        self._start: Position | None = None
        self._cursor = Position(0, 0)
        self._pruned_ms = 0
        self.idle_since_ms: int | None = None
        """When the last view closed; None while there is one."""

    def __len__(self) -> int:
        """Entries indexed."""
        return self._count

    def memory_bytes(self) -> int:
        """Estimated bytes of the index, all views together."""
        return self._count * _ENTRY_BYTES + len(self._by_due) * _DUE_BYTES

    # -- views -------------------------------------------------------------------------------------

    def open_view(self, read_position: Position, now_ms: int) -> SubscriptionView:
        """A view that has passed over nothing before `read_position` that was due later than `now_ms`."""
        with self._lock:
            view = SubscriptionView(now_ms)
            self._views.add(view)
            self.idle_since_ms = None
            self._cover(read_position, now_ms)
            return view

    def close_view(self, view: SubscriptionView, now_ms: int) -> None:
        """Forget a view. A second call does nothing."""
        with self._lock:
            self._views.discard(view)
            if not self._views and self.idle_since_ms is None:
                self.idle_since_ms = now_ms

    def rewind(self, view: SubscriptionView, read_position: Position) -> None:
        """The view's subscription goes back to `read_position`: what it will pass over there is tracked again."""
        with self._lock:
            self._cover(read_position, view.done_ms)

    def idle(self, now_ms: int, idle_ms: int) -> bool:
        """Whether the last view closed `idle_ms` ago or earlier and none has come since."""
        with self._lock:
            return self.idle_since_ms is not None and self.idle_since_ms + idle_ms <= now_ms

    # -- serving -----------------------------------------------------------------------------------

    def take(
        self, view: SubscriptionView, read_position: Position, limit: int, now_ms: int, skip: Unacknowledged
    ) -> list[Position]:
        """Positions before `read_position` that have become due for this view, by due time, at most `limit`."""
        with self._lock:
            self._catch_up()
            found: list[Position] = []
            for due_ms in self._by_due.irange(view.done_ms, now_ms):
                ledgers = self._by_due[due_ms]
                served = view.done_position if due_ms == view.done_ms else None
                for position in _positions(ledgers):
                    if (served is not None and position <= served) or position >= read_position:
                        continue
                    if len(found) == limit:
                        return found
                    view.done_ms, view.done_position = due_ms, position
                    if not skip.is_acked(position):
                        found.append(position)
            if now_ms > view.done_ms or len(found) < limit:
                view.done_ms, view.done_position = max(now_ms, view.done_ms), Position(2**63, 0)
            self._prune(now_ms)
            return found

    def next_due_ms(self, view: SubscriptionView) -> int | None:
        """When the next entry becomes due that the view has not been served; None when none is known."""
        with self._lock:
            self._catch_up()
            partly = view.done_position[0] < 2**63
            return next(iter(self._by_due.irange(view.done_ms, inclusive=(partly, True))), None)

    def waiting(self, now_ms: int) -> int:
        """Indexed entries due after `now_ms`. O(due times)."""
        with self._lock:
            self._catch_up()
            ahead = self._by_due.irange(now_ms, inclusive=(False, True))
            return sum(len(entries) for due_ms in ahead for entries in self._by_due[due_ms].values())

    # -- inside: the cursor over the log -------------------------------------------------------------

    def _floor(self) -> int:
        return min((view.done_ms for view in self._views), default=-1)

    def _cover(self, position: Position, floor_ms: int) -> None:
        """See to it that everything from `position` on that is due after `floor_ms` is indexed."""
        if self._start is None:
            self._start = self._cursor = position
        elif position < self._start:
            self._index(position, self._start, floor_ms)
            self._start = position
        elif floor_ms < self._pruned_ms:
            self._index(position, self._cursor, floor_ms)
        self._catch_up()

    def _catch_up(self) -> None:
        end = self._log.end
        if self._start is not None and self._cursor < end:
            self._cursor = self._index(self._cursor, end, self._floor())

    def _index(self, start: Position, limit: Position, floor_ms: int) -> Position:
        """Index the entries of [start, limit) due after `floor_ms`; returns `limit`. Adding twice is harmless."""
        log = self._log.snapshot()
        ledger_id, entry_id = start
        with self._main.read() as raw:
            while True:
                committed = log.entries_of(ledger_id) or 0
                end = min(committed, limit.entry_id) if ledger_id == limit.ledger_id else committed
                for run in runs(raw, self._main.name, ledger_id, entry_id, end):
                    if isinstance(run, CorruptEntry):
                        self._set_aside(run)
                    elif run.kind == RunKind.MESSAGES and run.ahead:
                        self._add(run, entry_id, end, floor_ms)
                following = log.following(ledger_id)
                if following is None or following > limit.ledger_id or ledger_id >= limit.ledger_id:
                    return limit
                ledger_id, entry_id = following, 0

    def _add(self, run: Run, start: int, end: int, floor_ms: int) -> None:
        dues = run.dues()
        for index in np.flatnonzero(dues > floor_ms).tolist():
            entry_id = run.first_entry + index
            if start <= entry_id < end:
                entries = self._by_due.setdefault(int(dues[index]), {}).setdefault(run.ledger_id, BitMap())
                before = len(entries)
                entries.add(entry_id)
                self._count += len(entries) - before

    def _prune(self, now_ms: int) -> None:
        """Forget what every view has been served, at most once a second."""
        floor_ms = self._floor()
        if now_ms < self._pruned_ms + _PRUNE_MS and len(self._by_due) < 10_000:
            return
        self._pruned_ms = max(floor_ms, self._pruned_ms)
        for due_ms in list(self._by_due.irange(maximum=floor_ms, inclusive=(True, False))):
            self._count -= sum(map(len, self._by_due.pop(due_ms).values()))

    def forget_before(self, ledger_id: int) -> None:
        """The ledgers before `ledger_id` were trimmed."""
        with self._lock:
            for due_ms in list(self._by_due):
                ledgers = self._by_due[due_ms]
                for gone in [ledger for ledger in ledgers if ledger < ledger_id]:
                    self._count -= len(ledgers.pop(gone))
                if not ledgers:
                    del self._by_due[due_ms]


def _positions(ledgers: dict[int, BitMap]) -> list[Position]:
    return [Position(ledger_id, entry_id) for ledger_id in sorted(ledgers) for entry_id in ledgers[ledger_id]]
