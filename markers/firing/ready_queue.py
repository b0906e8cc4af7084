"""Which partition logs have something due, and when the next one will."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Sequence

from .pending_log import PendingLog


class ReadyQueue:
    """A heap of (due_ms, partition start, topic id); an entry that was re-armed earlier is skipped. Thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, PendingLog]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()

    def arm(self, log: PendingLog, due_ms: int | None) -> bool:
        """Have `log` come up at `due_ms`, or earlier if it is armed so; True when it is now the first of all."""
        if due_ms is None:
            return False
        with self._lock:
            if log.armed_ms is not None and log.armed_ms <= due_ms:
                return False
            log.armed_ms = due_ms
            entry = (due_ms, log.start_ms, log.topic_id, next(self._order), log)
            heapq.heappush(self._heap, entry)
            return self._heap[0] is entry

    def postpone(self, log: PendingLog, armed_ms: int, due_ms: int | None) -> None:
        """`log` was armed at `armed_ms`, too early: have it come up at `due_ms`, unless it was armed anew.

        The caller arms it once more by what is left of it then, so that an entry that came in between,
        and found it armed early enough, is not forgotten.
        """
        with self._lock:
            if log.armed_ms == armed_ms:
                log.armed_ms = due_ms
                if due_ms is not None:
                    heapq.heappush(self._heap, (due_ms, log.start_ms, log.topic_id, next(self._order), log))

    def pop(self, now_ms: int) -> PendingLog | None:
        """The log armed earliest, if that is by `now_ms`; it has to be armed again."""
        with self._lock:
            self._drop_stale()
            if not self._heap or self._heap[0][0] > now_ms:
                return None
            log = heapq.heappop(self._heap)[-1]
            log.armed_ms = None
            return log

    def first(self) -> tuple[int, PendingLog] | None:
        """The time at which the first log comes up, and the log."""
        with self._lock:
            self._drop_stale()
            return (self._heap[0][0], self._heap[0][-1]) if self._heap else None

    def discard(self, log: PendingLog) -> None:
        """Take a log out."""
        with self._lock:
            log.armed_ms = None

    def arm_anew(self, logs: Sequence[PendingLog]) -> None:
        """Forget every time, also one that an interrupt has left half noted, and arm these logs, which are all."""
        with self._lock:
            self._heap = []
            for log in logs:
                log.armed_ms = None
        for log in logs:
            self.arm(log, log.next_due_ms())

    def _drop_stale(self) -> None:
        while self._heap and self._heap[0][-1].armed_ms != self._heap[0][0]:
            heapq.heappop(self._heap)
