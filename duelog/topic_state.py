"""A topic in memory: its main log, its subscriptions, and the condition on which its receivers wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

from duelog.store.managed_ledger import ManagedLedger
from duelog.store.names import TopicName

from .subscription_state import SubscriptionState


class TopicState:
    """One topic of an open store. `version` changes whenever a receiver should look again."""

    def __init__(self, topic_id: int, name: TopicName, log: ManagedLedger, look_at: Callable[[int, int], None]) -> None:
        """`look_at` (topic id, when) has the main log looked at for rolling and trimming."""
        self.topic_id = topic_id
        self.name = name
        self.log = log
        self.deleted = False
        self.subscriptions: dict[str, SubscriptionState] = {}
        self.condition = threading.Condition(threading.Lock())
        self.version = 0
        self._look_at = look_at
        log.changed = self._log_changed

    def _log_changed(self, look: bool) -> None:
        if look:
            age_due_ms = self.log.age_due_ms()
            self._look_at(self.topic_id, 0 if age_due_ms is None or self.log.ledgers()[0].closed else age_due_ms)
        self.changed()

    def changed(self) -> None:
        """Wake the waiting receivers. Called by leaders of commits too: takes the condition's lock only."""
        with self.condition:
            self.version += 1
            self.condition.notify_all()
