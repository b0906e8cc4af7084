"""Stores with sealed partitions for the tests of scans, exports and Spark: everything that was sent is known."""

import random
from pathlib import Path
from typing import NamedTuple

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig

DAY_MS = 86_400_000
FIRST_MS = 1_790_035_200_000
"""2026-09-22T00:00:00Z: the first day of due times."""


class Sent(NamedTuple):
    """One message as it was handed in, and the id it got."""

    topic: str
    ledger_id: int
    entry_id: int
    due_ms: int
    publish_ms: int
    key: str | None
    properties: dict[str, str]
    payload: bytes


class Built(NamedTuple):
    """A store on disk, closed, and what was sent to it; `open_due_ms`: due times from here on are not sealed."""

    path: Path
    sent: list[Sent]
    open_due_ms: int
    now_ms: int

    @property
    def sealed(self) -> list[Sent]:
        """The messages in sealed partitions."""
        return [message for message in self.sent if message.due_ms < self.open_due_ms]


TOPICS = ("persistent://public/default/plain", "persistent://shop/mail/reminders", "persistent://a/b/ö ä=%.")


def build(path: Path, *, messages: int = 3_000, days: int = 4, seed: int = 11, cancelled: int = 0) -> Built:
    """A store of three topics whose first `days` - 1 days are closed and held by a subscription that reads nothing.

    Payloads, keys and properties of every form; due times repeat. `cancelled`: so many of the first are.
    """
    source = random.Random(seed)
    clock = ManualClock(FIRST_MS - 3_600_000)
    sent: list[Sent] = []
    with DelayedStore.open(path, StoreConfig(), clock=clock) as store:
        for name in TOPICS:
            store.topic(name).subscribe("slow").close()
        left = messages
        while left:
            name = source.choice(TOPICS)
            count = min(left, source.choice((1, 7, 100, 400)))
            batch = [_message(source, days) for _ in range(count)]
            ids = store.topic(name).send_batch(batch)
            for message, at in zip(batch, ids, strict=True):
                assert isinstance(message.deliver_at, int)
                sent.append(
                    Sent(name, at.ledger_id, at.entry_id, message.deliver_at, clock.now_ms(), message.key,
                         dict(message.properties or {}), bytes(message.payload))
                )  # fmt: skip
            clock.advance(1)
            left -= count
        for first in sent[:cancelled]:
            assert store.topic(first.topic).cancel(MessageId(first.ledger_id, first.entry_id))
        clock.set(FIRST_MS + (days - 1) * DAY_MS + 1_000)
        while store.tick().fired:
            pass
    return Built(path, sent, FIRST_MS + (days - 1) * DAY_MS, clock.now_ms())


def build_half_acknowledged(path: Path, messages: int) -> Built:
    """The same with half of each log acknowledged."""
    built = build(path, messages=messages)
    with DelayedStore.open(path, StoreConfig(), clock=ManualClock(built.now_ms)) as store:
        for topic in TOPICS:
            with store.topic(topic).subscribe("slow") as consumer:
                consumer.ack(consumer.receive(10_000)[::2], durable=True)
    return built


def _message(source: random.Random, days: int) -> Message:
    due_ms = FIRST_MS + source.randrange(days * 24) * 3_600_000 + source.choice((0, 0, 1, source.randrange(3_600_000)))
    payload = source.randbytes(source.choice((0, 1, 20, 200, 300, 3_000)))
    key = source.choice((None, None, "order-17", "ключ", ""))
    properties = source.choice((None, None, {"shop": "7"}, {"a": "", "ö": "€", "z": "x" * 300}))
    return Message(payload, deliver_at=due_ms, key=key, properties=properties)
