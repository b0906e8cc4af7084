"""Read-ahead: for a consumer that empties a backlog batch by batch the log is read in larger pieces than it asks for.

Markers stand in the order in which their messages are due, the messages in the order in which they were sent: each
run that is opened for a batch holds but few of its messages, and more of those of the batches that follow.

Owns messages that were read and not asked for yet, up to a budget that the subscriptions of a store share. What it
gives is what reading would give now: entries never change, and what was acknowledged meanwhile is left out.
"""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Protocol

from duelog.delivery.acks import AckSet
from duelog.store.message import ReceivedMessage
from duelog.store.position import Position

_MOST = 4_096
"""Messages read in one go, unless more are asked for: some 15 ms."""

_MOST_BYTES = 6 << 20
"""About so many bytes of payload are read in one go, unless more are asked for."""

_EACH_BYTES = 512
"""What a message takes besides its payload, roughly."""

_PAYLOAD = attrgetter("payload")


class Reader(Protocol):
    """MainLogReader."""

    def read(
        self, start: Position, max_entries: int, skip: AckSet, now_ms: int
    ) -> tuple[list[ReceivedMessage], Position, bool]: ...


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
        self._messages: list[ReceivedMessage] = []
        """Read and not given yet, the last in the log first."""
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
        self, start: Position, max_entries: int, skip: AckSet, now_ms: int
    ) -> tuple[list[ReceivedMessage], Position, bool]:
        """As MainLogReader.read: fewer than `max_entries` where there are no more."""
        if start != self._start:
            self.clear()
        self._start = None  # until it is known again: what an interrupt leaves is not given
        given: list[ReceivedMessage] = []
        while self._messages and len(given) < max_entries:
            room, limit = max_entries - len(given), self._limit or start
            piece = self._messages[: -room - 1 : -1]
            del self._messages[-room:]
            start = self._messages[-1].position if self._messages else limit
            if not self._messages:
                self._let_go()
            given += _unacknowledged(piece, skip)
        if len(given) == max_entries:
            self._start = start
            return given, start, False
        more, start, passed_over = self._read(start, max_entries, max_entries - len(given), skip, now_ms)
        return given + more if given else more, start, passed_over

    def _read(
        self, start: Position, asked: int, max_entries: int, skip: AckSet, now_ms: int
    ) -> tuple[list[ReceivedMessage], Position, bool]:
        """The rest, `max_entries`, of what was `asked` for. What it raises leaves nothing held."""
        pieces, self._pieces, self._start = self._pieces, 1, None
        wanted = max_entries
        if pieces > 1:
            fitting = min(_MOST_BYTES, self._budget.left) // max(self._each, 1)
            wanted = max(min(asked * pieces, _MOST, fitting), max_entries)
        messages, following, passed_over = self._reader.read(start, wanted, skip, now_ms)
        ahead = messages[max_entries:]
        if ahead:
            del messages[max_entries:]
        if passed_over:  # by the clock as it is now: what is read later may find it due
            return messages, ahead[0].position if ahead else following, True
        if len(messages) == max_entries:
            self._pieces = min(pieces * 2, _MOST)
            self._each = _EACH_BYTES + sum(map(len, map(_PAYLOAD, messages))) // max_entries
        self._start = following
        if ahead:
            self._limit, self._start = following, ahead[0].position
            self._bytes = _EACH_BYTES * len(ahead) + sum(map(len, map(_PAYLOAD, ahead)))
            self._budget.take(self._bytes)
            ahead.reverse()
            self._messages = ahead
        return messages, self._start, False

    def _let_go(self) -> None:
        self._budget.give_back(self._bytes)
        self._bytes = 0

    def clear(self) -> None:
        """Hold nothing."""
        self._messages = []
        self._start = None
        self._pieces = 1
        self._let_go()


def _unacknowledged(messages: list[ReceivedMessage], skip: AckSet) -> list[ReceivedMessage]:
    (ledger_id, first), (last_ledger, last) = messages[0].position, messages[-1].position
    if ledger_id == last_ledger and len(skip.unacked(ledger_id, first, last + 1)) == last + 1 - first:
        return messages
    return [message for message in messages if not skip.is_acked(message.position)]
