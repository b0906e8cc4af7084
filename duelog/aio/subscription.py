"""Consumers, for asyncio: waiting without a thread, and receiving that may be cancelled."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Self

import duelog
from duelog.delivery.consumer_arguments import deadline_of
from duelog.delivery.dispatcher import SubscriptionType
from duelog.store.clock import SystemClock
from duelog.store.duration import Duration
from duelog.store.errors import ClosedError, DuelogError

from .threads import InThreads, Same, explained_by, in_thread

_LONGEST_WAIT_S = 60.0
"""A wall clock that is set forward meanwhile is noticed after it."""


class SubscriptionAdmin(InThreads[duelog.SubscriptionAdmin]):
    """See `duelog.SubscriptionAdmin`."""

    name = Same[str]()
    topic = Same[str]()
    peek = in_thread(duelog.SubscriptionAdmin.peek)
    skip = in_thread(duelog.SubscriptionAdmin.skip)
    expire = in_thread(duelog.SubscriptionAdmin.expire)
    reset = in_thread(duelog.SubscriptionAdmin.reset)
    pause = in_thread(duelog.SubscriptionAdmin.pause)
    resume = in_thread(duelog.SubscriptionAdmin.resume)
    stats = in_thread(duelog.SubscriptionAdmin.stats)


class Subscription(InThreads[duelog.Subscription]):
    """See `duelog.Subscription`. An async context manager, and an async iterator over its messages.

    `async for message in subscription` fetches one message at a time, so that it holds none that it does not work
    at; it ends when the subscription or the store is closed. What it yields is to be acknowledged as always.
    """

    name = Same[str]()
    topic = Same[str]()
    type = Same[SubscriptionType]()
    durable = Same[bool]()
    active = Same[bool]()
    paused = Same[bool]()
    max_in_flight = Same[int]()

    @explained_by(duelog.Subscription.receive)
    async def receive(self, max_messages: int = 1, timeout: Duration | None = None) -> list[duelog.ReceivedMessage]:
        """Receive messages that are due, at most `max_messages`; waits for the first. Cancelled, it gives them back."""
        subscription, loop = self._inner, asyncio.get_running_loop()
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
        looking = self._threads.look(self._inner.poll, max_messages)
        try:
            return await asyncio.wrap_future(looking)
        except asyncio.CancelledError:
            looking.add_done_callback(self._give_back)
            raise

    def _give_back(self, looking: Future[tuple[list[duelog.ReceivedMessage], int | None]]) -> None:
        """Give back what a cancelled call was handed. In the thread that looked, or the loop's if that is done."""
        if looking.cancelled() or looking.exception() is not None or self._inner.closed:
            return
        batch = looking.result()[0]
        if batch:
            try:
                self._inner.nack(batch, delay=0)
            except DuelogError:  # closed or deleted meanwhile, which gives it back as well
                return

    async def _wait(self, woken: asyncio.Event, until_ms: int | None) -> None:
        """Until the topic changes or the store's clock shows `until_ms`; may come back early."""
        clock = self._inner.clock
        if not isinstance(clock.wrapped, SystemClock) and until_ms is not None:
            # Only a thread can wait for a clock that the program moves. Cancelled, it ends at the next change.
            waiting = self._threads.look(self._inner.wait, until_ms)
            try:
                await asyncio.wrap_future(waiting)
            except asyncio.CancelledError:
                self._inner.wake()
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

    ack = in_thread(duelog.Subscription.ack)
    ack_cumulative = in_thread(duelog.Subscription.ack_cumulative)
    nack = in_thread(duelog.Subscription.nack)
    extend = in_thread(duelog.Subscription.extend)
    nack_all = in_thread(duelog.Subscription.nack_all)
    retry_later = in_thread(duelog.Subscription.retry_later)
    dead_letter = in_thread(duelog.Subscription.dead_letter)
    seek = in_thread(duelog.Subscription.seek)
    pause = in_thread(duelog.Subscription.pause)
    resume = in_thread(duelog.Subscription.resume)
    stats = in_thread(duelog.Subscription.stats)

    @explained_by(duelog.Subscription.close)
    async def close(self, *, failed: bool = True) -> None:
        """Leave: messages received and not acknowledged are handed out again. A second call does what is left."""
        if not self._inner.closed:
            await asyncio.shield(self._threads.run(lambda: self._inner.close(failed=failed)))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> duelog.ReceivedMessage:
        while not self._inner.closed:
            try:
                batch = await self.receive()
            except ClosedError:
                if not self._inner.closed:  # a read-only store, or a child process
                    raise
                break
            if batch:
                return batch[0]
            if not self._inner.may_wait:
                break
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
