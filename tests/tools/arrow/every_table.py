"""A store that has rows in every table, and what its engine says is still to come."""

import random
from pathlib import Path
from typing import Any, NamedTuple

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig

HOUR_MS = 3_600_000
NOW_MS = 1_790_000_000_000
TOPICS = ("persistent://public/default/plain", "persistent://shop/mail/reminders", "persistent://a/b/ö ä=%.")
CONFIG = StoreConfig(partition_ms=6 * HOUR_MS, inline_delay_ms=60_000, max_redeliveries=1, background=False)


class Filled(NamedTuple):
    """A store on disk, closed; `pending`: (topic, id, due, payload, key, properties) by id, as the engine lists it."""

    path: Path
    now_ms: int
    pending: list[tuple[Any, ...]]


def fill(path: Path, seed: int = 3, rounds: int = 12) -> Filled:
    """Sent, cancelled, rescheduled, fired, failed and dead-lettered, some of it only in the write-ahead log."""
    source = random.Random(seed)
    clock = ManualClock(NOW_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        for name in TOPICS:
            store.topic(name).subscribe("slow").close()
        store.topic(TOPICS[0]).subscribe("fails", type="shared").close()
        sent: list[tuple[str, MessageId]] = []
        for number in range(rounds):
            name = source.choice(TOPICS)
            batch = [_message(source, clock.now_ms()) for _ in range(source.choice((1, 7, 60)))]
            sent += [(name, each) for each in store.topic(name).send_batch(batch)]
            for topic, message_id in source.sample(sent, min(len(sent), 5)):
                if source.random() < 0.5:
                    store.topic(topic).cancel(message_id)
                elif moved := store.topic(topic).reschedule(message_id, deliver_after=source.randrange(30 * 3_600)):
                    sent.append((topic, moved))
            if number % 4 == 3:
                clock.advance(5 * HOUR_MS)
                while store.tick().fired:
                    pass
        store.topic(TOPICS[1]).send(b"keyed", deliver_after=20 * 3_600, dedup_key="order")
        store.topic(TOPICS[2]).send_batch([Message(b"soon", deliver_after=30.0 + number) for number in range(5)])
        store.topic(TOPICS[0]).send_batch([Message(b"dies", key=str(number)) for number in range(5)])
        for times in (
            10,
            3,
        ):  # the first ten fail once, three of them again: these are dead letters when they come next
            with store.topic(TOPICS[0]).subscribe("fails", type="shared") as consumer:
                consumer.nack(consumer.receive(times), delay=0)
        consumer = store.topic(TOPICS[0]).subscribe("fails", type="shared")
        consumer.ack(consumer.receive(3)[2:], durable=True)
        consumer.close(failed=False)
        return Filled(path, clock.now_ms(), listed(store))


def listed(store: DelayedStore) -> list[tuple[Any, ...]]:
    """The messages still to come, as the engine says it."""
    found = [
        (topic.name, *each.message_id, each.due_ms, each.payload, each.key, each.properties)
        for topic in store.topics()
        for each in topic.scheduled()
    ]
    return sorted(found, key=lambda row: row[1:3])


def _message(source: random.Random, now_ms: int) -> Message:
    delay_ms = source.choice((source.randrange(1_000, 59_000), source.randrange(2 * 60_000, 40 * HOUR_MS)))
    payload = source.randbytes(source.choice((0, 20, 300, 3_000)))
    key, properties = source.choice((None, "ключ", "")), source.choice((None, {"a": "", "ö": "€"}))
    return Message(payload, deliver_at=now_ms + delay_ms, key=key, properties=properties)
