"""Wrong engines for the exception sweep to find out: memory does not follow, a thread dies, a lock stays locked.

Each undoes one rule of the engine as it is, and brings back a fault that it had.
"""

import contextlib
import threading
from typing import Any

from duelog.markers.firing.firing import Firing
from duelog.markers.firing.loaded import LoadedPartitions
from duelog.markers.firing.pending_log import LogState, PendingLog
from duelog.markers.firing.suspensions import Suspensions
from duelog.store.clock import Monitor
from duelog.store.errors import DuelogError
from duelog.topics.topic_state import SubscriptionState
from duelog.upkeep.maintenance import Maintenance
from duelog.upkeep.scheduler import Scheduler


def scheduler_dies() -> None:
    """An exception that is not duelog's ends the store's thread, and no waiting thread is told."""

    def run(self: Any) -> None:
        with contextlib.suppress(Exception):
            while not self._stopping:
                with contextlib.suppress(DuelogError):
                    self._tick()
                with self._condition.lock:
                    if not self._woken and not self._stopping:
                        self._clock.wait(self._condition, self._clock.now_ms() + 1)
                    self._woken = False

    def failed(self: Suspensions, part: Any, error: Exception, now_ms: int) -> None:
        raise error

    def stopped(self: Any, error: Exception) -> Exception:
        return error

    Scheduler._run = run  # type: ignore[method-assign]
    Suspensions.failed = failed  # type: ignore[method-assign]
    Maintenance._stopped = stopped  # type: ignore[assignment,method-assign]


def taken_is_not_given_back() -> None:
    """A log does not get back what it gave to a batch when another log cannot be taken."""
    Firing._give_back = lambda self, batch: None  # type: ignore[method-assign]
    LoadedPartitions.recover = lambda self: None  # type: ignore[method-assign]
    _nothing_is_torn()


def confirmed_by_the_caller() -> None:
    """Memory hears of a firing from the caller of the commit, which gives back what it does not know to be stored."""
    commit, confirm = Firing._commit, Firing._confirm
    waiting: list[Any] = []

    def later(self: Firing, *arguments: Any) -> None:
        waiting.append(arguments)

    def committed(self: Firing, batch: Any, now_ms: int) -> None:
        waiting.clear()
        commit(self, batch, now_ms)
        for arguments in waiting:
            confirm(self, *arguments)

    Firing._confirm = later  # type: ignore[assignment,method-assign]
    Firing._commit = committed  # type: ignore[method-assign]


def _nothing_is_torn() -> None:
    """A change that does not come to its end leaves a log in the state that it was in before."""

    def keep(self: PendingLog, state: LogState) -> None:
        if state is not LogState.TORN:
            self.__dict__["_state"] = state

    PendingLog._state = property(lambda self: self.__dict__["_state"], keep)  # type: ignore[assignment]


def torn_logs_go_on() -> None:
    """A log whose change did not come to its end fires on by what it has in memory."""
    _nothing_is_torn()
    PendingLog.whole = property(lambda self: True)  # type: ignore[assignment]


def torn_deliveries_go_on() -> None:
    """A subscription's deliveries go on as an exception has left them."""
    SubscriptionState.dispatcher = property(lambda self: self._dispatcher)  # type: ignore[assignment]


def condition_entered() -> None:
    """The lock of a condition is taken by `with condition`, after which an interrupt can leave it taken."""

    def init(self: Any) -> None:
        threading.Condition.__init__(self, threading.Lock())
        self.lock = self

    Monitor.__init__ = init  # type: ignore[method-assign]


def apply(name: str) -> None:
    """Make this process's engine wrong in the way `name`."""
    globals()[name]()
