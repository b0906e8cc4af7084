"""Rates of messages and bytes by producer, consumer, subscription and topic, over the last full period.

Services count; here their counts are looked at once a period, some at a time, so that the loop goes on between them.
So a rate costs nothing where messages pass. REST and /metrics tell the same rates. A rate is 0 until a first period has
passed, as it is in Pulsar, whose `statsUpdateFrequencyInSecs` the period is.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..consume.consumers import Consumers
from ..consume.pump import Consumer, Dispatched
from ..produce.producers import Producers
from ..produce.sends import Figures, OpenProducer
from ..protocol.loop_calls import Loop, Timer

_SLICE = 500
"""Topics and subscriptions that are looked at in one turn of the loop: less than a millisecond or so."""

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


class _Track:
    """Counts of one place when it was looked at last, and its rates then."""

    __slots__ = ("at", "counts", "rates")

    def __init__(self, at: float, width: int) -> None:
        self.at = at
        self.counts: tuple[int, ...] = (0,) * width
        self.rates: tuple[float, ...] = (0.0,) * width

    def look(self, now: float, counts: tuple[int, ...]) -> None:
        elapsed = now - self.at
        if elapsed > 0:
            self.rates = tuple(max(new - old, 0) / elapsed for new, old in zip(counts, self.counts, strict=True))
            self.at, self.counts = now, counts


class Rates:
    """Rates of all producers and consumers. Of the event loop's thread."""

    def __init__(self, producers: Producers, consumers: Consumers, loop: Loop, period_s: float = 60.0) -> None:
        self._producers = producers
        self._consumers = consumers
        self._loop = loop
        self._period_s = period_s
        self._tracks: dict[object, _Track] = {}
        """By producer, consumer, ("in", topic), ("out", topic), (topic, subscription)."""
        self._next: dict[object, _Track] = {}
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
        self._next = {}
        for number, topic in enumerate(list(self._producers.departed)):
            if number % _SLICE == _SLICE - 1:
                yield
            for key, came in (
                (("in", topic), self.received(topic)),
                *((producer, producer.figures) for producer in self._producers.of_topic(topic)),
            ):
                self._track(key, since, came.messages, came.bytes, came.entries)
        topics: dict[str, Dispatched] = {}
        for number, group in enumerate(self._consumers.groups):
            if number % _SLICE == _SLICE - 1:
                yield
            total = Dispatched()
            if group.durable:
                total.add(group.departed)
            for consumer in group.consumers:
                total.add(consumer.figures)
                topics.setdefault(group.topic.name, Dispatched()).add(consumer.figures)
                self._track(consumer, since, *_counts(consumer.figures))
            self._track((group.topic.name, group.name), since, *_counts(total))
        for number, (topic, departed) in enumerate(list(self._consumers.departed.items())):
            if number % _SLICE == _SLICE - 1:
                yield
            for name, figures in departed.items():
                topics.setdefault(topic, Dispatched()).add(figures)
                if (topic, name) not in self._next:
                    self._track((topic, name), since, *_counts(figures))
        for number, (topic, total) in enumerate(topics.items()):
            if number % _SLICE == _SLICE - 1:
                yield
            self._track(("out", topic), since, *_counts(total))
        self._tracks, self._next = self._next, {}

    def _track(self, key: object, since: float, *counts: int) -> None:
        track = self._tracks.get(key) or _Track(since, len(counts))
        track.look(self._loop.time(), counts)
        self._next[key] = track

    # -- rates ---------------------------------------------------------------------------------------

    def of_producer(self, producer: OpenProducer) -> InRate:
        return self._in(producer)

    def published(self, topic: str) -> InRate:
        """Rates of what is sent to a topic, by its full name."""
        return self._in(("in", topic))

    def of_consumer(self, consumer: Consumer) -> OutRate:
        return self._out(consumer)

    def of_subscription(self, topic: str, name: str) -> OutRate:
        """Rates of a subscription or a reader; its name as it is stored."""
        return self._out((topic, name))

    def dispatched(self, topic: str) -> OutRate:
        """Rates of a topic to all of its consumers."""
        return self._out(("out", topic))

    def _in(self, key: object) -> InRate:
        track = self._tracks.get(key)
        return InRate() if track is None else InRate(*track.rates)

    def _out(self, key: object) -> OutRate:
        track = self._tracks.get(key)
        return OutRate() if track is None else OutRate(*track.rates)

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
        found: dict[str, Dispatched] = {}
        for name, figures in self._consumers.departed.get(topic, {}).items():
            found.setdefault(name, Dispatched()).add(figures)
        for name, consumers in self._consumers.of_topic(topic).items():
            for consumer in consumers:
                found.setdefault(name if consumer.command.durable else READERS, Dispatched()).add(consumer.figures)
        return found

    def forget_topic(self, topic: str) -> None:
        self._producers.departed.pop(topic, None)
        self._consumers.departed.pop(topic, None)


def _counts(figures: Dispatched) -> tuple[int, int, int, int]:
    return figures.messages, figures.bytes, figures.redelivered, figures.acked
