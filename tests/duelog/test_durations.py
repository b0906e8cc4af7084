"""Every duration of the public face is seconds or a timedelta."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from duelog import DelayedStore, Subscription, Topic
from duelog.errors import InvalidArgument

WAYS: dict[str, tuple[str, Callable[[DelayedStore, Topic, Subscription, Any], object]]] = {
    "send": ("deliver_after", lambda store, topic, consumer, value: topic.send(b"x", deliver_after=value)),
    "send_payloads": (
        "deliver_after",
        lambda store, topic, consumer, value: topic.send_payloads([b"x"], deliver_after=value),
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
