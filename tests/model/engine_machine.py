"""All rules together, and the end that every run comes to."""

from __future__ import annotations

from .comparing import Comparing
from .rules_busy import BusyRules
from .rules_time import TimeRules


class EngineMachine(BusyRules, TimeRules, Comparing):
    """The model test."""

    def _drain(self) -> None:
        """Going only where `next_due_ms` sends us, everything is delivered, and everything that may go is gone."""
        self._look_at_figures()
        self._look_at_metrics()
        for consumer in self.consumers:
            consumer.face.close()
            consumer.twin.detach(consumer.number, self.twin.now_ms)
        self.consumers.clear()
        for topic in list(self.twin.topics.values()):
            for name in list(topic.schedules):
                self.change_a_schedule(topic.name, name, "remove")
        idle = 0
        for _ in range(2_000):
            self._listen_to_all()
            self._tick()
            for consumer in self.consumers:
                while items := self._receive(consumer, 100):
                    self._ack(consumer, items, False)
            self._tick()
            planned_ms = min((ms for ms in (self._planned_ms(), self._awaited_ms()) if ms is not None), default=None)
            if planned_ms is None:
                break
            idle = idle + 1 if planned_ms <= self.twin.now_ms else 0
            assert idle < 4, "the scheduler would run without a pause"
            self._forward_to(planned_ms)
        else:
            raise AssertionError("no end of things to do")
        for topic in self.twin.topics.values():
            assert not self.twin.pending(topic), "a message was forgotten"
            assert all(not sub.backlog(len(topic.main)) for sub in topic.subscriptions.values())
        if not any(topic.setting("retention_bytes") for topic in self.twin.topics.values()):
            assert not self.twin.partitions, "a partition was forgotten"
        self._same_logs()
        self._look_at_figures()
        self._look_at_metrics()
        self._look_up()
        self._check()

    def _listen_to_all(self) -> None:
        """Every subscription has a consumer, also the keeper of what is dead-lettered meanwhile."""
        for topic in list(self.twin.topics.values()):
            for name, sub in topic.subscriptions.items():
                if not sub.consumers:
                    self._subscribe(topic.name, name, "exclusive", "earliest")
                    self.consumers[-1].face.resume()
                    sub.paused_until_ms = 0

    def _planned_ms(self) -> int | None:
        """The next time, but for the look for old messages, which a store with a time to live takes for ever."""
        engine = self.store._engine
        shortest_ms, engine.policies.shortest_ttl_ms = engine.policies.shortest_ttl_ms, None
        try:
            if shortest_ms is None:
                return self.next_due_ms
            return engine.upkeep.maintenance._next_due_ms(engine.clock.now_ms())
        finally:
            engine.policies.shortest_ttl_ms = shortest_ms

    def _awaited_ms(self) -> int | None:
        """When time alone gives a receiver something that is in the main log already."""
        times: list[int] = []
        for topic in self.twin.topics.values():
            for sub in topic.subscriptions.values():
                times += sub.waiting.values()
                times += [topic.main[place].due_ms for place in sub.passed_over]
        return min(times, default=None)
