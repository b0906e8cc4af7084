"""The parts of an open store put together, bottom up: each gets what it uses when it is made."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from duelog.attempts.delivery_log import DeliveryLog
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.loaded import LoadedPartitions
from duelog.markers.firing.suspensions import Suspensions
from duelog.markers.pending_entries import PendingEntries
from duelog.markers.succession import Succession
from duelog.markers.withdrawal import Withdrawals
from duelog.store.clock import Clock, ManualClock
from duelog.store.config import StoreConfig
from duelog.store.errors import CorruptRecord, DamagedStore, StoreFull
from duelog.store.policy.pending_quotas import PendingQuotas
from duelog.store.wal.write_ahead_log import WriteAheadLog

from .background.adopting import Adopting
from .background.expiry import Expiry
from .background.id_sweep import IdSweep
from .background.maintenance import Maintenance
from .background.policy_changes import PolicyChanges
from .background.quarantine import Quarantine
from .background.recurring import Recurring
from .background.removal import Removal
from .background.scheduler import Scheduler
from .background.trimming import Trimming
from .background.wakeups import Wakeups
from .engine import Engine
from .keys.keyed_messages import KeyedBatches, KeyedMessages
from .keys.topic_keys import TopicKeys
from .metrics import StoreMetrics, instruments
from .recovery import Recovered, recover
from .sending.delay_policies import DelayPolicies
from .sending.outbox import Outbox
from .sending.put_writer import PutWriter
from .sending.sender import Sender
from .sending.topic_withdrawals import TopicWithdrawals
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

_log = logging.getLogger("duelog.maintenance")


def open_engine(
    path: Path, config: StoreConfig, clock: Clock, *, read_only: bool, records_defaults: bool = True
) -> Engine:
    """Open or make the store in `path`. Raises the errors of DelayedStore.open.

    records_defaults: a store of an earlier version, which has none recorded, takes over those of `config`; without
    that it keeps everything.
    """
    with ExitStack() as undo:
        try:
            found = recover(path, config, clock, undo, read_only=read_only)
            engine = assemble(found, config, undo, records_defaults=records_defaults)
        except CorruptRecord as error:
            raise DamagedStore(path / "main", str(error)) from error
        undo.pop_all()
    return engine


def assemble(found: Recovered, config: StoreConfig, undo: ExitStack, *, records_defaults: bool) -> Engine:
    """The parts of a store that was recovered, and the scheduler's thread where it is to have one.

    `undo` ends what was begun. Raises StoreFull, ResourceShortage.
    """
    main, partitions, clock, listeners = found.main, found.partitions, found.clock, found.listeners
    limits = found.run_limits
    state = OpenState(found.path)

    # What waits, and what wakes it.
    background = config.background if config.background is not None else not isinstance(clock.wrapped, ManualClock)
    scheduler: Scheduler | None = None
    if background and not found.read_only:
        scheduler = Scheduler(clock, main)
    wake_scheduler = _nothing if scheduler is None else scheduler.wake
    agenda = TrimAgenda(wake_scheduler)
    topic_events = TopicEvents(found.path)
    delivery_log = None if found.read_only else DeliveryLog(found.path, found.identity.store_id)
    topics = Topics(main, config, agenda, topic_events, delivery_log, read_only=found.read_only)
    suspensions = Suspensions(main, topics.name_of)
    wakeups = Wakeups(main, topics, suspensions, clock, scheduler)

    # From messages to durable entries.
    policies = DelayPolicies(main, listeners, read_only=found.read_only)
    if records_defaults and not found.read_only:
        policies.record(config)
    policies.warn_of(config)
    wal_writer: WalWriter | None = None
    if not found.read_only:
        segments = WalSegments(
            main,
            partitions,
            WriteAheadLog(found.path, found.identity.store_id, found.wal),
            clock,
            config,
            wakeups.wake,
            unapplied=bool(found.memtable or partitions.unapplied()),
            background=scheduler is not None,
        )
        wal_writer = WalWriter(main, found.memtable, found.claims, segments, config, listeners)
        undo.callback(wal_writer.close)
        if config.durability == "relaxed":
            main.before_commit = partitions.before_commit = wal_writer.sync
    producers = Producers(main, partitions, wal_writer)

    # From due messages to consumers.
    quarantine = Quarantine(main, listeners)
    loaded = LoadedPartitions(
        main, partitions, config, suspensions, listeners, topics.main_log, quarantine.add, wakeups.wake
    )
    firing = Firing(
        main,
        partitions,
        config,
        loaded,
        clock,
        listeners,
        topics.main_log,
        quarantine.add,
        wakeups.wake,
        main.write if wal_writer is None else wal_writer.fire,
        config.fire_batch if wal_writer is None else wal_writer.largest_firing,
    )
    pending = PendingEntries(main, partitions, firing, config.partition_ms, limits)
    withdrawals = Withdrawals(main, firing.gate, clock, pending)
    flusher = AckFlusher(main, config.ack_flush_ms, clock, agenda, wakeups.wake, delivery_log)
    inline = InlineMessages(main, partitions, clock, config, flusher, quarantine.add, listeners)
    figures = Figures(found.path, main, partitions, topics, firing, inline, quarantine, clock)
    quotas = PendingQuotas(
        policies.effective, lambda: policies.version, figures.all_pending_of, by_time=bool(config.inline_delay_ms)
    )
    sender = Sender(partitions, config, limits, wal_writer, policies, quotas)
    succession = Succession(main, firing.gate, clock, pending)
    topic_keys = TopicKeys(main, partitions, withdrawals)
    keyed_batches = KeyedBatches(policies, topic_keys, sender, succession, quotas, listeners)
    put_writer = PutWriter(sender, policies, producers.of, keyed_batches.send_all)
    outbox = Outbox(put_writer.write, config.max_in_flight_bytes, sender.group_bytes, found.path)
    dead_letters = DeadLetters(main, topics, flusher, clock, firing.gate, pending, wakeups.wake)

    # When time passes.
    expiry = Expiry(main, topics, agenda, flusher, policies)
    keyed = KeyedMessages(
        topics,
        partitions,
        policies,
        topic_keys,
        sender,
        withdrawals,
        keyed_batches,
        listeners,
        config.max_message_bytes,
    )
    recurring = Recurring(main, topics, succession, clock, config.max_message_bytes, wakeups.wake)
    adopting = Adopting(found.path, main, partitions, topics, found.identity.store_id, clock)
    maintenance = Maintenance(
        found.path,
        main,
        partitions,
        firing,
        flusher,
        quarantine,
        clock,
        config,
        Trimming(main, topics, agenda, flusher, config, policies, listeners),
        expiry,
        listeners,
        wake_scheduler,
        recurring,
        IdSweep(main, partitions, topics),
        adopting,
        wal_writer,
    )
    policy_changes = PolicyChanges(policies, topics, agenda, expiry, clock, wake_scheduler)
    if not found.read_only:
        try:
            adopting.run()
        except StoreFull as error:
            _log.warning("what was compacted is not taken over for now: %s", error)

    # What is seen from outside.
    metrics: StoreMetrics | None = None
    listeners += [wakeups, quotas]
    if not found.read_only:
        metrics = StoreMetrics(
            found.path, config.cluster, state, topics, firing, clock, figures, listeners, instruments()
        )
        undo.callback(metrics.close)
        listeners.append(metrics)
    engine = Engine(
        path=found.path,
        config=config,
        read_only=found.read_only,
        store_id=found.identity.store_id,
        lock=found.lock,
        state=state,
        main=main,
        partitions=partitions,
        clock=clock,
        scheduler=scheduler,
        wakeups=wakeups,
        agenda=agenda,
        topics=topics,
        topic_events=topic_events,
        policies=policies,
        policy_changes=policy_changes,
        wal_writer=wal_writer,
        sender=sender,
        producers=producers,
        keyed=keyed,
        outbox=outbox,
        quarantine=quarantine,
        firing=firing,
        topic_withdrawals=TopicWithdrawals(withdrawals, policies, inline, topic_keys.are_used, listeners),
        flusher=flusher,
        inline=inline,
        dead_letters=dead_letters,
        recurring=recurring,
        maintenance=maintenance,
        removal=Removal(main, topics, agenda, firing, maintenance, policy_changes, topic_events),
        figures=figures,
        metrics=metrics,
    )
    if scheduler is not None:
        scheduler.start(lambda: maintenance.slice()[0].next_due_ms, topics.wake_receivers)
    return engine


def _nothing() -> None:
    """There is no scheduler to be woken."""
