"""Topics and named producers, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

import duelog
from duelog.background.recurring import Schedule
from duelog.delivery.dispatcher import SubscriptionType
from duelog.sending import producer
from duelog.stats import TopicStats

from .subscription import Subscription
from .threads import Threads


class Topic:
    """See `duelog.Topic`."""

    def __init__(self, topic: duelog.Topic, threads: Threads) -> None:
        self._topic = topic
        self._threads = threads

    @property
    def name(self) -> str:
        return self._topic.name

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
        sender = self._topic.sender
        item = sender.outgoing(message, allow_past=allow_past)
        future = sender.put(item, wait=False)
        if future is None:  # no capacity: a thread waits for it
            future = await self._threads.run(sender.put_waiting, item)
        return await asyncio.wrap_future(future)

    async def send_batch(
        self, messages: Iterable[duelog.Message], *, allow_past: bool = False
    ) -> list[duelog.MessageId]:
        """As `duelog.Topic.send_batch`; `messages` is iterated over in another thread."""
        return await self._threads.run(self._topic.send_batch, messages, allow_past=allow_past)

    async def send_payloads(
        self,
        payloads: Sequence[bytes],
        *,
        deliver_at: Sequence[int] | npt.NDArray[np.integer[Any]] | datetime | int | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> duelog.MessageIds:
        """As `duelog.Topic.send_payloads`."""
        send = self._topic.send_payloads
        return await self._threads.run(
            send, payloads, deliver_at=deliver_at, deliver_after=deliver_after, allow_past=allow_past
        )

    async def producer(self, name: str) -> Producer:
        """As `duelog.Topic.producer`."""
        return Producer(await self._threads.run(self._topic.producer, name), self._threads)

    async def subscribe(
        self, name: str, *, type: SubscriptionType = "exclusive", initial_position: str = "earliest"
    ) -> Subscription:
        """As `duelog.Topic.subscribe`."""
        made = self._threads.start(self._topic.subscribe, name, type=type, initial_position=initial_position)
        try:
            return Subscription(await asyncio.wrap_future(made), self._threads)
        except asyncio.CancelledError:
            made.add_done_callback(_close_subscribed)
            raise

    async def unsubscribe(self, name: str) -> None:
        """As `duelog.Topic.unsubscribe`."""
        await self._threads.run(self._topic.unsubscribe, name)

    async def clear_inline(self, subscription: str) -> int:
        """As `duelog.Topic.clear_inline`."""
        return await self._threads.run(self._topic.clear_inline, subscription)

    async def cancel(self, message_id: duelog.MessageId) -> bool:
        """As `duelog.Topic.cancel`."""
        return await self._threads.run(self._topic.cancel, message_id)

    async def cancel_batch(self, message_ids: Sequence[duelog.MessageId]) -> list[duelog.Outcome]:
        """As `duelog.Topic.cancel_batch`."""
        return await self._threads.run(self._topic.cancel_batch, message_ids)

    async def reschedule(
        self,
        message_id: duelog.MessageId,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> duelog.MessageId | None:
        """As `duelog.Topic.reschedule`."""
        reschedule = self._topic.reschedule
        return await self._threads.run(
            reschedule, message_id, deliver_at=deliver_at, deliver_after=deliver_after, allow_past=allow_past
        )

    async def reschedule_batch(
        self,
        message_ids: Sequence[duelog.MessageId],
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> list[duelog.MessageId | None]:
        """As `duelog.Topic.reschedule_batch`."""
        reschedule = self._topic.reschedule_batch
        return await self._threads.run(
            reschedule, message_ids, deliver_at=deliver_at, deliver_after=deliver_after, allow_past=allow_past
        )

    async def fire_now(self, message_id: duelog.MessageId) -> duelog.MessageId | None:
        """As `duelog.Topic.fire_now`."""
        return await self._threads.run(self._topic.fire_now, message_id)

    async def every(
        self,
        name: str,
        *,
        cron: str | None = None,
        interval: float | timedelta | None = None,
        timezone: str = "UTC",
        payload: bytes = b"",
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> Schedule:
        """As `duelog.Topic.every`."""
        every = self._topic.every
        return await self._threads.run(
            every,
            name,
            cron=cron,
            interval=interval,
            timezone=timezone,
            payload=payload,
            key=key,
            properties=properties,
        )

    async def schedules(self) -> list[Schedule]:
        """As `duelog.Topic.schedules`."""
        return await self._threads.run(self._topic.schedules)

    async def pause_schedule(self, name: str) -> Schedule | None:
        """As `duelog.Topic.pause_schedule`."""
        return await self._threads.run(self._topic.pause_schedule, name)

    async def resume_schedule(self, name: str) -> Schedule | None:
        """As `duelog.Topic.resume_schedule`."""
        return await self._threads.run(self._topic.resume_schedule, name)

    async def remove_schedule(self, name: str) -> bool:
        """As `duelog.Topic.remove_schedule`."""
        return await self._threads.run(self._topic.remove_schedule, name)

    async def state(self, message_id: duelog.MessageId) -> str:
        """As `duelog.Topic.state`."""
        return await self._threads.run(self._topic.state, message_id)

    async def get(self, message_id: duelog.MessageId) -> duelog.ScheduledMessage | None:
        """As `duelog.Topic.get`."""
        return await self._threads.run(self._topic.get, message_id)

    def scheduled(
        self, start: int | datetime | None = None, end: int | datetime | None = None, limit: int | None = None
    ) -> AsyncIterator[duelog.ScheduledMessage]:
        """As `duelog.Topic.scheduled`, iterated over with `async for`."""
        return self._threads.iterate(lambda: self._topic.scheduled(start, end, limit))

    async def exists(self) -> bool:
        """As `duelog.Topic.exists`."""
        return await self._threads.run(self._topic.exists)

    async def subscriptions(self) -> list[str]:
        """As `duelog.Topic.subscriptions`."""
        return await self._threads.run(self._topic.subscriptions)

    async def stats(self) -> TopicStats:
        """As `duelog.Topic.stats`."""
        return await self._threads.run(self._topic.stats)

    def __repr__(self) -> str:
        return f"<aio {self._topic!r}>"


class Producer:
    """See `duelog.Topic.producer`."""

    def __init__(self, producer: producer.Producer, threads: Threads) -> None:
        self._producer = producer
        self._threads = threads

    @property
    def name(self) -> str:
        return self._producer.name

    @property
    def last_sequence_id(self) -> int:
        return self._producer.last_sequence_id

    async def send(
        self, message: duelog.Message, *, sequence_id: int | None = None, allow_past: bool = False
    ) -> duelog.MessageId | None:
        """As `send` of a producer. After a cancelled one the number may be sent again."""
        return await self._threads.run(self._producer.send, message, sequence_id=sequence_id, allow_past=allow_past)

    async def send_batch(
        self, messages: Iterable[duelog.Message], *, first_sequence_id: int | None = None, allow_past: bool = False
    ) -> list[duelog.MessageId | None]:
        """As `send_batch` of a producer."""
        return await self._threads.run(
            self._producer.send_batch, messages, first_sequence_id=first_sequence_id, allow_past=allow_past
        )


def _close_subscribed(made: Future[duelog.Subscription]) -> None:
    """Close a consumer whose attaching was cancelled."""
    if not made.cancelled() and made.exception() is None:
        made.result().close()
