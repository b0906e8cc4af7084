"""Durations, counted by how long they were: of SENDs by topic, of dispatch, of the event loop's lateness.

One list of bounds for all. It has those by which Pulsar tells write latencies, so that its buckets are sums of these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

BOUNDS_S = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05,
    0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 600.0, 3600.0,
)  # fmt: skip
"""Upper bounds, inclusive."""

_WRITE_BOUNDS_S = (0.0005, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
_WRITE_ENDS = [BOUNDS_S.index(each) + 1 for each in _WRITE_BOUNDS_S]


_NOTES = 1_000
"""SENDs that are counted together: in half a millisecond or less."""


class Group(NamedTuple):
    """Durations that are counted together: buckets with how many there are, and the sum of all."""

    found: list[tuple[int, int]]
    sum_s: float


def passed_since(now: float, began: Sequence[float], unit_s: float = 1.0) -> Group:
    """What passed until now since each of these, at least one; 0 of what is later. `unit_s`: seconds of their unit.

    Sorted, they need no look at each: a group is in one bucket or few.
    """
    began = sorted(began)
    count = len(began)
    if began[-1] > now:
        began = [min(each, now) for each in began]
    low, high = bisect_left(BOUNDS_S, (now - began[-1]) * unit_s), bisect_left(BOUNDS_S, (now - began[0]) * unit_s)
    sum_s = (now * count - sum(began)) * unit_s
    if low == high:
        return Group([(low, count)], sum_s)
    found, end = [], count
    for at in range(low, high):
        start = bisect_left(began, now - BOUNDS_S[at] / unit_s, 0, end)
        found.append((at, end - start))
        end = start
    return Group([*found, (high, end)], sum_s)


class Durations:
    """Counts by bucket, and the sum of all."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def add_group(self, group: Group) -> None:
        """Count many."""
        counts = self.counts
        for at, count in group.found:
            counts[at] += count
        self.sum_s += group.sum_s

    def join(self, other: Durations) -> None:
        """Count what another has counted."""
        self.counts = [old + new for old, new in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def cumulative(self) -> Iterable[tuple[str, int]]:
        """Bounds as Prometheus writes them, with the durations up to each."""
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        return zip(bounds, accumulate(self.counts), strict=True)

    def write_buckets(self) -> list[int]:
        """Counts between Pulsar's bounds of write latencies: up to 0.5, 1, 5, 10, 20, 50, 100, 200, 1,000 ms, over."""
        ends = [0, *_WRITE_ENDS, len(self.counts)]
        return [sum(self.counts[start:end]) for start, end in pairwise(ends)]

    def quantile(self, share: float) -> float:
        """Seconds below which so many of them were, within a bucket as if they were even; NaN: there were none."""
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
    """Of SENDs: all since the start, and by topic those of the last full period and of the one that is not over.

    Groups of SENDs are small and many: they are noted first, and counted many groups at once.
    """

    def __init__(self) -> None:
        self.all = Durations()
        self.before = Durations()
        """Of all topics, in the last full period."""
        self.last: dict[str, Durations] = {}
        """Likewise, by topic; of those that were sent to."""
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
            group = passed_since(0.0, noted)
            durations = self._now.get(topic)
            if durations is None:
                durations = self._now[topic] = Durations()
            durations.add_group(group)
            self._since.add_group(group)
        self._noted, self._notes = {}, 0

    def turn(self) -> None:
        """A period is over."""
        self._count()
        self.last, self._now = self._now, {}
        self.before, self._since = self._since, Durations()
        self.all.join(self.before)

    @property
    def total(self) -> Durations:
        """All since the start."""
        self._count()
        total = Durations()
        total.join(self.all)
        total.join(self._since)
        return total
