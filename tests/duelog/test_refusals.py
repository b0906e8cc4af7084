"""What a store does not take, and what it does not have: refused by field or by name, and the store stays as it was."""

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, ReceivedMessages, StoreConfig, Subscription, Topic
from duelog.errors import ClosedError, ConsumerBusy, InvalidArgument, InvalidMessage, UnknownSubscription, UnknownTopic
from duelog.store.message import MAX_DUE_MS
from duelog.store.position import Position
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


OF_A_TOPIC_THAT_IS: list[Callable[[Topic], object]] = [
    lambda topic: topic.unsubscribe("s"),
    lambda topic: topic.subscriptions(),
    lambda topic: topic.stats(),
    lambda topic: topic.get(MessageId(1, 0)),
    lambda topic: topic.scheduled(),
    lambda topic: topic.cancel(MessageId(1, 0)),
    lambda topic: topic.reschedule(MessageId(1, 0)),
]


def test_an_unknown_topic_or_subscription_is_named(store: DelayedStore, topic: Topic) -> None:
    """Asking for it does not make it."""
    unknown = store.topic("shop/eu/unknown")
    for use in OF_A_TOPIC_THAT_IS:
        with pytest.raises(UnknownTopic, match="shop/eu/unknown") as caught:
            use(unknown)
        assert caught.value.topic == "persistent://shop/eu/unknown"
        assert isinstance(caught.value, LookupError)
        assert not unknown.exists()
    with pytest.raises(UnknownTopic, match="topic 'unknown' does not exist"):
        store.delete_topic("unknown")
    with pytest.raises(UnknownSubscription, match=r"topic 't' .*'unknown'") as refused:
        topic.unsubscribe("unknown")
    assert (refused.value.topic, refused.value.subscription) == (topic.name, "unknown")


def test_a_taken_subscription_is_refused(topic: Topic, reader: Subscription) -> None:
    """An exclusive one to a second consumer, and any to a consumer of another type; nor can it be removed."""
    for kind in ("exclusive", "shared"):
        with pytest.raises(ConsumerBusy, match="'s'"):
            topic.subscribe("s", type=kind)
    with pytest.raises(ConsumerBusy):
        topic.unsubscribe("s")


def test_ids_that_no_message_has_are_no_error(topic: Topic) -> None:
    """A message may be gone: nothing is found, nothing cancelled, nothing moved."""
    for message_id in (
        MessageId(10**9, 0), MessageId(1, 10**6), MessageId(0, 0), MessageId(1, 1 << 32), MessageId(1, -1),
        MessageId(2, 1 << 63), MessageId(1, 1 << 70), MessageId(1 << 70, 0),
    ):  # fmt: skip
        assert topic.get(message_id) is None
        assert topic.cancel(message_id) is False
        assert topic.reschedule(message_id, deliver_after=5) is None


TIMES = [-1, math.nan, math.inf, "1", True, 1e12, timedelta(seconds=-1)]
NO_MESSAGES = [None, 5, "1:x", [None], [b"x"], (1, 0), [(1, 0)], (ReceivedMessages.of("t", "s", []), None)]
REFUSED_CALLS: list[tuple[str, list[Any], Callable[[Subscription, Any], object]]] = [
    ("max_messages=", [0, -1, 1.0, "1", True, None], lambda reader, value: reader.receive(value)),
    ("timeout=", TIMES, lambda reader, value: reader.receive(1, timeout=value)),
    ("delay=", TIMES, lambda reader, value: reader.nack(Position(1, 0), delay=value)),
    ("messages=", NO_MESSAGES, lambda reader, value: reader.ack(value)),
    ("messages=", NO_MESSAGES, lambda reader, value: reader.ack_cumulative(value)),
    ("messages=", NO_MESSAGES, lambda reader, value: reader.nack(value)),
    ("messages=", NO_MESSAGES, lambda reader, value: reader.extend(value)),
    ("one message", [[], [Position(1, 0), Position(1, 1)]], lambda reader, value: reader.ack_cumulative(value)),
]


@pytest.mark.parametrize(("said", "values", "use"), REFUSED_CALLS)
def test_a_bad_argument_of_a_consumer_is_refused(
    reader: Subscription, said: str, values: list[Any], use: Callable[[Subscription, Any], object]
) -> None:
    """By its name; none or several messages are not acknowledged cumulatively."""
    for value in values:
        with pytest.raises(InvalidArgument, match=said):
            use(reader, value)


@pytest.mark.parametrize("position", [Position(10**9, 0), Position(1, 10**6)])
def test_a_position_that_the_topic_does_not_have_is_not_acknowledged(reader: Subscription, position: Position) -> None:
    """Nothing of the call is: also not the good ones before it."""
    (message,) = reader.receive(1, timeout=0)
    with pytest.raises(InvalidArgument, match=str(max(position))):
        reader.ack([message.position, position], durable=True)
    with pytest.raises(InvalidArgument, match=str(max(position))):
        reader.ack_cumulative(position)
    assert reader.stats().backlog == 1


STORE_USES: list[Callable[[DelayedStore], object]] = [
    lambda store: store.topic("t"),
    lambda store: store.topics(),
    lambda store: store.delete_topic("t"),
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
    lambda topic: topic.exists(),
    *OF_A_TOPIC_THAT_IS,
]

SUBSCRIPTION_USES: list[Callable[[Subscription], object]] = [
    lambda subscription: subscription.receive(1, timeout=0),
    lambda subscription: subscription.ack(Position(1, 0)),
    lambda subscription: subscription.ack_cumulative(Position(1, 0)),
    lambda subscription: subscription.nack(Position(1, 0)),
    lambda subscription: subscription.extend(Position(1, 0)),
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
        with pytest.raises(ClosedError, match="'s'"):
            use(reader)


def test_a_bad_path_config_or_clock_is_refused() -> None:
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


def test_as_many_messages_as_no_list_has_may_be_asked_for(topic: Topic, reader: Subscription) -> None:
    """It is a bound, and means all that there are: an error of Python's own came."""
    assert len(reader.receive(1 << 70, timeout=0)) == len(list(topic.scheduled(limit=1 << 70))) == 1


NO_LIST: list[tuple[str, Callable[[DelayedStore, Any], object]]] = [
    ("names", lambda store, value: store.create_topics(names=value)),
    ("letters", lambda store, value: store.requeue_dead_letters(letters=value)),
    ("letters", lambda store, value: store.purge_dead_letters(letters=value)),
    ("message_ids", lambda store, value: store.topic("t").cancel_batch(message_ids=value)),
    ("message_ids", lambda store, value: store.topic("t").reschedule_batch(message_ids=value)),
    ("keys", lambda store, value: store.topic("t").cancel_keys(keys=value)),
]


@pytest.mark.parametrize(("field", "use"), NO_LIST)
def test_what_is_no_list_is_refused_by_its_field(
    store: DelayedStore, field: str, use: Callable[[DelayedStore, Any], object]
) -> None:
    """An error of Python's own came, which named neither; a text was taken for a list of its letters."""
    for value in (5, "1:5", b"x", True):
        with pytest.raises(InvalidArgument, match=f"^{field}={value!r}: expected"):
            use(store, value)


def test_what_is_gone_through_once_is_a_list_also_by_name(store: DelayedStore) -> None:
    """By a connection a generator that was given by name was not taken."""
    assert store.topic("t").cancel_keys(keys=(key for key in "ab")) == []
    assert store.topic("t").cancel_batch(message_ids=iter(())) == []  # type: ignore[arg-type]
    assert store.requeue_dead_letters(letters=iter(())) == store.purge_dead_letters(letters=iter(())) == 0


@pytest.mark.parametrize("name", [[], {}, None, 5])
def test_a_subscription_of_no_name_is_unknown(topic: Topic, name: Any) -> None:
    """By the error that an unknown name has; by REST it was a fault of the broker's, with a traceback in its log."""
    for use in (topic.subscription, topic.unsubscribe, topic.clear_inline):
        with pytest.raises(UnknownSubscription, match=re.escape(f"has no subscription {name!r}")):
            use(name)


def test_what_is_searched_for_is_text(store: DelayedStore) -> None:
    """An error of Python's own came, and of `duelog.connect` as one that the server refused."""
    with pytest.raises(InvalidArgument, match="search=None: expected a str"):
        store.topic_rows(search=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [1, {}, None, "\ud800"])
def test_what_names_no_schedule_is_refused_by_its_field(topic: Topic, name: Any) -> None:
    """By the error that `every` has for it; by REST it was a fault of the broker's."""
    for use in (topic.pause_schedule, topic.resume_schedule, topic.remove_schedule):
        with pytest.raises(InvalidArgument, match="schedule="):
            use(name)
