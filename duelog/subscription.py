"""Subscription: one consumer of a topic's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from duelog.store.clock import ManualClock, StoreClock
from duelog.store.errors import ClockJumped, ClosedError, DuelogError, InvalidArgument, StoreFull, UnknownSubscription
from duelog.store.message import ReceivedMessage
from duelog.store.position import MessageId, Position
from duelog.store.received_messages import ReceivedMessages

from .delivery.consumer_arguments import Acknowledgeable, checked, deadline_of, delay_ms_of, entries_of, positions_of
from .delivery.dispatcher import SubscriptionType
from .engine import Engine
from .sending.failed_delivery import postpone
from .stats import SubscriptionStats
from .topics.consumer import Consumer
from .topics.seeking import SeekTarget, position_of
from .topics.subscription_state import SubscriptionState
from .topics.topic_state import TopicState

_NONE = ReceivedMessages("", "")


class Subscription:
    """A consumer attached to a subscription: receives messages when they are due, and acknowledges them.

    Delivery is at least once. What this consumer received and did not acknowledge is handed out again when
    it closes. Made by Topic.subscribe; a context manager; thread-safe.
    """

    def __init__(self, engine: Engine, topic: TopicState, state: SubscriptionState, type_: SubscriptionType) -> None:
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
            engine.inline,
            engine.flusher,
            engine.dead_letters,
            engine.clock,
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
        """Whether the store keeps the subscription; a reader (`Topic.reader`) is gone when its consumers are."""
        return self._state.durable

    # -- receiving ---------------------------------------------------------------------------------

    def receive(self, max_messages: int = 1, timeout: float | None = None) -> list[ReceivedMessage]:
        """Messages that are due, at most `max_messages`, oldest in the log first; waits for the first.

        timeout: seconds to wait, by the store's clock; None: until there is a message. An empty list: the
        time is over. A store on a ManualClock without a background thread does not wait at all, since
        nothing moves its clock meanwhile: it returns what is due.

        Raises ClosedError when the subscription or the store is closed, also while waiting; and what keeps the
        store from firing (StoreFull, ClockJumped, ...) when there is nothing to hand out.
        """
        engine, topic = self._engine, self._topic
        deadline_ms = deadline_of(engine.clock.now_ms(), timeout)
        while True:
            version, now_ms = topic.version, engine.clock.now_ms()
            batch, again_ms = self.poll(max_messages)
            if batch or not self.may_wait or (deadline_ms is not None and now_ms >= deadline_ms):
                return batch
            until_ms = min((ms for ms in (deadline_ms, again_ms) if ms is not None), default=None)
            with topic.condition.lock:
                if topic.version == version:
                    engine.clock.wait(topic.condition, until_ms)

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

    @property
    def may_wait(self) -> bool:
        """Whether there is anything to wait for: something moves the clock or fires what is due."""
        engine = self._engine
        return engine.scheduler is not None or engine.read_only or not isinstance(engine.clock.wrapped, ManualClock)

    def poll(self, max_messages: int = 1) -> tuple[list[ReceivedMessage], int | None]:
        """What is due now, at most `max_messages`, without waiting; and if that is nothing, when to ask again.

        That is epoch ms, or None: when the topic has changed (`add_waker`), as it may before the time told, too.
        Raises as `receive`.
        """
        batch, again_ms = self.poll_columns(max_messages)
        return batch.to_list(), again_ms

    def poll_columns(self, max_messages: int = 1) -> tuple[ReceivedMessages, int | None]:
        """As `poll`, without an object for each message. `ack` takes what it gives, or any part of its positions."""
        if isinstance(max_messages, bool) or not isinstance(max_messages, int) or max_messages < 1:
            raise InvalidArgument("max_messages", max_messages, "expected an int of at least 1")
        engine = self._engine
        while True:
            self._check_usable()
            due_ms, more = None, False
            stopped: DuelogError | None = None
            if engine.scheduler is not None:
                stopped = engine.scheduler.error
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

    # -- acknowledging -----------------------------------------------------------------------------

    def ack(self, messages: Acknowledgeable | Iterable[Acknowledgeable], *, durable: bool = False) -> int:
        """Acknowledge one message or many: none of them is delivered to this subscription again.

        Takes effect in memory at once, and on disk within `ack_flush_ms`, at `flush` and at close; `durable`
        waits for the disk. Returns how many were not acknowledged before.
        Raises InvalidArgument for a position that the topic does not have; then nothing is acknowledged.
        """
        entries = entries_of(messages)
        self._check_usable()
        return self._consumer.ack(entries, durable=durable)

    def ack_cumulative(self, message: Acknowledgeable, *, durable: bool = False) -> int:
        """Acknowledge a message and every one before it in the log; as `ack`.

        What no consumer can have received stays unacknowledged: messages before it, or itself, that were not due when
        the log was read (`inline_delay_ms`) and have not been handed out since. `ack` takes each by its id.
        Raises InvalidArgument for shared and key-shared subscriptions, where others hold some of those.
        """
        positions = positions_of(message)
        if len(positions) != 1:
            raise InvalidArgument("message", message, "expected one message or its position")
        self._check_usable()
        return self._consumer.ack_cumulative(positions[0], durable=durable)

    def nack(self, messages: Acknowledgeable | Iterable[Acknowledgeable], *, delay: float | None = None) -> int:
        """Give messages back, to be handed out again `delay` seconds from now (to any consumer, if shared).

        delay None: after `nack_backoff_ms`, doubled with each redelivery up to `nack_backoff_max_ms`. Returns
        how many this consumer still held. What is given back waits in memory: a restart delivers it at once.
        """
        items = [messages] if isinstance(messages, (ReceivedMessage, MessageId)) else list(checked(messages))
        delay_ms = None if delay is None else delay_ms_of(delay)
        self._check_usable()
        by_delay: dict[int, list[Position]] = {}
        for item in items:
            wait_ms = self._backoff_ms(item) if delay_ms is None else delay_ms
            by_delay.setdefault(wait_ms, []).extend(positions_of(item))
        return self._consumer.nack(by_delay)

    def nack_all(self) -> int:
        """Give back all that this consumer holds, to be handed out again at once, in log order; how many messages."""
        self._check_usable()
        return self._consumer.nack_all()

    def _backoff_ms(self, item: Acknowledgeable) -> int:
        policies = self._state.policies
        times = min(item.redelivery_count, 40) if isinstance(item, ReceivedMessage) else 0
        return min(policies.nack_backoff_ms << times, policies.nack_backoff_max_ms)

    def retry_later(self, message: ReceivedMessage, delay: float) -> MessageId:
        """Have a message delivered to this subscription again `delay` seconds from now, as a new delayed message.

        Unlike `nack` it survives a restart, and it costs a write. Returns the new id. The message is sent
        anew, then acknowledged durably: a crash in between delivers it twice. It counts towards
        `max_redeliveries`. Other subscriptions do not get it. The topic's delay policies count but for a fixed delay:
        raises DelayTooLong, with nothing done, for a delay over the maximum.
        """
        if not isinstance(message, ReceivedMessage):
            raise InvalidArgument("message", message, "expected a received message")
        delay_ms = delay_ms_of(delay)
        self._check_usable()
        if not self.durable:
            raise InvalidArgument("message", message, "a reader is gone when its consumers are; nothing is sent to it")
        now_ms = self._engine.clock.now_ms()
        due_ms = self._engine.policies.retry_due_ms(self._topic.name, now_ms + delay_ms, now_ms)
        failed_ms = self._consumer.first_failed_ms(message.position)
        new_id = postpone(self._engine.sender, self._topic, self.name, message, due_ms, now_ms, failed_ms)
        self.ack(message, durable=True)
        return new_id

    # -- moving --------------------------------------------------------------------------------------

    def seek(self, to: SeekTarget) -> Position:
        """Go to a place in the main log: everything from there on is delivered (again). Durable when it returns.

        to: "earliest", "latest", a position (or a received message: its own), or a time (aware datetime or
        epoch ms): the first message that was due then or later. What was trimmed is gone: a place before
        the first ledger kept is the first; so are messages that `duelog compact` dropped, which are passed over.
        What is not due yet comes either way, also from before that place (`inline_delay_ms`).
        What other consumers hold may be delivered twice. Returns the position. Raises InvalidArgument.
        """
        self._check_usable()
        position = self._consumer.seek(position_of(self._engine.main, self._topic.log, to))
        self._engine.agenda.look_at(self._topic.topic_id, 0)
        self._topic.changed()
        return position

    def pause(self) -> None:
        """Hand nothing out to any consumer of the subscription until `resume`; kept over restarts."""
        self._set_paused(True)

    def resume(self) -> None:
        """Hand out again."""
        self._set_paused(False)

    @property
    def paused(self) -> bool:
        return self._state.paused

    def _set_paused(self, paused: bool) -> None:
        self._check_usable()
        if self.durable:
            self._engine.main.write(lambda transaction: self._state.write_paused(transaction, paused))
        self._state.paused = paused
        self._topic.changed()

    # -- the rest ----------------------------------------------------------------------------------

    def stats(self) -> SubscriptionStats:
        """Figures of the subscription, all its consumers together."""
        self._engine.check_open()
        return self._engine.figures.of_subscription(self._topic, self._state)

    def close(self) -> None:
        """Leave: what was received and not acknowledged is handed out again. A second call does what is left."""
        if self._left:
            return
        self._consumer.closed = True
        if not self._engine.closed:
            now_ms = self._engine.clock.now_ms()
            self._consumer.leave(now_ms)
            if self._topic.tracker is not None:
                self._engine.agenda.look_at(self._topic.topic_id, now_ms + self._engine.config.tracker_idle_ms)
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
