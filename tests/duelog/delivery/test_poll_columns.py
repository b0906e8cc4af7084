"""Polling as columns gives what polling gives; reading ahead what reading would give, within its budget."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from duelog import (
    DelayedStore,
    ManualClock,
    Message,
    MessageId,
    MessageIds,
    ReceivedMessage,
    ReceivedMessages,
    Subscription,
    Topic,
)
from duelog.delivery.acks import AckSet, LedgerList
from duelog.delivery.due_reader import ReadAhead, ReadAheadBudget
from duelog.markers.reader import MainLogReader, Unacknowledged
from duelog.store.errors import InvalidArgument
from duelog.store.position import Position
from tests.duelog.store_state import payloads, received
from tests.proof import length

NUMBERS = st.integers(0, 2**40)
MESSAGES = st.lists(
    st.builds(
        ReceivedMessage,
        st.binary(max_size=5),
        st.none() | st.text(max_size=3),
        st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2),
        st.builds(MessageId, NUMBERS, st.integers(0, 2**32 - 1)),
        st.builds(MessageId, NUMBERS, st.integers(0, 2**32 - 1)),
        NUMBERS,
        NUMBERS,
        st.integers(0, 9),
        st.just("t"),
        st.just("s"),
        st.integers(0, 3),
        st.none() | st.just("s"),
    ),
    unique_by=attrgetter("position"),
    max_size=12,
)


@pytest.mark.series
@settings(max_examples=length("DUELOG_EXAMPLES", 60, 200), deadline=None)
@given(messages=MESSAGES, data=st.data())
def test_columns_are_the_messages_however_they_are_divided_and_joined(
    messages: list[ReceivedMessage], data: st.DataObject
) -> None:
    """A list is the twin: parts, rows, sums, single messages and columns of ids."""
    batch = ReceivedMessages.of("t", "s", messages)
    assert batch == messages
    assert len(batch) == len(messages)
    start, limit = sorted(data.draw(st.tuples(*[st.integers(0, len(messages))] * 2)))
    assert batch.part(start, limit) == batch[start:limit] == messages[start:limit]
    rows = data.draw(st.lists(st.integers(0, len(messages) - 1))) if messages else []
    assert batch.pick(rows) == [messages[row] for row in rows]
    assert batch.part(start, len(batch)) + batch.part(0, start) == messages[start:] + messages[:start]
    assert [batch[at] for at in range(len(batch))] == messages
    assert batch.positions == [message.position for message in messages]
    assert batch.message_ids == [message.message_id for message in messages]
    assert batch[::-1] == messages[::-1]


def test_columns_hold_what_a_receiver_gets(store: DelayedStore, topic: Topic, clock: ManualClock) -> None:
    """At once, delayed, with key and properties, given back and postponed: side by side with a plain receiver."""
    one, other = (topic.subscribe(name, type="shared") for name in ("one", "other"))
    ids = topic.send_batch(
        [
            Message(b"bare"),
            Message(b"keyed", key="k"),
            Message(b"late", deliver_after=5),
            Message(b"", properties={"a": "b"}),
        ]
    )
    clock.advance(5_000)
    store.tick()
    batch, again_ms = one.poll_columns(10)
    assert again_ms is None
    assert batch.payloads == [b"bare", b"keyed", b"", b"late"]
    assert batch.keys == [None, "k", None, None]
    assert batch.redelivery_counts == [0] * 4
    assert batch.message_ids == [ids[0], ids[1], ids[3], ids[2]]
    for mine, theirs in zip(batch, other.receive(10), strict=True):
        assert mine.subscription == "one"
        mine.subscription = "other"
        assert mine == theirs
    assert one.nack(list(batch[1:2]), delay=0) == 1
    one.retry_later(batch[3], 60)
    clock.advance(60_000)
    store.tick()
    again, _ = one.poll_columns(10)
    assert (again.payloads, again.redelivery_counts) == ([b"keyed", b"late"], [1, 0])
    assert [message.retries for message in again] == [0, 1]
    assert one.poll_columns(10)[0] == []


@pytest.mark.parametrize("given_as", ["batch", "positions", "list", "array"])
def test_acknowledging_by_columns_is_acknowledging(topic: Topic, reader: Subscription, given_as: str) -> None:
    """All of a batch, a part of it, and some that are acknowledged already."""
    topic.send_payloads([b"%d" % number for number in range(100)])
    batch, _ = reader.poll_columns(100)

    def ack(part: ReceivedMessages) -> int:
        if given_as == "batch":
            return reader.ack(part)
        if given_as == "positions":
            return reader.ack(part.positions)
        if given_as == "list":
            return reader.ack(part.positions.to_list())
        ledgers, entries = part.positions.columns()
        return reader.ack(MessageIds.of(ledgers.copy(), entries.copy()))

    assert ack(batch[10:20]) == 10
    assert ack(batch[5:25]) == 10
    assert ack(batch[:0]) == 0
    assert ack(batch) == 80
    assert reader.stats().mark_delete == batch[99].position


def test_ids_that_the_topic_does_not_have_acknowledge_nothing(topic: Topic, reader: Subscription) -> None:
    """Beside one that it has."""
    position = topic.send(b"x")
    for entry_id in (position.entry_id + 1, -1, 2**40):
        entries = np.array([position.entry_id, entry_id], dtype=np.int64)
        with pytest.raises(InvalidArgument):
            reader.ack(MessageIds.of(np.full(2, position.ledger_id, dtype=np.int64), entries))
    assert reader.stats().backlog == 1


class Ledgers(LedgerList):
    """Ledgers of 40 entries."""

    def entries_of(self, ledger_id: int) -> int | None:
        return 40 if 1 <= ledger_id <= 4 else None

    def following(self, ledger_id: int) -> int | None:
        return max(ledger_id + 1, 1) if ledger_id < 4 else None


class Log(MainLogReader):
    """A log of four ledgers of 40 entries; entry 7 of each is gone, and those from `waiting_from` on are not due."""

    def __init__(self, waiting_from: Position | None = None, payload: bytes = b"x" * 10) -> None:
        self.reads: list[int] = []
        self.waiting_from = waiting_from
        self.payload = payload
        self.failing = False

    def read(
        self, start: Position, max_entries: int, skip: Unacknowledged, now_ms: int
    ) -> tuple[ReceivedMessages, Position, bool]:
        self.reads.append(max_entries)
        if self.failing:
            raise OSError("unreadable")
        found: list[ReceivedMessage] = []
        over = False
        ledger_id, entry_id = start
        while len(found) < max_entries:
            if entry_id >= 40:
                if ledger_id == 4:
                    break
                ledger_id, entry_id = ledger_id + 1, 0
            position = Position(ledger_id, entry_id)
            if entry_id != 7 and not skip.is_acked(position):
                if self.waiting_from is not None and position >= self.waiting_from:
                    over = True
                else:
                    message = ReceivedMessage(self.payload, None, {}, position, position, 0, 0, 0, "t", "s")
                    found.append(message)
            entry_id += 1
        return ReceivedMessages.of("t", "s", found), Position(ledger_id, entry_id), over


def nothing_acknowledged() -> AckSet:
    """The acknowledgements of a new subscription."""
    return AckSet(Position(1, -1))


def positions(messages: Sequence[ReceivedMessage]) -> list[Position]:
    """Where messages stand."""
    return [message.position for message in messages]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 30)),
        st.tuples(st.just("ack"), st.integers(0, 159)),
        st.tuples(st.just("seek"), st.integers(0, 159)),
    ),
    max_size=60,
)


@pytest.mark.series
@settings(max_examples=length("DUELOG_EXAMPLES", 60, 150), deadline=None)
@given(steps=STEPS)
@example([("seek", 34), ("read", 30), ("read", 11), ("ack", 90), ("read", 12), ("seek", 89), ("read", 2)])
def test_what_is_read_ahead_is_what_a_plain_reader_gives(steps: list[tuple[str, int]]) -> None:
    """Whatever is acknowledged and wherever the subscription goes in between."""
    plain, ahead = Log(), ReadAhead(Log(), ReadAheadBudget())
    acks, ledgers = nothing_acknowledged(), Ledgers()
    start = again = Position(1, 0)
    for step, number in steps:
        if step == "ack":
            acks.ack(1 + number // 40, BitMap([number % 40]), ledgers)
        elif step == "seek":
            start = again = Position(1 + number // 40, number % 40)
            acks.reset(Position(start.ledger_id, start.entry_id - 1))
            ahead.clear()  # as DueReader does: what was acknowledged and not read may be wanted again
        else:
            expected, start, _ = plain.read(start, number, acks, 0)
            found, again, over = ahead.read(again, number, acks, 0)
            assert positions(found) == positions(expected)
            assert not over


@pytest.mark.parametrize(
    ("counts", "reads", "asked", "expected"), [((5,), [5], 5, (5, 6, 8, 9, 10)), ((1, 1), [1, 2], 3, (2, 3, 4))]
)
def test_a_read_that_fails_loses_nothing(
    counts: tuple[int, ...], reads: list[int], asked: int, expected: tuple[int, ...]
) -> None:
    """The next one begins where it began, also after some was read ahead, of which nothing was handed out."""
    log = Log()
    ahead = ReadAhead(log, ReadAheadBudget())
    start = Position(1, 0)
    for count in counts:
        _, start, _ = ahead.read(start, count, nothing_acknowledged(), 0)
    assert log.reads == reads
    log.failing = True
    with pytest.raises(OSError, match="unreadable"):
        ahead.read(start, asked, nothing_acknowledged(), 0)
    log.failing = False
    messages, _, _ = ahead.read(start, asked, nothing_acknowledged(), 0)
    assert positions(messages) == [Position(1, entry_id) for entry_id in expected]


def test_a_consumer_that_reads_on_has_more_read_at_once_each_time() -> None:
    """One piece, then two, then four: most reads find what they ask for read already."""
    log = Log()
    ahead = ReadAhead(log, ReadAheadBudget())
    start, found = Position(1, 0), []
    for _ in range(15):
        messages, start, _ = ahead.read(start, 10, nothing_acknowledged(), 0)
        found += positions(messages)
    assert found == positions(Log().read(Position(1, 0), 150, nothing_acknowledged(), 0)[0])
    assert log.reads == [10, 20, 40, 80]


def test_a_log_that_is_read_to_its_end_is_not_read_ahead() -> None:
    """A consumer that has caught up gets what comes by a read of its own size."""
    log = Log()
    ahead = ReadAhead(log, ReadAheadBudget())
    messages, start, _ = ahead.read(Position(4, 30), 20, nothing_acknowledged(), 0)
    assert len(messages) == 10
    ahead.read(start, 20, nothing_acknowledged(), 0)
    assert log.reads == [20, 20]


def test_what_is_passed_over_ends_read_ahead() -> None:
    """The clock is asked again whether it is due, from where the messages given end."""
    log = Log(waiting_from=Position(1, 25))
    ahead = ReadAhead(log, ReadAheadBudget())
    first, start, over = ahead.read(Position(1, 0), 10, nothing_acknowledged(), 0)
    assert (len(first), over) == (10, False)
    second, start, over = ahead.read(start, 10, nothing_acknowledged(), 0)
    assert (positions(second)[-1], over) == (Position(1, 20), True)
    assert start == Position(1, 21)
    log.waiting_from = None
    third, _, _ = ahead.read(start, 10, nothing_acknowledged(), 0)
    assert positions(third) == [Position(1, entry_id) for entry_id in range(21, 31)]


def with_left(left: int) -> ReadAheadBudget:
    """A budget of which so much is left."""
    budget = ReadAheadBudget()
    budget.take(budget.left - left)
    return budget


def test_what_is_held_counts_against_a_budget_and_is_given_back() -> None:
    """Where nothing is left, read-ahead stops, and what is read is what is asked for."""
    budget = with_left(100_000)
    payload = b"x" * 2_000
    log = Log(payload=payload)
    one, other = ReadAhead(log, budget), ReadAhead(log, budget)
    starts = [Position(1, 0), Position(1, 0)]
    for _ in range(4):
        for at, reader in enumerate((one, other)):
            _, starts[at], _ = reader.read(starts[at], 10, nothing_acknowledged(), 0)
    assert 0 <= budget.left < 100_000
    one.clear()
    other.clear()
    assert budget.left == 100_000
    empty = ReadAhead(log, with_left(0))
    log.reads.clear()
    start = Position(1, 0)
    for _ in range(5):
        _, start, _ = empty.read(start, 10, nothing_acknowledged(), 0)
    assert log.reads == [10] * 5


def test_a_subscription_that_closes_holds_nothing_read_ahead(
    store: DelayedStore, topic: Topic, reader: Subscription
) -> None:
    """And the next one gets what was not handed out."""
    topic.send_batch([Message(b"%d" % number) for number in range(100)])
    found: list[bytes] = []
    for _ in range(4):
        found += payloads(reader, 5)
    budget = store._engine.delivery.inline.read_ahead
    whole = ReadAheadBudget().left
    assert budget.left < whole
    reader.close()
    assert budget.left == whole
    found += payloads(topic.subscribe("s"))
    assert found == [b"%d" % number for number in range(100)]


def test_what_is_acknowledged_while_it_is_read_ahead_is_not_handed_out(topic: Topic, reader: Subscription) -> None:
    """An acknowledgement by position of what was never received, and a cumulative one over it."""
    ids = topic.send_batch([Message(b"%d" % number) for number in range(100)])
    for _ in range(4):
        reader.ack(reader.receive(5))
    reader.ack([ids[22], ids[23]])
    assert received(reader, 5) == [b"20", b"21", b"24", b"25", b"26"]
    reader.ack_cumulative(ids[31])
    assert received(reader, 5) == [b"32", b"33", b"34", b"35", b"36"]


def test_a_seek_forgets_what_was_read_ahead(topic: Topic, reader: Subscription) -> None:
    """Everything from there on comes, once."""
    ids = topic.send_batch([Message(b"%d" % number) for number in range(100)])
    for _ in range(3):
        reader.ack(reader.receive(5))
    reader.seek(ids[3])
    assert received(reader) == [b"%d" % number for number in range(3, 100)]


def test_however_much_is_acknowledged_of_what_was_read_ahead_is_passed_over_at_once(
    topic: Topic, reader: Subscription
) -> None:
    """One by one, thousands of them: no limit of the interpreter is met."""
    ids = topic.send_batch([Message(b"%d" % number) for number in range(8_000)])
    for start in range(0, 4_000, 500):
        assert [message.payload for message in reader.receive(500)] == [b"%d" % (start + at) for at in range(500)]
    reader.ack(ids[4_001:7_490])
    assert [reader.receive(1)[0].payload for _ in range(2)] == [b"4000", b"7490"]
