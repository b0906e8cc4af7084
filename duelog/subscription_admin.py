"""A subscription looked at and changed from outside: by operators, and by programs that do not receive."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pyroaring import BitMap

from duelog.store.errors import ConsumerBusy, InvalidArgument, UnknownSubscription
from duelog.store.message import ReceivedMessage, at_ms
from duelog.store.position import Position, position_at
from duelog.store.received_messages import ReceivedMessages

from .delivery.acks import AckSet
from .delivery.position_set import group_places
from .engine import Engine
from .stats import SubscriptionStats
from .topics.seeking import SeekTarget, expired, go_to
from .topics.topic_state import FOR_EVER_MS, SubscriptionState, TopicState

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
        if isinstance(after, bool) or not isinstance(after, int) or after < 0:
            raise InvalidArgument("after", after, "expected an int of at least 0")
        return self._first(count, after).to_list()

    def skip(self, count: int, *, until: Position | None = None) -> int:
        """Acknowledge the first `count` messages, as `peek` gives them; how many were not acknowledged meanwhile.

        until: none behind this position. Raises InvalidArgument.
        """
        self._engine.check_writable()
        places = self._first(count).places
        if until is not None:
            places = [place for place in places if position_at(place) <= until]
        entries = group_places(places)
        with self._state.lock:
            skipped = self._state.acknowledge(entries, self._topic.log)
            self._state.counts.acknowledged += skipped
        self._flush()
        return skipped

    def expire(self, before: datetime | int) -> int:
        """Acknowledge every message that was due before an instant (aware datetime or epoch ms); how many.

        What consumers hold of them is acknowledged too. O(entries after mark-delete). Raises InvalidArgument.
        """
        self._engine.check_writable()
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

    def reset(self, to: SeekTarget) -> Position:
        """`Subscription.seek` of a subscription to which no consumer is attached; raises ConsumerBusy if one is."""
        self._engine.check_writable()
        self._check_there()
        engine, topic, state = self._engine, self._topic, self._state
        position = engine.target_of(topic, to)
        now_ms = engine.clock.now_ms()
        with state.lock:
            if state.consumers:
                raise ConsumerBusy(self.topic, self.name, f"it has {state.consumers} consumers")
            position = go_to(topic, state, position, engine.delivery.inline.waiting(topic, now_ms), now_ms)
        self._flush()
        return position

    def pause(self, until: datetime | int | None = None) -> None:
        """Hand nothing out to any consumer of the subscription until `resume`; kept over restarts.

        until: an instant (aware datetime or epoch ms) at which it goes on by itself; None: until `resume`. It replaces
        an earlier pause. What consumers hold already they may acknowledge and give back. Raises InvalidArgument for an
        instant that has passed.
        """
        self._engine.check_writable()
        self._check_there()
        until_ms = FOR_EVER_MS if until is None else at_ms("until", until)
        if until_ms <= self._engine.clock.now_ms():
            raise InvalidArgument("until", until, "has passed")
        self._set_paused(until_ms)

    def resume(self) -> None:
        """End a pause."""
        self._engine.check_writable()
        self._check_there()
        self._set_paused(0)

    def stats(self) -> SubscriptionStats:
        """Figures of the subscription."""
        self._engine.check_open()
        return self._engine.figures.of_subscription(self._topic, self._state)

    # -- inside ------------------------------------------------------------------------------------

    def _set_paused(self, until_ms: int) -> None:
        state = self._state
        if state.durable:
            self._engine.storage.main.write(lambda transaction: state.write_paused(transaction, until_ms))
        else:
            state.paused_until_ms = until_ms  # a reader is in memory only
        self._topic.changed()

    def _check_there(self) -> None:
        if self._state.deleted or self._topic.deleted:
            raise UnknownSubscription(self.topic, self.name)

    def _acks(self) -> AckSet:
        """Copy the acknowledgements, to read them without the lock."""
        with self._state.lock:
            return self._state.acks.copy()

    def _first(self, count: int, after: int = 0) -> ReceivedMessages:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidArgument("count", count, "expected an int of at least 1")
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
        return f"<SubscriptionAdmin of {self.name!r} of {self.topic!r}>"
