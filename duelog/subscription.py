"""Subscription: one consumer of a topic's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Self

from duelog.store.clock import ManualClock, StoreClock
from duelog.store.errors import ClockJumped, ClosedError, DuelogError, InvalidArgument, StoreFull, UnknownSubscription
from duelog.store.message import ReceivedMessage, at_ms
from duelog.store.policy.policies import EffectivePolicies
from duelog.store.position import MessageId, Position

from .delivery.consumer_arguments import Acknowledgeable, checked, deadline_of, delay_ms_of, entries_of, positions_of
from .delivery.dispatcher import Dispatcher, SubscriptionType
from .delivery.due_reader import DueReader
from .engine import Engine
from .failed_delivery import dead_letter_name, postpone
from .stats import SubscriptionStats, subscription_stats
from .topics.inline import waiting
from .topics.seeking import existing_position, position_at
from .topics.subscription_state import SubscriptionState
from .topics.topic_state import TopicState


class Subscription:
    """A consumer attached to a subscription: receives messages when they are due, and acknowledges them.

    Delivery is at least once. What this consumer received and did not acknowledge is handed out again when
    it closes. Made by Topic.subscribe; a context manager; thread-safe.
    """

    def __init__(self, engine: Engine, topic: TopicState, state: SubscriptionState, type_: SubscriptionType) -> None:
        self._engine = engine
        self._topic = topic
        self._state = state
        self._closed = False
        self._left = False
        self.type: SubscriptionType = type_

        def make(reader: DueReader) -> Dispatcher:
            return Dispatcher(
                state.acks,
                reader,
                topic.log,
                type=type_,
                ack_timeout_ms=state.policies.ack_timeout_ms or None,
            )

        def policies() -> EffectivePolicies:
            return engine.policies.effective(topic.name, state.name)

        self._consumer = state.attach(type_, lambda: engine.reader(topic, state), make, policies)

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return str(self._topic.name)

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

    # -- for whoever waits in another way (duelog.aio) -----------------------------------------------

    @property
    def clock(self) -> StoreClock:
        """The store's clock."""
        return self._engine.clock

    @property
    def closed(self) -> bool:
        return self._closed or self._engine.closed

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

        That is epoch ms, or None: when the topic has changed (`TopicState.changed`), as it may before the time
        told, too. Raises as `receive`.
        """
        if isinstance(max_messages, bool) or not isinstance(max_messages, int) or max_messages < 1:
            raise InvalidArgument("max_messages", max_messages, "expected an int of at least 1")
        engine, topic = self._engine, self._topic
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
            now_ms = engine.clock.now_ms()
            with self._state.lock:
                dispatcher = self._dispatcher()
                kept_back = dispatcher.kept_back_count
                batch = [] if self._state.paused else dispatcher.next_batch(self._consumer, max_messages, now_ms)
                passed_gone = self._pass_gone(dispatcher)
                kept_more = dispatcher.kept_back_count > kept_back
                passed_over = None if self._state.reader is None else self._state.reader.next_due_ms()
                again = (dispatcher.next_redelivery_ms(), passed_over)
            if passed_gone is not None:
                engine.acknowledged(topic, self._state, passed_gone)
            if kept_more or (batch and self._state.policies.ack_timeout_ms):
                topic.changed()  # others have something to wait for that they did not know of
            if batch:
                wanted = self._route(batch)
                if wanted:
                    return wanted, None
                continue
            if more:  # fired for another topic, or still loading
                continue
            if stopped is not None:
                raise stopped
            return [], min((ms for ms in (*again, due_ms) if ms is not None), default=None)

    def _pass_gone(self, dispatcher: Dispatcher) -> bool | None:
        """Acknowledge what the reader found to be gone; None: nothing, else whether there may be something to trim.

        REQUIRES: the subscription's lock.
        """
        gone = self._state.take_gone()
        if not gone:
            return None
        before = dispatcher.acks.mark_delete
        dispatcher.ack(None, gone)
        return self._moved_ledger(before)

    def _route(self, batch: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """What of a batch the handler is to get; the rest is for others, or dead, and is acknowledged here."""
        limit = -1 if self._topic.keeps_dead_letters else self._state.policies.max_redeliveries
        wanted, dead, foreign = [], [], []
        for message in batch:
            if message.addressee is not None and message.addressee != self.name:
                foreign.append(message)
            elif limit >= 0 and message.redelivery_count + message.retries > limit:
                dead.append(message)
            else:
                wanted.append(message)
        if dead:
            try:
                target = dead_letter_name(self._engine, self._topic, self.name)
                self._engine.dead_letters.bury(target, self._topic, self._state, dead)
            except BaseException:
                with self._state.lock:
                    positions, now_ms = [message.position for message in batch], self._engine.clock.now_ms()
                    self._dispatcher().nack(self._consumer, positions, now_ms, now_ms)
                raise
        if foreign:
            self.ack(foreign)
        return wanted

    def _dispatcher(self) -> Dispatcher:
        dispatcher = self._state.dispatcher
        if dispatcher is None or self._closed:
            raise ClosedError(f"subscription {self.name!r}")
        return dispatcher

    def _check_usable(self) -> None:
        self._engine.check_writable()
        if self._closed:
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
        with self._state.lock:
            dispatcher = self._dispatcher()
            before = dispatcher.acks.mark_delete
            count = dispatcher.ack_entries(self._consumer, entries)
            moved = self._moved_ledger(before)
            waiting = bool(dispatcher.kept_back_count)
        if waiting:
            self._topic.changed()  # a key may be free for another consumer
        return self._acknowledged(count, moved, durable)

    def ack_cumulative(self, message: Acknowledgeable, *, durable: bool = False) -> int:
        """Acknowledge a message and every one before it in the log; as `ack`.

        What no consumer can have received stays owed: messages before it, or itself, that were not due when the log
        was read (`inline_delay_ms`) and have not been handed out since. `ack` takes each by its id.
        Raises InvalidArgument for shared and key-shared subscriptions, where others hold some of those.
        """
        positions = positions_of(message)
        if len(positions) != 1:
            raise InvalidArgument("message", message, "expected one message or its position")
        position = positions[0]
        self._check_usable()
        with self._state.lock:
            dispatcher = self._dispatcher()
            before = dispatcher.acks.mark_delete
            count = dispatcher.ack_cumulative(position)
            moved = self._moved_ledger(before)
        return self._acknowledged(count, moved, durable)

    def _moved_ledger(self, before: Position) -> bool:
        """Whether mark-delete has come to the end of a ledger, so that there may be something to trim."""
        after = self._state.acks.mark_delete
        return after.ledger_id != before.ledger_id or (
            after != before and self._topic.log.entries_of(after.ledger_id) == after.entry_id + 1
        )

    def _acknowledged(self, count: int, moved: bool, durable: bool) -> int:
        if count:
            self._engine.acknowledged(self._topic, self._state, moved)
        if durable:
            self._engine.flusher.flush()
        return count

    def nack(self, messages: Acknowledgeable | Iterable[Acknowledgeable], *, delay: float | None = None) -> int:
        """Give messages back, to be handed out again `delay` seconds from now (to any consumer, if shared).

        delay None: after `nack_backoff_ms`, doubled with each redelivery up to `nack_backoff_max_ms`. Returns
        how many this consumer still held. What is given back waits in memory: a restart delivers it at once.
        """
        items = [messages] if isinstance(messages, (ReceivedMessage, MessageId)) else list(checked(messages))
        delay_ms = None if delay is None else delay_ms_of(delay)
        self._check_usable()
        now_ms = self._engine.clock.now_ms()
        by_delay: dict[int, list[Position]] = {}
        for item in items:
            wait_ms = self._backoff_ms(item) if delay_ms is None else delay_ms
            by_delay.setdefault(wait_ms, []).extend(positions_of(item))
        count = 0
        with self._state.lock:
            for wait_ms, positions in by_delay.items():
                count += self._dispatcher().nack(self._consumer, positions, now_ms + wait_ms, now_ms)
        if count:
            self._topic.changed()
        return count

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
        now_ms = self._engine.clock.now_ms()
        due_ms = self._engine.policies.retry_due_ms(self._topic.name, now_ms + delay_ms, now_ms)
        with self._state.lock:
            failed = self._dispatcher().failed_at(message.position)
        new_id = postpone(self._engine, self._topic, self.name, message, due_ms, failed and failed[0])
        self.ack(message, durable=True)
        return new_id

    # -- moving --------------------------------------------------------------------------------------

    def seek(self, to: MessageId | ReceivedMessage | datetime | int | str) -> Position:
        """Go to a place in the main log: everything from there on is delivered (again). Durable when it returns.

        to: "earliest", "latest", a position (or a received message: its own), or a time (aware datetime or
        epoch ms): the first message that was due then or later. What was trimmed is gone: a place before
        the first ledger kept is the first; so are messages that `duelog compact` dropped, which are passed over.
        What is not due yet comes either way, also from before that place (`inline_delay_ms`).
        What other consumers hold may be delivered twice. Returns the position. Raises InvalidArgument.
        """
        self._check_usable()
        log = self._topic.log
        if to == "earliest":
            position = Position(log.first_ledger, 0)
        elif to == "latest":
            position = log.end
        elif isinstance(to, (ReceivedMessage, MessageId)):
            position = existing_position(log, positions_of(to)[0])
        elif isinstance(to, str):
            raise InvalidArgument("to", to, 'expected "earliest", "latest", a position or a time')
        else:
            position = position_at(self._engine.main, log, at_ms("to", to))
        now_ms = self._engine.clock.now_ms()
        with self._state.lock:
            dispatcher = self._dispatcher()
            position = max(min(position, log.latest(now_ms)), Position(log.first_ledger, 0))
            not_due = waiting(self._engine, self._topic, now_ms)
            dispatcher.seek(Position(position.ledger_id, position.entry_id - 1), not_due)
            if self._state.reader is not None:
                self._state.reader.rewind(dispatcher.read_position)
        self._engine.flusher.mark(self._state, self._engine.clock.now_ms())
        self._engine.flusher.flush()
        self._engine.maintenance.look_at(self._topic.topic_id, 0)
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
        self._engine.main.write(lambda transaction: self._state.write_paused(transaction, paused))
        self._state.paused = paused
        self._topic.changed()

    # -- the rest ----------------------------------------------------------------------------------

    def stats(self) -> SubscriptionStats:
        """Figures of the subscription, all its consumers together."""
        self._engine.check_open()
        return subscription_stats(self._engine, self._topic, self._state)

    def close(self) -> None:
        """Leave: what was received and not acknowledged is handed out again. A second call does what is left."""
        if self._left:
            return
        self._closed = True
        if not self._engine.closed:
            now_ms = self._engine.clock.now_ms()
            self._state.detach(self._consumer, now_ms)
            if self._topic.tracker is not None:
                self._engine.maintenance.look_at(self._topic.topic_id, now_ms + self._engine.config.tracker_idle_ms)
            self._topic.changed()
        self._left = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Subscription {self.name!r} of {self.topic!r}, {self.type}{', closed' if self._closed else ''}>"
