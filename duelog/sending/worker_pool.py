"""A pool of threads that run the parts of one piece of work side by side: a batch for seven days is seven commits.

A future with its condition for each part, as `concurrent.futures` makes them, costs batches of 1,000 messages 7 to 9 %.
Here a part is put into a queue, and the last one to end releases one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from duelog.store.errors import ClosedError

T = TypeVar("T")


class _Call(Generic[T]):
    """The jobs of one `run`, and what became of them."""

    __slots__ = ("_left", "_lock", "done", "jobs", "outcomes")

    def __init__(self, jobs: Sequence[Callable[[], T]], queued: int) -> None:
        self.jobs = jobs
        self.outcomes: list[tuple[T | None, BaseException | None]] = [(None, None)] * len(jobs)
        self._left = queued
        self._lock = threading.Lock()
        self.done = threading.Lock()
        """Open once every job that was queued has ended."""
        if queued:
            self.done.acquire()

    def run(self, at: int) -> None:
        try:
            self.outcomes[at] = (self.jobs[at](), None)
        except Exception as error:
            self.outcomes[at] = (None, error)

    def run_queued(self, at: int) -> None:
        try:
            self.run(at)
        except BaseException as error:  # a worker goes on whatever a job raised
            self.outcomes[at] = (None, error)
        with self._lock:
            self._left -= 1
            ended = not self._left
        if ended:
            self.done.release()

    def result(self) -> list[T]:
        for _, error in self.outcomes:
            if error is not None:
                raise error
        return [value for value, _ in self.outcomes]  # type: ignore[misc]  # None only where T has it


class WorkerPool:
    """At most `size` threads, started when they are first needed. Thread-safe."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._queue: SimpleQueue[tuple[_Call[Any], int] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run every job, the first in this thread, and return their values in order once all have ended.

        Raises the first error in the order of the jobs, after all have ended; ClosedError with nothing run. An
        interrupt of this thread (KeyboardInterrupt) leaves the jobs of the others to run to their ends. Where no thread
        can be started this one runs all.
        """
        with self._lock:  # what is queued before `close` is done before the threads end
            if self._closed:
                raise ClosedError("store")
            with suppress(RuntimeError):  # those that could be started run what is queued
                while len(self._threads) < min(len(jobs) - 1, self._size):
                    self._start_thread()
            queued = len(jobs) - 1 if self._threads else 0
            call: _Call[T] = _Call(jobs, queued)
            for at in range(1, 1 + queued):
                self._queue.put((call, at))
        for at in (0, *range(1 + queued, len(jobs))):
            call.run(at)
        call.done.acquire()
        return call.result()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            call, at = job
            call.run_queued(at)
            del call, job  # nothing of it is kept while the next is waited for

    def close(self) -> None:
        """End the threads once they have done all that was begun. Not by one of them."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            thread.join()


def run_in_turn(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """As `WorkerPool.run`, one after the other in this thread."""
    call: _Call[T] = _Call(jobs, 0)
    for at in range(len(jobs)):
        call.run(at)
    return call.result()
