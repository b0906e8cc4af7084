"""When delay indexes that appends have filled are brought to their smaller form, in which a restart has them too.

An index of a million entries on the current day takes a third less memory with its buckets asleep. They are put to
sleep when a good part of the index has come in since (`partitions/index/packing.py` says how much), log by log, by the
thread that fires, in slices of a ms or two between which whoever appends gets the lock, some ten ms at a time between
batches. Nothing is written for it, so it does not wait for a snapshot and is not told of one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from .log_firing import HAND_OVER_S, LogFiring

_STEP_S = 0.01


class IndexPacking:
    """The logs that have something to put to sleep. Thread-safe; `step` is for one thread at a time."""

    def __init__(self) -> None:
        self._logs: dict[LogFiring, None] = {}
        self._lock = threading.Lock()

    def heard(self, log: LogFiring) -> bool:
        """Entries have come into `log`; True when with them it is the first that `step` has to do with. O(1)."""
        if not log.unsettled or log in self._logs:
            return False
        with self._lock:
            self._logs[log] = None
            return len(self._logs) == 1

    def loaded(self, logs: Iterable[LogFiring]) -> None:
        """Logs have been loaded."""
        for log in logs:
            self.heard(log)

    def forget(self, log: LogFiring) -> None:
        """Nothing of `log` is fired any more."""
        with self._lock:
            self._logs.pop(log, None)

    def is_due(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._logs)

    def step(self) -> None:
        """Go on for some ten ms, or until nothing is left."""
        until = time.perf_counter() + _STEP_S
        while (log := self._first()) is not None:
            more = False
            try:
                more = log.pack_next()
            finally:
                if not more:
                    self.forget(log)
            if time.perf_counter() >= until:
                return
            time.sleep(HAND_OVER_S)

    def _first(self) -> LogFiring | None:
        with self._lock:
            return next(iter(self._logs), None)
