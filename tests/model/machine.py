"""The machine that the rules of the model test work on: a store on a manual clock, its twin, and how they go together.

The rules are mixins (rules_*.py), so is what is compared (comparing.py).
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from duelog import DelayedStore, Message, MessageId, ReceivedMessage, StoreConfig, Subscription, TickResult
from duelog.delivery.dispatcher import SubscriptionType
from duelog.errors import StoreFull
from duelog.metrics import ENTRIES_TRIMMED, FIRED, LEDGERS_TRIMMED, OVERRIDDEN, PARTITIONS_DELETED, REJECTED
from duelog.store.codec.format import PartitionState
from duelog.store.names import TopicName
from duelog.topics.topic_state import TopicState
from tests.conftest import LeadingClock

from .drawing import (
    ALL,
    CONFIGS,
    FAR_MS,
    HANDING_CALLS,
    HANDING_OUT,
    INLINE_DELAYS,
    KINDS,
    LEADS,
    PICK,
    SLICES,
    START_MS,
    STORING,
    TAKING_CALLS,
    THEMES,
    Call,
    Spec,
    TakingCall,
    pick,
)
from .driver import PAYLOAD, ROLLED, Expired, Parts, Recorded, Told, expiries, recorded, scratch_directory
from .twin import Seen, Twin, TwinMessage, TwinSlice, TwinTopic, key_of
from .twin_policies import KEPT
from .twin_subscription import TwinSubscription

SLICE_COUNTERS = (FIRED, LEDGERS_TRIMMED, ENTRIES_TRIMMED, PARTITIONS_DELETED)
NOWHERE = MessageId(0, 0)

Item = tuple[int, MessageId, ReceivedMessage]
"""What a consumer was given: its place in the log, its position, and the message."""


@dataclass
class Consumer:
    """A consumer, its subscription's twin, and everything that it was given."""

    face: Subscription
    topic: TwinTopic
    twin: TwinSubscription
    number: int
    received: list[Item] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """A store on a manual clock, and its twin."""

    themes: ClassVar[tuple[str, ...]] = THEMES
    kind: ClassVar[SubscriptionType | None] = None

    @initialize(
        theme=PICK,
        config=CONFIGS,
        offset_ms=st.integers(0, 2_000),
        slice_s=SLICES,
        load_slice_s=SLICES,
        kind=KINDS,
        consumers=st.integers(1, 3),
        handing=HANDING_CALLS,
        taking=TAKING_CALLS,
        lead_ms=LEADS,
    )
    def open(
        self,
        theme: int,
        config: dict[str, Any],
        offset_ms: int,
        slice_s: float,
        load_slice_s: float,
        kind: SubscriptionType,
        consumers: int,
        handing: list[Call],
        taking: list[TakingCall],
        lead_ms: int,
    ) -> None:
        self.theme, kind = pick(self.themes, theme), self.kind or kind
        if self.theme == INLINE_DELAYS:
            config["inline_delay_ms"] = max(config["inline_delay_ms"], 60)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("duelog.background.maintenance._SLICE_S", slice_s)
        self.patch.setattr("duelog.background.trimming._SLICE_S", load_slice_s)
        self.patch.setattr("duelog.markers.firing.loaded._LOAD_SLICE_S", load_slice_s)
        self.patch.setattr(
            "duelog.sending.delay_policies._log.disabled", True
        )  # which says what a store keeps otherwise
        self.directory = scratch_directory()
        self.copies = 0
        self.ever_inline = config["inline_delay_ms"] > 0
        self.ever_timed = config["ack_timeout_ms"] is not None
        self.config = StoreConfig(map_bytes=64 << 20, journal_bytes=16 << 10, **config)
        self.clock = LeadingClock(START_MS + offset_ms, lead_ms)
        self.twin = Twin(self.config, self.clock.now_ms(), lead_ms)
        self.consumers: list[Consumer] = []
        self.shown_ms = self.clock.now_ms()
        """The latest time that the store was ever shown: what was due then may come when the clock has gone back."""
        self._open(self.directory / "0")
        self.messages: dict[int, TwinMessage] = {}
        self.asked_ms: dict[int, int] = {}
        """By number, the due time that a message was to have."""
        self.ids: list[tuple[str, MessageId]] = []
        """Every id that was ever given out, and its topic."""
        self.beside: tuple[TwinTopic, list[TwinMessage]] | None = None
        self.cleaning_up = False
        self.done = TwinSlice(0, 0, 0, 0)
        self.next_due_ms: int | None = None
        self.last_due_ms = START_MS
        self.number = 0
        self.steps = 0
        self.creation_failed = False
        if self.theme not in (ALL, STORING):
            for _ in range(consumers if kind != "exclusive" else 1):
                self._subscribe("t0", "a", kind, "earliest")
        self._begin(handing, taking)

    def _begin(self, handing: list[Call], taking: list[TakingCall]) -> None:
        """What a run begins with."""

    def _subscribe(self, topic: str, name: str, kind: SubscriptionType, initial: str) -> None:
        """A consumer comes."""

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                if not self.store.closed:
                    self._drain()
            finally:
                self.store.close()
                self.patch.undo()
                shutil.rmtree(self.directory)

    def _drain(self) -> None:
        """What is compared at the end."""

    def _open(self, path: Path) -> None:
        self.store = DelayedStore.open(path, self.config, clock=self.clock)
        metrics = self.store._engine.metrics
        assert metrics is not None
        metrics._shared = self.told = Told()  # type: ignore[assignment]
        self.twin.counts.clear()
        self.parts = Parts()
        self.store._engine.sender._run_all = self.parts  # type: ignore[method-assign]
        maintenance = self.store._engine.maintenance
        maintenance.slice = functools.partial(self._slice, maintenance.slice)  # type: ignore[method-assign]
        self.consumers.clear()
        self.creation_failed = False
        self.twin.mark_ms = self.twin.saved_mark_ms
        self.shown_ms = max(self.shown_ms, self.twin.now_ms)
        for topic in self.twin.topics.values():
            topic.unflushed_until_ms = -1
            for sub in topic.subscriptions.values():
                sub.forget_deliveries()
        self._same_policies()

    def _same_policies(self) -> None:
        """What is in force is what the twin knows to be set, whatever the store was opened with."""
        for topic in self.twin.topics.values():
            for name in (None, *topic.subscriptions):
                found = self.store.effective_policies(topic.name, name)
                assert {field: getattr(found, field) for field in KEPT} == {
                    field: self.twin.policies.value(topic.name, field, name) for field in KEPT
                }

    def _topic(self, topic: str) -> str:
        """A run about one subscription has one topic."""
        return "t0" if self.theme in (HANDING_OUT, INLINE_DELAYS) else topic

    # -- messages ------------------------------------------------------------------------------------

    def _due_ms(self, spec: Spec) -> int | None:
        now_ms, span_ms = self.twin.now_ms, self.config.partition_ms
        if self.theme not in (ALL, STORING) and spec[0] == "far":
            spec = ("after", 1 + spec[1])
        match spec:
            case ("none",):
                return None
            case ("again",):
                due_ms = self.last_due_ms
            case ("after", ms):
                due_ms = now_ms + ms
            case ("partition", ahead, offset_ms):
                due_ms = (now_ms // span_ms + ahead) * span_ms + offset_ms
            case ("near", ms):  # within the time that firing is early; -1: the last of it
                due_ms = now_ms + 1 + ms % max(self.twin.lead_ms, 1)
            case ("before", ms):
                due_ms = max(now_ms - ms, 0)
            case ("far", partitions):
                due_ms = now_ms + FAR_MS + partitions * span_ms
            case _:
                due_ms = now_ms
        self.last_due_ms = due_ms
        return due_ms

    def _message(self, spec: Spec, relative: bool = False) -> tuple[Message, int]:
        self.number += 1
        payload, due_ms, now_ms = b"%0*d" % (PAYLOAD, self.number), self._due_ms(spec), self.twin.now_ms
        message = Message(payload, key=key_of(self.number))
        self.asked_ms[self.number] = now_ms if due_ms is None else due_ms
        if due_ms is None:
            return message, now_ms
        if relative and due_ms >= now_ms:
            message.deliver_after = (due_ms - now_ms) / 1000
        else:
            message.deliver_at = due_ms
        return message, due_ms

    def _drawn(
        self, topic: str, specs: Sequence[Spec], relative: bool = False
    ) -> tuple[list[Message], list[int] | None]:
        """Messages, and the due times that policies give them; None: they are refused."""
        drawn = [self._message(spec, relative) for spec in specs]
        asked = [due_ms for _, due_ms in drawn]
        return [message for message, _ in drawn], self.twin.policies.dues(topic, asked, self.twin.now_ms)

    def _refused(self, topic: str, messages: Sequence[Message]) -> None:
        """A call raised DelayTooLong: it says which of the messages the maximum refuses."""
        now_ms = self.twin.now_ms
        self.twin.count(REJECTED, self.twin.policies.too_long(topic, self._asked_for(messages), now_ms), topic)

    def _asked_for(self, messages: Sequence[Message]) -> list[int]:
        return [self.asked_ms[int(bytes(message.payload))] for message in messages]

    def _twins(
        self, topic: str, messages: Sequence[Message], dues: Sequence[int], ids: Sequence[MessageId], sent_ms: int
    ) -> list[TwinMessage]:
        """Messages that were stored, sent at `sent_ms`."""
        self.twin.count(OVERRIDDEN, self.twin.policies.overridden(topic, self._asked_for(messages), sent_ms), topic)
        twins = [
            TwinMessage(int(bytes(message.payload)), due_ms, sent_ms, message_id)
            for message, due_ms, message_id in zip(messages, dues, ids, strict=True)
        ]
        self.messages.update((twin.number, twin) for twin in twins)
        return twins

    def _sent(self, topic: TwinTopic, messages: Sequence[TwinMessage]) -> None:
        """Messages were written now, whenever they were sent: a group for the main log and one for each partition.

        The groups go side by side; within a group the messages keep their order.
        """
        twin = self.twin
        self.ids += [(topic.name, message.message_id) for message in messages]
        direct = [message for message in messages if twin.is_direct(message.due_ms, message.publish_ms)]
        groups: dict[int, list[TwinMessage]] = {}
        for message in messages:
            groups.setdefault(twin.group(message.due_ms, message.publish_ms), []).append(message)
            if message not in direct:
                twin.add_delayed(topic, message)
        for together in groups.values():
            assert [message.message_id for message in together] == sorted(message.message_id for message in together)
        for message in sorted(direct, key=lambda message: message.message_id):
            twin.add_direct(topic, message)

    # -- time ----------------------------------------------------------------------------------------

    def _forward(self, ms: int) -> None:
        self.twin.wall_ms = self.clock.advance(ms)
        self.shown_ms = max(self.shown_ms, self.twin.now_ms)

    def _forward_to(self, until_ms: int) -> None:
        self._forward(max(until_ms - self.twin.wall_ms, 0))

    def _tick(self) -> None:
        self.done = TwinSlice(0, 0, 0, 0)
        result = self.store.tick()
        assert TwinSlice(result.fired, result.closed, result.trimmed, result.deleted) == self.done
        pending = [message.due_ms for topic in self.twin.topics.values() for message in self.twin.pending(topic)]
        if pending:
            assert result.next_due_ms is not None, "something is pending, and nothing is planned"
            assert result.next_due_ms <= min(pending), "the next message would be late"
        self.next_due_ms = result.next_due_ms

    def _tick_until_it_works(self) -> None:
        try:
            self.store.tick()
        except StoreFull:
            self.store.tick()

    def _slice(self, run: Callable[[], tuple[TickResult, bool]]) -> tuple[TickResult, bool]:
        """Stands in for a slice of a tick: the twin does the same at once."""
        now_ms = self.twin.now_ms
        with recorded() as appended, expiries() as old:
            try:
                result, more = run()
            except BaseException:
                self._advance(now_ms, appended, old, complete=False, failed=True)
                for counter in SLICE_COUNTERS:  # what came after a commit may have been left out
                    self._recount(counter)
                raise
        gave_way = self.store._engine.maintenance._gives_way  # and has left all but its firing to the next
        done = self._advance(now_ms, appended, old, complete=not more, failed=gave_way)
        assert TwinSlice(result.fired, result.closed, result.trimmed, result.deleted) == done
        self.done = TwinSlice(*(a + b for a, b in zip(astuple(self.done), astuple(done), strict=True)))
        return result, more

    def _recount(self, counter: str) -> None:
        """Go on from what a counter says, which is no more than it should be."""
        for key, count in list(self.twin.counts.items()):
            if key[0] == counter:
                assert self.told.sums[key] <= count
                self.twin.counts[key] = self.told.sums[key]

    def _advance(self, now_ms: int, appended: Recorded, old: Expired, *, complete: bool, failed: bool) -> TwinSlice:
        twin, beside, engine = self.twin, self.beside, self.store._engine
        self.beside = None
        ids = {self._state(topic).topic_id: topic for topic in twin.topics.values()}
        orders: dict[TwinTopic, list[TwinMessage | MessageId]] = {}
        rolled, after_roll = set(), False
        for topic_id, items in appended.items():
            topic = ids[topic_id]
            entries = [item for item in items if not isinstance(item, str)]
            orders[topic] = [self.messages[item] if isinstance(item, int) else item for item in entries]
            if ROLLED in items:
                rolled.add(topic)
                after_roll |= beside is not None and beside[0] is topic and items[-1] != ROLLED
        written_to, after, waiting = None, [], []
        if beside is not None:
            complete = False
            written_to, messages = beside
            order = orders.get(written_to, [])
            direct = [message for message in messages if message in order]
            self._only_what_is_due(direct, now_ms)
            for message in sorted(set(messages) - set(direct), key=lambda message: message.message_id):
                message.wild = True
                if message.message_id in order:
                    twin.add_delayed(written_to, message)
                else:
                    waiting.append(message)
            if self.cleaning_up:
                orders[written_to] = [item for item in order if item not in direct]
                after = direct
            for message in direct:
                twin.by_id[message.message_id] = message
        seen = Seen(
            {
                topic: [item if isinstance(item, TwinMessage) else twin.by_id[item] for item in items]
                for topic, items in orders.items()
            },
            {start_ms for start_ms in twin.partitions if self._has_closed(start_ms)},
            {partition.start_ms for partition in engine.partitions},
            lambda topic: self._state(topic).log.ledgers(),
            rolled,
            complete,
            failed,
            written_to,
            after,
            after_roll and self.cleaning_up,
            {
                ids[topic_id].subscriptions[name]: [ids[topic_id].first + place for place in places]
                for (topic_id, name), places in old.items()
            },
            appended.fired_ms,
        )
        done = twin.advance(now_ms, seen)
        for message in waiting:
            assert written_to is not None
            twin.add_delayed(written_to, message)
        for message in beside[1] if beside is not None else ():
            message.wild = False
        self._follow_schedules(now_ms, failed)
        for topic in twin.topics.values():
            for sub in topic.subscriptions.values():
                since_ms = sub.unflushed_since_ms
                if not failed and since_ms is not None and since_ms + self.config.ack_flush_ms <= now_ms:
                    sub.flush()
        return done

    def _only_what_is_due(self, direct: Sequence[TwinMessage], now_ms: int) -> None:
        span_ms = self.config.partition_ms
        for message in direct:
            ended = (message.due_ms // span_ms + 1) * span_ms <= now_ms
            soon = message.due_ms <= message.publish_ms + self.config.inline_delay_ms
            assert soon or ended, "it goes to the main log before it is due"

    def _has_closed(self, start_ms: int) -> bool:
        partition = self.store._engine.partitions.get(start_ms)
        return partition is None or partition.state is not PartitionState.OPEN

    def _follow_schedules(self, now_ms: int, failed: bool) -> None:
        """What recurs and was due is followed by its next occurrence, in the same slice."""
        for topic in self.twin.topics.values():
            if not topic.schedules:
                continue
            found = {schedule.name: schedule for schedule in self.store.topic(topic.name).schedules()}
            written = {name: found[name].next_id or NOWHERE for name in topic.schedules}
            for name in sorted(written, key=written.__getitem__):
                schedule, there = topic.schedules[name], found[name]
                due_ms = schedule.next_due_ms
                if due_ms is None or due_ms > now_ms or (failed and there.next_due_ms == due_ms):
                    continue
                assert there.next_due_ms == schedule.following_ms(now_ms), "it is not followed by what comes next"
                self._occurrence(topic, name, there.next_due_ms, there.next_id)
        if failed:
            self._adopt_left_over()

    def _occurrence(self, topic: TwinTopic, name: str, due_ms: int | None, message_id: MessageId | None) -> None:
        """The next occurrence of a schedule is pending; with `due_ms` None there is none."""
        schedule = topic.schedules[name]
        schedule.next_due_ms, schedule.next_id = due_ms, message_id
        if due_ms is not None:
            assert message_id is not None
            self.twin.add_delayed(topic, TwinMessage(schedule.number, due_ms, self.twin.now_ms, message_id))
            self.ids.append((topic.name, message_id))

    def _adopt_left_over(self) -> None:
        """A request failed half way: its entries are there, their ids are not known; their partition may be there."""
        engine = self.store._engine
        ids = {self._state(topic).topic_id: topic for topic in self.twin.topics.values()}
        for partition in engine.partitions.held():
            for log in partition.logs():
                if log.topic_id in ids:
                    part = self.twin.add_partition(partition.start_ms)
                    part.log(ids[log.topic_id]).leave_over(log.ledger.entries)
            self.twin.add_partition(partition.start_ms)

    # -- looking -------------------------------------------------------------------------------------

    def _state(self, topic: TwinTopic) -> TopicState:
        state = self.store._engine.topics.find(TopicName.parse(topic.name))
        assert state is not None, f"{topic.name} does not exist"
        return state

    def _learn(self) -> None:
        """Compare the lists of ledgers, and note what the engine calls each."""
        for topic in self.twin.topics.values():
            found = self._state(topic).log.ledgers()
            shape = [(info.created_ms, info.closed_ms if info.closed else None, info.entries) for info in found]
            assert shape == [(ledger.created_ms, ledger.closed_ms, ledger.count) for ledger in topic.ledgers]
            for ledger, info in zip(topic.ledgers, found, strict=True):
                assert ledger.ledger_id in (-1, info.ledger_id)
                ledger.ledger_id = info.ledger_id
