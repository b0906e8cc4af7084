"""Read-ahead: for a consumer that empties a backlog batch by batch the log is read in larger pieces than it asks for.

Markers stand in the order in which their messages are due, the messages in the order in which they were sent: each
run that is opened for a batch holds but few of its messages, and more of those of the batches that follow.

Owns messages that were read and not asked for yet, up to a budget that the subscriptions of a store share. What it
gives is what reading would give now: entries never change, and what was acknowledged meanwhile is left out.
"""

from __future__ import annotations

import threading
from typing import Protocol

from duelog.markers.reader import Unacknowledged
from duelog.store.position import Position, position_at
from duelog.store.received_messages import ReceivedMessages

_MOST = 4_096
"""Messages read in one go, unless more are asked for: some 15 ms."""

_MOST_BYTES = 6 << 20
"""About so many bytes of payload are read in one go, unless more are asked for."""

_EACH_BYTES = 512
"""Approximate memory of a message besides its payload."""

_NONE = ReceivedMessages("", "")


class Reader(Protocol):
    """MainLogReader."""

    def read(
        self, start: Position, max_entries: int, skip: Unacknowledged, now_ms: int
    ) -> tuple[ReceivedMessages, Position, bool]: ...


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
        """The inverse of `take`."""
        with self._lock:
            self.left += amount


class ReadAhead:
    """A reader of one subscription. Not thread-safe."""

    def __init__(self, reader: Reader, budget: ReadAheadBudget) -> None:
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
        """Read as `MainLogReader.read` does, up to `max_entries`; fewer only where the log has no more."""
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
        """Hold nothing."""
        self._messages = _NONE
        self._start = None
        self._pieces = 1
        self._let_go()


def _unacknowledged(messages: ReceivedMessages, skip: Unacknowledged) -> ReceivedMessages:
    (ledger_id, first), (last_ledger, last) = position_at(messages.places[0]), position_at(messages.places[-1])
    if ledger_id == last_ledger and len(skip.unacked(ledger_id, first, last + 1)) == last + 1 - first:
        return messages
    return messages.pick([row for row, position in enumerate(messages.positions) if not skip.is_acked(position)])
