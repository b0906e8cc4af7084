"""Findings of the model test and its relatives in the engine, each as small as it gets."""

from collections.abc import Callable
from threading import Thread
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, Subscription, Topic
from duelog.cleanup.trim import unfinished
from duelog.errors import StoreFull
from duelog.partitions.partition import Partition, PartitionLog
from tests.conftest import OpenStore, tick_after
from tests.duelog.store_state import payloads
from tests.model.driver import Once, armed, full_disk, stalled_sender

CONFIG = StoreConfig(partition_ms=1_000, preload_ms=0, ledger_max_entries=1, ack_flush_ms=0)


def test_four_partitions_loaded_ahead_of_their_time_hold_up_no_earlier_one(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """With partitions shorter than `preload_ms`: the fifth, made last and due first, fires in time."""
    store = open_store(config=StoreConfig(partition_ms=1_000, preload_ms=60_000))
    topic = store.topic("t")
    for after_s in (10, 20, 30, 40):
        topic.send(b"", deliver_after=after_s)
    store.tick()
    topic.send(b"", deliver_after=1)
    assert store.tick().next_due_ms == clock.now_ms() + 1_000
    assert tick_after(store, clock, 1_000).fired == 1


def test_messages_of_a_deleted_topic_are_not_pending(store: DelayedStore) -> None:
    """They lie in their partition until it ends and are never delivered: no figure counts them as to come."""
    store.topic("gone").send(b"", deliver_at=store.clock.now_ms() + 60_000)
    store.topic("kept").send(b"", deliver_at=store.clock.now_ms() + 60_000)
    store.delete_topic("gone")
    assert [partition.pending for partition in store.partitions()] == [1]
    assert store.stats().pending == 1


@pytest.mark.parametrize("number", range(1, 9))
def test_what_a_full_disk_kept_a_tick_from_doing_the_next_one_does(
    store: DelayedStore, clock: ManualClock, number: int
) -> None:
    """Whichever write finds no room, the next tick fires, closes, trims, removes and deletes the rest."""
    for name in ("a", "b"):
        store.topic(name).send_batch([Message(b"", deliver_after=1), Message(b"", deliver_after=2)])
    clock.advance(10_000)
    with full_disk(store._engine, number), pytest.raises(StoreFull):
        store.tick()
    store.tick()
    assert store.partitions() == []
    assert list((store.path / "partitions").iterdir()) == []
    assert unfinished(store._engine.storage.main) == []
    assert [store.topic(name).stats().entries for name in ("a", "b")] == [0, 0]


def test_a_clock_set_back_after_a_failed_tick_is_not_believed(
    store: DelayedStore, topic: Topic, reader: Subscription, clock: ManualClock
) -> None:
    """One partition closes, closing the next finds no room, the clock goes back: what is closed stays past.

    Else a message for the closed partition would go into the main log as one that is due, before it is.
    """
    store.topic("gone").send_batch([Message(b"", deliver_after=1), Message(b"", deliver_after=2)])
    store.delete_topic("gone")  # so that two partitions are to be closed, and nothing is to be fired
    later_ms = clock.advance(10_000)
    fail = Once(2, lambda: _no_room(store.path))
    with armed("close.before", fail), pytest.raises(StoreFull):
        store.tick()
    assert fail.done
    clock.set(later_ms - 10_000)
    topic.send(b"", deliver_after=1)
    assert all(message.due_ms <= store.clock.now_ms() for message in reader.receive(10))
    assert store.clock.now_ms() == later_ms


def _no_room(path: object) -> None:
    raise StoreFull(path, "no room, says the test")  # type: ignore[arg-type]


@pytest.mark.parametrize("point", ["delete.recorded", "delete.moved", "delete.removed"])
def test_a_partition_is_not_made_anew_while_its_directory_is_removed(
    store: DelayedStore, topic: Topic, clock: ManualClock, point: str
) -> None:
    """A sender looks at the clock, and writes when the partition of its message is being deleted: it is delivered.

    The partition made anew in between lost its directory or its place in the catalog, and the message with it.
    """
    store.topic("other").send(b"", deliver_after=0.5)  # without a subscription: its partition goes when it ends
    reader = topic.subscribe("s")

    def meanwhile(write: Callable[[], list[MessageId]]) -> None:
        clock.advance(10_000)
        with armed(point, Once(1, write)):
            store.tick()

    with stalled_sender(store._engine, meanwhile):
        topic.send(b"late", deliver_after=0.6)
    assert [message.payload for message in reader.receive(10)] == [b"late"]


def test_a_partition_that_is_read_when_its_topic_is_deleted_goes_later(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """A listing that is read no further leases a partition; once it is dropped, the next tick deletes the directory."""
    store = open_store(config=StoreConfig(partition_ms=1_000, preload_ms=0))
    topic = store.topic("t")
    topic.subscribe("s")
    for after_ms in (500, 600):
        topic.send(b"", deliver_after=after_ms / 1000)
    listing = topic.scheduled()
    next(listing)
    tick_after(store, clock, 10_000)
    assert [partition.state for partition in store.partitions()] == ["closed"]
    store.delete_topic("t")
    del listing
    store.tick()
    assert store.partitions() == []
    assert list((store.path / "partitions").iterdir()) == []


def test_without_delay_between_flushes_every_acknowledgement_is_on_disk(
    store: DelayedStore, topic: Topic, reader: Subscription
) -> None:
    """`ack_flush_ms` 0: also the one right after a trim, which has left a cursor to be written by the next tick."""
    topic.send_batch([Message(b"1"), Message(b"2")])
    first, second = reader.receive(2)
    reader.ack(first)
    store.tick()
    reader.ack(second)
    assert store._engine.delivery.flusher.due_ms() is None


def test_a_log_made_while_check_reads_its_partition_is_no_finding(store: DelayedStore) -> None:
    """Whenever another thread or process makes a topic's log, its runs are not taken for those of no log."""
    due_ms = store.clock.now_ms() + 60_000
    store.topic("first").send(b"", deliver_at=due_ms)
    listed = Partition.logs
    made: list[object] = []

    def send() -> None:
        made.append(store.topic(f"late{len(made)}").send(b"", deliver_at=due_ms))

    def listed_before_another(partition: Partition) -> list[PartitionLog]:
        found = listed(partition)
        sender = Thread(target=send)
        sender.start()
        sender.join()
        return found

    with patch.object(Partition, "logs", listed_before_another):
        assert list(store.check()) == []
    assert made


def test_a_seek_by_time_finds_what_a_stalled_sender_closed_a_ledger_behind(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """A sender that looked at the clock long ago fills a ledger in which later messages lie: they are found."""
    store = open_store(config=StoreConfig(partition_ms=1_000, ledger_max_entries=2, ack_flush_ms=0, retention_ms=10**9))
    topic = store.topic("t")
    reader = topic.subscribe("s")

    def meanwhile(write: Callable[[], list[MessageId]]) -> None:
        topic.send(b"later", deliver_after=0.5)
        assert tick_after(store, clock, 600).fired == 1
        write()

    began_ms = clock.now_ms()
    with stalled_sender(store._engine, meanwhile):
        topic.send(b"stalled")
    reader.seek(began_ms + 300)
    assert b"later" in payloads(reader, 10)
