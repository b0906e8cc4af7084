"""Schedules against a plain twin, over stops, jumps of the clock, crashes and full disks: none missed, none doubled.

DUELOG_SCHEDULE_EXAMPLES: how many stories are told, 25 unless it is set.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from duelog import DelayedStore, ManualClock, Schedule, StoreConfig
from duelog.errors import DuelogError, InvalidArgument, StoreFull
from duelog.upkeep import recurring
from duelog.upkeep.schedule import MISFIRES, WITH_GRACE, Recurrence, Timetable
from tests.duelog.upkeep.twin_schedule import Asked, TwinSchedule
from tests.model.driver import Once, SimulatedCrash, armed, copy_store, full_disk, scratch_directory

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
START_MS = 1_824_940_800_000 - 90 * MINUTE_MS
"""In the evening before the clocks of Rome go back; cron's steps of minutes go on through it."""

CONFIG = StoreConfig(partition_ms=6 * HOUR_MS, retention_ms=3_650 * DAY_MS)
ASKED = st.builds(
    Asked,
    step_ms=st.sampled_from((20 * MINUTE_MS, 30 * MINUTE_MS)),
    by_cron=st.booleans(),
    until_ms=st.none() | st.integers(START_MS + 2 * HOUR_MS, START_MS + 4 * DAY_MS),
    count=st.none() | st.integers(1, 30),
    jitter_ms=st.sampled_from((0, 0, 7 * MINUTE_MS, HOUR_MS)),
    misfires=st.sampled_from(MISFIRES),
    grace_ms=st.sampled_from((0, MINUTE_MS, 45 * MINUTE_MS, 5 * HOUR_MS)),
).map(lambda asked: asked if asked.misfires in WITH_GRACE else replace(asked, grace_ms=0))
STEPS = st.sampled_from(
    ("forward", "forward", "stop", "crash", "crash", "full", "tick", "restart", "pause", "resume", "again", "replace")
)

POINTS = ("commit.before", "commit.after", "wal.before", "wal.after")


class Story:
    """A store and the twin of its one schedule."""

    def __init__(self, asked: Asked, directory: Path) -> None:
        self.directory = directory
        self.copies = 0
        self.clock = ManualClock(START_MS)
        self.open(directory / "0")
        self.store.topic("t").create()
        self.twin = TwinSchedule(asked)
        self.ask(asked)

    def open(self, path: Path) -> None:
        self.store = DelayedStore.open(path, CONFIG, clock=self.clock)

    def every(self, asked: Asked) -> Schedule:
        minutes = asked.step_ms // MINUTE_MS
        how: dict[str, Any] = {"cron": f"*/{minutes} * * * *"} if asked.by_cron else {"interval": 60 * minutes}
        if asked.misfires in WITH_GRACE:
            how["grace"] = timedelta(milliseconds=asked.grace_ms)
        return self.store.topic("t").every(
            "s", timezone="Europe/Rome", until=asked.until_ms, count=asked.count,
            jitter=timedelta(milliseconds=asked.jitter_ms), misfires=asked.misfires, **how,
        )  # fmt: skip

    def ask(self, asked: Asked) -> None:
        """Another schedule under the name, or the first."""
        twin = TwinSchedule(asked, came=self.twin.came)
        twin.begin(self.clock.now_ms())
        if asked == self.twin.asked and self.schedules():
            twin = self.twin
        elif twin.waiting_ms is None:
            with pytest.raises(InvalidArgument, match=r"^until="):
                self.every(asked)
            return
        before = self.schedules()
        assert [self.every(asked).replaced] == (before if twin is not self.twin and before else [None])
        self.twin = twin

    def schedules(self) -> list[Schedule]:
        return self.store.topic("t").schedules()

    def step(self, step: str, data: st.DataObject) -> None:
        """One thing happens."""
        now_ms = self.clock.now_ms()
        if step == "forward":
            self.clock.advance(data.draw(st.integers(1, 90 * MINUTE_MS)))
        elif step == "stop":
            self.clock.advance(data.draw(st.integers(2 * HOUR_MS, 2 * DAY_MS)))
        elif step == "tick":
            self.store.tick()
            self.twin.tick(now_ms)
        elif step == "restart":
            self.store.close()
            self.open(self.store.path)
        elif step == "crash":
            self.crash(data.draw(st.sampled_from(POINTS)), data.draw(st.integers(1, 6)))
        elif step == "full":
            before = self.schedules()
            with full_disk(self.store._engine, data.draw(st.integers(1, 4))):
                try:
                    self.store.tick()
                except StoreFull:
                    event("full")
            self.learn(before, now_ms)
        elif step == "pause":
            self.store.topic("t").pause_schedule("s")
            if self.twin.waiting_ms is not None:
                self.twin.take_back()
                self.twin.paused = True
        elif step == "resume":
            self.store.topic("t").resume_schedule("s")
            if self.twin.paused:
                self.twin.begin(now_ms)
        elif step == "again":
            self.ask(self.twin.asked)
        else:
            self.ask(data.draw(ASKED))

    def crash(self, point: str, count: int) -> None:
        """A tick ends at one of its commits."""
        before, now_ms = self.schedules(), self.clock.now_ms()
        self.copies += 1
        target = self.directory / str(self.copies)

        def end() -> None:
            copy_store(self.store.path, target)
            raise SimulatedCrash

        try:
            with armed(point, Once(count, end)):
                self.store.tick()
            copy_store(self.store.path, target)
        except SimulatedCrash:
            event(f"crash at {point}")
        self.store.close()
        self.open(target)
        self.learn(before, now_ms)

    def learn(self, before: list[Schedule], now_ms: int) -> None:
        """How far a tick that was broken off has come, of what it may have: each of its transactions whole, or not."""
        (old,), (new,) = before, self.schedules()
        twin = self.twin
        due = twin.waiting_ms is not None and twin.due_ms(twin.waiting_ms) <= now_ms
        fired = old.next_id is not None and self.store.topic("t").state(old.next_id) == "fired"
        if not due:
            assert new == old
        elif new == old:
            if fired and not twin.fired:
                assert twin.waiting_ms is not None
                twin.came.append(twin.waiting_ms)
                twin.fired = True
        elif new.next_id is None and not new.ended:
            event("broken off between what was late")
            twin.tick(now_ms, up_to_ms=new.next_nominal_ms, fires=fired and not twin.fired)
        else:
            twin.tick(now_ms, fires=fired and not twin.fired)

    def compare(self) -> None:
        """All that was ever sent, in order, and how far the schedule has come."""
        twin = self.twin
        with self.store.topic("t").reader("earliest") as reader:
            came = [message.occurrence for message in reader.poll(10_000)[0]] if twin.came else []
        assert [(each.schedule, each.nominal_ms) for each in came if each] == [("s", ms) for ms in twin.came]
        for schedule in self.schedules():
            assert schedule.next_nominal_ms == twin.waiting_ms
            assert (schedule.sent, schedule.paused) == (twin.sent, twin.paused)
            assert schedule.ended == (twin.waiting_ms is None and not twin.paused)
            if schedule.next_nominal_ms is not None:
                assert schedule.next_due_ms == twin.due_ms(schedule.next_nominal_ms)

    def end(self) -> None:
        """Everything that is to come comes; the store is whole."""
        for _ in range(3):
            self.store.tick()
            self.twin.tick(self.clock.now_ms())
            self.compare()
            self.clock.advance(3 * HOUR_MS)
        assert list(self.store.check()) == []


EXAMPLES = int(os.environ.get("DUELOG_SCHEDULE_EXAMPLES", "25"))
SETTINGS = settings(
    max_examples=EXAMPLES, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip
told = given(asked=ASKED, steps=st.lists(STEPS, min_size=5, max_size=16), data=st.data())


def tell(asked: Asked, steps: list[str], data: st.DataObject) -> None:
    """One story, with missed occurrences sent four at a time, so that crashes come between them."""
    directory = scratch_directory()
    with patch.object(recurring, "_AT_ONCE", 4):
        story = Story(asked, directory)
        try:
            for step in steps:
                story.step(step, data)
            story.end()
        finally:
            story.store.close()
            shutil.rmtree(directory, ignore_errors=True)


@SETTINGS
@told
def test_every_occurrence_comes_as_often_as_its_schedule_says(
    asked: Asked, steps: list[str], data: st.DataObject
) -> None:
    """Whatever it says of its end, jitter and misfires, and whatever happens to the store."""
    tell(asked, steps, data)


def follows_from_now(patch: pytest.MonkeyPatch) -> None:
    """An interval is counted from when its occurrence was followed."""
    after = Timetable.after
    patch.setattr(Timetable, "after", lambda self, now_ms, anchor_ms: after(self, now_ms, now_ms))


def passes_its_end(patch: pytest.MonkeyPatch) -> None:
    """The latest nominal time is not looked at when one occurrence follows another."""
    following = Recurrence.following
    patch.setattr(Recurrence, "following", lambda self, *times: following(replace(self, until_ms=None), *times))


def passes_its_count(patch: pytest.MonkeyPatch) -> None:
    """Occurrences that are made up for are not counted."""
    at = recurring._at
    patch.setattr(recurring, "_at", lambda schedule, due: replace(at(schedule, due), count=None))


def is_not_moved_by_jitter(patch: pytest.MonkeyPatch) -> None:
    """An occurrence is due at its nominal time."""
    patch.setattr(Recurrence, "_due_ms", lambda self, nominal_ms: nominal_ms)


def lets_misfires_come(patch: pytest.MonkeyPatch) -> None:
    """A waiting occurrence fires, however late."""
    patch.setattr(recurring.Recurring, "withdraw", lambda *_: None)


def makes_up_later(patch: pytest.MonkeyPatch) -> None:
    """Missed occurrences are kept in memory, and sent with the next change of a schedule."""
    plain, missed = recurring.Recurring._put, list[Any]()

    def apart(self: Any, topic: Any, schedule: Any, old: Any, late: Any = None, **options: Any) -> Any:
        before, missed[:] = list(missed), late or ()
        return plain(self, topic, schedule, old, before, **options)

    patch.setattr(recurring.Recurring, "_put", apart)


MUTANTS = (
    follows_from_now,
    passes_its_end,
    passes_its_count,
    is_not_moved_by_jitter,
    lets_misfires_come,
    makes_up_later,
)


@pytest.mark.parametrize("break_it", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_stories_find_out_a_wrong_engine(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first story that fails is enough; each has failed within as many as are told anyway."""
    break_it(monkeypatch)
    briefly = settings(
        SETTINGS, max_examples=100, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, DuelogError)):
        briefly(told(tell))()
