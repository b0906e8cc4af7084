"""Puts and their outcomes; puts that are one group."""

import threading
from collections.abc import Callable
from typing import Any

from duelog import DelayedStore, Duplicate, MessageId

LIMIT_S = 60

Outcomes = list[tuple[Any, MessageId | Duplicate | Exception]]


class Heard:
    """A `done`: the groups that it heard of, in order."""

    def __init__(self) -> None:
        self.groups: list[Outcomes] = []
        self.thread: threading.Thread | None = None
        self._more = threading.Condition()

    def __call__(self, results: Outcomes) -> None:
        with self._more:
            self.thread = threading.current_thread()
            self.groups.append(list(results))
            self._more.notify_all()

    @property
    def results(self) -> Outcomes:
        """All of them, in the order in which they were heard."""
        return [result for group in self.groups for result in group]

    def wait(self, count: int) -> Outcomes:
        """All, once there are so many; an error else."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.results) >= count, LIMIT_S)
        assert len(self.results) == count
        return self.results

    def outcomes(self, count: int) -> list[MessageId | Duplicate | Exception]:
        """Without the tokens."""
        return [outcome for _, outcome in self.wait(count)]


class Held:
    """Holds every commit of a store's main environment until it is let go."""

    def __init__(self, store: DelayedStore) -> None:
        writer = store._engine.writer()
        self._writer = writer
        self._write = self._writer.write
        self.reached = threading.Event()
        self.let_go = threading.Event()
        self._writer.write = self._wait  # type: ignore[method-assign]

    def _wait(self, work: Any) -> Any:
        self.reached.set()
        assert self.let_go.wait(LIMIT_S)
        return self._write(work)


def together(store: DelayedStore, put: Callable[[], object]) -> None:
    """Have what `put` puts be written as one group, as far as it may be."""
    outbox = store._engine.sending.outbox
    with outbox._condition.lock:
        outbox._state = -1
        try:
            put()
        finally:
            outbox._begin()
