"""A topic in memory: its main log, its subscriptions, and the condition on which its receivers wait.

A subscription has its acknowledgements, what is handed out, and its consumers, all guarded by its `lock`, which no
thread holds while waiting for a commit.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

from pyroaring import BitMap

from duelog.delivery.acks import AckChanges, AckSet, LedgerList
from duelog.delivery.attempt_counts import AttemptCounts
from duelog.markers.tracker import SubscriptionView, TopicDelayTracker
from duelog.store.clock import Monitor
from duelog.store.codec import format as fmt
from duelog.store.codec.format import CursorRecord, attempts_key
from duelog.store.env.transaction import Transaction
from duelog.store.errors import ConsumerBusy, DuelogError, InvalidArgument, UnknownSubscription
from duelog.store.listener import call_supplied
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.store.message import ReceivedMessage
from duelog.store.names import TopicName
from duelog.store.policy.policies import EffectivePolicies, merge
from duelog.store.position import BEFORE_FIRST, Position
from duelog.store.received_messages import ReceivedMessages

from ..delivery.consumer_arguments import Failover, chosen
from ..delivery.dispatcher import Dispatcher, SubscriptionType
from ..delivery.due_reader import DueReader
from ..delivery.key_slots import KeyShared, check_apart
from .task_activity import TaskActivity

_NONE: Mapping[tuple[int, int], bytes | None] = {}
PAUSED = 0x01
"""Flag of a cursor: the subscription is paused."""

FOR_EVER_MS = 2**63 - 1
"""The end of a pause that has none."""

KEEPER = 0x02
"""Flag of a cursor: the subscription holds dead letters (dead_letters.py)."""


Part = Failover | KeyShared | None
"""How a consumer takes part, where its type has more than one way."""


@dataclass(slots=True)
class DeliveryCounts:
    """How many messages a subscription was handed, acknowledged and lost to other ends since its store was opened.

    Counted by the batch, under the subscription's lock; statistics and metrics read the same numbers.

    received: handed to consumers, each time again. redelivered: those of them that had been handed out before.

    acknowledged: by consumers, and skipped. dead_lettered: moved to the dead-letter topic. expired: acknowledged
    because their time to live was over. None counts twice among the last three.
    """

    received: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    dead_lettered: int = 0
    expired: int = 0

    def hand_out(self, batch: ReceivedMessages) -> None:
        self.received += len(batch)
        counts = batch.redelivery_counts
        if any(counts):
            self.redelivered += len(counts) - counts.count(0)

    def __add__(self, other: DeliveryCounts) -> DeliveryCounts:
        return DeliveryCounts(*map(operator.add, astuple(self), astuple(other)))


class SubscriptionState:
    """One subscription of a topic of an open store; one that is not `durable`, a reader, is nowhere else."""

    def __init__(
        self,
        topic_id: int,
        topic: str,
        name: str,
        record: CursorRecord,
        acks: AckSet,
        *,
        durable: bool = True,
        attempts: AttemptCounts | None = None,
    ) -> None:
        self.topic_id = topic_id
        self.topic = topic
        self.name = name
        self.record = record
        self.acks = acks
        self.attempts = AttemptCounts() if attempts is None else attempts
        """The failed deliveries, also while there is no consumer."""
        self.counts = DeliveryCounts()
        self.durable = durable
        self.lock = threading.Lock()
        self.deleted = False
        self.paused_until_ms = FOR_EVER_MS if record.flags & PAUSED else 0
        """When its pause ends (epoch ms); in the past: it is not paused."""
        self.keeper = bool(record.flags & KEEPER)
        self.policies: EffectivePolicies = merge(())
        """The policies in force, from its first consumer on; replaced when they change."""
        self._dispatcher: Dispatcher | None = None
        self.reader: DueReader | None = None
        self.gone: list[Position] = []
        """Positions that the reader met whose messages do not exist any more: to be acknowledged."""
        self.type: SubscriptionType | None = None
        """The type of its consumers; None while it has had none since the store was opened."""
        self._key_shared = KeyShared()
        """How its consumers order keys, their ranges apart."""
        self._consumers: dict[int, Part] = {}
        """By id, in the order in which they came."""
        self._tasks: dict[int, Callable[[], TaskActivity]] = {}
        """By consumer that is a worker's task: what tells its state."""
        self._told: dict[int, bool] = {}
        """By consumer, the state it was last notified of: True if a failover subscription serves it."""
        self.consumer_ids = itertools.count(1)

    @property
    def max_in_flight(self) -> int:
        """How many messages one consumer may hold; 0: any number, as of readers."""
        return self.policies.max_in_flight if self.durable else 0

    def expired_ms(self, policies: EffectivePolicies, now_ms: int) -> int:
        """The latest due time of a message that has outlived the policies' time to live by now; -1: there is none.

        Neither a reader's messages expire by it, nor what a keeper of dead letters holds.
        """
        return now_ms - policies.ttl_ms if policies.ttl_ms and self.durable and not self.keeper else -1

    @property
    def consumers(self) -> int:
        return len(self._consumers)

    @property
    def dispatcher(self) -> Dispatcher | None:
        """Its deliveries, None before the first consumer; mended where they were torn. REQUIRES: the lock."""
        dispatcher = self._dispatcher
        if dispatcher is not None and dispatcher.torn and self.reader is not None:
            dispatcher.mend(sorted(self._consumers), self.reader.rewind)
        return dispatcher

    def attach(
        self,
        consumer: int,
        type_: SubscriptionType,
        reader: Callable[[], DueReader],
        ledgers: LedgerList,
        policies: Callable[[], EffectivePolicies],
        part: Part,
        now_ms: int,
    ) -> None:
        """Add a consumer of a new id. Raises UnknownSubscription once deleted, ConsumerBusy, InvalidArgument.

        What an interrupt leaves of it `detach` removes. Busy: exclusive and taken, or of another type. Invalid: what a
        Failover chooses, or ranges of a KeyShared that are another consumer's.
        """
        with self.lock:
            if self.deleted:
                raise UnknownSubscription(self.topic, self.name)
            if self._consumers and self.type != type_:
                raise ConsumerBusy(self.topic, self.name, f"its consumers are {self.type}, asked for {type_}")
            if self._consumers and type_ == "exclusive":
                raise ConsumerBusy(self.topic, self.name, "it is exclusive and has a consumer")
            key_shared = part if isinstance(part, KeyShared) else KeyShared()
            if self._consumers:
                self._check_keys(key_shared)
            self.policies = policies()
            dispatcher = self.dispatcher
            fits = self.type == type_ and self._orders_as(key_shared)
            if dispatcher is None or self.reader is None or not fits:
                if self.reader is not None:
                    self.reader.close()
                following = reader()
                timeout_ms = self.policies.ack_timeout_ms or None
                dispatcher = Dispatcher(
                    self.acks,
                    following,
                    ledgers,
                    type=type_,
                    ack_timeout_ms=timeout_ms,
                    key_shared=key_shared,
                    counts=self.attempts,
                )
                self._dispatcher, self.reader, self.type, self._key_shared = dispatcher, following, type_, key_shared
            else:
                if not self._consumers:
                    mark_delete = self.acks.mark_delete
                    self.reader.reopen(Position(mark_delete.ledger_id, mark_delete.entry_id + 1))
                if key_shared.order_by is not None and self._key_shared.order_by is None:
                    dispatcher.keep_together(key_shared)
                    self._key_shared = key_shared
            self._consumers[consumer] = part
            try:
                active = self._chosen() if type_ == "failover" else None
                dispatcher.add_consumer(consumer, key_shared.ranges)
            except DuelogError:
                del self._consumers[consumer]
                raise
            if active is not None:
                self._activate(dispatcher, active, now_ms)

    def _check_keys(self, key_shared: KeyShared) -> None:
        if not self._orders_as(key_shared):
            reason = "its consumers order keys in another way, or have ranges where this one has not, or none"
            raise ConsumerBusy(self.topic, self.name, reason)
        parts = [part for part in self._consumers.values() if isinstance(part, KeyShared)]
        check_apart(key_shared.ranges or (), [pair for part in parts for pair in part.ranges or ()])

    def _orders_as(self, key_shared: KeyShared) -> bool:
        if self.type == "shared" and None in (key_shared.order_by, self._key_shared.order_by):
            return True  # who asks for nothing leaves it to the others
        return key_shared.goes_with(self._key_shared)

    def _chosen(self) -> int:
        parts = self._consumers.items()
        return chosen({each: part if isinstance(part, Failover) else Failover() for each, part in parts})

    def _activate(self, dispatcher: Dispatcher, active: int, now_ms: int) -> None:
        if dispatcher.active != active:
            dispatcher.activate(active, now_ms)
        told, self._told = self._told, {consumer: consumer == active for consumer in self._consumers}
        for consumer, is_active in self._told.items():
            part = self._consumers[consumer]
            on_change = part.on_change if isinstance(part, Failover) else None
            if on_change is not None and told.get(consumer) != is_active:
                call_supplied(on_change, is_active)

    def follow(self, policies: Callable[[], EffectivePolicies], now_ms: int) -> None:
        with self.lock:
            self.policies = policies()
            if self.dispatcher is not None:
                self.dispatcher.set_ack_timeout(self.policies.ack_timeout_ms or None, now_ms)

    def detach(self, consumer: int, now_ms: int, *, failed: bool = True) -> None:
        """Remove a consumer; what it has not acknowledged is handed out again, with `failed` as failed deliveries."""
        with self.lock:
            self._tasks.pop(consumer, None)
            if consumer in self._consumers and self.dispatcher is not None:
                if consumer in self.dispatcher.consumers:
                    self.dispatcher.remove_consumer(consumer, now_ms, failed=failed)
                del self._consumers[consumer]
                if self._consumers and self.type == "failover":
                    active = next(iter(self._consumers))
                    with suppress(InvalidArgument):
                        active = self._chosen()
                    self._activate(self.dispatcher, active, now_ms)
                if not self._consumers and self.reader is not None:
                    self.reader.close()
                    self.deleted |= not self.durable

    def report_task(self, consumer: int, tell: Callable[[], TaskActivity]) -> None:
        """Ask a function for the state of a consumer's task, until that is detached."""
        with self.lock:
            if consumer in self._consumers:
                self._tasks[consumer] = tell

    def tasks(self) -> list[TaskActivity]:
        """The tasks of workers that are attached. Without the lock: a worker tells by its own."""
        return [tell() for tell in list(self._tasks.values())]

    def seek(self, mark_delete: Position, not_due: Mapping[int, BitMap], ledgers: LedgerList) -> None:
        """Go to just after `mark_delete`; what of `not_due` lies before it comes too. REQUIRES: the lock."""
        if self.dispatcher is None or self.reader is None:
            self.acks.begin(mark_delete, not_due, ledgers)
            self.attempts.clear()
        else:
            self.dispatcher.seek(mark_delete, not_due)
            self.reader.rewind(self.dispatcher.read_position)

    def trimmed(self, first_ledger: int, ledgers: LedgerList) -> None:
        """The ledgers before `first_ledger` are gone. REQUIRES: the lock."""
        if self.dispatcher is not None:
            self.dispatcher.trimmed(first_ledger)
        else:
            self.acks.trim_to(first_ledger, ledgers)
            self.attempts.forget_through(Position(first_ledger, BEFORE_FIRST))

    def acknowledge(self, entries: Mapping[int, BitMap], ledgers: LedgerList) -> int:
        """Acknowledge entries by ledger id in memory, wherever they are; how many were not before.

        REQUIRES: the lock.
        """
        if self.dispatcher is not None:
            return self.dispatcher.ack_entries(None, entries)
        for ledger_id, of_ledger in entries.items():
            self.attempts.forget(ledger_id, of_ledger)
        return sum(self.acks.ack(ledger_id, of_ledger, ledgers) for ledger_id, of_ledger in entries.items())

    @property
    def changed(self) -> bool:
        """True if acknowledgements or attempts may not be on disk; for a subscription that is there."""
        return not self.deleted and (self.acks.changed or self.attempts.changed)

    def holds(self, message: ReceivedMessage, position: Position, consumer_id: int | None) -> bool:
        """Return whether a delivery, of `position`, is held by a consumer, None: by any. REQUIRES: the lock."""
        times, dispatcher = message.redelivery_count, self.dispatcher
        return dispatcher is not None and dispatcher.outstanding.holds(position, times, consumer_id)

    def held_by(self, consumer: int) -> int:
        with self.lock:
            dispatcher = self.dispatcher
            return dispatcher.outstanding.held_by(consumer) if dispatcher and consumer in dispatcher.consumers else 0

    def log_held(self) -> None:
        with self.lock:
            if self.dispatcher is not None:
                self.dispatcher.outstanding.log_held()

    def take_gone(self) -> list[Position]:
        gone = self.gone.copy()
        self.gone.clear()
        return gone

    def pause_ends_ms(self, now_ms: int) -> int | None:
        """When its pause ends by itself; None: it does not, or there is none."""
        return self.paused_until_ms if now_ms < self.paused_until_ms < FOR_EVER_MS else None

    def write_paused(self, transaction: Transaction, until_ms: int) -> None:
        """Record until when the subscription is paused; 0: it is not."""
        key = fmt.cursor_key(self.topic_id, self.name)
        fields = transaction.get(key)
        if fields is None:
            raise UnknownSubscription(self.topic, self.name)
        record = CursorRecord.unpack(fields)
        flags = record.flags | PAUSED if until_ms else record.flags & ~PAUSED
        transaction.put(key, record._replace(flags=flags).pack())
        pause_key = fmt.pause_key(record.subscription_id)
        if 0 < until_ms < FOR_EVER_MS:
            transaction.put(pause_key, fmt.pack_u64(until_ms))
        else:
            transaction.delete(pause_key)

        def paused() -> None:
            self.paused_until_ms = until_ms

        transaction.after_commit(paused)

    def write_changes(
        self,
        transaction: Transaction,
        acks: Sequence[AckChanges],
        attempts: Mapping[tuple[int, int], bytes | None] = _NONE,
    ) -> None:
        """Put what `acks` and `attempts` gave into a transaction; a no-op once the subscription is deleted."""
        key = fmt.cursor_key(self.topic_id, self.name)
        fields = transaction.get(key)
        if fields is None:
            return
        record = CursorRecord.unpack(fields)
        for mark_delete_changed, (ledger_id, entry_id), acked in acks:
            if mark_delete_changed:
                number, created_ms, _, _, flags = record
                transaction.put(key, CursorRecord(number, created_ms, ledger_id, entry_id + 1, flags).pack())
            for of_ledger, change in acked.items():
                transaction.change_bits(fmt.acked_key(record.subscription_id, of_ledger), change)
        for (ledger_id, block), rows in attempts.items():
            row_key = attempts_key(record.subscription_id, ledger_id, block)
            if rows is None:
                transaction.delete(row_key)
            else:
                transaction.put(row_key, rows)


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

    def subscription(self, name: str) -> SubscriptionState:
        """A subscription by name. Raises UnknownSubscription, also for what is no name."""
        found = self.subscriptions.get(name) if isinstance(name, str) else None
        if found is None:
            raise UnknownSubscription(str(self.name), name)
        return found

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
