"""Comparisons after each step and at the end: logs, figures, look-ups, and what `check` says."""

from __future__ import annotations

from hypothesis.stateful import invariant

from duelog.metrics import BACKLOG, CANCELLED, DELAYED, FIRED, OVERRIDDEN, PENDING, REJECTED, RESCHEDULED
from duelog.store.log import catalog
from duelog.store.names import TopicName

from .machine import SLICE_COUNTERS, Machine
from .twin_subscription import TwinSubscription
from .twin_topic import TwinTopic

COUNTED = (*SLICE_COUNTERS, CANCELLED, RESCHEDULED, REJECTED, OVERRIDDEN)
"""The counters of metrics that the twin keeps too."""


class Comparing(Machine):
    """Every step compares what is cheap, every fourth something dear."""

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
        allowed = max(self.config.max_open_partitions, len(engine.delivery.firing.loaded.loaded_starts()) + 1)
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
            assert [due_ms for _, due_ms in scheduled] == sorted(due_ms for _, due_ms in scheduled)
            for message in [*topic.main[-3:], *topic.main[:1], *pending[:2]]:
                there = face.get(message.message_id)
                assert (there is not None) == self.twin.is_stored(topic, message)
                assert there is None or (int(there.payload), there.due_ms) == (message.number, message.due_ms)

            for key, holder in topic.keys.items():
                there = face.find(key)
                assert (there is not None) == (holder.message in pending)
                assert there is None or there.message_id == holder.message.message_id

    def _check(self) -> None:
        findings = [
            finding
            for finding in self.store.check()
            if not (self.creation_failed and finding.code == "orphan-directory")
        ]
        assert findings == []
        if self.store._engine.upkeep.maintenance.tasks.trimming._to_remove:
            return  # their removal goes on with the next slice
        with self.store._engine.storage.main.read() as raw:
            for topic in self.twin.topics.values():
                kept = catalog.ledgers(raw, self._state(topic).topic_id)
                assert len(kept) == len(topic.ledgers), "a ledger was trimmed, and is still there"
