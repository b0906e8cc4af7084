"""A pool of threads that run the parts of one piece of work side by side: a batch for seven days is seven commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
        with self._lock:  # every job of a call is submitted before `close`, or none is
            if self._closed:
                raise ClosedError("store")
            others = [self._threads.submit(job) for job in jobs[1:]]
        return _values([_run(jobs[0]), *others])

    def close(self) -> None:
        """End the threads once they have done all that was begun. Not by one of them."""
        with self._lock:
            self._closed = True
        self._threads.shutdown()


def run_in_turn(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """As `WorkerPool.run`, one after the other in this thread."""
    return _values([_run(job) for job in jobs])


def _run(job: Callable[[], T]) -> Future[T]:
    ended: Future[T] = Future()
    try:
        ended.set_result(job())
    except Exception as error:
        ended.set_exception(error)
    return ended


def _values(futures: Sequence[Future[T]]) -> list[T]:
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
