# pyright: strict
"""A program that uses the whole face, for mypy and pyright, both strict; by either face it also runs.

`assert_type` holds what a type checker sees, so a type that is lost is an error of `make types`.
"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import assert_type

import msgspec
import pytest

import duelog.aio
from duelog import (
    DUPLICATE,
    Clock,
    DeadLetter,
    DelayedDeliveryPolicies,
    DelayedStore,
    Document,
    Documents,
    Duplicate,
    Failover,
    Finding,
    FollowUp,
    KeyShared,
    LogPositions,
    ManualClock,
    Message,
    MessageId,
    MessageIds,
    Occurrence,
    Outcome,
    Policies,
    PublishedAt,
    ReceivedMessage,
    ReceivedMessages,
    Schedule,
    ScheduledMessage,
    StoreConfig,
    Subscription,
    SubscriptionAdmin,
    SystemClock,
    TaskFunction,
    TaskMessage,
    TickResult,
    Topic,
    TopicEvent,
    Worker,
)
from duelog.errors import Disconnected, DuelogError, InvalidArgument, OnlyInProcess

FACES = True
CONFIG = StoreConfig(control=True)  # one test connects by itself
HOUR = timedelta(hours=1)


def test_messages_are_sent_looked_at_and_taken_back(store: DelayedStore) -> None:
    """Topics, ids, keys, producers."""
    topic = store.topic("t")
    assert_type(topic, Topic)
    assert_type(topic.name, str)
    assert_type(topic.create(), bool)
    assert_type(store.create_topics(["a", "b"]), list[bool])
    assert_type([each.name for each in store.topics(pattern="t")], list[str])
    id_ = topic.send(b"a", deliver_after=HOUR, key="k", properties={"a": "b"}, ttl=60, dedup_key="one")
    assert_type(id_, MessageId)
    assert_type(id_.stored, bool)
    assert_type((id_.ledger_id, id_.entry_id), tuple[int, int])
    assert_type(topic.send_async(b"b"), Future[MessageId])
    assert_type(topic.send_batch([Message(b"c", deliver_after=60, dedup_key="two", replace=True)]), list[MessageId])
    assert_type(topic.send_payloads([b"d", b"e"], deliver_after=60), MessageIds)
    assert_type(store.send_batch([("t", Message(b"f")), (topic, Message(b"g"))]), list[MessageId])
    producer = topic.producer("p")
    assert_type(producer.send(Message(b"h"), sequence_id=7), MessageId | None)
    assert_type(producer.send_batch([Message(b"i")], first_sequence_id=8), list[MessageId | None])
    assert_type(producer.last_sequence_id, int)
    assert_type(topic.state(id_), str)
    assert_type(topic.get(id_), ScheduledMessage | None)
    assert_type(topic.count(prefix="o"), int)
    assert_type(topic.keys("o"), Iterator[str])
    for scheduled in topic.scheduled(newest_first=True):
        assert_type(scheduled, ScheduledMessage)
        assert_type((scheduled.payload, scheduled.due_ms), tuple[bytes, int])
        assert_type((scheduled.dedup_key, scheduled.occurrence), tuple[str | None, Occurrence | None])
    assert_type(topic.reschedule(id_, deliver_at=datetime.now(UTC) + 2 * HOUR), MessageId | None)
    found = topic.find("one")
    assert found is not None
    assert_type(topic.cancel(found.message_id), bool)
    assert_type(topic.cancel_batch([id_]), list[Outcome])
    assert_type(topic.cancel_key("two"), bool)
    assert_type(topic.cancel_keys(prefix="o"), list[str])
    assert_type(topic.stats().pending, int)
    assert_type(store.stats().pending, int)


def test_messages_are_received_and_settled(store: DelayedStore) -> None:
    """Consumers, readers, dead letters, administration."""
    topic = store.topic("t")
    with topic.subscribe("s", type="shared") as consumer:
        assert_type(consumer, Subscription)
        topic.send_payloads([b"a", b"b", b"c", b"d"])
        batch = consumer.receive(3, timeout=HOUR)
        assert_type(batch, list[ReceivedMessage])
        message = batch[0]
        assert_type((message.payload, message.key, message.properties), tuple[bytes, str | None, dict[str, str]])
        assert_type((message.message_id, message.redelivery_count), tuple[MessageId, int])
        assert_type(consumer.extend(batch), int)
        assert_type(consumer.retry_later(batch.pop(), HOUR, reason="busy"), MessageId | None)
        consumer.dead_letter(batch.pop(), "wrong")
        assert_type(consumer.ack(batch, durable=True), int)
        for each in consumer:
            assert_type(each, ReceivedMessage)
            assert_type(consumer.nack(each, delay=0), int)
            break
        assert_type(consumer.stats().backlog, int)
    with topic.reader("earliest") as reader:
        assert_type(reader, Subscription)
    with topic.subscribe("spread", type="key_shared", key_shared=KeyShared(ranges=[(0, 65_535)])) as spread:
        spread.seek(PublishedAt(datetime.now(UTC)))
    admin = topic.subscription("s")
    assert_type(admin, SubscriptionAdmin)
    assert_type(admin.peek(5), list[ReceivedMessage])
    assert_type(topic.positions(), LogPositions)
    letters = list(store.dead_letters())
    assert_type(letters, list[DeadLetter])
    assert_type((letters[0].payload, letters[0].reason, letters[0].attempts), tuple[bytes, str, int])
    assert_type(store.requeue_dead_letters(letters), int)
    assert_type(store.purge_dead_letters(letters), int)


def test_what_a_store_keeps_besides_messages(store: DelayedStore) -> None:
    """Schedules, policies, documents, transactions."""
    topic = store.topic("t")
    schedule = topic.every("daily", cron="@daily", timezone="Europe/Rome", jitter=60, misfires="latest")
    assert_type(schedule, Schedule)
    assert_type((schedule.next_due_ms, schedule.replaced), tuple[int | None, Schedule | None])
    assert_type(topic.pause_schedule("daily"), Schedule | None)
    assert_type(topic.schedules(), list[Schedule])
    assert_type(topic.remove_schedule("daily"), bool)
    store.set_policies(Policies(retention_ms=HOUR, max_redeliveries=3), topic="t")
    store.set_policies(DelayedDeliveryPolicies(tick_time_ms=10), namespace="public/default")
    assert_type(store.update_policies(topic="t", ttl_ms=HOUR), Policies)
    assert_type(store.policies(topic="t"), Policies | None)
    assert_type(store.effective_policies("t").retention_ms, int)
    assert_type(store.all_policies(), dict[str, Policies])
    documents = store.documents
    assert_type(documents, Documents)
    version = documents.put("a", b"1", expected=None)
    assert_type(version, int)
    document = documents.get("a")
    assert_type(document, Document | None)
    with store.transaction() as transaction:
        sent = transaction.send(topic, b"a", deliver_after=HOUR, dedup_key="k")
        put = transaction.put_document("a", b"2", expected=version)
    assert_type(sent.value, MessageId)
    assert_type(put.value, int)


@dataclass
class Order:
    """An argument of a task."""

    number: int
    items: list[str]


def test_tasks_have_the_types_of_their_functions(store: DelayedStore) -> None:
    """With arguments, of a message, coroutines, methods; chains and hooks."""
    worker, done = Worker(store, name="w", drain=HOUR), threading.Event()

    @worker.task("packed")
    async def pack(order: Order, note: str | None = None) -> None:
        done.set()

    def note_end(message: TaskMessage, error: BaseException | None) -> None:
        """A hook."""

    @worker.task("orders", retries=3, backoff=HOUR, timeout=60, on_dead_letter=note_end, codec=msgspec.msgpack)
    def take(number: int) -> FollowUp:
        return pack.message(order=Order(number, []), deliver_after=0)

    @worker.task("raw", concurrency=1)
    def raw(message: TaskMessage) -> None:
        with message.transaction() as transaction:
            transaction.send("archive", message.payload)

    assert isinstance(take, TaskFunction)
    assert_type(take(17), FollowUp)
    assert_type(take.send(17, dedup_key="order-17"), MessageId)
    assert_type(take.cancel_key("order-17"), bool)
    assert_type(take.every("hourly", cron="@hourly", number=1), Schedule)
    store.topic("raw").send(b"x")
    with worker:
        take.send(number=18)
        assert done.wait(60)
    assert_type(worker.stop(), int)
    assert callable(raw)


def test_the_face_for_asyncio_has_types_too(store: DelayedStore) -> None:
    """Awaited results, async iteration."""

    async def main(path: Path) -> None:
        async with duelog.aio.DelayedStore.connect(path, wait=1) as opened:
            assert_type(opened, duelog.aio.DelayedStore)
            topic = opened.topic("t")
            assert_type(topic, duelog.aio.Topic)
            id_ = await topic.send(b"a", deliver_after=HOUR)
            assert_type(id_, MessageId)
            assert_type(await topic.cancel(id_), bool)
            assert_type(await topic.send_batch([Message(b"b")]), list[MessageId])
            assert_type([each async for each in topic.scheduled()], list[ScheduledMessage])
            async with await topic.subscribe("s") as consumer:
                assert_type(consumer, duelog.aio.Subscription)
                await topic.send(b"c")
                messages = await consumer.receive(5, timeout=HOUR)
                assert_type(messages, list[ReceivedMessage])
                assert_type(await consumer.ack(messages), int)
            assert_type((await topic.stats()).pending, int)
            async with opened.transaction() as transaction:
                transaction.send("t", b"d")

    asyncio.run(main(store.path))


@pytest.mark.inside
def test_what_only_an_open_store_has(tmp_path: Path) -> None:
    """Its configuration and clock, what drives it, callbacks."""
    events = list[TopicEvent]()
    clock: Clock = ManualClock(1_800_000_000_000)
    assert isinstance(SystemClock().now_ms(), int)
    with DelayedStore.open(tmp_path, StoreConfig(background=False, partition_ms=HOUR), clock=clock) as store:
        forget = store.on_topics(events.extend)
        topic = store.topic("t")
        results = list[tuple[object, MessageId | Duplicate | Exception]]()
        topic.put(b"a", numbers=("p", 1, 1), token=1, done=results.extend)
        assert_type(store.tick(), TickResult)
        assert_type(store.tick().fired, int)
        failover = Failover(priority=1)
        with topic.subscribe("s", type="failover", failover=failover) as consumer:
            assert_type(consumer.poll_columns(5), tuple[ReceivedMessages, int | None])
        assert_type(list(store.check()), list[Finding])
        assert_type(store.clock, Clock)
        forget()
    assert [outcome for _, outcome in results if outcome is DUPLICATE] == []


def test_errors_have_their_facts(store: DelayedStore, tmp_path: Path) -> None:
    """One base, and fields."""
    try:
        store.topic("t").send(b"x", ttl=-1)
    except InvalidArgument as error:
        assert_type(error.field, str)
    except DuelogError:
        raise
    try:
        duelog.connect(tmp_path / "nowhere", reconnect=5, prefetch=10, token=None)
    except Disconnected as error:
        assert_type((error.in_doubt, error.stored), tuple[str | None, bool])
    except OnlyInProcess as error:
        assert_type(error.name, str)
