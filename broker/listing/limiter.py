"""How much memory topic lists may take at one time: lists being made (heap), and frames being written (direct).

A request over a limit is taken as one for the limit: a list larger than the limit is served, alone.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from ..protocol.loop_calls import Loop
from .semaphore import AsyncSemaphore, Permit, PermitError, Permits
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

    def set_limits(self, heap: Limits, direct: Limits) -> None:
        """Change the limits of both."""
        self.heap.set_limits(*heap)
        self.direct.set_limits(*direct)

    def close(self) -> None:
        """Fail what waits, and what comes."""
        self.heap.close()
        self.direct.close()


__all__ = ["DualMemoryLimiter", "Limits", "MemoryLimiter", "PermitError"]
