"""DelayedStore: the open store, and the way to everything in it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self

from duelog.markers.firing.suspensions import Suspension
from duelog.store.clock import Clock, SystemClock
from duelog.store.config import StoreConfig
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import ClosedError, InvalidArgument, ReadOnly, checked_list
from duelog.store.files.directory import checked_path
from duelog.store.files.system_errors import explained
from duelog.store.log import catalog
from duelog.store.log.documents import Documents
from duelog.store.message import Message
from duelog.store.names import SCHEME, TopicName, validate_namespace_name
from duelog.store.policy.policies import DelayedDeliveryPolicies, EffectivePolicies, Policies, PolicyChange
from duelog.store.policy.policy_records import Scope
from duelog.store.position import MessageId

from .backup import BackupResult, back_up
from .check.check_store import Finding, check
from .engine import Engine, begin_tiers, open_engine, writing
from .metrics import Instruments, StoreMetrics
from .operations.operations import EntryReader, Operations
from .operations.wire_peer import Admit
from .sending.log_append import GroupAlso
from .stats import (
    MOST_CLIENTS,
    Connections,
    Keeper,
    Overview,
    PartitionStats,
    Receiving,
    SnapshotStats,
    StoreStats,
    TopicPage,
    TopicTimelines,
)
from .topic import Topic
from .topics.dead_letters import DeadLetter, Letters, checked_letters
from .topics.topic_events import TopicEvent
from .transactions import Transaction
from .upkeep.jobs import Jobs
from .upkeep.maintenance import TickResult

if TYPE_CHECKING:
    import ssl


def _begin_shipping(engine: Engine) -> None:
    if engine.shipping is not None:
        from .replica.manifest_files import begin_shipping  # noqa: PLC0415 - only a store with a replica needs it

        begin_shipping(engine, engine.shipping)
    else:
        begin_tiers(engine)


class DelayedStore:
    """A directory of messages that are due later, open in this process.

    One process writes; others may open it read-only. Thread-safe. A context manager; not to be used in a
    child process after fork.
    """

    def __init__(self, engine: Engine | None = None, *_: object, **__: object) -> None:
        """Use DelayedStore.open; raises TypeError, which says so."""
        if not isinstance(engine, Engine):
            given = "path" if engine is None else repr(engine)
            raise TypeError(f"a store is opened by DelayedStore.open({given})")
        self._engine = engine
        self._jobs = Jobs(engine.storage.path, engine.clock.now_ms)
        self.topic_deleter: Callable[[str, bool], object] | None = None
        """How `duelog topics delete` of another process deletes: of a front, which knows a topic's clients.

        Called with the topic's name and `force`, in a thread that may wait. Raises a DuelogError that says why not.
        """
        self.other_connections: Callable[[], Connections] | None = None
        """Tells who else is connected: a broker sets it."""
        self.entry_reader: EntryReader | None = None
        """Shows a message that a client of another protocol has sent: whoever knows that protocol sets it."""
        engine.start_control(self, Operations(self).ask)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: StoreConfig | None = None,
        *,
        clock: Clock | None = None,
        read_only: bool = False,
    ) -> Self:
        """Open the store in directory `path`, or make one where there is none or the directory is empty.

        Finishes what a crash left. Time does not depend on how much is pending. Raises StoreLocked (another process
        writes), AlreadyOpen (this one has it open), FormatMismatch (no store, a later format, another partition_ms),
        DamagedStore, StoreFull, StoreUnavailable (no permission, no descriptor, a path that cannot be used),
        InvalidArgument (the directory is a standby's, which does not lead).
        """
        where = checked_path("path", path)
        if config is not None and not isinstance(config, StoreConfig):
            raise InvalidArgument("config", config, "expected a StoreConfig or None")
        if clock is not None and not isinstance(clock, Clock):
            raise InvalidArgument("clock", clock, "expected a Clock or None")
        engine: Engine | None = None
        try:
            with explained(where):
                config, clock = config or StoreConfig(), clock or SystemClock()
                engine = open_engine(where, config, clock, read_only=read_only, begin=_begin_shipping)
                store = cls(engine)
            return store
        except BaseException:  # an interrupt too: nobody else could close it
            if engine is not None:
                engine.close()
            raise

    @property
    def path(self) -> Path:
        return self._engine.storage.path

    @property
    def config(self) -> StoreConfig:
        return self._engine.storage.config

    @property
    def clock(self) -> Clock:
        """The store's clock: it never goes back behind what has fired."""
        return self._engine.clock

    @property
    def jobs(self) -> Jobs:
        """Commands that read the whole store, in processes of their own."""
        return self._jobs

    def topic(self, name: str) -> Topic:
        """The topic of a name, which need not exist. Raises InvalidArgument.

        `persistent://tenant/namespace/name`, `tenant/namespace/name`, or a short name in public/default.
        """
        self._engine.check_open()
        return Topic(self._engine, TopicName.parse(name))

    def topics(self, namespace: str | None = None, pattern: str | None = None) -> Iterator[Topic]:
        """Topics that exist, in order of full name, without building a list (PIP-442).

        namespace: only those of `tenant/namespace`. pattern: only those whose full name it matches
        (re.search). Raises InvalidArgument.
        """
        self._engine.check_open()
        search = checked_pattern(pattern).search
        prefix = SCHEME if namespace is None else f"{SCHEME}{validate_namespace_name(namespace)}/"
        names = self._engine.topics.names(prefix)
        return (Topic(self._engine, TopicName.parse(name)) for name in names if search(name))

    @writing
    def create_topics(self, names: Iterable[str]) -> list[bool]:
        """Create topics, as `Topic.create`, in one commit; whether each was made. Raises InvalidArgument: none was."""
        found = list(map(TopicName.parse, checked_list("names", names, "names of topics")))
        return self._engine.topics.create(found, self._engine.writing_at())

    def on_topics(self, callback: Callable[[list[TopicEvent]], object]) -> Callable[[], None]:
        """Have `callback` hear which topics are created and deleted from now on; call what is returned to end that.

        It gets one or more events at a time, in the order of the commits, each once, none left out, from a thread of
        its own that holds no lock: it may use the store, and should be quick, as what it has not taken waits in memory.
        An error that it raises is logged. A program that lists `topics` after this call, and then takes the events
        (which may tell again of what it has listed), misses none. Closing calls it for what it has not heard. Raises
        ClosedError, ReadOnly, InvalidArgument, ResourceShortage.
        """
        self._engine.check_writable()
        if not callable(callback):
            raise InvalidArgument("callback", callback, "expected something to be called")
        return self._engine.topic_events.listen(callback)

    @writing
    def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages and subscriptions, and release all it holds. Raises UnknownTopic."""
        self._engine.upkeep.removal.remove_topic(self._engine.topics.get(TopicName.parse(name)))

    def send_batch(
        self, messages: Iterable[tuple[str | Topic, Message]], *, allow_past: bool = False
    ) -> list[MessageId]:
        """Append messages to several topics as one atomic group: after a crash all of them are there, or none.

        messages: (topic, message), the topic by name or as `topic` gives it; topics that do not exist come into being.
        Returns the ids in the order of the messages, once all are as durable as the store's `durability` says. All are
        checked before anything is written. `allow_past`, and a message's `dedup_key`: as in `Topic.send` and
        `Topic.send_batch`. Raises InvalidMessage naming the first that cannot be taken (`messages[3].deliver_at`),
        InvalidArgument where they may be more than one group takes (`StoreConfig.wal_bytes`), DelayTooLong, StoreFull,
        StoreFailed; then none was appended.
        """
        return self._send_batch(messages, allow_past=allow_past)

    def _send_once(self, producer: str, number: int, messages: Any, *, allow_past: bool = False) -> Any:
        """`send_batch` under a number of a connection; None: it is stored already."""
        return self._engine.sending.producers.once(
            producer,
            number,
            lambda also: self._send_batch(messages, allow_past=allow_past, also=lambda group, _: also(group)),
        )

    def _send_batch(self, messages: Any, *, allow_past: bool, also: GroupAlso | None = None) -> list[MessageId]:
        engine = self._engine
        engine.check_writable()
        if isinstance(messages, (Message, str, bytes)) or not isinstance(messages, Iterable):
            raise InvalidArgument("messages", messages, "expected a sequence of (topic, Message)")
        names: dict[TopicName, int] = {}
        places: dict[str | Topic, int] = {}  # by what was given
        owners: list[int] = []
        checked: list[Message] = []
        for pair in messages:
            try:
                given, message = pair
                place = places.get(given)
            except (TypeError, ValueError):
                raise InvalidArgument(f"messages[{len(checked)}]", pair, "expected (topic, Message)") from None
            if place is None:
                if not isinstance(given, (str, Topic)):
                    raise InvalidArgument(f"messages[{len(checked)}]", given, "expected a topic, or its name")
                name = _name_in(engine, given) if isinstance(given, Topic) else TopicName.parse(given)
                place = places[given] = names.setdefault(name, len(names))
            owners.append(place)
            checked.append(message)
        ids = engine.sending.store.send(list(names), owners, checked, allow_past=allow_past, also=also).to_list()
        self._engine.settle(*names)
        return ids

    def transaction(self) -> Transaction:
        """Begin to collect operations that are stored together when the block ends, or not at all.

            with store.transaction() as transaction:
                transaction.ack(message)
                transaction.cancel_key("order-timeouts", "order-7")
                transaction.send("invoices", b"order-7", deliver_after=86_400)

        Raises ReadOnly, ClosedError, StoreFailed; what its end raises: see `Transaction`.
        """
        return Transaction(self._engine)

    @writing
    def set_policies(
        self,
        policies: DelayedDeliveryPolicies,
        *,
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        expected: DelayedDeliveryPolicies | EllipsisType | None = ...,
    ) -> None:
        """Set policies for a namespace, a topic, a subscription of `topic`, or with none of them the store.

        `Policies` replace all that is set there, `DelayedDeliveryPolicies` the delay policies (PIP-437) alone. Durable
        when it returns, kept by the store and in force at once: for what is sent after it (messages that wait keep
        their due times), for subscriptions that are open, and for what retention keeps. The namespace, topic or
        subscription need not exist.

        expected: set them only if this is what is set there (None: nothing is), in one step; else PoliciesChanged is
        raised, with both. Left out: whatever is set there. Raises InvalidArgument, StoreFull, StoreFailed.
        """
        if not isinstance(policies, DelayedDeliveryPolicies):
            raise InvalidArgument("policies", policies, "expected Policies or DelayedDeliveryPolicies")
        if not isinstance(expected, (DelayedDeliveryPolicies, EllipsisType)) and expected is not None:
            raise InvalidArgument("expected", expected, "expected Policies, DelayedDeliveryPolicies or None")
        scope = Scope.of(namespace, topic, subscription)
        self._engine.policies.set(scope, policies, expected)
        self._engine.upkeep.policy_changes.follow(scope)

    @writing
    def update_policies(
        self,
        /,
        *,
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        **values: PolicyChange,
    ) -> Policies:
        """Set single fields of `Policies` at a scope, durably, and leave the others; None unsets a field.

        So `update_policies(topic="reminders", retention_ms=timedelta(days=7), ttl_ms=None)` has a topic keep for a week
        and live as long as its namespace says. Returns what is set there then. Raises as `set_policies`.
        """
        scope = Scope.of(namespace, topic, subscription)
        updated = self._engine.policies.update(scope, values)
        self._engine.upkeep.policy_changes.follow(scope)
        return updated

    def policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> Policies | None:
        """The policies set at just this scope; None: none are. Raises InvalidArgument."""
        self._engine.check_open()
        return self._engine.policies.get(Scope.of(namespace, topic, subscription))

    def all_policies(self) -> dict[str, Policies]:
        """The policies set at each scope, by its name: "store", "namespace a/b", "topic persistent://a/b/c", ...

        A subscription's is "subscription NAME of topic persistent://a/b/c".
        """
        self._engine.check_open()
        return {str(scope): policies for scope, policies in self._engine.policies.all()}

    @writing
    def remove_policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> bool:
        """Remove the policies set at a scope, durably; False: none were. Raises as `set_policies`."""
        scope = Scope.of(namespace, topic, subscription)
        removed = self._engine.policies.remove(scope)
        self._engine.upkeep.policy_changes.follow(scope)
        return removed

    def effective_policies(self, topic: str, subscription: str | None = None) -> EffectivePolicies:
        """The policies in force for a topic or a subscription, and by field at which scope each was set.

        Raises InvalidArgument.
        """
        self._engine.check_open()
        scope = Scope.of(topic=topic, subscription=subscription)
        return self._engine.policies.effective(TopicName.parse(topic), scope.subscription)

    @property
    def documents(self) -> Documents:
        """Small durable records of the program's own, changed by compare-and-set; in the store's checks and copies."""
        return self._engine.documents

    def dead_letters(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        *,
        reason: str | None = None,
        key: str | None = None,
        older_than: Duration | None = None,
    ) -> Iterator[DeadLetter]:
        """Dead letters that are neither requeued nor purged, by dead-letter topic, oldest first; also read-only.

        Only those from `topic` and `subscription`, with `reason` and `key`, dead for `older_than` (seconds or a
        timedelta). O(entries that dead-letter topics hold, and subscriptions of the store). Raises InvalidArgument.
        """
        self._engine.check_open()
        before_ms = None if older_than is None else self._engine.clock.now_ms() - duration_ms("older_than", older_than)
        origin = None if topic is None else TopicName.parse(topic)
        return self._engine.delivery.dead_letters.held(origin, subscription, reason, key, before_ms)

    @writing
    def requeue_dead_letters(self, letters: Letters, *, delay: Duration = 0) -> int:
        """Move dead letters back to where they came from, due in `delay`, atomically; how many.

        Only the subscription that a letter came from gets it, its attempts from 0; one moved before is passed over.
        Raises UnknownTopic, UnknownSubscription, InvalidArgument, StoreFull, StoreFailed; then nothing was moved.
        """
        return self._engine.delivery.dead_letters.requeue(checked_letters(letters), duration_ms("delay", delay))

    @writing
    def purge_dead_letters(self, letters: Letters) -> int:
        """Drop dead letters for good, in one transaction; how many were dropped. Raises as `requeue_dead_letters`."""
        return self._engine.delivery.dead_letters.purge(checked_letters(letters))

    def tick(self) -> TickResult:
        """Do whatever is due now: fire, close, trim, delete, persist; and say what it did and what is next.

        For programs and tests that drive the store themselves; harmless beside the background thread.
        Raises ClockJumped, StoreFull, StoreFailed; what was done stands. Whatever else fails is suspended and tried
        again after a pause, the rest is done, and the result's `suspended` says what it is.
        """
        self._engine.check_writable()
        return self._engine.upkeep.maintenance.tick()

    def accept_clock(self) -> None:
        """Go on firing by the clock as it is now, after ClockJumped."""
        self._engine.check_writable()
        self._engine.upkeep.maintenance.accept_clock()
        self._engine.waking.wakeups.wake()

    def hand_over(self) -> None:
        """Ship what was written, and resign: a standby leads at once, and this store stops with StoreFailed.

        `duelog serve --standby` then follows; it leads again where nobody has for `lease_ms`. Raises InvalidArgument
        for a store that holds no lease; NotReplicated: what was written is not in the copy, and nobody leads before
        the lease has passed.
        """
        self._engine.hand_over()

    def save_snapshots(self) -> int:
        """Save the delay indexes in memory of which the next start would have to read much; how many were saved.

        The store does so by itself from time to time and when it is closed. Raises StoreFailed.
        """
        self._engine.check_writable()
        with self._engine.upkeep.maintenance.lock:
            return self._engine.delivery.firing.loaded.save_all(self._engine.clock.now_ms())

    @writing
    def flush(self) -> None:
        """Persist every acknowledgement taken so far. Raises StoreFull, StoreFailed."""
        self._engine.delivery.flusher.flush()

    def check(self, *, deep: bool = False, progress: Callable[[int, int], object] | None = None) -> Iterator[Finding]:
        """Every problem found in the store, as values; nothing is changed. Also for stores open read-only.

        `deep` reads and decodes every body too. O(headers of the entries); deep: O(bytes). Until it is done
        nothing fires in this process, and the main environment's file does not reuse its pages. progress: called with
        how many partitions have been read, and of how many.
        """
        self._engine.check_open()
        engine = self._engine
        with explained(self.path), engine.upkeep.maintenance.lock:
            findings = check(
                engine.storage.path,
                engine.storage.store_id,
                engine.storage.main,
                engine.storage.partitions,
                engine.delivery.firing.suspensions,
                engine.delivery.quarantine,
                read_only=engine.storage.read_only,
                deep=deep,
                progress=progress,
            )
            return iter(list(findings))

    def save_manifest(self) -> int:
        """Have the copy (`StoreConfig.replica`) get a manifest as of now; the store's time at its instant.

        It is a backup that uploads what has changed since the one before, and takes the space of one file at a time:
        `duelog restore URL DIR` begins with it. Raises InvalidArgument (the store has no copy), ReplicaUnreachable,
        ReplicaRefused, StoreBusy, StoreFull.
        """
        self._engine.check_writable()
        if self._engine.shipping is None:
            raise InvalidArgument("replica", None, "the store is open without a copy")
        with explained(self.path):
            return self._engine.shipping.save_manifest().taken_ms

    def backup(self, dest: str | os.PathLike[str]) -> BackupResult:
        """Copy the store into directory `dest`, absent or empty, while it is in use; the copy is a store of its own.

        It is the store as of one instant after the call: what was sent, fired, cancelled and acknowledged on disk by
        then, and nothing that came later. Sending, firing and receiving go on; partitions are not deleted until it is
        done, and maps do not grow. O(bytes). Also for stores open read-only. Raises InvalidArgument, StoreFull,
        StoreBusy (another process wrote without a pause for a minute), DamagedStore.
        """
        self._engine.check_open()
        where = checked_path("dest", dest)
        with explained(where):
            return back_up(self._engine, where)

    def stats(self) -> StoreStats:
        """Figures of the store; O(partition logs)."""
        self._engine.check_open()
        with explained(self.path):
            return self._engine.figures.of_store()

    def overview(self) -> Overview:
        """The store at a glance, at a bounded cost: for what asks again and again."""
        self._engine.check_open()
        with explained(self.path):
            return self._engine.census.overview()

    def timeline(self, start_ms: int, step_ms: int, bars: int, topic: str | None = None) -> list[int]:
        """Count the pending messages of a topic, or of all, that are due in each of `bars` steps from `start_ms` on.

        Those due before count in the first bar. A step finer than a partition's span is exact to the minute; else each
        partition counts in the bar in which its middle lies. At a bounded cost, as `overview`: of a large store counts
        may be a while old. Raises InvalidArgument: also for a step finer than a partition far ahead; UnknownTopic.
        """
        self._engine.check_open()
        with explained(self.path):
            return self._engine.census.timeline(start_ms, step_ms, bars, topic)

    def timeline_by_topic(self, start_ms: int, step_ms: int, bars: int, most: int = 5) -> TopicTimelines:
        """Count as `timeline`, apart for at most `most` of the topics that have most. Raises InvalidArgument.

        They are looked for among those that have most in the partitions that the steps touch, and waiting inline.
        """
        self._engine.check_open()
        with explained(self.path):
            return self._engine.census.timeline_by_topic(start_ms, step_ms, bars, most)

    def topic_rows(
        self,
        search: str = "",
        *,
        namespace: str | None = None,
        sort: str = "name",
        descending: bool = False,
        offset: int = 0,
        limit: int = 50,
    ) -> TopicPage:
        """List topics whose names contain `search`, in whatever case, by a field of `TopicRow`: a page of them.

        namespace: only its topics; `known` counts those. At a bounded cost, as `overview`. Raises InvalidArgument.
        """
        self._engine.check_open()
        with explained(self.path):
            return self._engine.census.topic_rows(search, namespace, sort, descending, offset, limit)

    def calendar(self) -> list[PartitionStats]:
        """The time partitions, by start, as `partitions`, at a bounded cost as `overview`."""
        self._engine.check_open()
        with explained(self.path):
            return self._engine.census.partitions()

    def receiving(self, namespace: str | None = None) -> list[Receiving]:
        """The subscriptions of a namespace, or of all, that have consumers, by topic; O(topics in memory)."""
        self._engine.check_open()
        return self._engine.figures.receiving(namespace)

    def connections(self) -> Connections:
        """Who is connected: by `duelog.connect`, and to the broker that serves the store, where there is one.

        At most 1,000 of each, and 1,000 of their producers and consumers.
        """
        self._engine.check_open()
        control = self._engine.control
        ours = [] if control is None else control.clients()
        mine = () if control is None else itertools.islice(control.client_parts(), MOST_CLIENTS)
        others = Connections((), (), (), 0) if self.other_connections is None else self.other_connections()
        return Connections(
            (*ours[:MOST_CLIENTS], *others.connections),
            (*mine, *others.parts),
            others.limits,
            len(ours) + others.total,
        )

    def report_to(self, instruments: Instruments) -> StoreMetrics:
        """Have metrics counted by instruments of one's own as well, until what is returned is closed."""
        self._engine.check_open()
        if self._engine.metrics is None:
            raise ReadOnly(f"store {self.path}")
        return self._engine.metrics.report_to(instruments)

    def suspended(self) -> list[Suspension]:
        """The upkeep that has failed and is tried again later, the longest suspended first. O(result); no reads."""
        self._engine.check_open()
        return self._engine.delivery.firing.suspensions.all()

    def partitions(self) -> list[PartitionStats]:
        """Every time partition, by start; O(partition logs)."""
        self._engine.check_open()
        with explained(self.path):
            return self._engine.figures.of_partitions()

    def kept_by(self, start_ms: int) -> list[Keeper]:
        """Why the time partition that begins at `start_ms` is still there. O(topics in it). Raises InvalidArgument."""
        self._engine.check_open()
        return self._engine.figures.kept_by(start_ms)

    def snapshots(self, start_ms: int) -> SnapshotStats:
        """The saved delay indexes of the time partition that begins at `start_ms`. O(topics in it).

        Raises InvalidArgument.
        """
        self._engine.check_open()
        with explained(self.path):
            return self._engine.figures.snapshots(start_ms)

    def _await_copy(self) -> None:
        self._engine.settle()

    def _numbered(self, beginning: str) -> set[tuple[str, str]]:
        """(topic, name) of the producers whose names begin so; topic "": those of the whole store. O(producers)."""
        names = {record.topic_id: str(name) for name, record in catalog.topic_names(self._engine.storage.main)}
        known = {0: "", **names}
        producers = self._engine.sending.producers.stored()
        return {(known[of], name) for of, name in producers if of in known and name.startswith(beginning)}

    def _forget_numbers(self, topic: str, producers: Iterable[str]) -> None:
        """Forget the numbers of connections that have ended; topic "": those of the whole store."""
        known = self._engine.sending.producers
        found = self._engine.topics.find(TopicName.parse(topic)) if topic else known.whole_store
        if found is not None:
            known.forget(found, producers)

    def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None, admit: Admit) -> int:
        """Take `duelog.connect` over TCP until the store is closed; the port, which the system chooses for 0.

        tls: certificates, None: nothing is encrypted. admit: given a client's method ("token", "none") and credentials,
        it gives what checks each of its requests (operations/wire_peer.py); `duelog serve --listen` has that of the
        broker. Raises InvalidArgument where the store has no control socket; OSError.
        """
        self._engine.check_writable()
        if self._engine.control is None:
            raise InvalidArgument("control", self.config.control, "the store takes no connections")
        return self._engine.control.listen(host, port, tls, admit)

    def close(self) -> None:
        """Persist acknowledgements and close. Waiting receivers get ClosedError. A second call does nothing."""
        self._jobs.close()
        self._engine.close()

    @property
    def closed(self) -> bool:
        return self._engine.closed

    def __enter__(self) -> Self:
        if self._engine.closed:
            raise ClosedError(f"store {self.path}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DelayedStore {self.path}{', closed' if self._engine.closed else ''}>"


def checked_pattern(pattern: str | None) -> re.Pattern[str]:
    """A regular expression for `DelayedStore.topics`; None: one that matches every name. Raises InvalidArgument."""
    if pattern is not None and not isinstance(pattern, str):
        raise InvalidArgument("pattern", pattern, "expected a str")
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise InvalidArgument("pattern", pattern, f"no regular expression: {error}") from error


def _name_in(engine: Engine, topic: Topic) -> TopicName:
    """The name of a topic of the open store of `engine`. Raises InvalidArgument for one of another."""
    if topic._engine is not engine:
        raise InvalidArgument("topic", topic.name, f"a topic of another open store, {topic._engine.storage.path}")
    return topic._name
