"""A subscription said with sets of places in its topic's main log."""

from __future__ import annotations

from collections.abc import Sequence


class TwinSubscription:
    """What is acknowledged, and where everything else is: held by a consumer, waiting, ready, or not read yet.

    Places count the entries of the main log from the topic's beginning; `start` is where the subscription begins.
    """

    def __init__(self, name: str, start: int) -> None:
        self.name = name
        self.mark = start
        """Everything before it is acknowledged, trimmed, or from before the subscription's time."""
        self.acked: set[int] = set()
        self.flushed: tuple[int, frozenset[int]] = (start, frozenset())
        """What is on disk for certain: a mark and acknowledged places."""
        self.unflushed_since_ms: int | None = None
        self.kind: str | None = None
        self.consumers: set[int] = set()
        self.held: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.ready: set[int] = set()
        self.times: dict[int, int] = {}
        self.read = start

    # -- asking ------------------------------------------------------------------------------------

    def is_acked(self, place: int) -> bool:
        return place < self.mark or place in self.acked

    def passed(self, limit: int) -> bool:
        """Whether everything before `limit` is acknowledged."""
        return self.mark >= limit

    def backlog(self, end: int) -> int:
        return end - self.mark - len(self.acked)

    # -- consumers ---------------------------------------------------------------------------------

    def admits(self, kind: str) -> bool:
        return not self.consumers or (self.kind == kind == "shared")

    def attach(self, kind: str, consumer: int) -> None:
        if self.kind != kind:
            self.forget_deliveries()
            self.kind = kind
        self.consumers.add(consumer)

    def detach(self, consumer: int, now_ms: int) -> None:
        self.nack(consumer, list(self.held), now_ms)
        self.consumers.remove(consumer)

    def forget_deliveries(self) -> None:
        """Start anew after what is acknowledged, as after a restart."""
        for places in (self.held, self.waiting, self.ready, self.times, self.consumers):
            places.clear()
        self.kind = None
        self.read = self.mark

    # -- deliveries --------------------------------------------------------------------------------

    def receive(self, consumer: int, count: int, end: int, now_ms: int) -> list[tuple[int, int]]:
        """(place, redelivery count) of the next batch: first what comes again, in log order, then what is new."""
        due = [place for place, at_ms in self.waiting.items() if at_ms <= now_ms]
        self.ready.update(due)
        for place in due:
            del self.waiting[place]
        batch = sorted(self.ready)[:count]
        while len(batch) < count and self.read < end:
            if not self.is_acked(self.read):
                batch.append(self.read)
            self.read += 1
        self.ready.difference_update(batch)
        got = [(place, self.times.get(place, 0)) for place in batch]
        for place, times in got:
            self.times[place] = times + 1
            self.held[place] = consumer
        return got

    def nack(self, consumer: int, places: Sequence[int], at_ms: int) -> int:
        mine = {place for place in places if self.held.get(place) == consumer}
        for place in mine:
            del self.held[place]
            self.waiting[place] = at_ms
        return len(mine)

    # -- acknowledging -----------------------------------------------------------------------------

    def ack(self, places: Sequence[int]) -> int:
        new = {place for place in places if not self.is_acked(place)}
        self.acked |= new
        self._settle(new)
        return len(new)

    def ack_cumulative(self, last: int) -> int:
        count = self.ack(range(self.mark, last + 1))
        self.read = max(self.read, last + 1)
        return count

    def trimmed(self, first: int) -> None:
        self.mark = max(self.mark, first)
        self.acked = {place for place in self.acked if place >= first}
        self.read = max(self.read, first)
        self._settle({place for place in self.times if place < first})

    def flush(self) -> None:
        self.flushed = self.mark, frozenset(self.acked)
        self.unflushed_since_ms = None

    def restore(self, first: int, acked: set[int]) -> None:
        """Exactly `acked` of the entries from `first` on, and everything before it, was found on the disk."""
        self.mark, self.acked = first, acked
        self._settle(set())
        self.flush()
        self.forget_deliveries()

    def _settle(self, gone: set[int]) -> None:
        for place in gone:
            self.held.pop(place, None)
            self.waiting.pop(place, None)
            self.times.pop(place, None)
        self.ready -= gone
        while self.mark in self.acked:
            self.acked.remove(self.mark)
            self.mark += 1
