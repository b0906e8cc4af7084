"""Negative acknowledgements, retries, seeks, pauses and the time to live, as a consumer sees them."""

from __future__ import annotations

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, Policies, StoreConfig, Subscription, Topic
from duelog.errors import InvalidArgument
from tests.conftest import START_MS, OpenStore
from tests.duelog.consuming import received


def test_a_message_given_back_waits_longer_each_time(topic: Topic, reader: Subscription, clock: ManualClock) -> None:
    """Without a delay of its own: one second, then two, then four."""
    topic.send(b"x")
    for times, wait_ms in enumerate((1_000, 2_000, 4_000)):
        (message,) = reader.receive()
        assert message.redelivery_count == times
        reader.nack(message)
        clock.advance(wait_ms - 1)
        assert reader.receive() == []
        clock.advance(1)


def test_retry_later_is_a_delayed_message_for_one_subscription(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """It survives a reopen, comes at its time to the subscription that asked, and to no other."""
    asking, other = topic.subscribe("asking"), topic.subscribe("other")
    topic.send(b"x", key="k")
    (message,) = asking.receive()
    asking.retry_later(message, 60)
    assert received(other) == [b"x"]
    store.close()
    store = open_store()
    topic = store.topic("t")
    asking, other = topic.subscribe("asking"), topic.subscribe("other")
    assert received(other) == [b"x"]
    clock.advance(59_999)
    assert asking.receive() == []
    clock.advance(1)
    (message,) = asking.receive()
    assert (message.payload, message.key, message.retries) == (b"x", "k", 1)
    asking.ack(message)
    assert other.receive() == []
    assert asking.stats().backlog == 0


def test_seek_by_time_finds_the_first_message_due_then(open_store: OpenStore, clock: ManualClock) -> None:
    """By due time, also of markers; before everything is the beginning, after everything the end."""
    store = open_store(config=StoreConfig(retention_ms=10**9, partition_ms=1_000))
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    topic.send_batch([Message(b"%d" % second, deliver_after=second) for second in range(5)])
    clock.advance(10_000)
    store.tick()  # a receiver does not wait for all that is due
    consumer.ack(consumer.receive(10))
    consumer.seek(START_MS + 2_001)
    assert received(consumer) == [b"3", b"4"]
    consumer.seek(0)
    assert len(received(consumer)) == 5
    consumer.seek(START_MS + 50_000)
    assert received(consumer) == []


def test_seek_past_what_was_trimmed_begins_with_what_is_kept(open_store: OpenStore, clock: ManualClock) -> None:
    """Ledgers and partitions that are gone stay gone: a seek before them is a seek to the first that is kept."""
    store = open_store(config=StoreConfig(ledger_max_entries=2, partition_ms=1_000))
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    first = topic.send(b"0", deliver_after=1)
    clock.advance(5_000)
    message = consumer.receive()[0]
    consumer.ack(message)
    topic.send_batch([Message(b"1"), Message(b"2")])
    consumer.ack(consumer.receive(1))
    clock.advance(100)
    store.tick()
    assert store.partitions() == []
    assert topic.get(first) is None
    consumer.seek(message)
    assert received(consumer) == [b"2"]
    with pytest.raises(InvalidArgument, match="to="):
        consumer.seek("yesterday")


def test_a_paused_subscription_gets_nothing_until_it_is_resumed(
    open_store: OpenStore, store: DelayedStore, topic: Topic
) -> None:
    """Also after a reopen; others are not concerned."""
    paused, other = topic.subscribe("paused"), topic.subscribe("other")
    paused.pause()
    topic.send(b"x")
    assert paused.receive() == []
    assert received(other) == [b"x"]
    store.close()
    store = open_store()
    paused = store.topic("t").subscribe("paused")
    assert paused.paused
    assert paused.receive() == []
    paused.resume()
    assert received(paused) == [b"x"]


def test_time_to_live_counts_from_the_due_time(open_store: OpenStore, clock: ManualClock) -> None:
    """A message due in an hour with a time to live of a minute is there at the hour, and gone a while after."""
    store = open_store(config=StoreConfig(ttl_ms=60_000))
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    topic.send(b"x", deliver_after=3_600)
    clock.advance(3_600_000)
    store.tick()
    assert consumer.stats().backlog == 1
    clock.advance(59_000)
    assert received(consumer) == [b"x"]
    consumer.nack(MessageId(1, 0), delay=0)
    clock.advance(10_000)
    store.tick()
    assert consumer.receive() == []
    assert consumer.stats().backlog == 0


def test_what_has_outlived_the_policy_is_not_delivered_behind_a_message_that_has_not(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """As a message that has outlived its own: what was due while the store was closed fires behind what is sent now."""
    config = StoreConfig(partition_ms=3_600_000, max_clock_jump_ms=None)
    store = open_store(config=config)
    topic = store.topic("t")
    for name in ("s", "other"):
        topic.subscribe(name).close()
    store.set_policies(Policies(ttl_ms=60_000), topic="t", subscription="s")
    topic.send(b"by the policy", deliver_after=1)
    topic.send(b"by its own", deliver_after=1, ttl=60)
    store.close()
    clock.advance(61_000)
    store = open_store(config=config)
    topic = store.topic("t")
    topic.send(b"fresh")
    for _ in range(5):
        store.tick()
    assert [message.payload for message in topic.subscription("s").peek(10)] == [b"fresh"]
    with topic.subscribe("s") as consumer:
        assert received(consumer) == [b"fresh"]
        assert consumer.stats().expired == 2
    with topic.subscribe("other") as consumer:
        assert received(consumer) == [b"fresh", b"by the policy"]


def test_an_acknowledged_message_of_a_topic_that_is_sought_does_not_come_again_after_a_clock_set_back(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """It waited inline, was due, and by the clock is not due any more: a seek past it leaves it acknowledged."""
    config = StoreConfig(inline_delay_ms=1_000, max_clock_jump_ms=None)
    store = open_store(config=config)
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"received", deliver_after=0.06)
        clock.advance(100)
        consumer.ack(consumer.receive(), durable=True)
        topic.send(b"waits", deliver_after=0.06)
        clock.set(clock.now_ms() - 90)
        consumer.seek("latest")
        clock.advance(1_000)
        assert received(consumer) == [b"waits"]
        clock.set(clock.now_ms() - 1_090)
    store.close()
    store = open_store(config=config)
    store.topic("t").subscription("s").reset("latest")
    with store.topic("t").subscribe("s") as consumer:
        clock.advance(2_000)
        assert received(consumer) == [b"waits"]


def test_what_was_cleared_stays_cleared_when_the_subscription_seeks_forward(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """A seek takes back no acknowledgement of what lies before the place that it goes to."""
    topic = open_store(config=StoreConfig(inline_delay_ms=60_000)).topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"cleared", deliver_after=60)
        assert topic.clear_inline("s") == 1
        topic.send(b"waits", deliver_after=60)
        consumer.seek("latest")
        clock.advance(60_000)
        assert received(consumer) == [b"waits"]


@pytest.mark.parametrize("how", ["nack", "nack_all", "leave", "timeout"])
def test_what_is_given_back_without_a_delay_does_not_wait_for_a_clock_that_is_set_back(
    open_store: OpenStore, clock: ManualClock, how: str
) -> None:
    """It comes at once, and not only after the store was opened again."""
    store = open_store(config=StoreConfig(max_clock_jump_ms=None, ack_timeout_ms=50 if how == "timeout" else None))
    topic = store.topic("t")
    consumer, other = (topic.subscribe("s", type="shared") for _ in range(2))
    topic.send_payloads([b"a", b"b", b"c"])
    batch = consumer.receive(10)
    if how == "nack":
        consumer.nack(batch, delay=0)
    elif how == "nack_all":
        consumer.nack_all()
    elif how == "leave":
        consumer.close()
    else:
        clock.advance(50)
        assert len(other.receive(1)) == 1
        other.nack_all()
    clock.set(clock.now_ms() - 3_600_000)
    assert received(other) == [b"a", b"b", b"c"]
