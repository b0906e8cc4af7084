"""One id for all: what `send` gave, its text, and the message itself do wherever a message is meant."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, MessageId, ReceivedMessage, StoreConfig, Subscription, Topic
from duelog.errors import InvalidArgument
from duelog.store.message import AnyId
from tests.conftest import START_MS, present


@dataclass
class Fired:
    """A topic with a message that was delayed, and its subscription that was handed it."""

    topic: Topic
    subscription: Subscription
    sent: MessageId
    message: ReceivedMessage


@pytest.fixture
def fired(tmp_path: Path) -> Iterator[Fired]:
    """The message's id and its position are two."""
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "store", StoreConfig(inline_delay_ms=0), clock=clock) as store:
        topic = store.topic("a")
        with topic.subscribe("s") as subscription:
            sent = topic.send(b"x", deliver_after=10)
            clock.advance(10_000)
            (message,) = subscription.receive()
            assert message.message_id == sent != message.position
            yield Fired(topic, subscription, sent, message)


WAYS: dict[str, Callable[[Fired], MessageId | str | ReceivedMessage]] = {
    "the id": lambda it: it.sent,
    "its text": lambda it: str(it.sent),
    "the position": lambda it: it.message.position,
    "the position's text": lambda it: str(it.message.position),
    "the message": lambda it: it.message,
}


@pytest.fixture(params=WAYS)
def given(request: pytest.FixtureRequest, fired: Fired) -> MessageId | str | ReceivedMessage:
    """Each way to say which message is meant."""
    return WAYS[request.param](fired)


def test_a_message_is_given_back_and_acknowledged_by_any_of_its_ids(fired: Fired, given: MessageId) -> None:
    """It comes again; alone and among others."""
    assert fired.subscription.nack(given, delay=0) == 1
    assert [message.message_id for message in fired.subscription.receive()] == [fired.sent]
    assert fired.subscription.ack(given) == 1
    assert fired.subscription.ack([given, given]) == 0
    assert fired.subscription.stats().backlog == 0


def test_a_message_is_acknowledged_cumulatively_by_any_of_its_ids(fired: Fired, given: MessageId) -> None:
    """It and what is before it."""
    assert fired.subscription.ack_cumulative(given) == 1


def test_a_subscription_goes_to_a_message_by_any_of_its_ids(fired: Fired, given: MessageId) -> None:
    """It is delivered again; a reader begins with it."""
    fired.topic.send(b"later")
    fired.subscription.ack(fired.message)
    assert fired.subscription.seek(given) == fired.message.position
    assert [message.payload for message in fired.subscription.receive(5)] == [b"x", b"later"]
    with fired.topic.reader(given) as reader:
        assert [message.payload for message in reader.receive(5)] == [b"x", b"later"]
    fired.subscription.close()
    assert fired.topic.subscription("s").reset(given) == fired.message.position


def test_a_message_is_found_by_any_of_its_ids(fired: Fired, given: MessageId) -> None:
    """Stored, where it is read, and what has become of it."""
    found = present(fired.topic.get(given))
    assert (found.message_id, found.payload) == (fired.sent, b"x")
    assert fired.topic.position_of(given) == fired.message.position
    assert fired.topic.state(given) == "fired"
    assert fired.topic.cancel(given) is False
    assert fired.topic.reschedule(given, deliver_after=5) is None


def test_what_has_not_fired_is_withdrawn_by_any_of_its_ids_and_not_acknowledged(fired: Fired) -> None:
    """The id of a message that waits is not taken for a place that was trimmed: the answer says what it is."""
    ids = [fired.topic.send(b"later", deliver_after=1_000) for _ in range(3)]
    waiting = next(iter(fired.topic.scheduled()))
    for call in (fired.subscription.ack, fired.subscription.nack, fired.subscription.seek):
        with pytest.raises(InvalidArgument, match="is scheduled: it was not delivered"):
            call(ids[0])
    every: list[AnyId] = [waiting, str(ids[1]), ids[2]]
    assert [fired.topic.state(each) for each in every] == ["scheduled"] * 3
    moved = present(fired.topic.reschedule(waiting, deliver_after=2_000))
    assert fired.topic.cancel(str(moved))
    with pytest.raises(InvalidArgument, match="is cancelled: it was not delivered"):
        fired.subscription.ack(moved)
    assert fired.topic.fire_now(str(ids[1])) is not None
    assert fired.subscription.ack(fired.message) == 1


@pytest.mark.parametrize("wrong", [(2, 0), 5, None, "2", "2:-1", b"2:0"], ids=repr)
def test_what_is_no_id_is_refused_by_name(fired: Fired, wrong: Any) -> None:
    """Text that is none, numbers and pairs."""
    for call in (fired.topic.cancel, fired.topic.state, fired.topic.get, fired.subscription.ack):
        with pytest.raises(InvalidArgument):
            call(wrong)
