"""Negative acknowledgements, retries, seeks, pauses, time to live and iterating, as a consumer sees them."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, Policies, StoreConfig, Subscription, Topic
from duelog.delivery.dispatcher import Dispatcher
from duelog.errors import ClosedError, InvalidArgument, StoreFull, UnknownSubscription
from tests.conftest import START_MS, LeadingClock, OpenStore, present, raising, tick_after
from tests.duelog.store_state import payloads, received
from tests.duelog.unwoken import interrupt_of_sleeping
from tests.model.driver import armed

FACES = True


def test_seek_past_what_was_trimmed_begins_with_what_is_kept(open_store: OpenStore, clock: ManualClock) -> None:
    """Ledgers and partitions that are gone stay gone: a seek before them is a seek to the first that is kept."""
    store = open_store(config=StoreConfig(ledger_max_entries=2, partition_ms=1_000))
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    first = topic.send(b"0", deliver_after=1)
    clock.advance(5_000)
    message = consumer.receive()[0]
    consumer.ack(message)
    topic.send_batch([Message(b"1"), Message(b"2")])
    consumer.ack(consumer.receive(1))
    tick_after(store, clock, 100)
    assert store.partitions() == []
    assert topic.get(first) is None
    consumer.seek(message)
    assert received(consumer) == [b"2"]
    with pytest.raises(InvalidArgument, match="to="):
        consumer.seek("yesterday")


def test_what_has_outlived_the_policy_is_not_delivered_behind_a_message_that_has_not(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Like one that has outlived its own: what was due while the store was closed fires behind what is sent now."""
    config = StoreConfig(partition_ms=3_600_000, max_clock_jump_ms=None)
    store = open_store(config=config)
    topic = store.topic("t")
    for name in ("s", "other"):
        topic.subscribe(name).close()
    store.set_policies(Policies(ttl_ms=60_000), topic="t", subscription="s")
    topic.send(b"by the policy", deliver_after=1)
    topic.send(b"by its own", deliver_after=1, ttl=60)
    store.close()
    clock.advance(61_000)
    store = open_store(config=config)
    topic = store.topic("t")
    topic.send(b"fresh")
    for _ in range(5):
        store.tick()
    assert [message.payload for message in topic.subscription("s").peek(10)] == [b"fresh"]
    with topic.subscribe("s") as consumer:
        assert received(consumer) == [b"fresh"]
        assert consumer.stats().expired == 2
    with topic.subscribe("other") as consumer:
        assert received(consumer) == [b"fresh", b"by the policy"]


def test_an_acknowledged_message_of_a_topic_that_is_sought_does_not_come_again_after_a_clock_set_back(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """It waited inline, was due, and by the clock is not due any more: a seek past it leaves it acknowledged."""
    config = StoreConfig(inline_delay_ms=1_000, max_clock_jump_ms=None)
    store = open_store(config=config)
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"received", deliver_after=0.06)
        clock.advance(100)
        consumer.ack(consumer.receive(), durable=True)
        topic.send(b"waits", deliver_after=0.06)
        clock.set(clock.now_ms() - 90)
        consumer.seek("latest")
        clock.advance(1_000)
        assert received(consumer) == [b"waits"]
        clock.set(clock.now_ms() - 1_090)
    store.close()
    store = open_store(config=config)
    store.topic("t").subscription("s").reset("latest")
    with store.topic("t").subscribe("s") as consumer:
        clock.advance(2_000)
        assert received(consumer) == [b"waits"]


def test_what_was_cleared_stays_cleared_when_the_subscription_seeks_forward(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """A seek takes back no acknowledgement of what lies before the place that it goes to."""
    topic = open_store(config=StoreConfig(inline_delay_ms=60_000)).topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"cleared", deliver_after=60)
        assert topic.clear_inline("s") == 1
        topic.send(b"waits", deliver_after=60)
        consumer.seek("latest")
        clock.advance(60_000)
        assert received(consumer) == [b"waits"]


@pytest.mark.parametrize("how", ["nack", "nack_all", "leave", "timeout"])
def test_what_is_given_back_without_a_delay_does_not_wait_for_a_clock_that_is_set_back(
    open_store: OpenStore, clock: ManualClock, how: str
) -> None:
    """It comes at once, and not only after the store was opened again."""
    store = open_store(config=StoreConfig(max_clock_jump_ms=None, ack_timeout_ms=50 if how == "timeout" else None))
    topic = store.topic("t")
    consumer, other = (topic.subscribe("s", type="shared") for _ in range(2))
    topic.send_payloads([b"a", b"b", b"c"])
    batch = consumer.receive(10)
    if how == "nack":
        consumer.nack(batch, delay=0)
    elif how == "nack_all":
        consumer.nack_all()
    elif how == "leave":
        consumer.close()
    else:
        clock.advance(50)
        assert len(other.receive(1)) == 1
        other.nack_all()
    clock.set(clock.now_ms() - 3_600_000)
    assert received(other) == [b"a", b"b", b"c"]


def test_a_message_that_becomes_visible_between_a_read_and_the_next_wait_is_told(open_store: OpenStore) -> None:
    """It was written ahead of its time and not read: the time told is not later than its own, and not none."""
    clock = LeadingClock(START_MS)
    store = open_store(clock_=clock)
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    due_ms = START_MS + 100_000
    topic.send(b"x", deliver_at=due_ms)
    tick_after(store, clock, 99_998)
    next_batch = Dispatcher.next_batch

    def slow(*arguments: Any) -> Any:
        batch = next_batch(*arguments)
        clock.advance(5)
        return batch

    with patch.object(Dispatcher, "next_batch", slow):
        batch, again_ms = consumer.poll()
    assert (batch, again_ms) == ([], due_ms)
    assert consumer.poll()[0][0].payload == b"x"


def test_it_counts_from_the_due_time_to_the_millisecond(store: DelayedStore, clock: ManualClock) -> None:
    """Sent singly, in a batch, put, or as one group; each way it is delivered until then and not from then on."""
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"0", deliver_after=10, ttl=1)
        topic.send_batch(
            [Message(b"1", deliver_after=10, ttl=timedelta(seconds=1)), Message(b"kept", deliver_after=10)]
        )
        topic.send_async(b"2", deliver_after=10, ttl=1).result(10)
        topic.send(b"4", deliver_after=10, ttl=1, dedup_key="d")
        store.send_batch([("t", Message(b"3", deliver_after=10, ttl=1, key="k", properties={"a": "b"}))])
        clock.advance(10_999)
        messages = consumer.receive(10)
        assert sorted(message.payload for message in messages) == [b"0", b"1", b"2", b"3", b"4", b"kept"]
        assert {message.expires_ms for message in messages} == {START_MS + 11_000, None}
        consumer.nack(messages, delay=0)
        clock.advance(1)
        assert received(consumer) == [b"kept"]
        assert consumer.stats().backlog == 1


def test_a_dead_letter_expires_no_more(store: DelayedStore, clock: ManualClock) -> None:
    """It is held until it is requeued, and has no time to live then."""
    store.set_policies(Policies(max_redeliveries=0))
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"x", ttl=1)
        consumer.nack(consumer.receive(), delay=0)
        assert consumer.receive() == []
        clock.advance(10_000)
        assert store.requeue_dead_letters(list(store.dead_letters())) == 1
        (message,) = consumer.receive()
        assert (message.payload, message.expires_ms) == (b"x", None)


FIRING = StoreConfig(background=True)


@contextmanager
def iterating(subscription: Subscription, got: list[bytes]) -> Iterator[threading.Event]:
    """A thread iterates, acknowledging and keeping payloads; joined at the end. The event: the first has come."""
    first = threading.Event()

    def work() -> None:
        for message in subscription:
            subscription.ack(message)  # who sees the payload may close
            got.append(message.payload)
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
    """The rest is another consumer's to take; it holds what it yielded until that is acknowledged."""
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


def test_a_durable_acknowledgement_wakes_the_tick_only_where_it_could_not_be_written(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each woke the scheduler, whose tick took the processor longer than the acknowledgement."""
    store = open_store()
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        for _ in range(3):
            topic.send(b"x")
        first, second, third = consumer.receive(3)
        woken: list[str] = []
        flusher = consumer._flusher
        monkeypatch.setattr(flusher, "_wake", lambda: woken.append("woken"))
        consumer.ack(first, durable=True)
        assert woken == []
        with patch.object(flusher._main, "write", raising(StoreFull(store.path, "full"))), pytest.raises(StoreFull):
            consumer.ack(second, durable=True)
        assert woken == ["woken"]
        assert present(flusher.due_ms()) <= clock.now_ms()
        consumer.ack(third)
        assert woken == ["woken"]


def test_an_old_delivery_gives_back_none_that_came_after_it(topic: Topic) -> None:
    """It took the newer one from who worked at it, and counted it as failed; a position alone means either."""
    topic.send(b"x")
    with topic.subscribe("s") as consumer:
        (old,) = consumer.receive()
        assert consumer.nack(old, delay=0) == 1
        (new,) = consumer.receive()
        assert consumer.nack(old, delay=0) == consumer.nack([old, old], delay=0) == 0
        assert consumer.nack([old, new], delay=0) == 1
        (newest,) = consumer.receive()
        assert newest.redelivery_count == 2
        assert consumer.nack(new.position, delay=0) == 1


@pytest.mark.inside
@pytest.mark.parametrize("delay", [0, 5])
def test_a_crash_amid_a_postponement_leaves_the_message_or_its_retry_not_both(
    open_store: OpenStore, tmp_path: Path, clock: ManualClock, delay: int
) -> None:
    """They were two groups of the log: a kill between them doubled it."""
    store = open_store()
    store.topic("t").send(b"x")
    crashes: list[Path] = []

    def crash() -> None:
        crashes.append(tmp_path / f"crash-{len(crashes)}")
        shutil.copytree(store.path, crashes[-1])

    with store.topic("t").subscribe("s") as consumer:
        (message,) = consumer.receive()
        with armed("wal.before", crash), armed("wal.after", crash):
            consumer.retry_later(message, delay)
    clock.advance(10_000)
    assert len(crashes) >= 2
    for path in crashes:
        with DelayedStore.open(path, StoreConfig(background=False), clock=clock) as left:
            assert payloads(left.topic("t").subscribe("s"), 10) == [b"x"]


@pytest.mark.parametrize("delay", [0, 5])
@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_message_that_is_acknowledged_is_not_sent_again_by_a_retry(
    open_store: OpenStore, clock: ManualClock, by: str, delay: int
) -> None:
    """It was: a consumer from which it had been taken back doubled what another had done meanwhile."""
    store = open_store()
    store.update_policies(topic="t", max_pending=1)
    topic = store.topic("t")
    topic.send(b"x")
    with topic.subscribe("s", type="shared") as consumer, topic.subscribe("s", type="shared") as other:
        (message,) = consumer.receive()
        if by == "another":
            assert consumer.nack(message, delay=0) == 1
            assert other.ack(other.receive()) == 1
        else:
            assert consumer.ack(message) == 1
        assert consumer.retry_later(message, delay) is None
        topic.send(b"y", deliver_after=1)  # the one that may be pending
        clock.advance(10_000)
        assert payloads(consumer, 10) == [b"y"]
    assert store.topic("t").stats().sent == 2


def test_an_interrupt_that_does_not_wake_a_waiting_receiver_is_heard_all_the_same(tmp_path: Path) -> None:
    """One that comes as it falls asleep was heard a minute later."""
    with DelayedStore.open(tmp_path / "s") as store, store.topic("t").subscribe("s") as consumer:
        interrupt_of_sleeping(consumer.receive, lambda: store.topic("t").send(b"x"))
        store.topic("t").send(b"x")
        assert payloads(consumer) == [b"x"]


def test_what_a_transaction_acknowledges_leaves_nothing_to_flush_or_to_trim_in_its_ledger(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Its group has all of it: the upkeep would wake up and find nothing. Attempts that it ends are flushed."""
    store = open_store()
    topic, flusher, agenda = store.topic("t"), store._engine.delivery.flusher, store._engine.waking.agenda
    topic.send_payloads([b"1", b"2", b"3"])
    with topic.subscribe("s") as consumer:
        first, second, _ = consumer.receive(3, timeout=0)
        consumer.nack(second, delay=0)
        clock.advance(60_000)
        store.tick()
        due_ms = agenda.next_due_ms()
        with store.transaction() as transaction:
            transaction.ack(first)
        assert (flusher.due_ms(), agenda.next_due_ms()) == (None, due_ms)
        (second,) = consumer.receive(1, timeout=0)
        store.tick()
        assert flusher.due_ms() is None
        with store.transaction() as transaction:
            transaction.ack(second)
        assert flusher.due_ms() is not None
        assert topic.subscription("s").stats().acknowledged == 2
