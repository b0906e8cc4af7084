"""What the exception sweep found (tests/disaster/exception_sweep.py), one by one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.cleanup import deletion
from duelog.delivery.outstanding import Outstanding
from duelog.delivery.read_ahead import ReadAhead
from duelog.markers.firing.pending_log import PendingLog
from duelog.partitions import partition_set
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.env.environment import Environment
from duelog.topics.ack_flusher import AckFlusher
from tests.conftest import START_MS, OpenStore

SPAN_MS = 60_000
CONFIG = StoreConfig(partition_ms=SPAN_MS, ledger_max_entries=1)

Plant = Callable[..., list[BaseException]]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Have the next call of a function raise once, after it was made or before; what is left to be raised."""

    def plant_(owner: Any, name: str, error: BaseException, *, after: bool = True) -> list[BaseException]:
        original, left = getattr(owner, name), [error]

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if left and not after:
                raise left.pop()
            value = original(*arguments, **options)
            if left:
                raise left.pop()
            return value

        monkeypatch.setattr(owner, name, wrapped)
        return left

    return plant_


def fired(open_store: OpenStore, clock: ManualClock, count: int = 3) -> DelayedStore:
    """A store with some messages that are due."""
    store = open_store(config=CONFIG)
    store.topic("t").subscribe("s").close()
    store.topic("t").send_payloads([b"%d" % at for at in range(count)], deliver_at=[START_MS + 1_000] * count)
    clock.advance(2_000)
    store.tick()
    return store


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize(
    ("owner", "name"), [(Outstanding, "hand_out"), (Outstanding, "forget"), (ReadAhead, "read"), (ReadAhead, "_let_go")]
)
def test_what_a_receive_that_broke_off_was_to_hand_out_comes_again(
    open_store: OpenStore, clock: ManualClock, plant: Plant, owner: type, name: str, error: BaseException
) -> None:
    """Not only after a restart: the deliveries of the subscription are made anew from what is unacknowledged."""
    store = fired(open_store, clock, 12)
    with store.topic("t").subscribe("s") as subscription:
        got = {bytes(message.payload) for message in subscription.receive(1)}
        plant(owner, name, error)
        for _ in range(20):
            with suppress(KeyboardInterrupt, MemoryError):
                found = subscription.receive(1)
                got |= {bytes(message.payload) for message in found}
                subscription.ack(found)
        assert got == {b"%d" % at for at in range(12)}


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), OSError(28, "No space left on device")], ids=repr
)
def test_what_was_taken_of_a_log_and_not_handed_over_is_read_back(
    open_store: OpenStore, clock: ManualClock, plant: Plant, error: BaseException
) -> None:
    """Its frontier has moved in memory: fired on from there, the record would say that it has fired."""
    store = open_store(config=CONFIG)
    store.topic("t").subscribe("s").close()
    store.topic("t").send_payloads([b"0", b"1"], deliver_at=[START_MS + 1_000, START_MS + 5_000])
    store.tick()
    clock.advance(2_000)
    plant(PendingLog, "take", error)
    with suppress(KeyboardInterrupt):
        store.tick()
    clock.advance(10_000)
    store.tick()
    with store.topic("t").subscribe("s") as subscription:
        assert [bytes(message.payload) for message in subscription.receive(10)] == [b"0", b"1"]


@pytest.mark.parametrize("owner", [Environment, partition_set])
def test_a_partition_whose_making_broke_off_is_there_or_leaves_nothing(
    open_store: OpenStore, clock: ManualClock, plant: Plant, owner: Any
) -> None:
    """Registered, it is known to memory; not registered, its directory goes."""
    store = open_store(config=CONFIG)
    store.topic("t").subscribe("s").close()
    plant(owner, "sync" if owner is Environment else "build_partition", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        store.topic("t").send(b"x", deliver_after=1)
    assert list(store.check()) == []
    assert len(store.partitions()) == (owner is Environment)
    store.topic("t").send(b"y", deliver_after=1)
    clock.advance(1_000)
    with store.topic("t").subscribe("s") as subscription:
        store.tick()
        assert [bytes(message.payload) for message in subscription.receive(10)] == [b"y"]


@pytest.mark.parametrize("name", ["reach", "remove_tree"])
def test_a_deletion_that_broke_off_is_finished_and_no_longer_suspended(
    open_store: OpenStore, clock: ManualClock, plant: Plant, name: str
) -> None:
    """What is recorded is what memory goes by, whatever was raised after it."""
    store = fired(open_store, clock)
    with store.topic("t").subscribe("s") as subscription:
        subscription.ack(subscription.receive(10), durable=True)
    clock.advance(SPAN_MS)
    plant(deletion, name, MemoryError())
    store.tick()
    clock.advance(60_000)
    store.tick()
    assert store.partitions() == []
    assert list(store.check()) == []


def test_a_partition_whose_closing_failed_after_its_record_is_not_suspended_for_ever(
    open_store: OpenStore, clock: ManualClock, plant: Plant
) -> None:
    """It is closed, and there is nothing left to be tried again."""
    store = fired(open_store, clock)
    clock.advance(SPAN_MS)
    plant(PartitionSet, "release", OSError(24, "Too many open files"), after=False)
    store.tick()
    clock.advance(60_000)
    store.tick()
    assert list(store.check()) == []


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyboardInterrupt()], ids=repr)
def test_a_store_whose_closing_failed_at_a_partition_leaves_none_open(
    open_store: OpenStore, clock: ManualClock, plant: Plant, error: BaseException
) -> None:
    """This process can open it again at once."""
    store = fired(open_store, clock)
    plant(Partition, "detach", error, after=False)
    with pytest.raises(type(error)):
        store.close()
    store = open_store(config=CONFIG)
    store.topic("t").send(b"x", deliver_at=START_MS + 30_000)


def test_acknowledgements_of_a_flush_that_broke_off_are_written_by_the_next(
    open_store: OpenStore, clock: ManualClock, plant: Plant
) -> None:
    """What was taken to be written is not forgotten, nor who has something to write."""
    store = fired(open_store, clock)
    with store.topic("t").subscribe("s") as subscription:
        subscription.ack(subscription.receive(10))
    plant(AckFlusher, "_write", KeyboardInterrupt(), after=False)
    with pytest.raises(KeyboardInterrupt):
        store.flush()
    store.close()
    store = open_store(config=CONFIG)
    with store.topic("t").subscribe("s") as subscription:
        assert subscription.receive(10) == []


def test_a_consumer_whose_leaving_was_interrupted_can_leave_again(
    open_store: OpenStore, clock: ManualClock, plant: Plant
) -> None:
    """Else an exclusive subscription would be taken until the store is opened again."""
    store = fired(open_store, clock)
    subscription = store.topic("t").subscribe("s")
    assert len(subscription.receive(10)) == 3
    plant(Outstanding, "remove_consumer", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        subscription.close()
    subscription.close()
    with store.topic("t").subscribe("s") as again:
        assert len(again.receive(10)) == 3
