"""Entries that come into a log behind its frontier: admitted there, they are late, and fire next; none has fired."""

import pytest

from duelog import MessageId, Outcome, StoreConfig, Topic
from duelog.store.codec import format as fmt
from duelog.tools.snapshot_tool import rebuild_snapshots
from tests.conftest import START_MS, LeadingClock, OpenStore, present, tick_after

CONFIG = StoreConfig(partition_ms=3_600_000, bucket_ms=1_000, run_entries=4, snapshot_part_bytes=1_024)
SAVING = StoreConfig(partition_ms=3_600_000, bucket_ms=1_000, snapshot_every_entries=1)
AHEAD_MS = START_MS + 1_000
"""How far firing has gone, while it is some ms before."""


@pytest.fixture
def clock() -> LeadingClock:
    """A clock by which firing goes 5 ms ahead."""
    return LeadingClock(START_MS)


def gone_ahead(topic: Topic, clock: LeadingClock) -> MessageId:
    """Have "a" written ahead of its time, 3 ms before it; the id of "moved", which is due in an hour's half."""
    topic.subscribe("s").close()
    moved = topic.send(b"moved", deliver_at=START_MS + 1_800_000)
    topic.send(b"a", deliver_at=AHEAD_MS)
    clock.set(AHEAD_MS - 3)
    topic._engine.upkeep.maintenance.tick()
    return moved


def delivered(topic: Topic) -> list[bytes]:
    """Fire everything due, receive it and acknowledge it durably."""
    topic._engine.upkeep.maintenance.tick()
    with topic.subscribe("s") as subscription:
        found = subscription.receive(100)
        subscription.ack(found, durable=True)
    return [bytes(message.payload) for message in found]


def test_rescheduling_to_a_few_ms_ahead_never_loses_the_message(open_store: OpenStore, clock: LeadingClock) -> None:
    """Where firing has gone ahead of the new time the message is late: it fires next, and is read at its time."""
    topic = (store := open_store(config=CONFIG)).topic("t")
    new = present(topic.reschedule(gone_ahead(topic, clock), deliver_at=AHEAD_MS - 1))
    assert topic.state(new) == "scheduled"
    assert [message.payload for message in topic.scheduled()] == [b"moved"]
    store.tick()
    assert topic.state(new) == "fired"
    assert delivered(topic) == []
    clock.set(AHEAD_MS)
    assert delivered(topic) == [b"a", b"moved"]


def test_an_occurrence_a_few_ms_ahead_is_not_lost(open_store: OpenStore, clock: LeadingClock) -> None:
    """A schedule made where firing has gone ahead of its first occurrence delivers that one, too."""
    minute_ms = START_MS - START_MS % 60_000 + 60_000
    topic = (store := open_store(config=CONFIG)).topic("t")
    topic.subscribe("s").close()
    topic.send(b"a", deliver_at=minute_ms + 1)
    clock.set(minute_ms - 3)
    store.tick()
    assert topic.every("minutely", cron="* * * * *", payload=b"tick").next_due_ms == minute_ms
    store.tick()
    assert delivered(topic) == []
    clock.set(minute_ms + 1)
    assert delivered(topic) == [b"a", b"tick"]
    tick_after(store, clock, 60_000)
    assert delivered(topic) == [b"tick"]


@pytest.mark.parametrize("saved", ["nothing", "before it was appended", "anew, from the log"])
def test_one_admitted_behind_the_frontier_outlives_a_restart(
    open_store: OpenStore, clock: LeadingClock, saved: str
) -> None:
    """The disk, T above all, says that it has not fired; also beside a snapshot from before it was appended."""
    store = open_store(config=SAVING if saved == "before it was appended" else CONFIG)
    topic = store.topic("t")
    moved = gone_ahead(topic, clock)
    if saved == "before it was appended":
        store._engine.delivery.firing.loaded.save_all(clock.now_ms())
    new = present(topic.reschedule(moved, deliver_at=AHEAD_MS - 1))
    store.close()
    if saved == "anew, from the log":
        rebuild_snapshots(store.path)
    store = open_store(config=store.config)
    assert store.topic("t").state(new) == "scheduled"
    assert list(store.check()) == []
    clock.set(AHEAD_MS)
    assert delivered(store.topic("t")) == [b"a", b"moved"]
    assert store.topic("t").state(new) == "fired"


def test_one_admitted_behind_the_frontier_is_cancelled_or_moved_again(
    open_store: OpenStore, clock: LeadingClock
) -> None:
    """It has not fired, and every answer says so."""
    topic = (store := open_store(config=CONFIG)).topic("t")
    first = present(topic.reschedule(gone_ahead(topic, clock), deliver_at=AHEAD_MS - 1))
    second = present(topic.reschedule(first, deliver_at=AHEAD_MS))
    third = present(topic.reschedule(second, deliver_after=60))
    last = present(topic.reschedule(third, deliver_at=AHEAD_MS - 2))
    assert topic.cancel_batch([first, second, third, last]) == [*[Outcome.ALREADY_CANCELLED] * 3, Outcome.CANCELLED]
    tick_after(store, clock, 100_000)
    assert delivered(topic) == [b"a"]


def test_what_an_earlier_version_admitted_after_a_snapshot_fires(open_store: OpenStore, clock: LeadingClock) -> None:
    """It appended the message by a commit, and admitted it by the next, with a snapshot between the two."""
    store = open_store(config=CONFIG)
    topic, main = store.topic("t"), store._engine.storage.main
    topic.subscribe("s").close()
    topic.send(b"a", deliver_at=START_MS + 1_000)
    moved = present(topic.reschedule(topic.send(b"b", deliver_at=START_MS + 2_000), deliver_at=START_MS + 3_000))
    row = fmt.block_key(fmt.Table.ADMITTED, moved.ledger_id, 0)
    fields = present(main.get(row))
    main.write(lambda transaction: transaction.delete(row), alone=True)
    store.close()
    rebuild_snapshots(store.path, bucket_ms=CONFIG.bucket_ms)
    store = open_store(config=CONFIG)
    store._engine.storage.main.write(lambda transaction: transaction.put(row, fields), alone=True)
    store.close()
    clock.set(START_MS + 4_000)
    assert delivered(open_store(config=CONFIG).topic("t")) == [b"a", b"b"]
