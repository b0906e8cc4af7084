"""Recurring messages: kept schedules, time zones and their clock changes, stops, pauses, crashes."""

import itertools
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from duelog import DelayedStore, ManualClock, Subscription, Topic
from duelog.errors import StoreFull
from duelog.markers.pending_entries import PendingEntries
from duelog.upkeep.recurring import Recurring
from duelog.upkeep.schedule import Timetable
from tests.conftest import DAY_MS, HOUR_MS, START_MS, OpenStore, Plant, raising

FACES = True

ROME = "Europe/Rome"


def ms(text: str, zone: str = "UTC") -> int:
    """Epoch ms of a local time."""
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def received(store: DelayedStore, consumer: Subscription) -> list[int]:
    """Due times of what is there now, acknowledged."""
    store.tick()
    batch = consumer.receive(100)
    consumer.ack(batch)
    return [message.due_ms for message in batch]


def step(store: DelayedStore, consumer: Subscription, clock: ManualClock, until_ms: int, by_ms: int) -> list[int]:
    """Receive while the clock goes on in steps."""
    dues = []
    while clock.now_ms() < until_ms:
        clock.advance(by_ms)
        for due_ms in received(store, consumer):
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
        dues = received(store, consumer)
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
        dues = received(store, consumer)
        dues += step(store, consumer, clock, START_MS + 4 * HOUR_MS, HOUR_MS)
    assert dues == [START_MS + count * HOUR_MS for count in range(1, 5)]
