"""How much memory topic lists may take at one time: lists being made (heap), and frames being written (direct).

A request over a limit is taken as one for the limit: a list larger than the limit is served, alone.

Two rules keep clients that read slowly, or not at all, from holding up others. One connection has one list on its way
at a time; its other requests wait for that, and hold nothing. And nobody holds heap while it waits for direct memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, cast

from ..protocol.loop_calls import Loop
from ..protocol.peer import Peer
from .semaphore import AsyncSemaphore, Permit, PermitCancelled, PermitError, Permits
from .wait_times import WaitTimes


class Limits(NamedTuple):
    """Of one kind of memory."""

    max_bytes: int = 100 << 20
    """0: no limit."""
    max_queue: int = 1_000
    """Requests that may wait; 0: any number."""
    timeout_ms: int = 25_000


class MemoryLimiter(AsyncSemaphore):
    """A semaphore whose requests are cut to its limit."""

    def __init__(self, limits: Limits, loop: Loop) -> None:
        self.waits = WaitTimes(loop.time)
        super().__init__(*limits, loop, self.waits.add)

    @asynccontextmanager
    async def holding(self, size: int, is_cancelled: Callable[[], bool] | None = None) -> AsyncIterator[Permit]:
        """A permit for so many bytes while the body runs. Raises PermitError, the body not begun."""
        future = self.acquire(self._cut(size), is_cancelled)
        try:
            yield await future
        finally:
            self._release(future)

    @asynccontextmanager
    async def updating(
        self, permit: Permit, size: int, is_cancelled: Callable[[], bool] | None = None
    ) -> AsyncIterator[Permit]:
        """A permit in place of `permit` while the body runs. Raises PermitError, the body not begun, `permit` good."""
        future = self.update(permit, self._cut(size), is_cancelled)
        try:
            yield await future
        finally:
            self._release(future)

    def has_room(self, size: int) -> bool:
        """Whether a permit for so many bytes would be granted at once."""
        return not self.max_permits or (not self.queue_size and self._cut(size) <= self.available)

    def _cut(self, size: int) -> int:
        return min(size, self.max_permits) if self.max_permits else size

    def _release(self, future: Permits) -> None:
        """Also of one that was granted while its task was being cancelled."""
        if future.done() and not future.cancelled() and future.exception() is None:
            self.release(future.result())


class DualMemoryLimiter:
    """Of the event loop's thread."""

    def __init__(self, heap: Limits, direct: Limits, loop: Loop) -> None:
        self.heap = MemoryLimiter(heap, loop)
        """For lists being made."""
        self.direct = MemoryLimiter(direct, loop)
        """For frames being written."""
        self.created = time.time()
        """Seconds since 1970."""
        self._turns: dict[int, tuple[asyncio.Lock, set[asyncio.Task[None]]]] = {}
        """By connection, the lock of its lists, and the tasks that have it or wait for it."""

    @asynccontextmanager
    async def turn(self, peer: Peer) -> AsyncIterator[None]:
        """Run the body while no other list of the connection is on its way. Raises PermitCancelled: it is gone."""
        if peer.closed:
            raise PermitCancelled("the connection is gone")
        task = cast("asyncio.Task[None]", asyncio.current_task())
        lock, tasks = self._turns.setdefault(peer.number, (asyncio.Lock(), set()))
        tasks.add(task)
        try:
            async with lock:
                yield
        finally:
            tasks.discard(task)
            if not tasks:
                del self._turns[peer.number]

    def gone(self, peer: Peer) -> None:
        """A connection is no more: cancel the tasks that make its lists."""
        if peer.number in self._turns:
            for task in list(self._turns[peer.number][1]):
                task.cancel()

    def set_limits(self, heap: Limits, direct: Limits) -> None:
        """Change the limits of both."""
        self.heap.set_limits(*heap)
        self.direct.set_limits(*direct)

    def close(self) -> None:
        """Fail what waits, and what comes."""
        self.heap.close()
        self.direct.close()


__all__ = ["DualMemoryLimiter", "Limits", "MemoryLimiter", "PermitError"]
