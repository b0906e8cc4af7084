"""Which main logs may have something to roll or to trim, and when they are to be looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable

from duelog.store.timer_queue import TimerQueue


class TrimAgenda:
    """One time for each topic, the earliest that was asked for. Thread-safe; takes leaf locks only."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` wakes the scheduler, where there is one."""
        self._wake = wake
        self._due: TimerQueue[int] = TimerQueue()  # topic ids
        self._lock = threading.Lock()

    def look_at(self, topic_id: int, due_ms: int) -> None:
        """Have a main log looked at at `due_ms` (epoch ms) or earlier, and wake the scheduler where that is new.

        A look at a topic plans the next one from the topic's state, for every reason there is: what was asked for a
        later time is not lost.
        """
        if self.plan(topic_id, due_ms):
            self._wake()

    def plan(self, topic_id: int, due_ms: int) -> bool:
        """Plan a look without waking the tick; False if the log is looked at in time anyway. See `look_at`."""
        with self._lock:
            return self._due.push(topic_id, due_ms)

    def next_due_ms(self) -> int | None:
        """When the next main log is to be looked at, None when none is."""
        with self._lock:
            following = self._due.next()
            return None if following is None else following[0]

    def take(self, now_ms: int, at_most: int) -> list[int]:
        """The topics whose time has come, the earliest first; they are on the agenda no more."""
        due: list[int] = []
        with self._lock:
            while len(due) < at_most and (topic_id := self._due.pop_due(now_ms)) is not None:
                due.append(topic_id)
        return due
