"""The main log as one subscription reads it: what is not due yet is passed over, and comes when it is.

Only logs with inline messages that are not yet visible have a tracker; for every other this is the plain reader.

Nothing here waits for a day that lies in the copy alone: `DaysRead` asks for it, and reading goes on once it has come.

For a consumer that empties a backlog batch by batch the log is read ahead, in larger pieces than it asks for: markers
stand in the order in which their messages are due, the messages in the order in which they were sent, so each run that
is opened for a batch holds but few of its messages, and more of those of the batches that follow. `ReadAhead` owns
messages that were read and not asked for yet, up to a budget that the subscriptions of a store share. What it gives is
what reading would give now: entries never change, and what was acknowledged meanwhile is left out.
"""

import threading
from collections.abc import Callable, Sequence

from pyroaring import BitMap

from duelog.markers.reader import MainLogReader, Unacknowledged
from duelog.markers.tracker import SubscriptionView
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.clock import StoreClock
from duelog.store.errors import DayAway
from duelog.store.position import Position, place_of, position_at
from duelog.store.received_messages import ReceivedMessages

_MOST = 4_096
"""Messages read in one go, unless more are asked for: some 15 ms."""

_MOST_BYTES = 6 << 20
"""About so many bytes of payload are read in one go, unless more are asked for."""

_EACH_BYTES = 512
"""Approximate memory of a message besides its payload."""

_NONE = ReceivedMessages("", "")


class ReadAheadBudget:
    """Bytes that may be read ahead in one store. Thread-safe."""

    def __init__(self) -> None:
        self.left = 4 * _MOST_BYTES
        self._lock = threading.Lock()

    def take(self, amount: int) -> None:
        """Note that so many bytes are held; less than nothing may be left then: the size is known after reading."""
        with self._lock:
            self.left -= amount

    def give_back(self, amount: int) -> None:
        with self._lock:
            self.left += amount


class ReadAhead:
    """A reader of one subscription. Not thread-safe."""

    def __init__(self, reader: MainLogReader, budget: ReadAheadBudget) -> None:
        self._reader = reader
        self._budget = budget
        self._messages = _NONE
        """Read, and from `_given` on not given yet."""
        self._given = 0
        self._start: Position | None = None
        """Where they begin, and where the next read is expected to; None: nowhere in particular."""
        self._limit: Position | None = None
        """One past the last entry looked at for them."""
        self._bytes = 0
        self._pieces = 1
        """How many times what is asked for is read at the next expected read."""
        self._each = 0
        """Bytes of a message of the last read, roughly."""

    def read(
        self, start: Position, max_entries: int, skip: Unacknowledged, now_ms: int
    ) -> tuple[ReceivedMessages, Position, bool]:
        """Read as `MainLogReader.read` does, up to `max_entries`; fewer only where the log has no more for now."""
        if start != self._start:
            self.clear()
        self._start = None  # until it is known again: what an interrupt leaves is not given
        given = _NONE
        while (places := self._messages.places) and len(given) < max_entries:
            messages, first = self._messages, self._given
            limit = self._given = min(first + max_entries - len(given), len(places))
            if limit < len(places):
                start = position_at(places[limit])
            else:
                start = self._limit or start
                self._messages = _NONE
                self._let_go()
            given += _unacknowledged(messages.part(first, limit), skip)
        if len(given) == max_entries:
            self._start = start
            return given, start, False
        more, start, passed_over = self._read(start, max_entries, max_entries - len(given), skip, now_ms)
        return given + more, start, passed_over

    def _read(
        self, start: Position, asked: int, max_entries: int, skip: Unacknowledged, now_ms: int
    ) -> tuple[ReceivedMessages, Position, bool]:
        """The rest, `max_entries`, of what was `asked` for. What it raises leaves nothing held."""
        pieces, self._pieces, self._start = self._pieces, 1, None
        wanted = max_entries
        if pieces > 1:
            fitting = min(_MOST_BYTES, self._budget.left) // max(self._each, 1)
            wanted = max(min(asked * pieces, _MOST, fitting), max_entries)
        messages, following, passed_over = self._reader.read(start, wanted, skip, now_ms)
        ahead, next_start = _NONE, following
        if len(messages) > max_entries:
            messages, ahead = messages.part(0, max_entries), messages.part(max_entries, len(messages))
            next_start = position_at(ahead.places[0])
        if passed_over:  # by the clock as it is now: what is read later may find it due
            return messages, next_start, True
        if len(messages) == max_entries:
            self._pieces = min(pieces * 2, _MOST)
            self._each = _EACH_BYTES + sum(map(len, messages.payloads)) // max_entries
        if ahead:
            self._limit = following
            self._bytes = _EACH_BYTES * len(ahead) + sum(map(len, ahead.payloads))
            self._budget.take(self._bytes)
            self._messages, self._given = ahead, 0
        self._start = next_start
        return messages, next_start, False

    def _let_go(self) -> None:
        self._budget.give_back(self._bytes)
        self._bytes = 0

    def clear(self) -> None:
        self._messages = _NONE
        self._start = None
        self._pieces = 1
        self._let_go()


def _unacknowledged(messages: ReceivedMessages, skip: Unacknowledged) -> ReceivedMessages:
    (ledger_id, first), (last_ledger, last) = position_at(messages.places[0]), position_at(messages.places[-1])
    if ledger_id == last_ledger and len(skip.unacked(ledger_id, first, last + 1)) == last + 1 - first:
        return messages
    return messages.pick([row for row, position in enumerate(messages.positions) if not skip.is_acked(position)])


_DAYS = 2
"""The day in which new messages are read, and one of which others are read again."""


class DaysRead:
    """The partitions that one subscription has last read messages of: they stay on this machine, or are asked for.

    Not thread-safe: the subscription's lock is held around every call.
    """

    def __init__(self, partitions: PartitionSet, come: Callable[[], object], ask: Callable[[], object]) -> None:
        """`come` is called, by any thread, when one that was away is there; `ask` has the upkeep fetch one."""
        self._partitions = partitions
        self._come = come
        self._ask = ask
        self._last: list[Partition] = []
        self._waits_for: list[Partition] = []
        self.asked = False
        """True once one was asked for that was not before, until that is noted."""

    def acquire(self, partition: Partition) -> bool:
        """Take a lease on a partition; False, and it is asked for: it is away. Raises as `PartitionSet.acquire`."""
        if not self._last or self._last[-1] is not partition:
            self._last = [*(each for each in self._last if each is not partition), partition]
            partition.readers[self] = self._come
            self._leave_all_but(_DAYS)
        was_asked = partition in self._waits_for
        if was_asked:
            self._waits_for.remove(partition)
        try:
            self._partitions.acquire(partition)
        except DayAway:
            self._waits_for.append(partition)
            self.asked |= not was_asked
            self._ask()
            return False
        return True

    @property
    def fetching_ms(self) -> int | None:
        """The start of the first that it waits for; None: it waits for none."""
        return min((each.start_ms for each in self._waits_for), default=None)

    def take_awaited(self) -> list[Partition]:
        """Return those that it waits for; the caller fetches them."""
        awaited, self._waits_for = self._waits_for, []
        return awaited

    def _leave_all_but(self, count: int) -> None:
        while len(self._last) > count:
            left = self._last[0]
            left.readers.pop(self, None)
            self._waits_for = [each for each in self._waits_for if each is not left]
            del self._last[0]

    def leave(self) -> None:
        """Read in none any more."""
        self._leave_all_but(0)


OpenView = Callable[[Position, int], SubscriptionView]


class DueReader:
    """A dispatcher's LogReader. Not thread-safe: the subscription's lock is held around every call."""

    def __init__(
        self,
        reader: MainLogReader,
        days: DaysRead,
        open_view: OpenView,
        clock: StoreClock,
        budget: ReadAheadBudget,
    ) -> None:
        """`open_view` (read position, handed out up to) opens a view on the topic's tracker, made at first need."""
        self._reader = reader
        self.days = days
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
                found, waits = self._reader.read_at(due)
                if waits is not None:
                    view.tracker.untake(view, *before)
                    return _NONE, start
                rows = {place: row for row, place in enumerate(found.places)}
                found = found.pick([rows[place] for place in map(place_of, due) if place in rows])
            if len(due) >= limit:
                return found, start  # the log is read only when no tracked message is due
            fresh, following, _ = self._reader.read(start, limit - len(due), skip, now_ms)
            return found + fresh, following
        except BaseException:
            view.tracker.untake(view, *before)
            raise

    def read_at(self, positions: Sequence[Position]) -> tuple[ReceivedMessages, Position | None]:
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
        self._ahead.clear()
        self.days.leave()
        if self._view is not None:
            self._view.tracker.rewind(self._view, position)

    def close(self) -> None:
        """The last consumer has left: hold nothing in memory for it."""
        self._ahead.clear()
        self.days.leave()
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
