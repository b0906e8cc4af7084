"""The machine of the model test: a store on a manual clock and its twin, how time goes on, and comparisons."""

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from duelog import DelayedStore, Message, MessageId, ReceivedMessage, StoreConfig, Subscription, TickResult
from duelog.delivery.dispatcher import SubscriptionType
from duelog.errors import StoreFull
from duelog.metrics import (
    BACKLOG,
    CANCELLED,
    DELAYED,
    ENTRIES_TRIMMED,
    FIRED,
    LEDGERS_TRIMMED,
    OVERRIDDEN,
    PARTITIONS_DELETED,
    PENDING,
    REJECTED,
    RESCHEDULED,
)
from duelog.store.codec.format import PartitionState
from duelog.store.log import catalog
from duelog.store.names import TopicName
from duelog.topics.topic_state import TopicState
from tests.conftest import LeadingClock, present

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
from .driver import PAYLOAD, ROLLED, Recorded, Told, recorded, scratch_directory
from .twin import Seen, Twin, TwinSlice
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


SLICE_COUNTERS = (FIRED, LEDGERS_TRIMMED, ENTRIES_TRIMMED, PARTITIONS_DELETED)

NOWHERE = MessageId(0, 0)

COUNTED = (*SLICE_COUNTERS, CANCELLED, RESCHEDULED, REJECTED, OVERRIDDEN)
"""The counters of metrics that the twin keeps too."""


class Machine(RuleBasedStateMachine):
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
        self.transactions = 0
        self.steps = 0
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
        if self.ever_back:  # the clock mark may be lost, by which messages were sent
            self._forward_to(self._sent_by_ms())
        self.store = self._opened(path)
        metrics = present(self.store._engine.metrics)
        metrics._shared = self.told = Told()  # type: ignore[assignment]
        self.twin.counts.clear()
        self.consumers.clear()
        self.twin.mark_ms = self.twin.saved_mark_ms
        self.shown_ms = max(self.shown_ms, self.twin.now_ms)
        for topic in self.twin.topics.values():
            topic.unflushed_until_ms = -1
            for sub in topic.subscriptions.values():
                sub.forget_deliveries()
        self._same_policies()
        maintenance = self.store._engine.upkeep.maintenance
        maintenance.slice = functools.partial(self._slice, maintenance.slice)  # type: ignore[method-assign]

    def _opened(self, path: Path) -> DelayedStore:
        """Open the store; a connection to it does as well."""
        return DelayedStore.open(path, self.config, clock=self.clock)

    def _inside(self, consumer: Subscription) -> Subscription:
        """Return the consumer of the open store: where the store is connected to, another object."""
        return consumer

    def _same_policies(self) -> None:
        """Policies in force are those that the twin knows to be set, whatever the store was opened with."""
        for topic in self.twin.topics.values():
            for name in (None, *topic.subscriptions):
                found = self.store.effective_policies(topic.name, name)
                assert {field: getattr(found, field) for field in KEPT} == {
                    field: self.twin.policies.value(topic.name, field, name) for field in KEPT
                }

    def _given(self, which: int) -> Consumer:
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
        engine_part = present(partitions.get(part.start_ms))
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

    # -- time -----------------------------------------------------------------------------------------

    def _forward(self, ms: int) -> None:
        self.twin.wall_ms = self.clock.advance(ms)
        self.shown_ms = max(self.shown_ms, self.twin.now_ms)

    def _forward_to(self, until_ms: int) -> None:
        self._forward(max(until_ms - self.twin.wall_ms, 0))

    def _back(self, ms: int) -> None:
        """Set the clock back; where messages may wait inline, not before what was due when it was sent.

        Such a message waits for the clock again if it shares a run with one that waits, and else does not.
        """
        self.ever_back = True
        self.twin.wall_ms = max(self.twin.wall_ms - ms, min(self._sent_by_ms(), self.twin.wall_ms))
        self.clock.set(self.twin.wall_ms)

    def _sent_by_ms(self) -> int:
        topics = self.twin.topics.values() if self.ever_inline else ()
        return max((each.due_ms for topic in topics for each in topic.main if not each.waits), default=0)

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

    def _slice(self, run: Callable[..., tuple[TickResult, bool]], *, if_due: bool = False) -> tuple[TickResult, bool]:
        """Stands in for a slice of a tick: the twin does the same at once."""
        now_ms = self.twin.now_ms
        with recorded() as appended:
            try:
                result, more = run(if_due=if_due)
            except BaseException:
                self._advance(now_ms, appended, complete=False, failed=True)
                for counter in SLICE_COUNTERS:  # what came after a commit may have been left out
                    self._recount(counter)
                raise
        gave_way = self.store._engine.upkeep.maintenance._gives_way  # and has left all but its firing to the next
        done = self._advance(now_ms, appended, complete=not more, failed=gave_way)
        assert TwinSlice(result.fired, result.closed, result.trimmed, result.deleted) == done
        self.done = TwinSlice(*(a + b for a, b in zip(astuple(self.done), astuple(done), strict=True)))
        return result, more

    def _recount(self, counter: str) -> None:
        """Go on from what a counter says, which is no more than it should be."""
        for key, count in list(self.twin.counts.items()):
            if key[0] == counter:
                assert self.told.sums[key] <= count
                self.twin.counts[key] = self.told.sums[key]

    def _advance(self, now_ms: int, appended: Recorded, *, complete: bool, failed: bool) -> TwinSlice:
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
            {partition.start_ms for partition in engine.storage.partitions},
            lambda topic: self._state(topic).log.ledgers(),
            rolled,
            complete,
            failed,
            written_to,
            after,
            after_roll and self.cleaning_up,
            {
                ids[topic_id].subscriptions[name]: [ids[topic_id].first + place for place in places]
                for (topic_id, name), places in appended.expired.items()
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
        partition = self.store._engine.storage.partitions.get(start_ms)
        return partition is None or partition.state is not PartitionState.OPEN

    def _follow_schedules(self, now_ms: int, failed: bool) -> None:
        """A due occurrence of a schedule is followed by its next, in the same slice."""
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
        for partition in engine.storage.partitions.held():
            for log in partition.logs():
                if log.topic_id in ids:
                    part = self.twin.add_partition(partition.start_ms)
                    part.log(ids[log.topic_id]).leave_over(log.ledger.entries)
            self.twin.add_partition(partition.start_ms)

    # -- comparing ------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "twin"):
            self._same_logs()
            self.steps += 1
            if self.steps % 4 == 0:
                (self._check, self._look_at_figures, self._look_up, self._look_at_metrics)[self.steps // 4 % 4]()

    def _same_logs(self) -> None:
        self._learn()
        engine = self.store._engine
        for logs in engine.delivery.firing.loaded.logs.values():
            for log in logs.values():
                log._check()
        for topic in self.twin.topics.values():
            state = self._state(topic)
            assert sorted(state.subscriptions) == sorted(topic.subscriptions)
            for name, sub in topic.subscriptions.items():
                found = state.subscriptions[name]
                found.acks._check(state.log)
                if found.dispatcher is not None:
                    found.dispatcher._check()
                assert found.acks.backlog(state.log) == sub.backlog(len(topic.main))
        assert engine.clock.now_ms() == self.twin.now_ms
        starts = [(part.start_ms, part.end_ms) for part in engine.storage.partitions]
        assert starts == [(part.start_ms, part.end_ms) for _, part in sorted(self.twin.partitions.items())]
        allowed = max(engine.storage.partitions.max_open, len(engine.delivery.firing.loaded.loaded_starts()) + 1)
        assert engine.storage.partitions.open_count() <= allowed

    def _look_at_figures(self) -> None:
        twin, store = self.twin, self.store
        found = [
            (part.start_ms, part.end_ms, part.state, part.topics, part.messages, part.pending, part.holders)
            for part in store.partitions()
        ]
        assert found == [part.figures(twin.now_ms) for _, part in sorted(twin.partitions.items())]
        assert sorted(topic.name for topic in store.topics()) == sorted(
            str(TopicName.parse(name)) for name in twin.topics
        )
        assert store.stats().pending == sum(map(self._pending, twin.topics.values()))
        for topic in twin.topics.values():
            stats = store.topic(topic.name).stats()
            fired = sum(log.fired for log in twin.logs(topic))
            unfired = self._pending(topic)
            figures = (stats.pending, stats.fired, stats.entries, stats.ledgers)
            assert figures == (unfired, fired, len(topic.main) - topic.first, len(topic.ledgers))
            for sub_stats in stats.subscriptions:
                sub = topic.subscriptions[sub_stats.name]
                assert sub_stats.consumers == len(sub.consumers)
                assert sub_stats.paused == (twin.now_ms < sub.paused_until_ms)
                assert sub_stats.backlog == sub.due_backlog(twin.now_ms)
                assert sub_stats.unacknowledged == len(sub.held)
                assert sub_stats.redelivering == len(sub.waiting) + len(sub.ready) - sub.kept_back

    def _look_at_metrics(self) -> None:
        """Counters say what was done since the store was opened, gauges what there is."""
        twin, metrics = self.twin, self.store._engine.metrics
        waited = {self._full(topic) for topic in twin.topics.values() if any(message.waits for message in topic.main)}
        for key in {*self.told.sums, *twin.counts}:
            if key[0] in COUNTED and not (key[0] == FIRED and key[1] in waited):
                assert self.told.sums[key] == twin.counts[key], key
        assert metrics is not None
        gauges = metrics._look()
        pending = {each.attributes["pulsar.topic"]: each.value for each in gauges[PENDING] if each.attributes}
        assert pending == {self._full(topic): self._pending(topic) for topic in twin.topics.values()}
        for gauge, expected in ((DELAYED, self._delayed), (BACKLOG, self._backlog)):
            found = {
                (each.attributes["pulsar.topic"], each.attributes["pulsar.subscription"]): each.value
                for each in gauges[gauge]
                if each.attributes
            }
            assert found == {
                (self._full(topic), name): expected(topic, sub)
                for topic in twin.topics.values()
                for name, sub in topic.subscriptions.items()
            }

    @staticmethod
    def _full(topic: TwinTopic) -> str:
        return str(TopicName.parse(topic.name))

    def _delayed(self, topic: TwinTopic, sub: TwinSubscription) -> int:
        """Messages pending in partitions, and those hidden in the main log and not acknowledged."""
        return sum(log.unfired for log in self.twin.logs(topic)) + sub.not_due(self.twin.now_ms)

    def _backlog(self, topic: TwinTopic, sub: TwinSubscription) -> int:
        return sub.due_backlog(self.twin.now_ms)

    def _look_up(self) -> None:
        for topic in self.twin.topics.values():
            face, pending = self.store.topic(topic.name), self.twin.pending(topic)
            scheduled = [(message.message_id, message.due_ms) for message in face.scheduled()]
            waiting = topic.waiting(self.twin.now_ms)
            assert sorted(scheduled) == sorted((message.message_id, message.due_ms) for message in (*pending, *waiting))
            dues = [due_ms for _, due_ms in scheduled]
            assert dues == sorted(dues)
            newest_first = face.scheduled(newest_first=True)
            assert [(message.message_id, message.due_ms) for message in newest_first] == scheduled[::-1]
            middle = dues[len(dues) // 2] if dues else 0
            assert (face.count(), face.count(middle)) == (len(dues), sum(due_ms >= middle for due_ms in dues))
            assert face.stats().furthest_due_ms == max(dues, default=None)
            assert face.count(prefix="") == sum(holder.message in pending for holder in topic.keys.values())
            for message in [*topic.main[-3:], *topic.main[:1], *pending[:2]]:
                there = face.get(message.message_id)
                assert (there is not None) == self.twin.is_stored(topic, message)
                assert there is None or (int(there.payload), there.due_ms) == (message.number, message.due_ms)

            for key, holder in topic.keys.items():
                there = face.find(key)
                assert (there is not None) == (holder.message in pending)
                assert there is None or there.message_id == holder.message.message_id

    def _check(self) -> None:
        assert list(self.store.check()) == []
        if self.store._engine.upkeep.maintenance.tasks.trimming._to_remove:
            return  # their removal goes on with the next slice
        with self.store._engine.storage.main.read() as raw:
            for topic in self.twin.topics.values():
                kept = catalog.ledgers(raw, self._state(topic).topic_id)
                assert len(kept) == len(topic.ledgers), "a ledger was trimmed, and is still there"
