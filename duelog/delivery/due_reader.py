"""The main log as one subscription reads it: what is not due yet is passed over, and comes when it is.

Only logs with inline messages that are not yet visible have a tracker; for every other this is the plain reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyroaring import BitMap

from duelog.markers.reader import MainLogReader, Unacknowledged
from duelog.markers.tracker import SubscriptionView
from duelog.store.clock import StoreClock
from duelog.store.position import Position, place_of
from duelog.store.received_messages import ReceivedMessages

from .read_ahead import ReadAhead, ReadAheadBudget

OpenView = Callable[[Position, int], SubscriptionView]


class DueReader:
    """A dispatcher's LogReader. Not thread-safe: the subscription's lock is held around every call."""

    def __init__(self, reader: MainLogReader, open_view: OpenView, clock: StoreClock, budget: ReadAheadBudget) -> None:
        """`open_view` (read position, handed out up to) opens a view on the topic's tracker, made at first need."""
        self._reader = reader
        self._ahead = ReadAhead(reader, budget)
        self._open = open_view
        self._clock = clock
        self._view: SubscriptionView | None = None
        self._closed_at: tuple[int, Position] | None = None
        """How far the view had handed out when it was closed: a due time, and the last position of those due then."""

    def read(self, start: Position, max_entries: int, skip: Unacknowledged) -> tuple[ReceivedMessages, Position]:
        """Read messages before `start` that have become due meanwhile, then due messages from `start` on."""
        now_ms = self._clock.now_ms()
        if self._view is not None or self._reader.log.hides_some:
            now_ms = self._clock.raise_to(now_ms)  # what is handed out by it stays so: it must not go back
        if self._view is not None:
            return self._read_tracked(self._view, start, max_entries, now_ms, skip)
        fresh, following, passed_over = self._ahead.read(start, max_entries, skip, now_ms)
        if passed_over:
            self._clock.raise_to(now_ms)
            self._view = self._open(start, now_ms)
        return fresh, following

    def _read_tracked(
        self, view: SubscriptionView, start: Position, limit: int, now_ms: int, skip: Unacknowledged
    ) -> tuple[ReceivedMessages, Position]:
        before = view.done_ms, view.done_position
        try:
            due = view.tracker.take(view, start, limit, now_ms, skip)
            found = ReceivedMessages("", "")
            if due:
                found = self._reader.read_at(due)
                rows = {place: row for row, place in enumerate(found.places)}
                found = found.pick([rows[place] for place in map(place_of, due) if place in rows])
            if len(due) >= limit:
                return found, start  # the log is read only when no tracked message is due
            fresh, following, _ = self._reader.read(start, limit - len(due), skip, now_ms)
            return found + fresh, following
        except BaseException:
            view.tracker.untake(view, *before)
            raise

    def read_at(self, positions: Sequence[Position]) -> ReceivedMessages:
        """The messages at these positions, due or not."""
        return self._reader.read_at(positions)

    def unseen(self, start: Position, limit: Position) -> dict[int, BitMap]:
        """Entries before `limit` that no consumer can have been given, where all before `start` was read."""
        now_ms = self._clock.now_ms()
        if self._view is None and start < limit and self._reader.log.first_undue(now_ms) is not None:
            self._clock.raise_to(now_ms)
            self._view = self._open(start, now_ms)
        found: dict[int, BitMap] = {}
        if self._view is not None:
            found = self._view.tracker.unseen(self._view, start, limit, self._clock.raise_to(now_ms))
        if start < limit and self._reader.log.hides_some:
            for ledger_id, entries in self._reader.hidden_before(limit, now_ms).items():
                found[ledger_id] = found.get(ledger_id, BitMap()) | entries
        return found

    def next_due_ms(self, read_ms: int) -> int | None:
        """When the next message that was passed over, or not read before its time, becomes due; None: there is none.

        read_ms: a time before the last read: what has become visible since may not have been read.
        """
        kept_back_ms = self._reader.log.next_visible_ms(read_ms)
        passed_over_ms = None if self._view is None else self._view.tracker.next_due_ms(self._view)
        return min((ms for ms in (kept_back_ms, passed_over_ms) if ms is not None), default=None)

    def rewind(self, position: Position) -> None:
        """The subscription goes back to `position`."""
        self._ahead.clear()
        if self._view is not None:
            self._view.tracker.rewind(self._view, position)

    def close(self) -> None:
        """The last consumer has left: hold nothing in memory for it."""
        self._ahead.clear()
        if self._view is not None:
            self._closed_at = self._view.done_ms, self._view.done_position
            self._view.tracker.close_view(self._view, self._clock.now_ms())
            self._view = None

    def reopen(self, unacknowledged: Position) -> None:
        """A consumer has come again: track what was passed over from the first unacknowledged position on."""
        if self._view is None and self._closed_at is not None:
            done_ms, done_position = self._closed_at
            self._view = self._open(unacknowledged, done_ms - 1)  # some that are due then may be left
            self._view.done_ms, self._view.done_position = done_ms, done_position
