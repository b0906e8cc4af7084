"""What scenarios share: a client, messages sent and received."""

from __future__ import annotations

import sys
from typing import Any

import pulsar

LACKING = 77
WAIT_MS = 10_000
"""How long something may take that has to come; only a failure takes so long."""

QUIET_MS = 300
"""How long nothing has to come."""


class Lacking(Exception):
    """The client's version has not what the scenario needs."""


def named(name: str) -> str:
    """A topic of this version of the client."""
    return f"{name}-{sys.argv[3]}"


def connect(url: str, **options: Any) -> Any:
    """A client that prints warnings only."""
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn)
    return pulsar.Client(url, logger=logger, **{"operation_timeout_seconds": 10, **options})


def receive(consumer: Any, count: int, *, ack: bool = True) -> list[Any]:
    """The next messages."""
    found = []
    for _ in range(count):
        message = consumer.receive(WAIT_MS)
        if ack:
            consumer.acknowledge(message)
        found.append(message)
    return found


def texts(messages: list[Any]) -> list[str]:
    """Their payloads."""
    return [message.data().decode() for message in messages]


def nothing(consumer: Any) -> bool:
    """Whether nothing comes."""
    try:
        message = consumer.receive(QUIET_MS)
    except pulsar.Timeout:
        return True
    print("unexpected:", message.data(), message.message_id(), file=sys.stderr)
    return False


def numbered(count: int, prefix: str = "") -> list[str]:
    """Payloads."""
    return [f"{prefix}{number}" for number in range(count)]


def send(producer: Any, payloads: list[str], **options: Any) -> list[Any]:
    """Send one by one; the receipts."""
    return [producer.send(payload.encode(), **options) for payload in payloads]


def taken(url: str, payloads: list[str], topic: str) -> tuple[Any, Any, list[Any]]:
    """A client, a producer of `topic` that sent the payloads, and the receipts."""
    client = connect(url)
    producer = client.create_producer(topic, batching_enabled=False)
    return client, producer, send(producer, payloads)
