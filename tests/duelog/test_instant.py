"""Firing ahead of an instant: markers are on the disk before it, and nobody is given a message before its time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from duelog import DelayedStore, ManualClock, Message, ReceivedMessage, StoreConfig
from duelog.scheduler import Scheduler
from duelog.store import failpoints
from duelog.store.clock import Clock
from duelog.store.environment import Environment
from duelog.store.errors import StoreFull
from tests.conftest import START_MS, OpenStore

CONFIG = StoreConfig(partition_ms=3_600_000, background=False)
PATIENCE_S = 20.0


class NearClock(ManualClock):
    """A clock that shows by itself what comes within 5 ms, after what the test has put in between."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms)
        self.meanwhile: Callable[[], object] = lambda: None
        self.goes_back = False
        self.stays: list[int] = []
        self.reach_ms = 5

    def near_ms(self) -> int:
        """5 ms on."""
        return self.now_ms() + self.reach_ms

    def stay(self, until_ms: int) -> None:
        """Let the test do something, then show `until_ms`, or an hour ago."""
        self.stays.append(until_ms)
        self.meanwhile()
        if self.goes_back:
            self.set(self.now_ms() - 3_600_000)
        elif self.now_ms() < until_ms:
            self.set(until_ms)


@contextmanager
def noting_commits(clock: Clock) -> Iterator[list[int]]:
    """What the clock shows whenever a firing is about to be written."""
    shown: list[int] = []
    failpoints.arm("fire.before", lambda: shown.append(clock.now_ms()))
    try:
        yield shown
    finally:
        failpoints.disarm()


def received(store: DelayedStore) -> list[bytes]:
    """All that topic t has to give, acknowledged."""
    with store.topic("t").subscribe("s") as consumer:
        messages = consumer.receive(100)
        consumer.ack(messages)
        return [message.payload for message in messages]


def peeked(store: DelayedStore, near: NearClock) -> list[ReceivedMessage]:
    """What topic t would give now, with nothing fired for it and nothing acknowledged."""
    engine = store._engine
    with store.topic("t").subscribe("s") as consumer, consumer._state.lock:
        return consumer._dispatcher().next_batch(consumer._consumer, 100, engine.clock.now_ms())


@pytest.fixture
def near() -> NearClock:
    """The clock of these tests."""
    return NearClock(START_MS)


@pytest.fixture
def store(open_store: OpenStore, near: NearClock) -> DelayedStore:
    """A store on it, with topic t and subscription s."""
    store = open_store(config=CONFIG, clock_=near)
    store.topic("t").subscribe("s").close()
    return store


def test_what_is_due_in_a_moment_is_written_ahead_and_given_to_nobody_before_its_time(
    store: DelayedStore, near: NearClock
) -> None:
    """A tick 3 ms before writes it, one 6 ms before does not; it is handed out once the clock shows its time."""
    store.topic("t").send_batch([Message(b"a", deliver_at=START_MS + 10), Message(b"b", deliver_at=START_MS + 20)])
    seen: list[tuple[int, list[ReceivedMessage]]] = []
    near.meanwhile = lambda: seen.append((near.now_ms(), peeked(store, near)))
    with noting_commits(near) as written_ms:
        near.set(START_MS + 4)
        assert store.tick().fired == 0
        near.set(START_MS + 7)
        assert store.tick().fired == 1
    assert written_ms == [START_MS + 7]
    assert seen == [(START_MS + 7, [])]
    assert near.now_ms() == START_MS + 10
    assert received(store) == [b"a"]
    near.set(START_MS + 20)
    assert received(store) == [b"b"]
    assert near.stays == [START_MS + 10]


def test_messages_of_several_instants_are_one_commit_and_each_is_given_at_its_own(
    store: DelayedStore, near: NearClock
) -> None:
    """Of those due 8, 10, 10 and 11 ms after the start, written at 7 ms, each comes when the clock shows it."""
    dues = [START_MS + at for at in (10, 8, 11, 10, 30)]
    store.topic("t").send_batch([Message(b"%d" % due_ms, deliver_at=due_ms) for due_ms in dues])
    ends = []
    near.meanwhile = lambda: ends.append(store.topic("t")._existing().log.end.entry_id)
    with noting_commits(near) as written_ms:
        near.set(START_MS + 7)
        assert store.tick().fired == 4
    assert written_ms == [START_MS + 7]
    assert near.stays == [START_MS + 8, START_MS + 10, START_MS + 11]
    assert ends == [0, 1, 3]
    assert received(store) == [b"%d" % due_ms for due_ms in sorted(dues)[:4]]


def test_a_message_without_a_delay_is_not_lost_behind_one_that_is_kept_back(
    store: DelayedStore, near: NearClock
) -> None:
    """It lies behind it in the log, and comes with it."""
    topic = store.topic("t")
    topic.send(b"due", deliver_at=START_MS + 10)
    near.set(START_MS + 7)

    def send() -> None:
        near.meanwhile = lambda: None
        topic.send(b"at once")
        assert peeked(store, near) == []

    near.meanwhile = send
    store.tick()
    assert received(store) == [b"due", b"at once"]


def test_a_clock_set_back_while_it_is_stayed_for_neither_loses_nor_doubles(
    store: DelayedStore, near: NearClock
) -> None:
    """By the store's clock, which never goes back behind what was written, it is due: it comes, once and in order."""
    due_ms = START_MS + 10
    store.topic("t").send_batch([Message(b"%d" % number, deliver_at=due_ms) for number in range(5)])
    near.set(START_MS + 8)
    near.goes_back = True
    assert store.tick().fired == 5
    near.goes_back = False
    assert near.now_ms() == START_MS + 8 - 3_600_000
    assert store._engine.clock.now_ms() == due_ms
    assert received(store) == [b"0", b"1", b"2", b"3", b"4"]
    near.set(due_ms + 1)
    assert store.tick().fired == 0
    assert received(store) == []


def test_an_interrupt_while_it_is_stayed_for_makes_nothing_early(store: DelayedStore, near: NearClock) -> None:
    """Ctrl-C reaches whoever ticks once the instant has come, and the message is there, once."""
    store.topic("t").send(b"a", deliver_at=START_MS + 10)
    near.set(START_MS + 7)

    def interrupt() -> None:
        near.meanwhile = lambda: None
        raise KeyboardInterrupt

    near.meanwhile = interrupt
    with pytest.raises(KeyboardInterrupt):
        store.tick()
    assert near.now_ms() == START_MS + 10
    assert near.stays == [START_MS + 10] * 2
    assert received(store) == [b"a"]
    assert store.tick().fired == 0


def test_who_cancels_while_it_is_stayed_for_is_told_the_truth(store: DelayedStore, near: NearClock) -> None:
    """It is answered once that has ended: too late."""
    answers: list[bool] = []
    message_id = store.topic("t").send(b"a", deliver_at=near.now_ms() + 10)
    canceller = threading.Thread(target=lambda: answers.append(store.topic("t").cancel(message_id)))
    near.meanwhile = canceller.start
    near.advance(8)
    store.tick()
    canceller.join(PATIENCE_S)
    assert answers == [False]
    assert received(store) == [b"a"]


def test_a_message_sent_while_it_is_stayed_for_is_not_lost(store: DelayedStore, near: NearClock) -> None:
    """Due with it, before it or after it: each fires once, though the frontier passes some of them by then."""
    topic = store.topic("t")
    topic.send(b"first", deliver_at=START_MS + 10)
    near.set(START_MS + 7)

    def send() -> None:
        near.meanwhile = lambda: None
        topic.send_batch([Message(b"%d" % at, deliver_at=START_MS + at) for at in (8, 9, 10, 11)])

    near.meanwhile = send
    fired = store.tick().fired
    near.set(START_MS + 20)
    fired += store.tick().fired
    assert fired == 5
    assert received(store) == [b"first", b"8", b"9", b"10", b"11"]


def test_a_restart_in_between_gives_the_message_once(open_store: OpenStore, near: NearClock) -> None:
    """The process ends between the commit and the instant: by the clock mark in the same commit it is due."""
    store = open_store(config=CONFIG, clock_=near)
    store.topic("t").subscribe("s").close()
    store.topic("t").send(b"a", deliver_at=START_MS + 10)
    near.set(START_MS + 7)

    class Ends(BaseException):
        """Stands for the end of the process."""

    def end() -> None:
        raise Ends

    failpoints.arm("fire.after", end)
    try:
        with pytest.raises(Ends):
            store.tick()
    finally:
        failpoints.disarm()
    store.close()
    again = open_store(config=CONFIG, clock_=ManualClock(START_MS + 7))
    assert again._engine.clock.now_ms() == START_MS + 10
    assert received(again) == [b"a"]
    assert received(again) == []


def test_a_disk_that_is_full_fires_nothing(
    store: DelayedStore, near: NearClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error reaches whoever ticks, and the message fires when there is room."""
    store.topic("t").send(b"a", deliver_at=START_MS + 10)
    near.set(START_MS + 7)
    main = store._engine.main

    def full(work: object) -> None:
        raise StoreFull(main.path, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(main, "write", full)
        with pytest.raises(StoreFull):
            store.tick()
    assert isinstance(main, Environment)
    assert near.stays == []
    near.set(START_MS + 10)
    assert received(store) == [b"a"]


def test_upkeep_gives_way_once_to_who_was_woken_and_never_twice(
    store: DelayedStore, near: NearClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice that stayed does nothing else and says when to go on; the next one does it, though it stays as well."""
    topic = store.topic("t")
    topic.send_batch([Message(b"%d" % at, deliver_at=START_MS + at) for at in (10, 11, 20, 22, 500)])
    with topic.subscribe("s") as consumer:
        topic.send(b"now")
        near.set(START_MS + 1)
        store.tick()
        consumer.ack(consumer.receive(1))  # to be flushed at START_MS + 101
    near.set(START_MS + 7)
    flusher = store._engine.flusher
    flushed: list[int] = []
    flush = flusher.flush

    def noted() -> None:
        flushed.append(near.now_ms())
        flush()

    monkeypatch.setattr(flusher, "flush", noted)
    near.reach_ms = 1
    near.set(START_MS + 9)
    result, more = store._engine.slice()
    assert (result.fired, result.next_due_ms, more) == (1, START_MS + 10, True)  # the next is to be stayed for, too
    result, more = store._engine.slice()
    assert (result.fired, more) == (1, False)
    near.set(START_MS + 19)
    result, more = store._engine.slice()
    assert (result.fired, result.next_due_ms, more) == (1, START_MS + 22, True)
    near.set(START_MS + 22)
    assert store.tick().fired == 1
    near.reach_ms = 5
    near.set(START_MS + 498)
    result, more = store._engine.slice()
    assert (result.fired, result.next_due_ms, more, flushed) == (1, START_MS + 503, True, [])
    store._engine.slice()
    assert flushed == [START_MS + 500]


class _Waits(Clock):
    """A clock on which nothing is ever due; notes how it is waited on, and ends the scheduler after some waits."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.near = False
        self.end: Callable[[], None] = lambda: None

    def now_ms(self) -> int:
        """Always the beginning."""
        return 0

    def is_near(self, until_ms: int) -> bool:
        """Once it was waited for ahead."""
        return self.near

    def wait(self, condition: threading.Condition, until_ms: int | None) -> None:
        """Until it has come."""
        self._note("wait", near=False)

    def wait_ahead(self, condition: threading.Condition, until_ms: int | None) -> None:
        """Until it is near."""
        self._note("wait ahead", near=True)

    def _note(self, wait: str, *, near: bool) -> None:
        self.waits.append(wait)
        self.near = near
        if len(self.waits) == 4:
            self.end()


def test_the_scheduler_does_not_go_round_and_round_before_its_time() -> None:
    """Up a moment early with nothing to fire, it waits for the rest: one tick ahead of its time, not a hundred."""
    clock = _Waits()
    ticks: list[int] = []

    def tick() -> int:
        ticks.append(1)
        return 1_000

    scheduler = Scheduler(tick, clock, lambda: None)

    def end() -> None:
        scheduler._stopping = True

    clock.end = end
    scheduler.start()
    scheduler._thread.join(PATIENCE_S)
    assert clock.waits == ["wait ahead", "wait", "wait ahead", "wait"]
    assert len(ticks) == 4
