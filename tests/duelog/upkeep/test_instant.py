"""Firing ahead of an instant: markers are on the disk before it, and no consumer receives a message before its time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from duelog import DelayedStore, Message, StoreConfig
from duelog.store.clock import Clock
from tests.conftest import START_MS, LeadingClock, OpenStore
from tests.duelog.store_state import payloads_of
from tests.model.driver import armed

CONFIG = StoreConfig(partition_ms=3_600_000, background=False)


@contextmanager
def noting_commits(clock: Clock) -> Iterator[list[int]]:
    """Record the clock whenever a firing is about to be written."""
    shown: list[int] = []
    with armed("fire.before", lambda: shown.append(clock.now_ms())):
        yield shown


@pytest.fixture
def clock() -> LeadingClock:
    """The clock of these tests."""
    return LeadingClock(START_MS)


@pytest.fixture
def store(open_store: OpenStore, clock: LeadingClock) -> DelayedStore:
    """A store on it, with topic t and subscription s."""
    store = open_store(config=CONFIG, clock_=clock)
    store.topic("t").subscribe("s").close()
    return store


def test_what_is_due_in_a_moment_is_written_ahead_and_given_to_nobody_before_its_time(
    store: DelayedStore, clock: LeadingClock
) -> None:
    """A tick 5 ms before writes it, one 6 ms before does not, and says 2 ms before: by then more may be due.

    An early poll returns the time of the next one.
    """
    store.topic("t").send_batch([Message(b"a", deliver_at=START_MS + 10), Message(b"b", deliver_at=START_MS + 20)])
    with noting_commits(clock) as written_ms, store.topic("t").subscribe("s") as consumer:
        clock.set(START_MS + 4)
        assert (store.tick().fired, store.tick().next_due_ms) == (0, START_MS + 8)
        clock.set(START_MS + 5)
        assert store.tick().fired == 1
        assert written_ms == [START_MS + 5]
        clock.set(START_MS + 9)
        assert consumer.poll(10) == ([], START_MS + 10)
    clock.set(START_MS + 10)
    assert payloads_of(store) == [b"a"]
    clock.set(START_MS + 20)
    assert payloads_of(store) == [b"b"]


@pytest.mark.parametrize("how", ["new", "seek"])
def test_who_begins_at_the_latest_gets_what_is_written_and_not_due(
    store: DelayedStore, clock: LeadingClock, how: str
) -> None:
    """It became due after they had come; what was due before is not for them."""
    topic = store.topic("t")
    topic.send_batch([Message(b"%d" % at, deliver_at=START_MS + at) for at in (8, 10)])
    clock.set(START_MS + 7)
    store.tick()
    clock.set(START_MS + 9)
    with topic.subscribe("s" if how == "seek" else "late", initial_position="latest") as consumer:
        if how == "seek":
            consumer.seek("latest")
        clock.set(START_MS + 10)
        assert [message.payload for message in consumer.receive(10)] == [b"10"]


@pytest.mark.parametrize("then", ["fires", "closes"])
def test_the_clock_mark_on_the_disk_never_goes_back(open_store: OpenStore, clock: LeadingClock, then: str) -> None:
    """Firing, or closing, after a message was fired ahead of time does not make that one early after a crash."""
    store = open_store(config=CONFIG, clock_=clock)
    topic = store.topic("t")
    topic.subscribe("s").close()
    end_ms = START_MS - START_MS % CONFIG.partition_ms + CONFIG.partition_ms
    topic.send_batch([Message(b"%d" % at, deliver_at=end_ms + at) for at in (-1, 5)])
    clock.set(end_ms - 1)
    store.tick()
    clock.set(end_ms)
    if then == "fires":
        assert store.tick().fired == 1
        topic.send(b"2", deliver_at=end_ms + 2)
    assert store.tick().closed == (then == "closes")
    store.close()
    assert open_store(config=CONFIG, clock_=LeadingClock(end_ms))._engine.clock.now_ms() == end_ms + 5


def test_a_partition_is_not_closed_before_its_end_though_all_of_it_was_written_ahead(
    store: DelayedStore, clock: LeadingClock
) -> None:
    """The last message of one and the first of the next are one commit."""
    end_ms = START_MS - START_MS % CONFIG.partition_ms + CONFIG.partition_ms
    store.topic("t").send_batch([Message(b"%d" % at, deliver_at=end_ms + at) for at in (-1, 0)])
    clock.set(end_ms - 4)
    result = store.tick()
    assert (result.fired, result.closed) == (2, 0)
    clock.set(end_ms - 1)
    assert payloads_of(store) == [b"-1"]
    clock.set(end_ms)
    assert store.tick().closed == 1
    assert payloads_of(store) == [b"0"]


def test_upkeep_gives_way_once_to_who_is_to_be_woken_and_never_twice(
    store: DelayedStore, clock: LeadingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice that fired ahead does nothing else and says when to go on; the next one does it, firing or not."""
    topic = store.topic("t")
    topic.send_batch([Message(b"%d" % at, deliver_at=START_MS + at) for at in (10, 11, 20, 22, 500)])
    with topic.subscribe("s") as consumer:
        topic.send(b"now")
        clock.set(START_MS + 1)
        store.tick()
        consumer.ack(consumer.receive(1))  # to be flushed at START_MS + 101
    flusher = store._engine.delivery.flusher
    flushed: list[int] = []
    flush = flusher.flush

    def noted() -> None:
        flushed.append(clock.now_ms())
        flush()

    monkeypatch.setattr(flusher, "flush", noted)
    clock.set(START_MS + 5)
    result, more = store._engine.slice()
    assert (result.fired, result.next_due_ms, more) == (1, START_MS + 9, True)  # then the next is to be fired
    clock.set(START_MS + 9)
    result, more = store._engine.slice()
    assert (result.fired, more) == (1, False)
    clock.set(START_MS + 15)
    result, more = store._engine.slice()
    assert (result.fired, result.next_due_ms, more) == (1, START_MS + 20, True)
    clock.set(START_MS + 20)
    assert store.tick().fired == 1
    clock.set(START_MS + 497)
    result, more = store._engine.slice()
    assert (result.fired, result.next_due_ms, more, flushed) == (1, START_MS + 503, True, [])
    store._engine.slice()
    assert flushed == [START_MS + 497]
