"""What callers get wrong: each has an error of its own with the value in it, and the store stays as it was."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, Subscription, Topic
from duelog.errors import (
    ClosedError,
    ConsumerBusy,
    DuelogError,
    InvalidArgument,
    InvalidMessage,
    UnknownSubscription,
    UnknownTopic,
)
from duelog.store.message import MAX_DUE_MS
from duelog.store.position import Position
from tests.conftest import START_MS, OpenStore
from tests.duelog.store_state import records

CONFIG = StoreConfig(partition_ms=3_600_000, max_message_bytes=1000)


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store with a topic, a subscription, a fired message and a delayed one."""
    store = open_store(config=CONFIG)
    topic = store.topic("known")
    topic.subscribe("reader").close()
    topic.send(b"now")
    topic.send(b"later", deliver_after=60)
    return store


@pytest.fixture
def topic(store: DelayedStore) -> Topic:
    """The topic that exists."""
    return store.topic("known")


@pytest.fixture
def reader(topic: Topic) -> Iterator[Subscription]:
    """A consumer of the subscription that exists."""
    with topic.subscribe("reader") as subscription:
        yield subscription


@pytest.fixture(autouse=True)
def unchanged(store: DelayedStore) -> Iterator[None]:
    """Nothing that a test of this module does changes a record, or makes or removes a file."""
    before = records(store)
    yield
    if not store.closed:
        assert records(store) == before


def shown(error: DuelogError, value: object) -> bool:
    """Whether an error's text has the value in it, shortened where it is long."""
    return repr(value)[:100] in str(error)


# -- due times ---------------------------------------------------------------------------------

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
    ("deliver_after", math.nan, "not a finite"),
    ("deliver_after", math.inf, "not a finite"),
    ("deliver_after", -math.inf, "not a finite"),
    ("deliver_after", -1, "negative"),
    ("deliver_after", -0.001, "negative"),
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


@pytest.mark.parametrize(("field", "value", "reason"), BAD_TIMES, ids=lambda value: repr(value)[:30])
def test_a_bad_due_time_is_refused_by_its_field_and_value(topic: Topic, field: str, value: Any, reason: str) -> None:
    """Alone, in a batch behind good messages, and as a new time for a message that waits."""
    with pytest.raises(InvalidMessage, match=reason) as caught:
        topic.send(b"x", **{field: value})
    assert (caught.value.field, caught.value.value is value) == (field, True)
    assert shown(caught.value, value)
    batch = [Message(b"good"), Message(b"good", deliver_after=5), Message(b"bad", **{field: value})]
    with pytest.raises(InvalidMessage, match=reason) as caught:
        topic.send_batch(batch)
    assert caught.value.field == f"messages[2].{field}"
    scheduled = next(topic.scheduled())
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


@pytest.mark.parametrize("bad", BAD_TIMES[:14], ids=lambda bad: repr(bad[1])[:30])
def test_a_bad_range_of_due_times_is_refused_by_its_own_name(topic: Topic, bad: tuple[str, Any, str]) -> None:
    """`start` and `end` are instants as deliver_at is, and are not called so."""
    _, value, reason = bad
    for field in ("start", "end"):
        with pytest.raises(InvalidArgument, match=reason) as caught:
            topic.scheduled(**{field: value})
        assert caught.value.field == field


@pytest.mark.parametrize("limit", [-1, 1.5, "3", True])
def test_a_bad_limit_is_refused(topic: Topic, limit: Any) -> None:
    """A number of messages."""
    with pytest.raises(InvalidArgument, match="limit="):
        topic.scheduled(limit=limit)


# -- payloads, keys, properties ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
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
        ({"payload": b"", "properties": {"a": 1}}, "properties['a']", "expected a str"),
        ({"payload": b"", "properties": {1: "a"}}, "properties", "expected a str as name"),
        ({"payload": b"", "properties": [("a", "b")]}, "properties", "expected a mapping"),
        ({"payload": b"", "properties": {"a": "\udfff"}}, "properties['a']", "surrogate"),
        ({"payload": b"", "properties": {"a": "x" * 1000}}, "payload", "over max_message_bytes=1000"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_message_that_cannot_be_taken_is_refused(
    topic: Topic, fields: dict[str, Any], field: str, reason: str
) -> None:
    """By the name of what is wrong with it, alone and in a batch; a long value is not repeated in full."""
    with pytest.raises(InvalidMessage) as caught:
        topic.send(**fields)
    assert caught.value.field == field
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 300
    with pytest.raises(InvalidMessage) as caught:
        topic.send_batch([Message(b"good", deliver_after=1), Message(**fields)])
    assert caught.value.field == f"messages[1].{field}"


@pytest.mark.parametrize("messages", [b"payload", "text", 5, None, Message(b"one")], ids=lambda value: repr(value)[:20])
def test_a_batch_that_is_no_sequence_of_messages_is_refused(topic: Topic, messages: Any) -> None:
    """One message, a payload, or nothing iterable."""
    with pytest.raises(InvalidArgument, match="messages"):
        topic.send_batch(messages)


@pytest.mark.parametrize("item", [b"payload", None, {"payload": b"x"}])
def test_a_batch_with_something_else_in_it_is_refused(topic: Topic, item: Any) -> None:
    """By its place."""
    with pytest.raises(InvalidMessage, match=r"messages\[1\]"):
        topic.send_batch([Message(b"good"), item])


def test_an_error_inside_a_callers_generator_is_its_own(topic: Topic) -> None:
    """And nothing of the batch is written."""

    def generate() -> Iterator[Message]:
        yield Message(b"good")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        topic.send_batch(generate())


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", "/", "a/b", "a/b/c/d", "persistent://a", "persistent://a/b/", "non-persistent://a/b/c", "http://a/b/c",
     "a b/c/d", "tenant/na√mespace/x", "a/b/line\nbreak", "x" * 401, "nul\0", "\ud800", None, 5, b"bytes"],
)  # fmt: skip
def test_a_malformed_topic_name_is_refused(store: DelayedStore, name: Any) -> None:
    """Wherever one is given."""
    for use in (store.topic, store.delete_topic):
        with pytest.raises(InvalidArgument) as caught:
            use(name)
        assert caught.value.field == "topic"
        assert shown(caught.value, name)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 201, "nul\0", "line\nbreak", "\udfff", None, 5, b"bytes"])
def test_a_malformed_subscription_name_is_refused(store: DelayedStore, name: Any) -> None:
    """And neither the subscription nor a topic comes into being."""
    for topic in ("known", "unknown"):
        with pytest.raises(InvalidArgument) as caught:
            store.topic(topic).subscribe(name)
        assert caught.value.field == "subscription"
        assert shown(caught.value, name)
    assert not store.topic("unknown").exists()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"type": "sharded"}, "type"),
        ({"type": None}, "type"),
        ({"type": ["shared"]}, "type"),
        ({"initial_position": "middle"}, "initial_position"),
        ({"initial_position": 0}, "initial_position"),
    ],
)
def test_a_malformed_subscription_is_refused(store: DelayedStore, arguments: dict[str, Any], field: str) -> None:
    """And neither it nor its topic comes into being."""
    for topic in ("known", "unknown"):
        with pytest.raises(InvalidArgument, match=f"{field}=") as caught:
            store.topic(topic).subscribe("new", **arguments)
        assert caught.value.field == field
    assert store.topic("known").subscriptions() == ["reader"]
    assert not store.topic("unknown").exists()


@pytest.mark.parametrize("namespace", ["", "tenant", "a/b/c", "a b/c", "/", 5])
def test_a_malformed_namespace_is_refused(store: DelayedStore, namespace: Any) -> None:
    """At once, not when the first topic is asked for."""
    with pytest.raises(InvalidArgument, match="namespace"):
        store.topics(namespace)


@pytest.mark.parametrize("pattern", ["(", "*", b"bytes", 5])
def test_a_pattern_that_is_no_regular_expression_is_refused(store: DelayedStore, pattern: Any) -> None:
    """At once."""
    with pytest.raises(InvalidArgument, match="pattern"):
        store.topics(pattern=pattern)


# -- what does not exist -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda topic: topic.unsubscribe("reader"),
        lambda topic: topic.subscriptions(),
        lambda topic: topic.stats(),
        lambda topic: topic.get(MessageId(1, 0)),
        lambda topic: topic.scheduled(),
        lambda topic: topic.cancel(MessageId(1, 0)),
        lambda topic: topic.reschedule(MessageId(1, 0)),
    ],
)
def test_an_unknown_topic_is_named(store: DelayedStore, use: Callable[[Topic], object]) -> None:
    """Asking for it does not make it."""
    unknown = store.topic("shop/eu/unknown")
    with pytest.raises(UnknownTopic, match="shop/eu/unknown") as caught:
        use(unknown)
    assert caught.value.topic == "persistent://shop/eu/unknown"
    assert isinstance(caught.value, LookupError)
    assert not unknown.exists()


def test_deleting_an_unknown_topic_says_so(store: DelayedStore) -> None:
    """By its full name."""
    with pytest.raises(UnknownTopic, match="persistent://public/default/unknown"):
        store.delete_topic("unknown")


def test_an_unknown_subscription_is_named(topic: Topic) -> None:
    """With its topic."""
    with pytest.raises(UnknownSubscription, match=r"known.*'nobody'") as caught:
        topic.unsubscribe("nobody")
    assert (caught.value.topic, caught.value.subscription) == (topic.name, "nobody")


def test_a_taken_subscription_is_refused(topic: Topic, reader: Subscription) -> None:
    """An exclusive one to a second consumer, and any to a consumer of another type; nor can it be removed."""
    for kind in ("exclusive", "shared"):
        with pytest.raises(ConsumerBusy, match="'reader'"):
            topic.subscribe("reader", type=kind)
    with pytest.raises(ConsumerBusy):
        topic.unsubscribe("reader")


def test_ids_that_no_message_has_are_no_error(topic: Topic) -> None:
    """A message may be gone: nothing is found, nothing cancelled, nothing moved."""
    for message_id in (MessageId(10**9, 0), MessageId(1, 10**6), MessageId(0, 0)):
        assert topic.get(message_id) is None
        assert topic.cancel(message_id) is False
        assert topic.reschedule(message_id, deliver_after=5) is None


@pytest.mark.parametrize("message_id", [None, "1:0", (1, 0), 5])
def test_what_is_no_message_id_is_refused(topic: Topic, message_id: Any) -> None:
    """A pair of numbers may be anything."""
    for use in (topic.get, topic.cancel, topic.reschedule):
        with pytest.raises(InvalidArgument):
            use(message_id)


# -- receiving and acknowledging ---------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 1.0, "1", True, None])
def test_a_bad_number_of_messages_is_refused(reader: Subscription, count: Any) -> None:
    """At least one."""
    with pytest.raises(InvalidArgument, match="max_messages="):
        reader.receive(count)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, "1", True, 1e11])
def test_a_bad_time_to_wait_is_refused(reader: Subscription, seconds: Any) -> None:
    """As a timeout of a receive and as a delay of a nack."""
    with pytest.raises(InvalidArgument, match="timeout="):
        reader.receive(1, timeout=seconds)
    with pytest.raises(InvalidArgument, match="delay="):
        reader.nack(Position(1, 0), delay=seconds)


@pytest.mark.parametrize("what", [None, 5, "1:0", [None], [b"x"], (1, 0), [(1, 0)]], ids=repr)
def test_what_is_no_message_cannot_be_acknowledged(reader: Subscription, what: Any) -> None:
    """Neither one by one nor cumulatively."""
    for use in (reader.ack, reader.ack_cumulative, reader.nack):
        with pytest.raises(InvalidArgument, match="messages="):
            use(what)


@pytest.mark.parametrize("what", [[], [Position(1, 0), Position(1, 1)]], ids=repr)
def test_a_cumulative_acknowledgement_is_of_one_message(reader: Subscription, what: Any) -> None:
    """None, or several, is refused."""
    with pytest.raises(InvalidArgument, match="one message"):
        reader.ack_cumulative(what)


@pytest.mark.parametrize("position", [Position(10**9, 0), Position(1, 10**6)])
def test_a_position_that_the_topic_does_not_have_is_not_acknowledged(
    topic: Topic, reader: Subscription, position: Position
) -> None:
    """Nothing of the call is: also not the good ones before it."""
    (message,) = reader.receive(1, timeout=0)
    with pytest.raises(InvalidArgument, match=str(max(position))):
        reader.ack([message.position, position], durable=True)
    with pytest.raises(InvalidArgument, match=str(max(position))):
        reader.ack_cumulative(position)
    assert reader.stats().backlog == 1


# -- closed ------------------------------------------------------------------------------------

STORE_USES: list[Callable[[DelayedStore], object]] = [
    lambda store: store.topic("known"),
    lambda store: store.topics(),
    lambda store: store.delete_topic("known"),
    lambda store: store.tick(),
    lambda store: store.flush(),
    lambda store: store.check(),
    lambda store: store.stats(),
    lambda store: store.partitions(),
    lambda store: store.accept_clock(),
    lambda store: store.__enter__(),
]

TOPIC_USES: list[Callable[[Topic], object]] = [
    lambda topic: topic.send(b"x"),
    lambda topic: topic.send(b"x", deliver_after=5),
    lambda topic: topic.send_batch([Message(b"x")]),
    lambda topic: topic.subscribe("another"),
    lambda topic: topic.unsubscribe("reader"),
    lambda topic: topic.get(MessageId(1, 0)),
    lambda topic: topic.cancel(MessageId(1, 0)),
    lambda topic: topic.reschedule(MessageId(1, 0)),
    lambda topic: topic.scheduled(),
    lambda topic: topic.exists(),
    lambda topic: topic.subscriptions(),
    lambda topic: topic.stats(),
]

SUBSCRIPTION_USES: list[Callable[[Subscription], object]] = [
    lambda subscription: subscription.receive(1, timeout=0),
    lambda subscription: subscription.ack(Position(1, 0)),
    lambda subscription: subscription.ack_cumulative(Position(1, 0)),
    lambda subscription: subscription.nack(Position(1, 0)),
    lambda subscription: subscription.stats(),
]


def test_a_closed_store_refuses_everything_by_name(store: DelayedStore, topic: Topic, reader: Subscription) -> None:
    """Whatever is asked of it, of its topics or of its subscriptions; closing again does nothing."""
    iterator = store.topics()
    scheduled = topic.scheduled()
    store.close()
    store.close()
    uses: list[Callable[[], object]] = [
        *[lambda use=use: use(store) for use in STORE_USES],
        *[lambda use=use: use(topic) for use in TOPIC_USES],
        *[lambda use=use: use(reader) for use in SUBSCRIPTION_USES],
        lambda: next(iterator),
        lambda: next(scheduled),
    ]
    for number, use in enumerate(uses):
        with pytest.raises(ClosedError) as caught:
            use()
        assert "closed" in str(caught.value), number
    reader.close()


def test_a_closed_subscription_refuses_everything_by_name(reader: Subscription) -> None:
    """The store and other consumers go on."""
    reader.close()
    for use in SUBSCRIPTION_USES[:-1]:
        with pytest.raises(ClosedError, match="'reader'"):
            use(reader)


def test_a_bad_path_config_or_clock_is_refused(store: DelayedStore) -> None:
    """Before anything is touched."""
    for arguments, field in (
        ({"path": 5}, "path"),
        ({"path": None}, "path"),
        ({"path": "x", "config": {"partition_ms": 5}}, "config"),
        ({"path": "x", "clock": 5}, "clock"),
        ({"path": "x", "clock": ManualClock}, "clock"),
    ):
        with pytest.raises(InvalidArgument, match=f"{field}="):
            DelayedStore.open(**arguments)
