"""Dead letters: kept until they are requeued or purged, moved in one transaction, never dead-lettered again."""

import dataclasses
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DeadLetter, DelayedStore, ManualClock, Message, MessageId, StoreConfig, Topic
from duelog.errors import DuelogError, InvalidArgument, StoreFull, UnknownSubscription, UnknownTopic
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.topics.ack_flusher import AckFlusher
from duelog.topics.dead_letters import DeadLetters
from tests.conftest import START_MS, OpenStore, raising
from tests.duelog.store_state import payloads, payloads_of
from tests.model.driver import armed

FACES = True

CONFIG = StoreConfig(max_redeliveries=1, nack_backoff_ms=1_000, max_clock_jump_ms=None)
GRAVE = "t-s-DLQ"


def let_die(store: DelayedStore, *bodies: bytes, topic: str = "t", name: str = "s") -> list[MessageId]:
    """Send messages and have both deliveries of each fail; their ids."""
    ids = [store.topic(topic).send(body, key="k", properties={"shop": "7"}) for body in bodies]
    with store.topic(topic).subscribe(name) as consumer:
        for _ in range(2):
            consumer.nack(consumer.receive(1_000), delay=0)
        assert consumer.receive(1_000) == []
    return ids


def by_payload(store: DelayedStore) -> list[bytes]:
    """Payloads of the store's dead letters, in order."""
    return [letter.payload for letter in store.dead_letters()]


def test_a_burial_that_finds_no_space_keeps_back_that_message_alone(store: DelayedStore, clock: ManualClock) -> None:
    """The rest of the batch is delivered, no delivery of it counts as failed, and the message is buried later, once."""
    topic = store.topic("t")
    topic.send(b"dead")
    with topic.subscribe("s") as consumer:
        for _ in range(2):
            consumer.nack(consumer.receive(), delay=0)
        topic.send_batch([Message(body) for body in (b"a", b"b", b"c")])
        with patch.object(DeadLetters, "bury", raising(StoreFull(store.path, "made up"))):
            assert [(each.payload, each.redelivery_count) for each in consumer.receive(3)] == [(b"a", 0), (b"b", 0)]
            assert [each.payload for each in consumer.receive(1)] == [b"c"]
            for _ in range(5):
                clock.advance(1_000)
                assert consumer.receive(10) == []
        clock.advance(1_000)
        assert consumer.receive(10) == []
        (letter,) = store.dead_letters()
        assert (letter.payload, letter.attempts) == (b"dead", 2)
        consumer.nack_all()
        assert [(each.payload, each.redelivery_count) for each in consumer.receive(10)] == [
            (body, 1) for body in (b"a", b"b", b"c")
        ]


def test_a_flush_that_finds_no_space_keeps_no_message_from_its_consumer(open_store: OpenStore) -> None:
    """Changes left by an earlier delivery do not fail the next one, whose messages nobody would get."""
    store = open_store(config=dataclasses.replace(CONFIG, ack_flush_ms=0))
    topic = store.topic("t")
    topic.send_batch([Message(body) for body in (b"a", b"b")])
    with topic.subscribe("s") as consumer, armed("acks.before", raising(StoreFull(store.path, "made up"))):
        with pytest.raises(StoreFull):
            consumer.nack(consumer.receive(), delay=60)
        assert [(each.payload, each.redelivery_count) for each in consumer.receive(10)] == [(b"b", 0)]
    store.tick()


@pytest.mark.inside
def test_a_delivery_that_is_broken_off_counts_as_none(store: DelayedStore) -> None:
    """Messages taken for a consumer that did not reach it come again as if for the first time."""
    topic = store.topic("t")
    topic.send(b"a")

    def broken_off(*_: object) -> None:
        raise KeyboardInterrupt

    with topic.subscribe("s") as consumer:
        with patch("duelog.subscription.Subscription._route", broken_off), pytest.raises(KeyboardInterrupt):
            consumer.receive()
        assert [each.redelivery_count for each in consumer.receive()] == [0]


def test_a_consumer_of_a_dead_letter_topic_sees_reason_and_attempts(store: DelayedStore, topic: Topic) -> None:
    """By properties, which Pulsar's clients see, too; the letter itself has the message's own alone."""
    topic.send_batch([Message(b"told", properties={"shop": "7"}), Message(b"spent")])
    with topic.subscribe("s") as consumer:
        told, spent = consumer.receive(2)
        consumer.dead_letter(told, "ValueError: no such customer")
        consumer.nack(spent, delay=0)
        consumer.nack(consumer.receive(), delay=0)
        assert consumer.receive() == []
    with store.topic(GRAVE).subscribe("reader") as reader:
        found = [(each.payload, each.properties) for each in reader.receive(10)]
    shown = [(payload, of["DEAD_LETTER_REASON"], of["DEAD_LETTER_ATTEMPTS"]) for payload, of in found]
    assert shown == [(b"told", "ValueError: no such customer", "1"), (b"spent", "redeliveries", "2")]
    assert [letter.properties for letter in store.dead_letters()] == [{"shop": "7"}, {}]


def test_a_letter_says_what_became_of_the_message(store: DelayedStore, topic: Topic, clock: ManualClock) -> None:
    """Reason, attempts, when the first and the last of them failed, and all that the message was."""
    with topic.subscribe("s") as consumer:
        sent = topic.send(b"x", key="k", properties={"shop": "7"}, deliver_after=60)
        clock.advance(60_000)
        consumer.nack(consumer.receive(), delay=5)
        clock.advance(7_000)
        consumer.nack(consumer.receive(), delay=0)
        clock.advance(1_000)
        assert consumer.receive() == []
    (letter,) = store.dead_letters()
    assert letter == DeadLetter(
        dead_letter_topic=store.topic(GRAVE).name,
        position=letter.position,
        topic=topic.name,
        subscription="s",
        message_id=sent,
        payload=b"x",
        key="k",
        properties={"shop": "7"},
        due_ms=START_MS + 60_000,
        publish_ms=START_MS,
        reason="redeliveries",
        attempts=2,
        first_ms=START_MS + 60_000,
        last_ms=START_MS + 67_000,
        dead_ms=START_MS + 68_000,
    )


def test_all_letters_are_requeued_or_none(store: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the origin of one is gone, or the disk is full, nothing has moved."""
    let_die(store, b"a")
    let_die(store, b"b", topic="u")
    letters = list(store.dead_letters())
    with monkeypatch.context() as patch:
        append = ManagedLedger.append_messages

        def full(self: ManagedLedger, *args: object) -> object:
            append(self, *args)  # type: ignore[arg-type]
            raise StoreFull(store.path, "no space left")

        patch.setattr(ManagedLedger, "append_messages", full)
        with pytest.raises(StoreFull):
            store.requeue_dead_letters(letters)
    assert list(store.dead_letters()) == letters
    store.topic("u").unsubscribe("s")
    with pytest.raises(UnknownSubscription):
        store.requeue_dead_letters(letters)
    store.delete_topic("u")
    with pytest.raises(UnknownTopic):
        store.requeue_dead_letters(letters)
    assert list(store.dead_letters()) == letters
    assert payloads_of(store) == []
    assert store.requeue_dead_letters(store.dead_letters("t", "s")) == 1
    assert store.purge_dead_letters(store.dead_letters()) == 1


def test_letters_that_are_purged_give_their_ledgers_back(open_store: OpenStore, clock: ManualClock) -> None:
    """They are gone for good, and nothing holds what they took."""
    store = open_store(config=StoreConfig(max_redeliveries=0, ledger_max_entries=2, max_clock_jump_ms=None))
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        for number in range(5):
            topic.send(b"%d" % number)
        consumer.nack(consumer.receive(10), delay=0)
        assert consumer.receive(10) == []
    store.tick()
    grave = store.topic(GRAVE)
    assert (grave.stats().ledgers, len(by_payload(store))) == (3, 5)
    assert store.purge_dead_letters(store.dead_letters()) == 5
    assert store.purge_dead_letters(store.dead_letters()) == 0
    clock.advance(1_000)
    store.tick()
    assert (grave.stats().ledgers, by_payload(store)) == (1, [])


def test_a_subscription_that_was_there_before_becomes_the_keeper(open_store: OpenStore, store: DelayedStore) -> None:
    """One of the keeper's name holds letters from the first one on, and what it acknowledges is purged."""
    store.topic(GRAVE).subscribe("dead-letters").close()
    let_die(store, b"x", b"y")
    store.close()
    store = open_store(config=CONFIG)
    assert by_payload(store) == [b"x", b"y"]
    with store.topic(GRAVE).subscribe("dead-letters") as keeper:
        keeper.ack(keeper.receive(1))
    assert by_payload(store) == [b"y"]


def test_what_is_no_dead_letter_or_no_delay_is_refused(store: DelayedStore) -> None:
    """The error names which, and nothing is moved."""
    let_die(store, b"x")
    letters: list[object] = [*store.dead_letters(), "x"]
    for method in (store.requeue_dead_letters, store.purge_dead_letters):
        with pytest.raises(InvalidArgument) as refused:
            method(letters)  # type: ignore[arg-type]
        assert (refused.value.field, refused.value.value) == ("letters[1]", "x")
    for delay in (-1, float("nan"), "1", True, 1e12):
        with pytest.raises(DuelogError, match="delay"):
            store.requeue_dead_letters(store.dead_letters(), delay=delay)  # type: ignore[arg-type]
    assert by_payload(store) == [b"x"]


def test_a_dead_letter_topic_has_a_name_however_long_topic_and_subscription_are(store: DelayedStore) -> None:
    """It ends in a digest where it would be too long: one for each subscription."""
    long = "\u00e4" * 180
    names = ["s" * 200, "s" * 199 + "t"]
    for name in names:
        let_die(store, b"x", topic=long, name=name)
    letters = list(store.dead_letters(long))
    assert sorted({letter.subscription for letter in letters}) == names
    assert len({letter.dead_letter_topic for letter in letters}) == 2
    assert store.requeue_dead_letters(letters) == len(letters)
    assert list(store.dead_letters()) == []


@pytest.mark.parametrize("method", ["requeue_dead_letters", "purge_dead_letters"])
def test_a_letter_that_two_calls_move_at_once_is_moved_once(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The other call comes between a call's look at the letter and its transaction."""
    let_die(store, b"x")
    letters = list(store.dead_letters())
    flush, others = AckFlusher.acknowledge_with, [letters]

    def beside(self: AckFlusher, *arguments: Any) -> int:
        if others:
            assert store.requeue_dead_letters(others.pop()) == 1
        return flush(self, *arguments)

    monkeypatch.setattr(AckFlusher, "acknowledge_with", beside)
    assert getattr(store, method)(letters) == 0
    with store.topic("t").subscribe("s") as consumer:
        assert payloads(consumer) == [b"x"]


def test_a_message_that_was_acknowledged_while_it_was_buried_is_no_letter(
    store: DelayedStore, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another consumer had it, after its acknowledgement timeout, and was done with it."""
    flush = AckFlusher.acknowledge_with
    with topic.subscribe("s") as consumer:
        topic.send(b"x")
        for _ in range(2):
            messages = consumer.receive()
            consumer.nack(messages, delay=0)

        def beside(self: AckFlusher, *arguments: Any) -> int:
            consumer.ack(messages)
            return flush(self, *arguments)

        monkeypatch.setattr(AckFlusher, "acknowledge_with", beside)
        assert consumer.receive() == []
    assert by_payload(store) == []


def test_letters_are_found_by_reason_age_and_key(store: DelayedStore, clock: ManualClock) -> None:
    """Each filter alone, and together."""
    let_die(store, b"old")
    clock.advance(60_000)
    let_die(store, b"new")

    def found(**options: Any) -> list[bytes]:
        return [letter.payload for letter in store.dead_letters(**options)]

    assert found(older_than=60) == found(older_than=timedelta(minutes=1), key="k") == [b"old"]
    assert found(reason="redeliveries") == found(key="k") == found(older_than=0) == [b"old", b"new"]
    assert found(older_than=61) == found(reason="other") == found(key="other") == []
    with pytest.raises(InvalidArgument, match="older_than"):
        store.dead_letters(older_than=-1)


def test_a_message_that_its_consumer_gives_up_is_a_dead_letter_at_once(store: DelayedStore, topic: Topic) -> None:
    """With the reason that it says, and this delivery counted; one that was acknowledged meanwhile is left."""
    first_id, _ = topic.send_batch([Message(b"bad"), Message(b"fine")])
    with topic.subscribe("s") as consumer:
        consumer.nack(consumer.receive(), delay=0)
        bad, fine = sorted(consumer.receive(2), key=lambda message: message.position)
        consumer.ack(fine)
        for message in (bad, fine, bad):
            consumer.dead_letter(message, "no such address")
        assert consumer.receive(timeout=0) == []
    (letter,) = store.dead_letters(reason="no such address")
    assert (letter.payload, letter.message_id, letter.attempts) == (b"bad", first_id, 2)
    assert store.requeue_dead_letters(letter) == 1


def test_what_cannot_be_a_dead_letter_is_refused(store: DelayedStore, topic: Topic) -> None:
    """A reader's message, a dead letter, a reason without text: each is held as before."""
    topic.send(b"x")
    with topic.subscribe("s") as consumer, topic.subscribe("u") as other, topic.reader() as reader:
        (message,), (read,) = consumer.receive(), reader.receive()
        given: Any
        for by, given in ((consumer, read), (other, message), (consumer, message.position), (reader, read)):
            with pytest.raises(InvalidArgument, match=r"^message="):
                by.dead_letter(given, "x")
        with pytest.raises(InvalidArgument, match=r"^reason="):
            consumer.dead_letter(message, "")
        consumer.dead_letter(message, "x")
    (letter,) = store.dead_letters()
    with store.topic(letter.dead_letter_topic).subscribe("dead-letters") as keeper:
        (again,) = keeper.receive()
        with pytest.raises(InvalidArgument, match=r"^message="):
            keeper.dead_letter(again, "x")
    assert len(list(store.dead_letters())) == 1


def test_why_a_message_was_postponed_is_known_to_its_retries_and_its_dead_letter(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock
) -> None:
    """Over restarts; a retry without a reason keeps the one before, and a requeued letter begins without."""
    first_id = store.topic("t").send(b"x", key="k")
    with store.topic("t").subscribe("s") as consumer:
        (message,) = consumer.receive()
        assert message.failure is None
        for wrong in ("", 5, b"x"):
            with pytest.raises(InvalidArgument, match=r"^reason="):
                consumer.retry_later(message, 1, reason=wrong)  # type: ignore[arg-type]
        consumer.retry_later(message, 1, reason="no answer \udcff")
    store.close()
    store = open_store(config=CONFIG)
    with store.topic("t").subscribe("s") as consumer:
        clock.advance(1_000)
        (message,) = consumer.receive()
        assert (message.failure, message.key) == ("no answer \\udcff", "k")
        consumer.retry_later(message, 1)
        clock.advance(1_000)
        assert consumer.receive() == []
    (letter,) = store.dead_letters(reason="no answer \\udcff")
    assert (letter.message_id, letter.attempts) == (first_id, 2)
    store.requeue_dead_letters(letter)
    with store.topic("t").subscribe("s") as consumer:
        assert consumer.receive()[0].failure is None
