"""Threads on one store: producers and consumers, waiting receivers and what wakes them. On the machine's clock."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, ReceivedMessage, StoreConfig, Subscription, SystemClock
from duelog.errors import ClosedError, UnknownSubscription
from tests.conftest import START_MS, OpenStore

PRODUCERS, EACH = 8, 100
LIMIT_S = 60.0
"""How long a test waits for what has to happen; far more than it takes."""


class _Waits:
    """Counts the threads, other than the store's own, that have begun to wait."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    def note(self) -> None:
        if threading.current_thread().name != "duelog-scheduler":
            with self._condition:
                self._count += 1
                self._condition.notify_all()

    def until(self, count: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._count >= count, LIMIT_S)


class WatchedClock(SystemClock):
    """The wall clock; `waits` counts the threads that wait by it."""

    def __init__(self) -> None:
        self.waits = _Waits()

    def wait(self, condition: threading.Condition, until_ms: int | None) -> None:
        self.waits.note()
        super().wait(condition, until_ms)


class _Noted(threading.Condition):
    """A condition whose waits are noted once the clock knows of them, before its lock is given back."""

    def __init__(self, condition: threading.Condition, note: Callable[[], None]) -> None:
        self.__dict__.update(vars(condition))
        self._wait, self._note = condition.wait, note

    def wait(self, timeout: float | None = None) -> bool:
        self._note()
        return self._wait(timeout)


class WatchedManualClock(ManualClock):
    """A clock that tests move, with the same count."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms)
        self.waits = _Waits()

    def wait(self, condition: threading.Condition, until_ms: int | None) -> None:
        super().wait(_Noted(condition, self.waits.note), until_ms)


@contextmanager
def waiting(subscription: Subscription, clock: WatchedClock | WatchedManualClock) -> Iterator[Future[Any]]:
    """A receiver in a thread of its own, which waits when the block begins; gives (messages, when they came)."""

    def receive() -> tuple[list[ReceivedMessage], int]:
        return subscription.receive(), clock.now_ms()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(receive)
        try:
            clock.waits.until(1)
            yield future
        except BaseException:
            subscription.close()  # the pool waits for who waits for ever
            raise


@pytest.mark.parametrize(
    ("partition_ms", "ledger_entries"), [(3_600_000, 50_000), (100, 40)], ids=["one partition", "many partitions"]
)
def test_nothing_is_lost_or_doubled_between_producers_and_consumers(
    open_store: OpenStore, partition_ms: int, ledger_entries: int
) -> None:
    """8 producers and 4 consumers of a shared subscription: each message once, none early, and commits are shared."""
    config = StoreConfig(
        partition_ms=partition_ms,
        ledger_max_entries=ledger_entries,
        ledger_max_age_ms=500,
        ack_flush_ms=20,
        fire_batch=50,
    )
    clock = SystemClock()
    store = open_store(config=config, clock_=clock)
    topic = store.topic("t")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    got: Counter[bytes] = Counter()
    early: list[ReceivedMessage] = []
    lock, all_acked = threading.Lock(), threading.Event()

    def produce(number: int) -> None:
        draw = random.Random(seed + number)
        for index in range(EACH):
            topic.send(b"%d-%d" % (number, index), deliver_after=draw.choice((0, draw.randrange(300))) / 1000)

    def consume(subscription: Subscription) -> None:
        while True:
            try:
                batch = subscription.receive(25, timeout=LIMIT_S)
            except ClosedError:
                return
            now_ms = clock.now_ms()
            assert subscription.ack(batch) == len(batch)
            with lock:
                early.extend(message for message in batch if message.due_ms > now_ms)
                got.update(message.payload for message in batch)
                if sum(got.values()) >= PRODUCERS * EACH:
                    all_acked.set()

    consumers = [topic.subscribe("s", type="shared") for _ in range(4)]
    with ThreadPoolExecutor(PRODUCERS + len(consumers)) as pool:
        receiving = [pool.submit(consume, subscription) for subscription in consumers]
        try:
            list(pool.map(produce, range(PRODUCERS)))
            assert all_acked.wait(LIMIT_S)
        finally:
            for subscription in consumers:
                subscription.close()
        for future in receiving:
            future.result()
    assert not early
    assert set(got) == {b"%d-%d" % (number, index) for number in range(PRODUCERS) for index in range(EACH)}
    assert set(got.values()) == {1}
    assert topic.stats().subscriptions[0].backlog == 0
    if partition_ms == 100:
        deadline_ms = clock.now_ms() + LIMIT_S * 1000
        while store.partitions() and clock.now_ms() < deadline_ms:
            store.tick()
        assert store.partitions() == []
    else:
        commits = store.stats().commits + sum(
            p.environment.counts.commits for p in store._engine.storage.partitions.held()
        )
        print(f"{PRODUCERS * EACH} sends, {commits} transactions: {PRODUCERS * EACH / commits:.1f} sends each")
        assert commits < PRODUCERS * EACH


@pytest.mark.parametrize("background", [True, False])
def test_receive_wakes_when_a_message_is_due(open_store: OpenStore, background: bool) -> None:
    """The first message of a new store wakes a waiting receiver in time; without a thread the receiver fires it."""
    clock = WatchedClock()
    topic = open_store(config=StoreConfig(background=background), clock_=clock).topic("t")
    with waiting(topic.subscribe("s"), clock) as received:
        topic.send(b"soon", deliver_after=0.15)
        (message,), came_ms = received.result(LIMIT_S)
    assert message.payload == b"soon"
    assert message.due_ms <= came_ms < message.due_ms + 30_000


def test_receive_wakes_for_a_message_nearer_than_the_one_it_waits_for(open_store: OpenStore) -> None:
    """The message sent last is due first, in a partition of its own, and comes first."""
    clock = WatchedClock()
    topic = open_store(config=StoreConfig(partition_ms=1_000), clock_=clock).topic("t")
    topic.send(b"far", deliver_after=3_600)
    topic.send(b"near", deliver_after=90)
    with waiting(topic.subscribe("s"), clock) as received:
        topic.send(b"now", deliver_after=0.1)
        (message,), came_ms = received.result(LIMIT_S)
    assert message.payload == b"now"
    assert message.due_ms <= came_ms < message.due_ms + 30_000


def test_a_manual_clock_with_a_background_thread_wakes_a_waiting_receiver(open_store: OpenStore) -> None:
    """Advancing the clock fires and delivers without a call of tick, and not a millisecond early."""
    clock = WatchedManualClock(START_MS)
    topic = open_store(config=StoreConfig(background=True), clock_=clock).topic("t")
    with waiting(topic.subscribe("s"), clock) as received:
        topic.send(b"later", deliver_after=3_600)
        clock.advance(3_599_999)
        clock.waits.until(2)
        assert not received.done()
        clock.advance(1)
        (message,), came_ms = received.result(LIMIT_S)
    assert message.due_ms == came_ms == START_MS + 3_600_000


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda store, _: store.close(), ClosedError),
        (lambda _, subscription: subscription.close(), ClosedError),
        (lambda store, _: store.delete_topic("t"), UnknownSubscription),
    ],
    ids=["close the store", "close the subscription", "delete the topic"],
)
def test_whatever_ends_a_subscription_wakes_its_receiver(
    open_store: OpenStore, end: Callable[[DelayedStore, Subscription], None], error: type[Exception], background: bool
) -> None:
    """A receiver that waits for ever gets the error of what was closed or deleted, with a thread or without."""
    clock = WatchedClock()
    store = open_store(config=StoreConfig(background=background), clock_=clock)
    subscription = store.topic("t").subscribe("s")
    with waiting(subscription, clock) as received:
        end(store, subscription)
        with pytest.raises(error):
            received.result(LIMIT_S)
