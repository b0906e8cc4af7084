"""Values that are as good as those of the signatures: each face takes them, and refuses the same ones."""

import enum
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from duelog import DelayedStore, Message, MessageId, Policies, Topic
from duelog.errors import InvalidArgument, InvalidMessage
from tests.conftest import START_MS

FACES = True


class Number(enum.IntEnum):
    """An enumeration of integers."""

    FIVE = 5


FIVE = [np.int64(5), np.uint8(5), Number.FIVE]
"""Integers of other classes than int."""
TRUE_IS_NO_NUMBER = [True, np.True_, 5.0, "5"]


@pytest.mark.parametrize("five", FIVE, ids=lambda five: type(five).__name__)
def test_an_integer_of_another_class_counts_as_one(store: DelayedStore, topic: Topic, five: Any) -> None:
    """numpy's, and those of an enumeration: as a number of messages, a limit, a version, a policy, a time."""
    topic.send_batch([Message(b"now")] * 6)
    topic.send_batch([Message(b"later", deliver_at=START_MS + 60_000)] * 6)
    with topic.subscribe("s", type="shared") as consumer:
        assert len(consumer.receive(five, timeout=five)) == 5
    assert len(topic.subscription("s").peek(five)) == 5
    assert topic.subscription("s").skip(five) == 5
    assert len(list(topic.scheduled(limit=five))) == 5
    assert topic.every("five", interval=five, count=five).count == 5
    assert topic.producer("till").send(Message(b"x"), sequence_id=five) is not None
    versions = [store.documents.put("k", b"x") for _ in range(5)]
    assert store.documents.put("k", b"y", expected=five) == versions[-1] + 1
    assert store.update_policies(topic="t", max_in_flight=five) == Policies(max_in_flight=5)
    store.set_policies(Policies(max_redeliveries=five), topic="t")
    assert repr(store.policies(topic="t")) == repr(Policies(max_redeliveries=5))
    topic.send(b"x", deliver_at=five, deliver_after=None, ttl=five, allow_past=True)
    topic.send(b"x", deliver_after=five)


@pytest.mark.parametrize("value", TRUE_IS_NO_NUMBER, ids=repr)
def test_what_is_no_integer_counts_as_none(store: DelayedStore, topic: Topic, value: Any) -> None:
    """A bool, of numpy too, a float, a text."""
    topic.send(b"x")
    consumer = topic.subscribe("s")
    for call, field in (
        (lambda: consumer.receive(value), "max_messages"),
        (lambda: topic.subscription("s").skip(value), "count"),
        (lambda: topic.scheduled(limit=value), "limit"),
        (lambda: topic.every("n", interval=60, count=value), "count"),
        (lambda: topic.producer("till").send(Message(b"x"), sequence_id=value), "sequence_id"),
        (lambda: store.documents.put("k", b"x", expected=value), "expected"),
        (lambda: store.update_policies(max_in_flight=value), "max_in_flight"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == field


@pytest.mark.parametrize(
    "kind", [enum.StrEnum("Name", {"SHARED": "shared"}), enum.Enum("Name", {"SHARED": "shared"}, type=str)]
)
def test_a_member_of_an_enumeration_of_texts_is_its_text(topic: Topic, kind: Any) -> None:
    """As a key, a name and a choice."""
    topic.send(b"x", key=kind.SHARED, dedup_key=kind.SHARED, deliver_after=60)
    assert [message.key for message in topic.scheduled()] == ["shared"]
    assert topic.find(kind.SHARED) is not None
    with topic.subscribe(kind.SHARED, type=kind.SHARED) as consumer:
        assert consumer.name == "shared"


def test_bytes_that_lie_apart_are_a_payload(store: DelayedStore, topic: Topic) -> None:
    """A memoryview with a step, wherever a payload or a document is given."""
    apart = memoryview(b"a-b-c-")[::2]
    consumer = topic.subscribe("s")
    topic.send(apart)
    topic.send_async(apart).result()
    topic.send_batch([Message(apart), Message(b"d")])
    topic.send_payloads([apart, b"e"])  # type: ignore[list-item]  # as good as bytes
    store.send_batch([("t", Message(apart))])
    topic.producer("till").send(Message(apart))
    with store.transaction() as transaction:
        transaction.send("t", b"at a time", deliver_at=datetime.fromtimestamp(START_MS / 1_000, UTC))
        transaction.send("t", apart)
    store.documents.put("k", apart)
    received = [message.payload for message in consumer.receive(100, timeout=0)]
    assert received == [b"abc"] * 3 + [b"d", b"abc", b"e"] + [b"abc"] * 2 + [b"at a time", b"abc"]
    document = store.documents.get("k")
    assert document is not None
    assert document.value == b"abc"


def test_payloads_may_come_one_by_one_and_in_an_array(topic: Topic) -> None:
    """`send_payloads` takes what `send_batch` takes, and due times as datetimes."""
    topic.send_payloads(b"%d" % number for number in range(2))  # type: ignore[arg-type]
    topic.send_payloads(np.array([b"2", b"3"], dtype=object))  # type: ignore[arg-type]
    topic.send_payloads([b"4", b"5"], deliver_at=[datetime(2100, 1, 1, tzinfo=UTC), START_MS + 5])
    assert [message.payload for message in topic.subscribe("s").receive(9, timeout=0)] == [b"0", b"1", b"2", b"3"]
    assert [message.payload for message in topic.scheduled()] == [b"5", b"4"]


@pytest.mark.parametrize("value", [np.datetime64("2100-01-01"), np.timedelta64(1, "D"), np.float32(5)], ids=repr)
def test_a_value_of_numpy_that_is_no_integer_is_refused_as_it_is(topic: Topic, value: Any) -> None:
    """A datetime64 has no zone, a timedelta64 no unit that is sure."""
    for field in ("deliver_at", "deliver_after", "ttl"):
        with pytest.raises(InvalidMessage) as caught:
            topic.send(b"x", **{field: value})
        assert caught.value.field == field
        assert repr(caught.value.value) == repr(value)


NO_IDS: list[Any] = [MessageId(None, None), MessageId("1", "0"), MessageId(1.0, 0), MessageId(object(), 0)]  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", NO_IDS, ids=range(len(NO_IDS)))
def test_an_id_of_something_else_than_integers_is_refused(topic: Topic, wrong: Any) -> None:
    """By its name, in every call that takes one."""
    topic.send(b"x", deliver_after=60)
    for call in (
        lambda: topic.get(wrong),
        lambda: topic.cancel(wrong),
        lambda: topic.cancel_batch([MessageId(1, 0), wrong]),
        lambda: topic.reschedule(wrong, deliver_after=5),
        lambda: topic.state(wrong),
        lambda: topic.fire_now(wrong),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == "message_id"


def test_a_payload_of_a_transaction_is_refused_as_of_a_send(store: DelayedStore) -> None:
    """The same class of error, and the same field."""
    with pytest.raises(InvalidMessage) as caught, store.transaction() as transaction:
        transaction.send("t", "text")  # type: ignore[arg-type]
    assert caught.value.field == "payload"


@pytest.mark.parametrize("wrong", [None, 5, b"x", object()], ids=["None", "5", "bytes", "object"])
def test_what_is_no_received_message_is_refused_by_a_transaction(store: DelayedStore, wrong: Any) -> None:
    """By its name, and not for being no sequence."""
    with pytest.raises(InvalidArgument) as caught, store.transaction() as transaction:
        transaction.ack(wrong)
    assert caught.value.field == "messages"
