"""Messages: the due time that one asks for, and the classes themselves."""

import copy
import pickle
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from itertools import count
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.markers.reader import MessageMaker
from duelog.store.codec.body import encode_one
from duelog.store.message import MAX_DUE_MS, Message, ReceivedMessage, ScheduledMessage, resolve_due_ms
from duelog.store.position import MessageId, place_of
from tests.conftest import present

NOW = 1_790_000_000_000


def test_deliver_after_counts_from_now_and_rounds_up_to_the_millisecond() -> None:
    """By the rule of durations (test_config.py); without a delay there is no due time."""
    assert resolve_due_ms(Message(b""), NOW) is None
    for after, delay_ms in ((0, 0), (0.0705, 71), (np.int64(2), 2_000), (timedelta(microseconds=1), 1)):
        due = resolve_due_ms(Message(b"", deliver_after=after), NOW)  # type: ignore[arg-type]
        assert (due, type(due)) == (NOW + delay_ms, int)


@pytest.mark.parametrize(
    ("at", "due_ms"),
    [
        (0, 0),
        (NOW - 5, NOW - 5),
        (MAX_DUE_MS, MAX_DUE_MS),
        (np.int64(17), 17),
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC), MAX_DUE_MS),
        (datetime(2026, 11, 20, 12, 0, tzinfo=ZoneInfo("Europe/Berlin")), 1_795_172_400_000),
        (datetime(2026, 11, 20, 12, 0, tzinfo=ZoneInfo("Asia/Kathmandu")), 1_795_155_300_000),
        (datetime(2026, 11, 20, 12, 0, tzinfo=timezone(timedelta(hours=-12))), 1_795_219_200_000),
        # the hour that is there twice when clocks go back
        (datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=0), 1_792_888_200_000),
        (datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1), 1_792_891_800_000),
        # finer than a millisecond: up
        (datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC), 1_767_225_600_001),
        (datetime(2026, 1, 1, 0, 0, 0, 1_000, tzinfo=UTC), 1_767_225_600_001),
        (datetime(2026, 1, 1, 0, 0, 0, 1_001, tzinfo=UTC), 1_767_225_600_002),
    ],
)
def test_deliver_at_is_an_instant_in_any_zone(at: Any, due_ms: int) -> None:
    """Ints are taken as they are, aware datetimes by their offset, fractions of a millisecond rounded up."""
    due = resolve_due_ms(Message(b"", deliver_at=at), NOW, allow_past=True)
    assert due == due_ms
    assert type(due) is int


@given(
    st.builds(
        datetime.replace,
        st.datetimes(datetime(1971, 1, 1), datetime(9999, 12, 30)),
        tzinfo=st.sampled_from(
            [ZoneInfo(name) for name in ("UTC", "America/St_Johns", "Asia/Tokyo", "Pacific/Chatham", "Europe/Dublin")]
        ),
    )
)
@settings(max_examples=100)
def test_no_datetime_is_early_and_none_late_by_a_millisecond(at: datetime) -> None:
    """0 <= due - instant < 1 ms, compared in exact fractions."""
    due_ms = present(resolve_due_ms(Message(b"", deliver_at=at), NOW, allow_past=True))
    delta = at - datetime(1970, 1, 1, tzinfo=UTC)
    exact = Fraction(delta.days * 86_400_000 + delta.seconds * 1000) + Fraction(delta.microseconds, 1000)
    assert 0 <= due_ms - exact < 1


def test_messages_are_small_records_whose_payload_alone_is_positional() -> None:
    """They compare by value; Message(b"x", 5) is a mistake and not a due time."""
    with pytest.raises(TypeError):
        Message(b"x", 5)  # type: ignore[call-arg]
    assert Message(b"a", key="k") == Message(b"a", key="k")
    assert Message(b"a") != Message(b"b")
    received = ReceivedMessage(b"p", None, {}, MessageId(1, 2), MessageId(3, 4), 5, 6, 0, "t", "s")
    scheduled = ScheduledMessage(MessageId(1, 2), b"p", None, {}, 5, 6, "t")
    for value in (Message(b"a"), received, scheduled):
        assert not hasattr(value, "__dict__")
    assert (received.message_id, received.position, received.subscription) == ((1, 2), (3, 4), "s")


def _received(**others: object) -> ReceivedMessage:
    message = ReceivedMessage(b"p", "k", {"a": "b"}, MessageId(1, 2), MessageId(3, 4), 5, 6, 7, "t", "s", 8, "r")
    return replace(message, **others)  # type: ignore[arg-type]


def _made() -> ReceivedMessage:
    maker = MessageMaker("t", "s")
    maker.make(
        maker.reserve([place_of(MessageId(3, 4))], [place_of(MessageId(1, 2))], [5]),
        encode_one(Message(b"p"), 6, 1_000)[1],
    )
    return maker.messages()[0]


def test_a_received_message_is_a_dataclass_like_any_other() -> None:
    """Fields, equality, text, replacing, copies and pickles go by its fields, whatever they are kept as."""
    message = _received()
    assert [field.name for field in fields(message)] == [
        "payload", "key", "properties", "message_id", "position", "due_ms", "publish_ms", "redelivery_count", "topic",
        "subscription", "retries", "addressee"]  # fmt: skip
    assert asdict(message)["position"] == (3, 4)
    assert repr(message) == (
        "ReceivedMessage(payload=b'p', key='k', properties={'a': 'b'}, message_id=MessageId(ledger_id=1, entry_id=2), "
        "position=MessageId(ledger_id=3, entry_id=4), due_ms=5, publish_ms=6, redelivery_count=7, topic='t', "
        "subscription='s', retries=8, addressee='r')"
    )
    for same in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message)), _received()):
        assert same == message
    assert all(
        message != _received(**{name: value})
        for name, value in [("position", MessageId(3, 5)), ("message_id", MessageId(3, 4)), ("properties", {})]
    )
    with pytest.raises(TypeError):
        hash(message)


def test_what_a_received_message_makes_on_demand_is_what_it_was_given() -> None:
    """Ids and properties are set and read as if they were kept as they are."""
    message = _made()
    assert message == ReceivedMessage(b"p", None, {}, MessageId(1, 2), MessageId(3, 4), 5, 6, 0, "t", "s")
    assert (type(message.message_id), type(message.position)) == (MessageId, MessageId)
    message.properties["a"] = "b"
    assert message.properties == {"a": "b"}
    assert _made().properties == {}
    assert pickle.loads(pickle.dumps(_made())) == copy.deepcopy(_made()) == _made()
    message.position = MessageId(2**40, 2**32 - 1)
    assert message.position == MessageId(2**40, 2**32 - 1)
    for odd in (MessageId(3, -1), MessageId(3, 2**32), MessageId(-1, 0)):  # no entry stands there, but it was given
        message.position = message.message_id = odd
        assert message.position == message.message_id == odd


def test_bodies_of_one_batch_are_told_apart_by_all_that_stands_before_the_payload() -> None:
    """Messages of one size, published at another time, with a key, with facts added: each gives its own."""
    maker = MessageMaker("t", "s")
    places = map(place_of, (MessageId(1, number) for number in count()))

    def made(message: Message, now_ms: int, extra: dict[str, object] | None = None) -> ReceivedMessage:
        at = next(places)
        maker.make(maker.reserve([at], [at], [0]), memoryview(encode_one(message, now_ms, 100_000, extra)[1]))
        return maker.messages()[-1]

    for size in (0, 1, 255, 256, 16_371, 16_372, 16_384, 20_000, 65_536):
        for now_ms in (6, 1_700_000_000_000, 1_700_000_000_001):
            for letter in (b"a", b"b"):
                found = made(Message(letter * size), now_ms)
                assert (found.payload, found.publish_ms, found.key) == (letter * size, now_ms, None)
                assert (found.properties, found.retries, found.addressee) == ({}, 0, None)
        keyed = made(Message(b"c" * size, key="k", properties={"a": "b"}), 6)
        assert (keyed.key, keyed.properties, keyed.payload) == ("k", {"a": "b"}, b"c" * size)
        again = made(Message(b"d" * size), 6, {"retries": 2, "addressee": "s"})
        assert (again.retries, again.addressee, again.payload) == (2, "s", b"d" * size)
