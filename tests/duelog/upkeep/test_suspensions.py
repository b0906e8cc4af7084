"""Failures in the upkeep of a store are suspended, logged, and tried again after a pause; all else goes on."""

import errno
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, DuelogError, ManualClock, Message, StoreConfig, Subscription, Topic
from duelog.errors import BrokenInvariant, DamagedStore, ResourceShortage, StoreFailed
from duelog.markers.firing import saving
from duelog.markers.firing.loaded import ReadyQueue
from duelog.markers.firing.pending_log import PendingLog
from duelog.metrics import SUSPENDED, SUSPENDED_TIME
from duelog.store.files import pages
from duelog.store.log.managed_ledger import ManagedLedger
from tests.conftest import HOUR_MS, START_MS, OpenStore, applied, tick_after
from tests.duelog.store_state import payloads_of
from tests.duelog.upkeep.test_threads import LIMIT_S, WatchedManualClock, waiting

CONFIG = StoreConfig(partition_ms=HOUR_MS, preload_ms=0, max_open_partitions=1)
FULL_NAME = "persistent://public/default/"


def shortage() -> OSError:
    """The system's error when no descriptor is left."""
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@contextmanager
def failing(
    owner: Any,
    name: str,
    applies: Callable[[Any], bool] = lambda _: True,
    error: Callable[[], BaseException] = shortage,
) -> Iterator[None]:
    """Have a function raise within the block, where it is called with a first argument that `applies` takes."""
    original = getattr(owner, name)

    def raising(*arguments: Any, **named: Any) -> Any:
        if applies(arguments[0]):
            raise error()
        return original(*arguments, **named)

    with patch.object(owner, name, raising):
        yield


def of_topic(store: DelayedStore, name: str) -> Callable[[Any], bool]:
    """Return a test whether a log is the topic's."""
    topic_id = store._engine.topics.get(store.topic(name)._name).topic_id
    return lambda log: bool(log.topic_id == topic_id)


def send_each(store: DelayedStore, names: str) -> None:
    """Send a message that is due in a second to each topic, which has a subscription."""
    for name in names:
        store.topic(name).subscribe("s").close()
        store.topic(name).send(name.encode(), deliver_after=1)


def test_a_partition_that_cannot_be_opened_for_want_of_descriptors_is_suspended_and_others_are_fired(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """The hours after it are fired meanwhile; a second later it is opened again, and nothing is lost."""
    topic.subscribe("s").close()
    first_ms = START_MS - START_MS % HOUR_MS + HOUR_MS
    for hour in range(3):
        topic.send(b"%d" % hour, deliver_at=first_ms + hour * HOUR_MS + 1_000)
    applied(store)
    topic.send(b"3", deliver_at=first_ms + 1_000)
    clock.set(first_ms + 3 * HOUR_MS)
    damaged = next(iter(store._engine.storage.partitions)).path
    with failing(pages, "inspect", lambda directory: bool(directory == damaged)):
        result = store.tick()
    assert result.fired == 2
    assert [(found.task, found.partition_ms, found.failures) for found in result.suspended] == [
        ("load", first_ms, 1),
        ("apply", None, 1),  # what of the partition is in the write-ahead log stays there
    ]
    for suspended in result.suspended:
        assert isinstance(suspended.error, ResourceShortage)
        assert suspended.error.errno == errno.EMFILE
        assert result.next_due_ms == suspended.retry_ms == clock.now_ms() + 1_000
    assert store.tick().fired == 0
    result = tick_after(store, clock, 1_000)
    assert (result.fired, result.suspended) == (2, ())
    assert sorted(payloads_of(store, "t")) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("error", [shortage, MemoryError, lambda: RuntimeError("unforeseen")])
def test_a_log_that_cannot_be_fired_holds_up_no_other_topic_and_is_tried_again_with_growing_pauses(
    store: DelayedStore, clock: ManualClock, error: Callable[[], BaseException]
) -> None:
    """Three topics of one partition, one of which raises: the two others are fired, it is after 1, 2, 4 ... 30 s."""
    send_each(store, "abc")
    clock.advance(1_000)
    began_ms, pauses = clock.now_ms(), []
    with failing(PendingLog, "take", of_topic(store, "b"), error):
        assert store.tick().fired == 2
        assert payloads_of(store, "a", "c") == [b"a", b"c"]
        for failures in range(1, 8):
            (found,) = store.suspended()
            facts = (found.task, found.topic, found.since_ms, found.failures)
            assert facts == ("fire", FULL_NAME + "b", began_ms, failures)
            pauses.append(found.retry_ms - clock.now_ms())
            clock.set(found.retry_ms - 1)
            store.tick()
            assert store.suspended() == [found]
            assert tick_after(store, clock, 1).next_due_ms > clock.now_ms()  # type: ignore[operator]
    assert pauses == [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    assert (tick_after(store, clock, 30_000).fired, store.suspended()) == (1, [])
    assert payloads_of(store, "b") == [b"b"]


def test_a_main_log_that_cannot_be_written_holds_up_none_that_is_fired_with_it(
    store: DelayedStore, clock: ManualClock
) -> None:
    """One of five logs of a commit makes it fail: each is tried alone, and that one is suspended."""
    send_each(store, "abcde")
    damaged = functools.partial(DamagedStore, store.path, "a page of it cannot be read")
    clock.advance(1_000)
    refused = of_topic(store, "c")
    with failing(ManagedLedger, "append_markers", refused, damaged):
        result = store.tick()
        assert (result.fired, [found.topic for found in result.suspended]) == (4, [FULL_NAME + "c"])
        assert payloads_of(store, *"abcde") == [b"a", b"b", b"d", b"e"]
    assert tick_after(store, clock, 1_000).fired == 1
    assert payloads_of(store, *"abcde") == [b"c"]


def test_a_partition_with_a_suspended_log_is_not_closed_and_is_once_that_has_fired(
    store: DelayedStore, clock: ManualClock
) -> None:
    """Its end has passed and nothing of it is to be fired but that log: the tick ends, and says when to go on."""
    send_each(store, "ab")
    clock.advance(2 * HOUR_MS)
    with failing(PendingLog, "take", of_topic(store, "a")):
        result = store.tick()
    assert (result.fired, result.closed, result.next_due_ms) == (1, 0, clock.now_ms() + 1_000)
    result = tick_after(store, clock, 1_000)
    assert (result.fired, result.closed) == (1, 1)
    assert payloads_of(store, *"ab") == [b"a", b"b"]


def test_a_deleted_topic_is_not_suspended_any_more(store: DelayedStore, clock: ManualClock) -> None:
    """Nothing of it is tried again, and its partition closes."""
    store.topic("a").send(b"a", deliver_after=1)
    clock.advance(1_000)
    with failing(PendingLog, "take", of_topic(store, "a")):
        assert len(store.tick().suspended) == 1
        store.delete_topic("a")
        assert store.suspended() == []
        assert tick_after(store, clock, 2 * HOUR_MS).closed == 1


def test_one_schedule_that_fails_holds_up_no_other(store: DelayedStore, topic: Topic, clock: ManualClock) -> None:
    """The occurrences of the others go on, its own when it can be written again."""
    topic.subscribe("s").close()
    for name in "abc":
        topic.every(name, interval=60, payload=name.encode())
    with failing(store._engine.upkeep.recurring, "_advance", lambda key: bool(key[1] == "b")):
        result = tick_after(store, clock, 60_000)
        assert [(found.task, found.schedule) for found in result.suspended] == [("recur", "b")]
        assert result.next_due_ms == clock.now_ms() + 1_000
        tick_after(store, clock, 60_000)
    assert sorted(payloads_of(store, "t")) == [b"a", b"a", b"b", b"c", b"c"]
    for expected in ([b"a", b"c"], [b"a", b"b", b"c"]):  # the one that was missed does not come
        tick_after(store, clock, 60_000)
        assert sorted(payloads_of(store, "t")) == expected


def test_a_partition_that_cannot_be_removed_holds_up_no_other(open_store: OpenStore, clock: ManualClock) -> None:
    """One of two partitions that nothing refers to is removed now, the other a second later."""
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS, ledger_max_entries=1))
    topic = store.topic("t")
    topic.subscribe("s").close()
    topic.send_batch([Message(b"%d" % hour, deliver_after=3600 * hour) for hour in (1, 2)])
    first_ms = store.partitions()[0].start_ms
    refused = functools.partial(PermissionError, errno.EACCES, "Permission denied")
    clock.advance(4 * HOUR_MS)
    with failing(
        store._engine.upkeep.maintenance, "_delete_one", lambda each: bool(each.start_ms == first_ms), refused
    ):
        payloads_of(store, "t")
        tick_after(store, clock, 500)
        assert [(found.task, found.partition_ms) for found in store.suspended()] == [("delete", first_ms)]
        assert [partition.start_ms for partition in store.partitions()] == [first_ms]
    assert tick_after(store, clock, 1_000).deleted == 1
    assert store.partitions() == []


def test_a_snapshot_that_fails_for_another_reason_than_room_is_tried_again(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Its partition's snapshots are suspended, the tick ends, and the one that is tried a second later is written."""
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS, snapshot_every_entries=10))
    topic = store.topic("t")
    topic.subscribe("s").close()
    topic.send(b"first", deliver_after=1)
    tick_after(store, clock, 1_000)
    topic.send_batch([Message(b"%d" % number, deliver_after=60) for number in range(20)])
    with failing(saving, "write_snapshots"):
        assert [found.task for found in store.tick().suspended] == ["snapshot"]
    assert store.tick().snapshots == 0
    result = tick_after(store, clock, 1_000)
    assert (result.snapshots, result.suspended) == (1, ())


def test_a_partition_whose_unloading_breaks_off_costs_no_snapshot(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Its closing alone is suspended, and goes on a second later."""
    first_ms = START_MS - START_MS % HOUR_MS + HOUR_MS
    topic.subscribe("s").close()
    topic.send(b"m", deliver_at=first_ms)
    clock.set(first_ms - 1)
    store.tick()
    clock.set(first_ms + HOUR_MS)
    with failing(ReadyQueue, "discard", error=MemoryError):
        assert {each.task for each in store.tick().suspended} == {"close"}
    assert {each.task for each in store.tick().suspended} == {"close"}
    assert tick_after(store, clock, 1_000).suspended == ()


def test_what_is_suspended_is_in_stats_check_metrics_and_the_log(
    store: DelayedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each says what, why and since when; none does once it goes on."""
    store.topic("t").send(b"a", deliver_after=1)
    clock.advance(1_000)
    since_ms = clock.now_ms()
    with failing(PendingLog, "take"):
        store.tick()
    clock.advance(500)
    assert store.stats().suspended == tuple(store.suspended()) != ()
    (finding,) = store.check()
    assert (finding.code, finding.severity) == ("suspended", "error")
    assert "topic t," in finding.address
    assert f"since {since_ms}" in finding.message
    assert "Too many open files" in finding.message
    assert store._engine.metrics is not None
    counted, lasting = (store._engine.metrics.observe(name) for name in (SUSPENDED, SUSPENDED_TIME))
    assert [(each.value, each.attributes["duelog.task"]) for each in (*counted, *lasting) if each.attributes] == [
        (1, "fire"),
        (0.5, "fire"),
    ]
    (record,) = caplog.records
    assert (record.name, record.levelname, record.exc_info is not None) == ("duelog.maintenance", "ERROR", True)
    assert "Too many open files" in record.getMessage()
    tick_after(store, clock, 500)
    assert (store.stats().suspended, list(store.check()), store._engine.metrics.observe(SUSPENDED)) == ((), [], [])
    assert "goes on, after 1000 ms" in caplog.records[-1].getMessage()


def test_nothing_is_printed_where_logging_is_not_configured() -> None:
    """The logger of the library has a handler that drops each record."""
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("duelog").handlers)


@pytest.fixture
def watched() -> WatchedManualClock:
    """The clock of `threaded`, which counts the threads that wait by it."""
    return WatchedManualClock(START_MS)


@pytest.fixture
def threaded(open_store: OpenStore, watched: WatchedManualClock) -> DelayedStore:
    """A store with a background thread."""
    return open_store(config=StoreConfig(partition_ms=HOUR_MS, background=True), clock_=watched)


def in_next_tick(store: DelayedStore, error: BaseException) -> threading.Event:
    """Have the next tick raise where no part can be told; set once it has."""
    maintenance, raised = store._engine.upkeep.maintenance, threading.Event()
    original = maintenance._next_due_ms

    def raising(now_ms: int) -> int | None:
        if raised.is_set():
            return original(now_ms)
        raised.set()
        raise error

    maintenance._next_due_ms = raising  # type: ignore[method-assign]
    return raised


@pytest.mark.parametrize("error", [shortage(), MemoryError(), RuntimeError("unforeseen")])
def test_the_scheduler_outlives_an_error_of_any_kind(
    threaded: DelayedStore, watched: WatchedManualClock, error: Exception
) -> None:
    """A tick that fails as a whole is tried again a second later, and what is due is fired."""
    topic = threaded.topic("t")
    topic.subscribe("s").close()
    raised = in_next_tick(threaded, error)
    topic.send(b"a", deliver_after=1)
    assert raised.wait(LIMIT_S)
    with topic.subscribe("s") as consumer, ThreadPoolExecutor(1) as pool:
        while not threaded.suspended():  # the thread is about to say so
            assert raised.wait(LIMIT_S)
        assert [found.task for found in threaded.suspended()] == ["upkeep"]
        receiving = pool.submit(_patiently, consumer)
        while not receiving.done():
            watched.advance(1_000)
        assert receiving.result() == [b"a"]
    threaded.tick()  # the tick that fired it has ended then
    assert threaded.suspended() == []


def _patiently(consumer: Subscription) -> list[bytes]:
    """Receive, whatever is raised meanwhile."""
    while True:
        try:
            return [message.payload for message in consumer.receive(1)]
        except DuelogError:
            continue


@pytest.mark.parametrize(
    "error", [BrokenInvariant("memory is not what it should be"), AssertionError("what must be is not"), SystemExit(1)]
)
def test_an_error_after_which_nothing_can_go_on_is_raised_by_every_waiting_and_later_call(
    threaded: DelayedStore, watched: WatchedManualClock, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """A receiver that waits for ever is woken; it, a later receive, send and tick raise StoreFailed with the cause."""
    topic = threaded.topic("t")
    consumer = topic.subscribe("s")
    with waiting(consumer, watched) as received:
        in_next_tick(threaded, error)
        threaded._engine.waking.wakeups.wake()
        with pytest.raises(StoreFailed) as caught:
            received.result(LIMIT_S)
    assert caught.value.__cause__ is error
    for call in (consumer.receive, lambda: topic.send(b"a", deliver_after=1), threaded.tick):
        with pytest.raises(StoreFailed):
            call()
    (found,) = threaded.suspended()
    assert (found.task, found.since_ms, found.error) == ("store", START_MS, caught.value)
    threaded._engine.waking.scheduler._thread.join(LIMIT_S)  # type: ignore[union-attr]
    assert ("duelog.scheduler", "CRITICAL") in {(record.name, record.levelname) for record in caplog.records}
    threaded.close()


def test_a_receiver_is_woken_when_a_commit_of_another_thread_has_failed(
    threaded: DelayedStore, watched: WatchedManualClock
) -> None:
    """It waits for ever, and raises what the sender of a message without a delay was told."""
    topic = threaded.topic("t")
    topic.send(b"first", deliver_after=HOUR_MS)
    with waiting(topic.subscribe("s"), watched) as received:
        threaded._engine.storage.main.fail(OSError(errno.EIO, "Input/output error"))
        with pytest.raises(StoreFailed, match="Input/output error"):
            received.result(LIMIT_S)
    threaded.close()
