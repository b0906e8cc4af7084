"""An event loop in a thread of its own, in which the coroutines of a worker run."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_COMMITTING = 8
"""Threads that wait for a disk, so that those commits share a flush."""

_log = logging.getLogger("duelog.worker")


class Limit:
    """How long one coroutine may run: until another thread says that its time is over, by whatever clock."""

    def __init__(self) -> None:
        self._scope: asyncio.Timeout | None = None
        self._over = False

    async def hold(self, work: Awaitable[T]) -> T:
        """Await it, and give its result; raises TimeoutError in it, and out of it, once the time is over."""
        try:
            async with asyncio.timeout(None) as self._scope:
                if self._over:
                    self._scope.reschedule(0)
                return await work
        finally:
            self._scope = None

    def end(self) -> None:
        """Its time is over. REQUIRES: the thread of the loop; once."""
        self._over = True
        if self._scope is not None:
            self._scope.reschedule(0)


class CoroutineLoop:
    """Runs coroutines until `close`, which cancels those that have not come to their end."""

    def __init__(self) -> None:
        self._running: set[Future[None]] = set()
        """Strong references to running tasks: the loop keeps weak ones, so a task that waits could be collected."""
        self._committing = ThreadPoolExecutor(_COMMITTING, "duelog-worker-end")
        """Its own: handlers that hang in `asyncio.to_thread` take up the threads of the loop."""
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # sets none in the thread that starts it
        self._loop = self._runner.get_loop()
        self._closing = False
        self._has_cut_short = False
        self._thread = threading.Thread(target=self._run, name="duelog-worker-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._runner:
            while not self._closing:
                try:
                    self._loop.run_forever()
                except BaseException:  # asyncio lets SystemExit and KeyboardInterrupt of any task end the loop
                    _log.exception("a coroutine's own task raised; the event loop goes on")

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Have a coroutine run, which raises nothing."""
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def limit(self) -> Limit:
        return Limit()

    def end(self, limit: Limit) -> None:
        self._has_cut_short = True
        self._loop.call_soon_threadsafe(limit.end)

    def in_thread(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have what may wait for a disk, and raises nothing, run in a thread; no cancellation reaches it."""
        self._committing.submit(work, *args, **kwargs)

    def close(self, *, wait: bool) -> None:
        """Cancel what runs, and end the thread. wait: until it has.

        It has not while a coroutine blocks it, or what one that took too long runs in a thread hangs: that is not
        waited for.
        """
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if wait and not self._has_cut_short:
            self._thread.join()
        self._committing.shutdown(wait=wait)
