"""When snapshots are written and removed."""

import threading
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.markers.firing import saving
from duelog.markers.firing.pending_log import PendingLog
from duelog.snapshot.snapshot_format import SnapshotInfo, inspect_snapshots
from duelog.snapshot.writer import remove_snapshots, write_snapshots
from duelog.store.env.environment import Environment
from duelog.store.errors import StoreFull
from duelog.store.files import failpoints
from tests.conftest import HOUR_MS, START_MS, OpenStore, present, tick_after

pytestmark = pytest.mark.usefixtures("disarmed")

CONFIG = StoreConfig(partition_ms=24 * HOUR_MS, snapshot_every_entries=1_000, durability="none")


def send(store: DelayedStore, count: int, topic: str = "t", after_ms: int = HOUR_MS) -> None:
    """So many messages due later today."""
    due_ms = store.clock.now_ms() + after_ms
    store.topic(topic).send_batch([Message(b"m", deliver_at=due_ms + at) for at in range(count)])


def environment_of(store: DelayedStore) -> Environment:
    """The environment of the first partition; it is open."""
    partition = next(iter(store._engine.storage.partitions))
    store._engine.storage.partitions.acquire(partition)
    return partition.environment


def snapshots(store: DelayedStore) -> list[SnapshotInfo]:
    """All snapshots of the first partition."""
    return list(inspect_snapshots(environment_of(store), read_parts=True))


def test_a_snapshot_is_written_after_so_many_entries(store: DelayedStore) -> None:
    """One at the thousandth entry appended to a begun partition, and the next a thousand later."""
    send(store, 1)
    store.tick()
    send(store, 998)
    assert store.tick().snapshots == 0
    send(store, 1)
    assert store.tick().snapshots == 1
    (first,) = snapshots(store)
    assert present(first.metadata).tail == 1_000
    send(store, 999)
    assert store.tick().snapshots == 0
    send(store, 1)
    assert store.tick().snapshots == 1
    assert [info.snapshot_id for info in snapshots(store)] == [first.snapshot_id + 1]


def test_the_entries_of_all_topics_count_and_the_longest_tails_are_saved(store: DelayedStore) -> None:
    """A partition counts by the sum of its replays; little logs wait until they matter."""
    for count, topic in ((300, "a"), (10, "b"), (700, "c")):
        send(store, count, topic)
    assert store.tick().snapshots == 2
    assert sorted(info.metadata.tail for info in snapshots(store) if info.metadata) == [300, 700]


def test_loading_what_took_long_to_replay_writes_a_snapshot(open_store: OpenStore, clock: ManualClock) -> None:
    """A partition that was sent to before it began is saved once it is in memory; a little one is not."""
    store = open_store(config=CONFIG)
    send(store, 100, after_ms=24 * HOUR_MS)
    assert store.tick().snapshots == 0
    assert tick_after(store, clock, 20 * HOUR_MS).snapshots == 1
    other = open_store(store.path.parent / "other", CONFIG)
    send(other, 99, after_ms=24 * HOUR_MS)
    clock.advance(24 * HOUR_MS)
    assert other.tick().snapshots == 0


def test_closing_saves_what_is_worth_it(open_store: OpenStore) -> None:
    """A tenth of `snapshot_every_entries` is; after it the next start replays nothing and saves nothing."""
    store = open_store(config=CONFIG)
    send(store, 100)
    store.tick()
    store.close()
    store = open_store(config=CONFIG)
    assert store.tick().snapshots == 0
    (info,) = snapshots(store)
    assert present(info.metadata).tail == 100
    (log,) = (log for logs in store._engine.delivery.firing.loaded.logs.values() for log in logs.values())
    assert (log.unsaved, len(log)) == (0, 100)


def test_closing_a_store_with_little_to_replay_saves_nothing(open_store: OpenStore) -> None:
    """99 entries are replayed in no time."""
    store = open_store(config=CONFIG)
    send(store, 99)
    store.tick()
    store.close()
    store = open_store(config=CONFIG)
    assert (store.tick().snapshots, snapshots(store)) == (0, [])


def test_snapshots_go_before_their_partition_is_closed(store: DelayedStore, clock: ManualClock) -> None:
    """A closed partition, held by what is not acknowledged, has none; nor had it when its closing was recorded."""
    store.topic("t").subscribe("reader").close()
    send(store, 1_000)
    assert store.tick().snapshots == 1
    found: list[int] = []
    failpoints.arm("close.before", lambda: found.append(len(snapshots(store))))
    assert tick_after(store, clock, 36 * HOUR_MS).closed == 1
    assert found == [0]
    assert snapshots(store) == []


def test_a_partition_closes_in_the_middle_of_its_snapshot(open_store: OpenStore, clock: ManualClock) -> None:
    """The snapshot is given up, and its parts go with the others."""
    store = open_store(config=StoreConfig(partition_ms=24 * HOUR_MS, snapshot_every_entries=1_000,
                                          snapshot_part_bytes=1_024, bucket_ms=1_000))  # fmt: skip
    store.topic("t").subscribe("reader").close()
    store.topic("t").send_batch([Message(b"m", deliver_at=START_MS + HOUR_MS + at * 1_000) for at in range(1_000)])
    while not store._engine.delivery.firing.loaded.saving.is_due():
        store._engine.slice()
    store._engine.slice()
    assert [info.state.value for info in snapshots(store)] == ["torn"]
    assert tick_after(store, clock, 36 * HOUR_MS).closed == 1
    assert snapshots(store) == []


def test_a_full_disk_costs_the_snapshot_and_nothing_else(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tick goes on, and it is tried again a tenth of `snapshot_every_entries` later; the log has a warning."""
    full = True
    original = write_snapshots

    def write(*arguments: Any) -> Any:
        if full:
            raise StoreFull(store.path, "no room")
        return original(*arguments)

    monkeypatch.setattr(saving, "write_snapshots", write)
    send(store, 1_000)
    assert store.tick().snapshots == 0
    assert [(each.levelname, "no room" in each.getMessage()) for each in caplog.records] == [("WARNING", True)]
    full = False
    send(store, 99)
    assert store.tick().snapshots == 0
    send(store, 1)
    assert store.tick().snapshots == 1


def test_the_thread_is_woken_for_a_snapshot(open_store: OpenStore) -> None:
    """Nothing is due for an hour, and the thousandth entry is enough to wake it."""
    written = threading.Event()
    failpoints.arm("snapshot.meta", written.set)
    store = open_store(config=StoreConfig(partition_ms=24 * HOUR_MS, snapshot_every_entries=1_000, background=True))
    send(store, 500)
    send(store, 500)
    assert written.wait(60)


def test_the_next_start_reads_no_more_than_the_tail(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a snapshot only what was appended since is replayed; without, everything."""
    store = open_store(config=CONFIG)
    send(store, 1_000)
    assert store.tick().snapshots == 1
    send(store, 50)
    store.close()
    replayed: list[int] = []
    original = PendingLog.restore

    def restore(log: PendingLog, first_entry: int, dues: Any) -> None:
        replayed.append(len(dues))
        original(log, first_entry, dues)

    monkeypatch.setattr(PendingLog, "restore", restore)
    store = open_store(config=CONFIG)
    store.tick()
    assert sum(replayed) == 50
    remove_snapshots(environment_of(store))
    store.close()
    replayed.clear()
    store = open_store(config=CONFIG)
    store.tick()
    assert sum(replayed) == 1_050
