"""Clocks: the system's, one that a test sets, and the store's own clock, which never goes back.

Every wait and every decision by time in the library goes through a ``Clock``, so that a program or a test can drive
the store. A clock tells milliseconds since the Unix epoch, UTC. It does not schedule anything: a waiter brings the
condition that wakes it and looks again when it is woken.
"""

import threading
import time
from abc import ABC, abstractmethod
from datetime import timedelta

from .duration import duration_ms
from .errors import InvalidArgument

MAX_WAIT_S = 60.0
"""Longest single real wait, in seconds: a wall clock that is set forward meanwhile is noticed after it."""

HEAR_S = 1.0
"""Longest single real wait of a main thread, in seconds. Python runs the handlers of signals in that thread, once it is
awake, and a signal that comes as the thread falls asleep does not wake it."""


class Monitor(threading.Condition):
    """A condition whose lock is taken by ``with monitor.lock``.

    That is one step for an interrupt (KeyboardInterrupt); ``with monitor`` is not, and may leave the lock taken by a
    thread that has gone on.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as Condition does, in the main thread for at most `HEAR_S`: the caller looks again in a loop."""
        if threading.get_ident() == threading.main_thread().ident:
            timeout = HEAR_S if timeout is None else min(timeout, HEAR_S)
        return super().wait(timeout)


class Clock(ABC):
    """A source of time in ms since the Unix epoch; may be read from any thread."""

    lead_ms = 0
    """How long before its time what is due is written to the disk, so that no receiver waits for that then; 0: at its
    time, with a clock that something outside the store moves."""

    @abstractmethod
    def now_ms(self) -> int:
        """The time now, rounded down to the millisecond; may go back where its source does."""

    def wait(self, condition: threading.Condition, until_ms: int | None) -> None:
        """Wait until ``condition`` is notified or this clock shows ``until_ms`` (None: until notified).

        REQUIRES: the caller holds ``condition``, and calls in a loop that looks at the clock and at its own state:
        this may return early, and returns after at most ``MAX_WAIT_S`` of real time.
        """
        if until_ms is None:
            condition.wait(MAX_WAIT_S)
            return
        remaining_ms = until_ms - self.now_ms()
        if remaining_ms > 0:
            condition.wait(min(remaining_ms / 1000, MAX_WAIT_S))


class SystemClock(Clock):
    """The wall clock of the machine."""

    lead_ms = 4

    def now_ms(self) -> int:
        """The wall clock's time; goes back where the machine's clock is set back."""
        return time.time_ns() // 1_000_000

    def wait(self, condition: threading.Condition, until_ms: int | None) -> None:
        """Wait as ``Clock.wait``; a wait that runs out ends at the start of millisecond ``until_ms``, not before."""
        if until_ms is None:
            condition.wait(MAX_WAIT_S)
            return
        # The condition waits by the monotonic clock, which may end a hair before the wall clock's boundary:
        # then the little that is left is waited for again.
        until_ns = until_ms * 1_000_000
        while (remaining_ns := until_ns - time.time_ns()) > 0:
            if remaining_ns >= MAX_WAIT_S * 1e9:
                condition.wait(MAX_WAIT_S)
                return
            if condition.wait(remaining_ns / 1e9):
                return


class ManualClock(Clock):
    """A clock that moves only when told to, for programs and tests that drive the store themselves.

    Thread-safe. ``advance`` and ``set`` wake every thread that waits on this clock.

    >>> clock = ManualClock(1_000)
    >>> clock.advance(500)
    1500
    """

    def __init__(self, now_ms: int) -> None:
        self._lock = threading.Lock()
        self._now_ms = _checked_ms("now_ms", now_ms)
        self._waiting: dict[threading.Condition, int] = {}  # condition -> number of threads waiting on it

    def now_ms(self) -> int:
        """The time last set."""
        return self._now_ms

    def advance(self, ms: int | timedelta) -> int:
        """Move on by ``ms`` (0 or more, or a timedelta), wake the waiters and return the new time.

        REQUIRES: the caller holds no condition that another thread may be waiting on through this clock.
        """
        step_ms = duration_ms("ms", ms) if isinstance(ms, timedelta) else _checked_ms("ms", ms)  # back is for set()
        with self._lock:
            self._now_ms += step_ms
            now_ms = self._now_ms
        self._wake()
        return now_ms

    def set(self, ms: int) -> None:
        """Show ``ms`` from now on, be it earlier or later, and wake the waiters.

        REQUIRES: as ``advance``.
        """
        _checked_ms("ms", ms)
        with self._lock:
            self._now_ms = ms
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            conditions = list(self._waiting)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, until_ms: int | None) -> None:
        """Wait until ``condition`` is notified or the clock is moved; at once where it shows ``until_ms`` already.

        Every move wakes, also one that stays before ``until_ms``: the caller loops. There is no limit in real time.
        """
        # No wakeup is lost: the caller holds the condition until condition.wait() has queued it, and a mover that
        # found the condition registered must take it before it can notify; a mover that did not find it had set
        # the time before the check below.
        with self._lock:
            if until_ms is not None and self._now_ms >= until_ms:
                return
            self._waiting[condition] = self._waiting.get(condition, 0) + 1
        try:
            condition.wait()
        finally:
            with self._lock:
                if self._waiting[condition] == 1:
                    del self._waiting[condition]
                else:
                    self._waiting[condition] -= 1


class StoreClock(Clock):
    """The store's time: ``max(wrapped clock, high-water mark)``.

    The mark is the latest time that the store has acted on; the store saves it with the frontier and raises it here.
    Reading the clock does not raise it: a wall clock that has jumped forward must be judged before it is believed.
    So a clock that is set back neither fires twice nor blocks, and the time told is never before the mark.
    """

    def __init__(self, wrapped: Clock, mark_ms: int = 0) -> None:
        self.wrapped = wrapped
        self._lock = threading.Lock()
        self.mark_ms = mark_ms
        """The high-water mark: never goes down."""
        self.lead_ms = wrapped.lead_ms

    def now_ms(self) -> int:
        """The later of the wrapped clock's time and the mark."""
        return max(self.wrapped.now_ms(), self.mark_ms)

    def raise_to(self, ms: int) -> int:
        """Raise the mark to ``ms`` if it is below, and return the mark; thread-safe."""
        with self._lock:
            self.mark_ms = max(self.mark_ms, ms)
            return self.mark_ms

    def wait(self, condition: threading.Condition, until_ms: int | None) -> None:
        """Wait as ``Clock.wait``. Raising the mark wakes no waiter: a thread that raises it past a deadline does."""
        if until_ms is not None and until_ms <= self.mark_ms:
            return
        self.wrapped.wait(condition, until_ms)


def _checked_ms(field: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(field, value, "expected an int, milliseconds")
    if value < 0:
        raise InvalidArgument(field, value, "negative")
    return value
