"""Subscription: one consumer of a topic's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Self

import numpy as np

from duelog.store.clock import ManualClock, StoreClock
from duelog.store.codec.body import EncodedBatch, encode_one, occurrence_extra
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import ClockJumped, ClosedError, DuelogError, InvalidArgument, StoreFull, UnknownSubscription
from duelog.store.message import MAX_DUE_MS, Message, ReceivedMessage
from duelog.store.position import MessageId, Position
from duelog.store.received_messages import ReceivedMessages

from .delivery.consumer_arguments import Acknowledgeable, checked, deadline_of, entries_of, positions_of
from .delivery.dispatcher import SubscriptionType
from .delivery.position_set import group_by_ledger
from .engine import Engine
from .sending.sender import Sender
from .stats import SubscriptionStats
from .subscription_admin import SubscriptionAdmin
from .topics.consumer import Consumer
from .topics.seeking import SeekTarget
from .topics.subscription_state import Part, SubscriptionState
from .topics.topic_state import TopicState

_NONE = ReceivedMessages("", "")


class Subscription:
    """A consumer attached to a subscription: receives messages when they are due, and acknowledges them.

    Delivery is at least once. What this consumer received and did not acknowledge is handed out again when
    it closes. Made by Topic.subscribe; a context manager; thread-safe; an iterator over its messages.

    `for message in subscription` fetches one message at a time, so that it holds none that it does not work at; it ends
    when the subscription or the store is closed, and where `receive` would not wait. What it yields is to be
    acknowledged as always; several threads may iterate.
    """

    def __init__(
        self,
        engine: Engine,
        topic: TopicState,
        state: SubscriptionState,
        type_: SubscriptionType,
        part: Part = None,
    ) -> None:
        self._engine = engine
        self._topic = topic
        self._state = state
        self._left = False
        self.type: SubscriptionType = type_

        self._consumer = Consumer(
            topic,
            state,
            type_,
            lambda: engine.policies.effective(topic.name, state.name),
            engine.delivery.inline,
            engine.delivery.flusher,
            engine.delivery.dead_letters,
            engine.clock,
            part,
        )

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return str(self._topic.name)

    @property
    def durable(self) -> bool:
        """True if the store keeps the subscription; a reader (`Topic.reader`) is gone when its consumers are."""
        return self._state.durable

    @property
    def active(self) -> bool:
        """True if it gets messages: of a failover subscription's consumers, one does. Raises ClosedError."""
        return self._consumer.active

    @property
    def max_in_flight(self) -> int:
        """How many messages it may hold unacknowledged (`Policies.max_in_flight`); 0: any number."""
        return self._state.max_in_flight

    # -- receiving ---------------------------------------------------------------------------------

    def receive(self, max_messages: int = 1, timeout: Duration | None = None) -> list[ReceivedMessage]:
        """Messages that are due, at most `max_messages`, oldest in the log first; waits for the first.

        timeout: how long to wait by the store's clock, seconds or a timedelta; None: until there is a message. An empty
        list: the time is over. A store on a ManualClock without a background thread does not wait at all, since nothing
        moves its clock meanwhile: it returns what is due.

        Raises ClosedError when the subscription or the store is closed, also while waiting; and what keeps the
        store from firing (StoreFull, ClockJumped, ...) when there is nothing to hand out.
        """
        deadline_ms = deadline_of(self._engine.clock.now_ms(), timeout)
        return self._receive(max_messages, deadline_ms, None)

    def receive_unless(self, stopped: Callable[[], bool], max_messages: int = 1) -> list[ReceivedMessage]:
        """Receive without a deadline, until `stopped()` is true; `wake` has it asked again.

        It waits whatever clock the store has, and returns an empty list only when it is stopped. Otherwise as
        `receive`.
        """
        return self._receive(max_messages, None, stopped)

    def _receive(
        self, max_messages: int, deadline_ms: int | None, stopped: Callable[[], bool] | None
    ) -> list[ReceivedMessage]:
        engine, topic = self._engine, self._topic
        while True:
            version, now_ms = topic.version, engine.clock.now_ms()
            if stopped is not None and stopped():
                return []
            batch, again_ms = self.poll(max_messages)
            if batch or (deadline_ms is not None and now_ms >= deadline_ms):
                return batch
            if stopped is None and not self.may_wait:
                return batch
            until_ms = min((ms for ms in (deadline_ms, again_ms) if ms is not None), default=None)
            with topic.condition.lock:
                if topic.version == version:
                    engine.clock.wait(topic.condition, until_ms)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ReceivedMessage:
        """The next message, as `receive` waits for it; StopIteration once the subscription or the store is closed."""
        try:
            for message in self.receive():
                return message
        except ClosedError:
            if not self.closed:  # a read-only store, or a child process
                raise
        raise StopIteration

    # -- for duelog.aio, which waits in another way -------------------------------------------------

    @property
    def clock(self) -> StoreClock:
        """The store's clock."""
        return self._engine.clock

    @property
    def closed(self) -> bool:
        return self._consumer.closed or self._engine.closed

    def add_waker(self, wake: Callable[[], object]) -> None:
        """Have `wake` called, by any thread, whenever a receiver should look again; it takes no lock."""
        self._topic.add_waker(wake)

    def remove_waker(self, wake: Callable[[], object]) -> None:
        """Undo `add_waker`."""
        self._topic.remove_waker(wake)

    def wait(self, until_ms: int) -> None:
        """Wait until the topic changes or the clock shows `until_ms`; may return early."""
        with self._topic.condition.lock:
            self._engine.clock.wait(self._topic.condition, until_ms)

    def wake(self) -> None:
        """Have every receiver of the topic look again."""
        self._topic.changed()

    def report_running(self, since_ms: Callable[[], int | None]) -> None:
        """Have figures say how long the longest running handler of a worker has run; `since_ms`: epoch ms, None: none.

        Until the subscription is closed.
        """
        self._consumer.report_running(since_ms)

    @property
    def may_wait(self) -> bool:
        """True if waiting makes sense: something moves the clock or fires messages that are due."""
        engine = self._engine
        return (
            engine.waking.scheduler is not None
            or engine.storage.read_only
            or not isinstance(engine.clock.wrapped, ManualClock)
        )

    def poll(self, max_messages: int = 1) -> tuple[list[ReceivedMessage], int | None]:
        """Receive at most `max_messages` that are due now, without waiting; with none, also when to poll again.

        That time is epoch ms, or None: when the topic changes. It may change before that time, too (`add_waker`).
        Raises as `receive`.
        """
        batch, again_ms = self.poll_columns(max_messages)
        return batch.to_list(), again_ms

    def poll_columns(self, max_messages: int = 1) -> tuple[ReceivedMessages, int | None]:
        """Poll without making an object for each message; `ack` takes the columns, or any part of them. See `poll`."""
        if isinstance(max_messages, bool) or not isinstance(max_messages, int) or max_messages < 1:
            raise InvalidArgument("max_messages", max_messages, "expected an int of at least 1")
        engine = self._engine
        while True:
            self._check_usable()
            due_ms, more = None, False
            stopped: DuelogError | None = None
            if engine.waking.scheduler is not None:
                stopped = engine.waking.scheduler.error
            else:
                try:
                    done, more = engine.slice()
                    due_ms = done.next_due_ms
                except (StoreFull, ClockJumped) as error:
                    stopped = error
            batch, again_ms = self._consumer.hand_out(max_messages)
            if batch:
                return batch, None
            if batch is not None or more:  # what was due went elsewhere; fired for another topic, or still loading
                continue
            if stopped is not None:
                raise stopped
            return _NONE, min((ms for ms in (again_ms, due_ms) if ms is not None), default=None)

    def _check_usable(self) -> None:
        self._engine.check_writable()
        if self._consumer.closed:
            raise ClosedError(f"subscription {self.name!r}")
        if self._state.deleted or self._topic.deleted:
            raise UnknownSubscription(self.topic, self.name)

    # -- acknowledging --------------------------------------------------------------------------------

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
            places = [
                Position(ledger_id, entry_id) for ledger_id, entry_ids in entries.items() for entry_id in entry_ids
            ]
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
        new_id = _postpone(sender, self._topic, name, message, due_ms, now_ms, failed_ms, failure)
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

    # -- moving --------------------------------------------------------------------------------------

    def seek(self, to: SeekTarget) -> Position:
        """Go to a place in the main log: everything from there on is delivered (again). Durable when it returns.

        to: "earliest", "latest", a position or an id (or a received message: its own), a time (aware datetime or epoch
        ms): the first message that was due then or later, or `PublishedAt`: published then or later. What was trimmed
        is gone: a place before the first ledger kept is the first; so are messages that `duelog compact` dropped, which
        are passed over.
        What is not due yet comes either way, also from before that place (`inline_delay_ms`) if it is not acknowledged.
        What other consumers hold may be delivered twice. Returns the position. Raises InvalidArgument.
        """
        self._check_usable()
        engine = self._engine
        position = self._consumer.seek(engine.target_of(self._topic, to))
        self._engine.waking.agenda.look_at(self._topic.topic_id, 0)
        self._topic.changed()
        return position

    def pause(self, until: datetime | int | None = None) -> None:
        """Hand nothing out to any consumer of the subscription until `resume`; kept over restarts.

        until: an instant (aware datetime or epoch ms) at which it goes on by itself. Raises InvalidArgument for one
        that has passed.
        """
        self._check_usable()
        SubscriptionAdmin(self._engine, self._topic, self._state).pause(until)

    def resume(self) -> None:
        """End a pause: hand out again."""
        self._check_usable()
        SubscriptionAdmin(self._engine, self._topic, self._state).resume()

    @property
    def paused(self) -> bool:
        return self._state.paused_until_ms > self._engine.clock.now_ms()

    # -- the rest ----------------------------------------------------------------------------------

    def stats(self) -> SubscriptionStats:
        """Figures of the subscription, all its consumers together."""
        self._engine.check_open()
        return self._engine.figures.of_subscription(self._topic, self._state)

    def close(self, *, failed: bool = True) -> None:
        """Leave: what was received and not acknowledged is handed out again. A second call does what is left.

        failed: whether that counts as failed deliveries. False suits a program that ends in order.
        """
        if self._left:
            return
        self._consumer.closed = True
        if not self._engine.closed:
            now_ms = self._engine.clock.now_ms()
            self._consumer.leave(now_ms, failed=failed)
            if self._topic.tracker is not None:
                self._engine.waking.agenda.look_at(
                    self._topic.topic_id, now_ms + self._engine.storage.config.tracker_idle_ms
                )
            self._topic.changed()
        self._left = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Subscription {self.name!r} of {self.topic!r}, {self.type}{', closed' if self._consumer.closed else ''}>"
        )


def _postpone(
    sender: Sender,
    topic: TopicState,
    subscription: str,
    message: ReceivedMessage,
    due_ms: int,
    now_ms: int,
    failed_ms: int | None,
    failure: str | None,
) -> MessageId:
    """Send a message anew as a delayed message that only this subscription gets; its id, once it is durable.

    failed_ms: when its first delivery failed; None: now. failure: why this one did; None: as the one before.
    """
    first_id, first_ms = message.first_try or (message.message_id, now_ms if failed_ms is None else failed_ms)
    extra: dict[str, object] = {
        "addressee": subscription,
        "retries": message.retries + message.redelivery_count + 1,
        "first": [*first_id, first_ms],
        **occurrence_extra(message.occurrence),
    }
    if failure is not None or message.failure is not None:
        extra["failure"] = message.failure if failure is None else failure
    if message.expires_ms is not None:
        extra["ttl"] = message.expires_ms - due_ms  # it expires when it would have, which may be before it is due
    copy = Message(message.payload, key=message.key, properties=message.properties)
    body = encode_one(copy, now_ms, 2**30, extra)[1]
    dues = np.array([due_ms], dtype=np.int64)
    batch = EncodedBatch(dues, dues > now_ms, [body])
    return sender.send(topic, batch, now_ms, refused=False)[0]


def _text(field: str, value: str | None) -> str | None:
    """Some text as it is kept. Raises InvalidArgument."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidArgument(field, value, "expected some text, or None")
    return value[:1_000].encode(errors="backslashreplace").decode()
