"""A semaphore of bytes for one event loop: requests wait in strict order, bounded in number and time (PIP-442).

Whatever is acquired, updated, released, cancelled or timed out, and however the limit changes:
`available + acquired == limit`. All of it belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from ...store.errors import InvalidArgument
from ..protocol.loop_calls import Loop, Timer

Permits = asyncio.Future["Permit"]


class PermitError(Exception):
    """A request got no permit."""


class PermitClosed(PermitError):
    """The semaphore is closed."""


class PermitQueueFull(PermitError):
    """As many requests wait as may."""


class PermitTimeout(PermitError):
    """It waited for as long as it may."""


class PermitCancelled(PermitError):
    """`is_cancelled()` was true as its turn came."""


class Permit:
    """Bytes that may be used until they are released."""

    __slots__ = ("_counted", "_live", "_waiting", "size")

    def __init__(self, size: int, counted: int) -> None:
        self.size = size
        """Bytes; 0 once it is released or updated."""
        self._counted = counted
        """Those that a limit counts: none of them where there was no limit."""
        self._live = True
        self._waiting = 0
        """Updates of it that wait."""


class _Request:
    __slots__ = ("future", "is_cancelled", "old", "since", "size", "timer")

    def __init__(
        self, size: int, old: Permit | None, is_cancelled: Callable[[], bool] | None, future: Permits, since: float
    ) -> None:
        self.size = size
        self.old = old
        self.is_cancelled = is_cancelled
        self.future = future
        self.since = since
        self.timer: Timer | None = None


class AsyncSemaphore:
    """See the module."""

    def __init__(
        self,
        max_permits: int,
        max_queue: int,
        timeout_ms: float,
        loop: Loop | None = None,
        on_waited: Callable[[float], object] = lambda waited_ms: None,
    ) -> None:
        """max_permits: bytes, 0: no limit, and nothing is counted. max_queue: requests that may wait, 0: any number.

        loop: whose time counts; None: that which runs.
        on_waited: told of each request that was granted or timed out how many milliseconds it waited.
        """
        self._loop = loop or asyncio.get_running_loop()
        self._on_waited = on_waited
        self._queue: OrderedDict[_Request, None] = OrderedDict()
        self._live = 0
        """Permits that were not released."""
        self._stuck = 0
        """Those of them whose holders wait for an update."""
        self._closed = False
        self.acquired = 0
        """Bytes in use that a limit counts; after the limit was lowered perhaps more than it."""
        self.timeouts = 0
        self.max_permits, self.max_queue, self.timeout_ms = max_permits, max_queue, timeout_ms

    @property
    def available(self) -> int:
        """Bytes that may be acquired; below 0 until enough came back under a lowered limit."""
        return self.max_permits - self.acquired

    @property
    def queue_size(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def set_limits(self, max_permits: int, max_queue: int, timeout_ms: float) -> None:
        """Change the limits. Takes nothing away: nothing is granted until enough came back.

        What waits keeps its timeout; a request over a lowered limit waits for all of it.
        """
        self.max_permits, self.max_queue, self.timeout_ms = max_permits, max_queue, timeout_ms
        self._run()

    def acquire(self, permits: int, is_cancelled: Callable[[], bool] | None = None) -> Permits:
        """A permit for so many bytes, when its turn has come. Cancelling the future takes the request back.

        is_cancelled: asked when its turn comes. Raises InvalidArgument for fewer than none and for more than the
        limit; the future, PermitError.
        """
        return self._request(permits, None, is_cancelled)

    def update(self, permit: Permit, size: int, is_cancelled: Callable[[], bool] | None = None) -> Permits:
        """A permit for so many bytes in place of `permit`, which is empty then; if it fails, `permit` stays good.

        To shrink is immediate. To grow waits in turn for the difference to what `permit` holds when that is granted.
        Where every permit is held by one that waits to grow, waiting would not end: the first of those that wait gets
        what there is then, less than it asked for.
        """
        if 0 <= size <= permit._counted and not self._closed:
            future = asyncio.get_running_loop().create_future()
            self._grant(_Request(size, permit, None, future, self._loop.time()))
            self._run()
            return future
        return self._request(size, permit, is_cancelled)

    def release(self, permit: Permit) -> None:
        """Give back what a permit holds, once, however often it is called."""
        self._empty(permit)
        self._run()

    def close(self) -> None:
        """Fail what waits, and what comes; what is held can be released."""
        self._closed = True
        while self._queue:
            self._fail(next(iter(self._queue)), PermitClosed("the semaphore is closed"))

    def _request(self, size: int, old: Permit | None, is_cancelled: Callable[[], bool] | None) -> Permits:
        if size < 0:
            raise InvalidArgument("permits", size, "expected 0 or more")
        if 0 < self.max_permits < size:
            raise InvalidArgument("permits", size, f"more than the limit of {self.max_permits}")
        request = _Request(size, old, is_cancelled, asyncio.get_running_loop().create_future(), self._loop.time())
        self._queue[request] = None
        if old is not None:
            self._note_waiting(old, 1)
        if self._closed:
            self._fail(request, PermitClosed("the semaphore is closed"))
            return request.future
        self._run()
        if request in self._queue:
            if 0 < self.max_queue < len(self._queue):
                self._fail(request, PermitQueueFull(f"{self.max_queue} requests wait for permits"))
                self._run()
            else:
                request.timer = self._loop.call_later(self.timeout_ms / 1_000, self._time_out, request)
                request.future.add_done_callback(lambda _: self._take_back(request))
        return request.future

    def _run(self) -> None:
        """Grant from the head on what can be granted."""
        while self._queue:
            head = next(iter(self._queue))
            if head.future.done():
                self._remove(head)
            elif head.is_cancelled is not None and head.is_cancelled():
                self._fail(head, PermitCancelled("what the permit was for is gone"))
            elif self._counted_size(head) - _counted(head.old) <= self.available or not self.max_permits:
                self._admit(head)
            elif self._live == self._stuck:
                head.size = max(0, self.available + _counted(head.old))
                self._admit(head)
            else:
                return

    def _admit(self, head: _Request) -> None:
        self._remove(head)
        self._tell_waited(head)
        self._grant(head)

    def _tell_waited(self, request: _Request) -> None:
        self._on_waited((self._loop.time() - request.since) * 1_000)

    def _counted_size(self, request: _Request) -> int:
        return min(request.size, self.max_permits)

    def _grant(self, request: _Request) -> None:
        if request.old is not None:
            self._empty(request.old)
        counted = self._counted_size(request)
        self.acquired += counted
        self._live += 1
        request.future.set_result(Permit(counted if self.max_permits else request.size, counted))

    def _empty(self, permit: Permit) -> None:
        if permit._live:
            self.acquired -= permit._counted
            permit.size = permit._counted = 0
            permit._live = False
            self._live -= 1
            self._stuck -= permit._waiting > 0

    def _fail(self, request: _Request, error: PermitError) -> None:
        self._remove(request)
        if not request.future.done():
            request.future.set_exception(error)

    def _remove(self, request: _Request) -> None:
        del self._queue[request]
        if request.timer is not None:
            request.timer.cancel()
        if request.old is not None:
            self._note_waiting(request.old, -1)

    def _note_waiting(self, permit: Permit, more: int) -> None:
        before, permit._waiting = permit._waiting, permit._waiting + more
        if permit._live:
            self._stuck += (permit._waiting > 0) - (before > 0)

    def _take_back(self, request: _Request) -> None:
        """Its caller has cancelled it, if it waits still."""
        if request in self._queue:
            self._remove(request)
            self._run()

    def _time_out(self, request: _Request) -> None:
        if request in self._queue:
            if not request.future.done():
                self.timeouts += 1
                self._tell_waited(request)
            self._fail(request, PermitTimeout(f"no permit for {request.size} bytes in {self.timeout_ms:g} ms"))
            self._run()


def _counted(permit: Permit | None) -> int:
    return 0 if permit is None else permit._counted
