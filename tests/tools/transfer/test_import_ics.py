"""`duelog import --ics`: a calendar's reminders as delayed messages."""

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock
from duelog.errors import InvalidArgument, InvalidMessage
from duelog.operations.operations import Operations
from duelog.tools.transfer.import_ics import ImportedReminders, import_ics
from tests.conftest import START_MS, OpenStore
from tests.tools.command_line import calendar, event, json_of, refused

EVENTS = (
    event("UID:dentist", "SUMMARY:Dentist", "LOCATION:Main Street 5", "DTSTART;TZID=Europe/Rome:20260930T150000",
          "DTEND;TZID=Europe/Rome:20260930T160000",
          alarms=[":-PT1H", ";RELATED=END:PT5M", ";VALUE=DATE-TIME:20260929T180000Z"]),
    event("UID:weekly", "SUMMARY:Weekly", "DTSTART:20261005T090000", "RRULE:FREQ=WEEKLY;COUNT=4",
          "EXDATE:20261012T090000", alarms=[":-PT10M"]),
    event("UID:holiday", "SUMMARY:Holiday", "DTSTART;VALUE=DATE:20261101", alarms=[":-P1D", ":-PT15H"]),
    event("UID:gone", "SUMMARY:Gone", "DTSTART:20260901T090000Z", alarms=[":-PT10M"]),
    event("UID:quiet", "SUMMARY:Without a reminder", "DTSTART:20261001T090000Z"),
)  # fmt: skip
CALENDAR = calendar(*EVENTS).replace("\n", "\r\n").encode()


def take_in(store: DelayedStore, content: bytes = CALENDAR) -> ImportedReminders:
    """Import a calendar."""
    return import_ics(Operations(store), io.BytesIO(content), "reminders", timezone="Europe/Rome")


def ms(*moment: int) -> int:
    """Epoch ms of a time in UTC."""
    return int(datetime(*moment, tzinfo=UTC).timestamp() * 1000)  # type: ignore[arg-type,misc]


def scheduled(store: DelayedStore) -> list[tuple[str, int]]:
    """Key and due time of what is pending."""
    return [(message.key or "", message.due_ms) for message in store.topic("reminders").scheduled()]


def test_every_future_reminder_is_scheduled_when_it_triggers(store: DelayedStore) -> None:
    """Before the start, after the end, at an absolute time; recurring with exceptions; days and times without zone."""
    done = take_in(store)
    assert scheduled(store) == [
        ("dentist", ms(2026, 9, 29, 18)),
        ("dentist", ms(2026, 9, 30, 12)),
        ("dentist", ms(2026, 9, 30, 14, 5)),
        ("weekly", ms(2026, 10, 5, 6, 50)),
        ("weekly", ms(2026, 10, 19, 6, 50)),
        ("weekly", ms(2026, 10, 26, 7, 50)),  # summer time is over: 9 o'clock stays 9 o'clock
        ("holiday", ms(2026, 10, 30, 23)),
        ("holiday", ms(2026, 10, 31, 8)),  # 9 o'clock on the day before
    ]
    assert (done.messages, done.past, done.without_time) == (8, 1, 0)
    first = json.loads(next(store.topic("reminders").scheduled()).payload)
    assert first["summary"] == "Dentist"
    assert first["location"] == "Main Street 5"
    assert first["start"] == "2026-09-30T15:00:00+02:00"


def test_what_lies_beyond_the_horizon_is_left_out(store: DelayedStore) -> None:
    """A rule without an end gives no more than the horizon holds."""
    endless = CALENDAR.replace(b"RRULE:FREQ=WEEKLY;COUNT=4", b"RRULE:FREQ=WEEKLY")
    import_ics(Operations(store), io.BytesIO(endless), "reminders", horizon=timedelta(days=30))
    assert scheduled(store)
    assert max(due_ms for _, due_ms in scheduled(store)) <= START_MS + 30 * 86_400_000


@pytest.mark.parametrize("content", [b"", b"no calendar", b"BEGIN:VEVENT\r\nEND:VEVENT\r\n"])
def test_what_is_no_calendar_is_refused_and_nothing_is_sent(store: DelayedStore, content: bytes) -> None:
    """The error names the file."""
    with pytest.raises(InvalidArgument, match=r"^FILE="):
        take_in(store, content)
    assert not store.topic("reminders").exists()


def test_the_command_line_schedules_a_calendar(tmp_path: Path) -> None:
    """Relative to the machine's clock, so with an event of next year."""
    year = datetime.now(UTC).year + 1
    file = tmp_path / "calendar.ics"
    file.write_bytes(CALENDAR.replace(b"20261101", f"{year}0102".encode()))
    done = json_of("import", tmp_path / "store", "--ics", file, "--topic", "days", "--days", "800")
    with DelayedStore.open(tmp_path / "store", clock=ManualClock(START_MS), read_only=True) as store:
        keys = [message.key for message in store.topic("days").scheduled()]
    assert "holiday" in keys
    assert done["messages"] == len(keys)
    assert "time" in refused("import", tmp_path / "store", "--ics", file, "--timezone", "Nowhere")


def test_a_reminder_that_a_policy_refuses_is_named_and_none_is_sent(store: DelayedStore) -> None:
    """The event, its reminder's time, and the limit; the earlier reminders are not stored either."""
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=20 * 86_400_000), topic="reminders")
    with pytest.raises(InvalidMessage, match=r"event 'weekly': reminder='2026-10-19T06:50:00Z': a delay of .* ms is"):
        take_in(store)
    assert not store.topic("reminders").exists()


def test_importing_a_calendar_again_doubles_no_reminder(open_store: OpenStore) -> None:
    """Also after a restart; what is there is counted as it was."""
    store = open_store()
    take_in(store)
    before = scheduled(store)
    store.close()
    store = open_store()
    done = take_in(store)
    assert scheduled(store) == before
    assert (done.messages, done.updated, done.unchanged, done.cancelled) == (0, 0, 8, 0)


def test_importing_a_calendar_again_updates_what_it_imported_before(store: DelayedStore) -> None:
    """An event that moved, one with another text, one that was cancelled, and one that another file has."""
    take_in(store)
    take_in(store, CALENDAR.replace(b"UID:", b"UID:another-"))
    changed = (
        CALENDAR.replace(b"T150000", b"T180000").replace(b"T160000", b"T190000")
        .replace(b"SUMMARY:Weekly", b"SUMMARY:Every week")
        .replace(b"SUMMARY:Holiday", b"SUMMARY:Holiday\r\nSTATUS:CANCELLED")
    )  # fmt: skip
    done = take_in(store, changed)
    assert (done.messages, done.updated, done.unchanged, done.cancelled) == (2, 4, 0, 4)
    mine = [message for message in store.topic("reminders").scheduled() if not str(message.key).startswith("another")]
    assert [(message.key, message.due_ms) for message in mine] == [
        ("dentist", ms(2026, 9, 29, 18)),
        ("dentist", ms(2026, 9, 30, 15)),
        ("dentist", ms(2026, 9, 30, 17, 5)),
        ("weekly", ms(2026, 10, 5, 6, 50)),
        ("weekly", ms(2026, 10, 19, 6, 50)),
        ("weekly", ms(2026, 10, 26, 7, 50)),
    ]
    assert {json.loads(message.payload)["summary"] for message in mine} == {"Dentist", "Every week"}
    assert len(scheduled(store)) == 6 + 8
