"""A few threads that run the parts of one piece of work side by side, started when first needed.

A batch for seven days is seven commits, and a future with its condition for each costs more than handing it over has
to. Here a part is put into a queue, and the last one to end opens one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from duelog.store.errors import ClosedError

T = TypeVar("T")


class _Round(Generic[T]):
    """The jobs of one `run`, and what became of them."""

    __slots__ = ("_left", "_lock", "done", "jobs", "outcomes")

    def __init__(self, jobs: Sequence[Callable[[], T]], lent: int) -> None:
        self.jobs = jobs
        self.outcomes: list[tuple[T | None, BaseException | None]] = [(None, None)] * len(jobs)
        self._left = lent
        self._lock = threading.Lock()
        self.done = threading.Lock()
        """Open once every job that was lent has ended."""
        if lent:
            self.done.acquire()

    def run(self, at: int) -> None:
        try:
            self.outcomes[at] = (self.jobs[at](), None)
        except Exception as error:
            self.outcomes[at] = (None, error)

    def run_lent(self, at: int) -> None:
        try:
            self.run(at)
        except BaseException as error:  # a thread of the crew goes on whatever a job raised
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


def run_in_turn(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """As `Crew.run`, one after the other in this thread."""
    current: _Round[T] = _Round(jobs, 0)
    for at in range(len(jobs)):
        current.run(at)
    return current.result()


class Crew:
    """At most `size` threads. Thread-safe."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._queue: SimpleQueue[tuple[_Round[Any], int] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run every job, the first in this thread, and return their values in order once all have ended.

        Raises the first error in the order of the jobs, after all have ended; ClosedError with nothing run. An
        interrupt of this thread (KeyboardInterrupt) leaves the jobs of the others to run to their ends.
        """
        lent = len(jobs) - 1
        current: _Round[T] = _Round(jobs, lent)
        with self._lock:  # what is put before `close` is done before the threads end
            if self._closed:
                raise ClosedError("store")
            if len(self._threads) < min(lent, self._size):
                self._enlist(min(lent, self._size))
            for at in range(1, len(jobs)):
                self._queue.put((current, at))
        current.run(0)
        current.done.acquire()
        return current.result()

    def _enlist(self, wanted: int) -> None:
        while len(self._threads) < wanted:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while (lent := self._queue.get()) is not None:
            current, at = lent
            current.run_lent(at)
            del current, lent  # nothing of it is kept while the next is waited for

    def close(self) -> None:
        """End the threads once they have done all that was begun. Not by one of them."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            thread.join()
