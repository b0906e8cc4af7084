"""Main logs as their readers see them: what is due comes, and what waits inline is counted, listed and cleared.

A topic whose consumers have passed something over has a tracker, which answers. For another one the ledgers that have
something to wait for are read, and nothing is kept in memory. Where nothing waits, nothing is read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from operator import attrgetter

import numpy as np
from pyroaring import BitMap

from duelog.delivery.acks import AckSet
from duelog.delivery.due_reader import DaysRead, DueReader, ReadAheadBudget
from duelog.markers.lookup import count_scheduled, find_partition, furthest_due_ms, marker_target, read_entry, scheduled
from duelog.markers.reader import MainLogReader
from duelog.markers.tracker import SubscriptionView, TopicDelayTracker
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import Storage
from duelog.store.clock import StoreClock
from duelog.store.codec.run import Int64s
from duelog.store.errors import CorruptEntry, DamagedStore
from duelog.store.listener import StoreListener, tell
from duelog.store.log.scan import RunFinder
from duelog.store.message import MAX_DUE_MS, ScheduledMessage
from duelog.store.position import MessageId, Position

from .ack_flusher import AckFlusher
from .topic_state import SubscriptionState, TopicState

_DUE = attrgetter("due_ms")


@dataclass(eq=False, repr=False)
class InlineMessages:
    """Reads the main logs of one open store. Thread-safe.

    `_unreadable` quarantines an entry. `_ask` has the upkeep look for days that are read, and away.
    """

    _storage: Storage
    _clock: StoreClock
    _flusher: AckFlusher
    _unreadable: Callable[[CorruptEntry], object]
    _ask: Callable[[], object]
    read_ahead: ReadAheadBudget = field(default_factory=ReadAheadBudget, init=False)

    # -- reading -----------------------------------------------------------------------------------

    def reader(self, topic: TopicState, subscription: SubscriptionState) -> DueReader:
        days = DaysRead(self._storage.partitions, topic.changed, self._ask)
        plain = self._plain(topic, subscription.name, self._unreadable, subscription.gone.extend, days.acquire)

        def open_view(position: Position, done_ms: int) -> SubscriptionView:
            return topic.track(lambda: self._new_tracker(topic), position, done_ms)

        return DueReader(plain, days, open_view, self._clock, self.read_ahead)

    def onlooker(self, topic: TopicState, subscription: str = "") -> MainLogReader:
        """Make a reader of the main log that has no side effects: it passes over entries that are unreadable or gone.

        So it needs no lock: entries that are trimmed while it reads are passed over too. It waits for days that are
        away: reading raises as `PartitionSet.at_hand`.
        """

        def acquire(partition: Partition) -> bool:
            self._storage.partitions.take(partition)
            return True

        return self._plain(topic, subscription, _ignore, _ignore, acquire)

    def _plain(
        self,
        topic: TopicState,
        subscription: str,
        unreadable: Callable[[CorruptEntry], object],
        gone: Callable[[list[Position]], object],
        acquire: Callable[[Partition], bool],
    ) -> MainLogReader:
        return MainLogReader(
            self._storage.main,
            self._storage.partitions,
            topic.log,
            topic=str(topic.name),
            subscription=subscription,
            span_ms=self._storage.config.partition_ms,
            quarantine=unreadable,
            gone=gone,
            acquire=acquire,
        )

    def _new_tracker(self, topic: TopicState) -> TopicDelayTracker:
        fell_due = partial(self._fell_due, topic.topic_id)
        prune = self._storage.config.tracker_prune_interval_ms, self._storage.config.tracker_prune_ratio
        return TopicDelayTracker(self._storage.main, topic.log, self._unreadable, fell_due, *prune)

    def _fell_due(self, topic_id: int, dues: Int64s, now_ms: int) -> None:
        tell(self._storage.listeners, StoreListener.fired, topic_id, dues, now_ms)

    # -- what waits --------------------------------------------------------------------------------

    def _tracker(self, topic: TopicState) -> TopicDelayTracker:
        return topic.tracker or self._new_tracker(topic)

    def waiting(self, topic: TopicState, now_ms: int) -> dict[int, BitMap]:
        """Entries of the topic's main log that are not due at `now_ms`, by ledger id; no bitmap is empty."""
        start = topic.log.first_undue(now_ms)
        return {} if start is None else self._tracker(topic).waiting(start, now_ms)

    def count(self, topic: TopicState, now_ms: int) -> int:
        start = topic.log.first_undue(now_ms)
        return 0 if start is None else self._tracker(topic).count(start, now_ms)

    def dues(self, topic: TopicState) -> Int64s:
        """Due times of those that are not due now, in no order."""
        now_ms = self._clock.now_ms()
        start = topic.log.first_undue(now_ms)
        return np.empty(0, np.int64) if start is None else self._tracker(topic).dues(start, now_ms)

    def clear(self, topic: TopicState, name: str) -> int:
        """Acknowledge, for one subscription, what waits inline by now, durably; how many it had not acknowledged.

        Raises UnknownSubscription.
        """
        subscription = topic.subscription(name)
        not_due = self.waiting(topic, self._clock.now_ms())
        with subscription.lock:
            count = subscription.acknowledge(not_due, topic.log)
            subscription.counts.acknowledged += count
        if count:
            self._flusher.acknowledged(topic, subscription, moved_ledger=True)
            self._flusher.flush()
        return count

    def get(self, topic: TopicState, message_id: MessageId) -> ScheduledMessage | None:
        """A stored message, wherever it is; None: it is gone. Raises CorruptEntry, DamagedStore."""
        if topic.log.entries_of(message_id.ledger_id) is not None:
            target = marker_target(self._storage.main, message_id)
            if target is None:
                return read_entry(self._storage.main, message_id, str(topic.name))
            message_id = target
        partition = find_partition(self._storage.partitions, topic.topic_id, message_id.ledger_id)
        if partition is None:
            return None
        try:
            with self._storage.partitions.lease(partition):
                return read_entry(partition.environment, message_id, str(topic.name))
        except DamagedStore:
            if self._storage.partitions.registered(partition):
                raise
            return None  # deleted since it was found

    def is_hidden(self, topic: TopicState, message_id: MessageId) -> bool:
        """Return True if the message is in the topic's main log and not visible yet. O(log n)."""
        now_ms = self._clock.now_ms()
        if topic.log.first_undue(now_ms) is None or topic.log.entries_of(message_id.ledger_id) is None:
            return False
        with self._storage.main.read() as raw, suppress(CorruptEntry):
            run = RunFinder(raw, self._storage.main.name).find(message_id.ledger_id, message_id.entry_id)
            return run is not None and run.early and run.due(message_id.entry_id - run.first_entry) > now_ms
        return False

    def scheduled(
        self,
        topic: TopicState,
        start_ms: int,
        limit_ms: int,
        after: MessageId | None = None,
        *,
        backwards: bool = False,
    ) -> Iterator[ScheduledMessage]:
        """Messages of the topic that are not due yet, or have not fired, due in [start_ms, limit_ms), by due time.

        Of those due at one instant the ones in a partition come first. Bodies are read as they are asked for.
        backwards: the other way round. after: a message due at `start_ms`; it and those of its instant that come before
        it are left out.
        """
        in_main = after is not None and topic.log.entries_of(after.ledger_id) is not None
        in_partitions = scheduled(
            self._storage,
            topic.topic_id,
            str(topic.name),
            start_ms=start_ms + 1 if in_main else start_ms,
            limit_ms=limit_ms,
            quarantine=self._unreadable,
            after=after,
            backwards=backwards,
        )
        positions = self._listed(topic, start_ms, limit_ms)
        if after in positions:  # else it is due by now, and so is all that was due with it
            positions = positions[positions.index(after) + 1 :]
        if not positions:
            return in_partitions
        if backwards:
            return merge(self._messages(topic, positions[::-1]), in_partitions, key=_DUE, reverse=True)
        return merge(in_partitions, self._messages(topic, positions), key=_DUE)

    def _listed(self, topic: TopicState, start_ms: int, limit_ms: int) -> list[Position]:
        """Where those wait in the main log that are due in [start_ms, limit_ms), by due time."""
        now_ms = self._clock.now_ms()
        start = topic.log.first_undue(now_ms)
        return [] if start is None else self._tracker(topic).listed(start, now_ms, start_ms, limit_ms)

    def count_scheduled(self, topic: TopicState, start_ms: int, limit_ms: int) -> int:
        """Count the messages that `scheduled` has; O(messages of partitions that are not wholly in the range)."""
        in_partitions = count_scheduled(self._storage, topic.topic_id, start_ms, limit_ms)
        return in_partitions + len(self._listed(topic, start_ms, limit_ms))

    def furthest_due_ms(self, topic: TopicState) -> int | None:
        """When the last of the messages that `scheduled` has is due; None: there is none."""
        dues = [furthest_due_ms(self._storage, topic.topic_id)]
        if inline := self._listed(topic, 0, MAX_DUE_MS + 1):
            dues += [message.due_ms for message in self._messages(topic, inline[-1:])]
        return max((due_ms for due_ms in dues if due_ms is not None), default=None)

    def _messages(self, topic: TopicState, positions: Sequence[Position]) -> Iterator[ScheduledMessage]:
        for position in positions:
            try:
                found = read_entry(self._storage.main, position, str(topic.name))
            except CorruptEntry as error:
                self._unreadable(CorruptEntry(error.environment, *position, error.reason))
                continue
            if found is not None:
                yield found


def _ignore(_: object) -> None:
    """It is left to those who deliver it."""


def unacknowledged(acks: AckSet, not_due: Mapping[int, BitMap]) -> int:
    """How many of the entries that `waiting` gave a subscription has not acknowledged."""
    found = 0
    for ledger_id, entries in not_due.items():
        found += len(acks.unacked_of(ledger_id, entries))
    return found
