"""Cancelling and rescheduling: truthful answers, one delivery, whatever happens in between."""

from contextlib import closing
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Outcome, StoreConfig, Subscription, Topic
from duelog.errors import StoreFull
from duelog.markers.pending_entries import PendingEntries
from duelog.partitions import cancellations
from duelog.store.codec.format import counter_key
from duelog.store.env.environment import Environment
from duelog.store.log import catalog
from tests.conftest import OpenStore, raising
from tests.model.driver import armed

FACES = True

CONFIG = StoreConfig(partition_ms=1_000, ledger_max_entries=7, ack_flush_ms=10, bucket_ms=50, fire_batch=3)


def test_a_cancel_that_finds_no_room_cancels_nothing(
    store: DelayedStore, topic: Topic, reader: Subscription, clock: ManualClock
) -> None:
    """The answer is an error, and the message still comes."""
    message_id = topic.send(b"x", deliver_after=1)
    with armed("wal.before", raising(StoreFull(store.path, "no room", 0))), pytest.raises(StoreFull):
        topic.cancel(message_id)
    clock.advance(1_000)
    assert [message.payload for message in reader.receive(10)] == [b"x"]


def test_a_cancellation_in_a_day_far_away_opens_nothing(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of it has fired or is in memory; each opened the environment of the message's day, and read from it."""
    config = StoreConfig(partition_ms=3_600_000, max_open_partitions=1, preload_ms=60_000)
    store = open_store(config=config)
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        ids = [topic.send(b"%d" % hour, deliver_after=3_600 * hour) for hour in (1, 2, 2, 3)]
        opened = store._engine.storage.partitions.open_count()
        beyond = ids[1]._replace(entry_id=2)
        monkeypatch.setattr(PendingEntries, "_existing", None)
        outcomes = topic.cancel_batch([ids[0], ids[1], ids[1], beyond])
        monkeypatch.undo()
        cancelled = [Outcome.CANCELLED, Outcome.CANCELLED, Outcome.ALREADY_CANCELLED, Outcome.UNKNOWN]
        assert outcomes == cancelled
        assert store._engine.storage.partitions.open_count() == opened
        clock.advance(3 * 3_600_000)
        assert [message.payload for message in consumer.receive(10)] == [b"2", b"3"]


@pytest.mark.inside
def test_what_has_become_of_a_message_is_asked_of_its_own_block_of_cancellations(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log has three blocks; all were read for each state, key, and message that is rescheduled again."""
    ids = topic.send_payloads([b"x"] * (2 * 65_536 + 2), deliver_after=7_200)
    topic.cancel_batch([ids[0], ids[70_000], ids[-1]])
    moved = topic.reschedule(ids[1], deliver_after=7_200)
    assert moved is not None
    monkeypatch.setattr(cancellations, "members", None)
    asked = [ids[0], ids[2], ids[70_000], ids[70_001], ids[-2], ids[-1], moved]
    states = ["cancelled", "scheduled", "cancelled", "scheduled", "scheduled", "cancelled", "scheduled"]
    assert [topic.state(each) for each in asked] == states
    assert topic.reschedule(moved, deliver_after=7_200) is not None
    assert topic.cancel_batch([moved, ids[70_000], ids[2]]) == [
        Outcome.ALREADY_CANCELLED, Outcome.ALREADY_CANCELLED, Outcome.CANCELLED,
    ]  # fmt: skip
    monkeypatch.undo()


def test_what_is_cancelled_as_its_day_begins_to_load_does_not_fire(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was far when it was located, without its due time, and is in memory when the cancellation is on disk."""
    store = open_store(config=StoreConfig(partition_ms=3_600_000, preload_ms=3_600_000))
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        message_id = topic.send(b"x", deliver_after=2 * 3_600)
        located = PendingEntries.located

        def then_load(*arguments: Any, **options: Any) -> Any:
            found = located(*arguments, **options)
            assert not found[0][0].dues
            clock.advance(3_600_000)
            while store._engine.delivery.firing.loaded.load(clock.now_ms()):
                pass
            assert store._engine.delivery.firing.loaded.loaded_starts()
            return found

        monkeypatch.setattr(PendingEntries, "located", then_load)
        assert topic.cancel(message_id)
        clock.advance(2 * 3_600_000)
        assert consumer.receive(10) == []


@pytest.mark.parametrize("mark_is_lost", [False, True])
def test_a_fired_message_is_not_cancelled_after_an_opening_with_the_clock_set_back(
    open_store: OpenStore, clock: ManualClock, mark_is_lost: bool
) -> None:
    """No frontier is read of what is due later than everything that fired, by the store's time, not the machine's."""
    config = StoreConfig(partition_ms=3_600_000, max_clock_jump_ms=None)
    store = open_store(config=config)
    topic = store.topic("t")
    topic.subscribe("s").close()
    fired, waits = (topic.send(b"x", deliver_after=after) for after in (60, 120))
    clock.advance(61_000)
    assert store.tick().fired == 1
    store.close()
    clock.set(clock.now_ms() - 59_000)
    if mark_is_lost:
        with closing(Environment(store.path / "main", name="main")) as main:
            main.commit(lambda transaction: transaction.delete(counter_key(catalog.CLOCK)))
    topic = open_store(config=config).topic("t")
    assert topic.cancel_batch([fired, waits]) == [Outcome.FIRED, Outcome.CANCELLED]


@pytest.mark.parametrize("asks", ["cancel", "state"])
def test_a_cancelled_message_is_never_called_fired_while_its_partition_is_deleted(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """Between the record of the deletion, which removes the cancellations, and its end the answer is unknown."""
    hour_ms = 3_600_000
    store = open_store(config=StoreConfig(partition_ms=hour_ms, preload_ms=0))
    topic = store.topic("t")
    topic.subscribe("s").close()
    message_id = topic.send(b"a", deliver_after=60)
    assert topic.cancel(message_id)
    engine = store._engine
    (partition,) = engine.storage.partitions
    clock.advance(2 * hour_ms)
    with engine.upkeep.maintenance.deletions_held():
        assert store.tick().closed == 1
    before = topic.cancel_batch([message_id])
    assert before == [Outcome.ALREADY_CANCELLED]
    located = PendingEntries.located

    def then_delete(*arguments: Any, **options: Any) -> Any:
        found = located(*arguments, **options)
        assert not engine.upkeep.maintenance._delete_one(partition)  # recorded; a lease is held
        return found

    monkeypatch.setattr(PendingEntries, "located", then_delete)
    if asks == "cancel":
        assert topic.cancel_batch([message_id]) == [Outcome.UNKNOWN]
    else:
        assert topic.state(message_id) == "unknown"
    monkeypatch.undo()
    engine.upkeep.maintenance.delete_released([partition.start_ms])
    assert list(engine.storage.partitions) == []
