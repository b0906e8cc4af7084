"""Which partition logs have something due, and when the next one will."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ...store.timer_queue import TimerQueue
from .pending_log import PendingLog


class ReadyQueue:
    """Logs by the time for which they are armed. Thread-safe."""

    def __init__(self) -> None:
        self._armed: TimerQueue[PendingLog] = TimerQueue()
        self._lock = threading.Lock()

    def arm(self, log: PendingLog, due_ms: int | None) -> bool:
        """Have `log` come up at `due_ms`, or earlier if it is armed so; True when it is now the first of all."""
        if due_ms is None:
            return False
        with self._lock:
            return self._armed.push(log, due_ms) and self._armed.next() == (due_ms, log)

    def postpone(self, log: PendingLog, armed_ms: int, due_ms: int | None) -> None:
        """`log` was armed at `armed_ms`, too early: have it come up at `due_ms`, unless it was armed anew.

        The caller arms it once more by what is left of it then, so that an entry that came in between,
        and found it armed early enough, is not forgotten.
        """
        with self._lock:
            if self._armed.due_ms(log) == armed_ms:
                if due_ms is None:
                    self._armed.discard(log)
                else:
                    self._armed.replace(log, due_ms)

    def pop(self, now_ms: int) -> PendingLog | None:
        """The log armed earliest, if that is by `now_ms`; it has to be armed again."""
        with self._lock:
            return self._armed.pop_due(now_ms)

    def first(self) -> tuple[int, PendingLog] | None:
        """The time at which the first log comes up, and the log."""
        with self._lock:
            return self._armed.next()

    def discard(self, log: PendingLog) -> None:
        """Take a log out."""
        with self._lock:
            self._armed.discard(log)

    def arm_anew(self, logs: Sequence[PendingLog]) -> None:
        """Forget every time, also one that an interrupt has left half noted, and arm these logs, which are all."""
        with self._lock:
            self._armed.clear()
        for log in logs:
            self.arm(log, log.next_due_ms())
