"""A topic in memory: its main log, its subscriptions, and the condition on which its receivers wait."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pyroaring import BitMap

from duelog.delivery.acks import AckSet
from duelog.markers.tracker import SubscriptionView, TopicDelayTracker
from duelog.store.clock import Monitor
from duelog.store.codec.format import CursorRecord
from duelog.store.listener import call_supplied
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.store.names import TopicName
from duelog.store.position import BEFORE_FIRST, Position

from .subscription_state import SubscriptionState


class TopicState:
    """One topic of an open store. `version` changes whenever a receiver should look again."""

    def __init__(self, topic_id: int, name: TopicName, log: ManagedLedger) -> None:
        self.topic_id = topic_id
        self.name = name
        self.log = log
        self.deleted = False
        self.sent = 0
        """Messages that were sent to it since the store was opened, and are durable."""
        self._counting = threading.Lock()
        self.subscriptions: dict[str, SubscriptionState] = {}
        self.readers: dict[str, SubscriptionState] = {}
        """Subscriptions without a record; as `subscriptions`, replaced, never changed in place."""
        self._readers_lock = threading.Lock()
        self._reader_numbers = itertools.count(1)
        self.condition = Monitor()
        self.version = 0
        self.wakers: frozenset[Callable[[], object]] = frozenset()
        """Called at every change, by any thread; replaced, never changed in place, with `condition` held."""
        self.producers: dict[str, Any] = {}
        self.producers_lock = threading.Lock()
        self.has_keys: bool | None = None
        """True if a message has had a deduplication key; None: not looked up yet."""
        self.tracker: TopicDelayTracker | None = None
        """The tracker of messages that wait in the main log, if there is one now."""
        self._told_ms = 0
        self._tracker_lock = threading.Lock()

    def count_sent(self, count: int) -> None:
        with self._counting:
            self.sent += count

    @property
    def keeps_dead_letters(self) -> bool:
        """True for a dead-letter topic: its messages are not dead-lettered again."""
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

    @property
    def followers(self) -> list[SubscriptionState]:
        return [*self.subscriptions.values(), *self.readers.values()]

    def new_reader_name(self) -> str:
        """A name that no reader of the topic has had since the store was opened, unless it was given one."""
        return f"reader-{next(self._reader_numbers)}"

    def reader(self, name: str, position: Position, not_due: Mapping[int, BitMap], now_ms: int) -> SubscriptionState:
        """The reader of a name, begun at `position` where there is none, or the nearest that the log has by then.

        not_due: what lies before that and is not due yet, by ledger id: it comes too.
        """
        with self._readers_lock:
            found = self.readers.get(name)
            if found is None or found.deleted:
                position = min(position, self.log.latest(now_ms))
                log = self.log.snapshot()
                first = Position(self.log.first_ledger, 0)
                start = max(position, first)
                acks = AckSet(Position(first.ledger_id, BEFORE_FIRST))
                acks.begin(Position(start.ledger_id, start.entry_id - 1), not_due, log)
                record = CursorRecord(0, max(now_ms, 0), *acks.mark_delete, 0)
                found = SubscriptionState(self.topic_id, str(self.name), name, record, acks, durable=False)
                self.readers = {**self.readers, name: found}
        with found.lock:
            found.trimmed(self.log.first_ledger, self.log)  # what was trimmed before the reader was known
        return found

    def forget_reader(self, reader: SubscriptionState) -> None:
        with self._readers_lock:
            self.readers = {name: other for name, other in self.readers.items() if other is not reader}

    def changed(self) -> None:
        """Wake the waiting receivers. Called by leaders of commits too: takes the condition's lock only."""
        with self.condition.lock:
            self.version += 1
            self.condition.notify_all()
            wakers = self.wakers
        for wake in wakers:
            call_supplied(wake)

    def add_waker(self, wake: Callable[[], object]) -> None:
        """Have `wake` called at every change from now on; it takes no lock. What it raises is logged."""
        with self.condition.lock:
            self.wakers |= {wake}

    def remove_waker(self, wake: Callable[[], object]) -> None:
        with self.condition.lock:
            self.wakers -= {wake}
