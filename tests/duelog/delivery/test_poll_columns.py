"""Polling as columns gives what polling gives, and acknowledging by columns is acknowledging."""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from duelog.store.errors import InvalidArgument
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


def test_what_is_for_another_subscription_is_in_no_column(topic: Topic, clock: ManualClock) -> None:
    """It is acknowledged, and the rest of the batch comes."""
    one, other = topic.subscribe("one"), topic.subscribe("other")
    topic.send(b"x")
    one.retry_later(one.receive(1)[0], 1)
    clock.advance(1_000)
    topic.send(b"y")
    batch, _ = other.poll_columns(10)
    assert batch.payloads == [b"x", b"y"]
    assert other.ack(batch) == 2
    assert other.stats().backlog == 0
    assert one.poll_columns(10)[0].payloads == [b"y", b"x"]


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
