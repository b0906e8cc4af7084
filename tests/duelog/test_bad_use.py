"""Asking for what does not exist, is taken or is closed: refused by name, and the store stays as it was."""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, ReceivedMessages, Subscription, Topic
from duelog.errors import ClosedError, ConsumerBusy, InvalidArgument, UnknownSubscription, UnknownTopic
from duelog.store.position import Position

FACES = True

pytestmark = pytest.mark.usefixtures("unchanged")


OF_UNKNOWN: list[Callable[[Topic], object]] = [
    lambda topic: topic.unsubscribe("s"),
    lambda topic: topic.subscriptions(),
    lambda topic: topic.stats(),
    lambda topic: topic.get(MessageId(1, 0)),
    lambda topic: topic.scheduled(),
    lambda topic: topic.cancel(MessageId(1, 0)),
    lambda topic: topic.reschedule(MessageId(1, 0)),
]


def test_an_unknown_topic_is_named(store: DelayedStore) -> None:
    """Asking for it does not make it."""
    unknown = store.topic("shop/eu/unknown")
    for use in OF_UNKNOWN:
        with pytest.raises(UnknownTopic, match="shop/eu/unknown") as caught:
            use(unknown)
        assert caught.value.topic == "persistent://shop/eu/unknown"
        assert isinstance(caught.value, LookupError)
        assert not unknown.exists()


def test_deleting_an_unknown_topic_says_so(store: DelayedStore) -> None:
    """By its full name."""
    with pytest.raises(UnknownTopic, match="topic 'unknown' does not exist"):
        store.delete_topic("unknown")


def test_an_unknown_subscription_is_named(topic: Topic) -> None:
    """With its topic."""
    with pytest.raises(UnknownSubscription, match=r"topic 't' .*'unknown'") as caught:
        topic.unsubscribe("unknown")
    assert (caught.value.topic, caught.value.subscription) == (topic.name, "unknown")


def test_a_taken_subscription_is_refused(topic: Topic, reader: Subscription) -> None:
    """An exclusive one to a second consumer, and any to a consumer of another type; nor can it be removed."""
    for kind in ("exclusive", "shared"):
        with pytest.raises(ConsumerBusy, match="'s'"):
            topic.subscribe("s", type=kind)
    with pytest.raises(ConsumerBusy):
        topic.unsubscribe("s")


def test_ids_that_no_message_has_are_no_error(topic: Topic) -> None:
    """A message may be gone: nothing is found, nothing cancelled, nothing moved."""
    for message_id in (MessageId(10**9, 0), MessageId(1, 10**6), MessageId(0, 0)):
        assert topic.get(message_id) is None
        assert topic.cancel(message_id) is False
        assert topic.reschedule(message_id, deliver_after=5) is None


TIMES = [-1, math.nan, math.inf, "1", True, 1e12, timedelta(seconds=-1)]
NO_MESSAGES = [None, 5, "1:x", [None], [b"x"], (1, 0), [(1, 0)], (ReceivedMessages.of("t", "s", []), None)]
REFUSED: list[tuple[str, list[Any], Callable[[Subscription, Any], object]]] = [
    ("max_messages=", [0, -1, 1.0, "1", True, None], lambda reader, value: reader.receive(value)),
    ("timeout=", TIMES, lambda reader, value: reader.receive(1, timeout=value)),
    ("delay=", TIMES, lambda reader, value: reader.nack(Position(1, 0), delay=value)),
    ("messages=", NO_MESSAGES, lambda reader, value: reader.ack(value)),
    ("messages=", NO_MESSAGES, lambda reader, value: reader.ack_cumulative(value)),
    ("messages=", NO_MESSAGES, lambda reader, value: reader.nack(value)),
    ("messages=", NO_MESSAGES, lambda reader, value: reader.extend(value)),
    ("one message", [[], [Position(1, 0), Position(1, 1)]], lambda reader, value: reader.ack_cumulative(value)),
]


@pytest.mark.parametrize(("said", "values", "use"), REFUSED)
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
    lambda topic: topic.unsubscribe("s"),
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


def test_as_many_messages_as_no_list_has_may_be_asked_for(reader: Subscription) -> None:
    """It is a bound, and means all that are due: an error of Python's own came."""
    assert len(reader.receive(1 << 70, timeout=0)) == 1


@pytest.mark.parametrize("name", [1, {}, None, "\ud800"])
def test_what_names_no_schedule_is_refused_by_its_field(topic: Topic, name: Any) -> None:
    """By the error that `every` has for it; by REST it was a fault of the broker's."""
    for use in (topic.pause_schedule, topic.resume_schedule, topic.remove_schedule):
        with pytest.raises(InvalidArgument, match="schedule="):
            use(name)
