"""Receiving in tests that compare payloads."""

from __future__ import annotations

from duelog import DelayedStore, Subscription


def payloads(consumer: Subscription, most: int = 1_000) -> list[bytes]:
    """Receive and acknowledge."""
    messages = consumer.receive(most)
    consumer.ack(messages)
    return [message.payload for message in messages]


def received(consumer: Subscription, most: int = 1_000) -> list[bytes]:
    """Receive without acknowledging."""
    return [message.payload for message in consumer.receive(most)]


def payloads_of(store: DelayedStore, *topics: str) -> list[bytes]:
    """What subscription `s` of each topic has to receive now, acknowledged durably."""
    found = []
    for topic in topics or ("t",):
        with store.topic(topic).subscribe("s", type="shared") as consumer:
            messages = consumer.receive(1_000)
            consumer.ack(messages, durable=True)
            found += [message.payload for message in messages]
    return found
