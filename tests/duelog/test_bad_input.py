"""Messages, due times and names that cannot be taken: refused by field and value, the store stays as it was."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from duelog import DelayedStore, Message, StoreConfig, Topic
from duelog.errors import InvalidArgument, InvalidMessage
from duelog.store.message import MAX_DUE_MS
from tests.conftest import START_MS
from tests.duelog.store_state import shown

FACES = True

CONFIG = StoreConfig(max_message_bytes=1000)
pytestmark = pytest.mark.usefixtures("unchanged")


NAIVE = datetime(2026, 11, 20, 12, 0)

BAD_TIMES: list[tuple[str, Any, str]] = [
    ("deliver_at", NAIVE, "time zone"),
    ("deliver_at", -1, "before 1970"),
    ("deliver_at", datetime(1969, 12, 31, tzinfo=UTC), "before 1970"),
    ("deliver_at", MAX_DUE_MS + 1, "9999"),
    ("deliver_at", 2**63, "9999"),
    ("deliver_at", 10**400, "9999"),
    ("deliver_at", datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12))), "9999"),
    ("deliver_at", math.nan, "float"),
    ("deliver_at", math.inf, "float"),
    ("deliver_at", 1_790_000_000.5, "float"),
    ("deliver_at", "2026-11-20T12:00:00Z", "expected int"),
    ("deliver_at", True, "expected int"),
    ("deliver_at", Decimal(START_MS), "expected int"),
    ("deliver_at", timedelta(seconds=1), "expected int"),
    ("deliver_at", datetime.min.replace(tzinfo=timezone(timedelta(hours=14))), "before 1970"),
    ("deliver_at", datetime.max.replace(tzinfo=UTC), "9999"),
    ("deliver_after", math.nan, "not a finite"),
    ("deliver_after", math.inf, "not a finite"),
    ("deliver_after", -math.inf, "not a finite"),
    ("deliver_after", -1, "negative"),
    ("deliver_after", -5e-324, "negative"),
    ("deliver_after", Decimal(5), "expected seconds"),
    ("deliver_after", timedelta(microseconds=-1), "negative"),
    ("deliver_after", 1e300, "9999"),
    ("deliver_after", sys.float_info.max, "9999"),
    ("deliver_after", 10**400, "9999"),
    ("deliver_after", timedelta.max, "9999"),
    ("deliver_after", (MAX_DUE_MS - START_MS) // 1000 + 1, "9999"),
    ("deliver_after", "60", "expected seconds"),
    ("deliver_after", True, "expected seconds"),
    ("deliver_after", NAIVE, "expected seconds"),
]


def test_a_bad_due_time_is_refused_by_its_field_and_value(topic: Topic) -> None:
    """Alone, in a batch behind good messages, and as a new time for a message that waits."""
    scheduled = next(topic.scheduled())
    for field, value, reason in BAD_TIMES:
        with pytest.raises(InvalidMessage, match=reason) as caught:
            topic.send(b"x", **{field: value})
        assert (caught.value.field, repr(caught.value.value)) == (field, repr(value))
        assert shown(caught.value, value)
        batch = [Message(b"good"), Message(b"good", deliver_after=5), Message(b"bad", **{field: value})]
        with pytest.raises(InvalidMessage, match=reason) as caught:
            topic.send_batch(batch)
        assert caught.value.field == f"messages[2].{field}"
        with pytest.raises(InvalidMessage, match=reason):
            topic.reschedule(scheduled.message_id, **{field: value})


def test_two_due_times_are_refused(topic: Topic) -> None:
    """Even if they mean the same."""
    with pytest.raises(InvalidMessage, match="one of the two") as caught:
        topic.send(b"x", deliver_at=START_MS + 5000, deliver_after=5)
    assert caught.value.field == "deliver_after"
    assert str(START_MS + 5000) in str(caught.value)
    with pytest.raises(InvalidMessage, match="one of the two"):
        topic.send_batch([Message(b"x", deliver_at=datetime.now(UTC), deliver_after=timedelta(0))])


def test_a_bad_range_of_due_times_is_refused_by_its_own_name(topic: Topic) -> None:
    """`start` and `end` are instants as deliver_at is, and are not called so."""
    for (_, value, reason), field in itertools.product(BAD_TIMES[:14], ("start", "end")):
        with pytest.raises(InvalidArgument, match=reason) as caught:
            topic.scheduled(**{field: value})
        assert caught.value.field == field


BAD_MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"payload": "text"}, "payload", "encode it"),
    ({"payload": None}, "payload", "expected bytes"),
    ({"payload": 5}, "payload", "expected bytes"),
    ({"payload": [1, 2]}, "payload", "expected bytes"),
    ({"payload": bytes(1001)}, "payload", "over max_message_bytes=1000"),
    ({"payload": bytes(990), "key": "k" * 20}, "payload", "over max_message_bytes=1000"),
    ({"payload": memoryview(bytes(2000))}, "payload", "over max_message_bytes=1000"),
    ({"payload": b"", "key": b"bytes"}, "key", "expected a str"),
    ({"payload": b"", "key": "\ud800"}, "key", "surrogate"),
    ({"payload": b"", "key": "k" * 70_000}, "key", "65536"),
    ({"payload": b"", "key": b""}, "key", "expected a str"),
    ({"payload": b"", "key": "ü" * 32_769}, "key", "65536"),
    ({"payload": b"", "properties": {"a": "b", "n": 7}}, "properties['n']", "expected a str"),
    ({"payload": b"", "properties": {"n": None}}, "properties['n']", "expected a str"),
    ({"payload": b"", "properties": {1: "a"}}, "properties", "expected a str as name"),
    ({"payload": b"", "properties": {"\ud800": "b"}}, "properties", "surrogate"),
    ({"payload": b"", "properties": [("a", "b")]}, "properties", "expected a mapping"),
    ({"payload": b"", "properties": ""}, "properties", "expected a mapping"),
    ({"payload": b"", "properties": 0}, "properties", "expected a mapping"),
    ({"payload": b"", "properties": {"a": "\udfff"}}, "properties['a']", "surrogate"),
    *(({"payload": b"", "ttl": wrong}, "ttl", "ttl") for wrong in (0, -1, "1h", math.inf, True)),
    ({"payload": b"", "properties": {"a": "x" * 1000}}, "payload", "over max_message_bytes=1000"),
]


def test_a_message_that_cannot_be_taken_is_refused(topic: Topic) -> None:
    """By the name of what is wrong with it, alone and in a batch; a long value is not repeated in full."""
    for fields, field, reason in BAD_MESSAGES:
        with pytest.raises(InvalidMessage) as caught:
            topic.send(**fields)
        assert caught.value.field == field
        assert reason in str(caught.value)
        assert len(str(caught.value)) < 300
        for good in (Message(b"good", deliver_after=1), Message(b"a payload alone")):
            with pytest.raises(InvalidMessage) as caught:
                topic.send_batch([good, Message(**fields)])
            assert caught.value.field == f"messages[1].{field}"


REFUSED: list[tuple[str, list[Any], Callable[[DelayedStore, Any], object]]] = [
    ("after=", [0, "1:2", (1, 2)], lambda store, value: store.topic("t").scheduled(after=value)),
    ("limit=", [-1, 1.5, "3", True], lambda store, value: store.topic("t").scheduled(limit=value)),
    ("end=5: is before start=6", [(6, 5)], lambda store, value: store.topic("t").scheduled(*value)),
    ("messages", [b"x", "text", 5, None, Message(b"one")], lambda store, value: store.topic("t").send_batch(value)),
    (r"messages\[1\]", [b"x", None, {"payload": b"x"}],
     lambda store, value: store.topic("t").send_batch([Message(b"good"), value])),
    ("namespace", ["", "tenant", "a/b/c", "a b/c", "/", 5], lambda store, value: store.topics(value)),
    ("pattern", ["(", "*", b"bytes", 5], lambda store, value: store.topics(pattern=value)),
]  # fmt: skip
"""What an error says, values, and the call that is given them."""


@pytest.mark.parametrize(("said", "values", "use"), REFUSED, ids=[said for said, *_ in REFUSED])
def test_a_bad_argument_is_refused_at_once_by_its_name(
    store: DelayedStore, said: str, values: list[Any], use: Callable[[DelayedStore, Any], object]
) -> None:
    """Not when the first result is asked for."""
    for value in values:
        with pytest.raises((InvalidArgument, InvalidMessage), match=said):
            use(store, value)


def test_the_range_of_scheduled_messages_may_be_empty(topic: Topic) -> None:
    """[x, x) is, in Python as on the command line."""
    assert list(topic.scheduled(6, 6)) == []


def test_an_error_inside_a_callers_generator_is_its_own(topic: Topic) -> None:
    """And nothing of the batch is written."""

    def generate() -> Iterator[Message]:
        yield Message(b"good")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        topic.send_batch(generate())


TOPICS: list[Any] = [
    "", "/", "a/b", "a/b/c/d", "persistent://a", "persistent://a/b/", "non-persistent://a/b/c", "http://a/b/c",
    "a b/c/d", "tenant/na√mespace/x", "a/b/line\nbreak", "x" * 401, "nul\0", "\ud800", None, 5, b"bytes",
]  # fmt: skip
SUBSCRIPTIONS: list[Any] = ["", "a/b", "x" * 201, "nul\0", "line\nbreak", "\udfff", None, 5, b"bytes"]


def test_a_malformed_name_is_refused_wherever_one_is_given(store: DelayedStore) -> None:
    """And neither a subscription nor a topic comes into being."""
    for name, use in itertools.product(TOPICS, (store.topic, store.delete_topic)):
        with pytest.raises(InvalidArgument) as caught:
            use(name)
        assert caught.value.field == "topic"
        assert shown(caught.value, name)
    for name, topic in itertools.product(SUBSCRIPTIONS, ("t", "unknown")):
        with pytest.raises(InvalidArgument) as caught:
            store.topic(topic).subscribe(name)
        assert caught.value.field == "subscription"
        assert shown(caught.value, name)
    assert not store.topic("unknown").exists()


def test_a_malformed_subscription_is_refused(store: DelayedStore) -> None:
    """And neither it nor its topic comes into being."""
    for field, values in {"type": ["sharded", None, ["shared"]], "initial_position": ["middle", 0]}.items():
        for value, topic in itertools.product(values, ("t", "unknown")):  # type: ignore[call-overload]
            with pytest.raises(InvalidArgument, match=f"{field}=") as caught:
                store.topic(topic).subscribe("new", **{field: value})
            assert caught.value.field == field
    assert store.topic("t").subscriptions() == ["s"]
    assert not store.topic("unknown").exists()
