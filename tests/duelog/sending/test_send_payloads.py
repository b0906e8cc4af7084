"""Sending columns: the same messages as `send_batch` gives, the same refusals, ids made when they are looked at."""

import random
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, MessageId, MessageIds, StoreConfig
from duelog.errors import DelayTooLong, InvalidArgument, InvalidMessage
from duelog.store.codec.body import encode_batch, encode_payloads
from tests.conftest import START_MS, OpenStore


@settings(max_examples=200, deadline=None)
@given(
    payloads=st.lists(st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(bytes)), max_size=20),
    data=st.data(),
)
def test_columns_are_encoded_as_messages_are(payloads: list[bytes], data: st.DataObject) -> None:
    """Byte for byte, whatever the sizes of the payloads and the form of the column."""
    dues = data.draw(st.lists(st.integers(0, 10**13), min_size=len(payloads), max_size=len(payloads)))
    messages = [Message(p, deliver_at=d) for p, d in zip(payloads, dues, strict=True)]
    expected = encode_batch(messages, START_MS, 1 << 20, allow_past=True)
    for column in (dues, tuple(dues), np.array(dues, dtype=np.int64), np.array(dues, dtype=np.uint64)):
        found = encode_payloads(payloads, column, None, START_MS, 1 << 20, allow_past=True)
        assert list(found.bodies) == list(expected.bodies)
        assert found.dues.tolist() == expected.dues.tolist()
        assert found.delayed.tolist() == expected.delayed.tolist()


def test_what_is_sent_as_columns_is_received(open_store: OpenStore, clock: ManualClock) -> None:
    """Over several partitions and the main log; the ids are those that the messages come with."""
    topic = open_store(config=StoreConfig(partition_ms=1_000)).topic("t")
    subscription = topic.subscribe("s")
    dues = [START_MS + 500 * number - 700 for number in range(12)]
    ids = topic.send_payloads([b"%d" % number for number in range(12)], deliver_at=np.array(dues))
    assert isinstance(ids, MessageIds)
    assert len(ids) == 12
    clock.advance(10_000)
    received = []
    while batch := subscription.receive(100):
        received += batch
    assert {message.message_id: message.payload for message in received} == {
        message_id: b"%d" % number for number, message_id in enumerate(ids)
    }
    subscription.ack(received)


def test_one_time_for_all(store: DelayedStore, clock: ManualClock) -> None:
    """A delay, an instant, or neither: as `send` takes them."""
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send_payloads([b"now", bytearray(b"copied")])  # type: ignore[list-item]
    topic.send_payloads([b"later"], deliver_after=1.5)
    topic.send_payloads([b"then"], deliver_at=datetime.fromtimestamp((START_MS + 2_000) / 1000, UTC))
    assert [message.payload for message in subscription.receive(10)] == [b"now", b"copied"]
    clock.advance(2_000)
    assert [message.payload for message in subscription.receive(10)] == [b"later", b"then"]
    assert topic.send_payloads([]) == []


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (b"bytes", {}, "payloads"),
    ([b"a", "text"], {}, r"payloads\[1\]"),
    ([b"a", bytes(3 << 20), bytes(6 << 20)], {}, r"payloads\[2\]"),
    ([b"a", b"b"], {"deliver_at": [START_MS]}, "deliver_at"),
    ([b"a", b"b"], {"deliver_at": [START_MS, -1]}, r"deliver_at\[1\]"),
    ([b"a", b"b"], {"deliver_at": [START_MS, 10**30]}, r"deliver_at\[1\]"),
    ([b"a", b"b"], {"deliver_at": [START_MS, 1.5]}, r"deliver_at\[1\]"),
    ([b"a", b"b"], {"deliver_at": [True, START_MS]}, r"deliver_at\[0\]"),
    ([b"a"], {"deliver_at": np.array([1.5])}, "deliver_at"),
    ([b"a"], {"deliver_at": np.array([[START_MS]])}, "deliver_at"),
    ([b"a"], {"deliver_at": np.array([10**15])}, r"deliver_at\[0\]"),
    ([b"a"], {"deliver_at": "soon"}, "deliver_at"),
    ([b"a"], {"deliver_at": [START_MS], "deliver_after": 1}, "deliver_after"),
    ([b"a"], {"deliver_at": datetime(2026, 1, 1)}, "deliver_at"),
]


def test_what_cannot_be_taken_is_named_and_nothing_is_sent(store: DelayedStore) -> None:
    """The first thing that is wrong, by its field and place."""
    for payloads, keywords, field in REFUSED:
        with pytest.raises((InvalidMessage, InvalidArgument), match=field):
            store.topic("t").send_payloads(payloads, **keywords)
    assert store.stats().pending == 0


def test_a_policy_holds_for_columns_too(store: DelayedStore) -> None:
    """One delay over the limit refuses all."""
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=1_000))
    with pytest.raises(DelayTooLong):
        store.topic("t").send_payloads([b"a", b"b"], deliver_at=[START_MS + 1, START_MS + 1_001])
    assert store.stats().pending == 0


def test_many_ids_are_a_sequence() -> None:
    """Indexed, sliced, iterated and compared as a list of MessageId would be."""
    ids = MessageIds([(2, 0, 1), (1, 5, 2)], np.array([2, 0, 1]))
    as_list = [MessageId(1, 5), MessageId(1, 6), MessageId(2, 0)]
    assert list(ids) == ids.to_list() == as_list
    assert ids == as_list
    assert ids == tuple(as_list)
    assert ids != as_list[:2]
    assert ids[-1] == as_list[-1]
    assert ids[1:] == as_list[1:]
    assert MessageId(1, 6) in ids
    assert "1:5" in repr(ids)
    assert ids != 3


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 3)), max_size=8), st.randoms())
def test_runs_of_ids_are_the_ids(segments: list[tuple[int, int, int]], chance: random.Random) -> None:
    """In the order of the messages, however the ids are kept."""
    count = sum(length for _, _, length in segments)
    places = np.array(chance.sample(range(count), count), dtype=np.intp)
    for ids in (MessageIds(segments), MessageIds(segments, places), MessageIds(segments, places)[1:]):
        runs = ids.runs()
        each = zip(runs[::3], runs[1::3], runs[2::3], strict=True)
        assert [MessageId(ledger, first + at) for ledger, first, length in each for at in range(length)] == list(ids)
