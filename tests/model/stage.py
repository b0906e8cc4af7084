"""The stage of a run of the model test: a store on a manual clock, its twin, and the messages of both."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize

from duelog import DelayedStore, Message, MessageId, ReceivedMessage, StoreConfig, Subscription
from duelog.delivery.dispatcher import SubscriptionType
from duelog.metrics import OVERRIDDEN, REJECTED
from duelog.store.names import TopicName
from duelog.topics.topic_state import TopicState
from tests.conftest import LeadingClock

from .drawing import (
    ALL,
    FAR_MS,
    HANDING_OUT,
    INLINE_DELAYS,
    RUNS,
    START_MS,
    STORING,
    THEMES,
    Call,
    Spec,
    TakingCall,
    pick,
)
from .driver import PAYLOAD, Told, scratch_directory
from .twin import Twin, TwinSlice
from .twin_policies import KEPT
from .twin_subscription import TwinSubscription
from .twin_topic import TwinMessage, TwinTopic, key_of, ttl_of

Item = tuple[int, MessageId, ReceivedMessage]
"""A delivery to a consumer: its place in the log, its position, and the message."""


@dataclass
class Consumer:
    """A consumer, its subscription's twin, and everything that it was given."""

    face: Subscription
    topic: TwinTopic
    twin: TwinSubscription
    number: int
    received: list[Item] = field(default_factory=list)


class Stage(RuleBasedStateMachine):
    """A store on a manual clock, and its twin."""

    themes: ClassVar[tuple[str, ...]] = THEMES
    kind: ClassVar[SubscriptionType | None] = None

    @initialize(run=RUNS)
    def open(self, run: dict[str, Any]) -> None:
        config, lead_ms, kind = run["config"], run["lead_ms"], self.kind or run["kind"]
        self.theme = pick(self.themes, run["theme"])
        if self.theme == INLINE_DELAYS:
            config["inline_delay_ms"] = max(config["inline_delay_ms"], 60)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("duelog.upkeep.maintenance._SLICE_S", run["slice_s"])
        self.patch.setattr("duelog.upkeep.reclaiming._SLICE_S", run["load_slice_s"])
        self.patch.setattr("duelog.markers.firing.loaded._LOAD_SLICE_S", run["load_slice_s"])
        self.patch.setattr("duelog.sending.delay_policies._log.disabled", True)  # it says what a store keeps otherwise
        self.directory = scratch_directory()
        self.copies = 0
        self.ever_inline = config["inline_delay_ms"] > 0
        self.ever_back = False
        """The clock was set back."""
        self.config = StoreConfig(map_bytes=64 << 20, wal_bytes=16 << 10, **config)
        self.clock = LeadingClock(START_MS + run["offset_ms"], lead_ms)
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
            for _ in range(run["consumers"] if kind != "exclusive" else 1):
                self._subscribe("t0", "a", kind, "earliest")
        self._begin(run["handing"], run["taking"])

    def _begin(self, handing: list[Call], taking: list[TakingCall]) -> None:
        """Set up the store and its twin."""

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
        """Compare store and twin at the end."""

    def _open(self, path: Path) -> None:
        self.store = DelayedStore.open(path, self.config, clock=self.clock)
        metrics = self.store._engine.metrics
        assert metrics is not None
        metrics._shared = self.told = Told()  # type: ignore[assignment]
        self.twin.counts.clear()
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
        """Policies in force are those that the twin knows to be set, whatever the store was opened with."""
        for topic in self.twin.topics.values():
            for name in (None, *topic.subscriptions):
                found = self.store.effective_policies(topic.name, name)
                assert {field: getattr(found, field) for field in KEPT} == {
                    field: self.twin.policies.value(topic.name, field, name) for field in KEPT
                }

    def _given(self, which: int) -> Consumer:
        """A consumer that was ever given a message."""
        return pick([consumer for consumer in self.consumers if consumer.received], which)

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
        ttl_ms = ttl_of(self.number)
        message = Message(payload, key=key_of(self.number), ttl=None if ttl_ms is None else ttl_ms / 1000)
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

    def _pending(self, topic: TwinTopic) -> int:
        """Count the messages that are not due yet, in partitions and in the main log."""
        return sum(log.unfired for log in self.twin.logs(topic)) + len(topic.waiting(self.twin.now_ms))

    def _places(self, topic: str) -> int:
        """How many more messages of a topic may be pending."""
        limit, twin = self.twin.policies.value(topic, "max_pending"), self.twin.topics.get(topic)
        return limit - (0 if twin is None else self._pending(twin)) if limit else 1_000_000

    def _over_quota(self, topic: str, dues: Sequence[int]) -> bool:
        """True if messages with these due times are more than may be pending."""
        later = sum(due_ms > self.twin.now_ms for due_ms in dues)
        return later > 0 and later > self._places(topic)

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
            TwinMessage(number, due_ms, sent_ms, message_id, ttl_ms=ttl_of(number))
            for number, due_ms, message_id in zip(
                [int(bytes(each.payload)) for each in messages], dues, ids, strict=True
            )
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

    # -- looking -------------------------------------------------------------------------------------

    def _state(self, topic: TwinTopic) -> TopicState:
        state = self.store._engine.topics.find(TopicName.parse(topic.name))
        assert state is not None, f"{topic.name} does not exist"
        return state

    def _add_delayed(self, topic: TwinTopic, message: TwinMessage) -> None:
        """The engine has appended a message to a partition without giving its id back: it is the next of the log."""
        part = self.twin.add_partition(message.due_ms)
        partitions = self.store._engine.storage.partitions
        engine_part = partitions.get(part.start_ms)
        assert engine_part is not None
        with partitions.lease(engine_part):
            log = engine_part.log(self._state(topic).topic_id)
        assert log is not None
        message.message_id = MessageId(log.ledger_id, len(part.log(topic).messages))
        self.twin.add_delayed(topic, message)

    def _learn(self) -> None:
        """Compare the lists of ledgers, and note what the engine calls each."""
        for topic in self.twin.topics.values():
            found = self._state(topic).log.ledgers()
            shape = [(info.created_ms, info.closed_ms if info.closed else None, info.entries) for info in found]
            assert shape == [(ledger.created_ms, ledger.closed_ms, ledger.count) for ledger in topic.ledgers]
            for ledger, info in zip(topic.ledgers, found, strict=True):
                assert ledger.ledger_id in (-1, info.ledger_id)
                ledger.ledger_id = info.ledger_id
