"""Acknowledgements take effect in memory at once and reach the disk here, many subscriptions in one commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyroaring import BitMap

from duelog.delivery.acks import AckChanges
from duelog.delivery.attempt_counts import Blocks
from duelog.delivery.delivery_log import DeliveryLog
from duelog.store.clock import Clock
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction, Work
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
        self._flushing = threading.Lock()
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
        with self._flushing:
            dirty: dict[int, SubscriptionState] = {}
            taken: list[tuple[SubscriptionState, AckChanges, Blocks]] = []
            try:
                with self._lock:
                    dirty, self._dirty, self._due_ms = self._dirty, {}, None
                if dirty:
                    self._write(dirty, taken)
            except BaseException:
                for subscription, changes, attempts in taken:
                    with subscription.lock:
                        subscription.acks.untake(changes)
                        subscription.attempts.untake(attempts)
                with self._lock:
                    self._dirty = {**dirty, **self._dirty}
                    self._due_ms = self._due_ms if self._due_ms is not None else 0
                raise
            if self.log is not None and self.log.worn:
                self.log.carry()

    def acknowledge_with(self, acknowledged: Sequence[Acknowledged], work: Moves) -> None:
        """Acknowledge entries in the transaction in which `work` writes: all of it is durable, or nothing has changed.

        `work` hears, for each of `acknowledged`, which entries are acknowledged by this call alone: of two calls with
        one entry, one moves it. Raises StoreFull, StoreFailed, InvalidArgument, and what `work` raises.
        """
        with self.acknowledging(acknowledged) as unit:
            self._main.write(lambda transaction: work(transaction, unit(transaction)), makes_space=True)

    @contextmanager
    def acknowledging(self, acknowledged: Sequence[Acknowledged]) -> Iterator[Work[Sequence[Mapping[int, BitMap]]]]:
        """The unit of work that acknowledges entries, and gives those that it alone acknowledges.

        To be written within the block, in which no flush runs: it could write acknowledgements as they were before.
        """
        with self._flushing:
            staged: list[tuple[SubscriptionState, AckChanges]] = []
            fresh: list[Mapping[int, BitMap]] = []
            for topic, subscription, entries in acknowledged:
                with subscription.lock:
                    acks = subscription.acks.copy()
                fresh.append(
                    {
                        ledger: acks.unacked(ledger, each.min(), each.max() + 1) & each
                        for ledger, each in entries.items()
                    }
                )
                for ledger_id, of_ledger in entries.items():
                    acks.ack(ledger_id, of_ledger, topic.log)
                staged.append((subscription, acks.take_changes()))

            def committed() -> None:
                for (topic, subscription, entries), (_, changes) in zip(acknowledged, staged, strict=True):
                    with subscription.lock:
                        subscription.acks.wrote(changes)
                        subscription.acknowledge(entries, topic.log)

            def unit(transaction: Transaction) -> Sequence[Mapping[int, BitMap]]:
                for subscription, changes in staged:
                    subscription.write_changes(transaction, changes)
                transaction.after_commit(committed)
                return fresh

            reach("acks.before")
            yield unit

    def _write(
        self, dirty: dict[int, SubscriptionState], taken: list[tuple[SubscriptionState, AckChanges, Blocks]]
    ) -> None:
        for subscription in dirty.values():
            with subscription.lock:
                acks, attempts = subscription.acks, subscription.attempts
                if (acks.changed or attempts.changed) and not subscription.deleted:
                    taken.append((subscription, acks.changes(), attempts.changes()))
                    acks.took(taken[-1][1])
                    attempts.took(taken[-1][2])
        if not taken:
            return

        reach("acks.before")
        while taken:  # what is left in it is not written

            def work(transaction: Transaction) -> None:
                for subscription, changes, attempts in taken[:_SUBSCRIPTIONS_A_GROUP]:
                    subscription.write_changes(transaction, changes, attempts)

            self._main.write(work, makes_space=True)
            del taken[:_SUBSCRIPTIONS_A_GROUP]
