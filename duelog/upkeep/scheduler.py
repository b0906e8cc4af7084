"""The background thread: sleeps until the next thing is due, ticks, and sleeps again. It never polls.

It does not die silently. A tick that raises is tried again after a pause; when the store has stopped, or the thread
cannot go on, that is logged, and waiting threads are woken and raise StoreFailed.

A store without the thread has receivers that tick for themselves; `Wakeups` wakes either.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from errno import EAGAIN

from duelog.markers.firing.suspensions import STORE, Suspensions
from duelog.store.clock import Clock, ManualClock, Monitor, StoreClock
from duelog.store.env.environment import Environment
from duelog.store.errors import ClockJumped, DuelogError, ResourceShortage, StoreFailed, StoreFull
from duelog.store.limited_log import LimitedLog
from duelog.store.listener import StoreListener

from ..topics.topic_list import Topics

RETRY_MS = 1_000
"""How long after a failed tick (a full disk, say) the next one is tried."""

_LONGEST_RETRY_MS = 30_000
"""To which that is doubled after errors other than a full disk and a clock that jumped, whatever wakes the thread."""

_log = logging.getLogger("duelog.scheduler")


class Scheduler:
    """Runs ticks in a thread of its own."""

    def __init__(self, clock: Clock, main: Environment) -> None:
        """Make the thread, which `start` starts; `wake` may be called before.

        `main`: the environment that has failed where nothing can go on, and that is failed where the thread cannot.
        """
        self._clock = clock
        self._main = main
        self._condition = Monitor()
        self._woken = False
        self._stopping = False
        self._log = LimitedLog(_log, most=1)  # while it lasts, each minute
        self._again = LimitedLog(_log)
        self.error: DuelogError | None = None
        """Why the last tick failed; None when it did not."""
        self._tick: Callable[[], int | None]
        self._failed: Callable[[], None]
        self._thread = threading.Thread(target=self._run, name="duelog-scheduler", daemon=True)

    def start(self, tick: Callable[[], int | None], failed: Callable[[], None]) -> None:
        """Start the thread; `tick` returns when to run next.

        `failed` is called when a tick has begun to fail, so that waiting receivers look at `error`. Raises
        ResourceShortage.
        """
        self._tick, self._failed = tick, failed
        try:
            self._thread.start()
        except RuntimeError as error:  # "can't start new thread"
            raise ResourceShortage(self._main.path, "the scheduler's thread cannot be started", EAGAIN) from error

    def wake(self) -> None:
        """Have the thread look again. Any thread may call this; it takes a leaf lock only."""
        with self._condition.lock:
            self._woken = True
            self._condition.notify_all()

    def stop(self) -> None:
        """End the thread after the batch it is at, and wait for it."""
        with self._condition.lock:
            self._stopping = True
            self._condition.notify_all()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._go_on()
        except BaseException as error:  # of whatever kind: nothing else would tell of it
            self.error = self._main.failed or self._main.fail(error)
            _log.critical("the scheduler has ended: %s", self.error, exc_info=error)
            self._failed()

    def _go_on(self) -> None:
        """Tick until `stop`. Raises an error after which the store cannot go on."""
        failures = since_ms = 0
        while True:
            try:
                until_ms = self._tick()
                if self.error is not None:
                    lasted_ms = self._clock.now_ms() - since_ms
                    text = "%s: messages are fired again, after %d ms"
                    self._again.log(logging.WARNING, text, self._main.path.parent, lasted_ms)
                self.error = None
                failures = 0
            except DuelogError as error:
                if self._main.failed is not None:
                    raise
                first = self.error is None
                self.error = error
                since_ms = self._clock.now_ms() if first else since_ms
                self._log.log(logging.ERROR, "%s: nothing is fired for now: %s", self._main.path.parent, error)
                if first:
                    self._failed()
                until_ms = self._clock.now_ms() + RETRY_MS
                if not isinstance(error, (StoreFull, ClockJumped)):
                    self._pause(min(RETRY_MS << min(failures, 16), _LONGEST_RETRY_MS))
                    failures += 1
                    until_ms = 0
            with self._condition.lock:
                # One wait, then a new tick: a clock that was moved, or set back, is noticed.
                if not self._woken and not self._stopping:
                    self._clock.wait(self._condition, until_ms)
                self._woken = False
                if self._stopping:
                    return

    def _pause(self, pause_ms: int) -> None:
        """Wait, whatever wakes the thread but `stop`, or a clock that is set back."""
        begun_ms = self._clock.now_ms()
        with self._condition.lock:
            while not self._stopping and begun_ms <= self._clock.now_ms() < begun_ms + pause_ms:
                self._clock.wait(self._condition, begun_ms + pause_ms)


@dataclass(eq=False, repr=False)
class Wakeups(StoreListener):
    """The threads of one open store that wait: the scheduler, or receivers. Thread-safe; takes leaf locks only."""

    _main: Environment
    _topics: Topics
    _suspensions: Suspensions
    _clock: StoreClock
    _scheduler: Scheduler | None
    asked: bool = True
    """Set by `ask`, until a slice of the upkeep begins."""

    def ask(self) -> None:
        """Have the upkeep look again: it may have something to do before the time that it knows."""
        self.asked = True
        if self._scheduler is not None:
            self._scheduler.wake()

    def wake(self) -> None:
        """`ask`, and have receivers that wait without a thread look again: a message may be due earlier."""
        self.ask()
        if self._scheduler is None and not isinstance(self._clock.wrapped, ManualClock):
            self._topics.wake_receivers()

    def partition_created(self, start_ms: int) -> None:
        """It may have begun."""
        self.wake()

    def failed(self, environment: str, error: StoreFailed) -> None:
        """The store has failed: every receiver that waits looks, and raises.

        A partition whose files were removed has failed alone, but as a rule the whole store was removed with it.
        """
        if environment != self._main.name:
            try:
                self._main.in_place.verify()
            except FileNotFoundError as gone:
                self._main.fail(gone)
            return
        self._suspensions.note(STORE, error, self._clock.now_ms(), pauses=False)
        if self._scheduler is not None:
            self._scheduler.wake()
        self._topics.wake_receivers()
