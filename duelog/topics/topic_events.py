"""Which topics come into being and are deleted, told to the program in the order of the commits.

The leader of a commit notes an event; a thread of its own calls the listeners, with no lock held, so that they may use
the store and a slow one holds up no commit. A listener hears of every commit after its registration, once, in order;
what it has not taken yet waits in memory.
"""

import threading
from collections.abc import Callable
from errno import EAGAIN
from pathlib import Path
from typing import Literal, NamedTuple

from duelog.store.clock import Monitor
from duelog.store.errors import ClosedError, ResourceShortage
from duelog.store.listener import call_supplied


class TopicEvent(NamedTuple):
    """A topic was created or deleted; `name` is its full name.

    `topic_id` is of the topic, not of the name: one that is deleted and created again has a higher one.
    """

    kind: Literal["created", "deleted"]
    name: str
    topic_id: int


Listener = Callable[[list[TopicEvent]], object]


class _Registered:
    """A listener, and what it is to hear."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.waiting: list[TopicEvent] = []


class TopicEvents:
    """The listeners of one store. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._condition = Monitor()
        self._registered: list[_Registered] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called from now on; what is returned ends that. Raises ClosedError, ResourceShortage."""
        entry = _Registered(listener)
        with self._condition.lock:
            if self._closed:
                raise ClosedError(f"store {self._path}")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="duelog-events", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # "can't start new thread"
                    raise ResourceShortage(self._path, "the thread of events cannot be started", EAGAIN) from error
                self._thread = thread
            self._registered.append(entry)

        def end() -> None:
            with self._condition.lock:
                if entry in self._registered:
                    self._registered.remove(entry)
                entry.waiting.clear()

        return end

    def note(self, event: TopicEvent) -> None:
        """A commit has created or deleted a topic. For the leader, in commit order."""
        with self._condition.lock:
            for entry in self._registered:
                entry.waiting.append(event)
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition.lock:
                while not (self._closed or any(entry.waiting for entry in self._registered)):
                    self._condition.wait()
                calls = [(entry.listener, list(entry.waiting)) for entry in self._registered if entry.waiting]
                for entry in self._registered:
                    entry.waiting.clear()
                if not calls:
                    return
            for listener, events in calls:
                call_supplied(listener, events)

    def close(self) -> None:
        """Have listeners hear what they have not heard, and end the thread; a listener may close the store."""
        with self._condition.lock:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
