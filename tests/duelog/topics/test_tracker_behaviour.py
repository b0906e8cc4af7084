"""Requirements of brokers on delay trackers, for both places of delayed messages: partitions and the main log."""

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Subscription, SystemClock, Topic
from duelog.markers.firing import loaded
from duelog.upkeep import maintenance
from tests.conftest import START_MS, OpenStore, present
from tests.duelog.store_state import payloads
from tests.model.driver import armed

LIMIT_S = 60.0
PARTITIONS = StoreConfig(partition_ms=1_000, ledger_max_entries=50, ack_flush_ms=10, bucket_ms=50, fire_batch=30)
INLINE = StoreConfig(partition_ms=1_000, ledger_max_entries=50, ack_flush_ms=10, inline_delay_ms=60_000)
BOTH = pytest.mark.parametrize("config", [PARTITIONS, INLINE], ids=["partitions", "inline"])


@BOTH
def test_an_earlier_message_re_arms_what_is_next(topic: Topic, reader: Subscription, clock: ManualClock) -> None:
    """The time to ask again moves forward with each nearer message, and back when it has been had."""
    for after_ms in (9_000, 5_000, 700):
        topic.send(b"%d" % after_ms, deliver_after=after_ms / 1_000)
        assert reader.poll() == ([], START_MS + after_ms)
    clock.advance(700)
    assert payloads(reader) == [b"700"]
    _, again_ms = reader.poll()
    assert again_ms is not None
    assert again_ms <= START_MS + 5_000


def test_a_cancelled_timer_does_not_fire(open_store: OpenStore, clock: ManualClock) -> None:
    """Once what it was set for is taken back, nothing is planned at its time, and nothing fires then."""
    store = open_store(config=PARTITIONS)
    topic = store.topic("t")
    topic.subscribe("s").close()
    near, far = topic.send(b"near", deliver_after=0.5), topic.send(b"far", deliver_after=0.9)
    assert store.tick().next_due_ms == START_MS + 500
    assert topic.cancel(near)
    assert store.tick().next_due_ms == START_MS + 900
    assert topic.reschedule(far, deliver_after=30) is not None
    planned_ms = present(store.tick().next_due_ms)
    assert planned_ms >= START_MS + 1_000, "nothing is left to do before the partition ends"
    clock.advance(950)
    assert store.tick().fired == 0


@BOTH
def test_a_busy_stream_of_far_messages_does_not_starve_a_near_one(open_store: OpenStore, config: StoreConfig) -> None:
    """By the machine's clock, with a thread that sends all the while: each of those wakes the timer."""
    store = open_store(config=config, clock_=SystemClock())
    topic = store.topic("t")
    reader = topic.subscribe("s")
    done = threading.Event()

    def stream() -> None:
        while not done.is_set():
            topic.send_batch([Message(b"far", deliver_after=50) for _ in range(20)])

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream)
        try:
            for number in range(5):
                topic.send(b"%d" % number, deliver_after=0.05)
                (message,) = reader.receive(timeout=LIMIT_S)
                assert message.payload == b"%d" % number
                assert store.clock.now_ms() - message.due_ms < 30_000
                reader.ack(message)
        finally:
            done.set()
        streaming.result(LIMIT_S)


@BOTH
@pytest.mark.parametrize("most", [1, 7, 1_000])
def test_five_hundred_at_one_instant_keep_the_order_they_were_sent_in(
    open_store: OpenStore, clock: ManualClock, config: StoreConfig, most: int
) -> None:
    """Sent alone and in batches, over a restart, received by any number: the order is that of sending."""
    store = open_store(config=config)
    due_ms = START_MS + 4_000
    names = [b"%d" % number for number in range(500)]
    for at in (0, 1, 2, 30, 250):
        limit = {0: 1, 1: 2, 2: 30, 30: 250, 250: 500}[at]
        store.topic("t").send_batch([Message(name, deliver_at=due_ms) for name in names[at:limit]])
    store.close()
    store = open_store(config=config)
    reader = store.topic("t").subscribe("s", type="shared")
    assert payloads(reader) == []
    clock.advance(4_000)
    got: list[bytes] = []
    while batch := payloads(reader, most):
        got += batch
    assert got == names


@pytest.mark.parametrize("slice_s", [0.0, 1e9])
def test_what_is_restored_and_heard_of_is_tracked_once(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, slice_s: float
) -> None:
    """Reopened in the middle of a partition, with a snapshot, a due column after it, and appends while it loads.

    However little of it a slow machine does in one slice.
    """
    monkeypatch.setattr(maintenance, "_SLICE_S", slice_s)
    monkeypatch.setattr(loaded, "_LOAD_SLICE_S", slice_s)
    config = StoreConfig(partition_ms=60_000, preload_ms=60_000, snapshot_every_entries=10, fire_batch=5)
    store = open_store(config=config)
    chance, sent = random.Random(7), 0
    for _ in range(4):
        topic = store.topic("t")
        topic.send_batch([Message(b"%d" % (sent + at), deliver_after=chance.randrange(1, 50)) for at in range(40)])
        sent += 40
        store.tick()
        topic.send(b"%d" % sent, deliver_after=chance.randrange(1, 50))
        sent += 1
        tracked = sum(len(log) for logs in store._engine.delivery.firing.loaded.logs.values() for log in logs.values())
        assert tracked == topic.stats().pending == sent
        store.close()
        store = open_store(config=config)
    reader = store.topic("t").subscribe("s")
    clock.advance(120_000)
    got: list[int] = []
    while batch := payloads(reader):  # each fires one slice
        got += map(int, batch)
    assert sorted(got) == list(range(sent))


@pytest.mark.parametrize("point", ["snapshot.part", "snapshot.meta", "fire.before", "trim.recorded", "close.before"])
@pytest.mark.parametrize("end", ["close", "clear", "unsubscribe"])
def test_close_clear_and_trim_race_with_loads_and_snapshots(
    open_store: OpenStore, clock: ManualClock, point: str, end: str
) -> None:
    """Another thread closes the store, deletes the topic or a subscription at any step of a tick: neither is hurt."""
    config = StoreConfig(
        partition_ms=10_000, preload_ms=0, ledger_max_entries=5, snapshot_every_entries=3, snapshot_part_bytes=1024
    )
    store = open_store(config=config)
    for name in ("t", "kept"):
        topic = store.topic(name)
        topic.subscribe("idle").close()
        reader = topic.subscribe("s")
        topic.send_batch([Message(b"%d" % number, deliver_after=number % 17) for number in range(60)])
        payloads(reader)
        reader.close()
    store.topic("t").unsubscribe("idle")
    others: list[Future[None]] = []

    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def act() -> None:
            begun.set()
            if end == "close":
                store.close()
            elif end == "clear":
                store.delete_topic("t")
            else:
                store.topic("kept").unsubscribe("idle")

        def meanwhile() -> None:
            if not others:
                others.append(pool.submit(act))
                assert begun.wait(LIMIT_S)

        with armed(point, meanwhile):
            for _ in range(4):
                if not store.closed:
                    clock.advance(3_000)
                    _tick_unless_closed(store)
        for other in others:
            other.result(LIMIT_S)
    store.close()
    store = open_store(config=config)
    assert store.topic("t").exists() == (end != "clear" or not others)
    clock.advance(40_000)
    got = [payload for _ in range(20) for payload in payloads(store.topic("kept").subscribe("s", type="shared"))]
    assert len(set(got)) == len(got) == 56, "all but the four that were due at once and acknowledged before"


def _tick_unless_closed(store: DelayedStore) -> None:
    try:
        store.tick()
    except Exception:
        if not store.closed:
            raise
