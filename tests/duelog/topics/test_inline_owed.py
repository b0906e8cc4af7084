"""Hidden messages in the main log: no cumulative acknowledgement, seek or new subscription passes them unread."""

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, Subscription, Topic
from duelog.delivery.dispatcher import SubscriptionType
from tests.conftest import HOUR_MS, START_MS, LeadingClock, OpenStore
from tests.duelog.delivery.twins import acked_after_mark
from tests.duelog.store_state import payloads

FACES = True

CONFIG = StoreConfig(inline_delay_ms=HOUR_MS, ledger_max_entries=3, ack_flush_ms=0)


@pytest.mark.parametrize("kind", ["exclusive", "failover"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_cumulative_acknowledgement_leaves_what_was_never_delivered(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock, kind: SubscriptionType, restart: bool
) -> None:
    """Over several ledgers, waiting ones among those delivered: they come when they are due, after a restart too."""
    subscription = topic.subscribe("s", type=kind)
    for number in range(12):
        topic.send(b"%d" % number, deliver_after=10 * number if number % 4 in (1, 2) else None)
    got = subscription.receive(100)
    assert [message.payload for message in got] == [b"0", b"3", b"4", b"7", b"8", b"11"]
    assert subscription.ack_cumulative(got[-1], durable=True) == 6
    assert subscription.ack_cumulative(got[-1]) == 0
    assert subscription.stats().unacknowledged == 0
    if restart:
        store.close()
        store = open_store(config=CONFIG)
        subscription = store.topic("t").subscribe("s", type=kind)
    clock.advance(10_000)
    assert payloads(subscription) == [b"1"]
    clock.advance(100_000)
    assert payloads(subscription) == [b"2", b"5", b"6", b"9", b"10"]
    assert subscription.stats().backlog == 0
    clock.advance(1_000)
    assert store.tick().trimmed >= 3


def test_a_cumulative_acknowledgement_past_what_was_read_leaves_what_is_not_due(
    topic: Topic, reader: Subscription, clock: ManualClock
) -> None:
    """By an id that `send` gave, nothing received yet: what is due is skipped, what waits comes, itself included."""
    ids = topic.send_batch([Message(b"%d" % number, deliver_after=number % 2 * 60) for number in range(8)])
    assert reader.ack_cumulative(ids[5]) == 3
    assert payloads(reader) == [b"6"]
    clock.advance(60_000)
    assert payloads(reader) == [b"1", b"3", b"5", b"7"]


def test_what_was_written_ahead_of_its_time_is_not_acknowledged_by_what_lies_behind_it(open_store: OpenStore) -> None:
    """A marker of the next few ms lies before a message whose id is known: acknowledging that skips neither."""
    clock = LeadingClock(START_MS)
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS), clock_=clock)
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send(b"ahead", deliver_after=0.003)
    assert store.tick().fired == 1
    behind = topic.send(b"behind")
    assert subscription.ack_cumulative(behind) == 0
    assert subscription.receive(10) == []
    clock.advance(3)
    assert payloads(subscription) == [b"ahead", b"behind"]


def begin_at_the_latest(store: DelayedStore, how: str) -> Subscription:
    """A subscription that begins at the latest now: a new one, or one that is there and sought."""
    if how == "new":
        return store.topic("t").subscribe("new", initial_position="latest")
    subscription = store.topic("t").subscribe("there")
    subscription.seek("latest")
    return subscription


LATEST = pytest.mark.parametrize("how", ["new", "sought"])


@LATEST
@pytest.mark.parametrize("restart", [False, True])
def test_who_begins_at_the_latest_gets_what_waits_inline_and_nothing_that_was_due(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock, how: str, restart: bool
) -> None:
    """Waiting ones among those that were due, over several ledgers and a restart; what comes later comes too."""
    topic.subscribe("there").close()
    for number in range(12):
        topic.send(b"%d" % number, deliver_after=10 + number if number % 4 in (1, 2) else number % 4 / 10)
    clock.advance(300)
    with begin_at_the_latest(store, how) as subscription:
        assert subscription.stats().backlog == 0
        topic.send(b"later")
        topic.send(b"later still", deliver_after=30)
        if not restart:
            assert payloads(subscription) == [b"later"]
    name = subscription.name
    if restart:
        store.close()
        store = open_store(config=CONFIG)
        with store.topic("t").subscribe(name) as subscription:
            assert payloads(subscription) == [b"later"]
    with store.topic("t").subscribe(name) as subscription:
        clock.advance(15_000)
        assert payloads(subscription) == [b"1", b"2", b"5"]
        clock.advance(15_000)
        assert payloads(subscription) == [b"6", b"9", b"10", b"later still"]
        assert subscription.stats().backlog == 0
        assert subscription.receive(10) == []


@pytest.mark.inside
@LATEST
def test_at_the_latest_with_nothing_waiting_the_cursor_is_one_position(
    store: DelayedStore, topic: Topic, how: str
) -> None:
    """No bitmaps are written where every message before it was due."""
    topic.subscribe("there").close()
    topic.send_batch([Message(b"x") for _ in range(10)])
    subscription = begin_at_the_latest(store, how)
    acks = subscription._state.acks
    assert (acked_after_mark(acks), acks.backlog(subscription._topic.log)) == (0, 0)


@pytest.mark.parametrize("to", ["message", "time", "far ahead"])
def test_a_seek_forward_leaves_what_waits_inline_owed(
    topic: Topic, reader: Subscription, clock: ManualClock, to: str
) -> None:
    """To a message, to a time, to one that has not come: what is before it and not due yet comes when it is."""
    topic.send_batch([Message(b"a"), Message(b"waits", deliver_after=5), Message(b"b")])
    clock.advance(1_000)
    last = topic.send(b"c")
    places: dict[str, MessageId | int] = {"message": last, "time": clock.now_ms(), "far ahead": START_MS + HOUR_MS}
    reader.seek(places[to])
    assert payloads(reader) == {"message": [b"c"], "time": [b"b", b"c"], "far ahead": []}[to]
    clock.advance(4_000)
    assert payloads(reader) == [b"waits"]


def test_a_seek_forward_leaves_what_was_written_ahead_owed(open_store: OpenStore) -> None:
    """A marker of the next few ms is not due: a seek to a later time does not pass it."""
    clock = LeadingClock(START_MS)
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS), clock_=clock)
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send(b"ahead", deliver_after=0.003)
    assert store.tick().fired == 1
    subscription.seek(clock.now_ms() + HOUR_MS)
    clock.advance(3)
    assert payloads(subscription) == [b"ahead"]


def test_a_seek_past_it_leaves_acknowledged_what_was_acknowledged_before_it_was_due(
    topic: Topic, reader: Subscription, clock: ManualClock
) -> None:
    """A seek forgets acknowledgements behind its place only; what waits before it, unacknowledged, comes too."""
    assert reader.ack(topic.send(b"a", deliver_after=5)) == 1
    topic.send(b"b", deliver_after=5)
    assert reader.receive(10) == []
    reader.seek("latest")
    assert reader.receive(10) == []
    clock.advance(5_000)
    assert payloads(reader) == [b"b"]
    reader.seek("earliest")
    assert payloads(reader) == [b"a", b"b"]
