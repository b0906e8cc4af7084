"""The engine through its public face against the twin: same messages, same order, never early, none lost or double.

One process, one thread: what another thread would do in between is done at the engine's own failpoints, so that every
failure replays. `DUELOG_MODEL_EXAMPLES=5000` in the environment runs that many examples, new ones each time.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duelog import DelayedStore, ManualClock, Message, MessageId, ReceivedMessage, StoreConfig, Subscription, TickResult
from duelog.errors import ConsumerBusy, InvalidArgument, StoreFull, UnknownSubscription, UnknownTopic
from duelog.store import catalog
from duelog.store.format import PartitionState
from duelog.store.names import TopicName
from duelog.topic_state import TopicState

from .driver import (
    PAYLOAD,
    ROLLED,
    AtOnce,
    Once,
    Recorded,
    SimulatedCrash,
    armed,
    copy_store,
    full_disk,
    recorded,
    scratch_directory,
    stalled_sender,
)
from .twin import Seen, Twin, TwinMessage, TwinSlice, TwinTopic
from .twin_subscription import TwinSubscription

T = TypeVar("T")
Spec = tuple[Any, ...]
START_MS = 1_790_000_000_000
FAR_MS = 10_000_000_000
FIRING = ("fire.before", "fire.after", "close.before", "close.after")
CLEANUP = ("acks.before", "trim.recorded", "trim.part", "delete.recorded", "delete.moved", "delete.removed")

TOPICS = st.sampled_from(("t0", "t1", "t2"))
NAMES = st.sampled_from(("a", "b"))
PICK = st.integers(0, 1_000)
PICKS = st.lists(PICK, min_size=1, max_size=5)
DUES = st.one_of(
    st.tuples(st.sampled_from(("none", "now", "again"))),
    st.tuples(st.just("after"), st.integers(1, 5) | st.integers(1, 300)),
    st.tuples(st.just("partition"), st.integers(0, 6), st.integers(-1, 1)),
    st.tuples(st.just("before"), st.integers(1, 500) | st.just(START_MS)),
    st.tuples(st.just("far"), st.integers(0, 3)),
)
"""A due time, chosen by the store's time and its partitions: see `_due_ms`."""

CONFIGS = st.fixed_dictionaries(
    {
        "partition_ms": st.sampled_from((10, 37, 100, 1_000)),
        "bucket_ms": st.sampled_from((1, 7, 50, 60_000)),
        "preload_ms": st.sampled_from((0, 5, 1_000)),
        "fire_batch": st.sampled_from((1, 2, 3, 4, 5_000)),
        "ledger_max_entries": st.integers(1, 5),
        "ledger_max_age_ms": st.sampled_from((20, 300, 14_400_000)),
        "retention_ms": st.sampled_from((0, 0, 30, 1_000)),
        "retention_bytes": st.sampled_from((0, 0, 0, 150, 2_000)),
        "ack_flush_ms": st.sampled_from((0, 3, 100)),
        "run_entries": st.integers(1, 3),
        "max_open_partitions": st.integers(1, 3),
        "snapshot_every_entries": st.sampled_from((1, 5, 1_000_000)),
        "durability": st.sampled_from(("none", "none", "relaxed", "commit")),
    }
)
SLICES = st.sampled_from((0.0, 1e9))
"""A tick is cut by the time that it takes; here it is cut wherever it can be, or nowhere."""


@dataclass
class Consumer:
    """A consumer, its subscription's twin, and what it was given: places in the log and positions."""

    face: Subscription
    topic: TwinTopic
    twin: TwinSubscription
    number: int
    received: list[tuple[int, MessageId]] = field(default_factory=list)


def pick(choices: Sequence[T], number: int) -> T:
    """One of `choices`, by a number that hypothesis can shrink."""
    return choices[number % len(choices)]


def no_room(store: DelayedStore) -> None:
    """What a full disk does."""
    raise StoreFull(store.path, "no room, says the test")


class EngineMachine(RuleBasedStateMachine):
    """A store on a manual clock, and its twin."""

    @initialize(config=CONFIGS, offset_ms=st.integers(0, 2_000), slice_s=SLICES, load_slice_s=SLICES)
    def open(self, config: dict[str, Any], offset_ms: int, slice_s: float, load_slice_s: float) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("duelog.maintenance._SLICE_S", slice_s)
        self.patch.setattr("duelog.maintenance._REMOVAL_SLICE_S", load_slice_s)
        self.patch.setattr("duelog.markers.firing._LOAD_SLICE_S", load_slice_s)
        self.directory = scratch_directory()
        self.copies = 0
        self.config = StoreConfig(map_bytes=64 << 20, **config)
        self.clock = ManualClock(START_MS + offset_ms)
        self.twin = Twin(self.config, self.clock.now_ms())
        self.consumers: list[Consumer] = []
        self._open(self.directory / "0")
        self.messages: dict[int, TwinMessage] = {}
        self.beside: tuple[TwinTopic, list[TwinMessage]] | None = None
        self.cleaning_up = False
        self.done = TwinSlice(0, 0, 0, 0)
        self.next_due_ms: int | None = None
        self.last_due_ms = START_MS
        self.number = 0
        self.shown_ms = self.clock.now_ms()
        """The latest time that the store was ever shown: what was due then may come when the clock has gone back."""
        self.steps = 0
        self.creation_failed = False

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                if not self.store.closed:
                    self._drain()
            finally:
                self.store.close()
                self.patch.undo()
                shutil.rmtree(self.directory)

    # -- sending -----------------------------------------------------------------------------------

    def _due_ms(self, spec: Spec) -> int | None:
        now_ms, span_ms = self.twin.now_ms, self.config.partition_ms
        match spec:
            case ("none",):
                return None
            case ("again",):
                due_ms = self.last_due_ms
            case ("after", ms):
                due_ms = now_ms + ms
            case ("partition", ahead, offset_ms):
                due_ms = (now_ms // span_ms + ahead) * span_ms + offset_ms
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
        if due_ms is None:
            return Message(payload), now_ms
        if relative and due_ms >= now_ms:
            return Message(payload, deliver_after=(due_ms - now_ms) / 1000), due_ms
        return Message(payload, deliver_at=due_ms), due_ms

    def _twins(self, drawn: Sequence[tuple[Message, int]], ids: Sequence[MessageId], sent_ms: int) -> list[TwinMessage]:
        twins = [
            TwinMessage(int(bytes(message.payload)), due_ms, sent_ms, message_id)
            for (message, due_ms), message_id in zip(drawn, ids, strict=True)
        ]
        self.messages.update((twin.number, twin) for twin in twins)
        return twins

    def _sent(self, topic: TwinTopic, messages: Sequence[TwinMessage]) -> None:
        """Messages were written now, whenever they were sent: a group for the main log and one for each partition.

        The groups go side by side; within a group the messages keep their order.
        """
        twin, span_ms = self.twin, self.config.partition_ms
        direct = [message for message in messages if twin.is_direct(message.due_ms, message.publish_ms)]
        groups: dict[int | None, list[TwinMessage]] = {}
        for message in messages:
            group = None if message.due_ms <= message.publish_ms else message.due_ms // span_ms
            groups.setdefault(group, []).append(message)
            if message not in direct:
                twin.add_delayed(topic, message)
        for together in groups.values():
            assert [message.message_id for message in together] == sorted(message.message_id for message in together)
        for message in sorted(direct, key=lambda message: message.message_id):
            twin.add_direct(topic, message)

    @rule(topic=TOPICS, spec=DUES, relative=st.booleans())
    def send(self, topic: str, spec: Spec, relative: bool) -> None:
        twin = self.twin.topic(topic)
        drawn, due_ms = self._message(spec, relative)
        message_id = self.store.topic(topic).send(
            drawn.payload, deliver_at=drawn.deliver_at, deliver_after=drawn.deliver_after
        )
        self._sent(twin, self._twins([(drawn, due_ms)], [message_id], self.twin.now_ms))

    @rule(topic=TOPICS, specs=st.lists(DUES, max_size=6), relative=st.booleans())
    def send_batch(self, topic: str, specs: list[Spec], relative: bool) -> None:
        drawn = [self._message(spec, relative) for spec in specs]
        ids = self.store.topic(topic).send_batch([message for message, _ in drawn])
        if drawn:
            self._sent(self.twin.topic(topic), self._twins(drawn, ids, self.twin.now_ms))

    @rule(
        topic=TOPICS,
        specs=st.lists(DUES, min_size=1, max_size=4),
        ms=st.integers(0, 20) | st.integers(0, 400),
        point=st.sampled_from(("after", *FIRING, *CLEANUP)),
        count=st.integers(1, 3),
        fails=st.booleans(),
    )
    def send_that_stalls(self, topic: str, specs: list[Spec], ms: int, point: str, count: int, fails: bool) -> None:
        """A sender looks at the clock, and writes when another thread is in the middle of a later tick, or past it."""
        twin, sent_ms = self.twin.topic(topic), self.twin.now_ms
        drawn = [self._message(spec) for spec in specs]

        def meanwhile(write: Callable[[], list[MessageId]]) -> None:
            self._learn()
            self._forward(ms)
            if point == "after":
                self.tick()
                self._sent(twin, self._twins(drawn, write(), sent_ms))
                return

            def write_beside() -> None:
                self.beside = twin, self._twins(drawn, write(), sent_ms)
                if fails and point == "fire.before":
                    no_room(self.store)

            self.cleaning_up = point in CLEANUP
            once = Once(count, write_beside)
            with armed(point, once):
                self._tick_until_it_works()
            if not once.done:
                self._sent(twin, self._twins(drawn, write(), sent_ms))

        with stalled_sender(self.store._engine, meanwhile):
            self.store.topic(topic).send_batch([message for message, _ in drawn])

    @rule(topic=TOPICS, spec=DUES, count=st.integers(1, 4))
    def send_to_a_full_disk(self, topic: str, spec: Spec, count: int) -> None:
        """A send that raises has appended nothing."""
        drawn, due_ms = self._message(spec)
        face, partitions = self.store.topic(topic), self.store._engine.partitions
        try:
            with full_disk(self.store._engine.main, count):
                ids = face.send_batch([drawn])
        except StoreFull:
            self.creation_failed = True
            if face.exists():
                self.twin.topic(topic)
            if due_ms > self.twin.now_ms and partitions.get(due_ms - due_ms % self.config.partition_ms) is not None:
                self.twin.add_partition(due_ms)
        else:
            self._sent(self.twin.topic(topic), self._twins([(drawn, due_ms)], ids, self.twin.now_ms))

    # -- time ----------------------------------------------------------------------------------------

    def _forward(self, ms: int) -> None:
        self.twin.wall_ms = self.clock.advance(ms)
        self.shown_ms = max(self.shown_ms, self.twin.now_ms)

    @rule(ms=st.integers(1, 10) | st.integers(1, 400))
    def forward(self, ms: int) -> None:
        self._forward(ms)

    @rule(partitions=st.integers(1, 6), offset_ms=st.integers(-1, 1))
    def forward_to_a_boundary(self, partitions: int, offset_ms: int) -> None:
        span_ms = self.config.partition_ms
        self._forward_to((self.twin.now_ms // span_ms + partitions) * span_ms + offset_ms)

    @precondition(lambda self: self.next_due_ms is not None)
    @rule()
    def forward_to_what_is_next(self) -> None:
        self._forward_to(self.next_due_ms or 0)

    def _forward_to(self, until_ms: int) -> None:
        self._forward(max(until_ms - self.twin.wall_ms, 0))

    @rule(ms=st.integers(1, 30) | st.integers(1, 1_000))
    def set_the_clock_back(self, ms: int) -> None:
        self.clock.set(self.twin.wall_ms - ms)
        self.twin.wall_ms -= ms

    @rule()
    def stop_for_long(self) -> None:
        self._forward(FAR_MS)

    # -- ticks ---------------------------------------------------------------------------------------

    @rule()
    def tick(self) -> None:
        self.done = TwinSlice(0, 0, 0, 0)
        result = self.store.tick()
        assert TwinSlice(result.fired, result.closed, result.trimmed, result.deleted) == self.done
        pending = [message.due_ms for topic in self.twin.topics.values() for message in self.twin.pending(topic)]
        if pending:
            assert result.next_due_ms is not None, "something is pending, and nothing is planned"
            assert result.next_due_ms <= min(pending), "the next message would be late"
        self.next_due_ms = result.next_due_ms

    @rule(count=st.integers(1, 8))
    def tick_on_a_full_disk(self, count: int) -> None:
        """Whatever write of a tick fails, the next tick does the rest."""
        with full_disk(self.store._engine.main, count):
            self._tick_until_it_works()

    def _tick_until_it_works(self) -> None:
        try:
            self.store.tick()
        except StoreFull:
            self.store.tick()

    def _slice(self, run: Callable[[], tuple[TickResult, bool]]) -> tuple[TickResult, bool]:
        """Stands in for a slice of a tick: the twin does the same at once."""
        now_ms = self.twin.now_ms
        with recorded() as appended:
            try:
                result, more = run()
            except BaseException:
                self._advance(now_ms, appended, complete=False, failed=True)
                raise
        done = self._advance(now_ms, appended, complete=not more, failed=False)
        assert TwinSlice(result.fired, result.closed, result.trimmed, result.deleted) == done
        self.done = TwinSlice(*(a + b for a, b in zip(astuple(self.done), astuple(done), strict=True)))
        return result, more

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
            {partition.start_ms for partition in engine.partitions},
            lambda topic: self._state(topic).log.ledgers(),
            rolled,
            complete,
            failed,
            written_to,
            after,
            after_roll and self.cleaning_up,
        )
        done = twin.advance(now_ms, seen)
        for message in waiting:
            assert written_to is not None
            twin.add_delayed(written_to, message)
        for message in beside[1] if beside is not None else ():
            message.wild = False
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
            assert message.due_ms <= message.publish_ms or ended, "it goes to the main log before it is due"

    def _has_closed(self, start_ms: int) -> bool:
        partition = self.store._engine.partitions.get(start_ms)
        return partition is None or partition.state is not PartitionState.OPEN

    # -- consumers -----------------------------------------------------------------------------------

    @rule(
        topic=TOPICS,
        name=NAMES,
        kind=st.sampled_from(("exclusive", "shared")),
        initial=st.sampled_from(("earliest", "latest")),
    )
    def subscribe(self, topic: str, name: str, kind: Literal["exclusive", "shared"], initial: str) -> None:
        twin = self.twin.topic(topic)
        sub = twin.subscriptions.get(name)
        if sub is None:
            sub = twin.subscriptions[name] = TwinSubscription(
                name, twin.first if initial == "earliest" else len(twin.main)
            )
        if not sub.admits(kind):
            with pytest.raises(ConsumerBusy):
                self.store.topic(topic).subscribe(name, type=kind, initial_position=initial)
            return
        face = self.store.topic(topic).subscribe(name, type=kind, initial_position=initial)
        self.number += 1
        sub.attach(kind, self.number)
        self.consumers.append(Consumer(face, twin, sub, self.number))

    @precondition(lambda self: self.consumers)
    @rule(which=PICK)
    def leave(self, which: int) -> None:
        consumer = self.consumers.pop(which % len(self.consumers))
        consumer.face.close()
        consumer.twin.detach(consumer.number, self.twin.now_ms)

    @precondition(lambda self: self.consumers)
    @rule(which=PICK, count=st.integers(1, 4) | st.just(100))
    def receive(self, which: int, count: int) -> None:
        self._receive(pick(self.consumers, which), count)

    def _receive(self, consumer: Consumer, count: int) -> list[tuple[int, MessageId]]:
        topic = consumer.topic
        batch = consumer.face.receive(count)
        self._learn()
        expected, received = [], []
        for place, times in consumer.twin.receive(consumer.number, count, len(topic.main), self.twin.now_ms):
            message, position = topic.main[place], topic.position(place)
            expected.append(
                ReceivedMessage(
                    b"%0*d" % (PAYLOAD, message.number),
                    None,
                    {},
                    message.message_id,
                    position,
                    message.due_ms,
                    message.publish_ms,
                    times,
                    consumer.face.topic,
                    consumer.twin.name,
                )
            )
            received.append((place, position))
        assert batch == expected
        assert all(message.due_ms <= self.shown_ms for message in batch), "early"
        consumer.received.extend(received)
        return received

    @precondition(lambda self: any(consumer.received for consumer in self.consumers))
    @rule(which=PICK, picks=PICKS, durable=st.booleans())
    def ack(self, which: int, picks: list[int], durable: bool) -> None:
        """Anything that some consumer of the subscription was ever given, wherever it is now."""
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        self._ack(consumer, [pick(consumer.received, number) for number in picks], durable)

    @precondition(lambda self: any(consumer.received for consumer in self.consumers))
    @rule(which=PICK, durable=st.booleans())
    def ack_all_received(self, which: int, durable: bool) -> None:
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        self._ack(consumer, consumer.received, durable)

    @precondition(lambda self: any(consumer.topic.main for consumer in self.consumers))
    @rule(which=PICK, picks=PICKS)
    def ack_what_nobody_was_given(self, which: int, picks: list[int]) -> None:
        consumer = pick(self.consumers, which)
        topic = consumer.topic
        if kept := range(topic.first, len(topic.main)):
            places = [pick(kept, number) for number in picks]
            self._ack(consumer, [(place, topic.position(place)) for place in places], False)

    def _ack(self, consumer: Consumer, items: Sequence[tuple[int, MessageId]], durable: bool) -> None:
        positions = [position for _, position in items]
        count = consumer.face.ack(positions[0] if len(positions) == 1 else positions, durable=durable)
        assert count == consumer.twin.ack([place for place, _ in items])
        self._acked(consumer, count, durable)

    @precondition(lambda self: any(consumer.received for consumer in self.consumers))
    @rule(which=PICK, last=PICK, durable=st.booleans())
    def ack_cumulative(self, which: int, last: int, durable: bool) -> None:
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        place, position = pick(consumer.received, last)
        if consumer.twin.kind == "shared":
            with pytest.raises(InvalidArgument):
                consumer.face.ack_cumulative(position)
            return
        count = consumer.face.ack_cumulative(position, durable=durable)
        assert count == consumer.twin.ack_cumulative(place)
        self._acked(consumer, count, durable)

    def _acked(self, consumer: Consumer, count: int, durable: bool) -> None:
        now_ms, sub = self.twin.now_ms, consumer.twin
        if count:
            topic = consumer.topic
            topic.unflushed_until_ms = max(topic.unflushed_until_ms, now_ms + self.config.ack_flush_ms)
            if sub.unflushed_since_ms is None:
                sub.unflushed_since_ms = now_ms
            if not self.config.ack_flush_ms:
                sub.flush()
        if durable:
            self.twin.flush()

    @precondition(lambda self: self.consumers)
    @rule(which=PICK)
    def ack_what_does_not_exist(self, which: int) -> None:
        consumer = pick(self.consumers, which)
        end = self._state(consumer.topic).log.end
        with pytest.raises(InvalidArgument):
            consumer.face.ack([*(position for _, position in consumer.received), end])

    @precondition(lambda self: any(consumer.received for consumer in self.consumers))
    @rule(which=PICK, picks=PICKS, ms=st.sampled_from((0, 1, 20, 300)))
    def nack(self, which: int, picks: list[int], ms: int) -> None:
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        items = [pick(consumer.received, number) for number in picks]
        count = consumer.face.nack([position for _, position in items], delay=ms / 1000)
        assert count == consumer.twin.nack(consumer.number, [place for place, _ in items], self.twin.now_ms + ms)

    @precondition(lambda self: any(topic.subscriptions for topic in self.twin.topics.values()))
    @rule(topic=TOPICS, name=NAMES)
    def unsubscribe(self, topic: str, name: str) -> None:
        twin, face = self.twin.topics.get(topic), self.store.topic(topic)
        if twin is None or name not in twin.subscriptions:
            with pytest.raises(UnknownTopic if twin is None else UnknownSubscription):
                face.unsubscribe(name)
        elif twin.subscriptions[name].consumers:
            with pytest.raises(ConsumerBusy):
                face.unsubscribe(name)
        else:
            face.unsubscribe(name)
            del twin.subscriptions[name]

    @precondition(lambda self: self.messages)
    @rule(topic=TOPICS)
    def delete_topic(self, topic: str) -> None:
        twin = self.twin.topics.pop(topic, None)
        if twin is None:
            with pytest.raises(UnknownTopic):
                self.store.delete_topic(topic)
            return
        self.store.delete_topic(topic)
        doomed = {part.start_ms for part in self.twin.partitions.values() if not part.holders}
        twin.deleted = True
        self.twin.release(doomed)  # what a crash left for the next tick is the next tick's
        for consumer in [consumer for consumer in self.consumers if consumer.topic is twin]:
            with pytest.raises(UnknownSubscription):
                consumer.face.receive()
            consumer.face.close()
            self.consumers.remove(consumer)

    # -- restarts ------------------------------------------------------------------------------------

    @precondition(lambda self: self.consumers)
    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.twin.flush()

    @precondition(lambda self: self.messages)
    @rule()
    def reopen(self) -> None:
        path = self.store.path
        self.store.close()
        self.twin.flush()
        self._open(path)

    @precondition(lambda self: self.messages)
    @rule()
    def crash(self) -> None:
        target = self._next_copy()
        copy_store(self.store.path, target)
        self._reopen_after_crash(target)

    @rule(point=st.sampled_from((*FIRING, *CLEANUP)), count=st.integers(1, 3))
    def crash_in_a_tick(self, point: str, count: int) -> None:
        target = self._next_copy()

        def crash() -> None:
            copy_store(self.store.path, target)
            raise SimulatedCrash

        try:
            with armed(point, Once(count, crash)):
                self.store.tick()
        except SimulatedCrash:
            pass
        else:
            copy_store(self.store.path, target)
        self._reopen_after_crash(target)

    def _reopen_after_crash(self, target: Path) -> None:
        self._learn()
        self.store.close()
        self._open(target)
        self.twin.release({partition.start_ms for partition in self.store._engine.partitions})
        self._adopt_acks()

    def _next_copy(self) -> Path:
        self.copies += 1
        return self.directory / str(self.copies)

    def _open(self, path: Path) -> None:
        self.store = DelayedStore.open(path, self.config, clock=self.clock)
        self.store._engine.sender._pool = AtOnce(1)
        maintenance = self.store._engine.maintenance
        maintenance.slice = functools.partial(self._slice, maintenance.slice)  # type: ignore[method-assign]
        self.consumers.clear()
        self.creation_failed = False
        self.twin.mark_ms = self.twin.saved_mark_ms
        for topic in self.twin.topics.values():
            topic.unflushed_until_ms = -1
            for sub in topic.subscriptions.values():
                sub.forget_deliveries()

    def _adopt_acks(self) -> None:
        """After a crash: what was surely on disk is acknowledged, and of the rest nothing that nobody acknowledged."""
        for topic in self.twin.topics.values():
            state = self._state(topic)
            for name, sub in topic.subscriptions.items():
                found = set()
                mark, acked = sub.flushed
                for place in range(topic.first, len(topic.main)):
                    there = state.subscriptions[name].acks.is_acked(topic.position(place))
                    assert there or not (place < mark or place in acked), "an acknowledgement was lost"
                    assert sub.is_acked(place) or not there, "acknowledged by nobody"
                    if there:
                        found.add(place)
                sub.restore(topic.first, found)

    # -- comparing -----------------------------------------------------------------------------------

    def _state(self, topic: TwinTopic) -> TopicState:
        state = self.store._engine.topics.find(TopicName.parse(topic.name))
        assert state is not None, f"{topic.name} does not exist"
        return state

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "twin"):
            self._same_logs()
            self.steps += 1
            if self.steps % 4 == 0:
                (self._look_at_figures, self._look_up, self._check)[self.steps // 4 % 3]()

    def _same_logs(self) -> None:
        self._learn()
        engine = self.store._engine
        for logs in engine.firing._loaded.values():
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
        starts = [(part.start_ms, part.end_ms) for part in engine.partitions]
        assert starts == [(part.start_ms, part.end_ms) for _, part in sorted(self.twin.partitions.items())]
        allowed = max(self.config.max_open_partitions, len(engine.firing.loaded_starts()) + 1)
        assert engine.partitions.open_count() <= allowed

    def _learn(self) -> None:
        """Compare the lists of ledgers, and note what the engine calls each."""
        for topic in self.twin.topics.values():
            found = self._state(topic).log.ledgers()
            shape = [(info.created_ms, info.closed_ms if info.closed else None, info.entries) for info in found]
            assert shape == [(ledger.created_ms, ledger.closed_ms, ledger.count) for ledger in topic.ledgers]
            for ledger, info in zip(topic.ledgers, found, strict=True):
                assert ledger.ledger_id in (-1, info.ledger_id)
                ledger.ledger_id = info.ledger_id

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
        for topic in twin.topics.values():
            stats = store.topic(topic.name).stats()
            fired = sum(len(log.messages) - len(log.pending) for log in twin.logs(topic))
            figures = (stats.pending, stats.fired, stats.entries, stats.ledgers)
            assert figures == (len(twin.pending(topic)), fired, len(topic.main) - topic.first, len(topic.ledgers))
            for sub_stats in stats.subscriptions:
                sub = topic.subscriptions[sub_stats.name]
                assert sub_stats.consumers == len(sub.consumers)
                assert sub_stats.backlog == sub.backlog(len(topic.main))
                assert sub_stats.unacknowledged == len(sub.held)
                assert sub_stats.redelivering == len(sub.waiting) + len(sub.ready)

    def _look_up(self) -> None:
        for topic in self.twin.topics.values():
            face, pending = self.store.topic(topic.name), self.twin.pending(topic)
            assert [(m.message_id, m.due_ms) for m in face.scheduled()] == [(m.message_id, m.due_ms) for m in pending]
            for message in [*topic.main[-3:], *topic.main[:1], *pending[:2]]:
                there = face.get(message.message_id)
                assert (there is not None) == self.twin.is_stored(topic, message)
                assert there is None or (int(there.payload), there.due_ms) == (message.number, message.due_ms)

    def _check(self) -> None:
        findings = [
            finding
            for finding in self.store.check()
            if not (self.creation_failed and finding.code == "orphan-directory")
        ]
        assert findings == []
        with self.store._engine.main.read() as raw:
            for topic in self.twin.topics.values():
                kept = catalog.ledgers(raw, self._state(topic).topic_id)
                assert len(kept) == len(topic.ledgers), "a ledger was given up, and is still there"

    # -- the end -------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Going only where `next_due_ms` sends us, everything is delivered, and everything that may go is gone."""
        for consumer in self.consumers:
            consumer.face.close()
            consumer.twin.detach(consumer.number, self.twin.now_ms)
        self.consumers.clear()
        for topic in list(self.twin.topics.values()):
            for name in topic.subscriptions:
                self.subscribe(topic.name, name, "exclusive", "earliest")
        idle = 0
        for _ in range(2_000):
            self.tick()
            for consumer in self.consumers:
                while items := self._receive(consumer, 100):
                    self._ack(consumer, items, False)
            self.tick()
            if self.next_due_ms is None:
                break
            idle = idle + 1 if self.next_due_ms <= self.twin.now_ms else 0
            assert idle < 4, "the scheduler would run without a pause"
            self._forward_to(self.next_due_ms)
        else:
            raise AssertionError("no end of things to do")
        for topic in self.twin.topics.values():
            assert not self.twin.pending(topic), "a message was forgotten"
            assert all(not sub.backlog(len(topic.main)) for sub in topic.subscriptions.values())
        if not self.config.retention_bytes:
            assert not self.twin.partitions, "a partition was forgotten"
        self._same_logs()
        self._look_at_figures()
        self._look_up()
        self._check()


EXAMPLES = int(os.environ.get("DUELOG_MODEL_EXAMPLES", "0"))
EngineMachine.TestCase.settings = settings(
    max_examples=EXAMPLES or 60,
    stateful_step_count=60 if EXAMPLES else 40,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.generate] if os.environ.get("NOSHRINK") else [Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
TestEngine = EngineMachine.TestCase
