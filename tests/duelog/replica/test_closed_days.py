"""Days that are over lie in the copy alone until a subscription comes to them, which waits for them without a lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from duelog import (
    DelayedStore,
    ManualClock,
    Message,
    MessageId,
    PublishedAt,
    ReceivedMessage,
    StoreConfig,
    Subscription,
)
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.delivery.dispatcher import SubscriptionType
from duelog.errors import DayAway, ReplicaUnreachable
from duelog.partitions.partition import Partition
from duelog.partitions.relocation import come_back
from duelog.replica.tiers import Tiers
from duelog.store.codec.format import PartitionState
from tests.cleanup.compacting import plan_compaction
from tests.conftest import START_MS, OpenStore, present
from tests.duelog.replica.faulty import FaultyBucket
from tests.duelog.replica.test_tiers import CONFIG, DAY_MS, _small, away, passed, reasons, settle, tiers_of
from tests.proof import length
from tests.tools.command_line import run

__all__ = ["_small"]


def over(open_store: OpenStore, clock: ManualClock, days: int = 3, config: StoreConfig = CONFIG) -> DelayedStore:
    """A store whose days, with ten messages each, have closed, and are away: nobody has received any of them."""
    store = open_store(config=config)
    topic, start_ms = store.topic("t"), clock.now_ms() - clock.now_ms() % DAY_MS
    topic.subscribe("s").close()
    topic.subscribe("other").close()
    for day in range(1, days + 1):
        dues = [start_ms + day * DAY_MS + n * 1_000 for n in range(10)]
        topic.send_batch([Message(b"%d %d" % (day, n), deliver_at=due_ms) for n, due_ms in enumerate(dues)])
    passed(store, clock, days + 1)
    assert {each.state for each in store._engine.storage.partitions} == {PartitionState.CLOSED}
    assert settle(store) == days
    return store


def texts(day: int) -> list[bytes]:
    """The messages of a day, in order."""
    return [b"%d %d" % (day, n) for n in range(10)]


def taken(reader: Subscription, count: int = 1_000) -> list[bytes]:
    """Receive what there is at once, and acknowledge it durably."""
    messages = reader.receive(count, timeout=0)
    reader.ack(messages, durable=True)
    return [message.payload for message in messages]


def partition(store: DelayedStore, day: int) -> Partition:
    """The day of a number."""
    return list(store._engine.storage.partitions)[day - 1]


def test_a_day_that_is_over_comes_for_its_reader_and_stays_while_it_is_read(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """In the order of the log, each asked for once the one before is read; two stay until the consumer has left."""
    store = over(open_store, clock)
    tiers = tiers_of(store)
    with store.topic("t").subscribe("s") as reader:
        assert taken(reader, 4) == texts(1)[:4]
        assert tiers.fetched == 1
        settle(store)
        assert away(store) == [partition(store, day).start_ms for day in (2, 3)]
        assert taken(reader) == texts(1)[4:]
        assert taken(reader) == texts(2)
        assert tiers.fetched == 2
        settle(store)
        assert tiers.fetched == 3
        assert away(store) == [partition(store, 1).start_ms]
        assert taken(reader) == texts(3)
        settle(store)
        assert away(store) == [partition(store, 1).start_ms]
        assert taken(reader) == []
    assert settle(store) == 3
    with store.topic("t").subscribe("other") as reader:
        assert taken(reader) == texts(1)
        assert tiers.fetched == 4


def test_while_the_bucket_is_down_a_reader_gets_what_lies_before_the_day_and_nothing_is_lost(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other topics go on; it is told, tried again after a pause, and no more once nobody waits for it."""
    store = over(open_store, clock)
    with store.topic("t").subscribe("s") as reader, store.topic("t").subscribe("other") as other:
        held = reader.receive(10, timeout=0)
        assert taken(other, 10) == texts(1)
        reader.nack(held[:5], delay=3600)
        settle(store)
        bucket.is_down = True
        assert taken(other) == []
        assert "fetch, partition" in reasons(store.tick())
        store.topic("u").send(b"goes on")
        with store.topic("u").subscribe("s") as third:
            assert taken(third) == [b"goes on"]
        monkeypatch.setattr("duelog.replica.tiers.LOOK_MS", 10_000)
        for _ in range(20):
            assert taken(reader) == taken(other) == []
            due_ms = present(store.tick().next_due_ms)
            assert due_ms > clock.now_ms()
            clock.set(due_ms)
        clock.advance(DAY_MS)
        assert taken(reader) == texts(1)[:5]
        with pytest.raises(ReplicaUnreachable):
            store.topic("t").subscription("s").peek(20)
    clock.advance(60_000)
    assert "fetch" not in reasons(store.tick())
    with store.topic("t").subscribe("s") as reader:
        assert taken(reader) == texts(1)[5:]
        bucket.is_down = False
        clock.advance(60_000)
        assert taken(reader) == texts(2)
        assert taken(reader) == texts(3)


def test_calls_beside_the_readers_fetch_what_they_read_and_no_more(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """A cancel knows without the day that it is too late; peek, get, seeks and acknowledgements by id read it."""
    store = over(open_store, clock)
    topic, tiers = store.topic("t"), tiers_of(store)
    view = topic.subscription("s")
    first = view.peek(1)[0]
    assert (first.payload, tiers.fetched) == (b"1 0", 1)
    settle(store)
    assert not topic.cancel(first.message_id)
    assert topic.reschedule(first.message_id, deliver_after=1) is None
    assert tiers.fetched == 1
    assert present(topic.get(first.message_id)).payload == b"1 0"
    assert tiers.fetched == 2
    assert [message.payload for message in view.peek(12, after=9)] == [texts(1)[9], *texts(2), b"3 0"]
    settle(store)
    before = tiers.fetched
    with topic.subscribe("s") as reader:
        position = reader.seek(first.due_ms + DAY_MS)
        assert tiers.fetched == before
        assert reader.seek(PublishedAt(clock.now_ms())) > position
        assert tiers.fetched > before
        reader.seek("earliest")
        assert reader.ack(first.message_id) == 1
        assert taken(reader) == texts(1)[1:]
    settle(store)
    with topic.reader("earliest") as onlooker:
        tiers._thread = threading.current_thread()  # as if another thread fetched what is asked for
        assert onlooker.poll_columns()[0].payloads == []
        assert onlooker.poll_columns(fetches=True)[0].payloads == [b"1 0"]
        tiers._thread = None


def test_what_retention_alone_keeps_is_deleted_without_coming_back(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """All of it is acknowledged: nobody reads it any more."""
    store = open_store(config=replace(CONFIG, retention_ms=24 * DAY_MS))
    topic = store.topic("t")
    topic.send_batch([Message(b"%d" % n, deliver_after=3600 + n) for n in range(10)])
    with topic.subscribe("s") as reader:
        passed(store, clock, 3)
        assert len(taken(reader)) == 10
    assert settle(store) == 1
    for hour in range(40):
        topic.send(b"%d" % hour)
        with topic.subscribe("s") as reader:
            taken(reader)
        passed(store, clock, 1)
    assert list(store._engine.storage.partitions) == []
    assert tiers_of(store).fetched == 0
    assert not any((store.path / "partitions").iterdir())


def test_a_generation_compacted_elsewhere_takes_over_a_day_that_is_away(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """It is whole then, and goes as any other; what was acknowledged is not delivered again."""
    store = over(open_store, clock)
    with store.topic("t").subscribe("other") as reader:
        assert taken(reader) == texts(1)
        reader.seek("latest")
    with store.topic("t").subscribe("s") as reader:
        assert taken(reader, 4) == texts(1)[:4]
    partitions, day = store._engine.storage.partitions, partition(store, 1)
    with partitions.lease(day):
        staged = stage_generation(store.path, day.environment, plan_compaction(store._engine.storage.main, day))
    settle(store)
    assert day.start_ms in away(store)
    hand_over(store.path, staged)
    assert store.tick().adopted == 1
    assert (day.generation, len(list(day.path.parent.iterdir())), day.path.name) == (2, 1, "g000002")
    settle(store)
    assert day.start_ms in away(store)
    store.close()
    store = open_store(config=CONFIG)
    with store.topic("t").subscribe("s") as reader:
        assert taken(reader) == texts(1)[4:]


def test_a_generation_that_takes_over_while_its_day_goes_or_comes_wins(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """What was on its way is of the generation before, and is given up; while directories change none is adopted."""
    store = over(open_store, clock, days=1)
    partitions, day, engine = store._engine.storage.partitions, partition(store, 1), store._engine
    with store.topic("t").subscribe("s") as reader, store.topic("t").subscribe("other") as other:
        assert taken(reader, 4) == taken(other, 4) == texts(1)[:4]
        with partitions.lease(day):
            staged = stage_generation(store.path, day.environment, plan_compaction(engine.storage.main, day))
    settle(store)
    adopting, download = engine.upkeep.maintenance.tasks.adopting, bucket.download

    def adopted_meanwhile(name: str) -> Iterator[bytes] | None:
        hand_over(store.path, staged)
        with partitions.relocating:
            assert adopting.run() == 0
        assert adopting.run() == 1
        return download(name)

    bucket.download = adopted_meanwhile  # type: ignore[method-assign]
    partitions.at_hand(day)
    del bucket.download
    assert (day.generation, day.path.name) == (2, "g000002")
    with store.topic("t").subscribe("s") as reader:
        assert taken(reader) == texts(1)[4:]


def test_a_waiting_reader_is_woken_and_holds_no_lock_meanwhile(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """While the day is on its way the subscription answers, acknowledges, and another one receives."""
    store = over(open_store, clock, days=2)
    engine, woken = store._engine, threading.Event()
    reader, other = store.topic("t").subscribe("s"), store.topic("t").subscribe("other")
    held = reader.receive(10, timeout=0)
    assert taken(other) == texts(1)
    engine.tiers = engine.upkeep.maintenance.tiers = Tiers(
        engine.storage, engine.clock, engine.shipping, engine.delivery.firing.loaded, woken.set, background=True
    )
    reached, goes_on, download = threading.Event(), threading.Event(), bucket.download

    def slow(name: str) -> Iterator[bytes] | None:
        reached.set()
        assert goes_on.wait(60)
        return download(name)

    bucket.download = slow  # type: ignore[method-assign]
    changed = threading.Event()
    reader.add_waker(changed.set)
    assert reader.receive(10, timeout=0) == []
    assert reached.wait(60)
    changed.clear()
    assert reader.receive(10, timeout=0) == other.receive(10, timeout=0) == []
    assert reader.stats().fetching_ms == partition(store, 2).start_ms
    assert reader.ack(held) == 10
    assert reader.nack_all() == 0
    store.topic("u").send(b"goes on")
    with store.topic("u").subscribe("s") as third:
        assert taken(third) == [b"goes on"]
    changed.clear()
    goes_on.set()
    assert changed.wait(60)
    assert taken(reader) == taken(other) == texts(2)
    assert reader.stats().fetching_ms is None


def test_other_processes_are_told_that_a_day_is_in_the_copy(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, tmp_path: Path
) -> None:
    """A store that is open read-only says so where it needs messages of it; commands name the copy; checks go on."""
    store = over(open_store, clock)
    assert list(store.check(deep=True)) == []
    store.close()
    beside = open_store(config=CONFIG, read_only=True)
    with pytest.raises(DayAway, match="is away, in memory:///"):
        beside.topic("t").subscription("s").peek(1)
    assert beside.stats().away_partitions == 3
    beside.close()
    for command in (["compact", store.path], ["export", store.path, tmp_path / "export"]):
        assert "is in memory:/// alone: give that in place of the store" in run(*command).stderr, command
    assert "is away, in memory:///" in run("peek", store.path, "t", "s").stderr


def test_a_backlog_of_ten_times_the_disk_is_read_within_the_bound(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody receives for forty days; then one subscription reads them from the first on, each message once.

    A day comes once there is room for it.
    """
    days, messages, size = 40, 100, 4_000
    most = days * messages * size // 10
    store = open_store(config=replace(CONFIG, max_local_bytes=most, wal_bytes=1 << 20, preload_ms=DAY_MS // 4))
    topic, start_ms, peak = store.topic("t"), clock.now_ms() - clock.now_ms() % DAY_MS, 0
    topic.subscribe("s").close()
    for day in range(2, days + 2):
        due_ms = start_ms + day * DAY_MS
        topic.send_batch([Message(b"%d " % n * size, deliver_at=due_ms + n * 1_000) for n in range(messages)])
        settle(store)
    clock.set(start_ms + (days + 3) * DAY_MS)
    for _ in range(days + 3):
        settle(store)
        peak = max(peak, tiers_of(store).local_bytes())
    assert {each.state for each in store._engine.storage.partitions} == {PartitionState.CLOSED}
    whole = sum(each.disk_bytes + each.away_bytes for each in store.partitions())
    assert whole > 10 * most
    got, before = list[int](), tiers_of(store).fetched
    full: list[int] = []

    def measured(*arguments: Any) -> None:
        come_back(*arguments)
        full.append(tiers_of(store).local_bytes())

    monkeypatch.setattr("duelog.replica.tiers.come_back", measured)
    with topic.subscribe("s") as reader:
        while found := reader.receive(30, timeout=0):
            got += [message.due_ms for message in found]
            reader.ack(found)
            assert store.tick().suspended == ()
            peak = max(peak, tiers_of(store).local_bytes())
    assert got == [start_ms + day * DAY_MS + n * 1_000 for day in range(2, days + 2) for n in range(messages)]
    assert days // 2 < tiers_of(store).fetched - before <= days
    assert max(full) < most + 2 * whole // days
    assert peak < most + 2 * whole // days + days * 65_536


def test_a_restart_in_the_middle_of_a_day_goes_on_there(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """Without a copy any more, too: the day names where it is."""
    store = over(open_store, clock)
    with store.topic("t").subscribe("s") as reader:
        assert taken(reader, 4) == texts(1)[:4]
    settle(store)
    store.close()
    store = open_store(config=replace(CONFIG, replica=None, max_local_bytes=None))
    with store.topic("t").subscribe("s") as reader:
        assert [taken(reader), taken(reader), taken(reader)] == [texts(1)[4:], texts(2), texts(3)]


STORIES = length("DUELOG_CLOSED_DAYS", 6, 200)
TYPES: tuple[SubscriptionType, ...] = ("exclusive", "shared", "key_shared")


class Readers:
    """A store whose days go whenever they may, its subscriptions of all types with consumers, and their twin."""

    def __init__(self, path: Path, bucket: FaultyBucket, seed: int) -> None:
        self.path, self.bucket, self.random, self.clock = path, bucket, Random(seed), ManualClock(START_MS)
        self.due: dict[bytes, int] = {}
        self.left: dict[str, set[bytes]] = {kind: set() for kind in TYPES}
        self.last: dict[tuple[str, str | None], MessageId] = {}
        """By subscription and key, the message that was handed out last as new."""
        self.counts = {"given back": 0, "fetched": 0, "away": 0}
        self.open()

    def open(self) -> None:
        """Open the store, and attach consumers; a second one where a subscription may have it."""
        self.last.clear()
        self.store = DelayedStore.open(self.path, CONFIG, clock=self.clock)
        topic = self.store.topic("t")
        self.consumers = [topic.subscribe(kind, type=kind) for kind in (*TYPES, *TYPES[1:])]
        self.held: dict[Subscription, list[ReceivedMessage]] = {each: [] for each in self.consumers}

    def reopen(self) -> None:
        """Close the store, whatever the bucket does, and open it again."""
        self.counts["given back"] += tiers_of(self.store).given_back
        self.counts["fetched"] += tiers_of(self.store).fetched
        self.store.close()
        self.open()

    def send(self) -> None:
        """A batch, to several of the next hours."""
        batch = []
        for _ in range(self.random.randint(1, 12)):
            text, key = b"%d" % len(self.due), self.random.choice((None, "a", "b"))
            due_ms = self.due[text] = self.clock.now_ms() + self.random.randrange(1, 5 * DAY_MS)
            batch.append(Message(text, deliver_at=due_ms, key=key))
            for left in self.left.values():
                left.add(text)
        self.store.topic("t").send_batch(batch)

    def receive(self) -> None:
        """What one consumer gets now is due, not acknowledged, and new messages are in the order of its type."""
        consumer = self.random.choice(self.consumers)
        for message in consumer.receive(self.random.choice((1, 5, 100)), timeout=0):
            kind = consumer.type
            assert message.payload in self.left[kind]
            assert message.due_ms == self.due[message.payload] <= self.clock.now_ms()
            if not message.redelivery_count and kind != "shared" and (kind == "exclusive" or message.key is not None):
                order = kind, None if kind == "exclusive" else message.key
                assert message.position > self.last.get(order, MessageId(0, 0))
                self.last[order] = message.position
            self.held[consumer].append(message)

    def settle_some(self) -> None:
        """A consumer acknowledges some of what it holds, and gives the rest back."""
        consumer = self.random.choice(self.consumers)
        held, self.held[consumer] = self.held[consumer], []
        done = [message for message in held if self.random.random() < 0.6]
        assert consumer.ack(done) == len(done)
        self.left[consumer.type] -= {message.payload for message in done}
        consumer.nack([message for message in held if message not in done], delay=self.random.choice((0, 7_200)))

    def step(self) -> None:
        """Do one thing."""
        match self.random.randrange(10):
            case 0 | 1:
                self.send()
            case 2 | 3:
                self.clock.advance(self.random.choice((1_000, DAY_MS // 2, DAY_MS)))
                self.store.tick()
            case 4 | 5 | 6:
                self.receive()
            case 7:
                self.settle_some()
            case 8 if not self.bucket.is_down:
                settle(self.store)
                self.counts["away"] += len(away(self.store))
            case _ if self.random.random() < 0.4:
                self.bucket.is_down = not self.bucket.is_down
            case _ if not self.bucket.is_down:
                self.reopen()


@pytest.mark.series
@pytest.mark.parametrize("seed", range(STORIES))
def test_readers_of_days_that_go_and_come_are_as_their_twins(seed: int, bucket: FaultyBucket, tmp_path: Path) -> None:
    """Consumers of each type that stay, while the bucket goes down and up: each message comes until acknowledged."""
    readers = Readers(tmp_path / "store", bucket, seed)
    for _ in range(150):
        readers.step()
    bucket.is_down = False
    for _ in range(12):
        settle(readers.store)
        readers.clock.advance(DAY_MS)
        readers.store.tick()
        for consumer in readers.consumers:
            readers.held[consumer] = []
            while messages := consumer.receive(100, timeout=0):
                readers.left[consumer.type] -= {message.payload for message in messages}
                consumer.ack(messages)
            consumer.nack_all()
    assert readers.left == {kind: set() for kind in TYPES}
    readers.reopen()
    assert min(readers.counts.values()) > 3
    assert list(readers.store.check(deep=True)) == []
    readers.store.close()


def test_messages_of_a_day_that_goes_as_it_is_read_are_not_quarantined(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was chosen before it had a reader, and goes between the lease and the read: its rest has none of them."""
    store = over(open_store, clock, days=1)
    tiers, partitions = tiers_of(store), store._engine.storage.partitions
    acquire, times = partitions.acquire, 0

    def gone_then(leased: Partition, *, partial: bool = False) -> None:
        nonlocal times
        acquire(leased, partial=partial)
        if not partial and times < 2:
            times += 1
            found = tiers._where(leased, present(tiers._shipping))
            assert not isinstance(found, bool)
            assert tiers._give_back(leased, *found, bucket)
            with partitions.lease(leased, partial=True):
                assert leased.environment.path.name.startswith("a")

    monkeypatch.setattr(partitions, "acquire", gone_then)
    with store.topic("t").subscribe("s") as reader:
        assert taken(reader) == texts(1)
    assert times == 2
    settle(store)
    times = 1
    assert store.topic("t").subscription("other").peek(1)[0].payload == b"1 0"
    assert (times, store._engine.delivery.quarantine.items()) == (2, [])
