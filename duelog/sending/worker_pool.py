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
        once = [_Once(job) for job in jobs]
        others: list[Future[T]] = []
        with self._lock:  # every job of a call is submitted before `close`, or none is
            if self._closed:
                raise ClosedError("store")
            with suppress(RuntimeError):  # no thread can be started: this one runs what was not submitted
                for job in once[1:]:
                    others.append(self._threads.submit(job))
        first, *rest = [_run(job) for job in (once[0], *once[1 + len(others) :])]
        return _values([first, *others, *rest])

    def close(self) -> None:
        """End the threads once they have done all that was begun. Not by one of them."""
        with self._lock:
            self._closed = True
        self._threads.shutdown()


def run_in_turn(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """As `WorkerPool.run`, one after the other in this thread."""
    return _values([_run(job) for job in jobs])


class _Once(Generic[T]):
    """A job that runs once: the executor keeps one that it could not start a thread for, and may run it later."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._value: T

    def __call__(self) -> T:
        """What the first call returns or raises, which other calls wait for."""
        with self._lock:
            if self._job is not None:
                job, self._job = self._job, None
                try:
                    self._value = job()
                except BaseException as error:
                    self._error = error
        if self._error is not None:
            raise self._error
        return self._value


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
