"""Calls between the event loop's thread and others: the engine's calls, workers, timers, files looked at regularly.

An event loop wakes by a byte through a pipe. A commit that answers a thousand messages, or a topic that wakes fifty
subscriptions, costs one such byte.
"""

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ...store.errors import ClosedError, DuelogError

_log = logging.getLogger("duelog.broker")

T = TypeVar("T")


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None: ...


class Loop(Protocol):
    """The part of an event loop that the broker uses; tests move its time by hand."""

    def time(self) -> float:
        """Seconds, never going back."""

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> object:
        """Call soon; from any thread. Raises RuntimeError once the loop is closed."""


class LoopCalls:
    """Calls that the loop's thread makes, in the order in which they were posted."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._waiting: deque[Callable[[], object]] = deque()
        self._woken = False

    def post(self, call: Callable[[], object]) -> None:
        """Have the loop's thread call. From any thread; takes no lock. After the loop's end nothing is called."""
        self._waiting.append(call)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._woken = False  # before looking: what is posted from here on wakes the loop again
        for _ in range(len(self._waiting)):
            try:
                self._waiting.popleft()()
            except Exception:
                _log.exception("a call of the engine failed")


def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of its own; what it raises is for those that wait for it, if any do still."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class Workers:
    """Threads for work that may wait for the disk or a lock."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run it; its result, or what it raises. It goes on where the waiting task is cancelled.

        Raises ClosedError once the broker has ended.
        """
        try:
            submitted = self._executor.submit(work)
        except RuntimeError as error:
            raise ClosedError("the broker") from error
        return await asyncio.wrap_future(submitted)

    def start(self, work: Callable[[], object]) -> None:
        """Run it, without waiting; it does not raise. Once the broker has ended nothing is run."""
        with suppress(RuntimeError):
            self._executor.submit(work)


def told_to_stop() -> asyncio.Event:
    """Make an event that SIGTERM and SIGINT set. REQUIRES: the event loop of the main thread."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    return ended


class KeptUp(Generic[T]):
    """A value that is read from files, and again once one of them was replaced, written or made readable."""

    def __init__(self, read: Callable[[], T], *paths: Path) -> None:
        """Read it. Raises what `read` does."""
        self._read, self._paths = read, paths
        self._stamps = self._look()
        self.value = read()

    def refresh(self) -> bool:
        """Read it again if the files have changed; False: it is the one before. Waits for the disk.

        Files that cannot be used are logged once, and the value before stays.
        """
        stamps = self._look()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self.value = self._read()
        except (DuelogError, OSError, UnicodeDecodeError) as error:
            _log.error("%s cannot be used; what it said before stays: %s", self._paths[0], error)
            return False
        _log.info("%s: what it says now is in use", self._paths[0])
        return True

    def _look(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._paths:
            with suppress(OSError):
                status = path.stat()
                stamps.append((status.st_ino, status.st_ctime_ns, status.st_size))
        return stamps


async def keep_refreshing(
    look: Callable[[], bool], every_s: float, changed: Callable[[], object] = lambda: None
) -> None:
    """Call `look` in a worker at once and again and again, and `changed` where it says so, until the task is cancelled.

    What either raises is logged, and the next look comes all the same.
    """
    while True:
        try:
            if await asyncio.to_thread(look):
                changed()
        except Exception:
            _log.exception("files that may have changed could not be looked at")
        await asyncio.sleep(every_s)
