"""When the topic-level tracker looks for what all subscriptions have been served (PIP-448): interval and ratio."""

from __future__ import annotations

import pytest

from duelog import ManualClock, Message, StoreConfig, Subscription
from duelog.markers.tracker import TopicDelayTracker
from duelog.markers.waiting import WaitingEntries
from tests.conftest import OpenStore

MOMENTS = 20


class Tracked:
    """Messages due a second apart, that two consumers have passed over; how often the index was pruned."""

    def __init__(self, open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, config: StoreConfig):
        store = open_store(config=config)
        topic = store.topic("t")
        self.one, self.other = topic.subscribe("one"), topic.subscribe("other")
        topic.send_batch([Message(b"x", deliver_after=second) for second in range(1, MOMENTS + 1)])
        assert self.take(self.one) == self.take(self.other) == 0
        tracker = store._engine.topics.loaded()[0].tracker
        assert isinstance(tracker, TopicDelayTracker)
        self.tracker, self.pruned = tracker, 0
        prune = WaitingEntries.prune

        def counted(index: WaitingEntries, due_ms: int) -> None:
            self.pruned += 1
            prune(index, due_ms)

        monkeypatch.setattr(WaitingEntries, "prune", counted)

    @staticmethod
    def take(consumer: Subscription) -> int:
        """How many messages a consumer gets now, acknowledged."""
        messages = consumer.receive(100, timeout=0)
        consumer.ack(messages)
        return len(messages)


def test_between_two_prunings_lies_the_interval(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is served in between; then what was due before the time of the slower one goes at once."""
    config = StoreConfig(inline_delay_ms=60_000, tracker_prune_interval_ms=5_000, ack_flush_ms=0)
    tracked = Tracked(open_store, clock, monkeypatch, config)
    kept = []
    for _ in range(10):
        clock.advance(1_000)
        assert tracked.take(tracked.one) == tracked.take(tracked.other) == 1
        kept.append(len(tracked.tracker._waiting))
    assert tracked.pruned == 2
    assert kept == [20, 20, 20, 20, 17, 17, 17, 17, 17, 12]


@pytest.mark.parametrize(("ratio", "looks"), [(0, 10), (0.5, 10), (0.6, 1), (1, 1)])
def test_too_few_subscriptions_that_moved_on_are_no_reason_to_prune(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, ratio: float, looks: int
) -> None:
    """One of two is half of them; what the other still needs stays in any case, and it gets all of it."""
    config = StoreConfig(inline_delay_ms=60_000, tracker_prune_interval_ms=0, tracker_prune_ratio=ratio)
    tracked = Tracked(open_store, clock, monkeypatch, config)
    for _ in range(9):
        clock.advance(1_000)
        assert tracked.take(tracked.one) == 1
    assert len(tracked.tracker._waiting) == MOMENTS
    assert tracked.take(tracked.other) == 9
    assert tracked.pruned == looks
    assert len(tracked.tracker._waiting) == MOMENTS - 8
