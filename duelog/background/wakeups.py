"""Waking what waits for the next thing to be due: the scheduler's thread, or receivers, which tick for themselves."""

from __future__ import annotations

from dataclasses import dataclass

from duelog.markers.firing.suspensions import STORE, Suspensions
from duelog.store.clock import ManualClock, StoreClock
from duelog.store.env.environment import Environment
from duelog.store.errors import StoreFailed
from duelog.store.listener import StoreListener

from ..topics.topic_list import Topics
from .scheduler import Scheduler


@dataclass(eq=False, repr=False)
class Wakeups(StoreListener):
    """The threads of one open store that wait: the scheduler, or receivers. Thread-safe; takes leaf locks only."""

    _main: Environment
    _topics: Topics
    _suspensions: Suspensions
    _clock: StoreClock
    _scheduler: Scheduler | None

    def wake(self) -> None:
        """Something may be due earlier than what is waited for: have the scheduler, or receivers, look again."""
        if self._scheduler is not None:
            self._scheduler.wake()
        elif not isinstance(self._clock.wrapped, ManualClock):  # receivers without a thread do not wait by one
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
