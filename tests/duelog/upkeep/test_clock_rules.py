"""A clock that is set back or runs far ahead, and a body that cannot be read."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from duelog import Clock, DelayedStore, ManualClock, StoreConfig
from duelog.errors import ClockJumped
from duelog.store.codec.format import RUN_PREFIX
from duelog.upkeep.maintenance import Maintenance, TickResult
from tests.conftest import DAY_MS, HOUR_MS, START_MS, OpenStore

CONFIG = StoreConfig(partition_ms=HOUR_MS, max_clock_jump_ms=DAY_MS, background=False)


class WallClock(Clock):
    """A clock that the store takes for the machine's, and that shows what it is told to."""

    def __init__(self, now_ms: int) -> None:
        self.shown_ms = now_ms

    def now_ms(self) -> int:
        return self.shown_ms

    def set(self, now_ms: int) -> None:
        self.shown_ms = now_ms

    def wait(self, condition: threading.Condition, until_ms: int | None) -> None:
        """Wait a moment of real time: what it shows may change with no notice."""
        if until_ms is None or until_ms > self.shown_ms:
            condition.wait(0.01)


def payloads(store: DelayedStore, timeout: float = 0) -> list[bytes]:
    """Receive what is due in topic a, and acknowledge it."""
    with store.topic("a").subscribe("reader") as reader:
        messages = reader.receive(100, timeout=timeout)
        reader.ack(messages)
        return [message.payload for message in messages]


def test_a_clock_far_ahead_stops_firing_until_it_comes_back(open_store: OpenStore) -> None:
    """Nothing fires on a jump over the bound; what had fired is handed out; the clock's return is enough."""
    wall = WallClock(START_MS)
    store = open_store(config=CONFIG, clock_=wall)
    topic = store.topic("a")
    topic.subscribe("reader").close()
    topic.send(b"in a year", deliver_after=365 * 86_400)
    topic.send(b"soon", deliver_after=60)
    topic.send(b"now")
    store.tick()
    wall.shown_ms += 400 * DAY_MS
    with pytest.raises(ClockJumped) as caught:
        store.tick()
    assert (caught.value.last_ms, caught.value.now_ms) == (START_MS, START_MS + 400 * DAY_MS)
    assert payloads(store) == [b"now"]
    with pytest.raises(ClockJumped):
        payloads(store)
    wall.shown_ms = START_MS + 60_000
    assert store.tick().fired == 1
    assert payloads(store) == [b"soon"]
    assert store.stats().pending == 1


def test_a_clock_far_ahead_is_believed_when_told_to(open_store: OpenStore) -> None:
    """accept_clock() goes on by the clock as it is."""
    wall = WallClock(START_MS)
    store = open_store(config=CONFIG, clock_=wall)
    store.topic("a").subscribe("reader").close()
    store.topic("a").send(b"in two days", deliver_after=2 * 86_400)
    store.tick()
    wall.shown_ms += 3 * DAY_MS
    with pytest.raises(ClockJumped):
        store.tick()
    assert store.stats().pending == 1
    store.accept_clock()
    assert payloads(store) == [b"in two days"]


@pytest.mark.parametrize(("kind", "days"), [(WallClock, 1), (ManualClock, 366)])
def test_a_jump_within_the_bound_is_believed(
    open_store: OpenStore, kind: Callable[[int], WallClock | ManualClock], days: int
) -> None:
    """A machine that slept for a day, the bound, fires what became due; a manual clock has no bound."""
    clock = kind(START_MS)
    store = open_store(config=CONFIG, clock_=clock)
    store.topic("a").subscribe("reader").close()
    store.topic("a").send(b"then", deliver_after=days * 86_400)
    store.tick()
    clock.set(START_MS + days * DAY_MS)
    assert payloads(store) == [b"then"]


def test_a_receiver_beside_the_background_thread_hears_of_a_clock_far_ahead(open_store: OpenStore) -> None:
    """A waiting receiver gets ClockJumped instead of waiting for ever, and messages once the clock is back."""
    wall = WallClock(START_MS)
    store = open_store(config=replace(CONFIG, background=True), clock_=wall)
    topic = store.topic("a")
    reader = topic.subscribe("reader")
    topic.send(b"now")
    topic.send(b"soon", deliver_after=60)
    topic.send(b"in a year", deliver_after=365 * 86_400)
    assert [message.payload for message in reader.receive(10, timeout=5)] == [b"now"]
    wall.shown_ms += 400 * DAY_MS
    with pytest.raises(ClockJumped):
        reader.receive(10)
    wall.shown_ms = START_MS + 60_000
    store.accept_clock()  # and wakes the thread, which looks again by itself within a second
    received = None
    while received is None:
        try:
            received = [message.payload for message in reader.receive(10, timeout=5)]
        except ClockJumped:  # the thread has not looked yet
            continue
    assert received == [b"soon"]
    assert store.stats().pending == 1


def flip_body(store: Path, marker: bytes) -> None:
    """Flip a bit of a body in a partition of a closed store, wherever `marker` is."""
    for partition in (store / "partitions").iterdir():
        environment = lmdb.open(str(partition / "g000001"), max_dbs=0, map_size=1 << 24, lib_version=0)
        with environment.begin(write=True) as transaction:
            for key, value in list(transaction.cursor()):
                if key[:1] == RUN_PREFIX[:1] and marker in value:
                    at = value.index(marker)
                    transaction.put(key, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
        environment.close()


def test_a_body_that_cannot_be_read_is_quarantined_and_the_others_are_delivered(
    store: DelayedStore, clock: ManualClock, tmp_path: Path
) -> None:
    """It is counted, reported by check at every open, never delivered, and holds its partition, which stays."""
    store.topic("a").subscribe("reader").close()
    for payload in (b"alpha", b"damaged", b"omega"):
        store.topic("a").send(payload, deliver_after=60)
    store.close()
    flip_body(tmp_path / "store", b"damaged")
    store = DelayedStore.open(tmp_path / "store", CONFIG, clock=clock)
    clock.advance(61_000)
    assert payloads(store) == [b"alpha", b"omega"]
    clock.advance(2 * HOUR_MS)
    for _ in range(3):
        store.tick()
    assert store.stats().set_aside == 1
    assert [finding.code for finding in store.check()] == ["set-aside"]
    assert [partition.state for partition in store.partitions()] == ["closed"]
    store.close()
    store = DelayedStore.open(tmp_path / "store", CONFIG, clock=clock)
    assert payloads(store) == []
    assert store.stats().set_aside == 1
    assert "set-aside" in [finding.code for finding in store.check()]
    assert len(store.partitions()) == 1
    store.close()


def test_a_poll_without_a_thread_takes_a_slice_only_where_one_may_have_something_to_do(
    store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When something is due, was asked for, or the clock was set back."""
    topic = store.topic("t")
    slices: list[int] = []
    take = Maintenance._slice

    def counted(upkeep: Maintenance, now_ms: int) -> tuple[TickResult, bool]:
        slices.append(now_ms)
        return take(upkeep, now_ms)

    monkeypatch.setattr(Maintenance, "_slice", counted)
    with topic.subscribe("s") as consumer:
        topic.send(b"later", deliver_after=60)
        assert consumer.poll() == ([], clock.now_ms() + 10_000)  # a checkpoint is due before
        taken = len(slices)
        assert consumer.poll() == ([], clock.now_ms() + 10_000)
        assert len(slices) == taken
        topic.send(b"sooner", deliver_after=5)
        assert consumer.poll() == ([], clock.now_ms() + 5_000)
        clock.advance(5_000)
        assert [message.payload for message in consumer.poll()[0]] == [b"sooner"]
        clock.set(clock.now_ms() - 1_000)
        taken = len(slices)
        consumer.poll()
        assert len(slices) > taken, "a clock that is set back is noticed"
