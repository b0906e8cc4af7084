"""Short delays in the main log (PIP-448): each subscription gets each message once, when it is due.

The findings named here are those of the code under review for PIP-448, and none of them is to be had.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, Subscription
from duelog.errors import UnknownSubscription
from duelog.markers import tracker as tracking
from duelog.markers.reader import MainLogReader
from duelog.markers.tracker import TopicDelayTracker
from duelog.store.log.scan import runs
from duelog.store.names import TopicName
from tests.conftest import START_MS, OpenStore

INLINE = StoreConfig(
    partition_ms=1_000, ledger_max_entries=7, ack_flush_ms=10, inline_delay_ms=5_000, tracker_idle_ms=200
)


def tracker_of(store: DelayedStore, name: str = "t") -> TopicDelayTracker | None:
    """The topic's tracker, if it has one now."""
    return store._engine.topics.get(TopicName.parse(name)).tracker


def payloads(subscription: Subscription, most: int = 1_000) -> list[bytes]:
    """Receive and acknowledge."""
    messages = subscription.receive(most)
    subscription.ack(messages)
    return [message.payload for message in messages]


def test_a_short_delay_creates_no_partition_and_is_exact(open_store: OpenStore, clock: ManualClock) -> None:
    """Not a tick early, on the very tick, in order of due time."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send_batch([Message(b"b", deliver_after=0.2), Message(b"a", deliver_after=0.1), Message(b"now")])
    assert store.partitions() == []
    assert payloads(subscription) == [b"now"]
    clock.advance(99)
    assert payloads(subscription) == []
    clock.advance(1)
    assert payloads(subscription) == [b"a"]
    clock.advance(100)
    assert payloads(subscription) == [b"b"]
    assert subscription.stats().backlog == 0


@pytest.mark.parametrize("inline_ms", [0, 1, 100, 1_000])
def test_strictness_holds_for_every_inline_delay(open_store: OpenStore, clock: ManualClock, inline_ms: int) -> None:
    """A message due in 100 ms comes at 100 ms, wherever it waits."""
    store = open_store(config=StoreConfig(inline_delay_ms=inline_ms))
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send(b"x", deliver_after=0.1)
    clock.advance(99)
    assert payloads(subscription) == []
    clock.advance(1)
    assert payloads(subscription) == [b"x"]


def test_equal_due_times_keep_send_order_across_limits(open_store: OpenStore, clock: ManualClock) -> None:
    """500 at one instant, received by sevens, come in the order they were sent, none twice."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    subscription = topic.subscribe("s", type="shared")
    due_ms = START_MS + 300
    topic.send_batch([Message(b"%d" % number, deliver_at=due_ms) for number in range(500)])
    assert payloads(subscription) == []
    clock.advance(300)
    got: list[bytes] = []
    while batch := payloads(subscription, 7):
        got += batch
    assert got == [b"%d" % number for number in range(500)]


def test_an_earlier_message_re_arms_the_wait(open_store: OpenStore, clock: ManualClock) -> None:
    """What the next wait ends at is asked anew, so a nearer message that came later is not slept through."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send(b"far", deliver_after=4)
    assert payloads(subscription) == []
    reader = subscription._state.reader
    assert reader is not None
    assert reader.next_due_ms() == START_MS + 4_000
    topic.send(b"near", deliver_after=1)
    assert reader.next_due_ms() == START_MS + 1_000
    clock.advance(1_000)
    assert payloads(subscription) == [b"near"]


def test_unacknowledged_messages_do_not_starve_later_ones(open_store: OpenStore, clock: ManualClock) -> None:
    """Reads go on although mark-delete stands still."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    subscription = topic.subscribe("s", type="shared")
    topic.send_batch([Message(b"%d" % number, deliver_after=0.1) for number in range(30)])
    assert subscription.receive(10) == []
    clock.advance(100)
    got = [message.payload for _ in range(3) for message in subscription.receive(10)]
    assert got == [b"%d" % number for number in range(30)]


def test_views_with_different_mark_deletes_are_served_each_once(open_store: OpenStore, clock: ManualClock) -> None:
    """One view that never acknowledges neither stops pruning nor disturbs the other."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    quick, idle = topic.subscribe("quick"), topic.subscribe("idle")
    for round_ in range(5):
        topic.send_batch([Message(b"%d-%d" % (round_, number), deliver_after=0.5) for number in range(10)])
        assert payloads(quick) == []
        assert idle.receive(10) == []
        clock.advance(2_000)
        assert len(payloads(quick)) == 10
        assert len(idle.receive(100)) == 10
    tracker = tracker_of(store)
    assert tracker is not None
    assert len(tracker) <= 20


def test_each_position_is_tracked_once_whatever_the_subscriptions(open_store: OpenStore, clock: ManualClock) -> None:
    """Ten subscriptions on fifty waiting messages: fifty entries."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    subscriptions = [topic.subscribe(f"s{number}") for number in range(10)]
    topic.send_batch([Message(b"x", deliver_after=1 + number / 100) for number in range(50)])
    for subscription in subscriptions:
        assert subscription.receive(1) == []
    tracker = tracker_of(store)
    assert tracker is not None
    assert len(tracker) == 50
    clock.advance(2_000)
    assert {len(payloads(subscription)) for subscription in subscriptions} == {50}


def test_the_tracker_is_freed_after_its_last_view_and_not_under_a_new_one(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Idle for `tracker_idle_ms` it goes; a consumer that comes later finds everything that it passed over."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send(b"x", deliver_after=4)
    assert subscription.receive(1) == []
    subscription.close()
    clock.advance(100)
    subscription = topic.subscribe("s")
    clock.advance(1_000)
    store.tick()
    assert tracker_of(store) is not None
    subscription.close()
    clock.advance(1_000)
    store.tick()
    assert tracker_of(store) is None
    subscription = topic.subscribe("s")
    clock.advance(2_000)
    assert payloads(subscription) == [b"x"]


def test_what_others_were_served_meanwhile_is_tracked_again_for_a_consumer_that_returns(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Forgotten since everybody there had it, and behind where the tracker began: who passed it over still gets it."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    gone = topic.subscribe("gone")
    early = topic.send(b"early", deliver_after=2)
    stays = topic.subscribe("stays")
    assert stays.ack(early) == 1
    topic.send_batch([Message(b"late", deliver_after=1.5), Message(b"last", deliver_after=4)])
    assert gone.receive(10) == []
    gone.close()
    clock.advance(300)
    store.tick()
    assert tracker_of(store) is None
    assert stays.receive(10) == []
    clock.advance(1_300)
    assert payloads(stays) == [b"late"]
    clock.advance(1_100)
    assert stays.receive(10) == []
    gone = topic.subscribe("gone")
    assert payloads(gone) == [b"late", b"early"]


def test_what_could_not_be_read_when_it_was_due_is_not_forgotten(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker takes a view for served once it has given the positions; reading them may fail after that."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send_batch([Message(b"a", deliver_after=1), Message(b"b", deliver_after=1.2)])
    assert subscription.receive(10) == []
    clock.advance(3_000)
    with monkeypatch.context() as patched:
        patched.setattr(MainLogReader, "read_at", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            subscription.receive(10)
    assert payloads(subscription) == [b"a", b"b"]


def test_an_index_that_was_broken_off_halfway_is_read_anew(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt between two runs: none of them is indexed twice, none is missing."""
    store = open_store(config=INLINE)
    topic = store.topic("t")
    subscription = topic.subscribe("s", type="shared")
    for name in (b"a", b"b", b"c"):
        topic.send(name, deliver_after=1)

    def broken_off(*arguments: Any) -> Iterator[Any]:
        yield next(runs(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tracking, "runs", broken_off)
        with pytest.raises(KeyboardInterrupt):
            subscription.receive(10)
    assert subscription.receive(10) == []
    found = tracker_of(store)
    assert found is not None
    assert len(found) == 3
    clock.advance(1_000)
    assert payloads(subscription) == [b"a", b"b", b"c"]


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_seeking_back_restores_what_was_pruned(open_store: OpenStore, clock: ManualClock) -> None:
    """After a seek to the beginning every message still kept is delivered again, those not due when they are."""
    config = StoreConfig(inline_delay_ms=5_000, retention_ms=10**9)
    store = open_store(config=config)
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send_batch([Message(b"a", deliver_after=1), Message(b"b", deliver_after=2), Message(b"c", deliver_after=4)])
    assert payloads(subscription) == []
    clock.advance(2_500)
    assert payloads(subscription) == [b"a", b"b"]
    subscription.seek("earliest")
    assert payloads(subscription) == [b"a", b"b"]
    clock.advance(1_500)
    assert payloads(subscription) == [b"c"]


@pytest.mark.parametrize("seed", range(5))
def test_random_histories_serve_every_subscription_once(open_store: OpenStore, clock: ManualClock, seed: int) -> None:
    """Inline on and off over reopens, trims, consumers that come and go: everybody gets everything, never early."""
    chance = random.Random(seed)

    def config() -> StoreConfig:
        return StoreConfig(
            partition_ms=1_000,
            ledger_max_entries=7,
            bucket_ms=50,
            fire_batch=3,
            inline_delay_ms=chance.choice([0, 100, 500, 5_000]),
            tracker_idle_ms=200,
        )

    names = ("x", "y")
    store = open_store(config=config())
    topic = store.topic("t")
    consumers = {name: topic.subscribe(name, type="shared") for name in names}
    sent: dict[MessageId, int] = {}
    got: dict[str, set[MessageId]] = {name: set() for name in names}

    def receive(name: str) -> int:
        messages = consumers[name].receive(chance.choice([1, 3, 1_000]))
        for message in messages:
            assert message.message_id not in got[name]
            assert sent[message.message_id] <= clock.now_ms()
            got[name].add(message.message_id)
        consumers[name].ack(messages)
        return len(messages)

    for _ in range(100):
        kind = chance.random()
        if kind < 0.5:
            due_ms = clock.now_ms() + chance.randrange(-100, 1_500)
            sent[topic.send(b"x", deliver_at=due_ms)] = due_ms
        elif kind < 0.85:
            clock.advance(chance.randrange(200))
            receive(chance.choice(names))
        elif kind < 0.9:
            store.close()
            store = open_store(config=config())
            topic = store.topic("t")
            consumers = {name: topic.subscribe(name, type="shared") for name in names}
        elif kind < 0.97:
            name = chance.choice(names)
            consumers[name].close()
            clock.advance(chance.randrange(400))
            store.tick()
            consumers[name] = topic.subscribe(name, type="shared")
    clock.advance(3_000)
    for name in names:
        while receive(name):
            pass
        assert got[name] == set(sent)


@pytest.mark.parametrize("attached", [True, False])
def test_clearing_what_waits_inline_for_one_subscription_leaves_it_to_the_others(
    open_store: OpenStore, clock: ManualClock, attached: bool
) -> None:
    """What is due and what waits in partitions stays; it lasts over a restart, and trimming goes on."""
    config = StoreConfig(inline_delay_ms=60_000, ledger_max_entries=2)
    store = open_store(config=config)
    topic = store.topic("t")
    one = topic.subscribe("one")
    topic.subscribe("other").close()
    topic.send_batch([Message(b"%d" % seconds, deliver_after=seconds) for seconds in (0, 30, 3_600, 10, 20)])
    assert [message.payload for message in one.receive(10)] == [b"0"]
    if not attached:
        one.close()
    assert topic.clear_inline("one") == 3
    assert topic.clear_inline("one") == 0
    assert topic.subscribe("late", initial_position="latest").stats().backlog == 0
    topic.send(b"after", deliver_after=15)
    store.close()
    store = open_store(config=config)
    topic = store.topic("t")
    clock.advance(3_600_000)
    with topic.subscribe("one") as one, topic.subscribe("other") as other:
        assert {message.payload for message in one.receive(10)} == {b"0", b"after", b"3600"}
        assert {message.payload for message in other.receive(10)} == {b"0", b"10", b"20", b"30", b"after", b"3600"}
    with pytest.raises(UnknownSubscription):
        topic.clear_inline("nobody")
