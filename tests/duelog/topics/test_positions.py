"""Where a topic's main log begins and ends, and where a delayed message is read once it has fired."""

import random

import pytest

from duelog import DelayedStore, LogPositions, ManualClock, MessageId, Policies, StoreConfig
from duelog.errors import InvalidArgument, UnknownTopic
from duelog.store.position import Position
from tests.conftest import MINUTE_MS, LeadingClock, OpenStore, present, tick_after
from tests.duelog.side_by_side import crashed
from tests.proof import length

CONFIG = StoreConfig(
    partition_ms=MINUTE_MS, ledger_max_entries=7, run_entries=3, fire_batch=4, durability="none", preload_ms=1_000
)


def test_an_empty_log_has_a_next_position_alone(open_store: OpenStore) -> None:
    """The first message lies there."""
    topic = open_store().topic("t")
    with pytest.raises(UnknownTopic):
        topic.positions()
    topic.create()
    empty = topic.positions()
    assert empty == LogPositions(None, None, empty.next)
    first = topic.send(b"x")
    assert topic.positions() == (first, first, Position(first.ledger_id, 1))


def test_the_last_position_is_the_last_that_may_be_read(open_store: OpenStore, clock: ManualClock) -> None:
    """Neither what has not fired, nor what waits in the main log itself; over ledgers, and after trimming."""
    store = open_store(config=StoreConfig(ledger_max_entries=2, inline_delay_ms=1_000))
    topic = store.topic("t")
    delayed = topic.send(b"delayed", deliver_after=60)
    waits = topic.send(b"inline", deliver_after=0.5)
    assert topic.positions() == (None, None, Position(waits.ledger_id, 1))
    ids = [topic.send(b"%d" % number) for number in range(4)]
    later = [topic.send(b"inline", deliver_after=1) for _ in range(3)]
    first = Position(waits.ledger_id, 0)
    assert topic.positions() == (first, ids[-1], Position(later[-1].ledger_id + 1, 0))
    clock.advance(1_000)
    assert topic.positions().last == later[-1]
    with topic.subscribe("s") as reader:
        reader.ack(reader.receive(20), durable=True)
        store.set_policies(Policies(retention_ms=0, retention_bytes=0), topic="t")
        store.tick()
    emptied = topic.positions()
    assert emptied[:2] == (None, None)
    assert emptied.next >= Position(later[-1].ledger_id + 1, 0)
    tick_after(store, clock, 60_000)
    assert topic.positions().last == topic.position_of(delayed) == emptied.next


def test_a_marker_that_was_written_early_is_not_the_last_before_it_is_due(open_store: OpenStore) -> None:
    """Nor is what came after it; its position is known, as it has fired."""
    clock = LeadingClock(1_790_000_000_000, lead_ms=5)
    store = open_store(clock_=clock)
    topic = store.topic("t")
    before = topic.send(b"before")
    delayed = topic.send(b"x", deliver_after=1)
    tick_after(store, clock, 997)
    behind = topic.send(b"behind")
    assert topic.state(delayed) == "fired"
    assert topic.position_of(delayed) == Position(before.ledger_id, 1)
    assert topic.positions() == (before, before, Position(before.ledger_id, 3))
    clock.advance(3)
    assert topic.positions().last == behind


def test_what_has_not_fired_has_no_position(open_store: OpenStore, clock: ManualClock) -> None:
    """Scheduled, cancelled, rescheduled, unknown; a message without a delay is read where it is."""
    store = open_store()
    topic = store.topic("t")
    at_once = topic.send(b"x")
    ids = [topic.send(b"x", deliver_after=60) for _ in range(3)]
    moved = topic.reschedule(ids[1], deliver_after=120)
    assert topic.cancel(ids[0])
    assert moved is not None
    asked = (*ids, moved, MessageId(9_999, 0), MessageId(at_once.ledger_id, 1), MessageId(ids[0].ledger_id, 77))
    assert [topic.position_of(each) for each in asked] == [None] * 7
    assert topic.position_of(at_once) == at_once
    tick_after(store, clock, 60_000)
    assert [topic.position_of(each) for each in asked] == [
        None, None, Position(at_once.ledger_id, 1), None, None, Position(at_once.ledger_id, 1), None
    ]  # fmt: skip
    with pytest.raises(InvalidArgument):
        topic.position_of("x")
    with pytest.raises(UnknownTopic):
        store.topic("other").position_of(at_once)


@pytest.mark.series
@pytest.mark.parametrize("seed", range(length("DUELOG_POSITION_SEEDS", 1, 4)))
def test_every_message_is_received_where_its_position_says(
    open_store: OpenStore, clock: ManualClock, seed: int
) -> None:
    """Late ones, several partitions and ledgers, read-only and reopened too; what was trimmed has none."""
    store, rng = open_store(config=CONFIG), random.Random(seed)
    ids: dict[bytes, MessageId] = {}
    received: dict[bytes, Position] = {}
    topic = store.topic("t")
    with topic.subscribe("s") as reader:
        for step in range(60):
            for number in range(rng.randrange(6)):
                payload = b"%d-%d" % (step, number)
                ids[payload] = topic.send(payload, deliver_at=clock.now_ms() + rng.randrange(-5_000, 3 * MINUTE_MS))
            clock.advance(rng.randrange(20_000))
            if rng.random() < 0.6:
                store.tick()
            for message in reader.receive(100):
                received[message.payload] = message.position
                assert topic.position_of(message.message_id) == message.position
            if step == 30:
                store.flush()
        last = topic.positions().last
        assert last == max(received.values())
        _same(store, ids, received)
    copy = crashed(store, store.path.with_name("copy"))
    _same(open_store(copy, config=CONFIG, read_only=True), ids, received)


def _same(store: DelayedStore, ids: dict[bytes, MessageId], received: dict[bytes, Position]) -> None:
    topic = store.topic("t")
    first = present(topic.positions().first)
    for payload, message_id in ids.items():
        position = received.get(payload)
        kept = position is not None and position >= first
        assert topic.position_of(message_id) == (position if kept else None)
