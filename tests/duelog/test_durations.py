"""Every duration of the public face is seconds or a timedelta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, assert_type

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Policies, StoreConfig, Subscription, Topic
from duelog.errors import InvalidArgument

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
    "every, jitter": (
        "jitter",
        lambda store, topic, consumer, value: topic.every("e", interval=3_600, jitter=value),
    ),
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
@pytest.mark.parametrize("value", [90, 90.5, timedelta(minutes=1)], ids=repr)
def test_each_call_takes_seconds_or_a_timedelta(store: DelayedStore, topic: Topic, way: str, value: Any) -> None:
    """What is neither is refused by the parameter's name."""
    topic.send(b"now")
    field, use = WAYS[way]
    with topic.subscribe("s") as consumer:
        for wrong in ("90", -1, timedelta(-1)):
            with pytest.raises(InvalidArgument, match=f"^{field}="):
                use(store, topic, consumer, wrong)
            consumer.nack_all()
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
