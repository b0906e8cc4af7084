"""The parts of an open store, put together: what DelayedStore, Topic and Subscription stand on.

Order of locks, outermost first: maintenance, a subscription, then leaf locks (conditions, queues, sets).
Nobody waits for a commit with a subscription's lock in hand.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock

from duelog.background.quarantine import Quarantine
from duelog.cleanup.sweep import Swept, sweep
from duelog.cleanup.trim import release_before, remove_ledgers
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.suspensions import STORE
from duelog.markers.reader import MainLogReader
from duelog.markers.succession import Succession
from duelog.markers.tracker import SubscriptionView, TopicDelayTracker
from duelog.markers.withdrawal import Withdrawals
from duelog.partitions import producer_numbers as producers
from duelog.partitions.followed_set import FollowedPartitionSet
from duelog.partitions.partition_set import PartitionSet
from duelog.store.clock import Clock, ManualClock, StoreClock
from duelog.store.codec import format as fmt
from duelog.store.codec.format import LedgerState
from duelog.store.config import StoreConfig
from duelog.store.env.transaction import Transaction
from duelog.store.errors import (
    ClosedError,
    ConsumerBusy,
    CorruptEntry,
    CorruptRecord,
    DamagedStore,
    StoreFailed,
    StoreFull,
    UnknownSubscription,
)
from duelog.store.files.directory import make_directory
from duelog.store.files.process import here
from duelog.store.log import catalog
from duelog.store.policy import policy_records
from duelog.store.policy.policy_records import Scope
from duelog.store.position import Position
from duelog.store.wal.wal_file import WalFile

from .background.adopting import Adopting
from .background.following import Following
from .background.maintenance import Maintenance, TickResult
from .background.recurring import Recurring
from .background.scheduler import Scheduler
from .delivery.due_reader import DueReader
from .delivery.read_ahead import ReadAheadBudget
from .metrics import StoreMetrics, instruments
from .opening import StoreLock, create, open_main, read_identity, refuse_foreign, refuse_lost_entries
from .sending.delay_policies import DelayPolicies
from .sending.outbox import Outbox
from .sending.sender import Sender
from .sending.wal_replay import replay_wal
from .sending.wal_writer import WalWriter
from .sending.worker_pool import WorkerPool
from .shutdown import Shutdown, steps
from .topics.ack_flusher import AckFlusher
from .topics.dead_letters import DeadLetters
from .topics.subscription_state import SubscriptionState
from .topics.topic_list import Topics
from .topics.topic_state import TopicState

_THREADS = 8
"""That write to several partitions side by side; started when they are first needed."""


class Engine:
    """An open store. `close` ends it; everything else is done through its parts."""

    def __init__(
        self, path: Path, config: StoreConfig, clock: Clock, *, read_only: bool, records_defaults: bool = True
    ) -> None:
        """Open or make the store in `path`. Raises the errors of DelayedStore.open.

        records_defaults: a store of an earlier version, which has none recorded, takes over those of `config`; without
        that it keeps everything.
        """
        self.path = path
        self.config = config
        self.read_only = read_only
        self._records_defaults = records_defaults and not read_only
        self.closed = False
        self.backing_up = Lock()
        """One backup at a time."""
        self._process = here.pid
        self._lock: StoreLock | None = None
        refuse_foreign(path)
        with ExitStack() as undo:
            if not read_only:
                make_directory(path)
                self._lock = StoreLock(path)
                undo.callback(self._lock.release)
            try:
                self._open(path, config, clock, undo)
            except CorruptRecord as error:
                raise DamagedStore(path / "main", str(error)) from error
            undo.pop_all()

    def _open(self, path: Path, config: StoreConfig, clock: Clock, undo: ExitStack) -> None:
        """Put the parts together; `undo` closes what is open already where a later one cannot be."""
        read_only = self.read_only
        if not read_only and not (path / "STORE").exists():
            identity = create(path, config)
        else:
            identity = read_identity(path, config)
        self.store_id = identity.store_id
        self.main = open_main(path, config, identity, read_only=read_only)
        undo.callback(self.main.close)
        mark = self.main.get(fmt.counter_key(catalog.CLOCK))
        self.clock = StoreClock(clock, 0 if mark is None else fmt.unpack_u64(mark))
        kind = FollowedPartitionSet if read_only else PartitionSet
        self.partitions: PartitionSet = kind(path, self.main, config, identity.store_id, read_only=read_only)
        undo.callback(self.partitions.close)
        self.partitions.load()  # before anything is swept: what it refuses is left as it is
        self.swept = Swept(0, 0, 0) if read_only else sweep(path, self.main)
        self.scheduler: Scheduler | None = None
        self.topics = Topics(self.main, config, read_only=read_only)
        limits = self.topics.run_limits
        pool = WorkerPool(_THREADS, "duelog-send")
        self.wal_writer: WalWriter | None = None
        if not read_only:
            replay_wal(path, self.main, self.partitions, limits, self.store_id, self._open_wal)
            if config.journal_from and config.durability == "commit":
                self.wal_writer = WalWriter(
                    self.main,
                    self.partitions,
                    limits,
                    pool,
                    config.journal_from,
                    self.clock,
                    self._open_wal,
                    self.wake,
                )
        if not read_only:
            refuse_lost_entries(self.main, self.partitions)
        self.policies = DelayPolicies(self.main, read_only=read_only)
        if self._records_defaults:
            self.policies.record(config)
        self.policies.warn_of(config)
        self.quarantine = Quarantine(self.main)
        self.sender = Sender(self.main, self.partitions, config, limits, pool, self.wal_writer, self.policies)
        self.read_ahead = ReadAheadBudget()
        self.outbox = Outbox(config.max_in_flight_bytes, path)
        self.flusher = AckFlusher(self.main, config.ack_flush_ms)
        self.dead_letters = DeadLetters(self.main, self.topics, self.flusher, self.clock, self.acknowledged)
        self.firing = Firing(
            self.main,
            self.partitions,
            config,
            main_log=self.topics.main_log,
            quarantine=self.note_unreadable,
            wake=self.wake,
        )
        self.firing.reached = self.clock.raise_to
        self.firing.suspensions.topic_name = self.topics.name_of
        self.main.on_failure = self._store_failed
        self.withdrawals = Withdrawals(self.main, self.partitions, self.firing, self.clock, config, limits)
        self.maintenance = Maintenance(
            path,
            self.main,
            self.partitions,
            self.topics,
            self.firing,
            self.flusher,
            self.quarantine,
            self.clock,
            config,
            self.policies,
        )
        succession = Succession(self.main, self.partitions, self.firing, self.clock, config, limits)
        self.recurring = Recurring(self.main, self.topics, succession, self.clock, config.max_message_bytes, self.wake)
        if not read_only:
            self.maintenance.recurring = self.recurring
            self.maintenance.wal_writer = self.wal_writer
            self.maintenance.adopting = Adopting(
                path, self.main, self.partitions, self.topics, identity.store_id, self.clock
            )
            with suppress(StoreFull):  # what could not be adopted for want of room waits
                self.maintenance.adopting.run()
            self.policies.on_changed = Following(self.topics, self.policies, self.maintenance, self.clock).changed
        self.topics.look_at = self.maintenance.look_at
        self.partitions.created = lambda partition: self.wake()
        self.metrics = None if read_only else StoreMetrics(self, instruments())
        if self.metrics is not None:
            undo.callback(self.metrics.close)
        self._shutdown = Shutdown(steps(self, self._lock))
        background = config.background if config.background is not None else not isinstance(clock, ManualClock)
        if background and not read_only:
            self.scheduler = Scheduler(
                lambda: self.maintenance.slice()[0].next_due_ms,
                self.clock,
                self.main,
                self._wake_receivers,
            )
            self.maintenance.wake = self.scheduler.wake
            self.scheduler.start()

    def _open_wal(self) -> WalFile:
        return WalFile(self.path, self.store_id, self.config.journal_bytes)

    # -- for the faces -----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ClosedError after close, and in a child process after fork."""
        if self.closed:
            raise ClosedError(f"store {self.path}")
        if here.pid != self._process:
            raise ClosedError(f"store {self.path} (opened by process {self._process}, used by child {here.pid})")

    def check_writable(self) -> None:
        if self.closed or here.pid != self._process:
            self.check_open()
        if self.read_only:
            raise ClosedError(f"store {self.path} is open read-only; for writing it")
        if self.main.failed is not None:
            raise self.main.failed

    def wake(self) -> None:
        """Have whoever waits for what is due next look again: the thread, or receivers, which fire for themselves."""
        if self.scheduler is not None:
            self.scheduler.wake()
        elif not isinstance(self.clock.wrapped, ManualClock):  # by which nobody waits without a thread
            self._wake_receivers()

    def tick(self) -> TickResult:
        self.check_writable()
        return self.maintenance.tick()

    def slice(self) -> tuple[TickResult, bool]:
        """A piece of a tick, and whether there is more to do now."""
        self.check_writable()
        return self.maintenance.slice()

    def note_unreadable(self, error: CorruptEntry) -> None:
        """Set an entry aside that cannot be read."""
        if self.quarantine.add(error) and self.metrics is not None:
            self.metrics.corrupt()

    def reader(self, topic: TopicState, subscription: SubscriptionState) -> DueReader:
        """What a subscription of the topic reads its main log with."""
        plain = MainLogReader(
            self.main,
            self.partitions,
            topic.log,
            topic=str(topic.name),
            subscription=subscription.name,
            span_ms=self.config.partition_ms,
            quarantine=self.note_unreadable,
            gone=subscription.gone.extend,
        )

        def open_view(position: Position, done_ms: int) -> tuple[TopicDelayTracker, SubscriptionView]:
            return topic.track(
                lambda: self.tracker(topic),
                lambda tracker: (tracker, tracker.open_view(position, done_ms)),
            )

        return DueReader(plain, open_view, self.clock, self.read_ahead)

    def tracker(self, topic: TopicState) -> TopicDelayTracker:
        """A tracker of what waits in the topic's main log, empty as yet."""
        fell_due = None if self.metrics is None else self.metrics.of_inline(topic.name)
        prune = self.config.tracker_prune_interval_ms, self.config.tracker_prune_ratio
        return TopicDelayTracker(self.main, topic.log, self.note_unreadable, fell_due, *prune)

    def acknowledged(self, topic: TopicState, subscription: SubscriptionState, moved_ledger: bool) -> None:
        """Acknowledgements were taken in memory: see that they reach the disk, and that ledgers are trimmed."""
        now_ms = self.clock.now_ms()
        began = self.flusher.mark(subscription, now_ms)
        if not self.config.ack_flush_ms:
            self.flusher.flush()
        elif began:
            self.wake()
        if moved_ledger:
            self.maintenance.look_at(topic.topic_id, now_ms + self.config.ack_flush_ms)

    def delete_topic(self, topic: TopicState) -> None:
        """Remove a topic and all it holds: subscriptions, main log, its claims on partitions."""
        with self.maintenance.lock:
            given_up: list[int] = []
            had_policies = False

            def work(transaction: Transaction) -> list[int]:
                nonlocal had_policies
                given_up.clear()
                topic_id = topic.topic_id
                freed = release_before(transaction, topic_id, None)
                transaction.delete(fmt.topic_key(str(topic.name)))
                transaction.delete(fmt.topic_name_key(topic_id))
                had_policies = transaction.delete(fmt.policy_key(str(topic.name)))
                for _, name, record in list(catalog.cursors(transaction.raw, topic_id)):
                    for ledger_id, _ in list(catalog.acked(transaction.raw, record.subscription_id)):
                        transaction.delete(fmt.acked_key(record.subscription_id, ledger_id))
                    transaction.delete(fmt.cursor_key(topic_id, name))
                for key, _ in list(catalog.rows(transaction.raw, fmt.prefix(fmt.Table.SCHEDULE, topic_id))):
                    transaction.delete(key)
                producers.remove(transaction, topic_id)
                for _, start_ms, _ in list(catalog.frontiers(transaction.raw, topic_id)):
                    transaction.delete(fmt.frontier_key(topic_id, start_ms))
                for ledger_id, ledger in catalog.ledgers(transaction.raw, topic_id):
                    trimming = ledger._replace(state=LedgerState.TRIMMING)
                    transaction.put(fmt.ledger_key(topic_id, ledger_id), trimming.pack())
                    given_up.append(ledger_id)
                return freed

            freed = self.main.write(work)
            for subscription in topic.subscriptions.values():
                subscription.deleted = True
            self.topics.forget(topic)
            if had_policies:
                self.policies.changed(Scope(str(topic.name)))
            self.firing.loaded.forget_topic(topic.topic_id)
            remove_ledgers(self.main, [(topic.topic_id, ledger_id) for ledger_id in given_up])
            self.maintenance.delete_released(freed)

    def remove_subscription(self, topic: TopicState, name: str) -> None:
        """Remove a subscription durably; what only it held becomes free. Raises ConsumerBusy, UnknownSubscription."""
        with self.maintenance.lock:
            subscription = topic.subscriptions.get(name)
            if subscription is None:
                raise UnknownSubscription(str(topic.name), name)
            with subscription.lock:
                if subscription.consumers:
                    raise ConsumerBusy(str(topic.name), name, f"it has {subscription.consumers} consumers")
                subscription.deleted = True
            had_policies = False

            def work(transaction: Transaction) -> None:
                nonlocal had_policies
                number = subscription.record.subscription_id
                for ledger_id, _ in list(catalog.acked(transaction.raw, number)):
                    transaction.delete(fmt.acked_key(number, ledger_id))
                transaction.delete(fmt.cursor_key(topic.topic_id, name))
                had_policies = policy_records.forget_subscription(transaction, topic.name, name)

            try:
                self.main.write(work)
            except BaseException:
                subscription.deleted = False
                raise
            topic.subscriptions = {key: value for key, value in topic.subscriptions.items() if key != name}
            if had_policies:
                self.policies.changed(Scope(str(topic.name), name))
        self.maintenance.look_at(topic.topic_id, 0)

    def _store_failed(self, failed: StoreFailed) -> None:
        """Nothing is written any more: every receiver that waits is woken, and raises."""
        self.firing.suspensions.note(STORE, failed, self.clock.now_ms(), pauses=False)
        if self.scheduler is not None:
            self.scheduler.wake()
        self._wake_receivers()

    def _wake_receivers(self) -> None:
        for topic in self.topics.loaded():
            topic.changed()

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Persist acknowledgements, end the thread, close every environment, give the lock back; whatever is raised.

        A second call does nothing, or what the first was kept from.
        """
        self._shutdown.run()
