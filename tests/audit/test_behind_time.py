"""Messages that are overdue, and that fired late: warnings of `duelog audit` and `duelog check`, and no damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.check.check_store import check_lateness
from duelog.tools.audit import audit_store
from duelog.tools.audit.audit_page import page
from tests.tools.command_line import ok

HOUR_MS = 3_600_000
START_MS = 1_790_000_000_000 // HOUR_MS * HOUR_MS
CONFIG = StoreConfig(partition_ms=HOUR_MS, background=False)
NAMES = [f"persistent://public/default/{name}" for name in ("late", "overdue")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One topic whose messages fired in time and, three of them, late; another with four that are to fire."""
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "s", CONFIG, clock=clock) as store:
        for delay in (10, 70, 100, 130):
            store.topic("late").send(b"x", deliver_after=delay)
        clock.advance(10_000)
        store.tick()
        clock.advance(180_000)  # the others are late by 60, 90 and 120 s
        store.tick()
        for delay in (60, 200, 300, 310):
            store.topic("overdue").send(b"x", deliver_after=delay)
        store.topic("late").send(b"x", deliver_after=7_200)
    return tmp_path / "s"


def found(path: Path, now_ms: int) -> list[tuple[str, str, str, int]]:
    """Severity, code, address and number of messages of an audit's findings, which `check` has too."""
    audit = audit_store(path, as_of_ms=now_ms)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(now_ms), read_only=True) as store:
        engine = store._engine
        checked = list(check_lateness(engine.storage.main, engine.storage.partitions, engine.clock.now_ms()))
        assert list(store.check()) == []
    of_check = [(each.severity, each.code, each.address, int(each.message.split()[0])) for each in checked]
    of_audit = [(each.severity, each.code, each.address, each.entries) for each in audit.findings]
    assert sorted(of_check) == sorted(of_audit)
    return of_audit


def test_what_fired_more_than_a_minute_late_is_a_warning(path: Path) -> None:
    """Two by 90 and 120 s, and one by just a minute; what has fired in time is not, nor what is still to come."""
    assert found(path, START_MS + 190_000) == [("warning", "late", NAMES[0], 3)]


def test_what_has_been_due_for_more_than_a_minute_is_a_warning(path: Path) -> None:
    """From the minute on, message by message; with the time since which it goes on."""
    due_ms = START_MS + 190_000 + 60_000
    assert [each[1] for each in found(path, due_ms + 59_999)] == ["late"]
    assert found(path, due_ms + 60_000)[1:] == [("warning", "overdue", NAMES[1], 1)]
    assert found(path, due_ms + 300_000)[1:] == [("warning", "overdue", NAMES[1], 3)]
    (overdue,) = [each for each in audit_store(path, as_of_ms=due_ms + 300_000).findings if each.code == "overdue"]
    assert overdue.message.startswith("3 have not fired, the oldest due since 2026-09-21T")


def test_the_page_is_not_green_over_them(path: Path) -> None:
    """The verdict counts them, and the findings name the topics."""
    text = page(audit_store(path, as_of_ms=START_MS + 900_000))
    assert 'class="verdict so-so"' in text
    assert 'class="verdict good"' not in text
    assert "2 warnings" in text
    assert all(name in text for name in NAMES)


def test_they_do_not_change_the_exit_status(path: Path) -> None:
    """Neither of `check`, which says whether there is damage, nor of `audit`; both print them."""
    shown = [json.loads(line) for line in ok("check", path, "--json").splitlines()]  # by the machine's clock
    assert ("warning", "late", NAMES[0]) in [(each["severity"], each["code"], each["address"]) for each in shown]
    assert {each["code"] for each in shown} <= {"late", "overdue"}
    assert "warning: overdue: " in ok("audit", path, "--as-of", START_MS + 900_000)
