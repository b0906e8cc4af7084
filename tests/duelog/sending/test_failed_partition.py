"""Sends to a partition that cannot be written any more, and to the others: nothing that was acknowledged is lost."""

import shutil
from dataclasses import replace

import lmdb
import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Topic
from duelog.errors import DamagedStore, StoreFailed
from duelog.partitions.partition import Partition
from duelog.sending.wal_segments import CHECKPOINT_MS
from duelog.store.files import directory
from tests.conftest import HOUR_MS, START_MS, OpenStore, applied
from tests.duelog.store_state import payloads_after
from tests.store.commits import spy_on

CONFIG = StoreConfig(
    partition_ms=HOUR_MS, wal_bytes=1 << 17, max_message_bytes=10_000, max_clock_jump_ms=None, retention_ms=1 << 50
)
BAD_MS, GOOD_MS = START_MS + 10 * HOUR_MS, START_MS + 20 * HOUR_MS


@pytest.fixture(autouse=True)
def _always_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "LOOK_NS", 0)


@pytest.fixture
def bad(store: DelayedStore, topic: Topic) -> Partition:
    """A partition with an applied message, as another has one."""
    topic.send(b"bad", deliver_at=BAD_MS)
    topic.send(b"good", deliver_at=GOOD_MS)
    applied(store)
    return next(iter(store._engine.storage.partitions))


def fail(store: DelayedStore, partition: Partition) -> None:
    """Fail the partition, like a commit that the disk refused."""
    with store._engine.storage.partitions.lease(partition):
        partition.environment.fail(OSError(5, "Input/output error"))


def payloads(store: DelayedStore, clock: ManualClock) -> list[bytes]:
    """All that is there, in the end."""
    return sorted(each[-5:].lstrip(b"\0") for each in payloads_after(store, clock, 100 * HOUR_MS))


def test_a_partition_that_has_failed_refuses_sends_and_others_do_not(
    store: DelayedStore, topic: Topic, bad: Partition, open_store: OpenStore, clock: ManualClock
) -> None:
    """A batch that is for it too stores nothing; opened again, the store goes on with all there was."""
    topic.send(b"last", deliver_at=BAD_MS)
    fail(store, bad)
    for send in (
        lambda: topic.send(b"x", deliver_at=BAD_MS),
        lambda: topic.send_batch([Message(b"x", deliver_at=GOOD_MS), Message(b"x", deliver_at=BAD_MS)]),
        lambda: store.send_batch([("new", Message(b"x")), ("t", Message(b"x", deliver_at=BAD_MS))]),
    ):
        with pytest.raises(StoreFailed, match="Input/output error"):
            send()
    topic.send(b"other", deliver_at=GOOD_MS)
    topic.send(b"now")
    assert [partition.leases for partition in store._engine.storage.partitions] == [0, 0]
    store.close()
    assert payloads(open_store(config=CONFIG), clock) == [b"bad", b"good", b"last", b"now", b"other"]


def test_rows_whose_flush_the_disk_refused_as_a_partition_was_closed_stay_in_the_log(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Their commit may not be on disk; opened again in the same process, the partition had forgotten that."""
    store = open_store(config=replace(CONFIG, durability="relaxed"))
    topic = store.topic("t")
    topic.send(b"bad", deliver_at=BAD_MS)
    partitions = applied(store)._engine.storage.partitions
    bad = next(iter(partitions))
    topic.send(b"last", deliver_at=BAD_MS)
    with partitions.lease(bad, keep=False):
        bad.environment.apply()
        spy_on(bad.environment).fail_sync = lmdb.DiskError("mdb_env_sync: Input/output error")
    assert not bad.is_open
    for _ in range(2):
        with pytest.raises(StoreFailed, match="Input/output error"):
            topic.send(b"x", deliver_at=BAD_MS)
        with partitions.lease(bad):
            assert [message.payload for message in topic.scheduled()] == [b"bad", b"last"]
    needed = store._engine.writer().segments.oldest_segment()
    clock.advance(CHECKPOINT_MS)
    store.tick()
    assert [found.task for found in store.suspended()] == ["apply"]
    assert store._engine.writer().segments.oldest_segment() == needed
    store.close()
    assert payloads(open_store(config=CONFIG), clock) == [b"bad", b"last"]


def test_sends_stop_when_the_log_is_full_of_what_a_failed_partition_has_not_applied(
    store: DelayedStore, topic: Topic, bad: Partition, open_store: OpenStore, clock: ManualClock
) -> None:
    """Every send then raises what has failed, and none of those before it is lost."""
    topic.send(b"last", deliver_at=BAD_MS)
    fail(store, bad)
    sent: list[bytes] = []

    def send_on() -> None:
        for number in range(1_000):
            topic.send(bytes(1_000) + b"%d" % number, deliver_at=GOOD_MS + number)
            sent.append(b"%d" % number)

    with pytest.raises(StoreFailed, match="Input/output error"):
        send_on()
    assert 50 < len(sent) < 1_000
    store.close()
    assert payloads(open_store(config=CONFIG), clock) == sorted([b"bad", b"good", b"last", *sent])


def test_a_partition_whose_file_was_removed_is_noticed_when_it_is_applied(
    store: DelayedStore, topic: Topic, bad: Partition, clock: ManualClock
) -> None:
    """Until then its sends are in the log; from then on they are refused, and so is opening the store as it is."""
    shutil.rmtree(bad.path.parent)
    topic.send(b"x", deliver_at=BAD_MS)
    clock.advance(10_000)
    store.tick()
    assert [found.task for found in store.suspended()] == ["apply"]
    with pytest.raises(StoreFailed, match="removed"):
        topic.send(b"x", deliver_at=BAD_MS)
    topic.send(b"other", deliver_at=GOOD_MS)
    store.close()
    with pytest.raises(DamagedStore, match="missing"):
        DelayedStore.open(store.path, CONFIG, clock=clock)
