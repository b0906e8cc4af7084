"""The messages that consumers hold and until when, and those that were taken back and await their redelivery.

`Outstanding` owns, for each consumer, the positions that it has and has not acknowledged, and the deadlines of the
acknowledgement timeout. How often a message was handed out before is in the counts of its subscription
(duelog/delivery/attempt_counts.py), which are told of each delivery and its end. `Redeliveries` owns the times of what
was taken back; when its time has come a message leaves for the delivery order (``delivery_order.py``), which knows the
consumer that may have it. What becomes of a message that is taken back the dispatcher decides.

Memory: a bit to two bytes for an outstanding message (roaring), one queue entry for a batch while there is a timeout.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pyroaring import BitMap

from duelog.delivery.attempt_counts import AttemptCounts
from duelog.store.errors import BrokenInvariant
from duelog.store.position import Position, position_at
from duelog.store.received_messages import ReceivedMessages
from duelog.store.timer_queue import TimerQueue

from .position_set import PositionSet, group_places


class _Batch(NamedTuple):
    handed_ms: int
    number: int
    consumer_id: int
    entries: dict[int, BitMap]


class Outstanding:
    """The messages that consumers hold. A message is held by one consumer at most; the dispatcher sees to that."""

    def __init__(self, ack_timeout_ms: int | None, counts: AttemptCounts) -> None:
        """With nothing held; `counts` are those of earlier deliveries."""
        counts.begin()
        self.counts = counts
        self._resumed = bool(len(counts))
        """True if messages read from the log for the first time may have been delivered before."""
        self.timeout_ms = ack_timeout_ms
        """How long a consumer may hold a message unacknowledged; None: for ever."""
        self._held: dict[int, PositionSet] = {}
        self._batches: deque[_Batch] = deque()
        self._batch_number = 0
        self._extended = PositionSet()
        """Messages held until a time of their own, not by the timeout of their batch."""
        self._until: TimerQueue[tuple[int, int]] = TimerQueue()  # those times, by ledger and entry id

    def add_consumer(self, consumer_id: int) -> None:
        self._held[consumer_id] = PositionSet()

    def remove_consumer(self, consumer_id: int) -> None:
        """REQUIRES: it holds nothing."""
        del self._held[consumer_id]

    def take_all(self, consumer_id: int) -> PositionSet:
        held, self._held[consumer_id] = self._held[consumer_id], PositionSet()
        if self._extended:
            for ledger_id, entries in held.by_ledger().items():
                self._end_extension(ledger_id, entries)
        return held

    @property
    def consumers(self) -> tuple[int, ...]:
        return tuple(self._held)

    def __contains__(self, consumer_id: int) -> bool:
        return consumer_id in self._held

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def held_by(self, consumer_id: int) -> int:
        return len(self._held[consumer_id])

    def holds(self, position: Position, times: int, consumer_id: int | None) -> bool:
        """Return whether a message is held since it was handed out after `times` other deliveries; None: by anyone."""
        if self.counts.times(*position) != times:
            return False
        if consumer_id is None:
            return any(position in held for held in self._held.values())
        return consumer_id in self._held and position in self._held[consumer_id]

    def hand_out(self, consumer_id: int, batch: ReceivedMessages, again: Sequence[int], now_ms: int) -> None:
        """Record one batch and set its redelivery counts; no consumer may hold any of it.

        again: places in the batch of messages that were handed out before, and taken back before.
        """
        self._batch_number += 1
        times = batch.redelivery_counts = [0] * len(batch)
        positions: list[tuple[int, int]] = []
        self._resumed = self._resumed and bool(self.counts.failed)
        for row in range(len(batch)) if self._resumed else again:
            position = position_at(batch.places[row])
            times[row] = self.counts.times(*position)
            if times[row]:
                positions.append(position)
        entries = group_places(batch.places)
        self.counts.handed_out(entries, positions, self._batch_number)
        held = self._held[consumer_id]
        for ledger_id, of_batch in entries.items():
            held.update(ledger_id, of_batch)
        if self.timeout_ms is not None:
            if self._batches:  # a clock that went back lengthens a deadline and never disorders the queue
                now_ms = max(now_ms, self._batches[-1].handed_ms)
            self._batches.append(_Batch(now_ms, self._batch_number, consumer_id, entries))

    def set_timeout(self, ack_timeout_ms: int | None, now_ms: int) -> None:
        """Let messages be held for so long from when they were handed out.

        Where there was no timeout before, for what is held already from now on.
        """
        if ack_timeout_ms is None:
            self._batches.clear()
            self._end_extensions()
        elif self.timeout_ms is None:
            self._batch_number += 1
            for consumer_id, held in self._held.items():
                if held:
                    entries = {ledger_id: BitMap(each) for ledger_id, each in held.by_ledger().items()}
                    self._batches.append(_Batch(now_ms, self._batch_number, consumer_id, entries))
        self.timeout_ms = ack_timeout_ms

    def extend(self, consumer_id: int, ledger_id: int, entries: BitMap, until_ms: int) -> int:
        """Have those of ``entries`` that a consumer holds be held until a time; how many it holds.

        Where there is no timeout they are held for ever as it is.
        """
        held = self._held.get(consumer_id)
        mine = None if held is None else held.shared(ledger_id, entries)
        if mine is None:
            return 0
        if self.timeout_ms is not None:
            self._extended.update(ledger_id, mine)
            for entry_id in mine:
                self._until.replace((ledger_id, entry_id), until_ms)
        return len(mine)

    def _end_extension(self, ledger_id: int, entries: BitMap) -> None:
        over = self._extended.shared(ledger_id, entries)
        if over is not None:
            self._extended.remove(ledger_id, over)
            for entry_id in over:
                self._until.discard((ledger_id, entry_id))

    def _end_extensions(self) -> None:
        self._extended.clear()
        self._until.clear()

    def failed_at(self, position: Position) -> tuple[int, int] | None:
        """When the first and the last delivery of a message failed; None: none did."""
        failed = self.counts.failed.get(position.ledger_id, {}).get(position.entry_id)
        return None if failed is None else (failed.first_ms, failed.last_ms)

    def release(self, consumer_id: int, ledger_id: int, entries: BitMap) -> BitMap | None:
        """Take back those of ``entries`` that this consumer holds; None if it holds none of them."""
        held = self._held.get(consumer_id)
        if held is None:
            return None
        mine = held.shared(ledger_id, entries)
        if mine is not None:
            held.remove(ledger_id, mine)
            if self._extended:
                self._end_extension(ledger_id, mine)
        return mine

    def forget(self, consumer_id: int | None, ledger_id: int, entries: BitMap) -> int:
        """Drop entries that were acknowledged, of every consumer; how many were held.

        consumer_id: the consumer that probably holds them. O(1) bitmap operations if that is right, else O(consumers).
        """
        if self.counts.failed:
            self.counts.forget(ledger_id, entries)
        if self._extended:
            self._end_extension(ledger_id, entries)
        found = 0
        if consumer_id is not None and consumer_id in self._held:
            found = self._held[consumer_id].remove(ledger_id, entries)
        if found < len(entries):
            for held in self._held.values():
                found += held.remove(ledger_id, entries)
        return found

    def forget_through(self, position: Position) -> None:
        for held in self._held.values():
            held.remove_through(position)
        for ledger_id, entries in list(self._extended.by_ledger().items()):
            if ledger_id < position.ledger_id:
                self._end_extension(ledger_id, entries)
            elif ledger_id == position.ledger_id:
                self._end_extension(ledger_id, entries & BitMap(range(position.entry_id + 1)))
        self.counts.forget_through(position)

    def log_held(self) -> None:
        """Tell the delivery log of all that is held, and of failed deliveries that are not on disk."""
        for held in self._held.values():
            self.counts.log_held(held.by_ledger())
        self.counts.log_unwritten()

    def clear(self) -> None:
        """Nothing is held, and no message was ever handed out; the consumers stay."""
        for held in self._held.values():
            held.clear()
        self.counts.clear()
        self._batches.clear()
        self._end_extensions()

    # -- acknowledgement timeout -----------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """When the next message that is still held must be acknowledged. O(1) amortised over batches."""
        extended = self._until.next() if self._extended else None
        while self._batches and self.timeout_ms is not None:
            if self._still_held(self._batches[0]):
                deadline_ms = self._batches[0].handed_ms + self.timeout_ms
                return deadline_ms if extended is None else min(deadline_ms, extended[0])
            self._batches.popleft()
        return None if extended is None else extended[0]

    def take_overdue(self, now_ms: int) -> list[tuple[int, BitMap]]:
        """Take back what has been held past its deadline: (ledger id, entries) pairs."""
        overdue: list[tuple[int, BitMap]] = []
        while self._batches and self.timeout_ms is not None and self._batches[0].handed_ms + self.timeout_ms <= now_ms:
            batch = self._batches.popleft()
            for ledger_id, entries in self._still_held(batch):
                self._held[batch.consumer_id].remove(ledger_id, entries)
                overdue.append((ledger_id, entries))
        while self._extended and (key := self._until.pop_due(now_ms)) is not None:
            ledger_id, entries = key[0], BitMap([key[1]])
            self._extended.remove(ledger_id, entries)
            for held in self._held.values():
                held.remove(ledger_id, entries)
            overdue.append((ledger_id, entries))
        return overdue

    def _still_held(self, batch: _Batch) -> list[tuple[int, BitMap]]:
        """Return what the consumer still holds of a batch; not what it gave back and was handed again since."""
        held = self._held.get(batch.consumer_id)
        still: list[tuple[int, BitMap]] = []
        if not held:
            return still
        for ledger_id, of_batch in batch.entries.items():
            entries = held.shared(ledger_id, of_batch)
            if entries is None:
                continue
            if self._extended:
                entries -= self._extended.shared(ledger_id, entries) or BitMap()
            failed = self.counts.failed.get(ledger_id)
            if failed is not None:
                for entry_id in list(entries):
                    last = failed.get(entry_id)
                    if last is not None and last.batch > batch.number:
                        entries.discard(entry_id)
            if entries:
                still.append((ledger_id, entries))
        return still

    def by_consumer(self) -> dict[int, set[Position]]:
        return {consumer_id: set(held) for consumer_id, held in self._held.items()}

    def _check(self) -> None:
        """Raise BrokenInvariant if two consumers hold one message, or the queue of deadlines is out of order."""
        seen = PositionSet()
        for held in self._held.values():
            held._check()
            for ledger_id, entries in held.by_ledger().items():
                if seen.shared(ledger_id, entries) is not None:
                    raise BrokenInvariant(f"two consumers hold one message of ledger {ledger_id}")
                seen.update(ledger_id, entries)
        for ledger_id, entries in self._extended.by_ledger().items():
            if seen.shared(ledger_id, entries) != entries:
                raise BrokenInvariant(f"a message of ledger {ledger_id} is extended, and no consumer holds it")
        if len(self._extended) != len(self._until):
            raise BrokenInvariant("extended messages and their times differ")
        handed = [batch.handed_ms for batch in self._batches]
        if handed != sorted(handed):
            raise BrokenInvariant("the deadlines of the acknowledgement timeout are out of order")
        self.counts._check()


class Redeliveries:
    """For each time and ledger the entries that fall due then; no position twice."""

    def __init__(self) -> None:
        self._times: TimerQueue[tuple[int, int]] = TimerQueue()  # the keys of _due
        self._due: dict[tuple[int, int], BitMap] = {}  # by (redeliver_at_ms, ledger id), acknowledged ones among them
        self._waiting = PositionSet()  # what really awaits redelivery

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ledger_id: int, entries: BitMap, redeliver_at_ms: int) -> None:
        """Entries that are not in it yet are to be handed out again at ``redeliver_at_ms``. O(log of the times)."""
        due = self._due.get((redeliver_at_ms, ledger_id))
        if due is None:
            self._due[redeliver_at_ms, ledger_id] = entries.copy()
            self._times.replace((redeliver_at_ms, ledger_id), redeliver_at_ms)
        else:
            due |= entries
        self._waiting.update(ledger_id, entries)

    def next_ms(self) -> int | None:
        """The earliest time at which something falls due; None if there is none. O(log) amortised."""
        while (found := self._times.next()) is not None:
            at_ms, key = found
            if self._waiting.shared(key[1], self._due[key]) is not None:
                return at_ms
            self._times.discard(key)
            del self._due[key]
        return None

    def take_due(self, now_ms: int) -> list[tuple[int, BitMap]]:
        """Remove and return what is due by ``now_ms``: (ledger id, entries) pairs."""
        taken: list[tuple[int, BitMap]] = []
        while (key := self._times.pop_due(now_ms)) is not None:
            ledger_id = key[1]
            entries = self._waiting.shared(ledger_id, self._due.pop(key))
            if entries is not None:
                self._waiting.remove(ledger_id, entries)
                taken.append((ledger_id, entries))
        return taken

    def forget(self, ledger_id: int, entries: BitMap) -> int:
        return self._waiting.remove(ledger_id, entries)

    def forget_through(self, position: Position) -> None:
        self._waiting.remove_through(position)

    def clear(self) -> None:
        self._times.clear()
        self._due.clear()
        self._waiting.clear()

    def waiting(self) -> dict[Position, int]:
        times: dict[Position, int] = {}
        for (at_ms, ledger_id), due in self._due.items():
            entries = self._waiting.shared(ledger_id, due)
            times.update((Position(ledger_id, entry_id), at_ms) for entry_id in entries or ())
        return times

    def _check(self) -> None:
        """Raise BrokenInvariant unless every waiting position falls due at exactly one time."""
        self._waiting._check()
        self._times._check()
        if len(self._times) != len(self._due) or any(self._times.due_ms(key) != key[0] for key in self._due):
            raise BrokenInvariant("the redelivery times and their entries differ")
        seen = PositionSet()
        for (_, ledger_id), due in self._due.items():
            entries = self._waiting.shared(ledger_id, due)
            if entries is None:
                continue
            if seen.shared(ledger_id, entries) is not None:
                raise BrokenInvariant(f"a message of ledger {ledger_id} waits for two times")
            seen.update(ledger_id, entries)
        if len(seen) != len(self._waiting):
            raise BrokenInvariant("a message waits for no time")
