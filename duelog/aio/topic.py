"""Topics and named producers, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta

import duelog
from duelog.delivery.consumer_arguments import Failover
from duelog.delivery.dispatcher import SubscriptionType
from duelog.delivery.key_slots import KeyShared
from duelog.sending import producer
from duelog.sending.outbox import PutOutcome
from duelog.store.codec.message_fields import Dedup
from duelog.store.duration import Duration
from duelog.topics.seeking import SeekTarget

from .subscription import Subscription, SubscriptionAdmin
from .threads import InThreads, close_result, explained_by, in_thread


class Topic(InThreads[duelog.Topic]):
    """See `duelog.Topic`. What `send_batch` is given is iterated over in another thread."""

    @property
    def name(self) -> str:
        return self._inner.name

    @explained_by(duelog.Topic.send)
    async def send(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        allow_past: bool = False,
        ttl: Duration | None = None,
        dedup_key: str | None = None,
        dedup_for: Duration | None = None,
        replace: bool = False,
    ) -> duelog.MessageId:
        """Append one message and return its id once it is as durable as the store's `durability` says.

        Sends that are awaited side by side share commits, and hold no threads.
        """
        dedup = Dedup.checked(dedup_key, dedup_for, replace)
        future: asyncio.Future[duelog.MessageId] = asyncio.get_running_loop().create_future()
        sender = self._inner.sender
        item = sender.outgoing(
            payload,
            deliver_at,
            deliver_after,
            key,
            properties,
            allow_past,
            future,
            _tell,
            dedup=dedup,
            wanted=_is_wanted,
            ttl=ttl,
        )
        try:
            if not sender.put(item, wait=False):  # no capacity: a thread waits for it
                await self._threads.run(sender.put, item, wait=True)
            return await future
        except asyncio.CancelledError:
            future.cancel()
            raise

    send_batch = in_thread(duelog.Topic.send_batch)
    send_payloads = in_thread(duelog.Topic.send_payloads)

    create = in_thread(duelog.Topic.create)
    find = in_thread(duelog.Topic.find)
    cancel_key = in_thread(duelog.Topic.cancel_key)

    @explained_by(duelog.Topic.producer)
    async def producer(self, name: str) -> Producer:
        """A producer whose numbered messages are stored once however often they are sent. O(partitions)."""
        return Producer(await self._threads.run(self._inner.producer, name), self._threads)

    @explained_by(duelog.Topic.subscribe)
    async def subscribe(
        self,
        name: str,
        *,
        type: SubscriptionType = "exclusive",
        initial_position: str = "earliest",
        failover: Failover | None = None,
        key_shared: KeyShared | None = None,
    ) -> Subscription:
        """Attach a consumer to the subscription `name`, creating it durably where there is none."""
        return await self._attached(
            self._threads.start(
                self._inner.subscribe,
                name,
                type=type,
                initial_position=initial_position,
                failover=failover,
                key_shared=key_shared,
            )
        )

    @explained_by(duelog.Topic.reader)
    async def reader(
        self,
        start: SeekTarget = "earliest",
        *,
        name: str | None = None,
        type: SubscriptionType = "exclusive",
        failover: Failover | None = None,
        key_shared: KeyShared | None = None,
    ) -> Subscription:
        """Attach a consumer from a position or time on, by a subscription that leaves nothing behind."""
        return await self._attached(
            self._threads.start(
                self._inner.reader, start, name=name, type=type, failover=failover, key_shared=key_shared
            )
        )

    async def _attached(self, made: Future[duelog.Subscription]) -> Subscription:
        try:
            return Subscription(await asyncio.wrap_future(made), self._threads)
        except asyncio.CancelledError:
            made.add_done_callback(close_result)
            raise

    producer_number = in_thread(duelog.Topic.producer_number)

    @explained_by(duelog.Topic.subscription)
    async def subscription(self, name: str) -> SubscriptionAdmin:
        """A subscription to inspect and change without attaching. Raises UnknownSubscription, UnknownTopic."""
        return SubscriptionAdmin(await self._threads.run(self._inner.subscription, name), self._threads)

    unsubscribe = in_thread(duelog.Topic.unsubscribe)
    clear_inline = in_thread(duelog.Topic.clear_inline)
    cancel = in_thread(duelog.Topic.cancel)
    cancel_batch = in_thread(duelog.Topic.cancel_batch)
    reschedule = in_thread(duelog.Topic.reschedule)
    reschedule_batch = in_thread(duelog.Topic.reschedule_batch)
    fire_now = in_thread(duelog.Topic.fire_now)
    every = in_thread(duelog.Topic.every)
    schedules = in_thread(duelog.Topic.schedules)
    pause_schedule = in_thread(duelog.Topic.pause_schedule)
    resume_schedule = in_thread(duelog.Topic.resume_schedule)
    remove_schedule = in_thread(duelog.Topic.remove_schedule)
    state = in_thread(duelog.Topic.state)
    get = in_thread(duelog.Topic.get)
    position_of = in_thread(duelog.Topic.position_of)
    positions = in_thread(duelog.Topic.positions)
    ledgers = in_thread(duelog.Topic.ledgers)

    @explained_by(duelog.Topic.scheduled)
    def scheduled(
        self,
        start: int | datetime | None = None,
        end: int | datetime | None = None,
        limit: int | None = None,
        *,
        after: duelog.MessageId | None = None,
    ) -> AsyncIterator[duelog.ScheduledMessage]:
        """Iterate over delayed messages that have not fired, due in [start, end), by due time, with `async for`."""
        return self._threads.iterate(lambda: self._inner.scheduled(start, end, limit, after=after))

    @explained_by(duelog.Topic.keys)
    def keys(self, prefix: str = "") -> AsyncIterator[str]:
        """Iterate over the deduplication keys of pending messages that begin with `prefix`, with `async for`."""
        return self._threads.iterate(lambda: self._inner.keys(prefix))

    exists = in_thread(duelog.Topic.exists)
    subscriptions = in_thread(duelog.Topic.subscriptions)
    stats = in_thread(duelog.Topic.stats)


def _is_wanted(future: asyncio.Future[duelog.MessageId]) -> bool:
    return not future.cancelled()


def _tell(results: list[tuple[asyncio.Future[duelog.MessageId], PutOutcome]]) -> None:
    """Have futures know what became of their messages: one turn of each loop for all of a group."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[duelog.MessageId], PutOutcome]]] = {}
    for result in results:
        loops.setdefault(result[0].get_loop(), []).append(result)
    for loop, own in loops.items():
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(results: list[tuple[asyncio.Future[duelog.MessageId], PutOutcome]]) -> None:
    for future, outcome in results:
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(outcome, duelog.MessageId):
            future.set_result(outcome)
        elif isinstance(outcome, Exception):
            future.set_exception(outcome)


def plain_topic(topic: Topic) -> duelog.Topic:
    """The topic itself, for other threads."""
    return topic._inner


class Producer(InThreads[producer.Producer]):
    """See `duelog.Topic.producer`. After a cancelled send its number may be sent again."""

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def last_sequence_id(self) -> int:
        return self._inner.last_sequence_id

    send = in_thread(producer.Producer.send)
    send_batch = in_thread(producer.Producer.send_batch)
