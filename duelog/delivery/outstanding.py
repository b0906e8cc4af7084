"""Which consumer holds which message, how often it was handed out before, and until when it may be held.

Owns three things: for each consumer the positions that it has and has not acknowledged, the number of deliveries of
those messages of which one failed, and the deadlines of the acknowledgement timeout. It does not decide
what becomes of a message that is taken back; the dispatcher does.

Memory: a bit to two bytes for an outstanding message (roaring), one queue entry for a batch while there is a timeout,
a dictionary entry for a message from its first failed delivery on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pyroaring import BitMap

from duelog.store.errors import BrokenInvariant
from duelog.store.position import Position, position_at
from duelog.store.received_messages import ReceivedMessages

from .position_set import PositionSet, group_places


class _Batch(NamedTuple):
    handed_ms: int
    number: int
    consumer_id: int
    entries: dict[int, BitMap]


class _Failed(NamedTuple):
    """A message of which a delivery ended without an acknowledgement."""

    times: int
    """How often it was handed out."""
    batch: int
    """In which batch the last time, once it was handed out again; -1: it was not."""
    first_ms: int
    last_ms: int
    """When the first and the last of these deliveries ended."""


class Outstanding:
    """The messages that consumers hold. A message is held by one consumer at most; the dispatcher sees to that."""

    def __init__(self, ack_timeout_ms: int | None) -> None:
        self.timeout_ms = ack_timeout_ms
        """How long a consumer may hold a message unacknowledged; None: for ever."""
        self._held: dict[int, PositionSet] = {}
        self._failed: dict[int, dict[int, _Failed]] = {}
        self._batches: deque[_Batch] = deque()
        self._batch_number = 0

    def add_consumer(self, consumer_id: int) -> None:
        self._held[consumer_id] = PositionSet()

    def remove_consumer(self, consumer_id: int) -> None:
        """REQUIRES: it holds nothing."""
        del self._held[consumer_id]

    def take_all(self, consumer_id: int) -> PositionSet:
        """What it held, which no consumer holds now."""
        held, self._held[consumer_id] = self._held[consumer_id], PositionSet()
        return held

    @property
    def consumers(self) -> tuple[int, ...]:
        """Consumer ids, in the order in which they came."""
        return tuple(self._held)

    def __contains__(self, consumer_id: int) -> bool:
        return consumer_id in self._held

    def __len__(self) -> int:
        """Number of messages that consumers hold. O(consumers and their ledgers)."""
        return sum(map(len, self._held.values()))

    def hand_out(self, consumer_id: int, batch: ReceivedMessages, again: Sequence[int], now_ms: int) -> None:
        """Record one batch and set its redelivery counts; no consumer may hold any of it.

        again: places in the batch of messages that were handed out before, and taken back (`note_failed`).
        """
        self._batch_number += 1
        counts = batch.redelivery_counts = [0] * len(batch)
        for row in again:
            ledger_id, entry_id = position_at(batch.places[row])
            of_ledger = self._failed[ledger_id]
            failed = of_ledger[entry_id]
            counts[row] = failed.times
            of_ledger[entry_id] = failed._replace(times=failed.times + 1, batch=self._batch_number)
        entries = group_places(batch.places)
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
        elif self.timeout_ms is None:
            self._batch_number += 1
            for consumer_id, held in self._held.items():
                if held:
                    entries = {ledger_id: BitMap(each) for ledger_id, each in held.by_ledger().items()}
                    self._batches.append(_Batch(now_ms, self._batch_number, consumer_id, entries))
        self.timeout_ms = ack_timeout_ms

    def note_failed(self, ledger_id: int, entries: BitMap, now_ms: int) -> None:
        """A delivery of each of these entries ended at ``now_ms`` without an acknowledgement."""
        of_ledger = self._failed.setdefault(ledger_id, {})
        for entry_id in entries:
            failed = of_ledger.get(entry_id)
            first_ms = now_ms if failed is None else failed.first_ms
            times, batch = (1, -1) if failed is None else failed[:2]
            of_ledger[entry_id] = _Failed(times, batch, first_ms, now_ms)

    def failed_at(self, position: Position) -> tuple[int, int] | None:
        """When the first and the last delivery of a message failed; None: none did."""
        failed = self._failed.get(position.ledger_id, {}).get(position.entry_id)
        return None if failed is None else (failed.first_ms, failed.last_ms)

    def release(self, consumer_id: int, ledger_id: int, entries: BitMap) -> BitMap | None:
        """Take back those of ``entries`` that this consumer holds; None if it holds none of them."""
        held = self._held.get(consumer_id)
        if held is None:
            return None
        mine = held.shared(ledger_id, entries)
        if mine is not None:
            held.remove(ledger_id, mine)
        return mine

    def forget(self, consumer_id: int | None, ledger_id: int, entries: BitMap) -> int:
        """Drop entries that were acknowledged, of every consumer; how many were held.

        consumer_id: the consumer that probably holds them. O(1) bitmap operations if that is right, else O(consumers).
        """
        failed = self._failed.get(ledger_id)
        if failed is not None:
            for entry_id in entries if len(entries) <= len(failed) else [key for key in failed if key in entries]:
                failed.pop(entry_id, None)
            if not failed:
                del self._failed[ledger_id]
        found = 0
        if consumer_id is not None and consumer_id in self._held:
            found = self._held[consumer_id].remove(ledger_id, entries)
        if found < len(entries):
            for held in self._held.values():
                found += held.remove(ledger_id, entries)
        return found

    def forget_through(self, position: Position) -> None:
        """Drop everything at or before ``position``, of every consumer."""
        for held in self._held.values():
            held.remove_through(position)
        ledger_id, last = position
        for failed_ledger in [failed_ledger for failed_ledger in self._failed if failed_ledger <= ledger_id]:
            of_ledger = self._failed.pop(failed_ledger)
            if failed_ledger == ledger_id:
                kept = {entry_id: failed for entry_id, failed in of_ledger.items() if entry_id > last}
                if kept:
                    self._failed[ledger_id] = kept

    def clear(self) -> None:
        """Nothing is held, and no message was ever handed out; the consumers stay."""
        for held in self._held.values():
            held.clear()
        self._failed.clear()
        self._batches.clear()

    # -- acknowledgement timeout -----------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """When the next message that is still held must be acknowledged. O(1) amortised over batches."""
        while self._batches and self.timeout_ms is not None:
            if self._still_held(self._batches[0]):
                return self._batches[0].handed_ms + self.timeout_ms
            self._batches.popleft()
        return None

    def take_overdue(self, now_ms: int) -> list[tuple[int, BitMap]]:
        """Take back what has been held past its deadline: (ledger id, entries) pairs."""
        overdue: list[tuple[int, BitMap]] = []
        while self._batches and self.timeout_ms is not None and self._batches[0].handed_ms + self.timeout_ms <= now_ms:
            batch = self._batches.popleft()
            for ledger_id, entries in self._still_held(batch):
                self._held[batch.consumer_id].remove(ledger_id, entries)
                overdue.append((ledger_id, entries))
        return overdue

    def _still_held(self, batch: _Batch) -> list[tuple[int, BitMap]]:
        """What of a batch its consumer has held since then, without what it gave back and was handed again."""
        held = self._held.get(batch.consumer_id)
        still: list[tuple[int, BitMap]] = []
        if not held:
            return still
        for ledger_id, of_batch in batch.entries.items():
            entries = held.shared(ledger_id, of_batch)
            if entries is None:
                continue
            failed = self._failed.get(ledger_id)
            if failed is not None:
                for entry_id in list(entries):
                    last = failed.get(entry_id)
                    if last is not None and last.batch > batch.number:
                        entries.discard(entry_id)
            if entries:
                still.append((ledger_id, entries))
        return still

    def by_consumer(self) -> dict[int, set[Position]]:
        """A copy of everything held, as plain sets: for checks and tests. O(messages)."""
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
        handed = [batch.handed_ms for batch in self._batches]
        if handed != sorted(handed):
            raise BrokenInvariant("the deadlines of the acknowledgement timeout are out of order")
        if any(failed.times < 1 for of_ledger in self._failed.values() for failed in of_ledger.values()):
            raise BrokenInvariant("a message that was never delivered is counted as failed")
