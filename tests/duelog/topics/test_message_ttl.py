"""A message's own time to live: pending it cannot end, then it is not delivered, and counts as acknowledged."""

from __future__ import annotations

from datetime import timedelta

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, Policies, StoreConfig
from duelog.errors import InvalidMessage
from tests.conftest import START_MS, OpenStore
from tests.duelog.consuming import received


def test_it_counts_from_the_due_time_to_the_millisecond(store: DelayedStore, clock: ManualClock) -> None:
    """Sent singly, in a batch, put, or as one group; each way it is delivered until then and not from then on."""
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"0", deliver_after=10, ttl=1)
        topic.send_batch(
            [Message(b"1", deliver_after=10, ttl=timedelta(seconds=1)), Message(b"kept", deliver_after=10)]
        )
        topic.send_async(b"2", deliver_after=10, ttl=1).result(10)
        topic.send(b"4", deliver_after=10, ttl=1, dedup_key="d")
        store.send_batch([("t", Message(b"3", deliver_after=10, ttl=1, key="k", properties={"a": "b"}))])
        clock.advance(10_999)
        messages = consumer.receive(10)
        assert sorted(message.payload for message in messages) == [b"0", b"1", b"2", b"3", b"4", b"kept"]
        assert {message.expires_ms for message in messages} == {START_MS + 11_000, None}
        consumer.nack(messages, delay=0)
        clock.advance(1)
        assert received(consumer) == [b"kept"]
        assert consumer.stats().backlog == 1


def test_what_fires_too_late_is_not_delivered(open_store: OpenStore, clock: ManualClock) -> None:
    """The store was closed when it was due; until a consumer comes by, it is part of the backlog."""
    store = open_store()
    store.topic("t").subscribe("s").close()
    store.topic("t").send(b"x", deliver_after=10, ttl=1)
    store.close()
    clock.advance(3_600_000)
    store = open_store()
    store.tick()
    admin = store.topic("t").subscription("s")
    assert admin.peek(5) == []
    assert admin.stats().backlog == 1
    with store.topic("t").subscribe("s") as consumer:
        assert consumer.receive() == []
        assert admin.stats().backlog == 0


def test_it_expires_in_flight_and_its_consumer_may_still_acknowledge(store: DelayedStore, clock: ManualClock) -> None:
    """Nothing is taken from a consumer; what is given back or overdue then does not come again, nor is it dead."""
    store.set_policies(Policies(max_redeliveries=0, ack_timeout_ms=2_000))
    topic = store.topic("t")
    with topic.subscribe("s", type="shared") as consumer:
        topic.send_batch([Message(b"%d" % number, ttl=1) for number in range(3)])
        acked, given, _ = consumer.receive(3)
        clock.advance(1_500)
        assert consumer.stats().unacknowledged == 3
        assert consumer.ack(acked) == 1
        consumer.nack(given, delay=0)
        assert consumer.receive() == []
        clock.advance(500)
        assert consumer.receive() == []
        assert (consumer.stats().backlog, list(store.dead_letters())) == (0, [])
        assert (consumer.stats().acknowledged, consumer.stats().expired) == (1, 2)


def test_whatever_moves_the_due_time_moves_the_end(store: DelayedStore, clock: ManualClock) -> None:
    """Rescheduling, and a policy that rounds."""
    store.set_policies(DelayedDeliveryPolicies(tick_time_ms=10_000), topic="t")
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        message_id = topic.send(b"moved", deliver_after=20, ttl=1)
        topic.send(b"rounded", deliver_after=0.001, ttl=1)
        assert topic.reschedule(message_id, deliver_after=60) is not None
        clock.advance(10_500)
        assert received(consumer) == [b"rounded"]
        clock.advance(50_000)
        assert received(consumer) == [b"moved"]


def test_a_retry_ends_when_what_was_postponed_would_have(store: DelayedStore, clock: ManualClock) -> None:
    """Also if that is before it is due."""
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send_batch([Message(b"in time", ttl=10), Message(b"too late", ttl=5)])
        for message in consumer.receive(2):
            consumer.retry_later(message, 7)
        clock.advance(7_000)
        (message,) = consumer.receive(2)
        assert (message.payload, message.expires_ms) == (b"in time", START_MS + 10_000)


def test_a_dead_letter_expires_no_more(store: DelayedStore, clock: ManualClock) -> None:
    """It is held until it is requeued, and has no time to live then."""
    store.set_policies(Policies(max_redeliveries=0))
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"x", ttl=1)
        consumer.nack(consumer.receive(), delay=0)
        assert consumer.receive() == []
        clock.advance(10_000)
        assert store.requeue_dead_letters(list(store.dead_letters())) == 1
        (message,) = consumer.receive()
        assert (message.payload, message.expires_ms) == (b"x", None)


def test_short_delays_in_the_main_log_expire_too(open_store: OpenStore, clock: ManualClock) -> None:
    """They wait there, and count from when they are due."""
    store = open_store(config=StoreConfig(inline_delay_ms=10_000))
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send_batch([Message(b"a", deliver_after=5, ttl=1), Message(b"b", deliver_after=5, ttl=2)])
        clock.advance(6_000)
        assert received(consumer) == [b"b"]


def test_a_time_to_live_that_is_none_is_refused_by_name(store: DelayedStore) -> None:
    """And nothing is stored."""
    topic = store.topic("t")
    for wrong in (0, -1, "1h", float("inf"), True):
        with pytest.raises(InvalidMessage, match="ttl"):
            topic.send(b"x", ttl=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match=r"messages\[1\]\.ttl"):
        topic.send_batch([Message(b"x"), Message(b"y", ttl=0)])
    assert not topic.exists()
