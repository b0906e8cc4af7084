"""An open store: its parts, made bottom up, its state, and the order in which it closes.

DelayedStore, Topic and Subscription use it. Each part is given the parts that it uses when it is made.

Order of locks, outermost first: maintenance, a subscription, then leaf locks (conditions, queues, sets).
No thread waits for a commit with a subscription's lock in hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from duelog.delivery.delivery_log import DeliveryLog
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.loaded import LoadedPartitions
from duelog.markers.firing.suspensions import Suspensions
from duelog.markers.pending_entries import PendingEntries
from duelog.partitions.partition_set import Storage
from duelog.store.clock import Clock, ManualClock, StoreClock
from duelog.store.codec.run import RunLimits
from duelog.store.config import StoreConfig
from duelog.store.errors import (
    BrokenInvariant,
    CorruptRecord,
    DamagedStore,
    Deposed,
    InvalidArgument,
    NotReplicated,
    ReadOnly,
    StoreFull,
)
from duelog.store.log.documents import Documents
from duelog.store.names import TopicName
from duelog.store.policy.pending_quotas import PendingQuotas
from duelog.store.position import MessageId, Position
from duelog.store.wal.write_ahead_log import WriteAheadLog

from .census import Census
from .metrics import StoreMetrics, instruments
from .opening import OpenState, Recovered, recover
from .operations.operation import Ask
from .operations.wire_server import WireServer
from .sending.delay_policies import DelayPolicies
from .sending.keyed_messages import KeyedMessages, TopicKeys
from .sending.outbox import Outbox
from .sending.put_writer import PutWriter
from .sending.sender import Sender
from .sending.topic_sender import StoreSender
from .sending.wal_segments import WalSegments
from .sending.wal_writer import WalWriter
from .sending.withdrawal import Withdrawals
from .stats import Figures
from .topics.ack_flusher import AckFlusher
from .topics.dead_letters import DeadLetters
from .topics.inline import InlineMessages
from .topics.producer_state import Producers
from .topics.seeking import SeekTarget, position_of
from .topics.topic_events import TopicEvents
from .topics.topic_list import Topics, TrimAgenda
from .topics.topic_state import TopicState
from .upkeep.maintenance import Maintenance, Tasks, TickResult
from .upkeep.policies_in_force import Expiry, PolicyChanges
from .upkeep.quarantine import Quarantine
from .upkeep.reclaiming import Adopting, IdSweep, Trimming
from .upkeep.recurring import Recurring
from .upkeep.removal import Removal
from .upkeep.scheduler import Scheduler, Wakeups

if TYPE_CHECKING:
    from .replica.shipping import Shipping
    from .replica.tiers import Tiers

_log = logging.getLogger("duelog.maintenance")


@dataclass(frozen=True, slots=True, eq=False)
class Waking:
    """The threads that wait for the next due time. `scheduler` is None where the store has no thread of its own."""

    scheduler: Scheduler | None
    wakeups: Wakeups
    agenda: TrimAgenda


class Delivery:
    """From due messages to acknowledgements."""

    def __init__(self, engine: Engine, suspensions: Suspensions, delivery_log: DeliveryLog | None) -> None:
        storage, clock, topics, waking = engine.storage, engine.clock, engine.topics, engine.waking
        main, config, wake, writer = storage.main, storage.config, waking.wakeups.wake, engine.wal_writer
        self.quarantine = Quarantine(main, storage.listeners)
        loaded = LoadedPartitions(storage, suspensions, topics.main_log, self.quarantine.add, wake)
        self.firing = Firing(storage, loaded, clock, config.fire_batch if writer is None else writer.largest_firing)
        self.entries = PendingEntries(storage, self.firing)
        self.flusher = AckFlusher(main, config.ack_flush_ms, clock, waking.agenda, wake, delivery_log)
        self.inline = InlineMessages(storage, clock, self.flusher, self.quarantine.add, waking.wakeups.ask)
        self.dead_letters = DeadLetters(main, topics, self.flusher, clock, self.entries, wake)


class Pending:
    """Messages that have not fired: looked up, cancelled, replaced."""

    def __init__(self, engine: Engine) -> None:
        storage, delivery = engine.storage, engine.delivery
        self.withdrawals = Withdrawals(
            storage.main, engine.clock, delivery.entries, engine.policies, delivery.inline, storage.listeners
        )
        self.keys = TopicKeys(storage.main, storage.partitions, self.withdrawals)


class Sending:
    """From messages to durable entries."""

    def __init__(self, engine: Engine, run_limits: RunLimits, quotas: PendingQuotas) -> None:
        storage, policies, pending, config = engine.storage, engine.policies, engine.pending, engine.storage.config
        self.producers = Producers(storage.main)
        self.sender = sender = Sender(storage.partitions, config, run_limits, engine.wal_writer, policies, quotas)
        self.keyed = KeyedMessages(storage, engine.topics, policies, quotas, sender, pending.keys, pending.withdrawals)
        put = PutWriter(sender, policies, self.producers, self.keyed).write
        self.outbox = Outbox(put, config.max_in_flight_bytes, sender.group_bytes, storage.path, engine.settle)
        self.store = StoreSender(
            engine.topics,
            policies,
            sender,
            self.outbox,
            self.producers,
            self.keyed,
            engine.writing_at,
            config.max_message_bytes,
        )


class Upkeep:
    """Work that the passing of time, or an operator, asks for."""

    def __init__(self, engine: Engine) -> None:
        storage, clock, topics, delivery = engine.storage, engine.clock, engine.topics, engine.delivery
        main, policies, flusher, firing = storage.main, engine.policies, delivery.flusher, delivery.firing
        agenda, largest = engine.waking.agenda, storage.config.max_message_bytes
        wake, withdrawals = engine.waking.wakeups.wake, engine.pending.withdrawals
        self.recurring = Recurring(main, topics, withdrawals, clock, largest, wake)
        expiry = Expiry(main, topics, agenda, flusher, policies)
        trimming = Trimming(storage, topics, agenda, flusher, policies)
        tasks = Tasks(self.recurring, expiry, trimming, Adopting(storage, topics, clock), IdSweep(storage, topics))
        self.maintenance = Maintenance(
            storage, clock, firing, flusher, delivery.quarantine, engine.wal_writer, tasks, engine.waking.wakeups
        )
        self.policy_changes = PolicyChanges(policies, topics, agenda, expiry, clock, agenda.wake)
        self.removal = Removal(main, topics, agenda, firing, self.maintenance, self.policy_changes, engine.topic_events)


class Engine:
    """The parts of an open store. `close` ends them.

    A read-only store has no `lock`, no `wal_writer` and no `metrics`. `control` is None while nothing listens at the
    control socket.
    """

    def __init__(self, recovered: Recovered, undo: ExitStack, *, records_defaults: bool) -> None:
        """Make the parts of a recovered store. `undo` ends what was begun. Raises StoreFull."""
        storage, clock = recovered.storage, recovered.clock
        config, listeners, path = storage.config, storage.listeners, storage.path
        self.storage, self.clock, self.lock = storage, clock, recovered.lock
        self.state = OpenState(path)
        scheduler = Scheduler(clock, storage.main) if _has_thread(storage, clock) else None
        agenda = TrimAgenda(lambda: self.waking.wakeups.ask())  # noqa: PLW0108 - made below, of the topics
        self.topic_events = TopicEvents(path)
        delivery_log = None if storage.read_only else DeliveryLog(path, storage.store_id)
        self.topics = Topics(storage.main, config, agenda, self.topic_events, delivery_log, read_only=storage.read_only)
        suspensions = Suspensions(storage.main, self.topics.name_of)
        self.waking = Waking(scheduler, Wakeups(storage.main, self.topics, suspensions, clock, scheduler), agenda)
        self.policies = DelayPolicies(storage.main, listeners, read_only=storage.read_only)
        if records_defaults and not storage.read_only:
            self.policies.record(config)
        self.policies.warn_of(config)

        self.shipping = _shipping(storage, clock)
        self._leader = self.shipping if config.lease_ms else None
        """The copy of a store that another machine may take over."""
        self._may_wait = self.shipping is not None and (config.durability == "replicated" or self._leader is not None)
        """False where only a policy has callers wait for the copy: it is asked for each message."""
        self.tiers: Tiers | None = None
        """Gives days back to the copy, and fetches them; None: nothing is, or was, given back."""
        self.wal_writer = None if storage.read_only else _wal_writer(recovered, self.waking, self.shipping, undo)
        self.delivery = Delivery(self, suspensions, delivery_log)
        firing, inline = self.delivery.firing, self.delivery.inline
        self.pending = Pending(self)
        self.figures = Figures(storage, self.topics, firing, inline, self.delivery.quarantine, clock, self.shipping)
        self.census = Census(storage, self.topics, firing, inline, clock, self.figures)
        quotas = PendingQuotas(
            self.policies.effective,
            lambda: self.policies.version,
            self.figures.all_pending_of,
            by_time=bool(config.inline_delay_ms),
        )
        self.sending = Sending(self, recovered.run_limits, quotas)
        self.upkeep = Upkeep(self)
        if not storage.read_only:
            try:
                self.upkeep.maintenance.tasks.adopting.run()
            except StoreFull as error:
                _log.warning("compacted generations are not adopted for now: %s", error)

        listeners += [self.waking.wakeups, quotas]
        self.metrics: StoreMetrics | None = None
        if not storage.read_only:
            self.metrics = StoreMetrics(storage, self.state, self.topics, firing, clock, self.figures, instruments())
            undo.callback(self.metrics.close)
            listeners.append(self.metrics)
        self.control: WireServer | None = None
        self.documents = Documents(storage.main, self.check_open, self.check_writable, self.settle)
        self._shutdown = Shutdown(
            [
                self.sending.outbox.close,
                self._stop,
                self._join_control,
                self._persist,
                self._end,
                self.sending.sender.close,
                self.topic_events.close,
                storage.partitions.close,
                storage.main.close,
                self._unlock,
            ]
        )

    def start(self) -> None:
        """Start the scheduler's thread, where the store has one. Raises ResourceShortage."""
        scheduler, maintenance = self.waking.scheduler, self.upkeep.maintenance
        if scheduler is not None:
            scheduler.start(lambda: maintenance.slice()[0].next_due_ms, self.topics.wake_receivers)

    # -- for the faces -----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.state.closed

    def check_open(self) -> None:
        """Raise ClosedError after close, and in a child process after fork."""
        self.state.check()

    def check_writable(self) -> None:
        """Raise ClosedError as `check_open`, ReadOnly, and StoreFailed where nothing is written any more."""
        self.state.check()
        if self.storage.read_only:
            raise ReadOnly(f"store {self.storage.path}")
        if self.storage.main.failed is not None:
            raise self.storage.main.failed
        if self._leader is not None:
            self._leader.check_leads()

    def writing_at(self) -> int:
        """The time, of a store that can be written to. Raises as `check_writable`."""
        self.check_writable()
        return self.clock.now_ms()

    def writer(self) -> WalWriter:
        """The writer of the write-ahead log. Raises as `check_writable`."""
        self.check_writable()
        if self.wal_writer is None:
            raise BrokenInvariant("a store open for writing has no write-ahead log")
        return self.wal_writer

    @property
    def may_wait_for_copy(self) -> bool:
        """False where `settle` does nothing."""
        return self._may_wait or self.policies.says_replicated

    def settle(self, *topics: TopicName) -> None:
        """Wait until the copy has all that was written so far, if changes of a topic, or else the store, are told then.

        In a store with a lease also where much is not shipped yet, so that a takeover knows which ids may be told.

        Raises NotReplicated. Callers hold nothing that others wait for.
        """
        if not (self._may_wait or self.policies.says_replicated):
            return
        writer, shipping = self.wal_writer, self.shipping
        if writer is not None and shipping is not None and shipping.is_far_behind:
            shipping.wait_for(writer.segments.next_place())
        waits = self.storage.config.durability == "replicated"
        if self.policies.says_replicated:
            said = [self.policies.replicated(topic) for topic in topics]
            waits = any(waits if each is None else each for each in said or [None])
        if waits:
            if shipping is None or writer is None:
                raise NotReplicated(f"store {self.storage.path}", "is open without `replica`, its copy")
            shipping.wait_for(writer.segments.next_place())

    def place_of(self, topic: TopicState, field: str, given: Position) -> Position:
        """Return the position in the main log: a delayed message's marker, any other position unchanged.

        Raises InvalidArgument, which names `field`, for a message that has not fired.
        """
        if topic.log.entries_of(given.ledger_id) is not None:
            return given
        position = self.pending.withdrawals.position_of(topic, given)
        state = "fired" if position is not None else self.pending.withdrawals.state(topic, given)
        if state in ("scheduled", "cancelled"):
            raise InvalidArgument(field, given, f"the message with this id is {state}: it was not delivered")
        return position or given

    def target_of(self, topic: TopicState, to: SeekTarget) -> Position:
        if isinstance(to, str) and ":" in to:
            to = MessageId.parse(to, "to")
        if isinstance(to, MessageId):
            to = self.place_of(topic, "to", to)
        return position_of(self.storage.main, self.delivery.inline, topic, to, self.clock.now_ms())

    def slice(self, *, if_due: bool = False) -> tuple[TickResult, bool]:
        self.check_writable()
        return self.upkeep.maintenance.slice(if_due=if_due)

    def start_control(self, store: object, operations: Ask) -> None:
        """Listen at the control socket if the store is configured to have one. A second call is a no-op.

        store: the face of this engine. operations: those of its command line.
        """
        wanted = self.storage.config.control
        if wanted is None:
            wanted = not isinstance(self.clock.wrapped, ManualClock)
        if wanted and not self.storage.read_only and self.control is None:
            config = self.storage.config
            most_bytes = max(config.wal_bytes, config.max_message_bytes)
            self.control = WireServer.start(store, self.storage.path, operations, most_bytes, self.sending.outbox)

    # -- the end -----------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Have a standby lead (`DelayedStore.hand_over`)."""
        self.check_writable()
        shipping, writer, lease_ms = self.shipping, self.writer(), self.storage.config.lease_ms
        if shipping is None or lease_ms is None:
            raise InvalidArgument("lease_ms", lease_ms, "has no standby that could lead: the store was opened without")
        self.delivery.flusher.flush()
        writer.stop(Deposed(shipping.bucket.url, "it was handed over to another machine"))
        shipping.stop_manifests()
        shipping.drain()
        shipping.end()
        if not shipping.has_resigned:
            raise NotReplicated(shipping.bucket.url, "the leader has stopped, and could not ship all and resign")

    def close(self) -> None:
        """Persist acknowledgements, end the thread, close every environment and release the lock, whatever is raised.

        A second call takes the steps that the first did not complete.
        """
        self._shutdown.run()

    def _stop(self) -> None:
        if not self.state.forked:  # else the threads, and locks that they held at the fork, are the parent's
            if self.shipping is not None:
                self.shipping.stop_manifests()
            if self.tiers is not None:
                self.tiers.close()
            if self.control is not None:
                self.control.stop()
            self.upkeep.maintenance.stopping = True
            if self.waking.scheduler is not None:
                self.waking.scheduler.stop()
        if self.metrics is not None:
            self.metrics.close()

    def _persist(self) -> None:
        if not self.storage.read_only and self.storage.main.failed is None and not self.state.forked:
            with self.upkeep.maintenance.lock:
                self.delivery.flusher.flush()
                self.delivery.quarantine.flush()
                self.delivery.firing.loaded.save_all(self.clock.now_ms())
                if self.delivery.flusher.log is not None:
                    self.delivery.flusher.log.discard()

    def _end(self) -> None:
        self.state.closed = True
        self.topics.wake_receivers()

    def _join_control(self) -> None:
        if self.control is not None and not self.state.forked:
            self.control.join()

    def _unlock(self) -> None:
        if self.lock is not None:
            self.lock.release()


S = TypeVar("S", bound="Face")
P = ParamSpec("P")
T = TypeVar("T")


class Face(Protocol):
    """A face of the store, or of a part of it."""

    _engine: Engine

    def _await_copy(self) -> None:
        """Call `Engine.settle` for what the face is of."""


def writing(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Have a method of a face raise as `Engine.check_writable`, and return once the copy has what it wrote."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._engine.check_writable()
        value = method(self, *args, **kwargs)
        self._await_copy()
        return value

    return call


_ATTEMPTS = 3
"""How often a step is begun that does not come to its end."""


class Shutdown:
    """Steps in order, each of which may be taken again. What the first raises is a refusal: nothing is done then."""

    def __init__(self, steps: Sequence[Callable[[], None]]) -> None:
        self._steps = list(steps)
        self._taken: set[int] = set()

    def run(self) -> None:
        """Take the steps not taken yet; one that raises, or is interrupted, is tried again.

        Raises the first error once all are done.
        """
        first: BaseException | None = None
        for number, step in enumerate(self._steps):
            for attempt in range(_ATTEMPTS):
                try:
                    if number not in self._taken:
                        step()
                    break
                except BaseException as error:
                    if not number and (isinstance(error, Exception) or attempt + 1 == _ATTEMPTS):
                        raise
                    first = first or error
            self._taken.add(number)
        if first is not None:
            raise first


def _has_thread(storage: Storage, clock: StoreClock) -> bool:
    if storage.read_only:
        return False
    background = storage.config.background
    return not isinstance(clock.wrapped, ManualClock) if background is None else background


def _shipping(storage: Storage, clock: StoreClock) -> Shipping | None:
    if storage.read_only or storage.config.replica is None:
        return None
    from .replica.shipping import open_shipping  # noqa: PLC0415 - only a store with a replica needs it

    return open_shipping(storage.path, storage.store_id, storage.config, clock)


def _wal_writer(recovered: Recovered, waking: Waking, shipping: Shipping | None, undo: ExitStack) -> WalWriter:
    storage = recovered.storage
    main, partitions = storage.main, storage.partitions
    segments = WalSegments(
        main,
        partitions,
        WriteAheadLog(storage.path, storage.store_id, recovered.wal, None if shipping is None else shipping.kept.keep),
        recovered.clock,
        storage.config,
        waking.wakeups.wake,
        unapplied=bool(recovered.memtable or partitions.unapplied()),
        background=waking.scheduler is not None,
        follower=shipping,
    )
    keep = (lambda _: None) if shipping is None else shipping.kept.keep_bodies
    wal_writer = main.log = WalWriter(main, recovered.memtable, segments, storage.config, storage.listeners, keep)
    undo.callback(wal_writer.close)
    if storage.config.durability == "relaxed":
        main.before_commit = partitions.before_commit = wal_writer.segments.sync
    return wal_writer


def begin_tiers(engine: Engine) -> None:
    """Have days be given back to the copy, and fetched, of a store that ships there, or has days there alone."""
    storage, firing = engine.storage, engine.delivery.firing
    if storage.read_only or (engine.shipping is None and not storage.partitions.away):
        return
    from .replica.tiers import Tiers  # noqa: PLC0415 - only a store with a copy needs it

    background, maintenance = engine.waking.scheduler is not None, engine.upkeep.maintenance
    engine.tiers = maintenance.tiers = Tiers(
        storage, engine.clock, engine.shipping, firing.loaded, engine.waking.wakeups.wake, background=background
    )


def open_engine(
    path: Path,
    config: StoreConfig,
    clock: Clock,
    *,
    read_only: bool,
    records_defaults: bool = True,
    begin: Callable[[Engine], None] = begin_tiers,
) -> Engine:
    """Open or make the store in `path`. Raises the errors of DelayedStore.open, and what `begin` raises.

    begin: called before anything fires; as a rule it has days fetched that lie in a copy alone.

    records_defaults: a store that has none recorded takes over those of `config`; without that it keeps everything.
    """
    undo = ExitStack()
    close: Callable[[], None] = undo.close
    try:
        try:
            recovered = recover(path, config, clock, undo, read_only=read_only)
            engine = Engine(recovered, undo, records_defaults=records_defaults)
        except CorruptRecord as error:
            raise DamagedStore(path / "main", str(error)) from error
        close = engine.close
        begin(engine)
        engine.start()
        return engine
    except BaseException:
        close()
        raise
