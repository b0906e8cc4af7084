"""Topic: what producers send to, and where consumers subscribe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice

import numpy as np

from duelog.markers.lookup import find_partition, read_entry
from duelog.markers.pending_entries import Outcome
from duelog.store.codec.body import EncodedBatch, encode_one
from duelog.store.errors import ClosedError, DamagedStore, InvalidArgument, UnknownSubscription
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.store.message import MAX_DUE_MS, Message, ScheduledMessage, at_ms, resolve_due_ms
from duelog.store.names import validate_subscription_name
from duelog.store.position import MessageId

from .background.recurring import Schedule
from .background.timetable import Timetable
from .delivery.dispatcher import SubscriptionType
from .sending.topic_sending import SendingTopic
from .stats import TopicStats, topic_stats
from .subscription import Subscription
from .topics.inline import clear, is_hidden, scheduled_messages, waiting
from .topics.topic_state import TopicState

_TYPES = ("exclusive", "failover", "shared", "key_shared")
_POSITIONS = ("earliest", "latest")
_STATES = {
    None: "scheduled",
    Outcome.ALREADY_CANCELLED: "cancelled",
    Outcome.FIRED: "fired",
    Outcome.UNKNOWN: "unknown",
}


class Topic(SendingTopic):
    """A topic of an open store. Made by DelayedStore.topic; thread-safe; needs no closing.

    The topic itself comes into being with the first message or subscription.
    """

    def _existing(self) -> TopicState:
        """The topic's state. Raises UnknownTopic."""
        self._engine.check_open()
        return self._engine.topics.get(self._name)

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(
        self, name: str, *, type: SubscriptionType = "exclusive", initial_position: str = "earliest"
    ) -> Subscription:
        """Attach a consumer to the subscription `name`, creating it durably where there is none.

        type: "exclusive" (one consumer), "failover" (the first of several is served, the next takes over),
        "shared" (each message to one of many) or "key_shared" (as shared, and the messages of a key in order,
        one consumer at a time). initial_position, of a
        new subscription: "earliest", with what the main log still holds, or "latest", with what comes into
        the main log from now on; delayed messages sent before and not due yet come either way, wherever they wait.
        Raises ConsumerBusy, InvalidArgument.
        """
        if self._engine.read_only:
            raise ClosedError(f"store {self._engine.path} is open read-only; for subscribing it")
        self._engine.check_writable()
        validate_subscription_name(name)
        if type not in _TYPES:
            raise InvalidArgument("type", type, f"expected one of {', '.join(_TYPES)}")
        if initial_position not in _POSITIONS:
            raise InvalidArgument("initial_position", initial_position, f"expected one of {', '.join(_POSITIONS)}")
        now_ms = self._engine.clock.now_ms()
        state = self._state(now_ms)
        subscription = self._engine.topics.add_subscription(
            state, name, initial_position == "earliest", now_ms, lambda: waiting(self._engine, state, now_ms)
        )
        return Subscription(self._engine, state, subscription, type)

    def unsubscribe(self, name: str) -> None:
        """Remove a subscription and what it holds. Raises UnknownSubscription, UnknownTopic, ConsumerBusy."""
        self._engine.check_writable()
        state = self._existing()
        if name not in state.subscriptions:
            raise UnknownSubscription(self.name, name)
        self._engine.remove_subscription(state, name)

    def clear_inline(self, subscription: str) -> int:
        """Acknowledge, for one subscription alone, what waits in the topic's main log and is not due yet (PIP-448).

        These are messages sent with a delay of at most `inline_delay_ms`; other subscriptions still get them. What
        waits in time partitions, and what is due, stays. Works with consumers attached and without. Durable when it
        returns; how many this subscription had not acknowledged. Raises UnknownTopic, UnknownSubscription, StoreFull,
        StoreFailed.
        """
        self._engine.check_writable()
        state = self._existing()
        found = state.subscriptions.get(subscription)
        if found is None:
            raise UnknownSubscription(self.name, subscription)
        return clear(self._engine, state, found)

    # -- taking back -------------------------------------------------------------------------------

    def cancel(self, message_id: MessageId) -> bool:
        """Cancel a delayed message. True: it is never delivered. False: it has fired, waits inline, or is unknown.

        A message fires `Clock.lead_ms` before it is delivered. Durable when it returns. Raises UnknownTopic,
        InvalidArgument, StoreFull, StoreFailed.
        """
        return self.cancel_batch([message_id])[0] in (Outcome.CANCELLED, Outcome.ALREADY_CANCELLED)

    def cancel_batch(self, message_ids: Sequence[MessageId]) -> list[Outcome]:
        """Cancel messages in one transaction; what became of each: cancelled, already cancelled, fired, unknown."""
        self._engine.check_writable()
        outcomes = self._engine.withdrawals.cancel(self._existing().log, _ids(message_ids))
        if self._engine.metrics is not None:
            self._engine.metrics.cancelled(self._name, outcomes.count(Outcome.CANCELLED))
        return outcomes

    def reschedule(
        self,
        message_id: MessageId,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> MessageId | None:
        """Give a delayed message another due time; its new id, or None: too late, cancelled or unknown.

        Atomic: at any crash the message is delivered once, at the old time or at the new one. With neither
        time given, or one in the past, it is due at once; `allow_past` as in `send`. Delay policies apply. Raises as
        `send` and `cancel`.
        """
        return self.reschedule_batch(
            [message_id], deliver_at=deliver_at, deliver_after=deliver_after, allow_past=allow_past
        )[0]

    def reschedule_batch(
        self,
        message_ids: Sequence[MessageId],
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> list[MessageId | None]:
        """Give messages another due time, in one transaction; as `reschedule`."""
        now_ms = self._writing_at()
        times = Message(b"", deliver_at=deliver_at, deliver_after=deliver_after)
        asked = resolve_due_ms(times, now_ms, allow_past=allow_past)
        due_ms = now_ms if asked is None else asked
        ids = _ids(message_ids)
        log = self._existing().log
        batch = EncodedBatch(np.full(len(ids), due_ms, dtype=np.int64), np.full(len(ids), due_ms > now_ms), [])
        self.apply_policies(batch, now_ms)
        new_ids = self._reschedule(log, ids, batch.dues.tolist())
        if batch.overridden is not None:
            self._engine.policies.stored(self._name, batch.overridden[[each is not None for each in new_ids]])
        return new_ids

    def _reschedule(self, log: ManagedLedger, ids: Sequence[MessageId], dues: Sequence[int]) -> list[MessageId | None]:
        new_ids = self._engine.withdrawals.reschedule(log, ids, dues)
        if self._engine.metrics is not None:
            self._engine.metrics.rescheduled(self._name, len(new_ids) - new_ids.count(None))
        return new_ids

    def fire_now(self, message_id: MessageId) -> MessageId | None:
        """Deliver a delayed message now: `reschedule` to this instant, whatever the delay policies say."""
        self._engine.check_writable()
        ids = _ids([message_id])
        return self._reschedule(self._existing().log, ids, [self._engine.clock.now_ms()])[0]

    def state(self, message_id: MessageId) -> str:
        """What has become of a message: "scheduled", "cancelled", "fired" or "unknown". Raises UnknownTopic.

        One that waits inline (`inline_delay_ms`) is "scheduled" until it is due, but cannot be taken back any more.
        """
        self._engine.check_open()
        topic = self._existing()
        outcome = self._engine.withdrawals.states(topic.log, _ids([message_id]))[0]
        return "scheduled" if is_hidden(self._engine, topic, message_id) else _STATES[outcome]

    # -- recurring ---------------------------------------------------------------------------------

    def every(
        self,
        name: str,
        *,
        cron: str | None = None,
        interval: float | timedelta | None = None,
        timezone: str = "UTC",
        payload: bytes = b"",
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> Schedule:
        """Have a message sent again and again: by `cron` in `timezone` (an IANA name), or each `interval`.

        interval: seconds or a timedelta, 1 s at least, from now. The schedule is kept under `name`: to ask for the
        same again changes nothing, for another replaces it. After a stop the occurrence that waited comes once,
        and then the next after now. Durable when it returns. Raises InvalidArgument, StoreFull, StoreFailed.
        """
        self._engine.check_writable()
        validate_subscription_name(name, "schedule")
        table = Timetable.make(cron, interval, timezone)
        message = Message(payload, key=key, properties=properties)
        encode_one(message, 0, self._engine.config.max_message_bytes)
        return self._engine.recurring.every(self._state(self._engine.clock.now_ms()), name, table, message)

    def schedules(self) -> list[Schedule]:
        """The topic's schedules by name. Raises UnknownTopic."""
        return self._engine.recurring.of_topic(self._existing())

    def pause_schedule(self, name: str) -> Schedule | None:
        """Take a schedule's waiting occurrence back, until it is resumed; None: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.recurring.pause(self._existing(), name)

    def resume_schedule(self, name: str) -> Schedule | None:
        """Go on with the first occurrence after now; None: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.recurring.resume(self._existing(), name)

    def remove_schedule(self, name: str) -> bool:
        """End a schedule and take its waiting occurrence back; False: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.recurring.remove(self._existing(), name)

    # -- looking -----------------------------------------------------------------------------------

    def get(self, message_id: MessageId) -> ScheduledMessage | None:
        """The stored message of an id that `send` gave; None when it is gone (its log was trimmed or deleted).

        Whether it has fired or not does not matter. O(partitions) where they are not open. Raises
        CorruptEntry, UnknownTopic, InvalidArgument.
        """
        if not isinstance(message_id, MessageId):
            raise InvalidArgument("message_id", message_id, "expected a MessageId")
        state = self._existing()
        if state.log.entries_of(message_id.ledger_id) is not None:
            return read_entry(self._engine.main, message_id, self.name)
        partition = find_partition(self._engine.partitions, state.topic_id, message_id.ledger_id)
        if partition is None:
            return None
        try:
            with self._engine.partitions.lease(partition):
                return read_entry(partition.environment, message_id, self.name)
        except DamagedStore:
            if self._engine.partitions.registered(partition):
                raise
            return None  # deleted since it was found

    def scheduled(
        self, start: int | datetime | None = None, end: int | datetime | None = None, limit: int | None = None
    ) -> Iterator[ScheduledMessage]:
        """Delayed messages that are not due, or have not fired, due in [start, end), by due time, at most `limit`.

        Nothing is fired or delivered, and no index is loaded. start, end: epoch ms or aware datetimes;
        None: from the first, to the last. Raises UnknownTopic, InvalidArgument.
        """
        start_ms = 0 if start is None else at_ms("start", start)
        end_ms = MAX_DUE_MS + 1 if end is None else at_ms("end", end)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise InvalidArgument("limit", limit, "expected an int of at least 0, or None")
        state = self._existing()
        return islice(scheduled_messages(self._engine, state, start_ms, end_ms), limit)

    def exists(self) -> bool:
        """Whether the topic has come into being."""
        self._engine.check_open()
        return self._engine.topics.find(self._name) is not None

    def subscriptions(self) -> list[str]:
        """Names of the subscriptions. Raises UnknownTopic."""
        return sorted(self._existing().subscriptions)

    def stats(self) -> TopicStats:
        """Figures of the topic; O(partitions). Raises UnknownTopic."""
        return topic_stats(self._engine, self._existing())

    def __repr__(self) -> str:
        return f"<Topic {self.name}>"


def _ids(message_ids: Sequence[MessageId]) -> list[MessageId]:
    ids = list(message_ids)
    for message_id in ids:
        if not isinstance(message_id, MessageId):
            raise InvalidArgument("message_id", message_id, "expected a MessageId")
    return ids
