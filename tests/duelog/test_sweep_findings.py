"""Findings of the exception sweep (tests/disaster/exception_sweep.py), one by one."""

from contextlib import suppress
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.cleanup import deletion, trim
from duelog.delivery import dispatcher
from duelog.delivery.delivery_order import DeliveryOrder
from duelog.delivery.due_reader import ReadAhead
from duelog.delivery.outstanding import Outstanding
from duelog.engine import Engine
from duelog.markers.firing.pending_log import PendingLog
from duelog.partitions import partition_set
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.env import environment
from duelog.store.wal.segment_file import SegmentFile
from duelog.topics.topic_state import SubscriptionState
from tests.conftest import START_MS, OpenStore, Plant, applied, tick_after
from tests.duelog.store_state import payloads, payloads_of, received

SPAN_MS = 60_000
CONFIG = StoreConfig(partition_ms=SPAN_MS, ledger_max_entries=1)
ALL = [b"%d" % number for number in range(12)]


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store whose topic has a subscription."""
    store = open_store(config=CONFIG)
    store.topic("t").subscribe("s").close()
    return store


@pytest.fixture
def fired(store: DelayedStore, clock: ManualClock) -> DelayedStore:
    """The store with twelve messages that have fired."""
    store.topic("t").send_payloads(ALL, deliver_at=[START_MS + 1_000] * len(ALL))
    tick_after(store, clock, 2_000)
    return store


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize(
    ("owner", "name"), [(Outstanding, "hand_out"), (Outstanding, "forget"), (ReadAhead, "read"), (ReadAhead, "_let_go")]
)
def test_what_a_receive_that_broke_off_was_to_hand_out_comes_again(
    fired: DelayedStore, plant: Plant, owner: type, name: str, error: BaseException
) -> None:
    """Not only after a restart: the deliveries of the subscription are made anew from what is unacknowledged."""
    with fired.topic("t").subscribe("s") as subscription:
        got = set(received(subscription, 1))
        plant(owner, name, error)
        for _ in range(20):
            with suppress(KeyboardInterrupt, MemoryError):
                found = subscription.receive(1)
                got |= {bytes(message.payload) for message in found}
                subscription.ack(found)
        assert got == set(ALL)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), OSError(28, "No space left on device")], ids=repr
)
def test_what_was_taken_of_a_log_and_not_handed_over_is_read_back(
    store: DelayedStore, clock: ManualClock, plant: Plant, error: BaseException
) -> None:
    """Its frontier has moved in memory: fired on from there, the record would say that it has fired."""
    store.topic("t").send_payloads([b"0", b"1"], deliver_at=[START_MS + 1_000, START_MS + 5_000])
    store.tick()
    clock.advance(2_000)
    plant(PendingLog, "take", error)
    with suppress(KeyboardInterrupt):
        store.tick()
    tick_after(store, clock, 10_000)
    assert payloads_of(store) == [b"0", b"1"]


@pytest.mark.parametrize("name", ["make_directory", "move"])
def test_a_partition_whose_making_broke_off_is_made_by_the_next_commit(
    store: DelayedStore, clock: ManualClock, plant: Plant, name: str
) -> None:
    """All of it is in the log until it is there."""
    store.topic("t").send(b"x", deliver_after=1)
    plant(partition_set, name, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        applied(store)
    assert list(store.check()) == []
    store.topic("t").send(b"y", deliver_after=1)
    applied(store)
    clock.advance(1_000)
    with store.topic("t").subscribe("s") as subscription:
        store.tick()
        assert [bytes(message.payload) for message in subscription.receive(10)] == [b"x", b"y"]


def test_a_partition_whose_making_broke_off_at_its_end_is_opened_by_the_next_opening(
    open_store: OpenStore, store: DelayedStore, plant: Plant
) -> None:
    """LMDB had its new environment open still, and opened it no second time in this process."""
    store.topic("t").send(b"x", deliver_after=1)
    interrupt = KeyboardInterrupt()  # what it was raised by is alive as long as it is
    plant(environment, "InPlace", interrupt, after=False, at=2)
    with pytest.raises(KeyboardInterrupt):
        applied(store)
    store.close()
    again = applied(open_store(config=CONFIG))
    assert [message.payload for message in again.topic("t").scheduled()] == [b"x"]
    assert interrupt.__traceback__ is not None


def test_a_store_whose_first_send_was_interrupted_as_its_segment_began_is_opened(
    open_store: OpenStore, store: DelayedStore, plant: Plant
) -> None:
    """The last segment had its end, was taken for empty at closing, and the next one was removed."""
    store.close()
    store = open_store(config=CONFIG)
    plant(SegmentFile, "write_through", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        store.topic("t").send(b"x", deliver_after=1)
    store.close()
    open_store(config=CONFIG).topic("t").send(b"y", deliver_after=1)


@pytest.mark.parametrize("name", ["reach", "remove_tree"])
def test_a_deletion_that_broke_off_is_finished_and_no_longer_suspended(
    fired: DelayedStore, clock: ManualClock, plant: Plant, name: str
) -> None:
    """Memory goes by what is recorded, whatever was raised after it."""
    payloads_of(fired)
    clock.advance(SPAN_MS)
    plant(deletion, name, MemoryError())
    fired.tick()
    clock.advance(60_000)
    fired.tick()
    assert fired.partitions() == []
    assert list(fired.check()) == []


def test_a_trimming_that_broke_off_behind_its_record_is_finished(
    fired: DelayedStore, clock: ManualClock, plant: Plant
) -> None:
    """What is left of its ledgers stayed until the store was opened again."""
    payloads_of(fired)
    clock.advance(SPAN_MS)
    plant(trim, "reach", KeyboardInterrupt(), after=False)
    with pytest.raises(KeyboardInterrupt):
        fired.tick()
    main = fired._engine.storage.main
    assert trim.unfinished(main)
    fired.tick()
    assert (trim.unfinished(main), fired.partitions()) == ([], [])


@pytest.mark.parametrize(
    ("owner", "name"),
    [(SubscriptionState, "attach"), (dispatcher.Dispatcher, "add_consumer"), (Outstanding, "add_consumer")],
)
@pytest.mark.parametrize("kind", ["exclusive", "failover", "key_shared"])
def test_a_consumer_whose_coming_was_interrupted_has_not_come(
    fired: DelayedStore, plant: Plant, owner: type, name: str, kind: Any
) -> None:
    """Nobody had it to close it, and its subscription was taken until the store was opened again."""
    plant(owner, name, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fired.topic("t").subscribe("s", type=kind)
    for type_ in (kind, "exclusive"):
        with fired.topic("t").subscribe("s", type=type_) as subscription:
            assert len(subscription.receive(20)) == len(ALL)


def test_a_store_whose_opening_was_interrupted_at_its_end_is_closed(open_store: OpenStore, plant: Plant) -> None:
    """Nobody had it to close it, and this process could not open it again."""
    plant(Engine, "start_control", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        open_store(config=CONFIG)
    open_store(config=CONFIG).topic("t").send(b"x")


def test_a_partition_whose_closing_failed_after_its_record_is_not_suspended_for_ever(
    fired: DelayedStore, clock: ManualClock, plant: Plant
) -> None:
    """It is closed, and there is nothing left to be tried again."""
    clock.advance(SPAN_MS)
    plant(PartitionSet, "release", OSError(24, "Too many open files"), after=False)
    fired.tick()
    clock.advance(60_000)
    fired.tick()
    assert list(fired.check()) == []


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyboardInterrupt()], ids=repr)
def test_a_store_whose_closing_failed_at_a_partition_leaves_none_open(
    open_store: OpenStore, fired: DelayedStore, plant: Plant, error: BaseException
) -> None:
    """This process can open it again at once."""
    plant(Partition, "detach", error, after=False)
    with pytest.raises(type(error)):
        fired.close()
    store = open_store(config=CONFIG)
    store.topic("t").send(b"x", deliver_at=START_MS + 30_000)


def test_acknowledgements_of_a_flush_that_broke_off_are_written_by_the_next(
    open_store: OpenStore, fired: DelayedStore, plant: Plant
) -> None:
    """Changes taken to be written are not forgotten, nor which subscriptions have something to write."""
    with fired.topic("t").subscribe("s") as subscription:
        payloads(subscription)
    plant(SubscriptionState, "write_changes", KeyboardInterrupt(), after=False)
    with pytest.raises(KeyboardInterrupt):
        fired.flush()
    fired.close()
    store = open_store(config=CONFIG)
    assert payloads_of(store) == []


@pytest.mark.parametrize(("owner", "name"), [(Outstanding, "remove_consumer"), (DeliveryOrder, "set_consumers")])
def test_a_consumer_whose_leaving_was_interrupted_can_leave_again(
    fired: DelayedStore, plant: Plant, owner: type, name: str
) -> None:
    """Else an exclusive subscription would be taken until the store is opened again."""
    subscription = fired.topic("t").subscribe("s")
    assert len(subscription.receive(20)) == len(ALL)
    plant(owner, name, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        subscription.close()
    subscription.close()
    with fired.topic("t").subscribe("s") as again:
        assert len(again.receive(20)) == len(ALL)
