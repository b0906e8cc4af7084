"""Durability "relaxed": nothing is on disk before what it follows, so that a power cut takes the last alone.

The power cuts found each of these out; here is the order itself, without a disk that forgets.
"""

import threading
from dataclasses import replace

import pytest

from duelog import DelayedStore, ManualClock, Message
from duelog.store.env.environment import Environment
from duelog.store.files import failpoints
from duelog.store.wal import segment
from tests.cleanup.compacting import close_day, finish, send_day
from tests.conftest import DAY_MS, HOUR_MS, OpenStore, tick_after
from tests.disaster.wal_faults import CONFIG, Sent

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("disarmed")]

RELAXED = replace(CONFIG, durability="relaxed")


@pytest.fixture
def sent(open_store: OpenStore) -> Sent:
    """A store with durability "relaxed" whose write-ahead log holds something."""
    return Sent(open_store(config=RELAXED))


def unsynced_at(point: str, environment: Environment) -> list[bool]:
    """A list that gets True each time a point is reached while the last commit of an environment may not be on disk."""
    found: list[bool] = []
    failpoints.arm(point, lambda: found.append(environment._unsynced))
    return found


def test_a_segment_is_released_after_a_sync_of_what_another_commit_applied(sent: Sent) -> None:
    """A checkpoint has nothing to apply to a partition that has committed, and the commit is not on disk yet."""
    environment = sent.environment(2)
    environment.commit(lambda transaction: None)
    assert not environment.has_unapplied
    assert environment._unsynced
    found = unsynced_at("wal.applied", environment)
    sent.store._engine.writer().apply_all()
    assert found == [False]


def test_a_segment_is_not_closed_while_a_commit_flushes_it(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit's flush of the log would fail on a closed file, and the store with it."""
    writer = sent.store._engine.writer()
    ended, failed = threading.Event(), list[BaseException]()
    failpoints.arm("wal.ended", ended.set)

    def go_on() -> None:
        try:
            writer.apply_all()
        except Exception as error:
            failed.append(error)

    going_on = threading.Thread(target=go_on)
    flush = segment.Segment.flush

    def flush_beside(self: segment.Segment) -> None:
        if going_on.ident is None:
            going_on.start()
            assert not ended.wait(0.3), "the segment was closed"
        flush(self)

    monkeypatch.setattr(segment.Segment, "flush", flush_beside)
    sent.send("is not flushed", 2)
    writer.segments.sync()
    going_on.join()
    assert ended.is_set()
    assert not failed


def test_a_snapshot_has_no_cancellation_that_a_power_cut_could_take_back(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Else a message that is moved is in neither: the move is undone, and the snapshot has it as cancelled."""
    store = open_store(config=replace(RELAXED, snapshot_every_entries=10))
    topic = store.topic("t")
    ids = topic.send_batch([Message(b"x", deliver_after=60 + each) for each in range(20)])
    store.tick()
    assert topic.reschedule(ids[0], deliver_after=30) is not None
    segments, found = store._engine.writer().segments, list[bool]()
    assert not segments._is_flushed
    failpoints.arm("commit.before", lambda: found.append(segments._is_flushed))
    assert store.save_snapshots() == 1
    assert found
    assert all(found)


def flushed_at(point: str, store: DelayedStore) -> list[bool]:
    """A list that gets, each time a point is reached, whether every group of the log is on disk by then."""
    segments, found = store._engine.writer().segments, list[bool]()
    failpoints.arm(point, lambda: found.append(segments._is_flushed))
    return found


def test_a_partition_is_moved_to_the_trash_once_its_deletion_is_on_disk(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Else a power cut leaves a partition that the catalog has, and no directory of it: the store does not open."""
    store = open_store(config=replace(RELAXED, ledger_max_entries=1))
    with store.topic("t").subscribe("s") as subscription:
        store.topic("t").send(b"x", deliver_after=1)
        tick_after(store, clock, 1_000)
        subscription.ack(subscription.receive(1), durable=True)
    recorded, moved = flushed_at("delete.recorded", store), flushed_at("delete.moved", store)
    clock.advance(10 * HOUR_MS)
    store.topic("t").send(b"flushed, as the last flush was long ago")
    store.tick()
    assert (recorded, moved) == ([False], [True])


def test_a_generation_goes_once_the_adoption_of_the_next_is_on_disk(open_store: OpenStore, clock: ManualClock) -> None:
    """Else a power cut leaves a catalog that names the one that is gone."""
    store = open_store(config=replace(RELAXED, partition_ms=DAY_MS))
    store.topic("b").subscribe("s").close()
    with store.topic("t").subscribe("s") as subscription:
        send_day(store, "t", 5)
        send_day(store, "b", 5)
        close_day(store, clock)
        subscription.ack(subscription.receive(3), durable=True)
    finish(store)
    clock.advance(10 * HOUR_MS)
    store.topic("t").send(b"flushed, as the last flush was long ago")
    adopted = flushed_at("compact.adopted", store)
    store.tick()
    assert adopted == [True]
