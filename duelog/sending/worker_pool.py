"""A pool of threads that run the parts of one piece of work side by side: a batch for seven days is seven commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from duelog.store.errors import ClosedError

T = TypeVar("T")


class WorkerPool:
    """At most `size` threads, started when they are first needed. Thread-safe."""

    def __init__(self, size: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._closed = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run every job, the first in this thread, and return their values in order once all have ended.

        Raises the first error in the order of the jobs, after all have ended; ClosedError with nothing run. An
        interrupt of this thread (KeyboardInterrupt) leaves the jobs of the others to run to their ends.
        """
        parts = [_Part(job) for job in jobs]
        with self._lock:  # every job of a call is submitted before `close`, or none is
            if self._closed:
                raise ClosedError("store")
            with suppress(RuntimeError):  # no thread can be started: this one runs what no other has begun
                for part in parts[1:]:
                    self._threads.submit(part.run)
        return _values(parts)

    def close(self) -> None:
        """End the threads once they have done all that was begun. Not by one of them."""
        with self._lock:
            self._closed = True
        self._threads.shutdown()


def run_in_turn(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """As `WorkerPool.run`, one after the other in this thread."""
    return _values([_Part(job) for job in jobs])


class _Part(Generic[T]):
    """A job that is run once, by the first thread that comes to it."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._begun = threading.Lock()
        self.ended: Future[T] = Future()

    def run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self.ended.set_result(self._job())
        except BaseException as error:
            self.ended.set_exception(error)
            if not isinstance(error, Exception):
                raise


def _values(parts: Sequence[_Part[T]]) -> list[T]:
    for part in parts:
        part.run()
    errors = [error for part in parts if (error := part.ended.exception()) is not None]
    if errors:
        raise errors[0]
    return [part.ended.result() for part in parts]
