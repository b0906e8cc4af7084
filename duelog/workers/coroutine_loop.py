"""An event loop in a thread of its own, in which the coroutines of a worker run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec

P = ParamSpec("P")


class CoroutineLoop:
    """Runs coroutines until `close`, which cancels those that have not come to their end."""

    def __init__(self) -> None:
        made: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def main() -> None:
            closing = asyncio.Event()
            made.set_result((asyncio.get_running_loop(), closing))
            await closing.wait()

        self._running: set[Future[None]] = set()
        """What runs: the loop itself refers to its tasks weakly, and one that waits may be collected."""
        self._thread = threading.Thread(target=lambda: asyncio.run(main()), name="duelog-worker-loop", daemon=True)
        self._thread.start()
        self._loop, self._closing = made.result()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Have a coroutine run, which raises nothing."""
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def in_thread(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Await what may wait for a disk."""
        await asyncio.to_thread(work, *args, **kwargs)

    def close(self, *, wait: bool) -> None:
        """Cancel what runs, and end the thread. wait: until it has; it has not while a coroutine blocks it."""
        self._loop.call_soon_threadsafe(self._closing.set)
        if wait:
            self._thread.join()
