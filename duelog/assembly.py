"""Assembly of an open store, bottom up: each part is given the parts that it uses when it is made."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from duelog.attempts.delivery_log import DeliveryLog
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.loaded import LoadedPartitions
from duelog.markers.firing.suspensions import Suspensions
from duelog.markers.pending_entries import PendingEntries
from duelog.markers.withdrawal import Succession, Withdrawals
from duelog.partitions.partition_set import Storage
from duelog.store.clock import Clock, ManualClock, StoreClock
from duelog.store.config import StoreConfig
from duelog.store.errors import CorruptRecord, DamagedStore, StoreFull
from duelog.store.policy.pending_quotas import PendingQuotas
from duelog.store.wal.write_ahead_log import WriteAheadLog

from .engine import Delivery, Engine, Pending, Sending, Upkeep, Waking
from .keys.keyed_messages import KeyedBatches, KeyedMessages
from .keys.topic_keys import TopicKeys
from .metrics import StoreMetrics, instruments
from .recovery import Recovered, recover
from .sending.delay_policies import DelayPolicies
from .sending.outbox import Outbox
from .sending.put_writer import PutWriter
from .sending.sender import Sender
from .sending.topic_sender import TopicWithdrawals
from .sending.wal_segments import WalSegments
from .sending.wal_writer import WalWriter
from .shutdown import OpenState
from .stats import Figures
from .topics.ack_flusher import AckFlusher
from .topics.dead_letters import DeadLetters
from .topics.inline import InlineMessages
from .topics.producer_state import Producers
from .topics.topic_events import TopicEvents
from .topics.topic_list import Topics
from .topics.trim_agenda import TrimAgenda
from .upkeep.maintenance import Maintenance, Tasks
from .upkeep.policies_in_force import Expiry, PolicyChanges
from .upkeep.quarantine import Quarantine
from .upkeep.reclaiming import Adopting, IdSweep, Trimming
from .upkeep.recurring import Recurring
from .upkeep.removal import Removal
from .upkeep.scheduler import Scheduler, Wakeups

_log = logging.getLogger("duelog.maintenance")


def open_engine(
    path: Path, config: StoreConfig, clock: Clock, *, read_only: bool, records_defaults: bool = True
) -> Engine:
    """Open or make the store in `path`. Raises the errors of DelayedStore.open.

    records_defaults: a store that has none recorded takes over those of `config`; without that it keeps everything.
    """
    with ExitStack() as undo:
        try:
            recovered = recover(path, config, clock, undo, read_only=read_only)
            engine = assemble(recovered, undo, records_defaults=records_defaults)
        except CorruptRecord as error:
            raise DamagedStore(path / "main", str(error)) from error
        undo.pop_all()
    return engine


def assemble(recovered: Recovered, undo: ExitStack, *, records_defaults: bool) -> Engine:
    """Make the parts of a recovered store, bottom up, and start the scheduler's thread where the store has one.

    `undo` ends what was begun. Raises StoreFull, ResourceShortage.
    """
    storage, clock = recovered.storage, recovered.clock
    config, listeners = storage.config, storage.listeners
    scheduler = Scheduler(clock, storage.main) if _has_thread(storage, clock) else None
    wake_scheduler = _nothing if scheduler is None else scheduler.wake
    agenda = TrimAgenda(wake_scheduler)
    topic_events = TopicEvents(storage.path)
    delivery_log = None if storage.read_only else DeliveryLog(storage.path, storage.store_id)
    topics = Topics(storage.main, config, agenda, topic_events, delivery_log, read_only=storage.read_only)
    suspensions = Suspensions(storage.main, topics.name_of)
    waking = Waking(scheduler, Wakeups(storage.main, topics, suspensions, clock, scheduler), agenda)
    policies = _policies(storage, records_defaults=records_defaults)
    wal_writer = None if storage.read_only else _wal_writer(recovered, waking, undo)

    delivery, entries = _delivery(recovered, topics, suspensions, waking, wal_writer, delivery_log)
    pending = _pending(storage, clock, delivery, entries, policies)
    figures = Figures(
        storage.path,
        storage.main,
        storage.partitions,
        topics,
        delivery.firing,
        delivery.inline,
        delivery.quarantine,
        clock,
    )
    quotas = PendingQuotas(
        policies.effective, lambda: policies.version, figures.all_pending_of, by_time=bool(config.inline_delay_ms)
    )
    sending = _sending(recovered, topics, policies, quotas, pending, wal_writer)
    upkeep = _upkeep(storage, clock, topics, topic_events, policies, waking, wal_writer, pending, delivery)
    if not storage.read_only:
        try:
            upkeep.maintenance.tasks.adopting.run()
        except StoreFull as error:
            _log.warning("compacted generations are not adopted for now: %s", error)

    state = OpenState(storage.path)
    listeners += [waking.wakeups, quotas]
    metrics: StoreMetrics | None = None
    if not storage.read_only:
        metrics = StoreMetrics(
            storage.path, config.cluster, state, topics, delivery.firing, clock, figures, listeners, instruments()
        )
        undo.callback(metrics.close)
        listeners.append(metrics)
    engine = Engine(
        storage=storage,
        lock=recovered.lock,
        state=state,
        clock=clock,
        topics=topics,
        topic_events=topic_events,
        policies=policies,
        waking=waking,
        sending=sending,
        pending=pending,
        delivery=delivery,
        upkeep=upkeep,
        figures=figures,
        metrics=metrics,
    )
    if scheduler is not None:
        scheduler.start(lambda: upkeep.maintenance.slice()[0].next_due_ms, topics.wake_receivers)
    return engine


def _has_thread(storage: Storage, clock: StoreClock) -> bool:
    if storage.read_only:
        return False
    background = storage.config.background
    return not isinstance(clock.wrapped, ManualClock) if background is None else background


def _policies(storage: Storage, *, records_defaults: bool) -> DelayPolicies:
    policies = DelayPolicies(storage.main, storage.listeners, read_only=storage.read_only)
    if records_defaults and not storage.read_only:
        policies.record(storage.config)
    policies.warn_of(storage.config)
    return policies


def _wal_writer(recovered: Recovered, waking: Waking, undo: ExitStack) -> WalWriter:
    storage = recovered.storage
    main, partitions = storage.main, storage.partitions
    segments = WalSegments(
        main,
        partitions,
        WriteAheadLog(storage.path, storage.store_id, recovered.wal),
        recovered.clock,
        storage.config,
        waking.wakeups.wake,
        unapplied=bool(recovered.memtable or partitions.unapplied()),
        background=waking.scheduler is not None,
    )
    wal_writer = WalWriter(main, recovered.memtable, recovered.claims, segments, storage.config, storage.listeners)
    undo.callback(wal_writer.close)
    if storage.config.durability == "relaxed":
        main.before_commit = partitions.before_commit = wal_writer.sync
    return wal_writer


def _delivery(
    recovered: Recovered,
    topics: Topics,
    suspensions: Suspensions,
    waking: Waking,
    wal_writer: WalWriter | None,
    delivery_log: DeliveryLog | None,
) -> tuple[Delivery, PendingEntries]:
    storage, clock = recovered.storage, recovered.clock
    main, partitions, config, listeners = storage.main, storage.partitions, storage.config, storage.listeners
    wake = waking.wakeups.wake
    quarantine = Quarantine(main, listeners)
    loaded = LoadedPartitions(main, partitions, config, suspensions, listeners, topics.main_log, quarantine.add, wake)
    firing = Firing(
        main,
        partitions,
        config,
        loaded,
        clock,
        listeners,
        topics.main_log,
        quarantine.add,
        wake,
        main.write if wal_writer is None else wal_writer.fire,
        config.fire_batch if wal_writer is None else wal_writer.largest_firing,
    )
    entries = PendingEntries(main, partitions, firing, config.partition_ms, recovered.run_limits)
    flusher = AckFlusher(main, config.ack_flush_ms, clock, waking.agenda, wake, delivery_log)
    inline = InlineMessages(main, partitions, clock, config, flusher, quarantine.add, listeners)
    dead_letters = DeadLetters(main, topics, flusher, clock, firing.gate, entries, wake)
    return Delivery(quarantine, firing, flusher, inline, dead_letters), entries


def _pending(
    storage: Storage, clock: StoreClock, delivery: Delivery, entries: PendingEntries, policies: DelayPolicies
) -> Pending:
    gate = delivery.firing.gate
    withdrawals = Withdrawals(storage.main, gate, clock, entries)
    succession = Succession(storage.main, gate, clock, entries)
    keys = TopicKeys(storage.main, storage.partitions, withdrawals)
    topic_withdrawals = TopicWithdrawals(withdrawals, policies, delivery.inline, keys.are_used, storage.listeners)
    return Pending(entries, withdrawals, succession, keys, topic_withdrawals)


def _sending(
    recovered: Recovered,
    topics: Topics,
    policies: DelayPolicies,
    quotas: PendingQuotas,
    pending: Pending,
    wal_writer: WalWriter | None,
) -> Sending:
    storage = recovered.storage
    partitions, config, listeners = storage.partitions, storage.config, storage.listeners
    producers = Producers(storage.main, wal_writer)
    sender = Sender(partitions, config, recovered.run_limits, wal_writer, policies, quotas)
    batches = KeyedBatches(policies, pending.keys, sender, pending.succession, quotas, listeners)
    put_writer = PutWriter(sender, policies, producers.of, batches.send_all)
    outbox = Outbox(put_writer.write, config.max_in_flight_bytes, sender.group_bytes, storage.path)
    keyed = KeyedMessages(
        topics,
        partitions,
        policies,
        pending.keys,
        sender,
        pending.withdrawals,
        batches,
        listeners,
        config.max_message_bytes,
    )
    return Sending(wal_writer, sender, producers, keyed, outbox)


def _upkeep(
    storage: Storage,
    clock: StoreClock,
    topics: Topics,
    topic_events: TopicEvents,
    policies: DelayPolicies,
    waking: Waking,
    wal_writer: WalWriter | None,
    pending: Pending,
    delivery: Delivery,
) -> Upkeep:
    main, partitions, config = storage.main, storage.partitions, storage.config
    agenda, flusher = waking.agenda, delivery.flusher
    wake_scheduler = _nothing if waking.scheduler is None else waking.scheduler.wake
    recurring = Recurring(main, topics, pending.succession, clock, config.max_message_bytes, waking.wakeups.wake)
    expiry = Expiry(main, topics, agenda, flusher, policies)
    tasks = Tasks(
        recurring,
        expiry,
        Trimming(main, topics, agenda, flusher, config, policies, storage.listeners),
        Adopting(storage.path, main, partitions, topics, storage.store_id, clock),
        IdSweep(main, partitions, topics),
    )
    maintenance = Maintenance(
        storage, clock, delivery.firing, flusher, delivery.quarantine, wal_writer, tasks, wake_scheduler
    )
    policy_changes = PolicyChanges(policies, topics, agenda, expiry, clock, wake_scheduler)
    removal = Removal(main, topics, agenda, delivery.firing, maintenance, policy_changes, topic_events)
    return Upkeep(maintenance, recurring, policy_changes, removal)


def _nothing() -> None:
    """Stand in for waking a scheduler in a store without one."""
