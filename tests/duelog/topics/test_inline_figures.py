"""Figures and lists of hidden messages: pending until they are due, and backlog from then on."""

from __future__ import annotations

import random

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Topic
from duelog.metrics import BACKLOG, DELAYED, PENDING
from tests.conftest import START_MS, OpenStore
from tests.duelog.consuming import payloads

CONFIG = StoreConfig(inline_delay_ms=3_600_000, ledger_max_entries=3, ack_flush_ms=0)


def test_what_waits_inline_is_pending_and_no_backlog_until_it_is_due(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Before any consumer, with one that has passed it over, after it left, after a restart: the same figures."""
    topic.subscribe("s").close()
    topic.send_batch([Message(b"%d" % number, deliver_after=number % 2 * 60) for number in range(10)])
    topic.send(b"far", deliver_after=7_200)

    def figures() -> tuple[int, int, int, int, int]:
        stats = store.topic("t").stats()
        (sub,) = stats.subscriptions
        gauges = store._engine.metrics._look() if store._engine.metrics is not None else {}
        ((pending,), (delayed,), (backlog,)) = ([each.value for each in gauges[n]] for n in (PENDING, DELAYED, BACKLOG))
        assert (pending, delayed, backlog) == (stats.pending, stats.pending, sub.backlog)
        assert store.stats().pending == stats.pending == len(list(store.topic("t").scheduled()))
        return stats.pending, sub.backlog, stats.index_bytes, sub.unacknowledged, sub.redelivering

    assert figures() == (6, 5, 0, 0, 0), "nothing is indexed for figures alone"
    with topic.subscribe("s") as subscription:
        assert len(subscription.receive(100)) == 5
        assert figures()[:2] == (6, 5)
    assert figures()[:2] == (6, 5)
    store.close()
    store = open_store(config=CONFIG)
    assert figures()[:2] == (6, 5)
    with store.topic("t").subscribe("s") as subscription:
        assert len(payloads(subscription)) == 5
        assert figures()[:2] == (6, 0)
        clock.advance(60_000)
        assert figures()[:2] == (1, 5)
        assert len(payloads(subscription)) == 5
        assert figures()[:2] == (1, 0)


def test_what_waits_inline_is_listed_with_what_waits_in_partitions(open_store: OpenStore, clock: ManualClock) -> None:
    """By due time, from both places, with limits and ends of the range honoured; after a restart and read-only too."""
    config = StoreConfig(inline_delay_ms=60_000, partition_ms=30_000, ledger_max_entries=3)
    store = open_store(config=config)
    topic = store.topic("t")
    first = topic.send(b"90", deliver_after=90)
    clock.advance(60_000)  # it is nearer now than what will wait inline
    chance = random.Random(5)
    afters = [*range(1, 60, 3), *range(61, 120, 7)]
    chance.shuffle(afters)
    for after in afters:
        topic.send(b"%d" % (60 + after), deliver_after=after)
    expected = sorted([90, *(60 + after for after in afters)])

    def look(store: DelayedStore) -> None:
        face = store.topic("t")
        assert [int(found.payload) for found in face.scheduled()] == expected
        assert [int(found.payload) for found in face.scheduled(limit=4)] == expected[:4]
        start_ms, end_ms = START_MS + expected[3] * 1_000, START_MS + expected[15] * 1_000
        assert [int(found.payload) for found in face.scheduled(start_ms, end_ms)] == expected[3:15]
        assert [found.due_ms for found in face.scheduled(start_ms, start_ms + 1)] == [start_ms]
        assert list(face.scheduled(START_MS, START_MS + 60_000)) == []
        assert store.stats().pending == face.stats().pending == len(expected)

    look(store)
    store.close()
    with open_store(config=config, read_only=True) as reader:
        look(reader)
    store = open_store(config=config)
    look(store)
    topic = store.topic("t")
    assert topic.cancel(first)
    clock.advance(10_000)
    assert [int(found.payload) for found in topic.scheduled()] == [due for due in expected if due > 70 and due != 90]


def test_a_message_that_waits_inline_is_scheduled_until_it_is_due_and_cannot_be_taken_back(
    topic: Topic, clock: ManualClock
) -> None:
    """Its state says what the list says; taking it back is refused as for one that has fired."""
    waits, now = topic.send(b"waits", deliver_after=60), topic.send(b"now")
    assert [topic.state(each) for each in (waits, now)] == ["scheduled", "fired"]
    assert topic.cancel(waits) is False
    assert topic.reschedule(waits, deliver_after=120) is None
    clock.advance(59_999)
    assert topic.state(waits) == "scheduled"
    clock.advance(1)
    assert topic.state(waits) == "fired"
    assert list(topic.scheduled()) == []
