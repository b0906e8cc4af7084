"""Loading partitions: in order, in slices, ahead of their time, while others fire and producers append."""

import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.markers.firing import loaded as loaded_module
from duelog.partitions import due_column
from duelog.snapshot.snapshot_format import snapshot_keys
from duelog.store.codec.format import Table
from duelog.store.env.environment import Environment
from duelog.store.errors import DamagedStore
from tests.conftest import HOUR_MS, START_MS, OpenStore, applied, present
from tests.duelog.store_state import each_received

CONFIG = StoreConfig(partition_ms=HOUR_MS, durability="none", run_entries=10)
FIRST_MS = START_MS - START_MS % HOUR_MS + HOUR_MS
"""Where the first partition begins that has not begun."""


@pytest.fixture
def in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of `load` reads one run."""
    monkeypatch.setattr(loaded_module, "_LOAD_SLICE_S", 0.0)
    monkeypatch.setattr(due_column, "_RUNS_A_TRANSACTION", 1)


def send(store: DelayedStore, dues: list[int]) -> None:
    """A message for each due time."""
    store.topic("t").send_batch([Message(b"%d" % due_ms, deliver_at=due_ms) for due_ms in dues])


def loaded(store: DelayedStore) -> list[int]:
    """Which of the hours from FIRST_MS on are in memory, whole."""
    engine = store._engine
    starts = engine.delivery.firing.loaded.loaded_starts()
    whole = [start for start in starts if all(log.loaded for log in engine.delivery.firing.loaded.logs[start].values())]
    return [(start_ms - FIRST_MS) // HOUR_MS for start_ms in whole]


def test_messages_fire_between_the_slices_of_a_load(
    store: DelayedStore, clock: ManualClock, in_small_steps: None
) -> None:
    """While the next hour is read, what is due in this one goes into the main log on time."""
    clock.set(FIRST_MS)
    send(store, [FIRST_MS + HOUR_MS - 30_000 + at * 100 for at in range(100)])
    store.tick()
    send(store, [FIRST_MS + HOUR_MS + at for at in range(200)])
    applied(store)
    clock.set(FIRST_MS + HOUR_MS - 40_000)  # within preload_ms of the next hour
    fired = []
    more = True
    while more:
        clock.advance(1_000)
        result, more = store._engine.slice()
        fired.append(result.fired)
    assert loaded(store) == [0, 1]
    assert sum(count > 0 for count in fired[:-1]) > 5


def test_a_message_rescheduled_and_then_cancelled_while_its_partition_loads_never_fires(
    store: DelayedStore, clock: ManualClock, in_small_steps: None
) -> None:
    """Both are heard before the log fires: the cancellation is the last word."""
    ids = store.topic("t").send_batch([Message(b"m", deliver_at=FIRST_MS + 1_000 + at) for at in range(200)])
    clock.set(FIRST_MS)
    while not store._engine.delivery.firing.loaded.loaded_starts():
        store._engine.slice()
    assert loaded(store) == []
    moved = present(store.topic("t").reschedule(ids[0], deliver_at=FIRST_MS + 500))
    assert store.topic("t").cancel(moved)
    assert loaded(store) == []
    clock.advance(HOUR_MS // 2)
    with store.topic("t").subscribe("reader") as reader:
        received = [message.message_id for _ in range(3) for message in reader.receive(200)]
    assert len(received) == 199
    assert moved not in received


def test_partitions_that_have_begun_drain_in_due_order(open_store: OpenStore, clock: ManualClock) -> None:
    """After a long stop six hours have begun: their messages come in order of due time over all of them."""
    store = open_store(config=CONFIG)
    dues = np.random.default_rng(4).integers(FIRST_MS, FIRST_MS + 6 * HOUR_MS, 600).tolist()
    send(store, dues)
    store.close()
    clock.set(FIRST_MS + 7 * HOUR_MS)
    store = open_store(config=CONFIG)
    with store.topic("t").subscribe("reader") as reader:
        received = [message.due_ms for message in each_received(reader)]
    assert received == sorted(dues)


def test_receive_delivers_while_later_partitions_still_load(
    open_store: OpenStore, clock: ManualClock, in_small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first messages after a long stop are handed out before all that has begun is in memory."""
    monkeypatch.setattr("duelog.upkeep.maintenance._SLICE_S", 0.0)
    store = open_store(config=CONFIG)
    send(store, [FIRST_MS + hour * HOUR_MS + at for hour in range(3) for at in range(200)])
    store.close()
    clock.set(FIRST_MS + 4 * HOUR_MS)
    store = open_store(config=CONFIG)
    with store.topic("t").subscribe("reader") as reader:
        assert reader.receive(1)[0].due_ms == FIRST_MS
        assert loaded(store) == [0]


def test_a_partition_before_those_in_memory_is_loaded_at_once(open_store: OpenStore, clock: ManualClock) -> None:
    """Four hours are preloaded; a message for an hour before them makes a fifth, and is not late."""
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS, preload_ms=24 * HOUR_MS))
    send(store, [FIRST_MS + hour * HOUR_MS for hour in range(1, 7)])
    store.tick()
    assert loaded(store) == [1, 2, 3, 4]
    send(store, [FIRST_MS + 1])
    clock.set(FIRST_MS + 1)
    assert store.tick().fired == 1


def test_a_new_partition_that_has_begun_wakes_the_thread(clock: ManualClock, open_store: OpenStore) -> None:
    """Nothing was planned when the first message came: it is fired all the same when its time comes."""
    store = open_store(config=StoreConfig(background=True))
    planned = threading.Event()
    firing = store._engine.delivery.firing
    original = firing.next_due_ms

    def next_due_ms() -> int | None:
        due_ms = original()
        if due_ms is not None:
            planned.set()
        return due_ms

    firing.next_due_ms = next_due_ms  # type: ignore[method-assign]
    with store.topic("t").subscribe("reader") as reader:
        store.topic("t").send(b"soon", deliver_after=1)
        assert planned.wait(20)
        clock.advance(1_000)
        assert [message.payload for message in reader.receive(1, timeout=20)] == [b"soon"]


def without_run(store: DelayedStore, which: int) -> None:
    """Close the store, and have its one partition lose a run, as if no page had it."""
    store.close()
    (path,) = store.path.glob("partitions/*/*")
    with closing(Environment(path, name="partition")) as environment:
        with environment.read() as raw, raw.cursor() as cursor:
            keys = [bytes(key) for key in cursor.iternext(values=False) if key[0] == Table.RUN]
        environment.commit(lambda transaction: transaction.raw.delete(keys[which]))


def test_a_log_that_ends_before_its_snapshot_does_not_fire(tmp_path: Path, clock: ManualClock) -> None:
    """Its last entries are gone: their ids are not given out again, and its partition does not close."""
    config = replace(CONFIG, snapshot_every_entries=10)
    store = DelayedStore.open(tmp_path / "store", config, clock=clock)
    clock.set(FIRST_MS)
    send(store, [FIRST_MS + 1_000 + at for at in range(100)])
    store.tick()
    without_run(store, -1)
    clock.advance(3 * HOUR_MS)
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as again:
        for _ in range(3):
            with suppress(DamagedStore):
                assert again.tick().fired == 0
        assert [found.code for found in again.check()].count("lost-entries") == 1
        assert [row.state for row in again.partitions()] != ["closed"]


def test_entries_that_are_missing_between_others_are_set_aside(tmp_path: Path, clock: ManualClock) -> None:
    """Without a snapshot nothing else would know of them; the others fire, and the partition is kept."""
    store = DelayedStore.open(tmp_path / "store", CONFIG, clock=clock)
    store.topic("t").subscribe("reader").close()
    send(store, [FIRST_MS + 1_000 + at for at in range(100)])
    without_run(store, 4)
    clock.set(FIRST_MS + 2 * HOUR_MS)
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as again:
        assert again.tick().fired == 90
        assert again.stats().set_aside == 1
        with again.topic("t").subscribe("reader") as reader:
            assert reader.ack(reader.receive(200)) == 90
        clock.advance(1_000 * HOUR_MS)
        again.tick()
        assert len(again.partitions()) == 1
        found = [finding for finding in again.check() if finding.code == "set-aside"]
        assert "entries 40 to 49 are missing" in found[0].message


@pytest.mark.parametrize("part", [0, -1])
def test_a_damaged_snapshot_costs_no_message(
    open_store: OpenStore, clock: ManualClock, in_small_steps: None, part: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A part does not match its checksum: that is logged, the index is rebuilt from the due column, each comes once."""
    config = replace(CONFIG, snapshot_every_entries=100, snapshot_part_bytes=1_024)
    clock.set(FIRST_MS)
    store = open_store(config=config)
    store.topic("t").subscribe("reader").close()
    dues = [FIRST_MS + 1_000 + at * 1_000 for at in np.random.default_rng(3).permutation(1_000).tolist()]
    send(store, dues)
    store.tick()
    store.close()
    (path,) = store.path.glob("partitions/*/*")
    with closing(Environment(path, name="partition")) as environment:
        with environment.read() as raw:
            keys = [key for key, _ in snapshot_keys(raw, Table.SNAPSHOT_PART)]
            value = bytearray(raw.get(keys[part]) or b"")
        value[len(value) // 2] ^= 0x10
        environment.commit(lambda transaction: transaction.raw.put(keys[part], bytes(value)))
    assert len(keys) > 1
    store = open_store(config=config)
    clock.set(FIRST_MS + HOUR_MS // 2)
    with store.topic("t").subscribe("reader") as reader:
        received = [message.due_ms for message in each_received(reader)]
    assert received == sorted(dues)
    (record,) = [each for each in caplog.records if "is refused" in each.getMessage()]
    assert (record.name, record.levelname) == ("duelog.maintenance", "WARNING")
    assert f"{path}: snapshot " in record.getMessage()
    assert "checksum" in record.getMessage()
