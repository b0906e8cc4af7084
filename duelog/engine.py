"""An open store: its parts, its state, and the order in which it closes. DelayedStore, Topic and Subscription use it.

Order of locks, outermost first: maintenance, a subscription, then leaf locks (conditions, queues, sets).
No thread waits for a commit with a subscription's lock in hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from duelog.markers.firing.firing import Firing
from duelog.markers.pending_entries import PendingEntries
from duelog.markers.withdrawal import Succession, Withdrawals
from duelog.partitions.partition_set import Storage
from duelog.store.clock import ManualClock, StoreClock
from duelog.store.errors import BrokenInvariant, InvalidArgument, ReadOnly
from duelog.store.log.documents import Documents
from duelog.store.names import TopicName
from duelog.store.position import MessageId, Position

from .control.control_server import ControlServer, MakeOperations
from .keys.keyed_messages import KeyedMessages
from .keys.topic_keys import TopicKeys
from .metrics import Instruments, StoreMetrics
from .opening import StoreLock
from .sending.delay_policies import DelayPolicies
from .sending.outbox import Outbox
from .sending.sender import Sender
from .sending.topic_sender import StoreSender, TopicSender, TopicWithdrawals
from .sending.wal_writer import WalWriter
from .shutdown import OpenState, Shutdown
from .stats import Figures
from .topics.ack_flusher import AckFlusher
from .topics.dead_letters import DeadLetters
from .topics.inline import InlineMessages
from .topics.producer_state import Producers
from .topics.seeking import SeekTarget, position_of
from .topics.topic_events import TopicEvents
from .topics.topic_list import Topics
from .topics.topic_state import TopicState
from .topics.trim_agenda import TrimAgenda
from .upkeep.maintenance import Maintenance, TickResult
from .upkeep.policies_in_force import PolicyChanges
from .upkeep.quarantine import Quarantine
from .upkeep.recurring import Recurring
from .upkeep.removal import Removal
from .upkeep.scheduler import Scheduler, Wakeups


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """From messages to durable entries. A read-only store has no write-ahead log: `wal_writer` is None."""

    wal_writer: WalWriter | None
    sender: Sender
    producers: Producers
    keyed: KeyedMessages
    outbox: Outbox


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Messages that have not fired: looked up, cancelled, replaced."""

    entries: PendingEntries
    withdrawals: Withdrawals
    succession: Succession
    keys: TopicKeys
    topic_withdrawals: TopicWithdrawals


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """From due messages to acknowledgements."""

    quarantine: Quarantine
    firing: Firing
    flusher: AckFlusher
    inline: InlineMessages
    dead_letters: DeadLetters


@dataclass(frozen=True, slots=True, eq=False)
class Waking:
    """The threads that wait for the next due time. `scheduler` is None where the store has no thread of its own."""

    scheduler: Scheduler | None
    wakeups: Wakeups
    agenda: TrimAgenda


@dataclass(frozen=True, slots=True, eq=False)
class Upkeep:
    """Work that the passing of time, or an operator, asks for."""

    maintenance: Maintenance
    recurring: Recurring
    policy_changes: PolicyChanges
    removal: Removal


@dataclass(eq=False)
class Engine:
    """The parts of an open store, made by `assemble` (assembly.py). `close` ends them.

    A read-only store has no `lock` and no `metrics`. `control` is None while nothing listens at the control socket.
    """

    storage: Storage
    lock: StoreLock | None
    state: OpenState
    clock: StoreClock
    topics: Topics
    topic_events: TopicEvents
    policies: DelayPolicies
    waking: Waking
    sending: Sending
    pending: Pending
    delivery: Delivery
    upkeep: Upkeep
    figures: Figures
    metrics: StoreMetrics | None
    control: ControlServer | None = None
    backing_up: Lock = field(default_factory=Lock)
    """One backup at a time."""

    def __post_init__(self) -> None:
        self.documents = Documents(self.storage.main, self.check_open, self.check_writable)
        self._shutdown = Shutdown(
            [
                self.sending.outbox.close,
                self._stop,
                self._join_control,
                self._persist,
                self._end,
                self.sending.sender.close,
                self.topic_events.close,
                self.storage.partitions.close,
                self.storage.main.close,
                self._unlock,
            ]
        )

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

    def report_to(self, instruments: Instruments) -> StoreMetrics:
        """See `StoreMetrics.report_to`. Raises ClosedError, ReadOnly."""
        self.state.check()
        if self.metrics is None:
            raise ReadOnly(f"store {self.storage.path}")
        return self.metrics.report_to(instruments)

    def writing_at(self) -> int:
        """The time, of a store that can be written to. Raises as `check_writable`."""
        self.check_writable()
        return self.clock.now_ms()

    def writer(self) -> WalWriter:
        """The writer of the write-ahead log. Raises as `check_writable`."""
        self.check_writable()
        if self.sending.wal_writer is None:
            raise BrokenInvariant("a store open for writing has no write-ahead log")
        return self.sending.wal_writer

    def sender_to(self, name: TopicName) -> TopicSender:
        """A sender to the topic of a name, which need not exist."""
        return TopicSender(
            name,
            self.topics,
            self.policies,
            self.sending.sender,
            self.sending.outbox,
            self.sending.producers.of,
            self.sending.keyed.send_all,
            self.writing_at,
            self.storage.config.max_message_bytes,
        )

    def sender_to_topics(self) -> StoreSender:
        """A sender to several topics at once."""
        return StoreSender(
            self.topics,
            self.policies,
            self.sending.sender,
            self.sending.keyed.send_all,
            self.writing_at,
            self.storage.config.max_message_bytes,
        )

    def place_of(self, topic: TopicState, field: str, given: Position) -> Position:
        """Return the position in the main log: a delayed message's marker, any other position unchanged.

        Raises InvalidArgument, which names `field`, for a message that has not fired.
        """
        if topic.log.entries_of(given.ledger_id) is not None:
            return given
        position = self.pending.topic_withdrawals.position_of(topic, given)
        state = "fired" if position is not None else self.pending.topic_withdrawals.state(topic, given)
        if state in ("scheduled", "cancelled"):
            raise InvalidArgument(field, given, f"the message with this id is {state}: it was not delivered")
        return position or given

    def target_of(self, topic: TopicState, to: SeekTarget) -> Position:
        """The position that a seek goes to. Raises InvalidArgument."""
        if isinstance(to, str) and ":" in to:
            to = MessageId.parse(to, "to")
        if isinstance(to, MessageId):
            to = self.place_of(topic, "to", to)
        return position_of(self.storage.main, self.delivery.inline, topic, to, self.clock.now_ms())

    def tick(self) -> TickResult:
        self.check_writable()
        return self.upkeep.maintenance.tick()

    def save_snapshots(self) -> int:
        self.check_writable()
        with self.upkeep.maintenance.lock:
            return self.delivery.firing.loaded.save_all(self.clock.now_ms())

    def slice(self) -> tuple[TickResult, bool]:
        """Run a piece of a tick, and return whether there is more to do now."""
        self.check_writable()
        return self.upkeep.maintenance.slice()

    def start_control(self, operations: MakeOperations) -> None:
        """Listen at the control socket if the store is configured to have one. A second call is a no-op."""
        wanted = self.storage.config.control
        if wanted is None:
            wanted = not isinstance(self.clock.wrapped, ManualClock)
        if wanted and not self.storage.read_only and self.control is None:
            server = ControlServer(self.storage.path, operations, self.storage.config.max_message_bytes)
            self.control = server if server.start() else None

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Persist acknowledgements, end the thread, close every environment and release the lock, whatever is raised.

        A second call takes the steps that the first did not complete.
        """
        self._shutdown.run()

    def _stop(self) -> None:
        if self.control is not None and not self.state.forked:
            self.control.stop()
        self.upkeep.maintenance.stopping = True
        if self.metrics is not None:
            self.metrics.close()
        if self.waking.scheduler is not None:
            self.waking.scheduler.stop()

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
