"""Schedules: nicknames, zones, an end, jitter, misfires, pauses, crashes; stories: none missed, none doubled."""

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from duelog import DelayedStore, ManualClock, Occurrence, ReceivedMessage, Schedule, StoreConfig, Subscription, Topic
from duelog.errors import DuelogError, InvalidArgument, StoreFull
from duelog.markers.pending_entries import PendingEntries
from duelog.upkeep import maintenance, recurring
from duelog.upkeep.recurring import Recurring
from duelog.upkeep.schedule import MISFIRES, WITH_GRACE, Due, Misfires, Recurrence, Timetable
from tests.conftest import DAY_MS, HOUR_MS, MINUTE_MS, START_MS, OpenStore, Plant, present, raising, tick_after
from tests.duelog.store_state import each_received
from tests.duelog.upkeep.twin_schedule import Asked, TwinSchedule
from tests.model.driver import Once, SimulatedCrash, armed, copy_store, full_disk, scratch_directory

FACES = True

ROME = "Europe/Rome"


def ms(text: str, zone: str = "UTC", fold: int = 0) -> int:
    """Epoch ms of a local time."""
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp() * 1000)


def received(store: DelayedStore, consumer: Subscription) -> list[ReceivedMessage]:
    """Receive and acknowledge the messages there now."""
    store.tick()
    found = list(each_received(consumer))
    consumer.ack(found)
    return found


def nominals(messages: list[ReceivedMessage]) -> list[int]:
    """The times that the timetable says."""
    return [message.occurrence.nominal_ms for message in messages if message.occurrence is not None]


def hours(*numbers: int) -> list[int]:
    """Nominal times of a schedule that began at START_MS."""
    return [START_MS + number * HOUR_MS for number in numbers]


NICKNAMES: list[tuple[str, str]] = [
    ("@hourly", "0 * * * *"), ("@daily", "0 0 * * *"), ("@midnight", "0 0 * * *"), ("@weekly", "0 0 * * 0"),
    ("@monthly", "0 0 1 * *"), ("@yearly", "0 0 1 1 *"), (" @Annually ", "0 0 1 1 *"),
]  # fmt: skip


def test_a_nickname_is_the_expression_that_it_stands_for(topic: Topic) -> None:
    """To ask for the one after the other changes nothing."""
    for nickname, expression in NICKNAMES:
        made = topic.every("s", cron=nickname, timezone=ROME)
        assert made.cron == expression
        assert topic.every("s", cron=expression, timezone=ROME) == made


def test_every_with_a_duration_is_an_interval(topic: Topic) -> None:
    """Read as durations are read everywhere."""
    made = topic.every("s", cron="@every 1h30m")
    assert (made.cron, made.interval_ms, made.next_due_ms) == (None, 90 * MINUTE_MS, START_MS + 90 * MINUTE_MS)
    assert topic.every("s", interval=timedelta(minutes=90)) == made
    assert topic.every("s", cron="@every PT1H30M") == made


def test_daily_is_midnight_of_the_zone_over_changes_of_its_clock(open_store: OpenStore) -> None:
    """A day of 23 hours in March, one of 25 in October."""
    table = Timetable.make("@daily", None, ROME)
    for start, lengths in (("2027-03-27T00:00", [24, 23, 24]), ("2027-10-30T00:00", [24, 25, 24])):
        at_ms, found = ms(start, ROME), []
        for _ in range(3):
            next_ms = table.after(at_ms, at_ms)
            found.append((next_ms - at_ms) // HOUR_MS)
            at_ms = next_ms
        assert found == lengths


REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({}, "cron", "one of cron and interval"),
    ({"cron": "0 9 * * *", "interval": 60}, "cron", "one of cron and interval"),
    ({"cron": "0 9 * *"}, "cron", "0 9 * *"),
    ({"cron": "0 0 30 2 *"}, "cron", "0 0 30 2 *"),
    ({"cron": 5}, "cron", "5"),
    ({"cron": "0 9 * * *", "timezone": "Europe/Atlantis"}, "timezone", "Europe/Atlantis"),
    ({"cron": "0 9 * * *", "timezone": "../etc/passwd"}, "timezone", "../etc/passwd"),
    ({"interval": 0.5}, "interval", "0.5"),
    ({"interval": -60}, "interval", "-60"),
    ({"cron": "@reboot"}, "cron", "@reboot"),
    ({"cron": "@daily x"}, "cron", "@daily x"),
    ({"cron": "@every"}, "cron", "''"),
    ({"cron": "@every 1 fortnight"}, "cron", "fortnight"),
    ({"cron": "@every 0.5s"}, "cron", "shorter than 1000 ms"),
    ({"cron": "@every 5m", "interval": 300}, "cron", "one of cron and interval"),
    ({"cron": "@daily", "until": START_MS + 60_000}, "until", str(START_MS + 60_000)),
    ({"interval": 60, "until": START_MS}, "until", str(START_MS)),
    ({"interval": 60, "until": datetime(2027, 1, 1)}, "until", "time zone"),
    ({"interval": 60, "until": 1.5}, "until", "1.5"),
    ({"interval": 60, "count": 0}, "count", "0"),
    ({"interval": 60, "count": True}, "count", "True"),
    ({"interval": 60, "count": 2.0}, "count", "2.0"),
    ({"interval": 60, "count": 1 << 63}, "count", str(1 << 63)),
    ({"interval": 60, "jitter": -1}, "jitter", "negative"),
    ({"interval": 60, "jitter": "5m"}, "jitter", "5m"),
    ({"interval": 60, "jitter": float("nan")}, "jitter", "nan"),
    ({"interval": 60, "misfires": "some"}, "misfires", "'some'"),
    ({"interval": 60, "misfires": None}, "misfires", "None"),
    ({"interval": 60, "misfires": "skip", "grace": -1}, "grace", "-1"),
    ({"interval": 60, "misfires": "all", "grace": 60}, "grace", "latest and skip"),
    ({"interval": 60, "grace": 60}, "grace", "latest and skip"),
    ({"interval": 253_402_300_799}, "interval", "year 10000"),
]


def test_what_a_schedule_cannot_be_is_refused_by_field_and_value(topic: Topic) -> None:
    """Nothing is kept of it, not even the topic."""
    for arguments, field, part in REFUSED:
        with pytest.raises(InvalidArgument) as caught:
            topic.every("beat", **arguments)  # type: ignore[arg-type]
        assert caught.value.field == field
        assert part in str(caught.value)
        assert not topic.exists()


def test_a_schedule_that_is_refused_leaves_the_one_of_its_name_as_it_is(store: DelayedStore, topic: Topic) -> None:
    """Its occurrence too."""
    made = topic.every("beat", interval=60)
    with pytest.raises(InvalidArgument):
        topic.every("beat", interval=60, until=START_MS + 1_000)
    assert topic.schedules() == [made]
    assert [message.message_id for message in topic.scheduled()] == [made.next_id]


def test_a_schedule_ends_after_so_many_messages_and_is_not_begun_again_by_asking_for_the_same(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """A program that asks at every start has it run once; another, or one that was removed, begins anew."""
    got = []
    for _ in range(6):
        store = open_store()
        topic = store.topic("t")
        asked = topic.every("promo", interval=3_600, count=3)
        assert asked.replaced is None
        with topic.subscribe("s") as consumer:
            clock.advance(HOUR_MS)
            got += nominals(received(store, consumer))
        store.close()
    assert got == hours(1, 2, 3)
    store = open_store()
    topic = store.topic("t")
    (ended,) = topic.schedules()
    assert (ended.ended, ended.paused, ended.sent, ended.next_due_ms, ended.next_id) == (True, False, 3, None, None)
    assert topic.pause_schedule("promo") == topic.resume_schedule("promo") == ended
    again = topic.every("promo", interval=3_600, count=4)
    assert (again.replaced, again.sent, again.ended) == (ended, 1, False)
    assert topic.remove_schedule("promo")
    assert topic.every("promo", interval=3_600, count=3).replaced is None


def test_a_pause_after_the_last_message_fired_and_before_the_end_was_noted_sends_no_other(
    store: DelayedStore, topic: Topic, clock: ManualClock, plant: Plant
) -> None:
    """The count goes by what has fired, not by what was recorded of it."""
    topic.every("s", interval=3_600, count=1)
    clock.advance(HOUR_MS)
    plant(Recurring, "_put", StoreFull(store.path, "made up"), after=False)
    with topic.subscribe("s") as consumer:
        with pytest.raises(StoreFull):
            store.tick()
        paused = present(topic.pause_schedule("s"))
        assert (paused.paused, paused.sent) == (True, 1)
        resumed = present(topic.resume_schedule("s"))
        assert resumed.ended
        clock.advance(DAY_MS)
        assert len(received(store, consumer)) == 1


CRONS = ("*/7 * * * *", "30 2 * * *", "0,1 3 * * *", "15 1-3 * * SUN", "0 30 2 * * *", "30 * * * *")
TABLES = st.one_of(
    st.builds(Timetable.make, st.sampled_from(CRONS), st.none(), st.sampled_from(("UTC", ROME, "America/New_York"))),
    st.builds(lambda seconds: Timetable.make(None, seconds, "UTC"), st.integers(1, 90_000)),
)
AROUND_CHANGES = st.sampled_from([ms("2027-03-28T00:00"), ms("2027-10-31T00:00"), ms("2027-11-07T05:00")])


@settings(deadline=None)
@given(table=TABLES, start=AROUND_CHANGES, offset=st.integers(-DAY_MS, DAY_MS), jitter=st.integers(0, DAY_MS))
def test_jitter_is_never_early_within_its_bound_and_keeps_the_order(
    table: Timetable, start: int, offset: int, jitter: int
) -> None:
    """Over changes of the clock too; the same when asked again."""
    rule = Recurrence(table, b"t\0s", jitter_ms=jitter)
    due = rule.after(start + offset)
    for _ in range(6):
        assert due is not None
        following = present(rule.after(due.nominal_ms))
        assert due.nominal_ms <= due.due_ms <= due.nominal_ms + jitter
        assert due.due_ms < following.nominal_ms
        assert Recurrence(table, b"t\0s", jitter_ms=jitter).after(due.nominal_ms - 1, due.nominal_ms) == due
        due = following


@settings(deadline=None)
@given(
    table=TABLES, start=AROUND_CHANGES, offset=st.integers(-DAY_MS, DAY_MS), jitter=st.integers(0, 3 * HOUR_MS),
    stop=st.integers(0, 3 * DAY_MS), grace=st.integers(0, DAY_MS), misfired=st.booleans(),
    misfires=st.sampled_from(MISFIRES), until=st.none() | st.integers(0, 3 * DAY_MS),
)  # fmt: skip
def test_what_was_missed_is_what_going_through_all_occurrences_finds(
    table: Timetable, start: int, offset: int, jitter: int, stop: int, grace: int, misfired: bool, misfires: Misfires,
    until: int | None,
) -> None:  # fmt: skip
    """However it is looked for from the near end: over changes of the clock, with jitter, for every policy."""
    if table.interval_ms is not None and table.interval_ms < 60_000:
        stop //= 100
    rule = Recurrence(table, b"t\0s", None, jitter, misfires, grace)
    begin = present(rule.after(start + offset))
    if until is not None:
        rule = replace(rule, until_ms=begin.nominal_ms + until)
    now_ms = begin.due_ms + stop
    missed: list[Due] = []
    each = rule.after(begin.nominal_ms)
    while each is not None and each.due_ms <= now_ms:
        missed.append(each)
        each = rule.after(each.nominal_ms)
    young = [due for due in missed if due.due_ms >= now_ms - grace]
    expected = {
        "first": [],
        "all": missed,
        "latest": missed[-1:] if misfired or young != missed else missed,
        "skip": young,
    }[misfires]
    assert list(rule.late(begin.nominal_ms, now_ms, misfired=misfired)) == expected
    assert rule.following(begin.nominal_ms, now_ms) == each


def test_a_message_that_is_late_by_less_than_the_grace_is_no_misfire(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """By 60 s unless the schedule says otherwise."""
    topic.every("s", interval=3_600, misfires="skip")
    with topic.subscribe("s") as consumer:
        clock.advance(HOUR_MS + 60_000)
        assert nominals(received(store, consumer)) == hours(1)
        clock.advance(HOUR_MS + 1)
        assert received(store, consumer) == []
        clock.advance(HOUR_MS - 60_001)
        assert nominals(received(store, consumer)) == hours(3)


def test_a_stop_of_months_is_made_up_for_in_pieces_and_in_order(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock
) -> None:
    """More than one transaction takes, and more than one run of a main log can span."""
    store.topic("t").every("s", interval=3 * 3_600, misfires="all")
    store.topic("t").subscribe("s").close()
    store.close()
    clock.advance(100 * DAY_MS)
    store = open_store()
    with store.topic("t").subscribe("s") as consumer:
        assert nominals(received(store, consumer)) == hours(*range(3, 2_401, 3))
    (schedule,) = store.topic("t").schedules()
    assert schedule.sent == 801


def test_what_was_missed_comes_after_what_waited_also_where_a_slice_ends_between_them(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting occurrence fires in a later slice than messages due in the partition before."""
    monkeypatch.setattr(maintenance, "_SLICE_S", 0)
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS))
    topic = store.topic("t")
    topic.send(b"before", deliver_after=60)
    topic.every("s", interval=3_600, misfires="all")
    with topic.subscribe("s") as consumer:
        clock.advance(5 * HOUR_MS)
        assert nominals(received(store, consumer)) == hours(*range(1, 6))


def test_a_misfire_that_could_not_be_taken_back_at_first_does_not_come_later(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Nothing fires in the slice in which that failed; what follows is not scheduled beside it."""
    topic.every("s", interval=3_600, misfires="skip")
    with topic.subscribe("s") as consumer:
        clock.advance(5 * HOUR_MS + HOUR_MS // 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store._engine.delivery.firing, "fire", lambda *_: 0)
            patch.setattr(store._engine.upkeep.recurring, "withdraw", lambda *_: None)
            store.tick()
        assert received(store, consumer) == []
        clock.advance(HOUR_MS // 2)
        assert nominals(received(store, consumer)) == hours(6)


@pytest.mark.parametrize(
    ("misfires", "expected"), [("latest", hours(1, 5)), ("skip", hours(1)), ("all", hours(1, 2, 3, 4, 5))]
)
def test_an_occurrence_that_fired_before_a_stop_is_neither_sent_again_nor_taken_for_missed(
    open_store: OpenStore,
    store: DelayedStore,
    clock: ManualClock,
    plant: Plant,
    misfires: Misfires,
    expected: list[int],
) -> None:
    """It had fired, and what follows was not recorded: only that was missed, and only what fired is counted."""
    store.topic("t").every("s", interval=3_600, misfires=misfires, count=5)
    store.topic("t").subscribe("s").close()
    clock.advance(HOUR_MS)
    plant(Recurring, "_put", StoreFull(store.path, "made up"), after=False)
    with pytest.raises(StoreFull):
        store.tick()
    store.close()
    clock.advance(4 * HOUR_MS + HOUR_MS // 2)
    store = open_store()
    with store.topic("t").subscribe("s") as consumer:
        assert nominals(received(store, consumer)) == expected
        clock.advance(HOUR_MS // 2)
        expected = expected + nominals(received(store, consumer))
        for _ in range(10):
            clock.advance(HOUR_MS)
            expected = expected + nominals(received(store, consumer))
    assert len(expected) == 5


def test_a_removed_schedule_takes_back_what_is_too_late_and_has_not_fired(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Nothing of it comes, also where it was to be made up for."""
    topic.every("s", interval=3_600, misfires="all")
    clock.advance(DAY_MS)
    assert topic.remove_schedule("s")
    with topic.subscribe("s") as consumer:
        assert received(store, consumer) == []


@pytest.mark.inside
def test_an_occurrence_names_its_schedule_wherever_it_is_seen(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Scheduled, received one by one or as columns, postponed, dead-lettered and requeued."""
    made = topic.every("beat", interval=3_600, jitter=60, payload=b"x")
    expected = Occurrence("beat", START_MS + HOUR_MS)
    assert made.next_nominal_ms == expected.nominal_ms
    (waiting,) = topic.scheduled()
    assert waiting.occurrence == present(topic.get(present(made.next_id))).occurrence == expected
    topic.send(b"plain", deliver_after=HOUR_MS // 1000 + 120)
    store.update_policies(max_redeliveries=1)
    topic.every("beat", interval=3_600, jitter=60, payload=b"x", count=1)
    with topic.subscribe("s", type="shared") as consumer:
        tick_after(store, clock, HOUR_MS + 180_000)
        occurrence, plain = consumer.poll_columns(10)[0]
        assert (occurrence.occurrence, plain.occurrence) == (expected, None)
        consumer.ack(plain)
        consumer.retry_later(occurrence, delay=1)
        tick_after(store, clock, 1_000)
        (again,) = consumer.receive(10)
        assert (again.occurrence, again.retries) == (expected, 1)
        consumer.nack(again)
        tick_after(store, clock, DAY_MS)
        consumer.receive(10)
        store.tick()
        (letter,) = store.dead_letters()
        assert letter.occurrence == expected
        assert store.requeue_dead_letters([letter]) == 1
        store.tick()
        assert [message.occurrence for message in consumer.receive(10)] == [expected]


def test_replacing_a_schedule_says_what_it_replaced(topic: Topic) -> None:
    """The first is new, the same again replaces nothing, another says which was there; it is not kept."""
    first = topic.every("s", interval=60, payload=b"a")
    assert first.replaced is None
    assert topic.every("s", interval=60, payload=b"a").replaced is None
    for change in ({"payload": b"b"}, {"jitter": 5}, {"count": 3}, {"misfires": "all"}, {"until": START_MS + DAY_MS}):
        before = topic.schedules()[0]
        made = topic.every("s", **{"interval": 60, "payload": b"a", **change})  # type: ignore[arg-type]
        assert made.replaced == before
        assert topic.schedules()[0].replaced is None
        assert [message.message_id for message in topic.scheduled()] == [made.next_id]


BEGIN_MS = 1_824_940_800_000 - 90 * MINUTE_MS
"""In the evening before the clocks of Rome go back; cron's steps of minutes go on through it."""

STORY = StoreConfig(partition_ms=6 * HOUR_MS, retention_ms=3_650 * DAY_MS)
ASKED = st.builds(
    Asked,
    step_ms=st.sampled_from((20 * MINUTE_MS, 30 * MINUTE_MS)),
    by_cron=st.booleans(),
    until_ms=st.none() | st.integers(BEGIN_MS + 2 * HOUR_MS, BEGIN_MS + 4 * DAY_MS),
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
        self.clock = ManualClock(BEGIN_MS)
        self.open(directory / "0")
        self.store.topic("t").create()
        self.twin = TwinSchedule(asked)
        self.ask(asked)

    def open(self, path: Path) -> None:
        self.store = DelayedStore.open(path, STORY, clock=self.clock)

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


def due_times(store: DelayedStore, consumer: Subscription) -> list[int]:
    """Due times of what is there now, acknowledged."""
    return [message.due_ms for message in received(store, consumer)]


def step(store: DelayedStore, consumer: Subscription, clock: ManualClock, until_ms: int, by_ms: int) -> list[int]:
    """Receive while the clock goes on in steps."""
    dues = []
    while clock.now_ms() < until_ms:
        clock.advance(by_ms)
        for due_ms in due_times(store, consumer):
            assert clock.now_ms() - by_ms < due_ms <= clock.now_ms()
            dues.append(due_ms)
    return dues


@pytest.mark.parametrize(
    ("cron", "start", "expected"),
    [
        # The last Sunday of March 2027: 02:00 to 03:00 does not exist. 09:00 stays 09:00 there, so 23 h lie between.
        ("0 9 * * *", "2027-03-27T12:00", ["2027-03-28T09:00", "2027-03-29T09:00"]),
        ("30 2 * * *", "2027-03-27T12:00", ["2027-03-28T03:00", "2027-03-29T02:30"]),
        # The last Sunday of October 2027: 02:00 to 03:00 comes twice.
        ("30 2 * * *", "2027-10-30T12:00", ["2027-10-31T02:30", "2027-11-01T02:30"]),
    ],
)
def test_cron_follows_the_clock_of_its_zone_over_a_change(
    open_store: OpenStore, cron: str, start: str, expected: list[str]
) -> None:
    """A time of day is kept; one that is skipped comes right after the gap, one that comes twice comes once."""
    clock = ManualClock(ms(start, ROME))
    store = open_store(clock_=clock)
    topic = store.topic("t")
    topic.every("daily", cron=cron, timezone=ROME)
    with topic.subscribe("s") as consumer:
        dues = step(store, consumer, clock, ms(expected[-1], ROME), HOUR_MS // 4)
    assert dues == [ms(text, ROME) for text in expected]


def test_every_half_hour_follows_real_time_over_a_change() -> None:
    """Steps of minutes neither stop in the hour that comes twice nor skip it."""
    table = Timetable.make("*/30 * * * *", None, ROME)
    now_ms, dues = ms("2027-10-30T23:30"), []
    for _ in range(6):
        now_ms = table.after(now_ms, 0)
        dues.append(now_ms)
    assert [late - early for early, late in itertools.pairwise(dues)] == [1_800_000] * 5


def test_a_schedule_made_in_the_second_half_of_an_hour_that_comes_twice_begins_the_day_after(
    open_store: OpenStore,
) -> None:
    """Its time of day has come in the first half; a time that had passed was looked for again without end."""
    clock = ManualClock(ms("2027-10-31T00:10"))  # 02:10 comes twice in Rome: 00:10 UTC, and 01:10 UTC
    topic = open_store(clock_=clock).topic("t")
    assert topic.every("before", cron="30 2 * * *", timezone=ROME).next_due_ms == ms("2027-10-31T00:30")
    clock.advance(HOUR_MS)
    assert topic.every("after", cron="30 2 * * *", timezone=ROME).next_due_ms == ms("2027-11-01T02:30", ROME)


def test_an_interrupt_after_the_commit_of_an_advance_does_not_double_the_next_occurrence(
    store: DelayedStore, clock: ManualClock, plant: Plant
) -> None:
    """Memory knows from the commit itself when the schedule comes next."""
    store.topic("t").every("beat", interval=3_600, payload=b"x")
    clock.advance(HOUR_MS)
    plant(Recurring, "_put", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        store.tick()
    with store.topic("t").subscribe("s") as consumer:
        dues = due_times(store, consumer)
        dues += step(store, consumer, clock, START_MS + 4 * HOUR_MS, HOUR_MS)
    assert dues == [START_MS + count * HOUR_MS for count in range(1, 5)]


def test_the_first_occurrence_is_after_now_even_on_the_very_instant() -> None:
    """At nine o'clock sharp the next nine o'clock is tomorrow's."""
    table = Timetable.make("0 9 * * *", None, "UTC")
    nine = int(datetime(2027, 1, 1, 9, tzinfo=UTC).timestamp() * 1000)
    assert table.after(nine - 1, 0) == nine
    assert table.after(nine, 0) == nine + DAY_MS


def test_a_removed_schedule_is_gone_with_its_occurrence(store: DelayedStore, topic: Topic, clock: ManualClock) -> None:
    """And what was never there cannot be paused, resumed or removed."""
    topic.every("beat", interval=3_600)
    assert topic.remove_schedule("beat")
    assert not topic.remove_schedule("beat")
    assert topic.pause_schedule("beat") is None
    assert topic.resume_schedule("beat") is None
    assert topic.schedules() == []
    with topic.subscribe("s") as consumer:
        assert step(store, consumer, clock, START_MS + DAY_MS, HOUR_MS) == []


def test_a_failure_between_entry_and_record_neither_loses_nor_doubles(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is there; the next tick, or the next start, does it again."""
    store.topic("t").every("beat", interval=3_600, payload=b"x")
    clock.advance(HOUR_MS)
    monkeypatch.setattr(PendingEntries, "_append", raising(StoreFull(store.path, "made up")))
    for _ in range(2):
        with pytest.raises(StoreFull):
            store.tick()
    monkeypatch.undo()
    store.close()
    store = open_store()
    with store.topic("t").subscribe("s") as consumer:
        dues = due_times(store, consumer)
        dues += step(store, consumer, clock, START_MS + 4 * HOUR_MS, HOUR_MS)
    assert dues == [START_MS + count * HOUR_MS for count in range(1, 5)]
