"""Consumers, for asyncio: waiting without a thread, and receiving that may be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from datetime import datetime
from typing import Self

import duelog
from duelog.delivery.consumer_arguments import Acknowledgeable, deadline_of
from duelog.delivery.dispatcher import SubscriptionType
from duelog.stats import SubscriptionStats
from duelog.store.clock import SystemClock
from duelog.store.errors import ClosedError, DuelogError

from .threads import Threads

_LONGEST_WAIT_S = 60.0
"""A wall clock that is set forward meanwhile is noticed after it."""


class Subscription:
    """See `duelog.Subscription`. An async context manager, and an async iterator over its messages.

    `async for message in subscription` fetches one message at a time, so that it holds none that it does not work
    at; it ends when the subscription or the store is closed. What it yields is to be acknowledged as always.
    """

    def __init__(self, subscription: duelog.Subscription, threads: Threads) -> None:
        self._subscription = subscription
        self._threads = threads

    @property
    def name(self) -> str:
        return self._subscription.name

    @property
    def topic(self) -> str:
        return self._subscription.topic

    @property
    def type(self) -> SubscriptionType:
        return self._subscription.type

    async def receive(self, max_messages: int = 1, timeout: float | None = None) -> list[duelog.ReceivedMessage]:
        """As `duelog.Subscription.receive`. When it is cancelled, what it would have returned is given back."""
        subscription, loop = self._subscription, asyncio.get_running_loop()
        clock = subscription.clock
        deadline_ms = deadline_of(clock.now_ms(), timeout)
        woken = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(woken.set)
            except RuntimeError:  # the loop is closed, so nothing waits
                return

        subscription.add_waker(wake)
        try:
            while True:
                woken.clear()
                now_ms = clock.now_ms()
                batch, again_ms = await self._poll(max_messages)
                if batch or not subscription.may_wait or (deadline_ms is not None and now_ms >= deadline_ms):
                    return batch
                until_ms = min((ms for ms in (deadline_ms, again_ms) if ms is not None), default=None)
                await self._wait(woken, until_ms)
        finally:
            subscription.remove_waker(wake)

    async def _poll(self, max_messages: int) -> tuple[list[duelog.ReceivedMessage], int | None]:
        looking = self._threads.look(self._subscription.poll, max_messages)
        try:
            return await asyncio.wrap_future(looking)
        except asyncio.CancelledError:
            looking.add_done_callback(self._give_back)
            raise

    def _give_back(self, looking: Future[tuple[list[duelog.ReceivedMessage], int | None]]) -> None:
        """Give back what a cancelled call was handed. In the thread that looked, or the loop's if that is done."""
        if looking.cancelled() or looking.exception() is not None or self._subscription.closed:
            return
        batch = looking.result()[0]
        if batch:
            try:
                self._subscription.nack(batch, delay=0)
            except DuelogError:  # closed or deleted meanwhile, which gives it back as well
                return

    async def _wait(self, woken: asyncio.Event, until_ms: int | None) -> None:
        """Until the topic changes or the store's clock shows `until_ms`; may come back early."""
        clock = self._subscription.clock
        if not isinstance(clock.wrapped, SystemClock) and until_ms is not None:
            # Only a thread can wait for a clock that the program moves. Cancelled, it ends at the next change.
            waiting = self._threads.look(self._subscription.wait, until_ms)
            try:
                await asyncio.wrap_future(waiting)
            except asyncio.CancelledError:
                self._subscription.wake()
                raise
            return
        wait_s = _LONGEST_WAIT_S
        if until_ms is not None:
            wait_s = min(max(until_ms - clock.now_ms(), 0) / 1000, wait_s)
        try:
            async with asyncio.timeout(wait_s):
                await woken.wait()
        except TimeoutError:
            return

    async def ack(self, messages: Acknowledgeable | Iterable[Acknowledgeable], *, durable: bool = False) -> int:
        """As `duelog.Subscription.ack`."""
        return await self._threads.run(self._subscription.ack, messages, durable=durable)

    async def ack_cumulative(self, message: Acknowledgeable, *, durable: bool = False) -> int:
        """As `duelog.Subscription.ack_cumulative`."""
        return await self._threads.run(self._subscription.ack_cumulative, message, durable=durable)

    async def nack(self, messages: Acknowledgeable | Iterable[Acknowledgeable], *, delay: float | None = None) -> int:
        """As `duelog.Subscription.nack`."""
        return await self._threads.run(self._subscription.nack, messages, delay=delay)

    async def retry_later(self, message: duelog.ReceivedMessage, delay: float) -> duelog.MessageId:
        """As `duelog.Subscription.retry_later`."""
        return await self._threads.run(self._subscription.retry_later, message, delay)

    async def seek(self, to: duelog.MessageId | duelog.ReceivedMessage | datetime | int | str) -> duelog.MessageId:
        """As `duelog.Subscription.seek`."""
        return await self._threads.run(self._subscription.seek, to)

    async def pause(self) -> None:
        """As `duelog.Subscription.pause`."""
        await self._threads.run(self._subscription.pause)

    async def resume(self) -> None:
        """As `duelog.Subscription.resume`."""
        await self._threads.run(self._subscription.resume)

    @property
    def paused(self) -> bool:
        return self._subscription.paused

    async def stats(self) -> SubscriptionStats:
        """As `duelog.Subscription.stats`."""
        return await self._threads.run(self._subscription.stats)

    async def close(self) -> None:
        """As `duelog.Subscription.close`."""
        if not self._subscription.closed:
            await asyncio.shield(self._threads.run(self._subscription.close))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> duelog.ReceivedMessage:
        while not self._subscription.closed:
            try:
                batch = await self.receive()
            except ClosedError:
                break
            if batch:
                return batch[0]
            if not self._subscription.may_wait:
                break
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<aio {self._subscription!r}>"
