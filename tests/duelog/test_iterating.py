"""Iterating over a subscription: its messages as they fall due, one at a time, until it or the store is closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Subscription, Topic
from duelog.errors import ClosedError, UnknownSubscription
from tests.conftest import OpenStore

FIRING = StoreConfig(background=True)


@contextmanager
def iterating(subscription: Subscription, got: list[bytes]) -> Iterator[threading.Event]:
    """A thread iterates, keeping and acknowledging payloads; joined at the end. The event: the first has come."""
    first = threading.Event()

    def work() -> None:
        for message in subscription:
            got.append(message.payload)
            subscription.ack(message)
            first.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield first
    finally:
        thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("closes", ["store", "subscription"])
def test_an_iteration_that_waits_ends_when_its_store_or_subscription_is_closed(
    open_store: OpenStore, clock: ManualClock, closes: str
) -> None:
    """It has yielded what was due, and what fell due meanwhile; it raises nothing."""
    store = open_store(config=FIRING)
    topic = store.topic("t")
    topic.send_batch([Message(b"now"), Message(b"later", deliver_after=5)])
    subscription = topic.subscribe("s")
    got: list[bytes] = []
    with iterating(subscription, got) as first:
        assert first.wait(60)
        while len(got) < 2:
            clock.advance(5_000)
        (store if closes == "store" else subscription).close()
    assert got == [b"now", b"later"]
    assert list(subscription) == []


def test_an_iteration_holds_one_message_at_a_time(topic: Topic) -> None:
    """What it has not come to is another consumer's to take; what it yielded it holds until acknowledged."""
    topic.send_batch([Message(b"%d" % n) for n in range(3)])
    with topic.subscribe("s", type="shared") as mine, topic.subscribe("s", type="shared") as other:
        assert next(mine).payload == b"0"
        assert [message.payload for message in other.receive(10)] == [b"1", b"2"]
    with topic.subscribe("s") as anew:
        assert sorted(message.payload for message in anew) == [b"0", b"1", b"2"]


def test_an_iteration_that_would_not_wait_ends(topic: Topic, clock: ManualClock) -> None:
    """On a clock that a program moves without a background thread, and goes on when there is more."""
    topic.send(b"later", deliver_after=1)
    with topic.subscribe("s") as consumer:
        assert list(consumer) == []
        clock.advance(1_000)
        assert [message.payload for message in consumer] == [b"later"]


def test_an_iteration_over_a_subscription_that_was_removed_raises(store: DelayedStore, topic: Topic) -> None:
    """That is no end of its messages."""
    with topic.subscribe("s") as consumer:
        store.delete_topic("t")
        with pytest.raises(UnknownSubscription):
            next(consumer)


def test_an_iteration_in_a_child_process_is_refused(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has no part of the store; that its loop ended in silence would hide it."""
    consumer = topic.subscribe("s")
    monkeypatch.setattr("duelog.store.files.process.here.pid", -1)
    with pytest.raises(ClosedError, match="child"):
        next(consumer)
