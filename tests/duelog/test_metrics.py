"""Counters, ages and metrics: what statistics say of topics and subscriptions, and what an SDK collects."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.metrics import get_meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from duelog import (
    DUPLICATE,
    DelayedDeliveryPolicies,
    DelayedStore,
    ManualClock,
    Message,
    Policies,
    ReceivedMessage,
    StoreConfig,
    Topic,
    Worker,
    metrics,
)
from duelog.aio.face import Topic as AsyncTopic
from duelog.aio.threads import Threads
from duelog.errors import CorruptEntry, DelayTooLong, InvalidMessage
from duelog.metrics import DELIVERED, OBSERVED, OF_REPLICA, OLDEST, SENT, delivered
from duelog.stats import SubscriptionStats
from tests.conftest import DAY_MS, START_MS, LeadingClock, OpenStore, applied, in_threads, tick_after
from tests.model.driver import armed

TOPIC = {
    "pulsar.cluster": "standalone",
    "pulsar.namespace": "public/default",
    "pulsar.topic": "persistent://public/default/t",
}
CONFIG = StoreConfig(partition_ms=3_600_000, inline_delay_ms=0)


class Collector:
    """The points that a reader collects, by instrument."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        self._reader = reader

    def points(self) -> dict[str, list[Any]]:
        """The data points of every instrument that has any."""
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def value(self, name: str, **attributes: str) -> Any:
        """The value of the one point of an instrument that has these attributes; the count, of a histogram."""
        wanted = {key.replace("_", "."): value for key, value in attributes.items()}
        (point,) = [each for each in self.points()[name] if wanted.items() <= dict(each.attributes).items()]
        return point.count if hasattr(point, "bucket_counts") else point.value


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A reader on instruments of its own, in place of the process's."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics._Shared, "instruments", metrics.Instruments(provider.get_meter("duelog")))
    yield Collector(reader)
    provider.shutdown()


def test_the_counters_of_pip_437_have_its_names_and_attributes(collector: Collector, open_store: OpenStore) -> None:
    """Refused and overridden messages are counted by cluster, namespace and topic."""
    store = open_store(config=StoreConfig(cluster="west"))
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=1_000))
    with pytest.raises(DelayTooLong):
        store.topic("t").send_batch([Message(b"a", deliver_after=5), Message(b"b", deliver_after=6), Message(b"c")])
    store.set_policies(DelayedDeliveryPolicies(fixed_delivery_delay_ms=7), namespace="public/default")
    store.topic("t").send_batch([Message(b"a", deliver_after=5), Message(b"b")])
    for name, value in (("delayed.rejected", 2), ("fixed.delay.overridden", 1)):
        (point,) = collector.points()[f"pulsar.broker.topic.messages.{name}"]
        assert point.value == value
        assert dict(point.attributes) == {**TOPIC, "pulsar.cluster": "west"}


@pytest.fixture
def fixed(open_store: OpenStore, collector: Collector) -> DelayedStore:
    """A store whose topic `t` gives every message a delay of 7 s."""
    store = open_store(config=StoreConfig(partition_ms=3_600_000))
    store.set_policies(DelayedDeliveryPolicies(fixed_delivery_delay_ms=7_000), topic="t")
    return store


def overridden(collector: Collector) -> int:
    """How many messages did not get the delay that they asked for."""
    points = collector.points().get("pulsar.broker.topic.messages.fixed.delay.overridden", [])
    return sum(point.value for point in points)


def test_a_delay_is_counted_as_overridden_if_it_was_asked_for_and_not_given(
    collector: Collector, fixed: DelayedStore, clock: ManualClock
) -> None:
    """Not where none was asked for, or one that is past, or just the fixed one; by each way to send or reschedule."""
    topic, now_ms = fixed.topic("t"), clock.now_ms()
    for message in (Message(b"1"), Message(b"2", deliver_at=now_ms - 5), Message(b"3", deliver_after=7)):
        topic.send(message.payload, deliver_at=message.deliver_at, deliver_after=message.deliver_after)
        topic.send_batch([message])
        topic.send_async(message.payload, deliver_at=message.deliver_at, deliver_after=message.deliver_after).result()
        topic.producer("p").send(message)
    assert overridden(collector) == 0
    message_id = topic.send(b"x", deliver_after=8)
    assert overridden(collector) == 1
    topic.send_batch([Message(b"x", deliver_after=after) for after in (None, 1, 7, 90)])
    assert overridden(collector) == 3
    topic.send_payloads([b"x", b"y", b"z"], deliver_at=[now_ms, now_ms + 1, now_ms + 7_000])
    assert overridden(collector) == 4
    topic.send_async(b"x", deliver_after=0.5).result()
    assert overridden(collector) == 5
    again = topic.reschedule_batch([message_id, message_id], deliver_after=60)
    assert again[1] is None
    assert overridden(collector) == 6
    assert again[0] is not None
    topic.reschedule(again[0])
    topic.fire_now(topic.send(b"now"))
    assert overridden(collector) == 6


def test_a_message_that_waits_for_room_is_counted_once(collector: Collector, open_store: OpenStore) -> None:
    """Under back-pressure the face for asyncio tries a second time to put it in."""
    store = open_store(config=StoreConfig(max_in_flight_bytes=1_500))
    store.set_policies(DelayedDeliveryPolicies(fixed_delivery_delay_ms=7_000), topic="t")
    topic = store.topic("t")
    topic.send(b"the first")
    go = threading.Event()

    async def main() -> None:
        threads = Threads()
        face = AsyncTopic(topic, threads)
        sends = [asyncio.create_task(face.send(b"x", deliver_after=60)) for _ in range(40)]
        await asyncio.sleep(0)  # each has been put in, or found no room
        go.set()
        await asyncio.gather(*sends)
        threads.close()

    with armed("commit.before", lambda: None if go.wait(60) else pytest.fail("it was not let go")):
        asyncio.run(main())
    assert topic.stats().pending == 41
    assert overridden(collector) == 40


def test_a_message_that_is_refused_is_counted_once(store: DelayedStore, collector: Collector) -> None:
    """By each way to send; of a batch those that are over the maximum."""
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=1_000), topic="t")
    topic = store.topic("t")
    message_id = topic.send(b"first", deliver_after=1)
    batch = [Message(b"x", deliver_after=after) for after in (1, 2, 3)]
    refused: list[Callable[[], object]] = [
        lambda: topic.send(b"x", deliver_after=2),
        lambda: topic.send_async(b"x", deliver_after=2),
        lambda: topic.send_batch(batch),
        lambda: topic.producer("p").send_batch(batch),
        lambda: topic.reschedule(message_id, deliver_after=2),
    ]
    for attempt in refused:
        with pytest.raises(DelayTooLong):
            attempt()
    (point,) = collector.points()["pulsar.broker.topic.messages.delayed.rejected"]
    assert point.value == 1 + 1 + 2 + 2 + 1


def test_lateness_is_the_time_of_the_marker_less_the_due_time(
    store: DelayedStore, collector: Collector, clock: ManualClock
) -> None:
    """Each fired message is in the histogram, in seconds."""
    store.topic("t").send_batch([Message(b"x", deliver_after=delay) for delay in (1, 2, 5)])
    tick_after(store, clock, 5_000)
    points = collector.points()
    (late,) = points["duelog.messages.lateness"]
    assert (late.count, late.min, late.max, late.sum) == (3, 0.0, 4.0, 7.0)
    assert dict(late.attributes) == TOPIC
    assert late.explicit_bounds[0] < 0.001, "buckets tell milliseconds apart"
    (fired,) = points["duelog.messages.fired"]
    assert fired.value == 3


def test_what_was_written_ahead_of_its_time_is_not_late(collector: Collector, open_store: OpenStore) -> None:
    """Nor early: no histogram takes less than nothing."""
    clock = LeadingClock(START_MS)
    store = open_store(clock_=clock)
    store.topic("t").send_batch([Message(b"x", deliver_at=START_MS + at) for at in (9, 12)])
    assert tick_after(store, clock, 10).fired == 2
    (late,) = collector.points()["duelog.messages.lateness"]
    assert (late.count, late.min, late.max) == (2, 0.0, 0.001)


def test_messages_that_waited_inline_are_fired_once_whatever_the_subscriptions(
    collector: Collector, open_store: OpenStore, clock: ManualClock
) -> None:
    """Counted when the first of them comes by, with their lateness, also when the tracker was freed in between."""
    store = open_store(config=StoreConfig(inline_delay_ms=60_000, tracker_idle_ms=0))
    topic = store.topic("t")
    first, second = topic.subscribe("first"), topic.subscribe("second")
    topic.send_batch([Message(b"x", deliver_after=delay) for delay in (1, 2, 5)])
    assert first.receive(10) == second.receive(10) == []
    clock.advance(2_000)
    assert len(first.receive(10)) == len(second.receive(10)) == 2
    assert collector.value("duelog.messages.fired", pulsar_topic=TOPIC["pulsar.topic"]) == 2
    first.close()
    second.close()
    tick_after(store, clock, 1_000)
    clock.advance(3_000)
    assert len(topic.subscribe("second").receive(10)) == 3
    (late,) = collector.points()["duelog.messages.lateness"]
    assert (late.count, late.min, late.max, late.sum) == (3, 0.0, 1.0, 2.0)
    assert collector.value("duelog.messages.fired", pulsar_topic=TOPIC["pulsar.topic"]) == 3


@pytest.mark.parametrize("inline_ms", [0, 60_000])
def test_delayed_and_backlog_of_a_subscription_move_as_messages_fall_due(
    collector: Collector, open_store: OpenStore, clock: ManualClock, inline_ms: int
) -> None:
    """Messages not due are delayed for every subscription; those due and not acknowledged are its backlog."""
    topic = open_store(config=StoreConfig(inline_delay_ms=inline_ms)).topic("t")
    with topic.subscribe("a") as first, topic.subscribe("b"):
        topic.send_batch([Message(b"x", deliver_after=delay) for delay in (1, 2, 3)])
        first.receive(9)
        assert collector.value("duelog.subscription.delayed", pulsar_subscription="a") == 3
        clock.advance(2_000)
        messages = first.receive(9)
        assert len(messages) == 2
        first.ack(messages[0])
        assert collector.value("duelog.subscription.delayed", pulsar_subscription="a") == 1
        assert collector.value("duelog.subscription.backlog", pulsar_subscription="a") == 1
        assert collector.value("duelog.topic.index.size") > 0


def test_partitions_are_counted_by_state_and_measured(
    collector: Collector, open_store: OpenStore, clock: ManualClock
) -> None:
    """One that has begun, one to come; after the first has gone its deletion and its ledgers' trimming are counted."""
    store = open_store(config=StoreConfig(ledger_max_entries=1))
    topic = store.topic("t")
    topic.send(b"today", deliver_after=60)
    topic.send(b"later", deliver_at=START_MS + 3 * DAY_MS)
    applied(store)
    states = {p.attributes["duelog.partition.state"]: p.value for p in collector.points()["duelog.partitions"]}
    assert states == {"future": 1, "current": 1, "closed": 0}
    sizes = {p.attributes["duelog.partition"]: p.value for p in collector.points()["duelog.partition.size"]}
    assert sorted(sizes) == ["20260921T000000Z", "20260924T000000Z"]
    assert all(size > 0 for size in sizes.values())
    clock.advance(DAY_MS)
    with topic.subscribe("s") as consumer:
        consumer.ack(consumer.receive(9))
        store.flush()
        clock.advance(1_000)
        while store.tick().deleted == 0:
            clock.advance(100)
    assert collector.value("duelog.partitions.deleted") == 1
    assert collector.value("duelog.ledgers.trimmed") >= 1
    assert collector.value("duelog.entries.trimmed") >= 1


def test_commits_tell_their_time_their_entries_and_their_callers(
    store: DelayedStore, topic: Topic, collector: Collector
) -> None:
    """A batch is one group of the write-ahead log of so many entries, applied by a commit of each environment."""
    topic.send_batch([Message(b"x", deliver_after=60) for _ in range(7)])
    topic.send_batch([Message(b"x") for _ in range(5)])
    applied(store)
    sums = {
        point.attributes["duelog.environment"]: (point.count, point.sum)
        for point in collector.points()["duelog.commit.entries"]
    }
    assert sums == {"wal": (2, 12), "partition": (1, 7), "main": (1, 5)}
    assert collector.value("duelog.commit.duration", duelog_environment="partition") >= 1
    assert collector.value("duelog.commit.requests", duelog_environment="main") >= 1


def test_snapshots_are_counted_with_size_and_time(collector: Collector, open_store: OpenStore) -> None:
    """The number is the one that the ticks return."""
    store = open_store(config=StoreConfig(snapshot_every_entries=10))
    store.topic("t").send(b"x", deliver_after=60)
    written = store.tick().snapshots
    store.topic("t").send_batch([Message(b"x", deliver_after=60) for _ in range(20)])
    written += store.tick().snapshots
    assert written
    assert collector.value("duelog.snapshots") == written
    assert collector.value("duelog.snapshot.size") == written
    assert collector.value("duelog.snapshot.duration") == written


def test_an_unreadable_entry_counts_once(store: DelayedStore, collector: Collector) -> None:
    """However often it is met."""
    for _ in range(2):
        store._engine.delivery.quarantine.add(CorruptEntry("main", 1, 2, "made up"))
    assert collector.value("duelog.entries.corrupt") == 1
    store.close()


def test_a_closed_store_reports_nothing_and_two_stores_report_beside_each_other(
    collector: Collector, open_store: OpenStore, tmp_path: Path
) -> None:
    """Gauges tell stores of one process apart."""
    first, second = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    stores = {point.attributes["duelog.store"] for point in collector.points()["duelog.partitions"]}
    assert stores == {str(tmp_path / "a"), str(tmp_path / "b")}
    first.close()
    stores = {point.attributes["duelog.store"] for point in collector.points()["duelog.partitions"]}
    assert stores == {str(tmp_path / "b")}
    second.close()
    assert "duelog.partitions" not in collector.points()


def test_without_an_sdk_nothing_is_measured() -> None:
    """The API's own meters do nothing, and lateness is not even worked out."""
    assert not metrics.Instruments(get_meter("duelog")).listening


def test_the_longest_running_handler_is_a_gauge_of_its_subscription(
    collector: Collector, open_store: OpenStore, clock: ManualClock
) -> None:
    """In seconds, as its statistics have it; subscriptions without a worker have none."""
    store = open_store(config=StoreConfig(background=True))
    store.topic("t").subscribe("other").close()
    begun, gate = threading.Event(), threading.Event()
    worker = Worker(store)

    @worker.task("t")
    def stand(message: ReceivedMessage) -> None:
        begun.set()
        gate.wait(60)

    with worker:
        store.topic("t").send(b"x")
        assert begun.wait(60)
        clock.advance(7_500)
        (point,) = collector.points()["duelog.subscription.running.time"]
        assert (point.value, dict(point.attributes)) == (7.5, {**TOPIC, "pulsar.subscription": "worker"})
        gate.set()
    assert "duelog.subscription.running.time" not in collector.points()


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
    store: DelayedStore, topic: Topic, clock: ManualClock, collector: Collector
) -> None:
    """Received each time, redelivered from the second on; acknowledged, dead-lettered and expired add up."""
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
