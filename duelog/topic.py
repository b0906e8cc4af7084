"""Topic: what producers send to, and where consumers subscribe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from functools import cached_property
from itertools import islice

from duelog.markers.pending_entries import Outcome
from duelog.store.codec.message_fields import Dedup
from duelog.store.duration import Duration
from duelog.store.errors import InvalidArgument
from duelog.store.listener import call_supplied
from duelog.store.log.managed_ledger import LedgerInfo
from duelog.store.message import MAX_DUE_MS, AnyId, Message, ScheduledMessage, at_ms, id_of
from duelog.store.names import TopicName, validate_subscription_name
from duelog.store.position import MessageId, MessageIds, Position

from .engine import Engine
from .faces.by_key import TopicByKey
from .faces.topic_schedules import TopicSchedules
from .faces.topic_subscriptions import TopicSubscriptions
from .sending.outbox import Done, Numbers, PutOutcome
from .sending.producer import Producer
from .sending.topic_sender import DeliverAt, TopicSender
from .stats import TopicStats
from .topics.seeking import LogPositions, log_positions
from .topics.topic_state import TopicState


class Topic(TopicSubscriptions, TopicSchedules, TopicByKey):
    """A topic of an open store. Made by DelayedStore.topic; thread-safe; needs no closing.

    The topic itself comes into being with the first message or subscription, or by `create`. Where a method takes a
    message's id, the text of the id and the message itself do as well.
    """

    def __init__(self, engine: Engine, name: TopicName) -> None:
        self._engine = engine
        self._name = name

    @cached_property
    def sender(self) -> TopicSender:  # type: ignore[override]  # settable, as the faces declare it
        """The parts of a send one by one, for what sends in another way: imports, and duelog.aio.

        Made when it is first used: most topics of a list of them send nothing.
        """
        return self._engine.sender_to(self._name)

    @property
    def name(self) -> str:
        """Full name: persistent://tenant/namespace/name."""
        return str(self._name)

    def _existing(self) -> TopicState:
        """The topic's state. Raises UnknownTopic."""
        self._engine.check_open()
        return self._engine.topics.get(self._name)

    def send(
        self,
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
    ) -> MessageId:
        """Append one message and return its id once it is as durable as the store's `durability` says.

        deliver_at: epoch ms or an aware datetime; deliver_after: seconds or a timedelta; not both, and neither for a
        message that is due at once. A due time in the past is due at once; one before 2001 (10**12 ms) is taken for
        seconds given as milliseconds and refused, unless `allow_past`. ttl: how long after its due time it expires, as
        of `Message`. Raises InvalidMessage, DelayTooLong (a policy forbids the delay), StoreFull, StoreFailed; then
        nothing was appended.

        dedup_key: text, 1 to 256 bytes, under which the topic has one message at a time: while the key holds, nothing
        is stored, and the id of the message that is there is returned. It holds while that is pending, and with
        `dedup_for` at least so long after it was sent, also if it has fired; cancelling it frees the key, rescheduling
        does not. replace: instead, the pending message of the key is cancelled and this one sent, atomically; where
        none is pending this one is sent. `find` and `cancel_key` take the key. Raises InvalidArgument, too.
        """
        dedup = Dedup.checked(dedup_key, dedup_for, replace)
        if dedup is not None:
            message = Message(
                payload,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                key=key,
                properties=properties,
                ttl=ttl,
                dedup_key=dedup.key,
            )
            return self._engine.sending.keyed.send(
                self._name, message, dedup, self._engine.writing_at, allow_past=allow_past
            )
        return self.sender.send(payload, deliver_at, deliver_after, key, properties, allow_past, ttl)

    def send_async(
        self,
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
    ) -> Future[MessageId]:
        """As `send`, without waiting for the disk: a future of the id.

        Messages sent so to one topic by one thread keep their order. It waits only while `max_in_flight_bytes` of
        messages are on their way. A message that cannot be taken is refused here; the future has StoreFull or
        StoreFailed. A future that is cancelled before its message is being written takes it back. `close` of the store
        writes what is on its way. The message of a future that the caller completes is written all the same.
        """
        dedup = Dedup.checked(dedup_key, dedup_for, replace)
        future: Future[MessageId] = Future()
        sender, wanted = self.sender, Future.set_running_or_notify_cancel
        sender.put(
            sender.outgoing(
                payload,
                deliver_at,
                deliver_after,
                key,
                properties,
                allow_past,
                future,
                _resolve,
                dedup=dedup,
                wanted=wanted,
                ttl=ttl,
            ),
            wait=True,
        )
        return future

    def put(
        self,
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
        numbers: tuple[str, int, int] | None = None,
        token: object = None,
        done: Done,
        wait: bool = True,
    ) -> bool:
        """As `send_async`, without an object a message: `done` is called once for all that became durable together.

        done: called by the thread that writes, for each group of the write-ahead log, with a list of (token, outcome),
        the outcome a `MessageId`, `DUPLICATE`, or a DuelogError (StoreFull, StoreFailed ...): not stored. In the order
        in which they were put in; puts that were taken, by one thread or by several, are written in that order. It
        must be quick and hashable: no other message is written meanwhile. What it raises is logged. It may put.
        token: whatever tells `done` which message is meant.
        numbers: (name of a producer, first, last number, 0 to 2**62): the message is stored once however often it is
        put, as by `producer`; where all its numbers are stored its outcome is DUPLICATE. They are stored with the
        message, in one commit, and shared with `producer` and `producer_number`. Of a range over 65,536 numbers the
        first and the last count. A message only some of whose numbers are stored is stored.
        dedup_key, dedup_for, replace: as of `send`, decided on when the message is written. Not with numbers. The
        outcome of a message that is not stored is the id of the one that is there.
        wait: whether to wait for capacity, while `max_in_flight_bytes` of messages are on their way; without it False
        is returned then, with nothing done.

        Returns True: `done` will be called, at the latest while the store closes. With `wait=False` and without
        `numbers` it touches no disk. Raises InvalidMessage, DelayTooLong, InvalidArgument, ClosedError, StoreFailed,
        ResourceShortage: it was not taken. DelayTooLong is not raised for what is stored already.
        """
        checked = None if numbers is None else Numbers.checked(numbers)
        dedup = Dedup.checked(dedup_key, dedup_for, replace)
        if checked is not None and dedup is not None:
            raise InvalidArgument("dedup_key", dedup_key, "not with numbers: either says what is stored once")
        if not callable(done):
            raise InvalidArgument("done", done, "expected something to be called, with a hash")
        try:
            hash(done)
        except Exception as error:
            raise InvalidArgument("done", done, "expected something to be called, with a hash") from error
        sender = self.sender
        item = sender.outgoing(
            payload,
            deliver_at,
            deliver_after,
            key,
            properties,
            allow_past,
            token,
            done,
            numbers=checked,
            dedup=dedup,
            ttl=ttl,
        )
        return sender.put(item, wait=wait)

    def send_batch(self, messages: Iterable[Message], *, allow_past: bool = False) -> list[MessageId]:
        """Append messages; returns their ids, in the order of the messages, once all are durable.

        All are checked before any is written. They are one atomic group, over any number of time partitions: after a
        crash all of them are there, or none. More than a segment of the write-ahead log takes (`StoreConfig.wal_bytes`)
        are several groups: if one fails (StoreFull, StoreFailed) those before it stand. Raises InvalidMessage naming
        the first that cannot be taken (`messages[3].deliver_at`), and DelayTooLong.

        Those with a `dedup_key` are decided on one after the other, as if each were sent alone, in the same group.
        """
        return self.sender.send_batch(messages, allow_past=allow_past).to_list()

    def send_payloads(
        self,
        payloads: Sequence[bytes],
        *,
        deliver_at: DeliverAt = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> MessageIds:
        """`send_batch` for bulk: messages that are nothing but payloads, without an object for each.

        deliver_at: epoch ms for each payload (ints, or an integer array), or one time for all. deliver_after: for all.
        Each of the ids returned is made when it is looked at. Raises as `send_batch`, naming `deliver_at[3]`.
        """
        return self.sender.send_payloads(payloads, deliver_at, deliver_after, allow_past=allow_past)

    def create(self) -> bool:
        """Create the topic durably, without a message; False: it was there. Raises StoreFull, StoreFailed."""
        return self._engine.topics.create([self._name], self._engine.writing_at())[0]

    def producer(self, name: str) -> Producer:
        """A producer whose numbered messages are stored once however often they are sent. O(partitions).

        All producers of one name share their numbers. Raises InvalidArgument.
        """
        now_ms = self._engine.writing_at()
        validate_subscription_name(name, "producer")
        topic = self.sender.topic(now_ms)
        return Producer(self.sender, topic, self._engine.sending.producers.of(topic, name), name)

    def producer_number(self, name: str) -> int:
        """The highest number that a named producer has stored; -1: none. Also read-only. O(partitions) at first.

        Lower ones may be missing, as of `Producer.last_sequence_id`. Raises UnknownTopic, InvalidArgument.
        """
        validate_subscription_name(name, "producer")
        return self._engine.sending.producers.last(self._existing(), name)

    def cancel(self, message_id: AnyId) -> bool:
        """Cancel a delayed message. True: it is never delivered. False: it has fired, waits inline, or is unknown.

        A message fires `Clock.lead_ms` before it is delivered. Durable when it returns. Raises UnknownTopic,
        InvalidArgument, StoreFull, StoreFailed.
        """
        return self.cancel_batch([message_id])[0] in (Outcome.CANCELLED, Outcome.ALREADY_CANCELLED)

    def cancel_batch(self, message_ids: Sequence[AnyId]) -> list[Outcome]:
        """Cancel messages in one transaction; what became of each: cancelled, already cancelled, fired, unknown."""
        self._engine.check_writable()
        return self._engine.pending.topic_withdrawals.cancel(self._existing(), message_ids)

    def reschedule(
        self,
        message_id: AnyId,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> MessageId | None:
        """Give a delayed message another due time; its new id, or None: too late, cancelled or unknown.

        Atomic: at any crash the message is delivered once, at the old time or at the new one. With neither time given,
        or one in the past, it is due at once; `allow_past` as in `send`. Delay policies apply. Raises as `send` and
        `cancel`.
        """
        return self.reschedule_batch(
            [message_id], deliver_at=deliver_at, deliver_after=deliver_after, allow_past=allow_past
        )[0]

    def reschedule_batch(
        self,
        message_ids: Sequence[AnyId],
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> list[MessageId | None]:
        """Give messages another due time, in one transaction; as `reschedule`."""
        now_ms = self._engine.writing_at()
        return self._engine.pending.topic_withdrawals.reschedule(
            self._existing(), message_ids, deliver_at, deliver_after, now_ms, allow_past=allow_past
        )

    def fire_now(self, message_id: AnyId) -> MessageId | None:
        """Deliver a delayed message now: `reschedule` to this instant, whatever the delay policies say."""
        return self._engine.pending.topic_withdrawals.fire_now(self._engine.writing_at(), self._existing(), message_id)

    def state(self, message_id: AnyId) -> str:
        """What has become of a message: "scheduled", "cancelled", "fired" or "unknown". Raises UnknownTopic.

        One that waits inline (`inline_delay_ms`) is "scheduled" until it is due, but cannot be taken back any more.
        """
        return self._engine.pending.topic_withdrawals.state(self._existing(), message_id)

    def position_of(self, message_id: AnyId) -> Position | None:
        """Where in the main log a message is read: a delayed one's marker, once it has fired; of any other its own id.

        None: it has not fired, was cancelled, or is unknown (`state` tells), or its place was trimmed. `receive` gives
        the same as `position`, and `seek` takes it. O(runs of a ledger). Raises UnknownTopic, InvalidArgument.
        """
        return self._engine.pending.topic_withdrawals.position_of(self._existing(), message_id)

    def positions(self) -> LogPositions:
        """First, last and next position of the main log, the last as may be read now. Raises UnknownTopic."""
        state, now_ms = self._existing(), self._engine.clock.now_ms()
        return log_positions(state.log, lambda: self._engine.delivery.inline.waiting(state, now_ms), now_ms)

    def ledgers(self) -> list[LedgerInfo]:
        """The ledgers of the main log that are kept, the open one last. Raises UnknownTopic."""
        return self._existing().log.ledgers()

    def get(self, message_id: AnyId) -> ScheduledMessage | None:
        """The stored message of an id that `send` gave; None when it is gone (its log was trimmed or deleted).

        Whether it has fired or not does not matter. O(partitions) where they are not open. Raises CorruptEntry,
        UnknownTopic, InvalidArgument.
        """
        return self._engine.delivery.inline.get(self._existing(), id_of(message_id))

    def scheduled(
        self,
        start: int | datetime | None = None,
        end: int | datetime | None = None,
        limit: int | None = None,
        *,
        after: MessageId | None = None,
    ) -> Iterator[ScheduledMessage]:
        """Delayed messages that are not due, or have not fired, due in [start, end), by due time, at most `limit`.

        Nothing is fired or delivered, and no index is loaded. start, end: epoch ms or aware datetimes; None: from the
        first, to the last. after: a message that is due at `start`, the last of an earlier call: this one begins behind
        it, also where others are due at that instant. Raises UnknownTopic, InvalidArgument.
        """
        start_ms = 0 if start is None else at_ms("start", start)
        end_ms = MAX_DUE_MS + 1 if end is None else at_ms("end", end)
        if end_ms < start_ms:
            raise InvalidArgument("end", end, f"is before start={start!r}")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise InvalidArgument("limit", limit, "expected an int of at least 0, or None")
        if after is not None and not isinstance(after, MessageId):
            raise InvalidArgument("after", after, "expected a MessageId")
        return islice(self._engine.delivery.inline.scheduled(self._existing(), start_ms, end_ms, after), limit)

    def exists(self) -> bool:
        """Whether the topic has come into being."""
        self._engine.check_open()
        return self._engine.topics.find(self._name) is not None

    def stats(self) -> TopicStats:
        """Figures of the topic; O(partitions). Raises UnknownTopic."""
        return self._engine.figures.of_topic(self._existing())

    def __repr__(self) -> str:
        return f"<Topic {self.name}>"


def _resolve(results: list[tuple[Future[MessageId], PutOutcome]]) -> None:
    """Have futures know what became of their messages. One that its caller has completed holds up no other."""
    for future, outcome in results:
        if isinstance(outcome, MessageId):
            call_supplied(future.set_result, outcome)
        elif isinstance(outcome, Exception):
            call_supplied(future.set_exception, outcome)
