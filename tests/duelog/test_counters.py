"""Counters and ages of topics and subscriptions: what statistics say, and that metrics say the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from duelog import DUPLICATE, DelayedStore, ManualClock, Message, Policies, StoreConfig, Topic
from duelog.errors import InvalidMessage
from duelog.metrics import DELIVERED, OBSERVED, OF_REPLICA, OLDEST, SENT, delivered
from duelog.stats import SubscriptionStats
from tests.conftest import START_MS, OpenStore, in_threads
from tests.duelog.test_metrics import Collector, collector

__all__ = ["collector"]

CONFIG = StoreConfig(partition_ms=3_600_000, inline_delay_ms=0)


@pytest.fixture
def topic(open_store: OpenStore) -> Topic:
    """A topic of a store on a clock of the test's."""
    return open_store(config=CONFIG).topic("t")


def counts(stats: SubscriptionStats) -> tuple[int, int, int, int, int]:
    """Received, redelivered, acknowledged, dead-lettered, expired."""
    return stats.received, stats.redelivered, stats.acknowledged, stats.dead_lettered, stats.expired


def test_what_is_sent_counts_whatever_way_it_takes(topic: Topic, collector: Collector) -> None:
    """One by one, in batches, delayed and due, by producers; not what was refused, or stored already."""
    topic.send(b"1")
    topic.send(b"2", deliver_after=60)
    topic.send_async(b"3").result()
    topic.send_batch([Message(b"4"), Message(b"5", deliver_after=7_200), Message(b"6", deliver_after=1)])
    topic.send_payloads([b"7", b"8"])
    assert topic.stats().sent == 8
    producer = topic.producer("p")
    producer.send_batch([Message(b"9"), Message(b"10")], first_sequence_id=1)
    producer.send_batch([Message(b"10"), Message(b"11")], first_sequence_id=2)
    assert topic.stats().sent == 11
    heard: list[tuple[object, object]] = []
    topic.put(b"12", done=heard.extend, numbers=("q", 1, 1))
    topic.put(b"12", done=heard.extend, numbers=("q", 1, 1))
    topic._engine.sending.outbox.close()
    assert [outcome for _, outcome in heard][1] is DUPLICATE
    with pytest.raises(InvalidMessage):
        topic.send_batch([Message(b"13"), Message(5)])  # type: ignore[arg-type]
    assert topic.stats().sent == 12
    assert collector.value(SENT, pulsar_topic=topic.name) == 12


def test_a_batch_for_several_topics_counts_for_each(store: DelayedStore) -> None:
    """And for the store their sum."""
    store.send_batch([("a", Message(b"x")), ("b", Message(b"x", deliver_after=60)), ("a", Message(b"x"))])
    assert [store.topic(name).stats().sent for name in "ab"] == [2, 1]
    assert store.stats().sent == 3


def test_no_message_of_threads_that_send_at_once_is_counted_less(topic: Topic) -> None:
    """To one topic."""
    in_threads([lambda: [topic.send(b"x") for _ in range(100)]] * 4)
    assert topic.stats().sent == 400


def test_deliveries_acknowledgements_and_other_ends_are_counted_once_each(
    topic: Topic, clock: ManualClock, collector: Collector
) -> None:
    """Received each time, redelivered from the second on; acknowledged, dead-lettered and expired add up."""
    store = DelayedStore(topic._engine)
    store.set_policies(Policies(max_redeliveries=1), topic="t")
    with topic.subscribe("s") as subscription:
        topic.send_payloads([b"%d" % n for n in range(10)])
        batch = subscription.receive(10)
        assert counts(subscription.stats()) == (10, 0, 0, 0, 0)
        subscription.ack(batch[:4])
        subscription.ack(batch[:4])
        subscription.nack(batch[4:7], delay=0)
        again = subscription.receive(10)
        assert counts(subscription.stats()) == (13, 3, 4, 0, 0)
        subscription.nack(again, delay=0)
        assert subscription.receive(10, timeout=0) == []
        assert counts(subscription.stats()) == (13, 3, 4, 3, 0)
        subscription.retry_later(batch[7], delay=5)
        store.set_policies(Policies(ttl_ms=1_000), topic="t")
        clock.advance(2_000)
        store.tick()
        found = subscription.stats()
        assert counts(found) == (13, 3, 5, 3, 2)
        assert found.backlog == 0
        assert topic.stats().sent == 11
        for name, value in delivered(found).items():
            assert collector.value(name, pulsar_topic=topic.name, pulsar_subscription="s") == value
    stats = store.stats()
    assert (stats.sent, stats.received, stats.redelivered) == (11, 13, 3)
    assert (stats.acknowledged, stats.dead_lettered, stats.expired) == (5, 3, 2)


def test_what_is_for_another_subscription_is_not_received(topic: Topic, clock: ManualClock) -> None:
    """A retry that one subscription postponed passes the other by: neither received nor acknowledged there."""
    with topic.subscribe("one") as one, topic.subscribe("other") as other:
        topic.send(b"x")
        one.retry_later(one.receive()[0], delay=5)
        other.ack(other.receive())
        clock.advance(5_000)
        assert other.receive(timeout=0) == []
        assert counts(other.stats()) == (1, 0, 1, 0, 0)
        assert len(one.receive()) == 1
        assert counts(one.stats()) == (2, 0, 1, 0, 0)


def test_the_age_of_the_oldest_unacknowledged_is_how_long_it_has_been_due(
    topic: Topic, clock: ManualClock, collector: Collector
) -> None:
    """A delayed message counts from its due time on; then the next one; 0 where none is left."""

    def age() -> int:
        found = topic.subscription("s").stats().oldest_unacknowledged_ms
        assert collector.value(OLDEST, pulsar_topic=topic.name) == found / 1000
        return found

    with topic.subscribe("s", type="shared") as subscription:
        topic.send(b"first", deliver_after=10)
        topic.send(b"second", deliver_after=12)
        assert age() == 0
        clock.advance(15_000)
        first, second = subscription.receive(2)
        assert age() == 5_000
        subscription.ack(second)
        clock.advance(1_000)
        assert age() == 6_000
        subscription.ack(first)
        assert age() == 0


def test_what_waits_inline_has_no_age_before_it_is_due(open_store: OpenStore, clock: ManualClock) -> None:
    """It stands in the main log before messages that are due, and the oldest is one of these."""
    topic = open_store(config=replace(CONFIG, inline_delay_ms=60_000)).topic("t")
    with topic.subscribe("s", type="shared") as subscription:
        topic.send(b"soon", deliver_after=30)
        topic.send(b"now")
        clock.advance(2_000)
        assert [message.payload for message in subscription.receive(5)] == [b"now"]
        assert subscription.stats().oldest_unacknowledged_ms == 2_000
        clock.advance(30_000)
        assert subscription.stats().oldest_unacknowledged_ms == 32_000


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A store in which there was some traffic, closed."""
    with DelayedStore.open(tmp_path / "used", CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        with topic.subscribe("s") as subscription:
            topic.send_payloads([b"1", b"2"])
            subscription.ack(subscription.receive(1))
    return tmp_path / "used"


def test_counters_begin_anew_with_each_opening_and_the_age_does_not(used: Path) -> None:
    """Counters begin at 0, as Prometheus expects; the store itself says how old the backlog is."""
    with DelayedStore.open(used, CONFIG, clock=ManualClock(START_MS + 9_000)) as store:
        stats = store.topic("t").stats()
        assert stats.sent == 0
        assert counts(stats.subscriptions[0]) == (0, 0, 0, 0, 0)
        assert stats.subscriptions[0].oldest_unacknowledged_ms == 9_000


def test_counting_calls_no_instrument() -> None:
    """The counters of what passes are all read at collection."""
    assert {SENT, *DELIVERED} == {*OBSERVED} - {*OF_REPLICA}
