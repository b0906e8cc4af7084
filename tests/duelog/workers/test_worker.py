"""A worker runs functions for messages: acknowledges, retries, gives up, and drains when it is stopped."""

import asyncio
import gc
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import duelog
from duelog import (
    DelayedStore,
    ManualClock,
    Message,
    Policies,
    ReceivedMessage,
    StoreConfig,
    Subscription,
    TaskMessage,
    Transaction,
    Worker,
)
from duelog.errors import ClosedError, HandlersHang, InvalidArgument, StoreFailed, StoreFull
from duelog.store.clock import Monitor
from duelog.workers.task_runner import LONGEST_BACKOFF_MS, Task, reason_of
from tests.conftest import OpenStore, present, raising
from tests.store.commits import until

FIRING = StoreConfig(background=True)


class Log:
    """Payloads that functions were run with, and a wait for those to come."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._monitor = Monitor()

    def add(self, payload: object) -> int:
        """Note a payload; how often it was noted by now."""
        with self._monitor.lock:
            self.seen.append(payload)
            self._monitor.notify_all()
            return self.seen.count(payload)

    def wait(self, count: int) -> None:
        """Until so many were noted."""
        with self._monitor.lock:
            assert self._monitor.wait_for(lambda: len(self.seen) >= count, 60), self.seen


def backlog(store: DelayedStore, topic: str) -> int:
    """Messages that the worker's subscription still has."""
    return store.topic(topic).subscription("worker").stats().backlog


def await_retry(store: DelayedStore, number: int = 1) -> None:
    """Until this retry of a message has been sent. The one before may count as pending while it is handed out."""
    until(lambda: any(each.retries == number for each in store.topic("t").scheduled()))


def both_kinds(function: Callable[[ReceivedMessage], object]) -> dict[str, Callable[[ReceivedMessage], object]]:
    """A function, and a coroutine function that does the same."""

    async def coroutine(message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        function(message)

    return {"function": function, "coroutine": coroutine}


class Gate:
    """Where handlers of both kinds stand until it is opened, their messages noted."""

    def __init__(self, log: Log) -> None:
        self._open = threading.Event()
        self._log = log

    def open(self) -> None:
        self._open.set()

    def stand(self, message: ReceivedMessage | None = None) -> None:
        """Note a message once it stands here, and stand."""
        if message is not None:
            self._log.add(message.payload)
        assert self._open.wait(60)

    def handler(self, kind: str = "function") -> Callable[[ReceivedMessage], object]:
        """A function, or a coroutine function, that stands."""

        def stand(message: ReceivedMessage) -> None:
            self._log.add(message.payload)
            self.stand()

        async def stand_in_loop(message: ReceivedMessage) -> None:
            await asyncio.to_thread(stand, message)

        return stand if kind == "function" else stand_in_loop


class Bench:
    """A store that fires by itself, on a clock that tests move; a worker of it, and what its function is given."""

    def __init__(self, store: DelayedStore, clock: ManualClock) -> None:
        self.store, self.clock, self.log = store, clock, Log()
        self.gate = Gate(self.log)
        self.stopping = ExitStack()

    def note(self, message: ReceivedMessage) -> None:
        """A function that notes its payload."""
        self.log.add(message.payload)

    def failing(self, error: type[BaseException], *, but: object = None) -> Callable[[ReceivedMessage], object]:
        """A function that notes its payload and raises, except for one payload."""

        def fail(message: ReceivedMessage) -> None:
            self.log.add(message.payload)
            if message.payload != but:
                raise error("planted")

        return fail

    def run(self, function: Callable[[ReceivedMessage], object], *, drain: Any = 30, **options: Any) -> Worker:
        """Have a worker run a function for topic `t`, with options of the task; stopped at the end."""
        worker = Worker(self.store, drain=drain)
        worker.task("t", **options)(function)
        return self.stopping.enter_context(worker)


@pytest.fixture
def bench(open_store: OpenStore, clock: ManualClock) -> Iterator[Bench]:
    """A bench whose gate is opened and whose workers are stopped at the end."""
    bench = Bench(open_store(config=FIRING), clock)
    yield bench
    bench.gate.open()
    bench.stopping.close()


KINDS = pytest.mark.parametrize("kind", ["function", "coroutine"])


@KINDS
def test_messages_are_acknowledged_when_the_function_returns(bench: Bench, kind: str) -> None:
    """Those that are due, and the later ones when they are."""
    topic = bench.store.topic("t")
    topic.send_batch([Message(b"%d" % n, deliver_after=n % 2 * 60) for n in range(40)])
    worker = bench.run(both_kinds(bench.note)[kind])
    bench.log.wait(20)
    bench.clock.advance(60_000)
    bench.log.wait(40)
    assert worker.stop() == 0
    assert sorted(map(int, bench.log.seen)) == list(range(40))
    assert backlog(bench.store, "t") == 0


@KINDS
def test_a_task_holds_no_more_messages_than_it_runs(bench: Bench, kind: str) -> None:
    """So a second worker of the same subscription gets the rest at once."""
    bench.store.topic("t").send_batch([Message(b"%d" % n) for n in range(10)])
    worker = bench.run(bench.gate.handler(kind), concurrency=3)
    bench.log.wait(3)
    with bench.store.topic("t").subscribe("worker", type="shared") as other:
        assert len(other.receive(100)) == 7
        other.nack_all()
    bench.gate.open()
    bench.log.wait(10)
    worker.stop()
    assert sorted(map(int, bench.log.seen)) == list(range(10))


@KINDS
def test_an_exception_is_retried_with_backoff_and_then_a_dead_letter_with_its_type_and_text(
    bench: Bench, kind: str
) -> None:
    """Each retry waits twice as long as the one before, by the store's clock; `attempts` counts all."""
    topic = bench.store.topic("t")
    first_id = topic.send(b"poison", key="k", properties={"p": "q"})
    begun_ms, times = bench.clock.now_ms(), []

    def fail(message: ReceivedMessage) -> None:
        times.append(bench.clock.now_ms() - begun_ms)
        bench.log.add(message.payload)
        raise ValueError(f"number {len(times)}")

    worker = bench.run(both_kinds(fail)[kind], retries=3, backoff=timedelta(seconds=10))
    for attempt, wait_s in enumerate((10, 20, 40), start=1):
        bench.log.wait(attempt)
        await_retry(bench.store, attempt)
        bench.clock.advance(wait_s * 1_000)
    bench.log.wait(4)
    assert worker.stop() == 0
    assert times == [0, 10_000, 30_000, 70_000]
    (letter,) = bench.store.dead_letters()
    assert (letter.payload, letter.key, letter.properties, letter.message_id) == (b"poison", "k", {"p": "q"}, first_id)
    assert (letter.reason, letter.attempts, letter.first_ms, letter.last_ms) == (
        "ValueError: number 4",
        4,
        begun_ms,
        begun_ms + 70_000,
    )
    assert backlog(bench.store, "t") == 0
    assert list(bench.store.dead_letters(reason="ValueError: number 4")) == [letter]


def test_a_backoff_of_ones_own_sees_the_failures_and_may_give_up(bench: Bench) -> None:
    """None from it makes a dead letter at once; so many retries as it likes are as good."""
    asked: list[tuple[int, str]] = []

    def backoff(failed: int, error: BaseException) -> int | None:
        asked.append((failed, str(error)))
        return None if isinstance(error, KeyError) else 0

    def fail(message: ReceivedMessage) -> None:
        if bench.log.add(message.payload) < 9:
            raise RuntimeError("again")
        raise KeyError("for good")

    bench.store.topic("t").send(b"x")
    worker = bench.run(fail, retries=None, backoff=backoff)
    bench.log.wait(9)
    worker.stop()
    assert asked == [*((n, "again") for n in range(1, 9)), (9, "'for good'")]
    assert [(letter.reason, letter.attempts) for letter in bench.store.dead_letters()] == [("KeyError: 'for good'", 9)]


def test_a_retry_that_the_delay_policies_refuse_waits_in_memory(bench: Bench) -> None:
    """It is delivered after its backoff all the same, and counted."""
    bench.store.set_policies(Policies(max_delivery_delay_ms=1_000))
    bench.store.topic("t").send(b"x")
    counts: list[int] = []

    def fail(message: ReceivedMessage) -> None:
        counts.append(message.redelivery_count + message.retries)
        if bench.log.add(message.payload) == 1:
            raise RuntimeError

    worker = bench.run(fail, backoff=60)
    bench.log.wait(1)
    while len(bench.log.seen) < 2:
        bench.clock.advance(1_000)
    worker.stop()
    assert counts == [0, 1]


def test_a_message_that_failed_too_often_before_is_a_dead_letter_without_being_run(bench: Bench) -> None:
    """Crashes count deliveries, and leave no exception."""
    topic = bench.store.topic("t")
    topic.send_batch([Message(b"crashes"), Message(b"fine")])
    with topic.subscribe("worker", type="shared") as consumer:
        for _ in range(3):
            consumer.nack(consumer.receive()[0], delay=0)
    worker = bench.run(bench.note, retries=2)
    bench.log.wait(1)
    worker.stop()
    assert bench.log.seen == [b"fine"]
    assert [(letter.reason, letter.attempts) for letter in bench.store.dead_letters()] == [("redeliveries", 3)]


def test_a_message_that_failed_and_then_crashed_keeps_its_last_exception(bench: Bench) -> None:
    """It is the reason of its dead letter, and given to the function that is run again."""
    topic = bench.store.topic("t")
    topic.send(b"x")
    failures: list[str | None] = []

    def fail(message: ReceivedMessage) -> None:
        failures.append(message.failure)
        bench.log.add(message.payload)
        raise ValueError(f"number {len(failures)}")

    worker = bench.run(fail, retries=2, backoff=1)
    for attempt in (1, 2):
        bench.log.wait(attempt)
        await_retry(bench.store, attempt)
        if attempt == 1:
            bench.clock.advance(1_000)
    worker.stop()
    bench.clock.advance(2_000)
    topic.subscribe("worker", type="shared").close()
    with topic.subscribe("worker", type="shared") as consumer:
        consumer.receive()  # and dies with it
    worker.start()
    until(lambda: list(bench.store.dead_letters()))
    assert failures == [None, "ValueError: number 1"]
    assert [(letter.reason, letter.attempts) for letter in bench.store.dead_letters()] == [("ValueError: number 2", 3)]


@KINDS
def test_a_message_is_not_delivered_again_before_the_timeout_of_its_task_is_over(bench: Bench, kind: str) -> None:
    """However short the acknowledgement timeout is, which counts from there."""
    bench.store.set_policies(Policies(ack_timeout_ms=1_000))
    bench.store.topic("t").send_batch([Message(b"a"), Message(b"b")])
    worker = bench.run(bench.gate.handler(kind), timeout=timedelta(hours=21))
    bench.log.wait(2)
    for _ in range(20):
        bench.clock.advance(3_600_000)
        with bench.store.topic("t").subscribe("worker", type="shared") as other:
            assert other.receive(10, timeout=0) == []
    bench.gate.open()
    worker.stop()
    assert sorted(bench.log.seen) == [b"a", b"b"]
    assert backlog(bench.store, "t") == 0


def test_a_coroutine_that_waits_is_not_collected(bench: Bench) -> None:
    """Though nothing but the coroutine refers to what it waits for: its message would be held for ever."""
    ended: list[BaseException] = []

    async def stand(message: ReceivedMessage) -> None:
        try:
            bench.log.add(message.payload)
            await asyncio.Event().wait()
        except BaseException as error:
            ended.append(error)
            raise

    bench.store.topic("t").send(b"x")
    worker = bench.run(stand, drain=0)
    bench.log.wait(1)
    gc.collect()
    assert ended == []
    assert worker.stop() == 1


def test_stopping_waits_for_what_runs_and_takes_nothing_new(bench: Bench) -> None:
    """Running messages are acknowledged; the others stay where they were."""
    bench.store.topic("t").send_batch([Message(b"%d" % n) for n in range(10)])
    worker = bench.run(bench.gate.handler(), concurrency=2)
    bench.log.wait(2)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    until(lambda: all(runner._stopped for runner in worker._runners))
    bench.gate.open()
    stopping.join(60)
    assert sorted(bench.log.seen) == [b"0", b"1"]
    assert backlog(bench.store, "t") == 8


@KINDS
def test_what_has_not_ended_in_time_is_given_back_and_not_counted(
    bench: Bench, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By the store's clock. A coroutine is cancelled, a thread goes on, and its acknowledgement comes to nothing."""
    gate, cancelled = threading.Event(), threading.Event()

    def stand(message: ReceivedMessage) -> None:
        bench.log.add(message.payload)
        gate.wait(60)
        cancelled.set()

    async def stand_in_loop(message: ReceivedMessage) -> None:
        bench.log.add(message.payload)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    bench.store.topic("t").send(b"x")
    worker = bench.run(stand if kind == "function" else stand_in_loop, drain=timedelta(seconds=5))
    bench.log.wait(1)
    left: list[int] = []
    stopping = threading.Thread(target=lambda: left.append(worker.stop()))
    stopping.start()
    while stopping.is_alive():
        bench.clock.advance(1_000)
    assert left == [1]
    assert "worker worker: 1 message had not ended and was given back" in caplog.messages
    with bench.store.topic("t").subscribe("worker") as consumer:
        (message,) = consumer.receive()
        assert (message.payload, message.redelivery_count) == (b"x", 0)
        gate.set()
        assert cancelled.wait(60)
        assert consumer.ack(message) == 1


def test_a_worker_of_a_path_opens_it_and_closes_it(tmp_path: Path) -> None:
    """From start to stop, again and again; its functions send by `worker.store`."""
    log = Log()
    config = StoreConfig(partition_ms=3_600_000)
    DelayedStore.open(tmp_path / "s", config).close()
    worker = Worker(tmp_path / "s", name="w")

    @worker.task("a")
    def first(message: ReceivedMessage) -> None:
        worker.store.topic("b").send(message.payload + b"b")

    @worker.task("b", concurrency=1)
    async def second(message: ReceivedMessage) -> None:
        log.add(message.payload)

    with pytest.raises(ClosedError, match="'w'"):
        _ = worker.store
    for n in range(3):
        with worker:
            assert worker.store.config.partition_ms == 3_600_000
            worker.store.topic("a").send(b"%d" % n)
            log.wait(n + 1)
    assert log.seen == [b"0b", b"1b", b"2b"]
    with DelayedStore.open(tmp_path / "s", config, read_only=True) as store:
        assert list(store.check(deep=True)) == []
        assert store.topic("b").subscription("w").stats().backlog == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_worker_and_the_handlers_before_it_come_back(
    tmp_path: Path, number: signal.Signals
) -> None:
    """`run` returns when what ran has ended, all acknowledged."""
    log, before = Log(), signal.getsignal(number)
    worker = Worker(tmp_path / "s")

    @worker.task("t")
    def slow(message: ReceivedMessage) -> None:
        os.kill(os.getpid(), number)
        log.add(message.payload)

    with DelayedStore.open(tmp_path / "s") as store:
        store.topic("t").send(b"x")
    assert worker.run() == 0
    assert log.seen == [b"x"]
    assert signal.getsignal(number) is before
    with DelayedStore.open(tmp_path / "s") as store:
        assert backlog(store, "t") == 0


def test_a_signal_that_does_not_wake_the_main_thread_is_heard_all_the_same(bench: Bench) -> None:
    """One that comes as it falls asleep was heard a minute later. Here a thread of the task takes it."""
    worker = Worker(bench.store)

    @worker.task("t")
    def take(message: ReceivedMessage) -> None:
        until(lambda: len(worker._monitor._waiters) == 2)  # type: ignore[attr-defined]  # this task's and the main one
        signal.raise_signal(signal.SIGTERM)
        until(lambda: worker._asked)
        bench.note(message)

    bench.store.topic("t").send(b"x")
    ends = threading.Timer(60, worker.request_stop)
    ends.start()
    assert worker.run() == 0
    ends.cancel()
    assert bench.log.seen == [b"x"]


def test_a_second_signal_ends_the_waiting(tmp_path: Path) -> None:
    """Running messages are given back, long before the drain is over."""
    gate = threading.Event()
    worker = Worker(tmp_path / "s", drain=3_600)

    @worker.task("t")
    def stuck(message: ReceivedMessage) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: worker._asked)
        os.kill(os.getpid(), signal.SIGTERM)
        gate.wait(60)

    with DelayedStore.open(tmp_path / "s") as store:
        store.topic("t").send(b"x")
    assert worker.run() == 1
    gate.set()
    with DelayedStore.open(tmp_path / "s") as store, store.topic("t").subscribe("worker") as consumer:
        assert consumer.receive()[0].redelivery_count == 0


def test_a_store_that_fails_ends_the_run_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run any more, and no signal is needed."""
    worker = Worker(tmp_path / "s")
    worker.task("t")(print)
    monkeypatch.setattr("duelog.subscription.Subscription.poll", raising(StoreFailed(tmp_path, "planted")))
    with pytest.raises(StoreFailed, match="planted"):
        worker.run()
    assert repr(worker) == "<Worker 'worker', 1 task, stopped>"


def test_a_store_that_its_program_closes_ends_the_run(open_store: OpenStore) -> None:
    """Without an error."""
    store = open_store(config=FIRING)
    worker = Worker(store)
    worker.task("t")(lambda message: None)
    running = threading.Thread(target=worker.run)
    running.start()
    until(lambda: any(runner.receiving for runner in worker._runners))
    store.close()
    running.join(60)
    assert not running.is_alive()


def test_a_full_disk_is_waited_for(bench: Bench) -> None:
    """Receiving goes on when there is room."""
    full = threading.Event()

    def poll(*_: Any) -> Any:
        full.set()
        raise StoreFull(Path("x"), "planted")

    with patch("duelog.subscription.Subscription.poll", poll):
        worker = bench.run(bench.note)
        assert full.wait(60)
    bench.store.topic("t").send(b"x")
    while not bench.log.seen:
        bench.clock.advance(1_000)
    worker.stop()


def test_a_dead_letter_that_cannot_be_written_is_delivered_again(bench: Bench) -> None:
    """A full disk loses no message, and gives it up later."""
    bench.store.topic("t").send(b"x")
    refused = threading.Event()

    def bury(*_: Any) -> None:
        refused.set()
        raise StoreFull(Path("x"), "planted")

    with patch("duelog.topics.dead_letters.DeadLetters.bury", bury):
        worker = bench.run(bench.failing(RuntimeError), retries=0)
        assert refused.wait(60)
    while not list(bench.store.dead_letters()):
        bench.clock.advance(1_000)
    worker.stop()
    assert {letter.payload for letter in bench.store.dead_letters()} == {b"x"}


OUTSIDE = [RuntimeError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
"""Exceptions that the library does not raise, and those that are no Exception."""


@KINDS
@pytest.mark.parametrize("error", OUTSIDE)
def test_an_error_outside_duelogs_own_while_a_message_is_acknowledged_ends_no_thread_of_its_task(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[BaseException]
) -> None:
    """More of them than the task has slots; each message is delivered again."""
    bench.store.topic("t").send_batch([Message(b"%d" % n) for n in range(6)])
    refused: list[int] = []
    acknowledge = Subscription.ack

    def ack(self: Subscription, *args: Any, **options: Any) -> int:
        if len(refused) < 5:
            refused.append(1)
            raise error("planted")
        return acknowledge(self, *args, **options)

    monkeypatch.setattr("duelog.subscription.Subscription.ack", ack)
    worker = bench.run(both_kinds(bench.note)[kind], concurrency=2)
    while backlog(bench.store, "t"):
        bench.clock.advance(1_000)
    worker.stop()
    assert len(bench.log.seen) == 11


@KINDS
@pytest.mark.parametrize("error", OUTSIDE)
def test_whatever_a_handler_raises_is_a_failed_delivery_and_ends_no_thread_of_its_task(
    bench: Bench, kind: str, error: type[BaseException]
) -> None:
    """SystemExit, KeyboardInterrupt and a cancellation of its own too; the other messages are run."""
    bench.store.topic("t").send_batch([Message(b"%d" % n) for n in range(10)])
    worker = bench.run(both_kinds(bench.failing(error, but=b"9"))[kind], concurrency=2, retries=0)
    bench.log.wait(10)
    worker.stop()
    assert len(list(bench.store.dead_letters())) == 9
    assert backlog(bench.store, "t") == 0


@KINDS
@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit])
def test_a_backoff_that_raises_is_a_minute_and_ends_no_thread_of_its_task(
    bench: Bench, kind: str, raised: type[BaseException]
) -> None:
    """The message is not lost by it."""

    def fail(message: ReceivedMessage) -> None:
        if bench.log.add(message.payload) == 1:
            raise RuntimeError

    bench.store.topic("t").send(b"x")
    worker = bench.run(both_kinds(fail)[kind], concurrency=1, backoff=raising(raised()))
    bench.log.wait(1)
    await_retry(bench.store)
    bench.clock.advance(60_000)
    bench.log.wait(2)
    worker.stop()
    assert bench.log.seen == [b"x", b"x"]
    assert backlog(bench.store, "t") == 0


def test_a_task_of_a_handlers_own_that_raises_systemexit_does_not_end_the_loop_of_the_others(bench: Bench) -> None:
    """Python lets it through `run_forever`: the loop goes on, and no other coroutine is cancelled by it."""
    waiting: list[asyncio.Event] = []

    async def leave() -> None:
        raise SystemExit

    async def handle(message: ReceivedMessage) -> None:
        bench.log.add(message.payload)
        if message.payload == b"waits":
            waiting.append(asyncio.Event())
            await waiting[0].wait()
        elif message.payload == b"leaves":
            await asyncio.create_task(leave())
        else:
            waiting[0].set()

    worker = bench.run(handle, concurrency=2, retries=0)
    for number, payload in enumerate((b"waits", b"leaves", b"sets"), start=1):
        bench.store.topic("t").send(payload)
        bench.log.wait(number)
    assert worker.stop() == 0
    assert [letter.payload for letter in bench.store.dead_letters()] == [b"leaves"]
    assert bench.log.seen == [b"waits", b"leaves", b"sets"]


def test_a_coroutine_that_cancels_itself_and_returns_is_acknowledged(bench: Bench) -> None:
    """Its slot is free again: the cancellation does not reach what acknowledges it."""

    async def handle(message: ReceivedMessage) -> None:
        bench.log.add(message.payload)
        task = present(asyncio.current_task())
        task.cancel()

    bench.store.topic("t").send_batch([Message(b"%d" % n) for n in range(5)])
    worker = bench.run(handle, concurrency=1)
    bench.log.wait(5)
    assert worker.stop() == 0
    assert backlog(bench.store, "t") == 0


def test_a_worker_logs_its_start_and_its_end_in_a_line_each(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Version, store and tasks; then how long it ran and what became of messages."""
    caplog.set_level("INFO", "duelog.worker")
    worker = Worker(bench.store, name="w")
    worker.task("a", concurrency=3, timeout=timedelta(minutes=1))(bench.note)
    worker.task("b", retries=0)(bench.failing(ValueError))
    with worker:
        for topic in ("a", "a", "b"):
            bench.store.topic(topic).send(b"x")
        bench.log.wait(3)
        bench.clock.advance(90_000)
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    tasks = (
        "Bench.note for a (concurrency 3, retries 5, timeout 60 s), "
        "Bench.failing.<locals>.fail for b (concurrency 8, retries 0)"
    )
    assert said == [
        f"worker w starts: duelog {duelog.__version__}, store {bench.store.path}: {tasks}",
        "worker w ends after 90 s: 2 messages acknowledged, 1 attempt failed",
    ]


@KINDS
def test_the_log_has_one_id_through_all_attempts_of_a_message_and_only_frames_of_its_handler(
    bench: Bench, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Though each retry is a message of its own; with how many there may be."""
    first_id = bench.store.topic("t").send(b"x")
    worker = bench.run(both_kinds(bench.failing(ValueError))[kind], retries=2, backoff=1)
    for count in (1, 2, 3):
        bench.log.wait(count)
        if count < 3:
            await_retry(bench.store, count)
        bench.clock.advance(10_000)
    worker.stop()
    of_tasks = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert [record.getMessage().partition(": ")[2] for record in of_tasks] == [
        f"{first_id} failed, attempt 1 of 3, again in 1 s: ValueError: planted",
        f"{first_id} failed, attempt 2 of 3, again in 2 s: ValueError: planted",
        f"{first_id} becomes a dead letter after 3 attempts: ValueError: planted",
    ]
    for record in of_tasks:
        frames = traceback.extract_tb(present(record.exc_info)[2])
        assert {frame.filename for frame in frames} == {__file__}
        assert frames[-1].name == "fail"


def test_a_coroutine_that_was_too_slow_is_a_dead_letter_that_says_so_and_logged_with_where_it_waited(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """With how long it might have taken; its own frames come first."""

    async def hang(message: ReceivedMessage) -> None:
        bench.log.add(message.payload)
        await asyncio.Event().wait()

    bench.store.topic("t").send(b"x")
    worker = bench.run(hang, retries=0, timeout=2.5)
    bench.log.wait(1)
    bench.clock.advance(2_500)
    assert worker.stop() == 0
    assert [letter.reason for letter in bench.store.dead_letters()] == ["TimeoutError: it took longer than 2.5 s"]
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert traceback.extract_tb(present(record.exc_info)[2])[0].name == "hang"


@KINDS
def test_what_a_long_handler_holds_is_not_delivered_again(
    bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held anew before the acknowledgement timeout is over, for as long as the handler runs."""
    extended, extend = threading.Semaphore(0), Subscription.extend

    def noted(consumer: Subscription, messages: Any) -> int:
        count = extend(consumer, messages)
        extended.release()
        return count

    monkeypatch.setattr(Subscription, "extend", noted)
    bench.store.set_policies(Policies(ack_timeout_ms=10_000))
    bench.store.topic("t").send(b"x")
    worker = bench.run(bench.gate.handler(kind), concurrency=1)
    bench.log.wait(1)
    with bench.store.topic("t").subscribe("worker", type="shared") as other:
        for _ in range(10):
            bench.clock.advance(4_000)
            assert extended.acquire(timeout=30)
            assert other.receive(10, timeout=0) == []
        bench.gate.open()
        worker.stop()
    assert backlog(bench.store, "t") == 0


def test_a_coroutine_that_hangs_has_a_timeout_error_raised_in_it_and_is_retried(bench: Bench) -> None:
    """By the store's clock; the same slot runs the next message."""
    raised: list[BaseException] = []

    async def handle(message: ReceivedMessage) -> None:
        if bench.log.add(message.payload) == 1 and message.payload == b"hangs":
            try:
                await asyncio.Event().wait()
            except BaseException as error:
                raised.append(error)
                raise

    topic = bench.store.topic("t")
    topic.send_batch([Message(b"hangs"), Message(b"next")])
    worker = bench.run(handle, concurrency=1, timeout=timedelta(seconds=5), backoff=60)
    bench.log.wait(1)
    bench.clock.advance(4_999)
    assert raised == []
    bench.clock.advance(1)
    bench.log.wait(2)
    assert bench.log.seen == [b"hangs", b"next"]
    assert [type(error) for error in raised] == [asyncio.CancelledError]
    bench.clock.advance(60_000)
    bench.log.wait(3)
    assert worker.stop() == 0
    assert backlog(bench.store, "t") == 0


def test_a_function_that_hangs_is_given_up_told_and_its_thread_replaced(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task goes on; that it returns in the end acknowledges nothing, and its message has failed."""

    def handle(message: ReceivedMessage) -> None:
        if message.payload == b"hangs":
            bench.gate.stand(message)
        else:
            bench.note(message)

    topic = bench.store.topic("t")
    topic.send_batch([Message(b"hangs"), Message(b"next")])
    worker = bench.run(handle, concurrency=1, timeout=5, retries=0)
    bench.log.wait(1)
    bench.clock.advance(5_000)
    bench.log.wait(2)
    given_up = [record.getMessage() for record in caplog.records if "is given up" in record.getMessage()]
    assert len(given_up) == 1
    assert "it took longer than 5 s; its thread hangs" in given_up[0]
    assert "in handle" in given_up[0]
    assert "gate.stand(message)" in given_up[0]
    assert "task_runner.py" not in given_up[0]
    assert [letter.reason for letter in bench.store.dead_letters()] == ["TimeoutError: it took longer than 5 s"]
    bench.gate.open()
    until(lambda: any("when it had been given up" in record.getMessage() for record in caplog.records))
    assert worker.stop() == 0
    assert len(list(bench.store.dead_letters())) == 1


def test_a_function_that_was_given_up_and_returns_does_not_acknowledge_the_retry(bench: Bench) -> None:
    """The message waits for its backoff, and is run again, though the first attempt has succeeded meanwhile."""
    topic = bench.store.topic("t")
    topic.send(b"x")

    def handle(message: ReceivedMessage) -> None:
        if bench.log.add(message.payload) == 1:
            bench.gate.stand()

    worker = bench.run(handle, concurrency=1, timeout=5, backoff=60)
    bench.log.wait(1)
    bench.clock.advance(5_000)
    await_retry(bench.store)
    bench.gate.open()
    (runner,) = worker._runners
    until(lambda: not runner._hanging)
    assert topic.stats().pending == 1
    bench.clock.advance(60_000)
    bench.log.wait(2)
    assert worker.stop() == 0
    assert backlog(bench.store, "t") == 0


def test_an_attempt_whose_time_is_over_before_a_thread_takes_it_is_not_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that stood still its retry would run beside it."""
    taken = threading.Event()

    class Slow(queue.Queue[Any]):
        def get(self, *args: Any, **options: Any) -> Any:
            item = super().get(*args, **options)
            if item is not None and not taken.is_set():
                taken.set()
                bench.gate.stand()
            return item

    monkeypatch.setattr("duelog.workers.task_runner.queue.SimpleQueue", Slow)
    bench.store.topic("t").send_batch([Message(b"late"), Message(b"next")])
    worker = bench.run(bench.note, concurrency=1, timeout=5, retries=0)
    assert taken.wait(60)
    bench.clock.advance(5_000)
    bench.log.wait(1)
    bench.gate.open()
    (runner,) = worker._runners
    until(lambda: not runner._hanging)
    assert worker.stop() == 0
    assert bench.log.seen == [b"next"]
    assert [letter.payload for letter in bench.store.dead_letters()] == [b"late"]


def test_threads_that_hang_are_replaced_up_to_a_bound_and_run_again_when_they_return(bench: Bench) -> None:
    """With two slots, two are replaced, a third that hangs leaves one slot; once they return there are two again."""
    topic = bench.store.topic("t")
    together = threading.Barrier(2)

    def handle(message: ReceivedMessage) -> None:
        bench.log.add(message.payload)
        if message.payload == b"hangs":
            bench.gate.stand()
        elif message.payload == b"pair":
            together.wait(60)

    worker = bench.run(handle, concurrency=2, timeout=5, retries=0)
    (runner,) = worker._runners
    for count in (1, 2, 3):
        topic.send(b"hangs")
        bench.log.wait(count)
        bench.clock.advance(5_000)
        while len(list(bench.store.dead_letters())) < count:
            os.sched_yield()
    topic.send_batch([Message(b"single"), Message(b"single")])
    bench.log.wait(5)
    assert [attempt.stuck for attempt in runner._hanging.values()] == [False, False, True]
    bench.gate.open()
    until(lambda: not runner._hanging)
    topic.send_batch([Message(b"pair"), Message(b"pair")])
    bench.log.wait(7)
    assert worker.stop() == 0


def test_a_task_of_which_every_thread_hangs_ends_the_run_and_says_so(bench: Bench, tmp_path: Path) -> None:
    """One slot, one replacement: the second message that hangs ends it, and no message is lost."""
    with DelayedStore.open(tmp_path / "s", FIRING, clock=bench.clock) as store:
        store.topic("t").send_batch([Message(b"%d" % n) for n in range(3)])

        worker = Worker(store)
        worker.task("t", concurrency=1, timeout=5, backoff=60)(bench.gate.handler())
        errors: list[BaseException] = []

        def run_it() -> None:
            try:
                worker.run()
            except HandlersHang as error:
                errors.append(error)

        running = threading.Thread(target=run_it)
        running.start()
        for count in (1, 2):
            bench.log.wait(count)
            bench.clock.advance(5_000)
        running.join(60)
        (error,) = errors
        assert "2 threads hang in its function for more than 5 s" in str(error)
        assert backlog(store, "t") == 1
        assert store.topic("t").stats().pending == 2


@KINDS
def test_the_longest_running_handler_is_told_until_it_returns(bench: Bench, kind: str) -> None:
    """Also after it was given up; None where there is no worker, 0 where it runs nothing."""

    def longest() -> int | None:
        return bench.store.topic("t").subscription("worker").stats().longest_running_ms

    worker = bench.run(bench.gate.handler(kind), timeout=5 if kind == "function" else None)
    assert longest() == 0
    bench.store.topic("t").send(b"a")
    bench.log.wait(1)
    bench.clock.advance(2_000)
    bench.store.topic("t").send(b"b")
    bench.log.wait(2)
    bench.clock.advance(7_000)
    assert longest() == 9_000
    bench.gate.open()
    until(lambda: not longest())
    worker.stop()
    assert longest() is None


def test_a_task_tells_what_runs_what_failed_and_with_what_traceback(bench: Bench) -> None:
    """The longest running first; a failure has when it is tried again, or that it is a dead letter; five are kept."""

    def handle(message: ReceivedMessage) -> None:
        if message.payload.startswith(b"bad"):
            raise ValueError(message.payload.decode())
        bench.gate.handler()(message)

    subscription = bench.store.topic("t").subscription
    worker = bench.run(handle, retries=1, backoff=60)
    (idle,) = subscription("worker").tasks()
    assert (idle.worker, idle.task, idle.process, idle.running) == ("worker", handle.__qualname__, os.getpid(), 0)
    first = bench.store.topic("t").send(b"a")
    bench.log.wait(1)
    bench.clock.advance(2_000)
    bad = bench.store.topic("t").send(b"bad")
    await_retry(bench.store)
    until(lambda: subscription("worker").tasks()[0].failed)
    (task,) = subscription("worker").tasks()
    assert [(each.message_id, each.attempt, each.began_ms) for each in task.attempts] == [
        (first, 1, bench.clock.now_ms() - 2_000)
    ]
    (failure,) = task.failures
    assert (failure.message_id, failure.attempt, failure.reason) == (bad, 1, "ValueError: bad")
    assert failure.again_ms == failure.failed_ms + 60_000 == bench.clock.now_ms() + 60_000
    assert failure.traceback.startswith("Traceback")
    assert "raise ValueError(message.payload" in failure.traceback
    assert "task_runner" not in failure.traceback
    (retry,) = bench.store.topic("t").scheduled()
    assert (retry.addressee, retry.retries, retry.failure) == ("worker", 1, "ValueError: bad")
    assert [each.tasks for each in bench.store.receiving()] == [(replace(task, attempts=(), failures=()),)]
    for number in range(6):
        bench.store.topic("t").send(b"bad%d" % number)
    bench.clock.advance(61_000)
    until(lambda: subscription("worker").tasks()[0].failed >= 8)
    (task,) = subscription("worker").tasks()
    assert len(task.failures) == 5
    assert [each.again_ms for each in task.failures if each.reason == "ValueError: bad"] in ([], [None])
    bench.gate.open()
    worker.stop()
    assert subscription("worker").tasks() == []


BAD_TASKS: dict[str, list[Any]] = {
    "timeout": [0, -1, "1"], "concurrency": [0, True], "retries": [-1, 1.5], "backoff": [-1, "1"],
    "topic": ["a/b", "persistent://public/default/taken"], "subscription": [""],
}  # fmt: skip


def test_a_bad_task_or_worker_is_refused_by_its_field(tmp_path: Path, bench: Bench) -> None:
    """No store, no duration, settings for an open store, no task, started twice, a task while it runs."""
    worker = Worker(tmp_path / "s")
    worker.task("taken")(print)
    for field, values in BAD_TASKS.items():
        for value in values:
            with pytest.raises(InvalidArgument, match=f"^{field}="):
                worker.task(**{"topic": "t", field: value})(print)
    with pytest.raises(InvalidArgument, match=r"^function="):
        worker.task("t")(None)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match=r"^topic=<built-in function print>"):
        worker.task(print)  # type: ignore[arg-type]  # a decorator without its call: no task was made, and nothing said
    assert not (tmp_path / "s").exists()
    bad: Any
    for field, bad in (
        ("store", lambda: Worker(None)),  # type: ignore[arg-type]
        ("drain", lambda: Worker(bench.store, drain=-1)),
        ("config", lambda: Worker(bench.store, config=FIRING)),
        ("worker", lambda: Worker(bench.store).start()),
    ):
        with pytest.raises(InvalidArgument, match=f"^{field}="):
            bad()
    running = bench.run(print)
    with pytest.raises(InvalidArgument, match=r"^worker='worker'"):
        running.start()
    with pytest.raises(InvalidArgument, match=r"^task="):
        running.task("u")(print)


def test_a_start_that_fails_leaves_nothing_behind(bench: Bench) -> None:
    """A subscription of the second task is taken: the first one's is left, and the worker may be started later."""
    worker = Worker(bench.store)
    worker.task("a")(lambda message: None)
    worker.task("b")(lambda message: None)
    with bench.store.topic("b").subscribe("worker"), pytest.raises(Exception, match="exclusive"):
        worker.start()
    assert bench.store.topic("a").subscription("worker").stats().consumers == 0
    with worker:
        assert bench.store.topic("a").subscription("worker").stats().consumers == 1


def test_a_backoff_doubles_up_to_an_hour() -> None:
    """A longer one stays what it is; none is no wait."""

    def waits(backoff: Any) -> list[int | None]:
        task = Task(print, "t", "s", 1, None, backoff)
        return [task.backoff_ms(failed, ValueError()) for failed in (1, 2, 3, 1_000)]

    assert waits(0.5) == [500, 1_000, 2_000, LONGEST_BACKOFF_MS]
    assert waits(timedelta(days=1)) == [86_400_000] * 4
    assert waits(0) == [0] * 4


def test_a_reason_is_the_type_and_text_whatever_they_are(bench: Bench) -> None:
    """Also of an exception whose text raises, or is no UTF-8; long ones are cut."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert reason_of(ValueError("x")) == "ValueError: x"
    assert reason_of(ValueError()) == "ValueError"
    assert reason_of(StoreFull(Path("p"), "r")) == "duelog.store.errors.StoreFull: p: r"
    assert reason_of(Odd()).endswith("Odd: its text cannot be had")
    topic = bench.store.topic("t")
    topic.send_batch([Message(b"a"), Message(b"b")])
    with topic.subscribe("s") as consumer:
        for message, reason in zip(consumer.receive(2), ("\udcff", "y" * 5_000), strict=True):
            consumer.dead_letter(message, reason)
    assert [letter.reason for letter in bench.store.dead_letters()] == ["\\udcff", "y" * 1_000]


@KINDS
def test_a_message_is_done_with_the_transaction_that_its_handler_makes(bench: Bench, kind: str) -> None:
    """What it sends and remembers is stored with the acknowledgement; what is raised after that delivers it not again.

    A handler whose transaction conflicts has failed.
    """
    store, topic = bench.store, bench.store.topic("t")
    store.topic("timeouts").send(b"timeout", deliver_after=60, dedup_key="1")
    topic.send_batch([Message(b"1"), Message(b"2")])

    def fill(message: TaskMessage, transaction: Transaction) -> None:
        key = message.payload.decode()
        transaction.cancel_key("timeouts", key)
        transaction.send("next", message.payload, deliver_after=60)
        transaction.put_document(key, b"done")

    def function(message: TaskMessage) -> None:
        try:
            with message.transaction() as transaction:
                fill(message, transaction)
        finally:
            bench.log.add(message.payload)
        raise LookupError("after the transaction")

    async def coroutine(message: TaskMessage) -> None:
        try:
            async with message.transaction() as transaction:
                fill(message, transaction)
        finally:
            bench.log.add(message.payload)
        raise LookupError("after the transaction")

    handlers: dict[str, Callable[[TaskMessage], object]] = {"function": function, "coroutine": coroutine}
    worker = Worker(store)
    worker.task("t", retries=0)(handlers[kind])
    with worker:
        bench.log.wait(2)
    assert [each.payload for each in store.topic("next").scheduled()] == [b"1"]
    assert [key for key, _ in store.documents.items()] == ["1"]
    assert backlog(store, "t") == 0
    (letter,) = store.dead_letters()
    assert letter.payload == b"2"
    assert "TransactionConflict: nothing of the transaction is stored: cancel key '2'" in letter.reason
