"""A subscription said with sets of places in its topic's main log, for every type of subscription."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from duelog import MessageId, ReceivedMessage
from duelog.delivery.key_slots import KeySlots

_slots = lru_cache(256)(KeySlots)


class Entry(Protocol):
    """The interface of a message to a subscription."""

    @property
    def key(self) -> str | None: ...
    @property
    def due_ms(self) -> int: ...
    @property
    def waits(self) -> bool: ...
    @property
    def readable_ms(self) -> int: ...


class TwinSubscription:
    """Acknowledged places, and where everything else is.

    A place is held by a consumer, waiting for a time, ready, passed over because it is not due, or not read yet.
    Places count the entries of the main log from the topic's beginning; `start` is where the subscription begins.
    """

    def __init__(self, name: str, start: int, log: Sequence[Entry], setting: Callable[[str], int]) -> None:
        """`setting` gives what the policies say for the subscription, by field."""
        self.name = name
        self.setting = setting
        self.mark = start
        """Everything before it is acknowledged, trimmed, or from before the subscription's time."""
        self.acked: set[int] = set()
        self.flushed: tuple[int, frozenset[int]] = (start, frozenset())
        """The state that is on disk for certain: a mark and acknowledged places."""
        self.unflushed_since_ms: int | None = None
        self.paused_until_ms = 0
        self.kind: str | None = None
        self.consumers: list[int] = []
        self.held: dict[int, int] = {}
        self.handed_ms: dict[int, int] = {}
        """Since when what is held counts as held."""
        self.batches: list[tuple[int, set[int]]] = []
        """Places handed out under a timeout, and since when they count as held, oldest first."""
        self.until_ms: dict[int, int] = {}
        """Until when what is held was said to be held, in place of the timeout."""
        self.waiting: dict[int, int] = {}
        self.ready: set[int] = set()
        self.times: dict[int, int] = {}
        self.failed: dict[int, int] = {}
        """How many deliveries of a place ended without an acknowledgement, in other processes too."""
        self.handed: dict[int, int] = {}
        """How often a place was handed out, also one that is acknowledged: what a crash counts."""
        self.passed_over: set[int] = set()
        """Read before they were due; they come when they are."""
        self.looked = False
        """True where the last request looked for messages that were not handed out before."""
        self.tracks = False
        """It has passed something over: the store's time does not go back before what it was handed out by."""
        self.read = start
        self._log = log

    def is_acked(self, place: int) -> bool:
        return place < self.mark or place in self.acked

    def passed(self, limit: int) -> bool:
        return self.mark >= limit

    def backlog(self, end: int) -> int:
        return end - self.mark - len(self.acked)

    def due_backlog(self, now_ms: int) -> int:
        places = range(self.mark, len(self._log))
        return sum(place not in self.acked and not self._hidden(place, now_ms) for place in places)

    def not_due(self, now_ms: int) -> int:
        return sum(
            place not in self.acked and self._hidden(place, now_ms) for place in range(self.mark, len(self._log))
        )

    def _hidden(self, place: int, now_ms: int) -> bool:
        return self._log[place].waits and self._log[place].due_ms > now_ms

    @property
    def kept_back(self) -> int:
        """Read, and not handed out yet for the sake of their keys."""
        return sum(place not in self.times for place in self.ready)

    def admits(self, kind: str) -> bool:
        return not self.consumers or (self.kind == kind != "exclusive")

    def attach(self, kind: str, consumer: int) -> None:
        if self.kind != kind:
            self.forget_deliveries()
            self.kind = kind
        self.consumers.append(consumer)

    def detach(self, consumer: int, now_ms: int) -> None:
        self.nack(consumer, dict.fromkeys(self.held, now_ms), now_ms)
        self.consumers.remove(consumer)

    def forget_deliveries(self) -> None:
        """Start anew after what is acknowledged, as after a restart."""
        self._forget_places()
        self.handed = self.failed.copy()
        self.consumers.clear()
        self.kind = None
        self.tracks = False
        self.read = self.mark

    def _forget_places(self) -> None:
        for places in (self.held, self.handed_ms, self.until_ms, self.waiting, self.times):
            places.clear()
        self.ready.clear()
        self.passed_over.clear()
        self.batches.clear()

    def receive(self, consumer: int, count: int, now_ms: int) -> list[tuple[int, int]]:
        """(place, redelivery count) of the next batch.

        First what comes again, in log order; then what was passed over and has become due, by due time; then new.
        """
        self.looked = False
        if now_ms < self.paused_until_ms:
            return []
        batch = self._receive(consumer, count, now_ms)
        if batch and self.setting("ack_timeout_ms"):
            since_ms = max(now_ms, self.batches[-1][0]) if self.batches else now_ms  # a clock set back lengthens it
            self.hold_since([place for place, _ in batch], since_ms)
        while self.batches and not any(map(self._is_timed, self.batches[0][1])):
            del self.batches[0]
        return batch

    def hold_since(self, places: Sequence[int], since_ms: int) -> None:
        """Messages that a timeout takes back together; in an earlier batch they do not count any more."""
        for _, of_batch in self.batches:
            of_batch.difference_update(places)
        self.batches.append((since_ms, set(places)))
        self.handed_ms.update(dict.fromkeys(places, since_ms))

    def _is_timed(self, place: int) -> bool:
        return place in self.held and place not in self.until_ms

    def _receive(self, consumer: int, count: int, now_ms: int) -> list[tuple[int, int]]:
        if self.kind == "failover" and self.consumers[0] != consumer:
            return []
        self._bring_due(now_ms)
        limit = self.setting("max_in_flight")
        if limit:
            count = max(min(count, limit - list(self.held.values()).count(consumer)), 0)
        while count:
            before = self.read, len(self.passed_over)
            asked = [place for place in sorted(self.ready) if self._may_have(place, consumer)][:count]
            batch = [self._hand_out(place, consumer, now_ms) for place in asked]
            for place in self._fresh(count - len(asked), now_ms) if len(asked) < count else ():
                if self._may_have(place, consumer) and not self._queued_before(place):
                    batch.append(self._hand_out(place, consumer, now_ms))
                else:
                    self.ready.add(place)
            if batch or before == (self.read, len(self.passed_over)):
                return batch
        return []

    def _fresh(self, room: int, now_ms: int) -> list[int]:
        """Messages that have become due behind the read position, then those read from there on."""
        self.looked = True
        due = sorted(
            (self._log[place].due_ms, place) for place in self.passed_over if self._log[place].due_ms <= now_ms
        )
        fresh = [place for _, place in due[:room]]
        self.passed_over.difference_update(fresh)
        while len(fresh) < room and self.read < len(self._log) and self._log[self.read].readable_ms <= now_ms:
            if not self.is_acked(self.read):
                if self._hidden(self.read, now_ms):
                    self.passed_over.add(self.read)
                    self.tracks = True
                else:
                    fresh.append(self.read)
            self.read += 1
        return fresh

    def _key(self, place: int) -> str | None:
        return self._log[place].key if self.kind == "key_shared" else None

    def _may_have(self, place: int, consumer: int) -> bool:
        """One consumer at a time holds messages of a key, and none comes before an earlier one that is kept back."""
        key = self._key(place)
        if key is None:
            return True
        return (
            _slots(tuple(self.consumers)).owner_of(key) == consumer
            and all(who == consumer for at, who in self.held.items() if self._key(at) == key)
            and not any(at < place for at in self.waiting if self._key(at) == key)
        )

    def _queued_before(self, place: int) -> bool:
        key = self._key(place)
        return key is not None and any(self._key(at) == key for at in (*self.ready, *self.waiting))

    def _hand_out(self, place: int, consumer: int, now_ms: int) -> tuple[int, int]:
        before = self.failed.get(place, 0)
        self.times[place] = self.handed[place] = before + 1
        self.ready.discard(place)
        self.held[place] = consumer
        self.handed_ms[place] = now_ms
        return place, before

    def _bring_due(self, now_ms: int) -> None:
        timeout_ms = self.setting("ack_timeout_ms")
        for place, at_ms in list(self.handed_ms.items()):
            if timeout_ms and self.until_ms.get(place, at_ms + timeout_ms) <= now_ms:
                self._take_back(place, now_ms, now_ms)
        while timeout_ms and self.batches and self.batches[0][0] + timeout_ms <= now_ms:
            del self.batches[0]
        for place in [place for place, at_ms in self.waiting.items() if at_ms <= now_ms]:
            del self.waiting[place]
            self.ready.add(place)

    def _take_back(self, place: int, at_ms: int, now_ms: int) -> None:
        del self.held[place]
        self.handed_ms.pop(place, None)
        self.until_ms.pop(place, None)
        self.failed[place] = self.times[place]
        if at_ms > now_ms:
            self.waiting[place] = at_ms
        else:
            self.ready.add(place)

    def nack(self, consumer: int, until_ms: dict[int, int], now_ms: int) -> int:
        """Give places back, each to come again at its time; how many the consumer held."""
        mine = [place for place in until_ms if self.held.get(place) == consumer]
        for place in mine:
            self._take_back(place, until_ms[place], now_ms)
        return len(mine)

    def holds(self, consumer: int, place: int, position: MessageId, message: ReceivedMessage) -> bool:
        """Return whether a consumer still has the delivery of a place in which it was given a message."""
        return self.held.get(place) == consumer and self.failed.get(place, 0) == message.redelivery_count

    def extend(self, consumer: int, places: Sequence[int], until_ms: int) -> int:
        """Hold places until a time; how many the consumer holds."""
        mine = [place for place in set(places) if self.held.get(place) == consumer]
        if self.setting("ack_timeout_ms"):
            self.until_ms.update(dict.fromkeys(mine, until_ms))
        return len(mine)

    def ack(self, places: Sequence[int]) -> int:
        new = {place for place in places if not self.is_acked(place)}
        self.acked |= new
        self._route(new)
        return len(new)

    def ack_cumulative(self, last: int, now_ms: int) -> int:
        """Everything up to `last`, but for what cannot have been handed out: it was passed over, or would be now."""
        places = range(self.mark, last + 1)
        unseen = {place for place in places if place in self.passed_over or self._is_ahead(place, now_ms)}
        count = self.ack([place for place in places if place not in unseen])
        if all(place < self.read for place in unseen):
            self.read = max(self.read, last + 1)
        return count

    def _is_ahead(self, place: int, now_ms: int) -> bool:
        """True if it has not been read, and would not be handed out now."""
        return place >= self.read and (self._hidden(place, now_ms) or self._log[place].readable_ms > now_ms)

    def begin_at(self, place: int, first: int, now_ms: int) -> None:
        """From `first` on what lies before `place` is acknowledged, nothing else is.

        But what is not due, and was not acknowledged: it still comes.
        """
        passed = [at for at in range(first, place) if self.is_acked(at) or not self._hidden(at, now_ms)]
        self.mark, self.acked = first, set()
        self._forget_places()
        self.failed.clear()
        self.handed.clear()
        self.ack(passed)
        self.read = self.mark

    def trimmed(self, first: int) -> None:
        self.mark = max(self.mark, first)
        self.acked = {place for place in self.acked if place >= first}
        self.read = max(self.read, first)
        self._route({place for place in (*self.times, *self.ready, *self.passed_over) if place < first})

    def save(self) -> None:
        """Acknowledgements are on disk, and may be written again."""
        self.flushed = self.mark, frozenset(self.acked)

    def flush(self) -> None:
        self.save()
        self.unflushed_since_ms = None

    def crash(self) -> None:
        """Deliveries have failed, unless they are found to be acknowledged."""
        self.failed = self.handed.copy()

    def restore(self, first: int, acked: set[int]) -> None:
        """Exactly `acked` of the entries from `first` on, and everything before it, was found on the disk."""
        self.mark, self.acked = first, acked
        self.failed = {place: times for place, times in self.failed.items() if place >= first and place not in acked}
        self._route(set())
        self.flush()
        self.forget_deliveries()

    def _route(self, gone: set[int]) -> None:
        for place in gone:
            for places in (self.held, self.handed_ms, self.until_ms, self.waiting, self.times, self.failed):
                places.pop(place, None)
        self.ready -= gone
        self.passed_over -= gone
        while self.mark in self.acked:
            self.acked.remove(self.mark)
            self.mark += 1
