"""The machine that the rules of the model test work on: time goes on, and ticks are held against the twin's.

The rules are mixins (rules_*.py), so is what is compared (comparing.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

from duelog import MessageId, TickResult
from duelog.errors import StoreFull
from duelog.metrics import ENTRIES_TRIMMED, FIRED, LEDGERS_TRIMMED, PARTITIONS_DELETED
from duelog.store.codec.format import PartitionState

from .driver import ROLLED, Recorded, recorded
from .stage import Stage
from .twin import Seen, TwinSlice
from .twin_topic import TwinMessage, TwinTopic

SLICE_COUNTERS = (FIRED, LEDGERS_TRIMMED, ENTRIES_TRIMMED, PARTITIONS_DELETED)
NOWHERE = MessageId(0, 0)


class Machine(Stage):
    """A store and its twin, and how they go together in time."""

    def _open(self, path: Path) -> None:
        if self.ever_back:  # the clock mark may be lost, by which messages were sent
            self._forward_to(self._sent_by_ms())
        super()._open(path)
        maintenance = self.store._engine.upkeep.maintenance
        maintenance.slice = functools.partial(self._slice, maintenance.slice)  # type: ignore[method-assign]

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

    def _slice(self, run: Callable[[], tuple[TickResult, bool]]) -> tuple[TickResult, bool]:
        """Stands in for a slice of a tick: the twin does the same at once."""
        now_ms = self.twin.now_ms
        with recorded() as appended:
            try:
                result, more = run()
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
