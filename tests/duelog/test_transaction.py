"""Transactions: operations on topics, subscriptions and documents are stored together, or none is."""

# ruff: noqa: PT012 - a transaction raises at the end of its block

import asyncio
import gc
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

import duelog.aio
from duelog import DelayedStore, ManualClock, MessageId, Policies, ReceivedMessage, StoreConfig, Topic, Transaction
from duelog.errors import (
    DelayTooLong,
    InvalidArgument,
    InvalidMessage,
    QuotaExceeded,
    StoreFailed,
    StoreFull,
    TransactionConflict,
    UnknownTopic,
)
from duelog.topics.ack_flusher import AckFlusher
from tests.conftest import OpenStore, raising
from tests.duelog.store_state import records
from tests.model.driver import armed

FACES = True

CONFIG = StoreConfig(partition_ms=3_600_000, background=False)


def payloads(messages: Iterable[ReceivedMessage]) -> list[bytes]:
    """Their payloads."""
    return [bytes(message.payload) for message in messages]


def received(store: DelayedStore, name: str = "t", **options: object) -> list[ReceivedMessage]:
    """What a consumer gets that stays attached."""
    return store.topic(name).subscribe("s", type="shared").receive(10, timeout=0)


def test_a_transaction_acknowledges_sends_cancels_reschedules_and_remembers_at_once(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Also over a restart; results have their values once it is stored."""
    topic.send(b"order 7")
    later = store.topic("later").send(b"move", deliver_after=60)
    gone = store.topic("later").send(b"cancel", deliver_after=60)
    store.topic("timeouts").send(b"timeout", deliver_after=60, dedup_key="order-7")
    (message,) = received(store)
    with store.transaction() as transaction:
        transaction.ack(message)
        sent = transaction.send("invoices", b"invoice", deliver_after=30, dedup_key="order-7")
        at_once = transaction.send(store.topic("mails"), b"mail")
        key = transaction.cancel_key("timeouts", "order-7")
        moved = transaction.reschedule("later", later, deliver_after=90)
        cancelled = transaction.cancel("later", gone)
        version = transaction.put_document("order/7", b"paid", expected=None)
        assert not store.topic("invoices").exists()
        with pytest.raises(InvalidArgument, match="has not been stored"):
            assert sent.value
    assert isinstance(at_once.value, MessageId)
    assert (key.value, cancelled.value) == (True, True)
    assert store.topic("invoices").find("order-7") is not None
    store.close()

    store = open_store(config=CONFIG)
    assert store.documents.get("order/7") == (b"paid", version.value)
    assert store.topic("later").state(later) == "cancelled"
    assert store.topic("later").state(moved.value or later) == "scheduled"
    assert store.topic("invoices").state(sent.value) == "scheduled"
    assert received(store) == []
    clock.advance(100_000)
    assert payloads(received(store, "later")) == [b"move"]
    assert received(store, "timeouts") == []
    assert payloads(received(store, "mails")) == [b"mail"]


@pytest.mark.inside
def test_a_transaction_leaves_nothing_to_the_garbage_collector(store: DelayedStore, topic: Topic) -> None:
    """Its units of work refer to nothing that refers to them: a cycle of a hundred objects each time is felt."""
    topic.send_payloads([b"0", b"1"])
    later = store.topic("later")
    cancelled, moved = (later.send_payloads([b"x"] * 2, deliver_after=60).to_list() for _ in range(2))
    for key in ("0", "1"):
        later.send(b"x", deliver_after=60, dedup_key=key)
    messages = received(store)

    def transact(number: int) -> None:
        with store.transaction() as transaction:
            transaction.ack(messages[number])
            transaction.cancel("later", cancelled[number])
            transaction.cancel_key("later", str(number))
            transaction.reschedule("later", moved[number], deliver_after=90)
            transaction.send("u", b"y")
            transaction.put_document("d", b"z")

    transact(0)
    gc.collect()
    gc.disable()
    try:
        transact(1)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_an_exception_in_the_block_stores_nothing(store: DelayedStore, topic: Topic) -> None:
    """Nor does a transaction that ended do anything any more."""
    topic.subscribe("s").close()
    before = records(store)
    with pytest.raises(ZeroDivisionError), store.transaction() as transaction:
        transaction.send("t", b"lost")
        transaction.put_document("d", b"lost")
        raise ZeroDivisionError
    assert records(store) == before
    for call in (
        lambda: transaction.send("t", b"x"),
        lambda: transaction.put_document("d", b"x"),
        lambda: transaction.ack([]),
        transaction.__enter__,
    ):
        with pytest.raises(InvalidArgument, match="it has ended"):
            call()


def test_the_topics_that_a_transaction_sends_to_are_made_in_one_group(store: DelayedStore) -> None:
    """Each would wait for the disk, and a disk that is full amid them would leave some."""
    before = store._engine.writer().counts.commits
    with store.transaction() as transaction:
        for number in range(20):
            transaction.send(f"new-{number % 10}", b"x", deliver_after=3_600)
    assert store._engine.writer().counts.commits - before == 3  # the ids of the day's ledgers, too


def test_an_empty_transaction_writes_nothing(store: DelayedStore) -> None:
    """It is no error."""
    before = records(store)
    with store.transaction():
        pass
    assert records(store) == before


def _fired(store: DelayedStore, clock: ManualClock) -> MessageId:
    message_id = store.topic("other").send(b"fired", deliver_after=1, dedup_key="fired")
    store.topic("other").subscribe("s").close()
    clock.advance(2_000)
    store.tick()
    return message_id


def _acknowledged(store: DelayedStore) -> ReceivedMessage:
    (message,) = received(store)
    store.topic("t").subscribe("s", type="shared").ack(message, durable=True)
    return message


def _given_back(store: DelayedStore) -> ReceivedMessage:
    """It is held again by then, as another delivery."""
    with store.topic("t").subscribe("s", type="shared") as consumer:
        (message,) = consumer.receive(timeout=0)
    (again,) = received(store)
    assert again.position == message.position
    return message


CONFLICTS: list[tuple[str, Callable[[Transaction, DelayedStore, ManualClock], object], str]] = [
    ("cancel", lambda t, store, clock: t.cancel("other", _fired(store, clock)), "it is fired"),
    ("cancel", lambda t, store, clock: t.cancel("t", MessageId(1 << 40, 0)), "it is unknown"),
    ("cancel key", lambda t, store, clock: t.cancel_key("t", "nobody's"), "no message of it is pending"),
    ("cancel key", lambda t, store, clock: (_fired(store, clock), t.cancel_key("other", "fired")), "it is fired"),
    (
        "reschedule",
        lambda t, store, clock: t.reschedule("other", _fired(store, clock), deliver_after=1),
        "it has fired",
    ),
    ("ack", lambda t, store, clock: t.ack(_acknowledged(store)), "not held any more"),
    ("ack", lambda t, store, clock: t.ack(_given_back(store)), "not held any more"),
    ("put document", lambda t, store, clock: t.put_document("d", b"x", expected=7), "no document is there"),
    ("delete document", lambda t, store, clock: t.delete_document("d", expected=7), "no document is there"),
]


@pytest.mark.parametrize(("operation", "plan", "reason"), CONFLICTS)
def test_what_cannot_be_is_told_with_the_operation_and_the_reason_and_nothing_is_stored(
    store: DelayedStore,
    topic: Topic,
    clock: ManualClock,
    operation: str,
    plan: Callable[[Transaction, DelayedStore, ManualClock], object],
    reason: str,
) -> None:
    """Whatever else the transaction has."""
    topic.send(b"m")
    pending = topic.send(b"pending", deliver_after=60)
    topic.subscribe("s").close()
    with pytest.raises(TransactionConflict, match=reason) as conflict, store.transaction() as transaction:
        transaction.send("t", b"never", deliver_after=60)
        transaction.cancel("t", pending)
        transaction.put_document("document", b"never")
        plan(transaction, store, clock)
        store.flush()
        before = records(store)
    assert operation in conflict.value.operation
    assert records(store) == before
    assert (topic.state(pending), store.documents.get("document")) == ("scheduled", None)
    assert [message.payload for message in topic.scheduled()] == [b"pending"]


def test_what_is_not_required_goes_on(store: DelayedStore, topic: Topic, clock: ManualClock) -> None:
    """Its result says what became of it."""
    fired = _fired(store, clock)
    with store.transaction() as transaction:
        cancelled = transaction.cancel("other", fired, required=False)
        key = transaction.cancel_key("other", "fired", required=False)
        moved = transaction.reschedule("other", fired, deliver_after=1, required=False)
        sent = transaction.send("t", b"m", deliver_after=1)
    assert (cancelled.value, key.value, moved.value) == (False, False, None)
    assert topic.state(sent.value) == "scheduled"


def test_a_replacement_by_key_is_part_of_the_transaction(store: DelayedStore, topic: Topic) -> None:
    """The pending message is cancelled with it; a key that holds answers with the id that is there."""
    old = topic.send(b"old", deliver_after=60, dedup_key="a")
    kept = topic.send(b"kept", deliver_after=60, dedup_key="b")
    with pytest.raises(TransactionConflict), store.transaction() as transaction:
        transaction.send("t", b"new", deliver_after=90, dedup_key="a", replace=True)
        transaction.cancel_key("t", "nobody's")
    assert topic.state(old) == "scheduled"
    with store.transaction() as transaction:
        new = transaction.send("t", b"new", deliver_after=90, dedup_key="a", replace=True)
        same = transaction.send("t", b"other", deliver_after=90, dedup_key="b")
        again = transaction.send("t", b"twice", deliver_after=90, dedup_key="c")
        twice = transaction.send("t", b"twice", deliver_after=90, dedup_key="c")
    assert topic.state(old) == "cancelled"
    assert same.value == kept
    assert again.value == twice.value
    assert {message.payload for message in topic.scheduled()} == {b"new", b"kept", b"twice"}
    assert new.value != old


def test_a_key_whose_message_the_transaction_moves_by_id_is_a_conflict(store: DelayedStore, topic: Topic) -> None:
    """It ends: what is looked up again changes each time."""
    old = topic.send(b"old", deliver_after=60, dedup_key="a")
    with pytest.raises(TransactionConflict, match="deduplication key"), store.transaction() as transaction:
        transaction.reschedule("t", old, deliver_after=70)
        transaction.send("t", b"new", deliver_after=90, dedup_key="a", replace=True)
    assert [message.payload for message in topic.scheduled()] == [b"old"]


@pytest.mark.inside
def test_bad_input_is_refused_where_it_is_given(store: DelayedStore) -> None:
    """Or, where only the end can tell, with nothing stored."""
    transaction = store.transaction()
    with pytest.raises(InvalidMessage, match="deliver_at"):
        transaction.send("t", b"x", deliver_at=5)
    with pytest.raises(InvalidArgument, match="expected a received message"):
        transaction.ack([b"x"])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="message_id"):
        transaction.cancel("t", 7)  # type: ignore[arg-type]
    transaction.send("t", b"x", dedup_key="k", deliver_after=1)
    with pytest.raises(InvalidArgument, match="has it already"):
        transaction.cancel_key("t", "k")
    transaction.cancel_key("t", "l", required=False)
    with pytest.raises(InvalidArgument, match="cancels that key"):
        transaction.send("t", b"x", dedup_key="l")
    with pytest.raises(UnknownTopic), store.transaction() as unknown:
        unknown.cancel("nobody's", MessageId(1, 0))
    assert not store.topic("nobody's").exists()


def test_policies_and_quotas_refuse_the_whole_transaction(store: DelayedStore, topic: Topic) -> None:
    """With nothing stored, the other topics' messages included."""
    store.set_policies(Policies(max_delivery_delay_ms=60_000, max_pending=2), topic="t")
    for error, delays in ((DelayTooLong, [61]), (QuotaExceeded, [1, 2, 3])):
        with pytest.raises(error), store.transaction() as transaction:
            transaction.send("other", b"x", deliver_after=5)
            for delay in delays:
                transaction.send("t", b"x", deliver_after=delay)
    assert list(topic.scheduled()) == list(store.topic("other").scheduled()) == []


def test_messages_of_one_transaction_count_together_towards_a_quota(store: DelayedStore, topic: Topic) -> None:
    """Also where what was pending is counted anew for one of them: each alone would have had a place."""
    store.set_policies(Policies(max_pending=2), topic="t")
    topic.cancel(topic.send(b"x", deliver_after=1))
    with pytest.raises(QuotaExceeded), store.transaction() as transaction:
        for delay in (1, 2, 3):
            transaction.send("t", b"x", deliver_after=delay)
    assert list(topic.scheduled()) == []


def test_more_than_a_group_takes_is_refused_whole(open_store: OpenStore) -> None:
    """The error says how much that is."""
    store = open_store(config=StoreConfig(wal_bytes=1 << 20, max_message_bytes=1 << 18))
    with pytest.raises(InvalidArgument, match="bytes, more than a group"), store.transaction() as transaction:
        for _ in range(12):
            transaction.send("t", bytes(200_000), deliver_after=60)
    assert list(store.topic("t").scheduled()) == []
    with store.transaction() as transaction:
        transaction.send("t", b"m", deliver_after=60)
    assert len(list(store.topic("t").scheduled())) == 1


def test_a_disk_that_fails_leaves_nothing_half_done(open_store: OpenStore, store: DelayedStore, topic: Topic) -> None:
    """The store stops; opened again it has all of the transaction or nothing of it: here, nothing."""
    topic.send(b"m")
    (message,) = received(store)
    topic.send(b"there", deliver_after=60)

    def fail() -> None:
        raise OSError(5, "planted")

    with armed("wal.before", fail), pytest.raises(StoreFailed), store.transaction() as transaction:
        transaction.ack(message)
        transaction.send("t", b"next", deliver_after=60)
    store.close()
    store = open_store(config=CONFIG)
    assert payloads(received(store)) == [b"m"]
    assert [message.payload for message in store.topic("t").scheduled()] == [b"there"]


def test_what_a_group_has_stored_is_no_error_though_acknowledgements_cannot_be_flushed(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a transaction, and of a dead letter: who is told so would do it again."""
    store = open_store(config=replace(CONFIG, ack_flush_ms=0))
    store.topic("t").send_payloads([b"1", b"2"])
    consumer = store.topic("t").subscribe("s", type="shared")
    first, second = consumer.receive(2, timeout=0)
    monkeypatch.setattr(AckFlusher, "flush", raising(StoreFull(store.path, "planted")))
    with store.transaction() as transaction:
        transaction.ack(first)
        sent = transaction.send("next", b"x", deliver_after=60)
    consumer.dead_letter(second, "poison")
    monkeypatch.undo()
    assert store.topic("next").state(sent.value) == "scheduled"
    assert [letter.payload for letter in store.dead_letters()] == [b"2"]
    assert store.topic("t").subscription("s").stats().backlog == 0


def test_a_transaction_for_asyncio(open_store: OpenStore, tmp_path: object) -> None:
    """The block's end is awaited."""

    async def work() -> int:
        async with duelog.aio.DelayedStore.open(f"{tmp_path}/aio") as store:
            async with store.transaction() as transaction:
                sent = transaction.send("t", b"m", deliver_after=60)
                transaction.put_document("d", b"v")
            with pytest.raises(TransactionConflict):
                async with store.transaction() as transaction:
                    transaction.cancel_key("t", "nobody's")
            assert await store.topic("t").state(sent.value) == "scheduled"
            return len([each async for each in store.topic("t").scheduled()])

    assert asyncio.run(work()) == 1


def test_a_message_is_not_acknowledged_for_the_consumer_of_another_subscription(
    store: DelayedStore, topic: Topic
) -> None:
    """Consumers of two subscriptions have the same numbers."""
    topic.send(b"x")
    consumer, other = topic.subscribe("s"), topic.subscribe("other")
    (message,) = consumer.receive(timeout=0)
    with pytest.raises((InvalidArgument, TransactionConflict)), store.transaction() as transaction:
        transaction.ack(message, consumer=other)
    assert consumer.holds(message)
