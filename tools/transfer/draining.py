"""Draining: what is pending in a store is sent to another broker or store with its due times, then cancelled here.

A message is cancelled once the other broker has confirmed it, so a drain that was killed goes on where it ended, and
nothing is lost. What comes twice is what was confirmed and not cancelled yet: at most `AT_ONCE` entries, and none where
the other broker deduplicates. For that each partition log is sent by `STRIPES` producers of fixed names, an entry by
that of its id; a producer has one message on its way, and its numbers are the entries' ids. So all below the highest
number that the other broker knows of a producer is there, and is not sent again. That holds only while no message is
passed over that a later run would send: one that the other broker refuses ends the drain; what is left here is left
by every run.

Another store of duelog stores a batch whole or not at all, each entry under a number of its own, its id: there entries
go in batches, as they are stored here, and one that is refused is found by sending those of its batch one by one.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ... import DelayedStore, Message
from ...broker.lookup.topic_address import shown_subscription
from ...broker.operate.client_message import ClientMessage, NotCarried, client_messages
from ...connected.connected_store import ConnectedTopic, connect
from ...engine import Engine
from ...markers.lookup import unfired
from ...operations.wire import Disconnected
from ...store.codec.body import DEDUP, decode_body
from ...store.codec.format import PartitionState
from ...store.env.environment import Environment
from ...store.errors import ConsumerBusy, CorruptEntry, DuelogError, InvalidArgument
from ...store.log.scan import RunFinder
from ...store.names import TopicName
from ...store.position import MessageId

AT_ONCE = 512
"""Entries that are sent before they are cancelled together."""

STORE_AT_ONCE = 4_096
"""Entries that are sent before they are cancelled together, where another store of duelog takes them."""

STRIPES = 32
"""Producers of one partition log, and threads. Never another number: entries would change their producer."""

_BATCH_BITS = 24
"""Bits of a number for the place of a message in its batch."""

BY_SCHEDULE = "occurrence of a schedule"
ADDRESSED = "retry for one subscription"
EXPIRES = "message with a time to live of its own"
UNREADABLE = "cannot be read"


class PendingEntry(NamedTuple):
    """One entry that has not fired. reason: why its body cannot be read.

    addressee: the only subscription it is for. ttl_ms: its own time to live. dedup_key: its deduplication key.
    """

    message_id: MessageId
    due_ms: int
    payload: bytes
    key: str | None
    properties: dict[str, str]
    addressee: str | None = None
    ttl_ms: int | None = None
    dedup_key: str | None = None
    reason: str = ""


def pending_entries(engine: Engine, topic: TopicName, at_once: int) -> Iterator[list[PendingEntry]]:
    """Entries of a topic's partition logs that have not fired and are not cancelled, `at_once` of one log at a time.

    In order of entry id within a log. 12 bytes of memory an entry of one log, and the bodies of one list.
    """
    state = engine.topics.get(topic)
    for partition in engine.storage.partitions.held(lambda partition: partition.state is PartitionState.OPEN):
        log = partition.log(state.topic_id)
        if log is None:
            continue
        entries, dues = unfired(engine.storage.main, log)
        order = np.argsort(entries)
        entries, dues = entries[order], dues[order]
        for at in range(0, len(entries), at_once):
            window = slice(at, at + at_once)
            found = list(zip(entries[window].tolist(), dues[window].tolist(), strict=True))
            yield list(_bodies(partition.environment, log.ledger_id, found))


def _bodies(environment: Environment, ledger_id: int, wanted: Sequence[tuple[int, int]]) -> Iterator[PendingEntry]:
    with environment.read() as raw:
        finder, run = RunFinder(raw, environment.name), None
        for entry_id, due_ms in wanted:
            message_id = MessageId(ledger_id, entry_id)
            try:
                if run is None or not run.first_entry <= entry_id < run.limit:
                    run = None
                    run = finder.find(ledger_id, entry_id)
                body = None if run is None else run.body(entry_id - run.first_entry)
                if body is None:
                    raise ValueError("its body is gone")
                _, payload, key, properties, extra = decode_body(body)
            except (CorruptEntry, ValueError) as error:
                yield PendingEntry(message_id, due_ms, b"", None, {}, reason=str(error))
                continue
            own: dict[str, Any] = extra or {}
            yield PendingEntry(
                message_id, due_ms, payload, key, properties or {}, own.get("addressee"), own.get("ttl"), own.get(DEDUP)
            )


class DrainTarget(Protocol):
    """The other broker. Used by several threads. What it raises is a DuelogError."""

    def subscribe(self, topic: str, subscription: str) -> None:
        """Make a subscription, or find it there."""

    def open(self, topic: str, producer: str) -> "DrainProducer | StoreProducer":
        """A producer of a fixed name."""

    def close(self) -> None:
        """Disconnect."""


class DrainProducer(Protocol):
    """A producer of the other broker. Used by one thread at a time."""

    last_number: int
    """The highest number stored under its name, as the other broker says; -1: it does not know."""

    def send(self, message: ClientMessage, due_ms: int, number: int) -> None:
        """Returns once the message is confirmed."""

    def close(self) -> None:
        """Forget it."""


@dataclass
class Drained:
    """How far a drain has come. `before`: entries that an earlier run had sent. left: entries, by the reason."""

    entries: int = 0
    messages: int = 0
    before: int = 0
    topics: int = 0
    left: Counter[str] = field(default_factory=Counter)
    first_due_ms: int | None = None
    last_due_ms: int | None = None


class DrainStopped(DuelogError):
    """The other broker did not take a message; those before it are there, the others are still here."""

    def __init__(self, topic: str, message_id: MessageId, reason: str) -> None:
        super().__init__(f"message {message_id} of {topic} was not taken: {reason}")


_ProducerKey = tuple[str, int, int]
"""Topic, ledger, stripe."""


class _Item(NamedTuple):
    topic: TopicName
    entry: PendingEntry
    messages: list[ClientMessage]
    """Empty where the entry goes as it is."""


@dataclass(eq=False)
class Drain:
    """One run. target None: nothing is sent and nothing cancelled, what would be is counted.

    to_store: it is another store of duelog. topics: None for all. keep: cancel nothing. subscriptions: make those of
    each topic before it is sent.
    """

    engine: Engine
    target: DrainTarget | None
    _: KW_ONLY
    to_store: bool = False
    topics: Sequence[TopicName] | None = None
    keep: bool = False
    subscriptions: bool = True
    progress: Callable[[Drained], object] = lambda done: None
    done: Drained = field(default_factory=Drained, init=False)
    _producers: "dict[_ProducerKey, DrainProducer | StoreProducer]" = field(default_factory=dict, init=False)
    _subscribed: set[str] = field(default_factory=set, init=False)
    _confirmed: list[tuple[_Item, int]] = field(default_factory=list, init=False)
    """With how many of its messages were sent now."""
    _stopping: bool = field(default=False, init=False)
    """True once the drain was interrupted: producers send nothing more."""

    def __post_init__(self) -> None:
        self._store = DelayedStore(self.engine)
        self._at_once = STORE_AT_ONCE if self.to_store else AT_ONCE

    def run(self) -> Drained:
        """Drain. Raises what the target raises, CodecMissing, UnknownTopic; `done` says what was done before."""
        try:
            with ThreadPoolExecutor(STRIPES, thread_name_prefix="duelog-drain") as pool:
                for items in self._batches():
                    self._deal_with(items, pool)
        finally:
            self._close(list(self._producers))
        return self.done

    def _batches(self) -> Iterator[list[_Item]]:
        """Up to about AT_ONCE entries at a time, of several logs where those are small."""
        waiting: list[_Item] = []
        for topic in self._names():
            self.done.topics += 1
            of_schedules = {each.next_id for each in self._store.topic(str(topic)).schedules()}
            for entries in pending_entries(self.engine, topic, self._at_once):
                if len(waiting) + len(entries) > self._at_once:
                    yield waiting
                    waiting = []
                waiting += filter(None, (self._item(topic, each, of_schedules) for each in entries))
        if waiting:
            yield waiting

    def _names(self) -> list[TopicName]:
        if self.topics is not None:
            return list(self.topics)
        return [TopicName.parse(topic.name) for topic in self._store.topics()]

    def _item(self, topic: TopicName, entry: PendingEntry, of_schedules: set[MessageId | None]) -> _Item | None:
        """Make what is sent for an entry; None: it is left where it is."""
        left = ""
        if entry.reason:
            left = UNREADABLE
        elif entry.addressee is not None:
            left = ADDRESSED
        elif entry.message_id in of_schedules:
            left = BY_SCHEDULE
        elif self.to_store:
            return _Item(topic, entry, [])
        elif entry.ttl_ms is not None:
            left = EXPIRES
        else:
            try:
                return _Item(topic, entry, client_messages(entry.payload, entry.key, entry.properties))
            except NotCarried as error:
                left = str(error)
        self.done.left[left] += 1
        return None

    def _deal_with(self, items: list[_Item], pool: ThreadPoolExecutor) -> None:
        try:
            if self.target is None:
                self._confirmed += [(item, len(item.messages)) for item in items]
            else:
                self._send_all(self.target, items, pool)
        finally:
            self._count_confirmed()
        self.progress(self.done)

    def _count_confirmed(self) -> None:
        for item, sent in self._confirmed:
            due_ms = item.entry.due_ms
            self.done.entries += 1
            self.done.before += not sent
            self.done.messages += len(item.messages) or 1
            self.done.first_due_ms = min(self.done.first_due_ms or due_ms, due_ms)
            self.done.last_due_ms = max(self.done.last_due_ms or due_ms, due_ms)
        self._confirmed.clear()

    def _send_all(self, target: DrainTarget, items: list[_Item], pool: ThreadPoolExecutor) -> None:
        self._subscribe(target, items, pool)
        by_producer: dict[_ProducerKey, list[_Item]] = {}
        for item in items:
            by_producer.setdefault(self._producer_of(item), []).append(item)
        results: list[Future[None]] = []
        try:
            for key, each in by_producer.items():
                results.append(pool.submit(self._send, target, key, each))
            wait(results)
        except BaseException:
            self._stopping = True
            wait(results)  # what is on its way is confirmed before it is cancelled here
            raise
        finally:
            self._cancel()
        for result in results:
            result.result()
        last = self._producer_of(items[-1])
        self._close([key for key in self._producers if key[:2] != last[:2]])

    def _producer_of(self, item: _Item) -> _ProducerKey:
        ledger_id, entry_id = item.entry.message_id
        return str(item.topic), ledger_id, -1 if self.to_store else entry_id % STRIPES

    def _subscribe(self, target: DrainTarget, items: list[_Item], pool: ThreadPoolExecutor) -> None:
        """Make the subscriptions of topics that are new: without one a broker may drop what it is sent."""
        new = dict.fromkeys(str(item.topic) for item in items if str(item.topic) not in self._subscribed)
        wanted = [
            (topic, name if self.to_store else shown_subscription(name))
            for topic in (new if self.subscriptions else ())
            for name in self._store.topic(topic).subscriptions()
        ]
        list(pool.map(lambda each: target.subscribe(*each), wanted))
        self._subscribed.update(new)

    def _send(self, target: DrainTarget, key: _ProducerKey, items: list[_Item]) -> None:
        """Send entries by one producer, in order, each confirmed before the next is sent."""
        topic, ledger_id, stripe = key
        producer = self._producers.get(key)
        if producer is None:
            name = f"duelog-drain-{self.engine.storage.store_id.hex()[:16]}-{ledger_id}-{stripe}"
            producer = self._producers[key] = target.open(topic, name)
        if isinstance(producer, StoreProducer):
            for batch in _batches(items):
                if self._stopping:
                    return
                self._confirmed += zip(batch, producer.send([item.entry for item in batch]), strict=True)
            return
        for item in items:
            if self._stopping:
                return
            message_id, due_ms, *_ = item.entry
            first = message_id.entry_id << _BATCH_BITS
            left = [each for each in enumerate(item.messages, first) if each[0] > producer.last_number]
            for number, message in left:
                try:
                    producer.send(message, due_ms, number)
                except DuelogError as error:
                    raise DrainStopped(topic, message_id, str(error)) from error
            self._confirmed.append((item, len(left)))

    def _cancel(self) -> None:
        """Cancel here what the other broker has confirmed."""
        if self.keep:
            return
        by_topic: dict[str, list[MessageId]] = {}
        for item, _ in self._confirmed:
            by_topic.setdefault(str(item.topic), []).append(item.entry.message_id)
        for topic, ids in by_topic.items():
            self._store.topic(topic).cancel_batch(ids)

    def _close(self, keys: list[_ProducerKey]) -> None:
        for key in keys:
            self._producers.pop(key).close()


_BATCH_BYTES = 1 << 20


def _batches(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Cut items into those of consecutive entries, of a MiB or one entry each."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        size += len(item.entry.payload)
        if batch and (size > _BATCH_BYTES or item.entry.message_id[1] != batch[-1].entry.message_id[1] + 1):
            yield batch
            batch, size = [], len(item.entry.payload)
        batch.append(item)
    yield batch


class StoreTarget:
    """Another store of duelog, which its process serves."""

    def __init__(self, place: str, *, token: str | None = None, trust: Path | None = None) -> None:
        """place, token, trust: as of `duelog.connect`, whose errors it raises."""
        self._store = connect(place, token=token, tls_trust=trust, name="duelog drain")

    def subscribe(self, topic: str, subscription: str) -> None:
        """Make it, or find it there, from the newest message on."""
        with suppress(ConsumerBusy):
            self._store.topic(topic).subscribe(subscription, type="shared", initial_position="latest").close()

    def open(self, topic: str, producer: str) -> "StoreProducer":
        """A producer that sends batches."""
        return StoreProducer(self._store.topic(topic), producer)

    def close(self) -> None:
        self._store.close()


class StoreProducer:
    """A producer of another store of duelog, whose numbers are the ids of entries."""

    def __init__(self, topic: Any, name: str) -> None:
        self._topic: ConnectedTopic = topic
        self._name = name

    def send(self, entries: Sequence[PendingEntry]) -> list[int]:
        """Store consecutive entries, all or none; for each 1, or 0 where it was there. Raises DrainStopped."""
        messages = [
            Message(
                each.payload,
                deliver_at=each.due_ms,
                key=each.key,
                properties=each.properties or None,
                ttl=None if each.ttl_ms is None else timedelta(milliseconds=each.ttl_ms),
                dedup_key=each.dedup_key,
            )
            for each in entries
        ]
        first = entries[0].message_id
        try:
            return [int(each is not None) for each in self._topic.send_once(self._name, first.entry_id, messages)]
        except Disconnected as error:
            raise TargetFailed(str(error)) from error
        except DuelogError as error:
            if len(entries) == 1:
                raise DrainStopped(self._topic.name, first, str(error)) from error
            return [sent for each in entries for sent in self.send([each])]

    def close(self) -> None:
        """Its numbers stay known."""


_URL = re.compile(r"pulsar(\+ssl)?://[^\s/]+/?")
_SEND_TIMEOUT_MS = 60_000


class TargetFailed(DuelogError):
    """An error of the other broker, or of the way to it."""


class PulsarTarget:
    """A connection to a Pulsar cluster, or to another `duelog serve`."""

    def __init__(self, url: str, *, token: str | None = None, trust: Path | None = None) -> None:
        """trust: certificates in PEM, for pulsar+ssl. Raises InvalidArgument, also where pulsar-client is missing."""
        if _URL.fullmatch(url) is None:
            raise InvalidArgument("--to", url, "expected pulsar://host:port or pulsar+ssl://host:port")
        try:
            import pulsar
        except ImportError as error:
            raise InvalidArgument("--to", url, "needs pulsar-client; pip install 'duelog[drain]'") from error
        options: dict[str, Any] = {} if token is None else {"authentication": pulsar.AuthenticationToken(token)}
        if trust is not None:
            try:
                trust.open("rb").close()  # the client says nothing of it but that TLS fails
            except OSError as error:
                raise InvalidArgument("--tls-trust", str(trust), f"cannot be read: {error.strerror}") from error
            options["tls_trust_certs_file_path"] = str(trust)
        logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)  # its own is standard output
        self._pulsar = pulsar
        self._url = url
        with self._failures("connection"):
            self._client = pulsar.Client(url, logger=logger, tls_validate_hostname=True, **options)

    def subscribe(self, topic: str, subscription: str) -> None:
        """Make it, or find it there, from the newest message on."""
        pulsar = self._pulsar
        with self._failures(f"subscription {subscription} of {topic}"), suppress(pulsar.ConsumerBusy):
            self._client.subscribe(topic, subscription, pulsar.ConsumerType.Shared).close()

    def open(self, topic: str, producer: str) -> DrainProducer:
        """A producer that sends one by one."""
        with self._failures(topic):
            opened = self._client.create_producer(
                topic, producer_name=producer, send_timeout_millis=_SEND_TIMEOUT_MS, batching_enabled=False
            )
        return _Producer(self, opened)

    def close(self) -> None:
        with suppress(Exception):  # what was sent is confirmed
            self._client.close()

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._pulsar.PulsarException, ValueError) as error:
            text = re.sub(r"^Pulsar error: ", "", str(error)) or type(error).__name__
            if isinstance(error, self._pulsar.ChecksumError):  # duelog's answer to a client of this kind
                text += ": it is too large, or due later than the broker allows"
            raise TargetFailed(f"{self._url}: {what}: {text}") from error


class _Producer:
    def __init__(self, target: PulsarTarget, producer: Any) -> None:
        self._failures = target._failures
        self._producer = producer
        self.last_number = int(producer.last_sequence_id())

    def send(self, message: ClientMessage, due_ms: int, number: int) -> None:
        """A number that is stored already is confirmed, and not stored again, where the broker deduplicates."""
        with self._failures("refused"):
            self._producer.send(
                message.content,
                properties=message.properties,
                partition_key=message.key,
                ordering_key=message.ordering_key,
                event_timestamp=message.event_time or None,
                sequence_id=number,
                deliver_at=due_ms,
            )

    def close(self) -> None:
        with suppress(Exception):  # what was sent is confirmed
            self._producer.close()
