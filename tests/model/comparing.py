"""What is compared after each step and at the end: logs, figures, look-ups, and what `check` says."""

from __future__ import annotations

from hypothesis.stateful import invariant

from duelog.store import catalog
from duelog.store.names import TopicName

from .machine import Machine


class Comparing(Machine):
    """Every step compares what is cheap, every fourth something dear."""

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
            fired = sum(log.fired for log in twin.logs(topic))
            unfired = sum(log.unfired for log in twin.logs(topic))
            figures = (stats.pending, stats.fired, stats.entries, stats.ledgers)
            assert figures == (unfired, fired, len(topic.main) - topic.first, len(topic.ledgers))
            for sub_stats in stats.subscriptions:
                sub = topic.subscriptions[sub_stats.name]
                assert sub_stats.consumers == len(sub.consumers)
                assert sub.due_backlog(twin.now_ms) <= sub_stats.backlog <= sub.backlog(len(topic.main))
                reader = self._state(topic).subscriptions[sub.name].reader
                if reader is not None and reader._tracker is not None:
                    assert sub_stats.backlog == sub.due_backlog(twin.now_ms)
                assert sub_stats.unacknowledged == len(sub.held)
                assert sub_stats.redelivering == len(sub.waiting) + len(sub.ready) - sub.kept_back

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
        if self.store._engine.maintenance.trimming._given_up:
            return  # their removal goes on with the next slice
        with self.store._engine.main.read() as raw:
            for topic in self.twin.topics.values():
                kept = catalog.ledgers(raw, self._state(topic).topic_id)
                assert len(kept) == len(topic.ledgers), "a ledger was given up, and is still there"
