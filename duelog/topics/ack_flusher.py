"""Acknowledgements take effect in memory at once and reach the disk here, many subscriptions in one commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyroaring import BitMap

from duelog.delivery.acks import AckChanges, AckSet
from duelog.delivery.attempt_counts import Blocks
from duelog.delivery.delivery_log import DeliveryLog
from duelog.store.clock import Clock
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.files.failpoints import reach

from .topic_list import TrimAgenda
from .topic_state import SubscriptionState, TopicState

Acknowledged = tuple[TopicState, SubscriptionState, Mapping[int, BitMap]]
"""Acknowledged entries of a subscription of a topic, by ledger id."""

Moves = Callable[[Transaction, Sequence[Mapping[int, BitMap]]], None]
"""Writes what goes with acknowledgements, given those of the entries that were not acknowledged before."""


_SUBSCRIPTIONS_A_GROUP = 1_000


@dataclass(eq=False, repr=False)
class AckFlusher:
    """The subscriptions whose acknowledgements are not on disk yet. Thread-safe.

    `_wake` has the tick come `_flush_ms` from now; with 0 every acknowledgement is flushed at once.
    """

    _main: Environment
    _flush_ms: int
    _clock: Clock
    _agenda: TrimAgenda
    _wake: Callable[[], None]
    log: DeliveryLog | None = None
    """The log in which messages handed out are noted; None: there is none."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._staged = partial(_StagedAcks, self)
        self._dirty: dict[int, SubscriptionState] = {}
        self._due_ms: int | None = None

    def mark(self, subscription: SubscriptionState, now_ms: int) -> bool:
        """Note that a subscription has changes to write; True when a deadline has begun. Readers have none."""
        if not subscription.durable:
            return False
        with self._lock:
            self._dirty[subscription.record.subscription_id] = subscription
            if self._due_ms is None:
                self._due_ms = now_ms + self._flush_ms
                return True
            return False

    def acknowledged(
        self, topic: TopicState, subscription: SubscriptionState, *, moved_ledger: bool, durable: bool = False
    ) -> None:
        """Acknowledgements were taken in memory: see that they reach the disk, and that ledgers are trimmed.

        durable: they are there when it returns. Raises as `flush` then; the tick tries again.
        """
        now_ms = self._clock.now_ms()
        began = self.mark(subscription, now_ms)
        if durable or not self._flush_ms:
            try:
                self.flush()
            except BaseException:
                self._wake()
                raise
        elif began:
            self._wake()
        if moved_ledger:
            self._agenda.look_at(topic.topic_id, now_ms + self._flush_ms)

    def due_ms(self) -> int | None:
        return self._due_ms

    def flush(self) -> None:
        """Write every change, many in one group. Raises StoreFull, StoreFailed; the changes then wait on."""
        with self._lock:
            dirty = list(self._dirty.values())
        if dirty:
            reach("acks.before")
        for start in range(0, len(dirty), _SUBSCRIPTIONS_A_GROUP):

            def work(transaction: Transaction, start: int = start) -> None:
                for subscription in dirty[start : start + _SUBSCRIPTIONS_A_GROUP]:
                    if subscription.changed:
                        transaction.stage(subscription, self._staged).write(transaction)

            try:
                self._main.write(work, makes_space=True)
            except BaseException:
                self._due_ms = 0
                raise
        with self._lock:
            for subscription in dirty:
                if not subscription.changed:
                    self._dirty.pop(subscription.record.subscription_id, None)
            self._due_ms = self._clock.now_ms() + self._flush_ms if self._dirty else None
        if self.log is not None and self.log.worn:
            self.log.carry()

    def acknowledge_with(self, acknowledged: Sequence[Acknowledged], work: Moves) -> int:
        """Acknowledge entries in the transaction in which `work` writes: all of it is durable, or nothing has changed.

        `work` hears, for each of `acknowledged`, which entries are acknowledged by this call alone: of two calls with
        one entry, one moves it. How many those are. Raises StoreFull, StoreFailed, InvalidArgument, and what `work`
        raises.
        """
        if not acknowledged:
            return 0
        reach("acks.before")

        def counted(transaction: Transaction) -> int:
            fresh = [self.acknowledge(transaction, *each, counted=False) for each in acknowledged]
            work(transaction, fresh)
            return sum(len(each) for of_one in fresh for each in of_one.values())

        return self._main.write(counted, makes_space=True)

    def acknowledge(
        self,
        transaction: Transaction,
        topic: TopicState,
        subscription: SubscriptionState,
        entries: Mapping[int, BitMap],
        *,
        counted: bool = True,
    ) -> Mapping[int, BitMap]:
        """Acknowledge entries in a unit of work; those that it alone acknowledges. Memory hears of it with its group.

        counted: as acknowledged by consumers.
        """
        return transaction.stage(subscription, self._staged).acknowledge(transaction, topic, entries, counted=counted)


class _StagedAcks:
    """The acknowledgements of a subscription as a group leaves them. For the leader."""

    __slots__ = ("_acknowledged", "_attempts", "_changes", "_copy", "_count", "_flusher", "_is_written",
                 "_subscription", "_topic")  # fmt: skip

    def __init__(self, flusher: AckFlusher, subscription: SubscriptionState) -> None:
        self._flusher = flusher
        self._subscription = subscription
        self._is_written = False
        self._changes: list[AckChanges] = []
        self._attempts: Blocks = {}
        self._copy: AckSet | None = None
        """Those of memory, and those that the group acknowledges."""
        self._topic: TopicState | None = None
        """The subscription's, where the group itself acknowledges entries."""
        self._acknowledged: list[Mapping[int, BitMap]] = []
        self._count = 0
        """Those of them that count as acknowledged by consumers."""

    def write(self, transaction: Transaction) -> None:
        """Write what has changed in memory, once: it is all that was acknowledged before a request was queued."""
        if self._is_written:
            return
        self._is_written, subscription = True, self._subscription
        with subscription.lock:
            if subscription.acks.changed:
                self._changes.append(subscription.acks.changes())
            if subscription.attempts.changed:
                self._attempts = subscription.attempts.changes()
        if self._changes or self._attempts:
            subscription.write_changes(transaction, self._changes, self._attempts)

    def acknowledge(
        self, transaction: Transaction, topic: TopicState, entries: Mapping[int, BitMap], *, counted: bool
    ) -> Mapping[int, BitMap]:
        """Write acknowledgements that memory hears of once they are durable; those that were none before."""
        self.write(transaction)
        if self._copy is None:
            with self._subscription.lock:
                self._copy = self._subscription.acks.copy()
            for changes in self._changes:
                self._copy.wrote(changes)
        acks, fresh = self._copy, {}
        for ledger_id, of_ledger in entries.items():
            fresh[ledger_id] = acks.unacked_of(ledger_id, of_ledger)
            count = acks.ack(ledger_id, of_ledger, topic.log)
            self._count += count if counted else 0
        changes = acks.take_changes()
        self._changes.append(changes)
        self._subscription.write_changes(transaction, (changes,))
        self._topic = topic
        self._acknowledged.append(entries)
        return fresh

    def committed(self) -> None:
        subscription, topic, moved = self._subscription, self._topic, False
        acks = subscription.acks
        with subscription.lock:
            if topic is not None:
                before = acks.mark_delete
                for entries in self._acknowledged:
                    subscription.acknowledge(entries, topic.log)
                subscription.counts.acknowledged += self._count
                moved = acks.has_ended_ledger(before, topic.log)
            for changes in self._changes:
                acks.wrote(changes)
            subscription.attempts.wrote(self._attempts)
        if topic is not None:
            flusher, clock = self._flusher, self._flusher._clock
            topic.changed()
            if subscription.changed and flusher.mark(subscription, clock.now_ms()):  # attempts
                flusher._wake()
            if moved:
                flusher._agenda.look_at(topic.topic_id, clock.now_ms() + flusher._flush_ms)
