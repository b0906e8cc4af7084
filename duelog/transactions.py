"""Transactions: operations on topics, subscriptions and documents that take effect together, or not at all.

A transaction collects operations, and writes nothing before it ends. Then each prepares its unit of work, as it does
alone, and holds what that needs; all of the units are one, in one group of the write-ahead log. So they are on disk
whole or not at all, and the leader of the group decides whether they are stored: whether a message is still held, has
not fired, whether a document is of the version that was read.

What is held is taken in one order, as by every other call: the locks of deduplication keys, the gate of firing,
partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import EllipsisType, TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from duelog.markers.pending_entries import Outcome
from duelog.store.codec.body import EncodedBatch, encode_send
from duelog.store.codec.sent_ids import sent_key
from duelog.store.duration import Duration
from duelog.store.errors import DocumentChanged, DuelogError, InvalidArgument, TransactionConflict, checked_list
from duelog.store.held import Held
from duelog.store.log import documents
from duelog.store.message import AnyId, Dedup, ReceivedMessage, asked_due_ms, checked_dedup_key, id_of
from duelog.store.names import TopicName
from duelog.store.position import MessageId
from duelog.store.wal.write_batch import WriteBatch

from .delivery.position_set import group_by_ledger
from .engine import Engine
from .sending.keyed_messages import KeyChanged
from .sending.log_append import AddressedBatch
from .subscription import Subscription
from .topic import Topic
from .topics.topic_state import TopicState

T = TypeVar("T")

Unit = Callable[[WriteBatch], None]
"""A unit of work of one or more operations; it may run again, and the last run counts."""

_FEW = 8
"""Up to so many messages without keys are appended one by one, which a batch is too much work for."""

_NEVER_DELIVERED = (Outcome.CANCELLED, Outcome.ALREADY_CANCELLED)

_ATTEMPTS = 16
"""How often the messages of deduplication keys are looked up that others change meanwhile."""


class Result(Generic[T]):
    """The result of one operation of a transaction, once that is stored."""

    def __init__(self, operation: str, *about: object) -> None:
        """`operation`: a format for what it is about."""
        self._operation, self._about = operation, about
        self._stored = False
        self._lost: DuelogError | None = None

    @property
    def operation(self) -> str:
        """The operation in words."""
        return self._operation % self._about if self._about else self._operation

    @property
    def value(self) -> T:
        """Raises InvalidArgument: the transaction has not been stored; Disconnected: it is, and its result was lost."""
        if self._lost is not None:
            raise self._lost
        if not self._stored:
            raise InvalidArgument("value", self.operation, "the transaction has not been stored")
        return self._value

    def _store(self, value: T) -> None:
        self._value, self._stored = value, True

    def __repr__(self) -> str:
        return f"<Result of {self.operation}: {self._value if self._stored else 'not stored'}>"


class _Send(NamedTuple):
    topic: TopicName
    due_ms: int
    body: bytes
    dedup: Dedup | None
    result: Result[MessageId]


class _CancelKey(NamedTuple):
    topic: TopicName
    key: str
    required: bool
    result: Result[bool]


class _Reschedule(NamedTuple):
    message_id: MessageId
    asked: Callable[[int], int | None]
    """Gives the due time that is asked for, at a time."""
    required: bool
    result: Result[MessageId | None]


class _Cancel(NamedTuple):
    message_id: MessageId
    required: bool
    result: Result[bool]


class Ack(NamedTuple):
    """A received message that is acknowledged with a transaction; consumer None: any that holds it."""

    message: ReceivedMessage
    consumer: Subscription | None


class _Units(list[Unit]):
    """The units of work of a transaction, and all of them as one."""

    def __call__(self, group: WriteBatch) -> None:
        for unit in self:
            unit(group)


def _writing_document(work: Callable[[Any], Any], result: Result[Any]) -> Unit:
    def unit(group: WriteBatch) -> None:
        try:
            result._value = work(group)
        except DocumentChanged as error:
            raise TransactionConflict(result.operation, str(error)) from error

    return unit


class Transaction:
    """Operations that take effect together when the block ends, or not at all. Made by `DelayedStore.transaction`.

    A context manager, for `async with` too. An exception in the block stores nothing. At its end all is checked by one
    thread, alone, and written as one group of the write-ahead log: then it is as durable as the store's `durability`
    says, whole. Otherwise an error is raised, and nothing is stored but topics and days that were new:
    TransactionConflict (the operation, and the reason), or what the operation raises alone (DelayTooLong,
    QuotaExceeded, UnknownTopic, StoreFull, StoreFailed ...); InvalidArgument where all of it is more than a group takes
    (`StoreConfig.wal_bytes`).

    Others see it whole within a topic, and two topics microseconds apart. It reads nothing itself, and keeps nobody
    waiting while the block runs. Its operations do not see one another: what it sends it cannot cancel. Not
    thread-safe.
    """

    stored_before = False

    def __init__(self, engine: Engine, received: Ack | None = None) -> None:
        """Use `DelayedStore.transaction`. received: a message that is acknowledged with it."""
        engine.check_writable()
        self._engine = engine
        self._sends: list[_Send] = []
        self._acks: dict[tuple[str, str], list[Ack]] = {}
        """By topic and subscription."""
        self._cancels: dict[TopicName, list[_Cancel]] = {}
        self._sent_keys: set[tuple[TopicName, str]] = set()
        self._cancelled_keys: dict[tuple[TopicName, str], _CancelKey] = {}
        self._reschedules: dict[TopicName, list[_Reschedule]] = {}
        self._documents: list[tuple[Callable[[Any], Any], Result[Any]]] = []
        self._results: list[Result[Any]] = []
        """Results of all operations; the last run of their units of work leaves their values."""
        self._ended = False
        self._numbers: tuple[str, int] | None = None
        """Name of a producer, and the number under which it is stored once; None: without one."""
        if received is not None:
            self._acknowledge(received)

    # -- operations --------------------------------------------------------------------------------

    def send(
        self,
        topic: str | Topic,
        payload: bytes | bytearray | memoryview,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        allow_past: bool = False,
        ttl: Duration | None = None,
        dedup_key: str | None = None,
        dedup_for: Duration | None = None,
        replace: bool = False,
    ) -> Result[MessageId]:
        """Send a message; arguments as of `Topic.send`. A delay counts from this call. Raises InvalidMessage."""
        name, dedup = self._name(topic), Dedup.checked(dedup_key, dedup_for, replace)
        if dedup is not None and (name, dedup.key) in self._cancelled_keys:
            raise InvalidArgument("dedup_key", dedup.key, f"this transaction cancels that key of {name}")
        now_ms, most = self._engine.clock.now_ms(), self._engine.storage.config.max_message_bytes
        due_ms, body = encode_send(
            payload, deliver_at, deliver_after, key, properties, now_ms, most, allow_past, ttl, dedup_key
        )
        result: Result[MessageId] = self._result("send to %s", name)
        self._sends.append(_Send(name, due_ms, body, dedup, result))
        if dedup is not None:
            self._sent_keys.add((name, dedup.key))
        return result

    def ack(
        self, messages: ReceivedMessage | Iterable[ReceivedMessage], *, consumer: Subscription | None = None
    ) -> None:
        """Acknowledge received messages, durably. Conflicts where one of these deliveries is not held any more.

        That is, it was acknowledged, given back or taken back, or its subscription was moved. consumer: which received
        them; None: any of their subscription that holds this delivery. Raises InvalidArgument.
        """
        self._check_begun()
        if consumer is not None and not isinstance(consumer, Subscription):
            raise InvalidArgument("consumer", consumer, "expected a Subscription")
        several = [messages] if isinstance(messages, ReceivedMessage) else messages
        given = checked_list("messages", several, "received messages")
        for at, message in enumerate(given):
            if not isinstance(message, ReceivedMessage):
                raise InvalidArgument(f"messages[{at}]", message, "expected a received message")
            if consumer is not None:
                consumer._check_received(message)
        for message in given:
            self._acknowledge(Ack(message, consumer))

    def _acknowledge(self, ack: Ack) -> None:
        self._acks.setdefault((ack.message.topic, ack.message.subscription), []).append(ack)

    def cancel(self, topic: str | Topic, message_id: AnyId, *, required: bool = True) -> Result[bool]:
        """Cancel a delayed message; whether it is never delivered. Conflicts where it has fired or is unknown.

        required: False goes on then. Raises InvalidArgument.
        """
        name, message_id = self._name(topic), id_of(message_id)
        result: Result[bool] = self._result("cancel %s of %s", message_id, name)
        self._cancels.setdefault(name, []).append(_Cancel(message_id, required, result))
        return result

    def cancel_key(self, topic: str | Topic, key: str, *, required: bool = True) -> Result[bool]:
        """Cancel the pending message of a deduplication key; whether it was. Conflicts where none is pending.

        required: False goes on then. Raises InvalidArgument, also where the transaction sends with that key.
        """
        name = self._name(topic)
        checked_dedup_key(key, "key")
        if (name, key) in self._cancelled_keys or (name, key) in self._sent_keys:
            raise InvalidArgument("key", key, f"this transaction has it already, of {name}")
        result: Result[bool] = self._result("cancel key %r of %s", key, name)
        self._cancelled_keys[name, key] = _CancelKey(name, key, required, result)
        return result

    def reschedule(
        self,
        topic: str | Topic,
        message_id: AnyId,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
        required: bool = True,
    ) -> Result[MessageId | None]:
        """Give a delayed message another due time; its new id. Conflicts where it is too late, or it is unknown.

        Arguments as of `Topic.reschedule`. required: False goes on then, with None. Raises InvalidArgument.
        """
        name, message_id = self._name(topic), id_of(message_id)
        result: Result[MessageId | None] = self._result("reschedule %s of %s", message_id, name)
        asked = partial(asked_due_ms, deliver_at, deliver_after, allow_past=allow_past)
        self._reschedules.setdefault(name, []).append(_Reschedule(message_id, asked, required, result))
        return result

    def put_document(
        self, key: str, value: bytes | bytearray | memoryview, *, expected: int | EllipsisType | None = ...
    ) -> Result[int]:
        """Store a document, as `Documents.put`; its version. Conflicts where that is not the expected one."""
        self._check_begun()
        result: Result[int] = self._result("put document %r", key)
        self._documents.append((documents.putting(key, value, expected), result))
        return result

    def delete_document(self, key: str, *, expected: int | EllipsisType | None = ...) -> Result[bool]:
        """Delete a document, as `Documents.delete`; whether there was one. Conflicts as `put_document`."""
        self._check_begun()
        result: Result[bool] = self._result("delete document %r", key)
        self._documents.append((documents.deleting(key, expected), result))
        return result

    def _result(self, operation: str, *about: object) -> Result[Any]:
        result: Result[Any] = Result(operation, *about)
        self._results.append(result)
        return result

    def _check_begun(self) -> None:
        if self._ended:
            raise InvalidArgument("transaction", self, "it has ended")

    def _name(self, topic: str | Topic) -> TopicName:
        self._check_begun()
        if not isinstance(topic, Topic):
            return TopicName.parse(topic)
        if topic._engine is not self._engine:
            raise InvalidArgument("topic", topic.name, f"a topic of another open store, {topic._engine.storage.path}")
        return topic._name

    # -- the end -----------------------------------------------------------------------------------

    def number(self, producer: str, number: int) -> None:
        """Have it be stored once, however often one of this number is asked for: connections number theirs.

        `stored_before` says at its end that it was stored already, and nothing is done.
        """
        self._numbers = producer, number

    def _store(self) -> None:
        """Store all of it, or raise; wait until it is as durable as its topics' policies ask for."""
        if self._numbers is None:
            self._store_all()
        else:
            self.stored_before = not self._engine.sending.producers.once(*self._numbers, self._store_all)
        if self._engine.may_wait_for_copy:
            topics = {each.topic for each in self._sends} | {name for name, _ in self._cancelled_keys}
            topics |= self._cancels.keys() | self._reschedules.keys()
            self._engine.settle(*topics, *(TopicName.parse(name) for name, _ in self._acks))

    def _store_all(self, also: Unit | None = None) -> bool:
        engine = self._engine
        for _ in range(_ATTEMPTS):
            try:
                with Held() as held:
                    writer = engine.writer()
                    units = self._prepare(held)
                    if units:
                        units += [] if also is None else [also]
                        writer.write(units)
                for result in self._results:
                    result._stored = True
                break
            except KeyChanged:
                continue
        else:
            reason = "its message was rescheduled or cancelled by its id, by this transaction or others"
            raise TransactionConflict("a deduplication key", reason)
        if self._documents:
            engine.storage.main.flush()
        return True

    def _prepare(self, held: Held) -> _Units:
        """Take what the operations need, in the order that all calls take it in, and make their units of work."""
        engine, units = self._engine, _Units()
        now_ms = engine.clock.now_ms()
        names = list({each.topic: None for each in self._sends})
        topics = dict(zip(names, engine.topics.get_or_create_all(names, now_ms), strict=True))
        keys: dict[int, bytes] = {}
        for at, each in enumerate(self._sends):
            if each.dedup is not None:
                keys[at] = sent_key(topics[each.topic].topic_id, each.dedup.key)
        cancelled: list[tuple[TopicState, bytes, _CancelKey]] = []
        for asked in self._cancelled_keys.values():
            topic = engine.topics.get(asked.topic)
            cancelled.append((topic, sent_key(topic.topic_id, asked.key), asked))
        if engine.storage.partitions.away:
            self._fetch()
            engine.sending.keyed.fetch({key: topics[self._sends[at].topic] for at, key in keys.items()})
            engine.sending.keyed.fetch({key: topic for topic, key, _ in cancelled}, cancels=True)
        if keys or cancelled:
            engine.pending.keys.lock_all(held, [*keys.values(), *(key for _, key, _ in cancelled)])
        for acks in self._acks.values():
            units.append(self._ack(acks))
        for name, cancels in self._cancels.items():
            units.append(self._cancel(held, engine.topics.get(name), cancels))
        for topic, key, asked in cancelled:
            units.append(self._cancel_key(held, topic, key, asked))
        for name, reschedules in self._reschedules.items():
            topic = engine.topics.get(name)
            units += [self._reschedule(held, topic, move, now_ms) for move in reschedules]
        units += [_writing_document(work, result) for work, result in self._documents]
        if keys or len(self._sends) > _FEW:
            units.append(self._send_batch(held, topics, keys, now_ms))
        elif self._sends:
            units.append(self._send(held, topics, now_ms))
        return units

    def _fetch(self) -> None:
        """Fetch the days that operations by id read: firing waits for who holds the gate, and never for the bucket."""
        topics, withdrawals = self._engine.topics, self._engine.pending.withdrawals
        for name, cancels in self._cancels.items():
            withdrawals.fetch(topics.get(name), [each.message_id for each in cancels])
        for name, asked in self._reschedules.items():
            withdrawals.fetch(topics.get(name), [each.message_id for each in asked], moved=True)

    def _ack(self, acks: Sequence[Ack]) -> Unit:
        """The unit of work that acknowledges deliveries of one subscription."""
        first, flusher = acks[0].message, self._engine.delivery.flusher
        topic = self._engine.topics.get(TopicName.parse(first.topic))
        state = topic.subscription(first.subscription)
        if not state.durable:
            raise InvalidArgument("messages", first, "a reader's acknowledgements are never on disk")
        positions = [ack.message.position for ack in acks]
        entries = group_by_ledger(positions)

        def unit(group: WriteBatch) -> None:
            fresh = flusher.acknowledge(group, topic, state, entries)
            with state.lock:
                for position, (message, consumer) in zip(positions, acks, strict=True):
                    is_held = state.holds(message, position, None if consumer is None else consumer._id)
                    if not is_held or position.entry_id not in fresh[position.ledger_id]:
                        where = f"{message.message_id} of {message.topic}, subscription {message.subscription}"
                        raise TransactionConflict(f"ack {where}", "this delivery is not held any more")

        return unit

    def _cancel(self, held: Held, topic: TopicState, cancels: Sequence[_Cancel]) -> Unit:
        ids = [each.message_id for each in cancels]
        work = self._engine.pending.withdrawals.cancelling(held, topic, ids)

        def unit(group: WriteBatch) -> None:
            for (_, required, result), outcome in zip(cancels, work(group), strict=True):
                done = outcome in _NEVER_DELIVERED
                if required and not done:
                    raise TransactionConflict(result.operation, f"it is {outcome.value}")
                result._value = done

        return unit

    def _cancel_key(self, held: Held, topic: TopicState, key: bytes, asked: _CancelKey) -> Unit:
        work = self._engine.sending.keyed.cancelling(held, topic, key)

        def unit(group: WriteBatch) -> None:
            outcome = Outcome.UNKNOWN if work is None else work(group)
            if asked.required and outcome is not Outcome.CANCELLED:
                reason = "no message of it is pending" if outcome is Outcome.UNKNOWN else f"it is {outcome.value}"
                raise TransactionConflict(asked.result.operation, reason)
            asked.result._value = outcome is Outcome.CANCELLED

        return unit

    def _reschedule(self, held: Held, topic: TopicState, move: _Reschedule, now_ms: int) -> Unit:
        message_id, asked, required, result = move
        withdrawals = self._engine.pending.withdrawals
        work = withdrawals.rescheduling(held, topic, [message_id], asked(now_ms), now_ms)

        def unit(group: WriteBatch) -> None:
            (new_id,) = work(group)
            if required and new_id is None:
                raise TransactionConflict(result.operation, "it has fired, is cancelled, or is unknown")
            result._value = new_id

        return unit

    def _send(self, held: Held, topics: Mapping[TopicName, TopicState], now_ms: int) -> Unit:
        policies, sender = self._engine.policies, self._engine.sending.sender
        dues = []
        for each in self._sends:
            due_ms, overridden = policies.apply_one(each.topic, each.due_ms, now_ms)
            dues.append(due_ms)
            if overridden:
                held.stored.append(partial(policies.stored, each.topic, 1))
        if policies.limits_pending:
            places = {name: at for at, name in enumerate(topics)}
            owners = np.array([places[each.topic] for each in self._sends])
            sender.within_quota(held, list(topics.values()), owners, np.array(dues), now_ms)
        works = []
        for each, due_ms in zip(self._sends, dues, strict=True):
            work = sender.sending_one(held, topics[each.topic], due_ms, each.body, now_ms)
            works.append((each.result, work))

        def unit(group: WriteBatch) -> None:
            for result, work in works:
                result._value = MessageId(*work(group))

        return unit

    def _send_batch(
        self, held: Held, topics: Mapping[TopicName, TopicState], keys: Mapping[int, bytes], now_ms: int
    ) -> Unit:
        places = {name: at for at, name in enumerate(topics)}
        owners = np.array([places[each.topic] for each in self._sends], dtype=np.intp)
        dues = np.array([each.due_ms for each in self._sends], dtype=np.int64)
        bodies = [each.body for each in self._sends]
        dedups = {at: each.dedup for at, each in enumerate(self._sends) if each.dedup is not None}
        batch = EncodedBatch(dues, dues > now_ms, bodies, dedups=dedups)
        results = [each.result for each in self._sends]
        messages = AddressedBatch(list(topics.values()), owners if len(topics) > 1 else None, batch, now_ms)
        work = self._engine.sending.keyed.sending(held, messages, keys, policies=True)

        def unit(group: WriteBatch) -> None:
            for result, message_id in zip(results, work(group).to_list(), strict=True):
                result._value = message_id

        return unit

    def __enter__(self) -> Self:
        self._check_begun()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._check_begun()
        self._ended = True
        if kind is None:
            self._store()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import asyncio  # noqa: PLC0415 - much to import for threads

        await asyncio.shield(asyncio.to_thread(self.__exit__, kind, error, traceback))

    def __repr__(self) -> str:
        return f"<Transaction of {self._engine.storage.path}{', ended' if self._ended else ''}>"
