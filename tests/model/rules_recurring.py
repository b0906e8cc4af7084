"""Rules: messages recur; schedules are made, asked for again, paused, resumed and removed."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog.errors import UnknownTopic

from .drawing import TAKING_BACK, TOPICS, only
from .driver import PAYLOAD
from .machine import Machine
from .twin_recurring import TwinSchedule
from .twin_topic import TwinTopic, key_of
from .twin_withdrawal import cancel

SCHEDULES = st.sampled_from(("s", "z"))
NUMBERS = {"s": 900_001, "z": 900_003}


class RecurringRules(Machine):
    """Whatever recurs, by intervals."""

    def _cancel_waiting(self, topic: TwinTopic, schedule: TwinSchedule) -> None:
        if schedule.next_id is not None:
            cancel(self.twin, topic, [schedule.next_id])

    @only(TAKING_BACK)
    @rule(topic=TOPICS, name=SCHEDULES, seconds=st.sampled_from((1, 1, 3)))
    def every(self, topic: str, name: str, seconds: int) -> None:
        """The same again changes nothing; another interval replaces what there was."""
        twin, number = self.twin.topic(topic), NUMBERS[name]
        made = self.store.topic(topic).every(
            name, interval=seconds, payload=b"%0*d" % (PAYLOAD, number), key=key_of(number)
        )
        self._learn()
        found = twin.schedules.get(name)
        if found is None or found.interval_ms != seconds * 1_000:
            if found is not None:
                self._cancel_waiting(twin, found)
            twin.schedules[name] = TwinSchedule(number, seconds * 1_000)
            self._occurrence(twin, name, self.twin.now_ms + seconds * 1_000, made.next_id)
        self._same_schedules(twin)

    @only(TAKING_BACK)
    @precondition(lambda self: any(topic.schedules for topic in self.twin.topics.values()))
    @rule(topic=TOPICS, name=SCHEDULES, what=st.sampled_from(("pause", "resume", "remove")))
    def change_a_schedule(self, topic: str, name: str, what: str) -> None:
        face, twin = self.store.topic(topic), self.twin.topics.get(topic)
        if twin is None:
            with pytest.raises(UnknownTopic):
                face.remove_schedule(name)
            return
        self._learn()
        schedule = twin.schedules.get(name)
        if what == "remove":
            assert face.remove_schedule(name) == (schedule is not None)
            if schedule is not None:
                self._cancel_waiting(twin, twin.schedules.pop(name))
        elif what == "pause":
            assert (face.pause_schedule(name) is not None) == (schedule is not None)
            if schedule is not None and not schedule.paused:
                self._cancel_waiting(twin, schedule)
                schedule.next_due_ms = schedule.next_id = None
        else:
            found = face.resume_schedule(name)
            assert (found is not None) == (schedule is not None)
            if schedule is not None and schedule.paused:
                assert found is not None
                self._occurrence(twin, name, self.twin.now_ms + schedule.interval_ms, found.next_id)
        self._same_schedules(twin)

    def _same_schedules(self, topic: TwinTopic) -> None:
        found = [
            (schedule.name, schedule.interval_ms, schedule.next_due_ms, schedule.next_id, schedule.paused)
            for schedule in self.store.topic(topic.name).schedules()
        ]
        assert found == [
            (name, schedule.interval_ms, schedule.next_due_ms, schedule.next_id, schedule.paused)
            for name, schedule in sorted(topic.schedules.items())
        ]
