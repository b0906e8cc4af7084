"""Subscriptions: one consumer of a topic's messages, and a subscription looked at and changed from outside.

Deliveries of all consumers of a subscription are in its dispatcher, under its lock; commits are waited for without it.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import numpy as np
from pyroaring import BitMap

from duelog.store.clock import ManualClock, StoreClock
from duelog.store.codec.body import encode_one, occurrence_extra
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import (
    ClockJumped,
    ClosedError,
    ConsumerBusy,
    DuelogError,
    InvalidArgument,
    StoreFull,
    UnknownSubscription,
    checked_int,
    short_names,
)
from duelog.store.held import Held
from duelog.store.message import MAX_DUE_MS, Message, ReceivedMessage, at_ms
from duelog.store.position import MessageId, Position, position_at
from duelog.store.received_messages import Facts, ReceivedMessages
from duelog.store.wal.write_batch import WriteBatch

from .delivery.acks import AckSet
from .delivery.consumer_arguments import Acknowledgeable, checked, deadline_of, entries_of, positions_of
from .delivery.dispatcher import Dispatcher, SubscriptionType
from .delivery.position_set import group_by_ledger, group_places
from .engine import Engine, writing
from .stats import SubscriptionStats
from .topics.seeking import SeekTarget, expired, go_to
from .topics.task_activity import TaskActivity
from .topics.topic_state import FOR_EVER_MS, Part, SubscriptionState, TopicState

_AT_ONCE = 64


@dataclass(eq=False, repr=False)
class SubscriptionAdmin:
    """A subscription of a topic, whether consumers are attached or not. Made by Topic.subscription; thread-safe.

    Every change is durable when it returns. All raise UnknownSubscription once it is removed, and ClosedError; what
    changes something raises StoreFull and StoreFailed too. `peek` and `stats` are for stores open read-only as well.
    """

    _engine: Engine
    _topic: TopicState
    _state: SubscriptionState

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return str(self._topic.name)

    def peek(self, count: int = 1, *, after: int = 0) -> list[ReceivedMessage]:
        """The first `count` messages that are due and not acknowledged, in the log's order; nothing is handed out.

        after: leave out so many before them, which are read and not kept. Consumers may hold some of them.
        redelivery_count is 0. Raises InvalidArgument.
        """
        self._engine.check_open()
        return self._first(count, checked_int("after", after, 0, "an int of at least 0")).to_list()

    @writing
    def skip(self, count: int, *, until: Position | None = None) -> int:
        """Acknowledge the first `count` messages, as `peek` gives them; how many were not acknowledged meanwhile.

        until: none behind this position. Raises InvalidArgument.
        """
        places = self._first(count).places
        if until is not None:
            places = [place for place in places if position_at(place) <= until]
        entries = group_places(places)
        with self._state.lock:
            skipped = self._state.acknowledge(entries, self._topic.log)
            self._state.counts.acknowledged += skipped
        self._flush()
        return skipped

    @writing
    def expire(self, before: datetime | int) -> int:
        """Acknowledge every message that was due before an instant (aware datetime or epoch ms); how many.

        What consumers hold of them is acknowledged too. O(entries after mark-delete). Raises InvalidArgument.
        """
        self._check_there()
        before_ms = at_ms("before", before) - 1
        log, acks = self._topic.log, self._acks()
        entries: dict[int, BitMap] = {}
        for ledger_id, of_run in expired(self._engine.storage.main, log, acks, before_ms, thorough=True):
            entries[ledger_id] = entries.get(ledger_id, BitMap()) | of_run
        with self._state.lock:
            count = self._state.acknowledge(entries, log)
            self._state.counts.expired += count
        self._flush()
        return count

    @writing
    def reset(self, to: SeekTarget) -> Position:
        """`Subscription.seek` of a subscription to which no consumer is attached; raises ConsumerBusy if one is."""
        self._check_there()
        return self._go_to(to, attached=False)

    def _go_to(self, to: SeekTarget, *, attached: bool) -> Position:
        """attached: though it has consumers."""
        engine, topic, state = self._engine, self._topic, self._state
        position = engine.target_of(topic, to)
        now_ms = engine.clock.now_ms()
        with state.lock:
            if state.consumers and not attached:
                raise ConsumerBusy(self.topic, self.name, f"it has {state.consumers} consumers")
            position = go_to(topic, state, position, engine.delivery.inline.waiting(topic, now_ms), now_ms)
        self._flush()
        return position

    @writing
    def pause(self, until: datetime | int | None = None) -> None:
        """Hand nothing out to any consumer of the subscription until `resume`; kept over restarts.

        until: an instant (aware datetime or epoch ms) at which it goes on by itself; None: until `resume`. It replaces
        an earlier pause. What consumers hold already they may acknowledge and give back. Raises InvalidArgument for an
        instant that has passed.
        """
        self._check_there()
        until_ms = FOR_EVER_MS if until is None else at_ms("until", until)
        if until_ms <= self._engine.clock.now_ms():
            raise InvalidArgument("until", until, "has passed")
        self._set_paused(until_ms)

    @writing
    def resume(self) -> None:
        """End a pause."""
        self._check_there()
        self._set_paused(0)

    def stats(self) -> SubscriptionStats:
        """Figures of the subscription."""
        self._engine.check_open()
        return self._engine.figures.of_subscription(self._topic, self._state)

    def tasks(self) -> list[TaskActivity]:
        """The tasks of workers that receive from it, in this process and in those that are connected."""
        self._engine.check_open()
        return self._state.tasks()

    # -- inside ------------------------------------------------------------------------------------

    def _set_paused(self, until_ms: int) -> None:
        state = self._state
        if state.durable:
            self._engine.storage.main.write(lambda transaction: state.write_paused(transaction, until_ms))
        else:
            state.paused_until_ms = until_ms  # a reader is in memory only
        self._topic.changed()

    def _await_copy(self) -> None:
        self._engine.settle(self._topic.name)

    def _check_there(self) -> None:
        if self._state.deleted or self._topic.deleted:
            raise UnknownSubscription(self.topic, self.name)

    def _acks(self) -> AckSet:
        """Copy the acknowledgements, to read them without the lock."""
        with self._state.lock:
            return self._state.acks.copy()

    def _first(self, count: int, after: int = 0) -> ReceivedMessages:
        count = checked_int("count", count, 1, "an int of at least 1")
        self._check_there()
        acks = self._acks()
        inline, now_ms = self._engine.delivery.inline, self._engine.clock.now_ms()
        reader = inline.onlooker(self._topic, self.name)
        policies = self._engine.policies.effective(self._topic.name, self.name)
        expired_ms = self._state.expired_ms(policies, now_ms)
        messages = ReceivedMessages(self.topic, self.name)
        start = Position(acks.mark_delete.ledger_id, acks.mark_delete.entry_id + 1)
        while len(messages) < count:
            batch, start, _ = reader.read(start, min(after + count - len(messages), _AT_ONCE), acks, now_ms)
            if not batch:
                break
            addressed = batch.deliverable(self.name, now_ms, expired_ms)
            messages += addressed.part(after, len(addressed))
            after = max(after - len(addressed), 0)
        return messages

    def _flush(self) -> None:
        engine = self._engine
        engine.delivery.flusher.mark(self._state, engine.clock.now_ms())
        engine.delivery.flusher.flush()
        engine.waking.agenda.look_at(self._topic.topic_id, 0)
        self._topic.changed()

    def __repr__(self) -> str:
        return f"<SubscriptionAdmin of {self.name!r} of {short_names(self.topic)!r}>"


_NONE = ReceivedMessages("", "")
_NO_FACTS = Facts(None)

_BURY_AGAIN_MS = 1_000
"""When a message that cannot be moved to the dead letters comes again, to be tried again."""


class _Acknowledged(Exception):
    """A message was acknowledged before: it is not sent again."""


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
        self._flusher = engine.delivery.flusher
        self._clock = engine.clock
        self._closed = False
        self._left = False
        self.type: SubscriptionType = type_
        self._id, now_ms = next(state.consumer_ids), engine.clock.now_ms()
        try:
            state.attach(
                self._id,
                type_,
                lambda: engine.delivery.inline.reader(topic, state),
                topic.log,
                lambda: engine.policies.effective(topic.name, state.name),
                part,
                now_ms,
            )
            if state.durable and self._flusher.log is not None:
                self._flusher.log.join(state.record.subscription_id, state.log_held)
            if type_ == "failover":
                topic.changed()  # another may be served now
        except BaseException:
            self._leave(now_ms, failed=False)  # nobody has it to close it
            raise

    def _dispatcher(self) -> Dispatcher:
        """The subscription's deliveries. REQUIRES: its lock. Raises ClosedError."""
        dispatcher = self._state.dispatcher
        if dispatcher is None or self._closed:
            raise ClosedError(f"subscription {self._state.name!r}")
        return dispatcher

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
        with self._state.lock:
            return self._dispatcher().may_receive(self._id)

    @property
    def held(self) -> int:
        """How many messages it holds: handed to it, and neither acknowledged nor given back. 0: also once closed."""
        return self._state.held_by(self._id)

    @property
    def max_in_flight(self) -> int:
        """How many messages it may hold unacknowledged (`Policies.max_in_flight`); 0: any number."""
        return self._state.max_in_flight

    @property
    def hands_alike(self) -> bool:
        """True if what one consumer is not handed now is not for another: a shared one without `max_in_flight`."""
        with self._state.lock:
            dispatcher = self._dispatcher()
            return dispatcher.type == "shared" and not self._state.max_in_flight and not dispatcher.for_one

    # -- receiving ---------------------------------------------------------------------------------

    def receive(self, max_messages: int = 1, timeout: Duration | None = None) -> list[ReceivedMessage]:
        """Messages that are due, at most `max_messages`, oldest in the log first; waits for the first.

        timeout: how long to wait by the store's clock, seconds or a timedelta; None: until there is a message. An empty
        list: the time is over. A store on a ManualClock without a background thread does not wait at all, since nothing
        moves its clock meanwhile: it returns what is due.

        Raises ClosedError when the subscription or the store is closed, also while waiting; and what keeps the
        store from firing (StoreFull, ClockJumped, ...) when there is nothing to hand out.
        """
        deadline_ms = deadline_of(self._clock.now_ms(), timeout)
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
        topic = self._topic
        while True:
            version, now_ms = topic.version, self._clock.now_ms()
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
                    self._clock.wait(topic.condition, until_ms)

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
        return self._clock

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
            self._clock.wait(self._topic.condition, until_ms)

    def wake(self) -> None:
        """Have every receiver of the topic look again."""
        self._topic.changed()

    def report_task(self, activity: TaskActivity | Callable[[], TaskActivity]) -> None:
        """Have figures tell what a worker's task does, until the subscription is closed; a later call replaces it.

        activity: its state, or what tells that whenever it is asked.
        """
        self._state.report_task(self._id, activity if callable(activity) else lambda: activity)

    @property
    def may_wait(self) -> bool:
        """True if waiting makes sense: something moves the clock or fires messages that are due."""
        engine = self._engine
        return (
            engine.waking.scheduler is not None
            or engine.storage.read_only
            or not isinstance(self._clock.wrapped, ManualClock)
        )

    @property
    def polls_at_once(self) -> bool:
        """True if `poll` does no upkeep: another thread fires."""
        return self._engine.waking.scheduler is not None

    def poll(self, max_messages: int = 1) -> tuple[list[ReceivedMessage], int | None]:
        """Receive at most `max_messages` that are due now, without waiting; with none, also when to poll again.

        That time is epoch ms, or None: when the topic changes. It may change before that time, too (`add_waker`).
        Raises as `receive`.
        """
        batch, again_ms = self.poll_columns(max_messages)
        return batch.to_list(), again_ms

    def poll_columns(self, max_messages: int = 1, *, fetches: bool = False) -> tuple[ReceivedMessages, int | None]:
        """Poll without making an object for each message; `ack` takes the columns, or any part of them. See `poll`.

        fetches: fetch a day that is in the copy alone, and wait for that, in place of returning none of its messages.
        """
        max_messages = checked_int("max_messages", max_messages, 1, "an int of at least 1")
        engine = self._engine
        while True:
            self._check_usable()
            due_ms, more = None, False
            stopped: DuelogError | None = None
            if engine.waking.scheduler is not None:
                stopped = engine.waking.scheduler.error
            else:
                try:
                    done, more = engine.slice(if_due=True)
                    due_ms = done.next_due_ms
                except (StoreFull, ClockJumped) as error:
                    stopped = error
            batch, again_ms = self._hand_out(min(max_messages, sys.maxsize))
            if batch:
                return batch, None
            if batch is not None or more:  # what was due went elsewhere; fired for another topic, or still loading
                continue
            if fetches and self._fetch():
                continue
            if stopped is not None:
                raise stopped
            return _NONE, min((ms for ms in (again_ms, due_ms) if ms is not None), default=None)

    def _fetch(self) -> bool:
        """Fetch the days that reading has ended before; False: there is none. Raises as `PartitionSet.at_hand`."""
        with self._state.lock:
            away = [] if self._state.reader is None else self._state.reader.days.take_awaited()
        for partition in away:
            self._engine.storage.partitions.at_hand(partition)
        return bool(away)

    def _check_usable(self) -> None:
        self._engine.check_writable()
        if self._closed:
            raise ClosedError(f"subscription {self.name!r}")
        if self._state.deleted or self._topic.deleted:
            raise UnknownSubscription(self.topic, self.name)

    def _hand_out(self, max_messages: int) -> tuple[ReceivedMessages | None, int | None]:
        """Messages that are due now, at most `max_messages`; and if there are none, when to look again.

        An empty batch: what was due went elsewhere, or lies in the copy, and more may be. None: nothing is due. When:
        epoch ms, or None.
        """
        engine, state, topic = self._engine, self._state, self._topic
        now_ms = self._clock.now_ms()
        limit = state.max_in_flight
        with state.lock:
            dispatcher = self._dispatcher()
            if now_ms < state.paused_until_ms:
                return None, state.pause_ends_ms(now_ms)
            kept_back = dispatcher.kept_back_count
            batch = dispatcher.next_batch(self._id, max_messages, now_ms, limit)
            passed_gone = self._pass_gone(dispatcher)
            kept_more = dispatcher.kept_back_count > kept_back
            passed_over = None if state.reader is None else state.reader.next_due_ms(now_ms)
            again = (dispatcher.next_redelivery_ms(), passed_over)
            failed = state.attempts.changed
            asked = state.reader is not None and state.reader.days.asked
            if state.reader is not None:
                state.reader.days.asked = False
        try:
            if failed or (self._flusher.log is not None and self._flusher.log.worn):
                self._note(moved_ledger=False)
            if passed_gone is not None:
                self._note(moved_ledger=passed_gone)
            if kept_more or (batch and state.policies.ack_timeout_ms):
                topic.changed()  # others have something to wait for that they did not know of
            if not batch:
                if asked and engine.waking.scheduler is None:
                    return _NONE, None  # the upkeep, which is run before the next look, fetches the day
                return None, min((ms for ms in again if ms is not None), default=None)
            routed = self._route(batch)
        except BaseException:  # the caller gets none of them, and no delivery has failed
            with state.lock:
                self._dispatcher().nack(self._id, batch.positions, now_ms, now_ms, failed=False)
            topic.changed()
            raise
        with state.lock:
            state.counts.hand_out(routed)
        return routed, None

    def _note(self, *, moved_ledger: bool) -> None:
        """Have what changed with a delivery be written; where there is no space the upkeep tries again, and says so."""
        with suppress(StoreFull):
            self._flusher.acknowledged(self._topic, self._state, moved_ledger=moved_ledger)

    def _pass_gone(self, dispatcher: Dispatcher) -> bool | None:
        """Acknowledge what the reader found to be gone; None: nothing, else whether there may be something to trim.

        REQUIRES: the subscription's lock.
        """
        gone = self._state.take_gone()
        if not gone:
            return None
        before = dispatcher.acks.mark_delete
        dispatcher.ack(None, gone)
        return dispatcher.acks.has_ended_ledger(before, self._topic.log)

    def _route(self, batch: ReceivedMessages) -> ReceivedMessages:
        """Return the messages of a batch for the handler; the rest (for others, expired, dead) is acknowledged."""
        state = self._state
        buries = state.durable and not self._topic.keeps_dead_letters
        limit = state.policies.max_redeliveries if buries else -1
        now_ms, expired = self._clock.now_ms(), 0
        expired_ms = state.expired_ms(state.policies, now_ms)
        if (
            not batch.facts
            and (limit < 0 or max(batch.redelivery_counts) <= limit)
            and (expired_ms < 0 or min(batch.due_ms) > expired_ms)
        ):
            return batch
        wanted, dead, over = [], [], []
        columns = zip(batch.places, batch.redelivery_counts, batch.due_ms, strict=True)
        for row, (place, count, due_ms) in enumerate(columns):
            facts = batch.facts.get(place, _NO_FACTS)
            if due_ms <= expired_ms or not facts.deliverable(state.name, now_ms):
                over.append(row)
                expired += facts.addressee in (None, state.name)
            elif limit >= 0 and count + facts.retries > limit:
                dead.append(row)
            else:
                wanted.append(row)
        if dead:
            letters = batch.pick(dead)
            if not self._engine.delivery.dead_letters.bury_if_possible(self._topic, state, letters.to_list()):
                with state.lock:
                    at_ms = now_ms + _BURY_AGAIN_MS
                    self._dispatcher().nack(self._id, letters.positions, at_ms, now_ms, failed=False)
        if over:
            passed_over = entries_of(batch.pick(over))
            with suppress(StoreFull):  # as in _note
                self._acknowledge(lambda dispatcher: dispatcher.ack_entries(self._id, passed_over), counted=False)
            with state.lock:
                state.counts.expired += expired
        return batch if len(wanted) == len(batch) else batch.pick(wanted)

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
        return self._acknowledge(lambda dispatcher: dispatcher.ack_entries(self._id, entries), durable=durable)

    def _acknowledge(self, work: Callable[[Dispatcher], int], *, durable: bool = False, counted: bool = True) -> int:
        with self._state.lock:
            dispatcher = self._dispatcher()
            before = dispatcher.acks.mark_delete
            count = work(dispatcher)
            if counted:
                self._state.counts.acknowledged += count
            moved = dispatcher.acks.has_ended_ledger(before, self._topic.log)
            others_wait = self._state.max_in_flight or dispatcher.kept_back_count
        if others_wait:
            self._topic.changed()  # a consumer may hold less than its limit, a key may be free for another
        if count:
            self._flusher.acknowledged(self._topic, self._state, moved_ledger=moved, durable=durable)
        elif durable:
            self._flusher.flush()
        if durable:
            self._await_copy()
        return count

    def _await_copy(self) -> None:
        self._engine.settle(self._topic.name)

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
        position = self._place(positions[0])
        return self._acknowledge(lambda dispatcher: dispatcher.ack_cumulative(position), durable=durable)

    def holds(self, message: ReceivedMessage) -> bool:
        """Return whether this consumer still holds a delivery: not acknowledged, given back or taken back since."""
        self._check_usable()
        with self._state.lock:
            return self._state.holds(message, message.position, self._id)

    def nack(self, messages: Acknowledgeable | Iterable[Acknowledgeable], *, delay: Duration | None = None) -> int:
        """Give messages back, to be handed out again `delay` from now (to any consumer, if shared).

        delay: seconds or a timedelta; None: after `nack_backoff_ms`, doubled with each redelivery up to
        `nack_backoff_max_ms`. Returns how many this consumer still held: of a received message that delivery, not one
        that came after it. What is given back waits in memory: a restart delivers it at once, with the count of its
        deliveries.
        """
        items = [messages] if isinstance(messages, (ReceivedMessage, MessageId, str)) else list(checked(messages))
        delay_ms = None if delay is None else duration_ms("delay", delay)
        self._check_usable()
        places = [self._place(*positions_of(item)) for item in items]
        now_ms, by_delay = self._clock.now_ms(), dict[int, list[Position]]()
        with self._state.lock:
            dispatcher = self._dispatcher()
            for item, place in zip(items, places, strict=True):
                if not isinstance(item, ReceivedMessage) or self._state.holds(item, item.position, self._id):
                    wait_ms = self._backoff_ms(item) if delay_ms is None else delay_ms
                    by_delay.setdefault(wait_ms, []).append(place)
            count = sum(
                dispatcher.nack(self._id, given, now_ms + wait_ms, now_ms) for wait_ms, given in by_delay.items()
            )
        return self._given_back(count)

    def _given_back(self, count: int) -> int:
        if count:
            self._flusher.acknowledged(self._topic, self._state, moved_ledger=False)
            self._topic.changed()
        return count

    def extend(self, messages: Acknowledgeable | Iterable[Acknowledgeable], timeout: Duration | None = None) -> int:
        """Hold messages for `timeout` from now on before they are delivered again, in place of what was left.

        timeout None: as long as the acknowledgement timeout (`Policies.ack_timeout_ms`). Where there is none nothing
        is to be extended. In memory, as what it extends. Returns how many this consumer still held: others were
        acknowledged, given back, or taken back because they were overdue. Raises InvalidArgument.
        """
        entries = entries_of(messages)
        wait_ms = None if timeout is None else duration_ms("timeout", timeout)
        self._check_usable()
        now_ms = self._clock.now_ms()
        with self._state.lock:
            wait_ms = self._state.policies.ack_timeout_ms if wait_ms is None else wait_ms
            count = self._dispatcher().extend(self._id, entries, now_ms + wait_ms)
        self._topic.changed()  # they may come again earlier than receivers know of
        return count

    def nack_all(self) -> int:
        """Give back all that this consumer holds, to be handed out again at once, in log order; how many messages."""
        self._check_usable()
        with self._state.lock:
            count = self._dispatcher().nack_all(self._id, self._clock.now_ms())
        return self._given_back(count)

    def _backoff_ms(self, item: Acknowledgeable) -> int:
        policies = self._state.policies
        times = min(item.redelivery_count, 40) if isinstance(item, ReceivedMessage) else 0
        return min(policies.nack_backoff_ms << times, policies.nack_backoff_max_ms)

    @writing
    def retry_later(self, message: ReceivedMessage, delay: Duration, *, reason: str | None = None) -> MessageId | None:
        """Have a message delivered to this subscription again `delay` from now, as a new delayed message.

        delay: seconds or a timedelta. Unlike `nack` it survives a restart, and it costs a write. Returns the new id;
        None: the message was acknowledged before, and is not delivered again. The new message is stored and the old one
        acknowledged in one group: a crash leaves one of them. It counts towards `max_redeliveries`. Other subscriptions
        do not get it. The topic's delay policies count but for a fixed delay: raises DelayTooLong, with nothing done,
        for a delay over the maximum. reason: why, as of `dead_letter`: kept as the new message's `failure`, and as the
        reason of the dead letter that it becomes if its deliveries fail.
        """
        self._check_received(message)
        delay_ms, failure = duration_ms("delay", delay), _text("reason", reason)
        self._check_usable()
        topic, state = self._topic, self._state
        if not state.durable:
            raise InvalidArgument("message", message, "a reader is gone when its consumers are; nothing is sent to it")
        now_ms = self._clock.now_ms()
        if now_ms + delay_ms > MAX_DUE_MS:
            raise InvalidArgument("delay", delay, "due after the year 9999")
        due_ms = self._engine.policies.retry_due_ms(topic.name, now_ms + delay_ms, now_ms)
        with state.lock:
            failed = self._dispatcher().outstanding.failed_at(message.position)
        body = _postponed(state.name, message, due_ms, now_ms, now_ms if failed is None else failed[0], failure)
        entries = entries_of(message)
        sender, dues = self._engine.sending.sender, np.array([due_ms], dtype=np.int64)

        def work(group: WriteBatch) -> tuple[int, int]:
            fresh = self._flusher.acknowledge(group, topic, state, entries)
            if not any(fresh.values()):
                raise _Acknowledged
            return send(group)

        try:
            with Held() as held:
                sender.within_quota(held, [topic], None, dues, now_ms, refused=False)
                send = sender.sending_one(held, topic, due_ms, body, now_ms)
                return MessageId(*sender.write(work))
        except _Acknowledged:
            return None

    def _check_received(self, message: ReceivedMessage) -> None:
        if not isinstance(message, ReceivedMessage) or (message.topic, message.subscription) != (
            str(self._topic.name),
            self._state.name,
        ):
            raise InvalidArgument("message", message, "expected a message that this subscription received")

    @writing
    def dead_letter(self, message: ReceivedMessage, reason: str | None = None) -> None:
        """Give a message up now, whatever `max_redeliveries` says: it becomes a dead letter, with this reason.

        reason: some text, kept to its first 1,000 characters, and this delivery counts as failed; None: too many failed
        before it (then the reason is the last that `retry_later` was told, or "redeliveries"). A consumer of the
        dead-letter topic has it as the property DEAD_LETTER_REASON, the number of deliveries as DEAD_LETTER_ATTEMPTS,
        beside REAL_TOPIC, REAL_SUBSCRIPTION and ORIGIN_MESSAGE_ID. The message is moved in one transaction; one that
        was acknowledged meanwhile is left. Raises InvalidArgument, also for a reader's
        message and for what is a dead letter itself; StoreFull, StoreFailed: then it is held as before.
        """
        self._check_received(message)
        text = _text("reason", reason)
        self._check_usable()
        if not self._state.durable or self._topic.keeps_dead_letters:
            raise InvalidArgument("message", message, "of a reader, or a dead letter itself, which go nowhere")
        self._engine.delivery.dead_letters.bury(self._topic, self._state, [message], text)

    # -- moving --------------------------------------------------------------------------------------

    @writing
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
        return SubscriptionAdmin(self._engine, self._topic, self._state)._go_to(to, attached=True)

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
        return self._state.paused_until_ms > self._clock.now_ms()

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
        self._closed = True
        if not self._engine.closed:
            now_ms = self._clock.now_ms()
            self._leave(now_ms, failed=failed)
            if self._topic.tracker is not None:
                self._engine.waking.agenda.look_at(
                    self._topic.topic_id, now_ms + self._engine.storage.config.tracker_idle_ms
                )
            self._topic.changed()
        self._left = True

    def _leave(self, now_ms: int, *, failed: bool) -> None:
        state = self._state
        state.detach(self._id, now_ms, failed=failed)
        if state.attempts.changed:
            self._flusher.acknowledged(self._topic, state, moved_ledger=False)
        with state.lock:
            if state.durable and not state.consumers and self._flusher.log is not None:
                self._flusher.log.leave(state.record.subscription_id)
        if not state.durable and state.deleted:
            self._topic.forget_reader(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<Subscription {self.name!r} of {short_names(self.topic)!r}, {self.type}{closed}>"


def _postponed(
    subscription: str, message: ReceivedMessage, due_ms: int, now_ms: int, failed_ms: int, failure: str | None
) -> bytes:
    """The body of a message that is sent anew, to be delivered to this subscription alone.

    failed_ms: when its first delivery failed. failure: why this one did; None: as the one before.
    """
    first_id, first_ms = message.first_try or (message.message_id, failed_ms)
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
    return encode_one(copy, now_ms, 2**30, extra)[1]


def _text(field: str, value: str | None) -> str | None:
    """Some text as it is kept. Raises InvalidArgument."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidArgument(field, value, "expected some text, or None")
    return value[:1_000].encode(errors="backslashreplace").decode()
