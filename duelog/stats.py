"""Figures of a store, a topic and a subscription, as frozen values; and why a time partition is still there.

`duelog audit` answers that of a store on disk (docs/audit.md); here is what the process knows that has it open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pyroaring import BitMap

from duelog.markers.firing.firing import Firing
from duelog.markers.firing.suspensions import Suspension
from duelog.partitions.cancellations import members
from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.partition_set import Storage
from duelog.partitions.timespan import directory_name
from duelog.snapshot.snapshot_format import inspect_snapshots
from duelog.store.clock import StoreClock
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState
from duelog.store.env.memtable import Reads
from duelog.store.errors import DamagedStore, InvalidArgument
from duelog.store.files.directory import disk_parts, size_bytes
from duelog.store.log import catalog
from duelog.store.log.managed_ledger import LedgerInfo
from duelog.store.names import TopicName
from duelog.store.position import Position

from .topics.inline import InlineMessages, unacknowledged
from .topics.seeking import first_due
from .topics.task_activity import TaskActivity
from .topics.topic_list import Topics
from .topics.topic_state import DeliveryCounts, SubscriptionState, TopicState
from .upkeep.quarantine import Quarantine

if TYPE_CHECKING:
    from .replica.shipping import Shipping


@dataclass(frozen=True, slots=True)
class SubscriptionStats:
    """A subscription: counts of messages, and its mark-delete position.

    backlog: fired and not acknowledged, what is handed out included; what is not due yet does not count, whether a
    consumer is there or not.
    unacknowledged: handed out and not acknowledged. redelivering: waiting to be handed out again.
    inline: not due yet, waiting in the main log and not acknowledged; what waits in time partitions does not count.
    paused: nothing is handed out, until `paused_until_ms` (epoch ms) or, where that is None, until it is resumed.
    oldest_unacknowledged_ms: how long the oldest of the backlog has been due, in ms; 0: the backlog is empty.
    received, redelivered, acknowledged, dead_lettered, expired: how many since this process opened the store, or made
    the subscription. received: handed to consumers, each time again; redelivered: those handed out before, too.
    acknowledged: by consumers, and skipped. dead_lettered: moved to its dead-letter topic. expired: by time to live.
    longest_running_ms: for how long the longest running handler of its workers has run; 0: none runs; None: there is no
    worker. fetching_ms: the start of the time partition that it waits for, since that is in the copy alone; None: for
    none.
    """

    name: str
    type: str | None
    consumers: int
    mark_delete: Position
    backlog: int
    unacknowledged: int
    redelivering: int
    inline: int
    paused: bool
    paused_until_ms: int | None
    oldest_unacknowledged_ms: int
    received: int
    redelivered: int
    acknowledged: int
    dead_lettered: int
    expired: int
    longest_running_ms: int | None = None
    fetching_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TopicStats:
    """A topic.

    pending: messages that are not due yet: those in time partitions that have not fired, and inline ones that are not
    yet visible. A rescheduling or replacement that was broken off, by a crash or for want of space, counts as one until
    its partition closes; `Topic.scheduled` does not have it. inline: how many of them are inline.
    fired: markers written so far into partitions not yet deleted. entries, ledgers, stored_bytes: of the main log.
    index_bytes: delay indexes in memory. sent: messages that were sent to it, retries included, since this process
    opened the store. created_ms: when it was created (epoch ms), 0: repair made its record, which did not tell.
    furthest_due_ms: when the last of the pending messages is due (epoch ms); None: none is pending. It is looked for
    among all that are due in the same partition: 0.1 s for a million. Of a partition that is away it is the end.
    """

    name: str
    pending: int
    inline: int
    fired: int
    entries: int
    ledgers: int
    stored_bytes: int
    index_bytes: int
    subscriptions: tuple[SubscriptionStats, ...]
    sent: int
    created_ms: int
    furthest_due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionStats:
    """A time partition: [start_ms, end_ms), its state ("future", "current", "closed", "deleting"), bytes on disk.

    holders: topics that have not released it, once it is closed. pending: messages not yet fired, those of deleted
    topics apart, which never are. away_bytes: of it that are in the copy alone (`max_local_bytes`).
    """

    start_ms: int
    end_ms: int
    state: str
    generation: int
    topics: int
    messages: int
    pending: int
    holders: int
    disk_bytes: int
    away_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store.

    pending: of all topics together. `commits` and `commit_requests` are the main environment's since it was opened:
    their ratio says how many writers shared a commit. suspended: what of the upkeep
    has failed, and is tried again later. sent, received, redelivered, acknowledged, dead_lettered, expired: of all
    topics and subscriptions that are there together, as their own figures say.
    disk_bytes: the space that the files take, and the sum of its parts: disk_main_bytes, disk_partitions_bytes (with
    their snapshots), disk_wal_bytes and disk_attempts_bytes (files made in full before they are written to), and
    disk_other_bytes (what is being built or removed).
    replica_lag_ms, replica_lag_bytes, replica_lag_groups: of a store with `replica`, how long the oldest change that is
    not in the copy has waited, and how much waits; 0: nothing does. replica_puts, replica_put_seconds,
    replica_failures: of log objects, since it was opened. replica_diverged: tails that this machine set aside as
    another led. replica_manifest_age_ms: since the newest manifest; None: there is none. replica_error: why nothing is
    shipped now. replica_epoch: in which this store leads; replica_leads: False while it refuses work, since another may
    lead. All are None where there is no replica.
    away_partitions, away_bytes: partitions that are in the copy alone, and what they take there.
    """

    topics: int
    partitions: int
    open_partitions: int
    loaded_partitions: int
    pending: int
    fired: int
    set_aside: int
    disk_bytes: int
    index_bytes: int
    commits: int
    commit_requests: int
    suspended: tuple[Suspension, ...] = ()
    sent: int = 0
    received: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    dead_lettered: int = 0
    expired: int = 0
    disk_main_bytes: int = 0
    disk_partitions_bytes: int = 0
    disk_wal_bytes: int = 0
    disk_attempts_bytes: int = 0
    disk_other_bytes: int = 0
    replica_lag_ms: int | None = None
    replica_lag_bytes: int | None = None
    replica_lag_groups: int | None = None
    replica_puts: int | None = None
    replica_put_seconds: float | None = None
    replica_failures: int | None = None
    replica_manifest_age_ms: int | None = None
    replica_error: str | None = None
    replica_epoch: int | None = None
    replica_leads: bool | None = None
    replica_diverged: int | None = None
    away_partitions: int = 0
    away_bytes: int = 0


class ReplicaFigures(NamedTuple):
    """Where the shipping of a store with `replica` stands; `StoreStats` has its fields after `replica_`."""

    lag_ms: int
    lag_bytes: int
    lag_groups: int
    puts: int
    put_seconds: float
    failures: int
    manifest_age_ms: int | None
    error: str | None
    epoch: int
    leads: bool
    diverged: int


@dataclass(frozen=True, slots=True)
class Overview:
    """A store at a glance, for a page that is looked at all the time (duelog/census.py says how old a figure may be).

    complete: False until everything was counted once. partitions_counted: of `partitions`, those whose messages are
    counted in `pending` so far. oldest_due_ms: when the
    oldest message of a backlog was due (epoch ms); None: there is none. sent_per_s, received_per_s: over the last ten
    seconds in which it was asked. late_median_ms, late_99_ms: how late the messages fired last were; None: none was,
    since it was first asked. disk_parts: bytes by the parts of `StoreStats`. The rest is as in `StoreStats` and
    `SubscriptionStats`.
    """

    complete: bool
    topics: int
    partitions: int
    partitions_counted: int
    pending: int
    backlog: int
    unacknowledged: int
    oldest_due_ms: int | None
    subscriptions: int
    consumers: int
    sent: int
    sent_per_s: float
    received_per_s: float
    received: int
    redelivered: int
    acknowledged: int
    dead_lettered: int
    expired: int
    fired: int
    late_median_ms: int | None
    late_99_ms: int | None
    index_bytes: int
    open_partitions: int
    max_open_partitions: int
    loaded_partitions: int
    disk_bytes: int
    disk_parts: dict[str, int]
    suspended: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic in a list of many, its subscriptions added up; names as in `TopicStats` and `SubscriptionStats`.

    oldest_due_ms: when the oldest message of a backlog was due (epoch ms); None: there is none.
    """

    name: str
    pending: int
    inline: int
    backlog: int
    unacknowledged: int
    oldest_due_ms: int | None
    subscriptions: int
    consumers: int
    sent: int
    received: int
    dead_lettered: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class TopicPage:
    """Some of the topics that were found. total: how many were found; known: how many the store has.

    complete: False until everything has been counted once: what is pending may be more by then.
    """

    total: int
    known: int
    complete: bool
    rows: tuple[TopicRow, ...]


@dataclass(frozen=True, slots=True)
class TopicTimelines:
    """Pending messages by due time of the topics that have most of them, and of all others together (`rest`)."""

    topics: tuple[str, ...]
    counts: tuple[list[int], ...]
    rest: list[int]


@dataclass(frozen=True, slots=True)
class TopicSurvey:
    """A topic among all that are surveyed at once.

    pending: messages not due yet, wherever they wait; in_partitions: those of them that all subscriptions wait for.
    stored_bytes: of the main log, and of partitions that have not fired all of theirs.
    """

    name: TopicName
    pending: int
    in_partitions: int
    stored_bytes: int
    index_bytes: int
    subscriptions: tuple[SubscriptionStats, ...]
    sent: int


@dataclass(frozen=True, slots=True)
class Receiving:
    """A subscription that has consumers. tasks: of workers, without what each runs and what failed."""

    topic: str
    subscription: SubscriptionStats
    tasks: tuple[TaskActivity, ...]


MOST_CLIENTS = 1_000
"""Connections that are listed, and producers and consumers of them."""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """A program that is connected to an open store.

    client: which client library it uses, and its version; name: what it calls itself, "": nothing; kind: "program",
    "worker" (it tells what its tasks do) or "pulsar". address: where it is. since_ms: when it came (epoch ms). permits:
    messages that it may be handed now. held: handed to it and not acknowledged. messages_in, messages_out: since it
    came; None: they are not counted by connection.
    """

    client: str
    name: str
    kind: str
    address: str
    since_ms: int
    producers: int
    consumers: int
    permits: int
    held: int
    messages_in: int | None
    messages_out: int | None
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClientPart:
    """A producer or a consumer of a connected program, at an address.

    subscription: of a consumer; None: it is a producer. permits, held: as of the program; None: of a producer.
    messages: sent by it, or handed to it, since it was opened; rate, bytes_rate: messages and bytes a second, over the
    last full period of the broker's rates. None: not counted.
    """

    address: str
    name: str
    topic: str
    subscription: str | None
    permits: int | None
    held: int | None
    messages: int | None
    rate: float | None
    bytes_rate: float | None


@dataclass(frozen=True, slots=True)
class LimitUse:
    """A limit of memory, in bytes, and what of it is in use. most: 0: there is none."""

    name: str
    used: int
    most: int


@dataclass(frozen=True, slots=True)
class Connections:
    """Who is connected, with what, and the limits that they share. total: how many there are; the first are listed."""

    connections: tuple[ClientStats, ...]
    parts: tuple[ClientPart, ...]
    limits: tuple[LimitUse, ...]
    total: int


class Keeper(NamedTuple):
    """One reason why a partition is kept. topic, subscription: "" where the reason concerns none.

    reason: "not over", "pending", "unreadable", "subscription", "open ledger", "retention" or "next tick". behind:
    messages not fired, or entries that the subscription has not passed.
    """

    reason: str
    topic: str
    subscription: str
    behind: int
    explanation: str


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """The saved delay indexes of a time partition, which spare the next start to read its logs.

    logs: of topics that have messages in it. loaded: how many of their delay indexes are in memory. saved: how many
    have a snapshot. unsaved: entries behind the snapshots, which a start reads. stored_bytes: of all snapshots.
    newest_ms: when the newest one was saved, None: there is none.
    """

    logs: int
    loaded: int
    saved: int
    unsaved: int
    stored_bytes: int
    newest_ms: int | None


def stats_of(
    partition: Partition, main: Reads, raw: Reads, topics: int, entries: int, now_ms: int
) -> PartitionStats | None:
    """Figures that ask nothing of what is pending; None: it is being deleted. entries: of all logs."""
    record = catalog.partition(main, partition.start_ms)
    if record is None or record.state is PartitionState.DELETING:
        return None
    passed = catalog.rows(raw, fmt.counter_key(catalog.PASSED_OVER))
    return PartitionStats(
        partition.start_ms,
        partition.end_ms,
        ("current" if partition.start_ms <= now_ms else "future") if record.state is PartitionState.OPEN else "closed",
        record.generation,
        topics,
        entries - sum(fmt.unpack_u64(fields) for _, fields in passed),
        0,
        record.references,
        size_bytes(partition.path),
        0 if partition.away is None else partition.away.size,
    )


@dataclass(eq=False, repr=False)
class Figures:
    """The figures of one open store, read from its parts. Thread-safe."""

    _storage: Storage
    _topics: Topics
    _firing: Firing
    _inline: InlineMessages
    _quarantined: Quarantine
    _clock: StoreClock
    _shipping: Shipping | None = None

    def of_subscription(
        self, topic: TopicState, state: SubscriptionState, not_due: Mapping[int, BitMap] | None = None
    ) -> SubscriptionStats:
        """O(ledgers after mark-delete), and the messages that wait inline.

        not_due: those, where they are known (`waiting`).
        """
        now_ms = self._clock.now_ms()
        if not_due is None:
            not_due = self._inline.waiting(topic, now_ms)
        tasks = state.tasks()
        began_ms = min((attempt.began_ms for task in tasks for attempt in task.attempts), default=now_ms)
        with state.lock:
            dispatcher = state.dispatcher
            inline = unacknowledged(state.acks, not_due)
            backlog = max(0, state.acks.backlog(topic.log) - inline)
            oldest_ms = first_due(self._storage.main, topic.log, state.acks, now_ms) if backlog else None
            return SubscriptionStats(
                state.name,
                state.type,
                state.consumers,
                state.acks.mark_delete,
                backlog,
                0 if dispatcher is None else dispatcher.outstanding_count,
                0 if dispatcher is None else dispatcher.awaiting_redelivery_count,
                inline,
                now_ms < state.paused_until_ms,
                state.pause_ends_ms(now_ms),
                0 if oldest_ms is None else now_ms - oldest_ms,
                **asdict(state.counts),
                longest_running_ms=max(now_ms - began_ms, 0) if tasks else None,
                fetching_ms=None if state.reader is None else state.reader.days.fetching_ms,
            )

    def receiving(self, namespace: str | None = None) -> list[Receiving]:
        """The subscriptions of a namespace, or of all, that have consumers, by topic; O(topics in memory)."""
        return [
            Receiving(
                str(topic.name),
                self.of_subscription(topic, state),
                tuple(replace(task, attempts=(), failures=()) for task in state.tasks()),
            )
            for topic in sorted(self._topics.loaded(), key=lambda topic: topic.name)
            if namespace in (None, topic.name.namespace_name)
            for _, state in sorted(topic.subscriptions.items())
            if state.consumers
        ]

    def pending_of(self, topic_id: int) -> int:
        """Messages of a topic in partitions that have not fired; O(partitions), each opened if it is not."""
        pending = 0
        for partition in self._open_partitions():
            log = partition.log(topic_id)
            if log is not None:
                pending += self.pending_in(partition, log)
        return pending

    def all_pending_of(self, topic_id: int) -> tuple[int, int]:
        """Messages of a topic that are not due yet, and how many of them wait inline; as `pending_of`."""
        topic = self._topics.by_id(topic_id)
        inline = 0 if topic is None else self._inline.count(topic, self._clock.now_ms())
        return self.pending_of(topic_id) + inline, inline

    def survey(self) -> Iterator[TopicSurvey]:
        """The topics in memory, each once; O(partition logs + topics), each partition opened if it is not."""
        pending: dict[int, int] = {}
        stored: dict[int, int] = {}
        for partition in self._open_partitions():
            for log in partition.logs():
                pending[log.topic_id] = pending.get(log.topic_id, 0) + self.pending_in(partition, log)
                stored[log.topic_id] = stored.get(log.topic_id, 0) + log.ledger.stored_bytes
        memory = self._firing.loaded.memory_by_topic()
        for topic in self._topics.loaded():
            not_due = self._inline.waiting(topic, self._clock.now_ms())
            in_partitions = pending.get(topic.topic_id, 0)
            ledgers = topic.log.ledgers()
            tracker = topic.tracker
            yield TopicSurvey(
                topic.name,
                in_partitions + sum(map(len, not_due.values())),
                in_partitions,
                stored.get(topic.topic_id, 0) + sum(ledger.stored_bytes for ledger in ledgers),
                memory.get(topic.topic_id, 0) + (0 if tracker is None else tracker.memory_bytes()),
                tuple(self.of_subscription(topic, state, not_due) for _, state in sorted(topic.subscriptions.items())),
                topic.sent,
            )

    def firing_lag_ms(self) -> int:
        """How long the message of a loaded partition that is due first has been due; 0: none is.

        A few milliseconds where all goes well. Takes the lock of each log in memory.
        """
        dues = [log.next_due_ms() for logs in list(self._firing.loaded.logs.values()) for log in list(logs.values())]
        return max(self._clock.now_ms() - min((each for each in dues if each), default=2**62), 0)

    def _open_partitions(self) -> Iterator[Partition]:
        return self._storage.partitions.held(lambda partition: partition.state is PartitionState.OPEN, partial=True)

    def pending_in(self, partition: Partition, log: PartitionLog) -> int:
        # What has fired is asked for first: entries that come meanwhile then count as pending, not below zero.
        with self._storage.main.read() as raw:
            frontier = catalog.frontier(raw, log.topic_id, partition.start_ms)
            cancelled = len(members(raw, fmt.Table.CANCELLED, log.ledger_id))
        newest = partition.log(log.topic_id) or log
        return newest.ledger.entries - cancelled - (0 if frontier is None else frontier.fired)

    def index_bytes(self, topic: TopicState) -> int:
        tracker = topic.tracker
        return self._firing.loaded.memory_bytes(topic.topic_id) + (0 if tracker is None else tracker.memory_bytes())

    def of_topic(self, topic: TopicState) -> TopicStats:
        """O(partitions + ledgers), and the messages that wait inline."""
        ledgers = topic.log.ledgers()
        not_due = self._inline.waiting(topic, self._clock.now_ms())
        inline = sum(map(len, not_due.values()))
        with self._storage.main.read() as raw:
            fired = sum(frontier.fired for _, _, frontier in catalog.frontiers(raw, topic.topic_id))
            record = catalog.find_topic(raw, str(topic.name))
        return TopicStats(
            str(topic.name),
            self.pending_of(topic.topic_id) + inline,
            inline,
            fired,
            sum(ledger.entries for ledger in ledgers),
            len(ledgers),
            sum(ledger.stored_bytes for ledger in ledgers),
            self.index_bytes(topic),
            tuple(self.of_subscription(topic, state, not_due) for _, state in sorted(topic.subscriptions.items())),
            topic.sent,
            0 if record is None else record.created_ms,
            self._inline.furthest_due_ms(topic),
        )

    def of_partitions(self) -> list[PartitionStats]:
        """Every partition, by start; O(logs), each partition opened if it is not."""
        now_ms, found = self._clock.now_ms(), []
        for partition in self._storage.partitions.held(partial=True):
            logs = partition.logs()
            with self._storage.main.read() as main, partition.environment.read() as raw:
                stats = stats_of(partition, main, raw, len(logs), sum(log.ledger.entries for log in logs), now_ms)
                there = [log for log in logs if catalog.topic_name(main, log.topic_id) is not None]
            if stats is not None:
                there = [] if stats.state == "closed" else there
                found.append(replace(stats, pending=sum(self.pending_in(partition, log) for log in there)))
        return found

    def _count_quarantined(self) -> int:
        found = {(ledger_id, entry_id) for ledger_id, entry_id, _ in self._quarantined.items()}
        for page in catalog.pages(self._storage.main, fmt.prefix(fmt.Table.SET_ASIDE)):
            found |= {(fmt.leading_u64(key), fmt.trailing_u32(key)) for key, _ in page}
        return len(found)

    def of_store(self) -> StoreStats:
        """O(partition logs + topics), and the messages that wait inline. Loads every topic."""
        partitions = self.of_partitions()
        topics = inline = sent = 0
        delivered = DeliveryCounts()
        for name in self._topics.names():
            topic = self._topics.find(TopicName.parse(name))
            topics += 1
            if topic is not None:
                inline += self._inline.count(topic, self._clock.now_ms())
                sent += topic.sent
                for state in topic.followers:
                    delivered += state.counts
        counts = self._storage.main.counts if self._storage.main.log is None else self._storage.main.log.counts
        parts, replica = disk_parts(self._storage.path), self.replica()
        stats = StoreStats(
            topics,
            len(partitions),
            self._storage.partitions.open_count(),
            len(self._firing.loaded.loaded_starts()),
            sum(partition.pending for partition in partitions) + inline,
            self._firing.fired,
            self._count_quarantined(),
            sum(parts.values()),
            self._firing.loaded.memory_bytes(),
            counts.commits,
            counts.requests,
            tuple(self._firing.suspensions.all()),
            sent,
            *astuple(delivered),
        )
        more: dict[str, Any] = {f"disk_{part}_bytes": size for part, size in parts.items()}
        more |= {"away_partitions": sum(each.away_bytes > 0 for each in partitions)}
        more |= {"away_bytes": sum(each.away_bytes for each in partitions)}
        if replica is not None:
            more |= {f"replica_{name}": value for name, value in replica._asdict().items()}
        return replace(stats, **more)

    def replica(self) -> ReplicaFigures | None:
        """Where shipping stands; None: the store has no replica."""
        if self._shipping is None:
            return None
        from .replica.replica_status import tails_of  # noqa: PLC0415 - only a store with a replica needs it

        state, diverged = self._shipping.state(), len(tails_of(self._storage.path))
        taken_ms = state.manifest_ms
        age_ms = None if taken_ms is None else max(self._clock.now_ms() - taken_ms, 0)
        lag = state.lag_ms, state.lag_bytes, state.lag_groups
        counts = state.puts, state.put_seconds, state.failures
        return ReplicaFigures(*lag, *counts, age_ms, state.error, state.epoch, state.leads, diverged)

    def away_bytes(self) -> int:
        """Bytes of partitions that are in the copy alone."""
        return sum(each.away.size for each in self._storage.partitions if each.away is not None)

    # -- why a partition is kept -------------------------------------------------------------------

    def snapshots(self, start_ms: int) -> SnapshotStats:
        """See `DelayedStore.snapshots`."""
        with self._partition(start_ms) as partition, self._storage.partitions.lease(partition, partial=True):
            logs = partition.logs()
            found = list(inspect_snapshots(partition.environment))
        saved = {each.ledger_id: each.metadata for each in found if each.metadata is not None}  # the newest comes last
        tails = {ledger_id: metadata.tail for ledger_id, metadata in saved.items()}
        loaded = list(self._firing.loaded.logs.get(start_ms, {}).values())
        return SnapshotStats(
            logs=len(logs),
            loaded=sum(log.loaded for log in loaded),
            saved=len(saved),
            unsaved=sum(log.ledger.entries - tails.get(log.ledger_id, 0) for log in logs),
            stored_bytes=sum(each.stored_bytes for each in found),
            newest_ms=max((metadata.created_ms for metadata in saved.values()), default=None),
        )

    @contextmanager
    def _partition(self, start_ms: int) -> Iterator[Partition]:
        """The partition that begins at a time. Raises InvalidArgument: there is none, or it is deleted meanwhile."""
        partition = self._storage.partitions.get(start_ms) if isinstance(start_ms, int) else None
        if partition is not None:
            try:
                yield partition
            except DamagedStore:
                if self._storage.partitions.registered(partition):
                    raise
            else:
                return
        raise InvalidArgument("start_ms", start_ms, "no time partition begins there")

    def kept_by(self, start_ms: int) -> list[Keeper]:
        """Every reason there is; without any the next tick deletes it. Raises InvalidArgument: there is no such one."""
        with self._partition(start_ms) as partition:
            if partition.state is PartitionState.OPEN:
                reasons = list(self._unfired(partition))
                if partition.end_ms > self._clock.now_ms():
                    reasons.insert(0, Keeper("not over", "", "", 0, "messages may still fall due in it"))
            else:
                reasons = list(self._unpassed(partition))
        return reasons or [Keeper("next tick", "", "", 0, "nothing keeps it: the next tick goes on with it")]

    def _unfired(self, partition: Partition) -> Iterator[Keeper]:
        with self._storage.partitions.lease(partition, partial=True):
            for log in partition.logs():
                topic = self._topics.by_id(log.topic_id)
                count = self.pending_in(partition, log)
                if topic is not None and count:
                    yield Keeper("pending", str(topic.name), "", count, f"{count:,} messages have not fired")

    def _unpassed(self, partition: Partition) -> Iterator[Keeper]:
        with self._storage.main.read() as raw:
            frontiers = [
                (topic_id, record)
                for topic_id, start_ms, record in catalog.frontiers(raw)
                if start_ms == partition.start_ms
            ]
            quarantined = [
                (fmt.leading_u64(key), fmt.trailing_u32(key))
                for _, record in frontiers
                for key, _ in catalog.rows(raw, fmt.quarantine_key(record.ledger_id, 0)[:-4])
            ]
        for ledger_id, entry_id in quarantined:
            where = f"entry {entry_id} of ledger {ledger_id} in {directory_name(partition.start_ms)}"
            yield Keeper("unreadable", "", "", 1, f"{where} is quarantined: `duelog repair` discards it")
        for topic_id, record in frontiers:
            topic = self._topics.by_id(topic_id)
            ledgers = [] if topic is None or record.released else topic.log.ledgers()
            # Where the ledger is trimmed the next tick releases the partition.
            if topic is not None and any(each.ledger_id == record.marker_ledger for each in ledgers):
                yield from holding(str(topic.name), record.marker_ledger, ledgers, _marks(topic))


def holding(
    topic: str, ledger_id: int, ledgers: Sequence[LedgerInfo], marks: Iterable[tuple[str, Position]]
) -> list[Keeper]:
    """Say what of a topic keeps a closed partition whose last marker is in a ledger, one of the topic.

    marks: subscriptions with their mark-delete positions.
    """
    (last,) = (each for each in ledgers if each.ledger_id == ledger_id)
    slow = []
    for name, mark in marks:
        if mark < Position(ledger_id, last.entries - 1):
            after = [each for each in ledgers if mark.ledger_id <= each.ledger_id <= ledger_id]
            passed = mark.entry_id + 1 if after and after[0].ledger_id == mark.ledger_id else 0
            behind = max(sum(each.entries for each in after) - passed, 0)
            done = f"nothing from ledger {mark.ledger_id} on"
            if mark.entry_id >= 0:
                done = f"up to entry {mark.entry_id} of ledger {mark.ledger_id}"
            why = f"has acknowledged {done}; the partition's last marker is in ledger {ledger_id}"
            slow.append(Keeper("subscription", topic, name, behind, why))
    if slow:
        return slow
    where = f"its last marker is in ledger {ledger_id} of the main log, which"
    if not last.closed:
        return [Keeper("open ledger", topic, "", 0, f"{where} is still written to: it is closed by size or age")]
    return [Keeper("retention", topic, "", 0, f"{where} every subscription has passed: retention keeps it")]


def _marks(topic: TopicState) -> Iterator[tuple[str, Position]]:
    for name, state in sorted(topic.subscriptions.items()):
        with state.lock:
            yield name, state.acks.mark_delete
