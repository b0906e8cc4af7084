"""Topics and named producers, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta

import duelog
from duelog.sending import producer
from duelog.sending.outbox import PutOutcome
from duelog.store.codec.message_fields import Dedup
from duelog.store.duration import Duration

from .subscription import Subscription, SubscriptionAdmin
from .threads import InThreads, Same, explained_by, in_thread, iterated, made_in_thread


class Producer(InThreads[producer.Producer]):
    """See `duelog.Topic.producer`. After a cancelled send its number may be sent again."""

    name = Same[str]()
    last_sequence_id = Same[int]()
    send = in_thread(producer.Producer.send)
    send_batch = in_thread(producer.Producer.send_batch)


class Topic(InThreads[duelog.Topic]):
    """See `duelog.Topic`. What `send_batch` is given is iterated over in another thread."""

    name = Same[str]()

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
        encoded = sender.encode_one(payload, deliver_at, deliver_after, key, properties, allow_past, ttl, dedup)
        item = sender.outgoing(encoded, future, _tell, once=dedup, wanted=_is_wanted)
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
    subscribe = made_in_thread(duelog.Topic.subscribe, Subscription)
    reader = made_in_thread(duelog.Topic.reader, Subscription)
    subscription = made_in_thread(duelog.Topic.subscription, SubscriptionAdmin)
    producer = made_in_thread(duelog.Topic.producer, Producer)
    producer_number = in_thread(duelog.Topic.producer_number)
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
    scheduled = iterated(duelog.Topic.scheduled)
    keys = iterated(duelog.Topic.keys)
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
