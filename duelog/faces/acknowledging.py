"""What becomes of messages that a consumer was handed: acknowledged, given back, postponed."""

from __future__ import annotations

from collections.abc import Iterable

from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import InvalidArgument
from duelog.store.message import MAX_DUE_MS, ReceivedMessage
from duelog.store.position import MessageId, Position

from ..delivery.consumer_arguments import Acknowledgeable, checked, entries_of, positions_of
from ..delivery.position_set import group_by_ledger
from ..engine import Engine
from ..topics.consumer import Consumer
from ..topics.subscription_state import SubscriptionState
from ..topics.topic_state import TopicState
from .failed_delivery import postpone


class Acknowledging:
    """What a consumer says of messages; a part of Subscription."""

    _engine: Engine
    _topic: TopicState
    _state: SubscriptionState
    _consumer: Consumer

    def _check_usable(self) -> None:
        """Raise ClosedError, StoreFailed, UnknownSubscription where nothing can be done any more."""
        raise NotImplementedError

    def ack(self, messages: Acknowledgeable | Iterable[Acknowledgeable], *, durable: bool = False) -> int:
        """Acknowledge one message or many: none of them is delivered to this subscription again.

        A message is what `receive` gave, its position, or its id (`Topic.send`), for which the log is searched: O(runs
        of a ledger) for each that was delayed. Takes effect in memory at once, and on disk within `ack_flush_ms`, at
        `flush` and at close; `durable` waits for the disk. Returns how many were not acknowledged before. Raises
        InvalidArgument for a position that the topic does not have, and for a message that has not fired; then nothing
        is acknowledged.
        """
        entries = entries_of(messages)
        self._check_usable()
        log = self._topic.log
        if any(log.entries_of(ledger_id) is None for ledger_id in entries):
            places = [Position(ledger_id, entry_id) for ledger_id, each in entries.items() for entry_id in each]
            entries = group_by_ledger(list(map(self._place, places)))
        return self._consumer.ack(entries, durable=durable)

    def _place(self, given: Position) -> Position:
        return self._engine.place_of(self._topic, "messages", given)

    def ack_cumulative(self, message: Acknowledgeable, *, durable: bool = False) -> int:
        """Acknowledge a message and every one before it in the log; as `ack`.

        What no consumer can have received stays unacknowledged: messages before it, or itself, that were not due when
        the log was read (`inline_delay_ms`) and have not been handed out since. `ack` takes each by its id.
        Raises InvalidArgument for shared and key-shared subscriptions, where others hold some of those.
        """
        positions = positions_of(message)
        if len(positions) != 1:
            raise InvalidArgument("message", message, "expected one message, its position or its id")
        self._check_usable()
        return self._consumer.ack_cumulative(self._place(positions[0]), durable=durable)

    def nack(self, messages: Acknowledgeable | Iterable[Acknowledgeable], *, delay: Duration | None = None) -> int:
        """Give messages back, to be handed out again `delay` from now (to any consumer, if shared).

        delay: seconds or a timedelta; None: after `nack_backoff_ms`, doubled with each redelivery up to
        `nack_backoff_max_ms`. Returns how many this consumer still held. What is given back waits in memory: a restart
        delivers it at once, with the count of its deliveries.
        """
        items = [messages] if isinstance(messages, (ReceivedMessage, MessageId, str)) else list(checked(messages))
        delay_ms = None if delay is None else duration_ms("delay", delay)
        self._check_usable()
        by_delay: dict[int, list[Position]] = {}
        for item in items:
            wait_ms = self._backoff_ms(item) if delay_ms is None else delay_ms
            by_delay.setdefault(wait_ms, []).extend(map(self._place, positions_of(item)))
        return self._consumer.nack(by_delay)

    def extend(self, messages: Acknowledgeable | Iterable[Acknowledgeable], timeout: Duration | None = None) -> int:
        """Hold messages for `timeout` from now on before they are delivered again, in place of what was left.

        timeout None: as long as the acknowledgement timeout (`Policies.ack_timeout_ms`). Where there is none nothing
        is to be extended. In memory, as what it extends. Returns how many this consumer still held: others were
        acknowledged, given back, or taken back because they were overdue. Raises InvalidArgument.
        """
        entries = entries_of(messages)
        wait_ms = None if timeout is None else duration_ms("timeout", timeout)
        self._check_usable()
        return self._consumer.extend(entries, wait_ms)

    def nack_all(self) -> int:
        """Give back all that this consumer holds, to be handed out again at once, in log order; how many messages."""
        self._check_usable()
        return self._consumer.nack_all()

    def _backoff_ms(self, item: Acknowledgeable) -> int:
        policies = self._state.policies
        times = min(item.redelivery_count, 40) if isinstance(item, ReceivedMessage) else 0
        return min(policies.nack_backoff_ms << times, policies.nack_backoff_max_ms)

    def retry_later(self, message: ReceivedMessage, delay: Duration, *, reason: str | None = None) -> MessageId:
        """Have a message delivered to this subscription again `delay` from now, as a new delayed message.

        delay: seconds or a timedelta. Unlike `nack` it survives a restart, and it costs a write. Returns the new id.
        The message is sent anew, then acknowledged durably: a crash in between delivers it twice. It counts towards
        `max_redeliveries`. Other subscriptions do not get it. The topic's delay policies count but for a fixed delay:
        raises DelayTooLong, with nothing done, for a delay over the maximum. reason: why, as of `dead_letter`: kept as
        the new message's `failure`, and as the reason of the dead letter that it becomes if its deliveries fail.
        """
        if not isinstance(message, ReceivedMessage):
            raise InvalidArgument("message", message, "expected a received message")
        delay_ms, failure = duration_ms("delay", delay), _text("reason", reason)
        self._check_usable()
        if not self._state.durable:
            raise InvalidArgument("message", message, "a reader is gone when its consumers are; nothing is sent to it")
        now_ms = self._engine.clock.now_ms()
        if now_ms + delay_ms > MAX_DUE_MS:
            raise InvalidArgument("delay", delay, "due after the year 9999")
        due_ms = self._engine.policies.retry_due_ms(self._topic.name, now_ms + delay_ms, now_ms)
        failed_ms = self._consumer.first_failed_ms(message.position)
        sender, name = self._engine.sending.sender, self._state.name
        new_id = postpone(sender, self._topic, name, message, due_ms, now_ms, failed_ms, failure)
        self.ack(message, durable=True)
        return new_id

    def dead_letter(self, message: ReceivedMessage, reason: str | None = None) -> None:
        """Give a message up now, whatever `max_redeliveries` says: it becomes a dead letter, with this reason.

        reason: some text, kept to its first 1,000 characters, and this delivery counts as failed; None: too many failed
        before it (then the reason is the last that `retry_later` was told, or "redeliveries"). A consumer of the
        dead-letter topic has it as the property DEAD_LETTER_REASON, the number of deliveries as DEAD_LETTER_ATTEMPTS,
        beside REAL_TOPIC, REAL_SUBSCRIPTION and ORIGIN_MESSAGE_ID. The message is moved in one transaction; one that
        was acknowledged meanwhile is left. Raises InvalidArgument, also for a reader's
        message and for what is a dead letter itself; StoreFull, StoreFailed: then it is held as before.
        """
        if not isinstance(message, ReceivedMessage) or (message.topic, message.subscription) != (
            str(self._topic.name),
            self._state.name,
        ):
            raise InvalidArgument("message", message, "expected a message that this subscription received")
        text = _text("reason", reason)
        self._check_usable()
        self._consumer.dead_letter(message, text)


def _text(field: str, value: str | None) -> str | None:
    """Some text as it is kept. Raises InvalidArgument."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidArgument(field, value, "expected some text, or None")
    return value[:1_000].encode(errors="backslashreplace").decode()
