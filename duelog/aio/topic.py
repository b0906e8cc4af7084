"""Topics and named producers, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta

import duelog
from duelog.delivery.dispatcher import SubscriptionType
from duelog.sending import producer

from .subscription import Subscription
from .threads import InThreads, close_result, in_thread


class Topic(InThreads[duelog.Topic]):
    """See `duelog.Topic`. What `send_batch` is given is iterated over in another thread."""

    @property
    def name(self) -> str:
        return self._inner.name

    async def send(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        allow_past: bool = False,
    ) -> duelog.MessageId:
        """As `duelog.Topic.send`. Sends that are awaited side by side share commits, and hold no threads."""
        message = duelog.Message(
            payload, deliver_at=deliver_at, deliver_after=deliver_after, key=key, properties=properties
        )
        sender = self._inner.sender
        item = sender.outgoing(message, allow_past=allow_past)
        future = sender.put(item, wait=False)
        if future is None:  # no capacity: a thread waits for it
            future = await self._threads.run(sender.put_waiting, item)
        return await asyncio.wrap_future(future)

    send_batch = in_thread(duelog.Topic.send_batch)
    send_payloads = in_thread(duelog.Topic.send_payloads)

    async def producer(self, name: str) -> Producer:
        """As `duelog.Topic.producer`."""
        return Producer(await self._threads.run(self._inner.producer, name), self._threads)

    async def subscribe(
        self, name: str, *, type: SubscriptionType = "exclusive", initial_position: str = "earliest"
    ) -> Subscription:
        """As `duelog.Topic.subscribe`."""
        made = self._threads.start(self._inner.subscribe, name, type=type, initial_position=initial_position)
        try:
            return Subscription(await asyncio.wrap_future(made), self._threads)
        except asyncio.CancelledError:
            made.add_done_callback(close_result)
            raise

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

    def scheduled(
        self, start: int | datetime | None = None, end: int | datetime | None = None, limit: int | None = None
    ) -> AsyncIterator[duelog.ScheduledMessage]:
        """As `duelog.Topic.scheduled`, iterated over with `async for`."""
        return self._threads.iterate(lambda: self._inner.scheduled(start, end, limit))

    exists = in_thread(duelog.Topic.exists)
    subscriptions = in_thread(duelog.Topic.subscriptions)
    stats = in_thread(duelog.Topic.stats)


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
