"""Short delays in the main log (PIP-448): each subscription gets each message once, when it is due.

Each test is of a finding about the implementation proposed with PIP-448; this one has none of them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Subscription, Topic
from duelog.errors import UnknownSubscription
from duelog.markers import tracker as tracking
from duelog.markers.reader import MainLogReader
from duelog.markers.tracker import TopicDelayTracker
from duelog.store.log.scan import runs
from duelog.store.names import TopicName
from tests.conftest import OpenStore, Plant, present, tick_after
from tests.duelog.store_state import payloads

FACES = True

CONFIG = StoreConfig(
    partition_ms=1_000,
    ledger_max_entries=2,
    ack_flush_ms=0,
    inline_delay_ms=5_000,
    tracker_idle_ms=200,
    retention_ms=10**9,
)


def tracker_of(store: DelayedStore, name: str = "t") -> TopicDelayTracker | None:
    """The topic's tracker, if it has one now."""
    return store._engine.topics.get(TopicName.parse(name)).tracker


def test_each_position_is_tracked_once_whatever_the_subscriptions(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Ten subscriptions on fifty waiting messages: fifty entries."""
    subscriptions = [topic.subscribe(f"s{number}") for number in range(10)]
    topic.send_batch([Message(b"x", deliver_after=1 + number / 100) for number in range(50)])
    for subscription in subscriptions:
        assert subscription.receive(1) == []
    tracker = present(tracker_of(store))
    assert len(tracker._waiting) == 50
    clock.advance(2_000)
    assert {len(payloads(subscription)) for subscription in subscriptions} == {50}


def test_the_tracker_is_freed_after_its_last_view_and_not_under_a_new_one(
    store: DelayedStore, topic: Topic, reader: Subscription, clock: ManualClock
) -> None:
    """Idle for `tracker_idle_ms` it goes; a consumer that comes later finds everything that it passed over."""
    topic.send(b"x", deliver_after=4)
    assert reader.receive(1) == []
    reader.close()
    clock.advance(100)
    reader = topic.subscribe("s")
    tick_after(store, clock, 1_000)
    assert tracker_of(store) is not None
    reader.close()
    tick_after(store, clock, 1_000)
    assert tracker_of(store) is None
    reader = topic.subscribe("s")
    clock.advance(2_000)
    assert payloads(reader) == [b"x"]


@pytest.mark.inside
def test_what_could_not_be_read_when_it_was_due_is_not_forgotten(
    topic: Topic, reader: Subscription, clock: ManualClock, plant: Plant
) -> None:
    """The tracker moves a view on when it returns positions; reading them may fail after that."""
    topic.send_batch([Message(b"a", deliver_after=1), Message(b"b", deliver_after=1.2)])
    assert reader.receive(10) == []
    clock.advance(3_000)
    plant(MainLogReader, "read_at", KeyboardInterrupt(), after=False)
    with pytest.raises(KeyboardInterrupt):
        reader.receive(10)
    assert payloads(reader) == [b"a", b"b"]


@pytest.mark.inside
def test_an_index_that_was_broken_off_halfway_is_read_anew(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """An interrupt between two runs: none of them is indexed twice, none is missing."""
    subscription = topic.subscribe("s", type="shared")
    for name in (b"a", b"b", b"c"):
        topic.send(name, deliver_after=1)

    def broken_off(*arguments: Any) -> Iterator[Any]:
        yield next(runs(*arguments))
        raise KeyboardInterrupt

    with patch.object(tracking, "runs", broken_off), pytest.raises(KeyboardInterrupt):
        subscription.receive(10)
    assert subscription.receive(10) == []
    assert len(present(tracker_of(store))._waiting) == 3
    clock.advance(1_000)
    assert payloads(subscription) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("attached", [True, False])
def test_clearing_what_waits_inline_for_one_subscription_leaves_it_to_the_others(
    open_store: OpenStore, clock: ManualClock, attached: bool
) -> None:
    """Due messages and those in partitions stay; so it is after a restart, and trimming goes on."""
    config = StoreConfig(inline_delay_ms=60_000, ledger_max_entries=2)
    store = open_store(config=config)
    topic = store.topic("t")
    one = topic.subscribe("one")
    topic.subscribe("other").close()
    topic.send_batch([Message(b"%d" % seconds, deliver_after=seconds) for seconds in (0, 30, 3_600, 10, 20)])
    assert [message.payload for message in one.receive(10)] == [b"0"]
    if not attached:
        one.close()
    assert topic.clear_inline("one") == 3
    assert topic.clear_inline("one") == 0
    assert topic.subscribe("late", initial_position="latest").stats().backlog == 0
    topic.send(b"after", deliver_after=15)
    store.close()
    store = open_store(config=config)
    topic = store.topic("t")
    tick_after(store, clock, 3_600_000)
    with topic.subscribe("one") as one, topic.subscribe("other") as other:
        assert {message.payload for message in one.receive(10)} == {b"0", b"after", b"3600"}
        assert {message.payload for message in other.receive(10)} == {b"0", b"10", b"20", b"30", b"after", b"3600"}
    with pytest.raises(UnknownSubscription):
        topic.clear_inline("unknown")


@pytest.mark.parametrize("acked", [False, True])
def test_what_waits_inline_keeps_nothing_that_is_too_old(
    open_store: OpenStore, clock: ManualClock, acked: bool
) -> None:
    """One due later lies before one due at once, acknowledged already or not: the other expires."""
    config = dataclasses.replace(CONFIG, inline_delay_ms=60_000, ttl_ms=2_000, ledger_max_entries=10)
    store = open_store(config=config)
    topic = store.topic("t")
    reader = topic.subscribe("s")
    waiting = topic.send(b"waits", deliver_after=50)
    topic.send(b"old")
    assert [message.payload for message in reader.receive(10)] == [b"old"]
    if acked:
        reader.ack(waiting)
    tick_after(store, clock, 5_000)
    assert reader.stats().backlog == 0
    clock.advance(45_000)
    assert payloads(reader, 10) == ([] if acked else [b"waits"])
