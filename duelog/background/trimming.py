"""Rolling and trimming main logs: many topics in one commit.

The agenda says which are to be looked at; what is due is looked at in slices. Ledgers whose age is up are rolled in one
commit, ledgers that all subscriptions have passed are trimmed in another, their runs are removed in bounded parts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from duelog.cleanup.trim import first_kept, remove_part, roll_ledgers, trim_ledgers
from duelog.markers.firing.suspensions import Part, Suspensions
from duelog.store.codec import format as fmt
from duelog.store.config import StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.errors import StoreFull
from duelog.store.listener import StoreListener, call_supplied
from duelog.store.log import catalog

from ..sending.delay_policies import DelayPolicies
from ..topics.ack_flusher import AckFlusher
from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from ..topics.trim_agenda import TrimAgenda

_TOPICS_AT_ONCE = 500
"""Topics of one commit: some 20 ms."""

_SLICE_S = 0.01
"""How long a slice goes on removing what was trimmed, a part at least: about 50,000 entries."""


@dataclass(eq=False, repr=False)
class Trimming:
    """The trimming of one store's main logs. For the tick alone."""

    _main: Environment
    _topics: Topics
    _agenda: TrimAgenda
    _flusher: AckFlusher
    _config: StoreConfig
    _policies: DelayPolicies
    _listeners: Sequence[StoreListener]
    _to_remove: Sequence[tuple[int, int]] = field(default=(), init=False)
    """(topic id, ledger id) whose runs are to be removed."""
    freed: list[int] = field(default_factory=list, init=False)
    """Starts of partitions that no topic holds any more, to be deleted."""

    def look_at_all(self) -> None:
        """Have every main log looked at: after opening, what may be trimmed is not known."""
        for page in catalog.pages(self._main, fmt.prefix(fmt.Table.LEDGER)):
            for key, _ in page:
                self._agenda.plan(fmt.leading_u32(key), 0)

    def next_due_ms(self) -> int | None:
        """When the next main log is to be looked at."""
        return self._agenda.next_due_ms()

    def is_due(self, now_ms: int) -> bool:
        """Whether there is more to do now."""
        due_ms = self.next_due_ms()
        return bool(self._to_remove) or (due_ms is not None and due_ms <= now_ms)

    def run(self, now_ms: int, suspensions: Suspensions) -> int:
        """Roll and trim a slice of what is due, and remove some runs; returns how many ledgers were trimmed.

        A topic that cannot be trimmed, as its records cannot be read, is suspended.
        """
        topic_ids = self._agenda.take(now_ms, _TOPICS_AT_ONCE)
        try:
            trimmed = self._trim_all(topic_ids, now_ms, suspensions) if topic_ids else 0
        except BaseException:
            for topic_id in topic_ids:
                self._agenda.plan(topic_id, now_ms)
            raise
        until = time.perf_counter() + _SLICE_S
        while self._to_remove:
            self._to_remove = remove_part(self._main, self._to_remove)
            if time.perf_counter() >= until:  # what is due is fired first, then the rest is removed
                break
        return trimmed

    def _trim_all(self, topic_ids: Sequence[int], now_ms: int, suspensions: Suspensions) -> int:
        """Trim topics together; one by one where that fails, so that the one that cannot be holds up no other."""
        alone = [each for each in topic_ids if suspensions.retry_ms(Part("trim", each)) is not None]
        trimmed = 0
        try:
            trimmed = self._trim(self._existing([each for each in topic_ids if each not in alone]), now_ms)
        except Exception as error:
            if suspensions.is_fatal(error) or isinstance(error, StoreFull):
                raise
            alone = list(topic_ids)
        for topic_id in alone:
            part = Part("trim", topic_id)
            trim = functools.partial(self._trim_one, topic_id, now_ms)
            trimmed += suspensions.run(part, now_ms, trim, 0)
            retry_ms = suspensions.retry_ms(part)
            if retry_ms is not None:
                self._agenda.plan(topic_id, retry_ms)
        return trimmed

    def _trim_one(self, topic_id: int, now_ms: int) -> int:
        return self._trim(self._existing([topic_id]), now_ms)

    def _existing(self, topic_ids: Sequence[int]) -> list[TopicState]:
        return [topic for topic in map(self._topics.by_id, topic_ids) if topic is not None]

    def _trim(self, topics: Sequence[TopicState], now_ms: int) -> int:
        if not topics:
            return 0
        old = []
        for topic in topics:
            idle_ms = topic.free_tracker(now_ms, self._config.tracker_idle_ms)
            if idle_ms is not None:
                self._agenda.plan(topic.topic_id, idle_ms)
            due_ms = topic.log.age_due_ms()
            if due_ms is not None and due_ms <= now_ms:
                old.append(topic.log)
        roll_ledgers(self._main, old, now_ms)
        firsts: list[tuple[TopicState, int]] = []
        for topic in topics:
            due_ms = topic.log.age_due_ms()
            if due_ms is not None:
                self._agenda.plan(topic.topic_id, due_ms)
            first = self._first_kept(topic, now_ms)
            if first is not None:
                firsts.append((topic, first))
        if not firsts:
            return 0
        gone = [
            (topic.topic_id, ledger.ledger_id, ledger.entries)
            for topic, first in firsts
            for ledger in topic.log.ledgers()
            if ledger.ledger_id < first
        ]
        for topic, first in firsts:
            if topic.tracker is not None:
                topic.tracker.forget_before(first)
        self.freed += trim_ledgers(self._main, [(topic.log, first) for topic, first in firsts])
        for topic, first in firsts:
            self._tell_subscriptions(topic, first, now_ms)
        self._to_remove = [*self._to_remove, *((topic_id, ledger_id) for topic_id, ledger_id, _ in gone)]
        for listener in self._listeners:
            for _, _, entries in gone:
                call_supplied(listener.ledger_trimmed, entries)
        return len(gone)

    def _first_kept(self, topic: TopicState, now_ms: int) -> int | None:
        """The first ledger of a main log that is kept, None where nothing is to be trimmed."""
        mark_deletes = []
        for subscription in list(topic.subscriptions.values()):
            with subscription.lock:
                mark_deletes.append(subscription.acks.mark_delete)
        ledgers, kept = topic.log.ledgers(), self._policies.effective(topic.name)
        first, again_ms = first_kept(ledgers, mark_deletes, kept.retention_ms, kept.retention_bytes, now_ms)
        if again_ms is not None:
            self._agenda.plan(topic.topic_id, again_ms)
        return None if first == ledgers[0].ledger_id else first

    def _tell_subscriptions(self, topic: TopicState, first: int, now_ms: int) -> None:
        for subscription in topic.followers:
            with subscription.lock:
                subscription.trimmed(first, topic.log)
            self._flusher.mark(subscription, now_ms)
