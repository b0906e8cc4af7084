"""A subscription peeked at, skipped, expired and reset from outside, against a list; and seeking by publish time."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duelog import DelayedStore, ManualClock, PublishedAt, StoreConfig, Subscription, Topic
from duelog.markers import reader
from duelog.store.errors import ClosedError, ConsumerBusy, InvalidArgument, UnknownSubscription, UnknownTopic
from duelog.store.log import scan
from duelog.store.position import Position
from tests.conftest import START_MS, OpenStore
from tests.duelog.consuming import each_received, payloads, received
from tests.proof import length

SEND = [b"%d" % number for number in range(6)]
CONFIG = StoreConfig(ledger_max_entries=3, partition_ms=60_000, inline_delay_ms=2_000)


class Entry(NamedTuple):
    """A message of the main log."""

    position: Position
    payload: bytes
    publish_ms: int
    due_ms: int


class AdminMachine(RuleBasedStateMachine):
    """Everything that is done to a subscription from outside, beside sends, time, consumers and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.clock = ManualClock(START_MS)
        self.acked: set[bytes] = set()
        self.sent: dict[bytes, tuple[int, int]] = {}
        self.inline: dict[bytes, Position] = {}
        self.fired: dict[bytes, Position] = {}
        self.open()
        self.topic.subscribe("keeps").close()
        self.topic.subscribe("s").close()

    def open(self) -> None:
        """The store, with a consumer that sees every message."""
        self.store = DelayedStore.open(Path(self.directory.name) / "s", CONFIG, clock=self.clock)
        self.topic = self.store.topic("t")
        self.witness = self.topic.reader()
        self.consumer: Subscription | None = None

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def log(self) -> list[Entry]:
        """The main log by position, with what waits inline."""
        for message in each_received(self.witness):
            self.fired[message.payload] = message.position
        places = {**self.inline, **self.fired}
        return sorted(Entry(places[payload], payload, *self.sent[payload]) for payload in places)

    def readable(self) -> list[Entry]:
        """The messages that `peek` may show: due, and not acknowledged."""
        return [each for each in self.log() if each.due_ms <= self.now_ms and each.payload not in self.acked]

    @rule(delay_ms=st.sampled_from([0, 0, 0, 700, 1_900, 5_000, 130_000]), count=st.integers(1, 4))
    def send(self, delay_ms: int, count: int) -> None:
        for _ in range(count):
            payload = b"%d" % len(self.sent)
            message_id = self.topic.send(payload, deliver_after=delay_ms / 1000)
            self.sent[payload] = (self.now_ms, self.now_ms + delay_ms)
            if delay_ms <= 2_000:
                self.inline[payload] = message_id

    @rule(ms=st.sampled_from([1, 300, 1_000, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule(count=st.integers(1, 8), after=st.integers(0, 5))
    def peek(self, count: int, after: int) -> None:
        expected = self.readable()[after : after + count]
        found = self.topic.subscription("s").peek(count, after=after)
        assert [(each.position, each.payload) for each in found] == [each[:2] for each in expected]
        assert {(each.subscription, each.redelivery_count) for each in found} <= {("s", 0)}

    @rule(count=st.integers(1, 8))
    def skip(self, count: int) -> None:
        expected = self.readable()[:count]
        assert self.topic.subscription("s").skip(count) == len(expected)
        self.acked |= {each.payload for each in expected}

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        log = self.log()
        before_ms = data.draw(st.sampled_from([each.due_ms for each in log] or [START_MS])) + data.draw(
            st.integers(0, 1)
        )
        expected = {each.payload for each in log if each.due_ms < before_ms} - self.acked
        assert self.topic.subscription("s").expire(before_ms) == len(expected)
        self.acked |= expected

    @rule(data=st.data(), kind=st.sampled_from(["earliest", "latest", "position", "due", "published"]))
    def reset(self, data: st.DataObject, kind: str) -> None:
        log = self.log()
        due = [each for each in log if each.due_ms <= self.now_ms]
        to: Any = kind
        after: list[Entry] = []
        if kind == "earliest":
            after = log
        elif kind != "latest":
            if not due:
                return
            picked = data.draw(st.sampled_from(due))
            if kind == "position":
                to, after = picked.position, log[log.index(picked) :]
            elif kind == "due":
                to = picked.due_ms
                after = log[next(at for at, each in enumerate(log) if each.due_ms >= to) :]
            else:
                time_ms = picked.publish_ms + data.draw(st.integers(0, 1))
                to = PublishedAt(time_ms)
                first = next((each for each in due if each.publish_ms >= time_ms), None)
                after = [] if first is None else log[log.index(first) :]
        admin = self.topic.subscription("s")
        if self.consumer is not None:
            with pytest.raises(ConsumerBusy):
                admin.reset(to)
            self.consumer.seek(to)
        else:
            admin.reset(to)
        waiting = {payload for payload, (_, due_ms) in self.sent.items() if due_ms > self.now_ms}
        wanted = {each.payload for each in after} | (waiting - self.acked)  # what `expire` acknowledged stays so
        self.acked = {each.payload for each in log} - wanted

    @precondition(lambda self: self.consumer is None)
    @rule()
    def attach(self) -> None:
        self.consumer = self.topic.subscribe("s", type="shared")

    @precondition(lambda self: self.consumer is not None)
    @rule(count=st.integers(1, 5), acks=st.integers(0, 5))
    def consume(self, count: int, acks: int) -> None:
        assert self.consumer is not None
        self.log()
        batch = self.consumer.receive(count)
        for message in batch:
            assert message.payload not in self.acked
            assert self.sent[message.payload][1] <= self.now_ms
        self.consumer.ack(batch[:acks])
        self.acked |= {message.payload for message in batch[:acks]}

    @precondition(lambda self: self.consumer is not None)
    @rule()
    def detach(self) -> None:
        assert self.consumer is not None
        self.consumer.close()
        self.consumer = None

    @rule()
    def reopen(self) -> None:
        """All that was done is on disk."""
        self.store.close()
        self.open()

    @invariant()
    def counts(self) -> None:
        self.readable()
        assert self.topic.subscription("s").stats().backlog == len(self.readable())

    def teardown(self) -> None:
        """Each message that is not acknowledged comes, once."""
        self.clock.advance(400_000)
        if self.consumer is not None:
            self.consumer.close()
        self.log()
        with self.topic.subscribe("s") as consumer:
            got = received(consumer)
        assert sorted(got) == sorted(set(self.sent) - self.acked)
        assert list(self.store.check()) == []
        assert self.store.stats().set_aside == 0
        self.store.close()
        self.directory.cleanup()


AdminMachine.TestCase.settings = settings(
    max_examples=length("DUELOG_EXAMPLES", 12, 40), stateful_step_count=30, deadline=None
)
TestAdmin = pytest.mark.series(AdminMachine.TestCase)


def test_what_is_addressed_to_another_subscription_is_not_shown(topic: Topic, clock: ManualClock) -> None:
    """It is not this one's; and to skip counts what is shown."""
    other, consumer = topic.subscribe("other"), topic.subscribe("s")
    topic.send_payloads(SEND[:1])
    other.retry_later(other.receive(1)[0], 1)
    clock.advance(1_000)
    topic.send_payloads(SEND[1:])
    payloads(other)
    admin = topic.subscription("s")
    assert [message.payload for message in admin.peek(10)] == SEND
    assert admin.skip(4) == 4
    assert received(consumer) == SEND[4:]


def test_a_delayed_message_is_found_by_when_it_was_published(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Its marker stands after messages published later: they come again too, and it does."""
    topic.subscribe("keeps").close()
    clock.advance(1_000)
    topic.send(b"delayed", deliver_after=7_200)
    clock.advance(1_000)
    topic.send(b"later")
    clock.advance(7_200_000)
    store.tick()
    topic.send(b"last")
    with topic.subscribe("s") as consumer:
        assert payloads(consumer) == [b"later", b"delayed", b"last"]
        for time_ms, expected in (
            (START_MS, [b"later", b"delayed", b"last"]),
            (START_MS + 1_000, [b"later", b"delayed", b"last"]),
            (START_MS + 2_000, [b"later", b"delayed", b"last"]),
            (START_MS + 2_001, [b"last"]),
            (START_MS + 9_000_000, []),
        ):
            consumer.seek(PublishedAt(time_ms))
            assert received(consumer) == expected
            with topic.reader(PublishedAt(time_ms)) as reader:
                assert received(reader) == expected
        position = consumer.seek(PublishedAt(datetime.fromtimestamp((START_MS + 7_202_000) / 1000, UTC)))
        assert received(consumer) == [b"last"]
        assert topic.get(position) is not None
        for wrong in (-1, 1.5, "now", datetime(2026, 1, 1), None):
            with pytest.raises(InvalidArgument):
                consumer.seek(PublishedAt(wrong))  # type: ignore[arg-type]


def test_whole_ledgers_closed_before_the_time_are_not_read(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a hundred ledgers is read."""
    topic = open_store(config=StoreConfig(ledger_max_entries=1)).topic("t")
    topic.subscribe("s").close()
    for number in range(100):
        topic.send(b"%d" % number)
        clock.advance(10)
    looked: list[int] = []

    def noting(raw: Any, name: str, ledger_id: int, *rest: Any) -> Any:
        looked.append(ledger_id)
        return scan.runs(raw, name, ledger_id, *rest)

    monkeypatch.setattr(reader, "runs", noting)
    topic.subscription("s").reset(PublishedAt(START_MS + 985))
    assert len(looked) <= 3
    assert received(topic.subscribe("s")) == [b"99"]


def test_peeking_far_ahead_reads_what_lies_before(topic: Topic) -> None:
    """More than are read at once; a wrong number is named."""
    topic.subscribe("s").close()
    payloads = [b"%d" % number for number in range(200)]
    topic.send_payloads(payloads)
    admin = topic.subscription("s")
    for after in (0, 63, 64, 65, 129, 199):
        assert [message.payload for message in admin.peek(2, after=after)] == payloads[after : after + 2]
    assert admin.peek(after=200) == []
    for wrong in (-1, True, "1"):
        with pytest.raises(InvalidArgument, match="after="):
            admin.peek(after=wrong)  # type: ignore[arg-type]


def test_a_store_open_read_only_is_peeked_at_and_nothing_else(
    open_store: OpenStore, store: DelayedStore, topic: Topic
) -> None:
    """It shows what comes next, and stays as it is."""
    topic.subscribe("s").close()
    topic.send_payloads(SEND)
    store.close()
    admin = open_store(config=CONFIG, read_only=True).topic("t").subscription("s")
    assert [message.payload for message in admin.peek(10)] == SEND
    assert admin.stats().backlog == 6
    for change in (lambda: admin.skip(1), lambda: admin.expire(0), lambda: admin.reset("latest")):
        with pytest.raises(ClosedError):
            change()


def test_bad_input_and_what_is_gone_have_their_answers(store: DelayedStore, topic: Topic) -> None:
    """Nothing is acknowledged."""
    with pytest.raises(UnknownTopic):
        topic.subscription("s")
    topic.subscribe("s").close()
    with pytest.raises(UnknownSubscription):
        topic.subscription("other")
    admin = topic.subscription("s")
    topic.send_payloads(SEND)
    for wrong in (0, -1, True, 1.0, "1"):
        for call in (admin.peek, admin.skip):
            with pytest.raises(InvalidArgument):
                call(wrong)  # type: ignore[arg-type]
    for time in (-1, 1.5, "yesterday", datetime(2026, 1, 1)):
        with pytest.raises(InvalidArgument):
            admin.expire(time)  # type: ignore[arg-type]
    for place in ("middle", Position(2**30, 0), -5):
        with pytest.raises(InvalidArgument):
            admin.reset(place)
    assert admin.stats().backlog == 6
    topic.unsubscribe("s")
    for gone in (admin.peek, lambda: admin.skip(1), lambda: admin.expire(0), lambda: admin.reset("latest")):
        with pytest.raises(UnknownSubscription):
            gone()
    store.close()
    with pytest.raises(ClosedError):
        admin.peek()
