"""Rates by producer, consumer, subscription and topic over the last full period; durations, by how long they were.

Services count; here their counts are looked at once a period, some at a time, so that the loop goes on between them.
So a rate costs nothing where messages pass. REST and /metrics tell the same rates. A rate is 0 until a first period has
passed, as it is in Pulsar, whose `statsUpdateFrequencyInSecs` the period is.

Durations are those of SENDs by topic, of dispatch, of the event loop's lateness. All have one list of bounds. It has
those by which Pulsar tells write latencies, so that its buckets are sums of these.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..consume.consumers import Consumers
from ..consume.pump import Consumer, Dispatched
from ..produce.producers import Producers
from ..produce.sends import Figures, OpenProducer
from ..protocol.loop_calls import Loop, Timer

BOUNDS_S = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05,
    0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 600.0, 3600.0,
)  # fmt: skip
"""Upper bounds, inclusive."""
_BOUNDS = np.array(BOUNDS_S)

_WRITE_BOUNDS_S = (0.0005, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
_WRITE_ENDS = [BOUNDS_S.index(bound) + 1 for bound in _WRITE_BOUNDS_S]

_NOTES = 1_000
"""SENDs that are counted together: in half a millisecond or less."""

_LAG_EVERY_S = 0.25


class Durations:
    """Counts by bucket, and the sum of all."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def add_passed(self, now: float, began: Sequence[float], unit_s: float = 1.0) -> None:
        """Count the times from each of `began` until `now`; 0 where it is later. unit_s: of both."""
        passed = np.maximum(now - np.array(began), 0) * unit_s
        for bucket in np.searchsorted(_BOUNDS, passed).tolist():
            self.counts[bucket] += 1
        self.sum_s += float(passed.sum())

    def join(self, other: "Durations") -> None:
        self.counts = [old + new for old, new in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s

    @property
    def count(self) -> int:
        return sum(self.counts)

    def write_buckets(self) -> list[int]:
        """Counts between Pulsar's bounds of write latencies: up to 0.5, 1, 5, 10, 20, 50, 100, 200, 1,000 ms, over."""
        return [sum(self.counts[start:end]) for start, end in pairwise([0, *_WRITE_ENDS, len(self.counts)])]

    def quantile(self, share: float) -> float:
        """Estimate a quantile in seconds, even within a bucket; NaN: there were no durations."""
        count = self.count
        if not count:
            return float("nan")
        wanted, below = share * count, 0
        for at, here in enumerate(self.counts):
            if here and below + here >= wanted:
                low = BOUNDS_S[at - 1] if at else 0.0
                high = BOUNDS_S[min(at, len(BOUNDS_S) - 1)]
                return low + (high - low) * max(wanted - below, 0.0) / here
            below += here
        return BOUNDS_S[-1]


class PublishDurations:
    """Durations of SENDs: all since the start, and by topic those of the last full period and of the current one.

    Groups of SENDs are small and many: they are noted first, and counted many groups at once.
    """

    def __init__(self) -> None:
        self.before = Durations()
        """Durations of all topics in the last full period."""
        self.last: dict[str, Durations] = {}
        """By topic, in the last full period; of those that were sent to."""
        self._all = Durations()
        self._since = Durations()
        self._now: dict[str, Durations] = defaultdict(Durations)
        self._noted: dict[str, list[float]] = defaultdict(list)
        """By topic, seconds that passed, below zero."""
        self._notes = 0

    def add(self, topic: str, now: float, began: Sequence[float]) -> None:
        """Count what passed until now since each of these."""
        self._noted[topic].extend([each - now for each in began])
        self._notes += len(began)
        if self._notes >= _NOTES:
            self._count()

    def _count(self) -> None:
        for topic, noted in self._noted.items():
            self._now[topic].add_passed(0.0, noted)
            self._since.add_passed(0.0, noted)
        self._noted.clear()
        self._notes = 0

    def turn(self) -> None:
        self._count()
        self.last, self._now = self._now, defaultdict(Durations)
        self.before, self._since = self._since, Durations()
        self._all.join(self.before)

    @property
    def total(self) -> Durations:
        """All since the start."""
        self._count()
        total = Durations()
        total.join(self._all)
        total.join(self._since)
        return total


class LoopLag:
    """Lateness of the event loop: a timer asks for a call, and what passes beyond is counted.

    What makes it late is work of the loop's own thread, or another thread that has the interpreter.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._timer: Timer | None = None
        self._longest_s = 0.0
        self._before_s = 0.0
        self.durations = Durations()

    @property
    def longest_s(self) -> float:
        """The longest in this period and the one before."""
        return max(self._longest_s, self._before_s)

    def turn(self) -> None:
        self._before_s, self._longest_s = self._longest_s, 0.0

    def start(self) -> None:
        self._timer = self._loop.call_later(_LAG_EVERY_S, self._look, self._loop.time() + _LAG_EVERY_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, expected: float) -> None:
        lag = max(self._loop.time() - expected, 0.0)
        self.durations.add(lag)
        self._longest_s = max(self._longest_s, lag)
        self.start()


_SLICE = 500
"""Places that are looked at in one turn of the loop: less than a millisecond or so."""

READERS = ""
"""In place of a subscription's name."""


class InRate(NamedTuple):
    """Messages, bytes and entries (a batch is one) that came, a second."""

    messages: float = 0.0
    bytes: float = 0.0
    entries: float = 0.0


class OutRate(NamedTuple):
    """Messages and bytes that were sent, messages of them sent again, acknowledgements taken, a second."""

    messages: float = 0.0
    bytes: float = 0.0
    redelivered: float = 0.0
    acked: float = 0.0


class Rates:
    """Rates of all producers and consumers. Of the event loop's thread."""

    def __init__(self, producers: Producers, consumers: Consumers, loop: Loop, period_s: float = 60.0) -> None:
        self._producers = producers
        self._consumers = consumers
        self._loop = loop
        self._period_s = period_s
        self._rates: dict[object, tuple[float, ...]] = {}
        """By producer, consumer, ("in", topic), ("out", topic), (topic, subscription)."""
        self._seen: dict[object, tuple[float, tuple[int, ...]]] = {}
        """Likewise, when each was looked at last, and its counts then."""
        self._since = loop.time()
        """When the last look began: what was not there then has counted from 0 since."""
        self._timer: Timer | None = None
        self.on_period: list[Callable[[], object]] = []
        """Called as each period ends."""

    # -- looking -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Look once a period, until `stop`."""
        self._timer = self._loop.call_later(self._period_s, self._begin)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sample(self) -> None:
        """Look at everything now, as at the end of a period."""
        for _ in self._look():
            pass

    def _begin(self) -> None:
        for call in self.on_period:
            call()
        self._go_on(self._look(), self._loop.time() + self._period_s)

    def _go_on(self, looking: Iterator[None], following: float) -> None:
        if next(looking, self) is self:
            self._timer = self._loop.call_later(max(following - self._loop.time(), 0.0), self._begin)
        else:
            self._timer = self._loop.call_later(0, self._go_on, looking, following)

    def _look(self) -> Iterator[None]:
        """Look at what there is, a slice at each step."""
        since, self._since = self._since, self._loop.time()
        rates: dict[object, tuple[float, ...]] = {}
        seen: dict[object, tuple[float, tuple[int, ...]]] = {}
        for number, (key, counts) in enumerate(self._counted()):
            if number % _SLICE == _SLICE - 1:
                yield
            now = self._loop.time()
            at, before = self._seen.get(key, (since, (0,) * len(counts)))
            seen[key], rates[key] = (at, before), self._rates.get(key, ())
            if now > at:
                rates[key] = tuple(max(new - old, 0) / (now - at) for new, old in zip(counts, before, strict=True))
                seen[key] = now, counts
        self._rates, self._seen = rates, seen

    def _counted(self) -> Iterator[tuple[object, tuple[int, ...]]]:
        """Yield the counts of each place; between two of them others may come and go."""
        for topic in list(self._producers.departed):
            came = self.received(topic)
            yield ("in", topic), (came.messages, came.bytes, came.entries)
            for producer in self._producers.of_topic(topic):
                yield producer, (producer.figures.messages, producer.figures.bytes, producer.figures.entries)
        topics: dict[str, Dispatched] = defaultdict(Dispatched)
        attached = set()
        for group in self._consumers.groups:
            total, place = Dispatched(), (group.topic.name, group.name)
            if group.durable:
                total.add(group.departed)
            for consumer in list(group.consumers):
                total.add(consumer.figures)
                topics[group.topic.name].add(consumer.figures)
                yield consumer, _counts(consumer.figures)
            attached.add(place)
            yield place, _counts(total)
        for topic, departed in list(self._consumers.departed.items()):
            for name, figures in list(departed.items()):
                topics[topic].add(figures)
                if (topic, name) not in attached:
                    yield (topic, name), _counts(figures)
        for topic, total in topics.items():
            yield ("out", topic), _counts(total)

    # -- rates ---------------------------------------------------------------------------------------

    def of_producer(self, producer: OpenProducer) -> InRate:
        return InRate(*self._rates.get(producer, ()))

    def published(self, topic: str) -> InRate:
        """Rates of what is sent to a topic, by its full name."""
        return InRate(*self._rates.get(("in", topic), ()))

    def of_consumer(self, consumer: Consumer) -> OutRate:
        return OutRate(*self._rates.get(consumer, ()))

    def of_subscription(self, topic: str, name: str) -> OutRate:
        """Rates of a subscription or a reader; its name as it is stored."""
        return OutRate(*self._rates.get((topic, name), ()))

    def dispatched(self, topic: str) -> OutRate:
        """Rates of a topic to all of its consumers."""
        return OutRate(*self._rates.get(("out", topic), ()))

    # -- counts since the start ------------------------------------------------------------------------

    def received(self, topic: str) -> Figures:
        """Counts of a topic's producers since the broker started, closed ones included."""
        total = Figures()
        total.add(self._producers.departed.get(topic, total))
        for producer in self._producers.of_topic(topic):
            total.add(producer.figures)
        return total

    def sent(self, topic: str) -> dict[str, Dispatched]:
        """Counts of a topic's consumers since the broker started, by subscription; "": readers, and deleted ones."""
        found: dict[str, Dispatched] = defaultdict(Dispatched)
        for name, figures in self._consumers.departed.get(topic, {}).items():
            found[name].add(figures)
        for name, consumers in self._consumers.of_topic(topic).items():
            for consumer in consumers:
                found[name if consumer.command.durable else READERS].add(consumer.figures)
        return found

    def forget_topic(self, topic: str) -> None:
        self._producers.departed.pop(topic, None)
        self._consumers.departed.pop(topic, None)


def _counts(figures: Dispatched) -> tuple[int, int, int, int]:
    return figures.messages, figures.bytes, figures.redelivered, figures.acked
