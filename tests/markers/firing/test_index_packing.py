"""Delay indexes of a store in use are packed by themselves, and nothing is lost, late or out of order by it."""

import threading
from unittest.mock import patch

import numpy as np
import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.markers.firing import loaded
from duelog.markers.firing.loaded import LoadedPartitions
from duelog.markers.firing.pending_log import PendingLog
from duelog.partitions.index import buckets
from tests.conftest import HOUR_MS, MINUTE_MS, START_MS, OpenStore
from tests.duelog.store_state import payloads
from tests.markers.firing.logs import new_log
from tests.partitions.packing_all import packed_in

CONFIG = StoreConfig(partition_ms=24 * HOUR_MS, durability="none")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten entries a bucket are worth it, and a slice is three buckets."""
    monkeypatch.setattr(buckets, "_PACKED_ENTRIES", 10)
    monkeypatch.setattr(buckets, "_PACKED_AT_ONCE", 3)


def send(store: DelayedStore, count: int, *, minutes: int = 20, topic: str = "t", seed: int = 1) -> list[int]:
    """So many messages due at random instants of some minutes from one hour on; when."""
    source = np.random.default_rng(seed)
    dues: list[int] = (START_MS + HOUR_MS + source.integers(0, minutes * MINUTE_MS, count)).tolist()
    store.topic(topic).send_batch([Message(b"%d" % due_ms, deliver_at=due_ms) for due_ms in dues])
    return dues


def logs_of(store: DelayedStore) -> list[PendingLog]:
    """All loaded logs."""
    return [log for logs in store._engine.delivery.firing.loaded.logs.values() for log in logs.values()]


def packed(store: DelayedStore) -> int:
    """How many buckets are packed."""
    return sum(len(packed_in(log._index)) for log in logs_of(store))


def test_a_tick_packs_what_has_come_in_when_it_is_enough(store: DelayedStore) -> None:
    """Ten entries a bucket and one more; the next time when half of the index is unpacked, and not before that."""
    send(store, 1, minutes=1)
    store.tick()  # the first minute is in the window from now on
    (log,) = logs_of(store)
    index = log._index
    rounds, last = [0], 0
    for count in range(800):
        send(store, 1, seed=count)
        packed_before, entries = index._buckets.packed, len(index) - len(index._window)
        unpacked_since = min(entries - packed_before, log.tail - last)
        worth = unpacked_since > max(10 * len(index._buckets), entries // 2)
        store.tick()
        assert (index._buckets.packed != packed_before) == worth
        if worth:
            assert packed(store) == len(index._buckets) - 1
            rounds.append(entries)
            last = log.tail
    assert len(rounds) > 3
    assert rounds[-1] > 1.5 * rounds[-2]


def test_what_is_loaded_by_replay_is_packed_at_once(store: DelayedStore) -> None:
    """A day that was sent to before it began, or a start without a snapshot."""
    send(store, 1_000)
    assert packed(store) == 0
    store.tick()
    (log,) = logs_of(store)
    assert packed(store) >= len(log._index._buckets) - 1 >= 19


def test_appends_while_it_is_packed_are_not_lost(store: DelayedStore, clock: ManualClock) -> None:
    """Two threads send while one packs buckets without a pause; all of it fires, in order."""
    first = send(store, 500)
    store.tick()
    (log,) = logs_of(store)
    stop = threading.Event()
    sent: list[list[int]] = [[], []]

    def append(mine: list[int], seed: int) -> None:
        while not stop.is_set() and len(mine) < 5_000:
            seed += 2
            mine += send(store, 50, seed=seed)

    threads = [threading.Thread(target=append, args=(mine, seed)) for seed, mine in enumerate(sent)]
    for thread in threads:
        thread.start()
    try:
        rounds = 0
        while not rounds or (rounds < 60 and any(thread.is_alive() for thread in threads)):
            rounds += not log.pack()
            assert log.cut() is not None
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    log._check()
    assert rounds
    assert packed(store) > 0
    clock.set(START_MS + 2 * HOUR_MS)
    with store.topic("t").subscribe("reader") as reader:
        found = [int(payload) for payload in payloads(reader, 100_000)]
    assert found == sorted(first + sent[0] + sent[1])


def test_what_is_due_is_fired_between_two_slices(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that takes many steps to pack makes nothing late: each slice of a tick fires first."""
    monkeypatch.setattr(loaded, "_PACK_SLICE_S", 0.0)
    monkeypatch.setattr(buckets, "_PACKED_AT_ONCE", 1)
    store = open_store(config=CONFIG)
    send(store, 1)
    store.tick()
    send(store, 2_000)
    counts = []
    for passed_ms in range(0, 9 * MINUTE_MS, 2 * MINUTE_MS):
        clock.set(START_MS + HOUR_MS + passed_ms)
        result, more = store._engine.slice()
        assert more
        assert store._engine.delivery.firing.loaded.is_worth_packing()
        counts.append(result.fired)
    assert counts[0] < 10
    assert all(count > 150 for count in counts[1:])
    assert packed(store) > 0
    store.tick()
    assert not store._engine.delivery.firing.loaded.is_worth_packing()


def test_the_thread_is_woken_to_pack(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is due for an hour and no snapshot for long: the entry that makes it worth it wakes the thread."""
    done = threading.Event()
    original = PendingLog.pack

    def pack(log: PendingLog) -> bool:
        more = original(log)
        if not more:
            done.set()
        return more

    monkeypatch.setattr(PendingLog, "pack", pack)
    store = open_store(config=StoreConfig(partition_ms=24 * HOUR_MS, durability="none", background=True))
    store.topic("t").send(b"first", deliver_at=START_MS + HOUR_MS - 1)
    store.tick()  # it is loaded, and what comes is due later: for that alone the thread would sleep on
    send(store, 500)
    assert done.wait(60)


def test_a_log_that_goes_is_forgotten(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting its topic or closing its partition in the middle leaves nothing of it to pack."""
    monkeypatch.setattr(loaded, "_PACK_SLICE_S", 0.0)
    store = open_store(config=CONFIG)
    for topic in ("a", "b"):
        send(store, 1, topic=topic)
    store.tick()
    for topic in ("a", "b"):
        send(store, 500, topic=topic)
    firing = store._engine.delivery.firing
    assert len(firing.loaded._to_pack) == 2
    store._engine.slice()
    store.delete_topic("a")
    assert len(firing.loaded._to_pack) == 1
    store._engine.slice()
    clock.advance(48 * HOUR_MS)
    with patch.object(LoadedPartitions, "pack", lambda self: None):
        while not store._engine.slice()[0].closed:
            pass
    assert not firing.loaded.is_worth_packing()


def test_a_log_that_is_being_loaded_is_left_alone() -> None:
    """Its index belongs to the thread that loads it, without the lock."""
    column = START_MS + np.arange(300) * MINUTE_MS // 30
    log = new_log(column, heard=False, loaded=False, bucket_ms=MINUTE_MS)
    log.restore(0, column)
    assert not log.is_worth_packing
    assert not log.pack()
    assert packed_in(log._index) == []
    log.finish_loading()
    assert log.is_worth_packing
    while log.pack():
        pass
    assert len(packed_in(log._index)) == len(log._index._buckets) - 1 >= 9
