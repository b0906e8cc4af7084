"""Topic: what producers send to, and where consumers subscribe."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from itertools import islice

from duelog.markers.pending_entries import Outcome
from duelog.store.codec.body import encode_one
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import InvalidArgument, UnknownSubscription, checked_int, checked_list, short_names
from duelog.store.listener import call_supplied
from duelog.store.log.managed_ledger import LedgerInfo
from duelog.store.message import (
    MAX_DUE_MS,
    AnyId,
    Dedup,
    Message,
    ScheduledMessage,
    asked_due_ms,
    at_ms,
    checked_dedup_key,
    id_of,
)
from duelog.store.names import TopicName, validate_subscription_name
from duelog.store.position import MessageId, MessageIds, Position

from .delivery.consumer_arguments import Failover, check_subscribing
from .delivery.dispatcher import SubscriptionType
from .delivery.key_slots import KeyShared
from .engine import Engine, writing
from .sending.outbox import Done, Numbers, PutOutcome
from .sending.producer import Producer
from .sending.topic_sender import DeliverAt, TopicSender
from .stats import TopicStats
from .subscription import Subscription, SubscriptionAdmin
from .topics.seeking import LogPositions, SeekTarget, log_positions
from .topics.topic_state import TopicState
from .upkeep.recurring import first_occurrence
from .upkeep.schedule import DEFAULT_GRACE, MISFIRES, WITH_GRACE, Misfires, Schedule, Timetable

_KEYS_AT_ONCE = 256
"""Keys that one transaction of `cancel_keys` has for itself."""


class Topic:
    """A topic of an open store. Made by DelayedStore.topic; thread-safe; needs no closing.

    The topic itself comes into being with the first message or subscription, or by `create`. Where a method takes a
    message's id, the text of the id and the message itself do as well.
    """

    def __init__(self, engine: Engine, name: TopicName) -> None:
        self._engine = engine
        self._name = name

    @cached_property
    def sender(self) -> TopicSender:
        """The parts of a send one by one, for what sends in another way: imports, and duelog.aio.

        Made when it is first used: most topics of a list of them send nothing.
        """
        return TopicSender(self._name, self._engine.sending.store)

    @property
    def name(self) -> str:
        """Full name: persistent://tenant/namespace/name."""
        return str(self._name)

    def _await_copy(self) -> None:
        self._engine.settle(self._name)

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
        is stored, and the id of the message that is there is returned, whose `stored` is False. It holds while that is
        pending, and with `dedup_for` at least so long after it was sent, also if it has fired; cancelling it frees the
        key, rescheduling does not. replace: instead, the pending message of the key is cancelled and this one sent,
        atomically; where none is pending this one is sent. `find` and `cancel_key` take the key. Raises
        InvalidArgument, too.
        """
        sender, dedup = self.sender, Dedup.checked(dedup_key, dedup_for, replace)
        encoded = sender.encode_one(payload, deliver_at, deliver_after, key, properties, allow_past, ttl, dedup)
        message_id = sender.send(encoded, dedup)
        self._engine.settle(self._name)
        return message_id

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
        """Append one message without waiting for the disk; returns a future of its id. Arguments: as `send`.

        Messages sent so to one topic by one thread keep their order. It waits only while `max_in_flight_bytes` of
        messages are on their way. A message that cannot be taken is refused here; the future has StoreFull or
        StoreFailed. A future that is cancelled before its message is being written takes it back. `close` of the store
        writes what is on its way. The message of a future that the caller completes is written all the same.
        """
        dedup = Dedup.checked(dedup_key, dedup_for, replace)
        future: Future[MessageId] = Future()
        sender, wanted = self.sender, Future.set_running_or_notify_cancel
        encoded = sender.encode_one(payload, deliver_at, deliver_after, key, properties, allow_past, ttl, dedup)
        sender.put(sender.outgoing(encoded, future, _resolve, dedup=dedup, wanted=wanted), wait=True)
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
        """Append one message, and have `done` called once for all messages that became durable together.

        It allocates no future per message. Arguments that are not named here: as `send`.

        done: called by the thread that writes, for each group of the write-ahead log, with a list of (token, outcome),
        the outcome a `MessageId`, `DUPLICATE`, or a DuelogError (StoreFull, StoreFailed ...): not stored. In the order
        in which they were put in; puts that were taken, by one thread or by several, are written in that order. It
        must be quick and hashable: no other message is written meanwhile. What it raises is logged. It may put.
        token: whatever tells `done` which message is meant.
        numbers: (name of a producer, first, last number, 0 to 2**62): the message is stored once however often it is
        put, as by `producer`; where all its numbers are stored its outcome is DUPLICATE. They are stored with the
        message, in one commit, and shared with `producer` and `producer_number`. Of a range over 65,536 numbers the
        first and the last count. A message only some of whose numbers are stored is stored.
        dedup_key, dedup_for, replace: as of `send`, decided on when the message is written. The outcome of a message
        that is not stored is the id of the one that is there, whose `stored` is False.
        wait: whether to wait for capacity, while `max_in_flight_bytes` of messages are on their way; without it False
        is returned then, with nothing done.

        Returns True: `done` will be called, at the latest while the store closes. With `wait=False` and without
        `numbers` it touches no disk. Raises InvalidMessage, DelayTooLong, InvalidArgument, ClosedError, StoreFailed,
        ResourceShortage: it was not taken. DelayTooLong is not raised for what is stored already.
        """
        checked = None if numbers is None else Numbers.checked(numbers)
        dedup = Dedup.checked(dedup_key, dedup_for, replace)
        if not callable(done):
            raise InvalidArgument("done", done, "expected something to be called, with a hash")
        try:
            hash(done)
        except Exception as error:
            raise InvalidArgument("done", done, "expected something to be called, with a hash") from error
        sender = self.sender
        encoded = sender.encode_one(payload, deliver_at, deliver_after, key, properties, allow_past, ttl, dedup)
        return sender.put(sender.outgoing(encoded, token, done, dedup=dedup, numbers=checked), wait=wait)

    @writing
    def send_batch(self, messages: Iterable[Message], *, allow_past: bool = False) -> list[MessageId]:
        """Append messages; returns their ids, in the order of the messages, once all are durable.

        All are checked before any is written. They are one atomic group, over any number of time partitions: after a
        crash all of them are there, or none. More than a segment of the write-ahead log takes (`StoreConfig.wal_bytes`)
        are several groups: if one fails (StoreFull, StoreFailed) those before it stand. Raises InvalidMessage naming
        the first that cannot be taken (`messages[3].deliver_at`), and DelayTooLong.

        Those with a `dedup_key` are decided on one after the other, as if each were sent alone, in the same group.
        """
        return self.sender.send_batch(messages, allow_past=allow_past).to_list()

    @writing
    def send_payloads(
        self,
        payloads: Sequence[bytes],
        *,
        deliver_at: DeliverAt = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> MessageIds:
        """`send_batch` for bulk: messages that are nothing but payloads, without an object for each.

        deliver_at: a time for each payload (epoch ms or aware datetimes, or an integer array), or one time for all.
        deliver_after: for all. Each of the ids returned is made when it is looked at. Raises as `send_batch`, naming
        `deliver_at[3]`.
        """
        return self.sender.send_payloads(payloads, deliver_at, deliver_after, allow_past=allow_past)

    @writing
    def create(self) -> bool:
        """Create the topic durably, without a message; False: it was there. Raises StoreFull, StoreFailed."""
        return self._engine.topics.create([self._name], self._engine.clock.now_ms())[0]

    def producer(self, name: str) -> Producer:
        """A producer whose numbered messages are stored once however often they are sent. O(partitions).

        All producers of one name share their numbers. Raises InvalidArgument.
        """
        now_ms = self._engine.writing_at()
        validate_subscription_name(name, "producer")
        topic = self.sender.topic(now_ms)
        producer = self._engine.sending.producers.of(topic, name)
        return Producer(self.sender, topic, producer, name, self._await_copy)

    def producer_number(self, name: str) -> int:
        """The highest number that a named producer has stored; -1: none. Also read-only. O(partitions) at first.

        Lower ones may be missing, as of `Producer.last_sequence_id`. Raises UnknownTopic, InvalidArgument.
        """
        validate_subscription_name(name, "producer")
        return self._engine.sending.producers.last(self._existing(), name)

    def cancel(self, message_id: AnyId) -> bool:
        """Cancel a delayed message. True: it is never delivered. False: it has fired, waits inline, or is unknown.

        True also for an id that was cancelled before (`cancel_batch` tells), as is that of a message which was
        rescheduled: this is still delivered under its new id. A message fires `Clock.lead_ms` before it is delivered.
        Durable when it returns. Raises UnknownTopic, InvalidArgument, StoreFull, StoreFailed.
        """
        return self.cancel_batch([message_id])[0] in (Outcome.CANCELLED, Outcome.ALREADY_CANCELLED)

    @writing
    def cancel_batch(self, message_ids: Sequence[AnyId]) -> list[Outcome]:
        """Cancel messages in one transaction; what became of each: cancelled, already cancelled, fired, unknown."""
        topic = self._engine.topics.get(self._name)
        return self._engine.pending.withdrawals.cancel(topic, message_ids)

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

    @writing
    def reschedule_batch(
        self,
        message_ids: Sequence[AnyId],
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> list[MessageId | None]:
        """Give messages another due time, in one transaction; as `reschedule`."""
        now_ms, topic = self._engine.clock.now_ms(), self._engine.topics.get(self._name)
        asked_ms = asked_due_ms(deliver_at, deliver_after, now_ms, allow_past=allow_past)
        return self._engine.pending.withdrawals.reschedule(topic, message_ids, asked_ms, now_ms)

    @writing
    def fire_now(self, message_id: AnyId) -> MessageId | None:
        """Deliver a delayed message now: `reschedule` to this instant, whatever the delay policies say."""
        now_ms, topic = self._engine.clock.now_ms(), self._engine.topics.get(self._name)
        return self._engine.pending.withdrawals.fire_now(topic, message_id, now_ms)

    def state(self, message_id: AnyId) -> str:
        """Return the state of a message: "scheduled", "cancelled", "fired" or "unknown". Raises UnknownTopic.

        One that waits inline (`inline_delay_ms`) is "scheduled" until it is due, but cannot be taken back any more.
        """
        return self._engine.pending.withdrawals.state(self._existing(), message_id)

    def position_of(self, message_id: AnyId) -> Position | None:
        """Where in the main log a message is read: a delayed one's marker, once it has fired; of any other its own id.

        None: it has not fired, was cancelled, or is unknown (`state` tells), or its place was trimmed. `receive` gives
        the same as `position`, and `seek` takes it. O(runs of a ledger). Raises UnknownTopic, InvalidArgument.
        """
        return self._engine.pending.withdrawals.position_of(self._existing(), message_id)

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
        newest_first: bool = False,
    ) -> Iterator[ScheduledMessage]:
        """Delayed messages that are not due, or have not fired, due in [start, end), by due time, at most `limit`.

        Nothing is fired or delivered, and no index is loaded. start, end: epoch ms or aware datetimes; None: from the
        first, to the last. after: a message that is due at `start`, the last of an earlier call: this one begins behind
        it, also where others are due at that instant. newest_first: the message that is due last comes first; not with
        `after`. Raises UnknownTopic, InvalidArgument.
        """
        start_ms, end_ms = _range_ms(start, end)
        limit = None if limit is None else checked_int("limit", limit, 0, "an int of at least 0, or None")
        if after is not None and not isinstance(after, MessageId):
            raise InvalidArgument("after", after, "expected a MessageId")
        if after is not None and newest_first:
            raise InvalidArgument("newest_first", newest_first, "not with `after`, which goes on by due time")
        inline, most = self._engine.delivery.inline, limit and min(limit, sys.maxsize)
        return islice(inline.scheduled(self._existing(), start_ms, end_ms, after, backwards=newest_first), most)

    def count(
        self, start: int | datetime | None = None, end: int | datetime | None = None, *, prefix: str | None = None
    ) -> int:
        """Count the messages that `scheduled` has of [start, end), without reading their payloads.

        prefix: only those sent with a deduplication key that begins with it; then each is looked at. Raises
        UnknownTopic, InvalidArgument.
        """
        start_ms, end_ms = _range_ms(start, end)
        if prefix is None:
            return self._engine.delivery.inline.count_scheduled(self._existing(), start_ms, end_ms)
        return self._engine.sending.keyed.count(self._existing(), prefix, start_ms, end_ms)

    # -- by deduplication key -------------------------------------------------------------------------

    @writing
    def cancel_key(self, key: str) -> bool:
        """Cancel the pending message of a deduplication key. True: it is never delivered, and the key is free.

        False: there is none; it has fired, was cancelled, or never was. Durable when it returns. One look and one
        commit, however many messages are pending. Raises UnknownTopic, InvalidArgument, StoreFull, StoreFailed.
        """
        return self._engine.sending.keyed.cancel(self._existing(), key)

    def cancel_keys(self, keys: Iterable[str] | None = None, *, prefix: str | None = None) -> list[str]:
        """Cancel the pending messages of deduplication keys: of these, or of all that begin with a prefix.

        Returns the keys that had one, whose messages are never delivered. Durable when it returns, in transactions of
        up to 256 keys. A message that is sent meanwhile under another key with the prefix may be cancelled or not.
        Raises as `cancel_key`; InvalidArgument where both are given, or neither.
        """
        self._engine.check_writable()
        if (keys is None) == (prefix is None):
            raise InvalidArgument("keys", keys, "expected keys, or a prefix: one of the two")
        keyed, topic = self._engine.sending.keyed, self._existing()
        found = keyed.keys(topic, prefix or "") if keys is None else checked_list("keys", keys, "keys, or a prefix")
        wanted = list(found if keys is None else map(checked_dedup_key, found))
        cancelled: list[str] = []
        for at in range(0, len(wanted), _KEYS_AT_ONCE):
            cancelled += keyed.cancel_all(topic, wanted[at : at + _KEYS_AT_ONCE])
        return cancelled

    def keys(self, prefix: str = "") -> Iterator[str]:
        """The deduplication keys of pending messages that begin with `prefix`, in the order of their bytes.

        What is sent or cancelled meanwhile may be seen or not. Raises UnknownTopic, InvalidArgument.
        """
        return self._engine.sending.keyed.keys(self._existing(), prefix)

    def find(self, key: str) -> ScheduledMessage | None:
        """The pending message of a deduplication key; None: there is none. Also read-only, and no scan.

        A message that has fired is not pending, also where its key still holds (`dedup_for`). Raises UnknownTopic,
        InvalidArgument, CorruptEntry.
        """
        return self._engine.sending.keyed.find(self._existing(), key)

    # -- schedules ------------------------------------------------------------------------------------

    @writing
    def every(
        self,
        name: str,
        *,
        cron: str | None = None,
        interval: Duration | None = None,
        timezone: str = "UTC",
        payload: bytes = b"",
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        until: int | datetime | None = None,
        count: int | None = None,
        jitter: Duration = 0,
        misfires: Misfires = "first",
        grace: Duration | None = None,
    ) -> Schedule:
        """Have a message sent again and again: by `cron` in `timezone` (an IANA name), or each `interval`.

        cron: an expression, `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`, or `@every 90m`. interval: seconds
        or a timedelta, 1 s at least, from now. The schedule is kept under `name`: to ask for the same again changes
        nothing, for another replaces it, and `replaced` of what is returned is the one that was there.

        until: the latest nominal time, epoch ms or an aware datetime. count: so many messages are sent. Once it has
        ended it is kept, so that asking for the same again does not begin anew; `remove_schedule` forgets it.

        jitter: an occurrence is due up to so much after its nominal time, and always before the nominal time of the
        next. How much follows from topic, name and nominal time: it is the same after a restart.

        misfires: what comes, after a stop or a jump of the clock, of the occurrences that were missed. "first": the
        one that waited, once, late. "all": each, in order. "latest": one, the last of them. "skip": none. For "latest"
        and "skip" one is a misfire that could not come within `grace` (60 s by default) of its due time: those that
        are later by less come.

        `occurrence` of a received message names its schedule and nominal time. Durable when it returns. Raises
        InvalidArgument, StoreFull, StoreFailed.
        """
        validate_subscription_name(name, "schedule")
        table = Timetable.make(cron, interval, timezone)
        message = Message(payload, key=key, properties=properties)
        encode_one(message, 0, self._engine.storage.config.max_message_bytes)
        count = None if count is None else checked_int("count", count, 1, "an int from 1 on", (1 << 63) - 1)
        if misfires not in MISFIRES:
            raise InvalidArgument("misfires", misfires, f"expected one of {', '.join(MISFIRES)}")
        if grace is not None and misfires not in WITH_GRACE:
            raise InvalidArgument("grace", grace, f"only with misfires {' and '.join(WITH_GRACE)}, not {misfires}")
        if misfires in WITH_GRACE and grace is None:
            grace = DEFAULT_GRACE
        asked = Schedule(
            name,
            "",
            table.cron,
            table.interval_ms,
            table.timezone,
            bytes(payload),
            key,
            dict(properties or {}),
            next_due_ms=None,
            next_id=None,
            paused=False,
            until_ms=None if until is None else at_ms("until", until),
            count=count,
            jitter_ms=duration_ms("jitter", jitter),
            misfires=misfires,
            grace_ms=duration_ms("grace", DEFAULT_GRACE if grace is None else grace)
            if misfires in WITH_GRACE
            else None,
        )
        if not self.exists():
            first_occurrence(asked, self._engine.clock.now_ms())  # what is refused makes no topic
        topic = self.sender.topic(self._engine.clock.now_ms())
        return self._engine.upkeep.recurring.every(topic, replace(asked, topic=str(topic.name)))

    def schedules(self) -> list[Schedule]:
        """The topic's schedules by name. Raises UnknownTopic."""
        return self._engine.upkeep.recurring.of_topic(self._existing())

    @writing
    def pause_schedule(self, name: str) -> Schedule | None:
        """Take a schedule's waiting occurrence back, until it is resumed; None: there is no such schedule."""
        return self._engine.upkeep.recurring.pause(self._existing(), name)

    @writing
    def resume_schedule(self, name: str) -> Schedule | None:
        """Go on with the first occurrence after now; None: there is no such schedule."""
        return self._engine.upkeep.recurring.resume(self._existing(), name)

    @writing
    def remove_schedule(self, name: str) -> bool:
        """End a schedule and take its waiting occurrence back; False: there is no such schedule."""
        return self._engine.upkeep.recurring.remove(self._existing(), name)

    # -- subscriptions --------------------------------------------------------------------------------

    @writing
    def subscribe(
        self,
        name: str,
        *,
        type: SubscriptionType = "exclusive",
        initial_position: str = "earliest",
        failover: Failover | None = None,
        key_shared: KeyShared | None = None,
    ) -> Subscription:
        """Attach a consumer to the subscription `name`, creating it durably where there is none.

        type: "exclusive" (one consumer), "failover" (the first of several gets all, the next takes over), "shared"
        (each message to one of many) or "key_shared" (as shared, and the messages of a key in order, one consumer at a
        time). initial_position, of a new subscription: "earliest", with what the main log still holds, or "latest",
        with what comes into the main log from now on; delayed messages sent before and not due yet come either way,
        wherever they wait. failover: how it takes part in a failover subscription; None: by its arrival.
        key_shared: how it takes part in a key-shared one, or in a shared one that keeps some messages together; None:
        by the messages' keys. Raises ConsumerBusy, InvalidArgument.
        """
        now_ms = self._engine.writing_at()
        check_subscribing(name, type, initial_position, failover, key_shared)
        state = self.sender.topic(now_ms)
        subscription = self._engine.topics.add_subscription(
            state,
            name,
            now_ms,
            lambda: self._engine.delivery.inline.waiting(state, now_ms),
            earliest=initial_position == "earliest",
        )
        return Subscription(self._engine, state, subscription, type, failover or key_shared)

    def reader(
        self,
        start: SeekTarget = "earliest",
        *,
        name: str | None = None,
        type: SubscriptionType = "exclusive",
        failover: Failover | None = None,
        key_shared: KeyShared | None = None,
    ) -> Subscription:
        """Attach a consumer from a position or time on, by a subscription that leaves nothing behind.

        It has no record in the store, holds nothing back from being trimmed (what is trimmed before it was read is
        passed over), and vanishes when its last consumer closes. It receives as any subscription does, delays too:
        what it does not acknowledge comes again after `ack_timeout_ms`, where that is set. start: as
        `Subscription.seek`. name: several consumers of one name share one reader, begun where the first of them said;
        None: a name of its own. The rest: as `subscribe`. Dead letters and `retry_later` are for subscriptions
        only. Raises ConsumerBusy, InvalidArgument (also for the name of a subscription).
        """
        self._engine.writing_at()
        state = self.sender.topic(self._engine.clock.now_ms())
        wanted = state.new_reader_name() if name is None else name
        check_subscribing(wanted, type, "earliest", failover, key_shared)
        if wanted in state.subscriptions:
            raise InvalidArgument("name", name, "the topic has a subscription of this name")
        engine = self._engine
        position = engine.target_of(state, start)
        while True:
            now_ms = self._engine.clock.now_ms()
            subscription = state.reader(wanted, position, self._engine.delivery.inline.waiting(state, now_ms), now_ms)
            try:
                return Subscription(self._engine, state, subscription, type, failover or key_shared)
            except UnknownSubscription:  # its last consumer has left meanwhile
                if state.deleted:
                    raise

    @writing
    def unsubscribe(self, name: str) -> None:
        """Remove a subscription and what it holds. Raises UnknownSubscription, UnknownTopic, ConsumerBusy."""
        self._engine.upkeep.removal.remove_subscription(self._existing(), name)

    @writing
    def clear_inline(self, subscription: str) -> int:
        """Acknowledge, for one subscription alone, what waits in the topic's main log and is not due yet (PIP-448).

        These are messages sent with a delay of at most `inline_delay_ms`; other subscriptions still get them. What
        waits in time partitions, and what is due, stays. Works with consumers attached and without. Durable when it
        returns; how many this subscription had not acknowledged. Raises UnknownTopic, UnknownSubscription, StoreFull,
        StoreFailed.
        """
        return self._engine.delivery.inline.clear(self._existing(), subscription)

    def subscription(self, name: str) -> SubscriptionAdmin:
        """A subscription to inspect and change without attaching. Raises UnknownSubscription, UnknownTopic."""
        topic = self._existing()
        return SubscriptionAdmin(self._engine, topic, topic.subscription(name))

    def subscriptions(self) -> list[str]:
        """Names of the subscriptions. Raises UnknownTopic."""
        return sorted(self._existing().subscriptions)

    # -- the rest -------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return True if the topic exists."""
        self._engine.check_open()
        return self._engine.topics.find(self._name) is not None

    def stats(self) -> TopicStats:
        """Figures of the topic; O(partitions). Raises UnknownTopic."""
        return self._engine.figures.of_topic(self._existing())

    def __repr__(self) -> str:
        return f"<Topic {short_names(self.name)}>"


def _range_ms(start: int | datetime | None, end: int | datetime | None) -> tuple[int, int]:
    """A range of due times; None: from the first, to the last. Raises InvalidArgument."""
    start_ms = 0 if start is None else at_ms("start", start)
    end_ms = MAX_DUE_MS + 1 if end is None else at_ms("end", end)
    if end_ms < start_ms:
        raise InvalidArgument("end", end, f"is before start={start!r}")
    return start_ms, end_ms


def _resolve(results: list[tuple[Future[MessageId], PutOutcome]]) -> None:
    """Have futures know what became of their messages. One that its caller has completed holds up no other."""
    for future, outcome in results:
        if isinstance(outcome, MessageId):
            call_supplied(future.set_result, outcome)
        elif isinstance(outcome, Exception):
            call_supplied(future.set_exception, outcome)
