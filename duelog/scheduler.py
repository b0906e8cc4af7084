"""The background thread: sleeps until the next thing is due, ticks, and sleeps again. It never polls."""

from __future__ import annotations

import threading
from collections.abc import Callable

from duelog.store.clock import Clock
from duelog.store.errors import DuelogError

RETRY_MS = 1_000
"""How long after a failed tick (a full disk, say) the next one is tried."""


class Scheduler:
    """Runs `tick`, which returns when to run next, in a thread of its own."""

    def __init__(self, tick: Callable[[], int | None], clock: Clock, failed: Callable[[], None]) -> None:
        """`failed` is called when a tick has begun to fail, so that waiting receivers look at `error`."""
        self._tick = tick
        self._clock = clock
        self._failed = failed
        self._condition = threading.Condition(threading.Lock())
        self._woken = False
        self._stopping = False
        self.error: DuelogError | None = None
        """Why the last tick failed; None when it did not."""
        self._thread = threading.Thread(target=self._run, name="duelog-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look again. Any thread may call this; it takes a leaf lock only."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def stop(self) -> None:
        """End the thread after the batch it is at, and wait for it."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                until_ms = self._tick()
                self.error = None
            except DuelogError as error:
                until_ms = self._clock.now_ms() + RETRY_MS
                first = self.error is None
                self.error = error
                if first:
                    self._failed()
            with self._condition:
                # One wait, then a new tick: a clock that was moved, or set back, is noticed.
                if not self._woken and not self._stopping:
                    self._clock.wait(self._condition, until_ms)
                self._woken = False
                if self._stopping:
                    return
