"""The file of a partition that begins is prefetched: in bounded steps, and nothing of it is dropped any more."""

from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.markers.firing import loaded
from duelog.markers.firing.pending_log import PendingLog
from duelog.snapshot import restore
from duelog.store.env import environment as environment_module
from duelog.store.env import page_cache
from tests.conftest import HOUR_MS, START_MS, OpenStore, applied, present
from tests.duelog.store_state import payloads
from tests.store.page_cache_calls import DROP, FETCH, Calls, joined, record

PIECE = 64 << 10
CONFIG = StoreConfig(partition_ms=HOUR_MS, preload_ms=60_000)
NEXT_MS = START_MS - START_MS % HOUR_MS + HOUR_MS
"""Start of the first partition that has not begun."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(page_cache, "KEPT_BYTES", PIECE)
    monkeypatch.setattr(environment_module, "COMMITS_A_LOOK", 1)
    monkeypatch.setattr(page_cache, "_READ_BYTES", PIECE // 4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The ranges that the kernel is asked for."""
    return record(monkeypatch)


def send(store: DelayedStore, due_ms: int, batches: int = 30) -> list[bytes]:
    """Batches of messages of 1 KiB due from an instant on, each applied; their payloads, in order of due time."""
    payloads = [b"%015d" % number + bytes(1_009) for number in range(20 * batches)]
    for at in range(0, len(payloads), 20):
        some = payloads[at : at + 20]
        store.topic("t").send_payloads(some, deliver_at=[due_ms + at + place for place in range(len(some))])
        applied(store)
    return payloads


def data_file(store: DelayedStore, start_ms: int) -> Path:
    """The file of a partition."""
    partition = present(store._engine.storage.partitions.get(start_ms))
    return partition.path / "data.mdb"


def receive_all(store: DelayedStore) -> list[bytes]:
    """All that is due, by one subscription."""
    with store.topic("t").subscribe("reader") as reader:
        return payloads(reader, 10_000)


def test_a_day_to_come_is_dropped_and_prefetched_when_it_begins(
    store: DelayedStore, clock: ManualClock, calls: Calls
) -> None:
    """Its file alone, up to where it is kept; from the minute before it begins on nothing of it is dropped."""
    with store.topic("t").subscribe("reader"):
        pass
    for number in range(20):
        store.topic("t").send(b"due" * 10_000 + b"%d" % number)  # into the main log
    today = send(store, NEXT_MS - 1_000)
    tomorrow = send(store, NEXT_MS)
    store.tick()
    file = data_file(store, NEXT_MS)
    dropped = calls.ranges(file, DROP)
    assert [call for call in calls if call.advice == DROP and call.inode != file.stat().st_ino] == []
    (_, end) = joined(dropped)
    assert end > file.stat().st_size / 2
    assert calls.ranges(file, FETCH) == []
    clock.set(NEXT_MS - CONFIG.preload_ms)
    store.tick()
    assert joined(calls.ranges(file, FETCH)) == (0, file.stat().st_size)
    tomorrow += send(store, NEXT_MS + 10_000)
    assert calls.ranges(file, DROP) == dropped
    clock.set(NEXT_MS + HOUR_MS)
    found = receive_all(store)
    assert [payload for payload in found if not payload.startswith(b"due")] == today + tomorrow
    assert len(found) == 20 + len(today + tomorrow)


def test_a_day_that_has_begun_is_not_dropped_though_it_is_not_loaded(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn comes when an earlier one closes; and a store just opened loads nothing before its first tick."""
    monkeypatch.setattr(loaded, "LOADED_AT_ONCE", 0)
    store = open_store(config=CONFIG)
    clock.set(NEXT_MS - CONFIG.preload_ms)
    send(store, NEXT_MS)
    assert store._engine.delivery.firing.loaded.loaded_starts() == []
    assert calls == []
    send(store, NEXT_MS + HOUR_MS)
    assert calls.ranges(data_file(store, NEXT_MS + HOUR_MS), DROP)


def test_an_environment_that_is_opened_again_is_told_again_to_keep(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that has begun and waits for its turn may be closed and opened in between."""
    monkeypatch.setattr(loaded, "LOADED_AT_ONCE", 0)
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS, max_open_partitions=1))
    clock.set(NEXT_MS)
    send(store, NEXT_MS + 1_000)
    partition = present(store._engine.storage.partitions.get(NEXT_MS))
    send(store, NEXT_MS + HOUR_MS, 1)
    store.tick()
    assert not partition.is_open
    send(store, NEXT_MS + 1_000)
    assert calls == []


def test_a_replay_reads_a_file_that_has_been_prefetched_and_a_snapshot_does_not_wait_for_it(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay would wait for the disk at each run; what a snapshot restores fires before the rest is asked for."""
    found: list[str] = []

    def note(owner: object, function: str) -> None:
        original = getattr(owner, function)

        def noting(*args: Any, **kwargs: Any) -> Any:
            if found[-1:] != [function]:
                found.append(function)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, function, noting)

    note(page_cache, "_advise")
    note(restore, "read_part")
    note(PendingLog, "restore")
    note(PendingLog, "finish_loading")
    config = StoreConfig(partition_ms=HOUR_MS, preload_ms=60_000, snapshot_every_entries=50)
    store = open_store(config=config)
    send(store, NEXT_MS)
    store.close()
    clock.set(NEXT_MS)
    for steps in (["_advise", "restore", "finish_loading"], ["read_part", "finish_loading", "_advise"]):
        store = open_store(config=config)
        calls.clear()
        found.clear()
        store.tick()
        assert found == steps
        file = data_file(store, NEXT_MS)
        assert joined(calls.ranges(file, FETCH))[1] > file.stat().st_size - 2 * PIECE
        store.close()


def test_what_is_due_is_fired_between_two_steps(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that takes many slices makes nothing late."""
    config = StoreConfig(partition_ms=HOUR_MS, snapshot_every_entries=50)
    store = open_store(config=config)
    clock.set(NEXT_MS)
    send(store, NEXT_MS + 1_000)
    store.tick()
    store.close()
    store = open_store(config=config)
    calls.clear()
    monkeypatch.setattr(loaded, "_LOAD_SLICE_S", 0.0)
    monkeypatch.setattr("duelog.upkeep.maintenance._SLICE_S", 0.0)
    now = iter(range(1_000_000))
    monkeypatch.setattr("duelog.store.env.page_cache.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("duelog.markers.firing.loaded._LOAD_SLICE_S", 0.02)
    while not calls:
        store._engine.slice()
    counts = []
    for passed_ms in (150, 300, 450):
        clock.set(NEXT_MS + 1_000 + passed_ms)
        before = len(calls)
        result, more = store._engine.slice()
        assert more
        assert len(calls) <= before + 1
        counts.append(result.fired)
    assert counts == [151, 150, 150]
