"""Hidden messages in the main log: nothing passes them unread, their ledger is kept until they are due; figures."""

import random
from dataclasses import replace

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, Subscription, Topic
from duelog.delivery.dispatcher import SubscriptionType
from duelog.metrics import BACKLOG, DELAYED, PENDING
from duelog.store.names import TopicName
from tests.conftest import HOUR_MS, START_MS, LeadingClock, OpenStore, applied, present, tick_after
from tests.duelog.delivery.twins import acked_after_mark
from tests.duelog.store_state import payloads

FACES = True

CONFIG = StoreConfig(inline_delay_ms=HOUR_MS, ledger_max_entries=2, ack_flush_ms=0)


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


def written_ahead(open_store: OpenStore) -> tuple[LeadingClock, Topic, Subscription]:
    """A subscription whose topic has a marker of a message that is due in 3 ms."""
    clock = LeadingClock(START_MS)
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS), clock_=clock)
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send(b"ahead", deliver_after=0.003)
    assert store.tick().fired == 1
    return clock, topic, subscription


def test_what_was_written_ahead_of_its_time_is_not_acknowledged_by_what_lies_behind_it(open_store: OpenStore) -> None:
    """A marker of the next few ms lies before a message whose id is known: acknowledging that skips neither."""
    clock, topic, subscription = written_ahead(open_store)
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
    clock, _, subscription = written_ahead(open_store)
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


FIGURES = StoreConfig(inline_delay_ms=3_600_000, ledger_max_entries=3, ack_flush_ms=0)


def ledgers(store: DelayedStore, name: str = "t") -> int:
    """Number of ledgers that the topic's main log has."""
    return len(store._engine.topics.get(TopicName.parse(name)).log.ledgers())


@pytest.mark.parametrize("restart", [False, True])
def test_what_waits_inline_with_no_subscription_yet_is_not_trimmed_before_it_is_due(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock, restart: bool
) -> None:
    """A subscription made before then gets all; when a ledger is due as a whole is on disk, whatever the settings."""
    for number in range(5):
        topic.send(b"%d" % number, deliver_after=1_800)
    assert store.tick().trimmed == 0
    if restart:
        store.close()
        store = open_store(config=StoreConfig(ledger_max_entries=2, ack_flush_ms=0))
        assert tick_after(store, clock, 60_000).trimmed == 0
    subscription = store.topic("t").subscribe("s")
    clock.advance(HOUR_MS // 2)
    assert payloads(subscription) == [b"%d" % number for number in range(5)]
    assert restart or store.tick().trimmed == 2


def test_a_ledger_that_waits_holds_those_behind_it_and_goes_when_it_is_due(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Ledgers go from the front: what is behind one that waits goes with it, at the due time and by itself."""
    topic.send(b"waits", deliver_after=1_800)
    for number in range(5):
        topic.send(b"%d" % number)
    assert (applied(store).tick().trimmed, ledgers(store)) == (0, 4)
    planned_ms = store.tick().next_due_ms
    assert planned_ms == clock.now_ms() + HOUR_MS // 2
    clock.set(planned_ms - 1)
    assert store.tick().trimmed == 0
    clock.set(planned_ms)
    assert (store.tick().trimmed, ledgers(store)) == (3, 1)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, retention_bytes=1), replace(CONFIG, retention_ms=1)])
def test_what_all_acknowledged_before_it_was_due_keeps_its_ledger_until_then(
    open_store: OpenStore, clock: ManualClock, config: StoreConfig
) -> None:
    """Acknowledged by id by every subscription there is: one that comes before it is due gets it all the same."""
    store = open_store(config=config)
    topic = store.topic("t")
    eager = topic.subscribe("eager")
    ids = topic.send_batch([Message(b"%d" % number, deliver_after=1_800) for number in range(4)])
    assert eager.ack(ids, durable=True) == 4
    assert tick_after(store, clock, 1_000).trimmed == 0
    other = topic.subscribe("other")
    clock.advance(HOUR_MS // 2)
    assert len(payloads(other)) == 4
    assert payloads(eager) == []


def test_who_begins_at_the_latest_holds_what_waits_until_it_has_it(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Ledgers are kept from the first with a message that is to come to the subscription, and go after that."""
    topic.send_batch([Message(b"%d" % number) for number in range(4)])
    topic.send(b"waits", deliver_after=60)
    topic.send_batch([Message(b"%d" % number) for number in range(5, 9)])
    subscription = topic.subscribe("s", initial_position="latest")
    assert (store.tick().trimmed, ledgers(store)) == (2, 3)
    assert (tick_after(store, clock, 60_000).trimmed, ledgers(store)) == (0, 3)
    assert payloads(subscription) == [b"waits"]
    assert (tick_after(store, clock, 1_000).trimmed, ledgers(store)) == (2, 1)


def leave_a_tracker(store: DelayedStore) -> int:
    """Have a consumer acknowledge a message, pass over a thousand hidden ones, and leave; returns the index's bytes."""
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send(b"now")
    assert payloads(subscription) == [b"now"]  # the end of the log so far: a look at it is planned
    chance = random.Random(3)
    topic.send_batch([Message(b"x", deliver_after=chance.randrange(600, 1_800)) for _ in range(1_000)])
    assert subscription.receive(10) == []
    held = topic.stats().index_bytes
    assert held == 16_000
    subscription.close()
    return held


def test_a_look_planned_behind_an_earlier_one_is_not_lost_and_the_idle_tracker_goes(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """At `close` a look at the topic is pending for its acknowledgements: the tracker goes in its own time."""
    store = open_store(config=StoreConfig(inline_delay_ms=HOUR_MS))
    held = leave_a_tracker(store)
    idle_ms = store._engine.storage.config.tracker_idle_ms
    for after_ms, left in ((150, held), (idle_ms - 151, held), (1, 0)):
        tick_after(store, clock, after_ms)
        assert store.topic("t").stats().index_bytes == left


def test_the_tracker_goes_at_a_time_that_the_tick_names(open_store: OpenStore, clock: ManualClock) -> None:
    """A store that is ticked only when it says so frees the tracker as soon as it has been idle for long enough."""
    store = open_store(config=StoreConfig(inline_delay_ms=HOUR_MS))
    leave_a_tracker(store)
    gone_ms = clock.now_ms() + store._engine.storage.config.tracker_idle_ms
    while store.topic("t").stats().index_bytes:
        planned_ms = present(store.tick().next_due_ms)
        assert planned_ms <= gone_ms
        clock.set(planned_ms)
        store.tick()
    assert clock.now_ms() == gone_ms


def test_what_waits_inline_is_pending_and_no_backlog_until_it_is_due(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Before any consumer, with one that has passed it over, after it left, after a restart: the same figures."""
    topic.subscribe("s").close()
    topic.send_batch([Message(b"%d" % number, deliver_after=number % 2 * 60) for number in range(10)])
    topic.send(b"far", deliver_after=7_200)

    def figures() -> tuple[int, int, int, int, int]:
        stats = store.topic("t").stats()
        (sub,) = stats.subscriptions
        gauges = store._engine.metrics._look() if store._engine.metrics is not None else {}
        ((pending,), (delayed,), (backlog,)) = ([each.value for each in gauges[n]] for n in (PENDING, DELAYED, BACKLOG))
        assert (pending, delayed, backlog) == (stats.pending, stats.pending, sub.backlog)
        assert store.stats().pending == stats.pending == len(list(store.topic("t").scheduled()))
        return stats.pending, sub.backlog, stats.index_bytes, sub.unacknowledged, sub.redelivering

    assert figures() == (6, 5, 0, 0, 0), "nothing is indexed for figures alone"
    with topic.subscribe("s") as subscription:
        assert len(subscription.receive(100)) == 5
        assert figures()[:2] == (6, 5)
    assert figures()[:2] == (6, 5)
    store.close()
    store = open_store(config=FIGURES)
    assert figures()[:2] == (6, 5)
    with store.topic("t").subscribe("s") as subscription:
        assert len(payloads(subscription)) == 5
        assert figures()[:2] == (6, 0)
        clock.advance(60_000)
        assert figures()[:2] == (1, 5)
        assert len(payloads(subscription)) == 5
        assert figures()[:2] == (1, 0)


def test_what_waits_inline_is_listed_with_what_waits_in_partitions(open_store: OpenStore, clock: ManualClock) -> None:
    """By due time, from both places, with limits and ends of the range honoured; after a restart and read-only too."""
    config = StoreConfig(inline_delay_ms=60_000, partition_ms=30_000, ledger_max_entries=3)
    store = open_store(config=config)
    topic = store.topic("t")
    first = topic.send(b"90", deliver_after=90)
    clock.advance(60_000)  # it is nearer now than what will wait inline
    chance = random.Random(5)
    afters = [*range(1, 60, 3), *range(61, 120, 7)]
    chance.shuffle(afters)
    for after in afters:
        topic.send(b"%d" % (60 + after), deliver_after=after)
    expected = sorted([90, *(60 + after for after in afters)])

    def look(store: DelayedStore) -> None:
        face = store.topic("t")
        assert [int(found.payload) for found in face.scheduled()] == expected
        assert [int(found.payload) for found in face.scheduled(limit=4)] == expected[:4]
        start_ms, end_ms = START_MS + expected[3] * 1_000, START_MS + expected[15] * 1_000
        assert [int(found.payload) for found in face.scheduled(start_ms, end_ms)] == expected[3:15]
        assert [found.due_ms for found in face.scheduled(start_ms, start_ms + 1)] == [start_ms]
        assert list(face.scheduled(START_MS, START_MS + 60_000)) == []
        assert store.stats().pending == face.stats().pending == len(expected)

    look(store)
    store.close()
    with open_store(config=config, read_only=True) as reader:
        look(reader)
    store = open_store(config=config)
    look(store)
    topic = store.topic("t")
    assert topic.cancel(first)
    clock.advance(10_000)
    assert [int(found.payload) for found in topic.scheduled()] == [due for due in expected if due > 70 and due != 90]


def test_a_message_that_waits_inline_is_scheduled_until_it_is_due_and_cannot_be_taken_back(
    topic: Topic, clock: ManualClock
) -> None:
    """Its state says what the list says; taking it back is refused as for one that has fired."""
    waits, now = topic.send(b"waits", deliver_after=60), topic.send(b"now")
    assert [topic.state(each) for each in (waits, now)] == ["scheduled", "fired"]
    assert topic.cancel(waits) is False
    assert topic.reschedule(waits, deliver_after=120) is None
    clock.advance(59_999)
    assert topic.state(waits) == "scheduled"
    clock.advance(1)
    assert topic.state(waits) == "fired"
    assert list(topic.scheduled()) == []
