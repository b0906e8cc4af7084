"""A topic in memory: its main log, its subscriptions, and the condition on which its receivers wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from duelog.markers.tracker import SubscriptionView, TopicDelayTracker
from duelog.store.clock import Monitor
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.store.names import TopicName
from duelog.store.position import Position

from .subscription_state import SubscriptionState


class TopicState:
    """One topic of an open store. `version` changes whenever a receiver should look again."""

    def __init__(self, topic_id: int, name: TopicName, log: ManagedLedger) -> None:
        self.topic_id = topic_id
        self.name = name
        self.log = log
        self.deleted = False
        self.subscriptions: dict[str, SubscriptionState] = {}
        self.condition = Monitor()
        self.version = 0
        self.wakers: frozenset[Callable[[], object]] = frozenset()
        """Called at every change, by any thread; replaced, never changed in place, with `condition` held."""
        self.producers: dict[str, Any] = {}
        self.producers_lock = threading.Lock()
        self.tracker: TopicDelayTracker | None = None
        """The tracker of messages that wait in the main log, if there is one now."""
        self._told_ms = 0
        self._tracker_lock = threading.Lock()

    @property
    def keeps_dead_letters(self) -> bool:
        """Whether it is a dead-letter topic: what lies in it is not dead-lettered again."""
        return any(subscription.keeper for subscription in self.subscriptions.values())

    def track(self, make: Callable[[], TopicDelayTracker], start: Position, done_ms: int) -> SubscriptionView:
        """Open a view on the topic's tracker, which is made if there is none; not beside `free_tracker`."""
        with self._tracker_lock:
            if self.tracker is None:
                self.tracker = make()
                self.tracker.told_ms = self._told_ms
            return self.tracker.open_view(start, done_ms)

    def free_tracker(self, now_ms: int, idle_ms: int) -> int | None:
        """Let the tracker go if its last view closed `idle_ms` ago or earlier; when to try again, None: no need to."""
        with self._tracker_lock:
            since_ms = None if self.tracker is None else self.tracker.idle_since_ms
            if self.tracker is None or since_ms is None:
                return None
            if since_ms + idle_ms > now_ms:
                return since_ms + idle_ms
            self._told_ms = self.tracker.told_ms
            self.tracker = None
            return None

    def changed(self) -> None:
        """Wake the waiting receivers. Called by leaders of commits too: takes the condition's lock only."""
        with self.condition.lock:
            self.version += 1
            self.condition.notify_all()
            wakers = self.wakers
        for wake in wakers:
            wake()

    def add_waker(self, wake: Callable[[], object]) -> None:
        """Have `wake` called at every change from now on; it takes no lock and does not raise."""
        with self.condition.lock:
            self.wakers |= {wake}

    def remove_waker(self, wake: Callable[[], object]) -> None:
        """Undo `add_waker`."""
        with self.condition.lock:
            self.wakers -= {wake}
