"""Durations, counted by how long they were: of SENDs by topic, of dispatch, of the event loop's lateness.

All have one list of bounds. It has those by which Pulsar tells write latencies, so that its buckets are sums of these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from ..protocol.loop_calls import Loop, Timer

BOUNDS_S = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05,
    0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 600.0, 3600.0,
)  # fmt: skip
"""Upper bounds, inclusive."""

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
        """Count the times from each of `began`, at least one, until `now`; 0 where it is later. unit_s: of both.

        Sorted, they need no look at each: a group is in one bucket or few.
        """
        began = sorted(began)
        end = len(began)
        if began[-1] > now:
            began = [min(time, now) for time in began]
        self.sum_s += (now * end - sum(began)) * unit_s
        low, high = bisect_left(BOUNDS_S, (now - began[-1]) * unit_s), bisect_left(BOUNDS_S, (now - began[0]) * unit_s)
        for bucket in range(low, high):
            start = bisect_left(began, now - BOUNDS_S[bucket] / unit_s, 0, end)
            self.counts[bucket] += end - start
            end = start
        self.counts[high] += end

    def join(self, other: Durations) -> None:
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
        self._now: dict[str, Durations] = {}
        self._noted: dict[str, list[float]] = {}
        """By topic, seconds that passed, below zero."""
        self._notes = 0

    def add(self, topic: str, now: float, began: Sequence[float]) -> None:
        """Count what passed until now since each of these."""
        noted = self._noted.get(topic)
        if noted is None:
            noted = self._noted[topic] = []
        noted.extend([each - now for each in began])
        self._notes += len(began)
        if self._notes >= _NOTES:
            self._count()

    def _count(self) -> None:
        for topic, noted in self._noted.items():
            durations = self._now.get(topic)
            if durations is None:
                durations = self._now[topic] = Durations()
            durations.add_passed(0.0, noted)
            self._since.add_passed(0.0, noted)
        self._noted, self._notes = {}, 0

    def turn(self) -> None:
        self._count()
        self.last, self._now = self._now, {}
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
