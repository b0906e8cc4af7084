"""Every duration of the public face is seconds or a timedelta; seconds for milliseconds are refused."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, assert_type

import numpy as np
import pytest

from duelog import (
    DelayedDeliveryPolicies,
    DelayedStore,
    ManualClock,
    Message,
    Policies,
    StoreConfig,
    Subscription,
    Topic,
)
from duelog.errors import InvalidArgument, InvalidMessage
from tests.conftest import START_MS, OpenStore

FACES = True

WAYS: dict[str, tuple[str, Callable[[DelayedStore, Topic, Subscription, Any], object]]] = {
    "send": ("deliver_after", lambda store, topic, consumer, value: topic.send(b"x", deliver_after=value)),
    "send_payloads": (
        "deliver_after",
        lambda store, topic, consumer, value: topic.send_payloads([b"x"], deliver_after=value),
    ),
    "send, a time to live": ("ttl", lambda store, topic, consumer, value: topic.send(b"x", ttl=value)),
    "send, a key": (
        "dedup_for",
        lambda store, topic, consumer, value: topic.send(b"x", dedup_key="k", dedup_for=value),
    ),
    "every, jitter": ("jitter", lambda store, topic, consumer, value: topic.every("e", interval=3_600, jitter=value)),
    "extend": (
        "timeout",
        lambda store, topic, consumer, value: consumer.extend(consumer.receive(timeout=0), timeout=value),
    ),
    "every": ("interval", lambda store, topic, consumer, value: topic.every("e", interval=value)),
    "receive": ("timeout", lambda store, topic, consumer, value: consumer.receive(timeout=value)),
    "nack": ("delay", lambda store, topic, consumer, value: consumer.nack(consumer.receive(timeout=0), delay=value)),
    "retry_later": (
        "delay",
        lambda store, topic, consumer, value: consumer.retry_later(consumer.receive(timeout=0)[0], value),
    ),
    "dead_letters": ("older_than", lambda store, topic, consumer, value: list(store.dead_letters(older_than=value))),
    "requeue_dead_letters": (
        "delay",
        lambda store, topic, consumer, value: store.requeue_dead_letters([], delay=value),
    ),
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_each_call_takes_seconds_or_a_timedelta(store: DelayedStore, topic: Topic, way: str) -> None:
    """Anything else is refused by the parameter's name."""
    topic.send_payloads([b"now"] * 3)
    field, use = WAYS[way]
    with topic.subscribe("s") as consumer:
        for wrong in ("90", -1, timedelta(-1)):
            with pytest.raises(InvalidArgument, match=f"^{field}="):
                use(store, topic, consumer, wrong)
            consumer.nack_all()
        for value in (90, 90.5, timedelta(minutes=1)):
            use(store, topic, consumer, value)


DAY: Any = timedelta(days=1)
MICROSECOND: Any = timedelta(microseconds=1)


def test_a_parameter_in_milliseconds_takes_a_timedelta_too(store: DelayedStore) -> None:
    """It becomes an int of milliseconds, so that what is read is what was always read."""
    assert StoreConfig(ttl_ms=DAY, ack_flush_ms=MICROSECOND) == StoreConfig(ttl_ms=86_400_000, ack_flush_ms=1)
    assert repr(Policies(retention_ms=DAY)) == repr(Policies(retention_ms=86_400_000))
    store.set_policies(Policies(retention_ms=DAY), topic="t")
    assert store.update_policies(topic="t", ttl_ms=timedelta(hours=1)) == Policies(
        retention_ms=86_400_000, ttl_ms=3_600_000
    )
    assert ManualClock(5).advance(DAY) == 86_400_005


def test_a_type_checker_knows_what_a_setting_in_milliseconds_takes_and_gives() -> None:
    """It is mypy that this fails for, as it does for an ignored error that is none."""
    config = StoreConfig(partition_ms=timedelta(hours=1), ttl_ms=timedelta(days=1), ack_timeout_ms=None, ack_flush_ms=5)
    assert_type(config.partition_ms, int)
    assert_type(config.ttl_ms, int | None)
    policies = Policies(ttl_ms=timedelta(days=1), retention_ms=5)
    assert_type(policies.retention_ms, int | None)
    assert replace(policies, retention_ms=timedelta(seconds=1)).retention_ms == 1_000
    assert DelayedDeliveryPolicies(max_delivery_delay_ms=timedelta(seconds=1)).max_delivery_delay_ms == 1_000
    for wrong in (
        lambda: StoreConfig(ack_flush_ms=None),  # type: ignore[arg-type]
        lambda: StoreConfig(ttl_ms=1.5),  # type: ignore[arg-type]
        lambda: Policies(ttl_ms="1d"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match="_ms="):
            wrong()


def test_a_timedelta_where_none_belongs_is_refused_by_its_field(store: DelayedStore) -> None:
    """Out of range, or for a field that is no length of time; nothing is set."""
    uses: dict[str, Callable[[], object]] = {
        "ttl_ms": lambda: Policies(ttl_ms=-DAY),
        "max_redeliveries": lambda: Policies(max_redeliveries=DAY),
        "relaxed_ms": lambda: StoreConfig(relaxed_ms=DAY),
        "wal_bytes": lambda: StoreConfig(wal_bytes=DAY),
        "nack_backoff_ms": lambda: store.update_policies(nack_backoff_ms=2 * DAY),
        "dead_letter_topic": lambda: store.update_policies(dead_letter_topic=DAY),
        "ms": lambda: ManualClock(5).advance(-DAY),
    }
    for field, use in uses.items():
        with pytest.raises(InvalidArgument, match=f"^{field}="):
            use()
    assert store.policies() is None


SECONDS = START_MS // 1_000 + 3_600
EARLIEST = datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)
FIRST_MS = 10**12

Send = Callable[..., Any]


def ways(store: DelayedStore) -> dict[str, tuple[str, Send]]:
    """Every call that takes a due time, and what its errors call the field."""
    topic = store.topic("t")
    producer = topic.producer("p")
    waiting = topic.send(b"waits", deliver_after=60)
    return {
        "send": ("deliver_at", lambda at, **past: topic.send(b"x", deliver_at=at, **past)),
        "send with a key": ("deliver_at", lambda at, **past: topic.send(b"x" * 600, deliver_at=at, key="k", **past)),
        "send_async": ("deliver_at", lambda at, **past: topic.send_async(b"x", deliver_at=at, **past).result()),
        "send_batch": (
            "messages[1].deliver_at",
            lambda at, **past: topic.send_batch([Message(b"x"), Message(b"x", deliver_at=at)], **past),
        ),
        "send_payloads": ("deliver_at", lambda at, **past: topic.send_payloads([b"x"], deliver_at=at, **past)),
        "producer": ("messages[0].deliver_at", lambda at, **past: producer.send(Message(b"x", deliver_at=at), **past)),
        "reschedule": ("deliver_at", lambda at, **past: topic.reschedule(waiting, deliver_at=at, **past)),
    }


def test_a_due_time_in_seconds_is_refused_with_what_it_was_meant_to_be(store: DelayedStore) -> None:
    """By each call, which stores nothing; with `allow_past` it is due at once. Whatever the store's clock says."""
    topic = store.topic("t")
    for way, (field, send) in ways(store).items():
        before = topic.stats(), topic.producer("p").last_sequence_id
        with pytest.raises(InvalidMessage) as caught:
            send(SECONDS)
        assert (caught.value.field, caught.value.value) == (field, SECONDS)
        assert "2026-09-21T15:13:20Z" in caught.value.reason
        assert "allow_past" in caught.value.reason
        for at in (0, 5, FIRST_MS - 1, EARLIEST - timedelta(milliseconds=1)):
            with pytest.raises(InvalidMessage, match="before 2001-09-09T01:46:40Z"):
                send(at)
        assert (topic.stats(), topic.producer("p").last_sequence_id) == before
        assert send(FIRST_MS) is not None
        if way != "reschedule":
            for at in (0, SECONDS, datetime(1999, 12, 31, tzinfo=timezone(timedelta(hours=2)))):
                assert send(at, allow_past=True) is not None
        with pytest.raises(InvalidMessage, match="1970"):
            send(-1, allow_past=True)


def test_rescheduling_to_a_time_before_2001_is_done_where_it_is_allowed(topic: Topic) -> None:
    """The message is due at once, as with any time that has passed."""
    with topic.subscribe("s") as consumer:
        assert topic.reschedule(topic.send(b"x", deliver_after=60), deliver_at=SECONDS, allow_past=True) is not None
        assert [message.payload for message in consumer.receive()] == [b"x"]


def test_a_column_of_due_times_is_refused_for_its_first_in_seconds(topic: Topic) -> None:
    """Its place is named; lists and arrays alike."""
    times: Any = [FIRST_MS, START_MS + 1, SECONDS, 7]
    for column in (times, np.array(times), np.array(times, dtype=np.uint64)):
        with pytest.raises(InvalidMessage, match="seconds for milliseconds") as caught:
            topic.send_payloads([b"x"] * 4, deliver_at=column)
        assert (caught.value.field, caught.value.value) == ("deliver_at[2]", SECONDS)
        assert len(topic.send_payloads([b"x"] * 4, deliver_at=column, allow_past=True)) == 4


def test_a_clock_near_zero_changes_nothing(open_store: OpenStore) -> None:
    """The rule is about the value alone; a delay counts from whatever the clock says."""
    topic = open_store(clock_=ManualClock(1_000)).topic("t")
    with pytest.raises(InvalidMessage, match="allow_past"):
        topic.send(b"x", deliver_at=5_000)
    topic.send(b"x", deliver_after=4)
    topic.send(b"x")
    topic.send(b"x", deliver_at=5_000, allow_past=True)
    assert [found.due_ms for found in topic.scheduled(0, 10_000)] == [5_000, 5_000]
