"""Readers: everything from a place on, each once and never early, and nothing left behind."""

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duelog import DelayedStore, ManualClock, Policies, StoreConfig, Topic
from duelog.store.errors import ClosedError, ConsumerBusy, InvalidArgument, UnknownSubscription
from tests.conftest import START_MS, OpenStore
from tests.duelog.store_state import each_received, received, records
from tests.proof import length

FACES = True

CONFIG = StoreConfig(ledger_max_entries=2, ack_flush_ms=0, partition_ms=3_600_000)
SEND = [b"%d" % number for number in range(6)]


def test_a_reader_begins_where_it_is_told(topic: Topic, clock: ManualClock) -> None:
    """The beginning, the end, a position, a time by due time."""
    topic.subscribe("keeps").close()
    for payload in SEND[:4]:
        topic.send(payload)
        clock.advance(1_000)
    first = topic.reader()
    middle = topic.reader(first.receive(2)[1].position)
    by_time = topic.reader(START_MS + 2_500)
    by_datetime = topic.reader(datetime.fromtimestamp((START_MS + 1_500) / 1000, UTC))
    latest = topic.reader("latest")
    topic.send(SEND[4])
    assert received(middle) == SEND[1:5]
    assert received(by_time) == SEND[3:5]
    assert received(by_datetime) == SEND[2:5]
    assert received(latest) == SEND[4:5]
    assert received(first) == SEND[2:5]
    for wrong in ("first", -1, 1.5, None):
        with pytest.raises(InvalidArgument):
            topic.reader(wrong)  # type: ignore[arg-type]


def test_a_reader_writes_nothing_and_is_gone_when_it_closes(store: DelayedStore, topic: Topic) -> None:
    """No record of it while it is there, acknowledges and pauses; no name, and no trace in memory afterwards."""
    topic.subscribe("keeps").close()
    topic.send_payloads(SEND)
    before = records(store)
    with topic.reader(name="r") as reader:
        assert not reader.durable
        batch = reader.receive(3)
        assert reader.ack(batch, durable=True) == 3
        assert reader.stats().backlog == 3
        reader.pause()
        assert reader.receive() == []
        reader.resume()
        assert received(reader) == SEND[3:]
        store.flush()
        assert records(store) == before
        assert topic.subscriptions() == ["keeps"]
    state = store._engine.topics.get(topic._name)
    assert state.readers == {}
    with pytest.raises(ClosedError):
        reader.receive()
    assert received(topic.reader(name="r")) == SEND


def test_consumers_of_one_name_share_a_reader(topic: Topic) -> None:
    """Like consumers of a subscription, until the last has left."""
    topic.subscribe("keeps").close()
    topic.send_payloads(SEND)
    one = topic.reader(name="r", type="shared")
    other = topic.reader("latest", name="r", type="shared")
    assert received(one, 2) + received(other, 2) == SEND[:4]
    with pytest.raises(ConsumerBusy):
        topic.reader(name="r")
    with pytest.raises(InvalidArgument):
        topic.reader(name="keeps")
    one.close()
    assert received(other) == [SEND[0], SEND[1], *SEND[4:]]
    other.close()
    assert received(topic.reader("latest", name="r")) == []


def test_a_reader_follows_policies_and_buries_nothing(store: DelayedStore, topic: Topic, clock: ManualClock) -> None:
    """An acknowledgement timeout brings messages again, however often; dead letters are for subscriptions."""
    topic.subscribe("keeps").close()
    topic.send(b"x")
    reader = topic.reader()
    store.set_policies(Policies(max_redeliveries=1, ack_timeout_ms=1_000), topic=topic.name)
    for _ in range(4):
        assert received(reader) == [b"x"]
        clock.advance(1_000)
    assert [each.name for each in store.topics()] == [topic.name]


def test_a_reader_of_a_topic_that_is_deleted_is_told(store: DelayedStore, topic: Topic) -> None:
    """Like a subscription."""
    topic.send(b"x")
    reader = topic.reader()
    store.delete_topic("t")
    with pytest.raises(UnknownSubscription):
        reader.receive()
    reader.close()


class ReaderMachine(RuleBasedStateMachine):
    """Readers beside a list: sends with and without delays, time, trimming by a subscription, seeks."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.clock = ManualClock(START_MS)
        config = StoreConfig(ledger_max_entries=3, ack_flush_ms=0, partition_ms=60_000, inline_delay_ms=2_000)
        self.store = DelayedStore.open(Path(self.directory.name) / "s", config, clock=self.clock)
        self.topic = self.store.topic("t")
        self.consumer = self.topic.subscribe("s")
        self.due: dict[bytes, int] = {}
        self.observer = self.topic.reader(name="observer")
        self.positions: dict[bytes, Any] = {}
        """Where each that is in the main log stands there."""
        self.readers: list[tuple[Any, set[bytes]]] = []
        """And what each has still to get, of what is not trimmed."""

    @rule(delay_ms=st.sampled_from([0, 0, 500, 1_500, 5_000, 90_000]), count=st.integers(1, 4))
    def send(self, delay_ms: int, count: int) -> None:
        for _ in range(count):
            payload = b"%d" % len(self.due)
            position = self.topic.send(payload, deliver_after=delay_ms / 1000)
            if delay_ms <= 2_000:  # it waits inline
                self.positions[payload] = position
            self.due[payload] = self.clock.now_ms() + delay_ms
            for _, wanted in self.readers:
                wanted.add(payload)

    @rule(ms=st.sampled_from([1, 400, 3_000, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    def observe(self) -> None:
        """Learn where delayed messages stand that have come due."""
        self.store.tick()
        for message in each_received(self.observer):
            self.positions[message.payload] = message.position
            self.observer.ack(message)

    @rule(count=st.integers(1, 6))
    def consume(self, count: int) -> None:
        self.observe()
        for message in self.consumer.receive(count):
            self.consumer.ack(message)
        self.store.tick()

    @precondition(lambda self: len(self.readers) < 3)
    @rule(data=st.data())
    def open_reader(self, data: st.DataObject) -> None:
        self.observe()
        start: Any = data.draw(st.sampled_from(["earliest", "latest", *sorted(self.positions)]))
        log = self.store._engine.topics.get(self.topic._name).log
        waits = {payload for payload, due_ms in self.due.items() if due_ms > self.clock.now_ms()}
        if start == "latest":
            reader, wanted = self.topic.reader("latest"), waits
        elif start == "earliest":
            reader = self.topic.reader()
            gone = {name for name, at in self.positions.items() if at.ledger_id < log.first_ledger}
            wanted = set(self.due) - gone
        else:
            at = self.positions[start]
            reader = self.topic.reader(at)
            wanted = set(self.due) - {name for name, other in self.positions.items() if other < at} | waits
        self.readers.append((reader, wanted))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), count=st.integers(1, 5), ack=st.booleans())
    def read(self, data: st.DataObject, count: int, ack: bool) -> None:
        reader, wanted = data.draw(st.sampled_from(self.readers))
        for message in reader.receive(count):
            assert self.due[message.payload] <= self.clock.now_ms()
            wanted.remove(message.payload)  # once
            if ack:
                reader.ack(message)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def close_reader(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(self.readers))
        self.readers.remove(found)
        found[0].close()

    @invariant()
    def holds_nothing(self) -> None:
        topic = self.store._engine.topics.get(self.topic._name) if self.topic.exists() else None
        if topic is not None:
            assert len(topic.readers) == len(self.readers) + 1  # the observer
            assert list(topic.subscriptions) == ["s"]

    def teardown(self) -> None:
        """Every reader gets what is not trimmed in the end."""
        self.clock.advance(200_000)
        self.observe()
        log = self.store._engine.topics.get(self.topic._name).log
        gone = {name for name, at in self.positions.items() if at.ledger_id < log.first_ledger}
        for reader, wanted in self.readers:
            got = received(reader)
            assert len(set(got)) == len(got)
            assert set(got) <= wanted
            assert wanted - set(got) <= gone
        assert list(self.store.check()) == []
        assert self.store.stats().set_aside == 0
        self.store.close()
        self.directory.cleanup()


ReaderMachine.TestCase.settings = settings(
    max_examples=length("DUELOG_EXAMPLES", 15, 40), stateful_step_count=30, deadline=None
)
TestReaders = pytest.mark.series(ReaderMachine.TestCase)


def test_a_reader_survives_no_restart(open_store: OpenStore, store: DelayedStore, topic: Topic) -> None:
    """It is gone, and what it acknowledged comes to the next one."""
    topic.subscribe("keeps").close()
    topic.send_payloads(SEND)
    reader = topic.reader(name="r")
    reader.ack(reader.receive(4), durable=True)
    store.close()
    assert received(open_store(config=CONFIG).topic("t").reader(name="r")) == SEND


def test_a_reader_seeks_gives_back_and_acknowledges_as_a_subscription_does(topic: Topic) -> None:
    """All in memory."""
    topic.subscribe("keeps").close()
    topic.send_payloads(SEND)
    reader = topic.reader()
    batch = reader.receive(10)
    assert reader.nack(batch[:2], delay=0) == 2
    assert [(message.payload, message.redelivery_count) for message in reader.receive(10)] == [
        (SEND[0], 1),
        (SEND[1], 1),
    ]
    assert reader.ack_cumulative(batch[3]) == 4
    reader.seek(batch[2])
    assert received(reader) == SEND[2:]
    reader.seek("latest")
    assert received(reader) == []
    with pytest.raises(InvalidArgument):
        reader.retry_later(batch[0], 1)
