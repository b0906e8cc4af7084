"""`duelog repair` and records of cancellations: what other records tell is told, the rest counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message
from duelog.store.codec.format import Table
from duelog.tools.store_check import check_store
from tests.conftest import START_MS
from tests.tools.repair.test_repair_records import CONFIG, COPIES, DAMAGE, DAY_MS, delivered, repaired
from tests.tools.small_records import DAMAGES, flip, keys, remove, without_copies


@pytest.fixture
def withdrawn(tmp_path: Path) -> Path:
    """Sixty messages of which twenty were cancelled and twenty rescheduled to another partition."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        ids = topic.send_batch([Message(b"%d" % number, deliver_at=START_MS + 5 * DAY_MS) for number in range(60)])
        for message_id in ids[:20]:
            assert topic.cancel(message_id)
        for message_id in ids[20:40]:
            assert topic.reschedule(message_id, deliver_at=START_MS + 7 * DAY_MS)
    return path


OWED = [*(b"%d" % number for number in range(40, 60)), *(b"%d" % number for number in range(20, 40))]


@DAMAGE
@pytest.mark.parametrize(
    ("table", "code", "uncancelled"),
    [(Table.ADMITTED, "lost-admission", 0), (Table.CANCELLED, "lost-cancellation", 40)],
    ids=["ADMITTED", "CANCELLED"],
)
def test_rescheduled_messages_tell_of_lost_records_of_withdrawals(
    withdrawn: Path, damage: str, table: Table, code: str, uncancelled: int
) -> None:
    """In a store without copies none of those comes twice; the report has how many may come though cancelled."""
    without_copies(withdrawn)
    (key,) = keys(withdrawn / "main", table)
    DAMAGES[damage](withdrawn / "main", key)
    if damage == "missing":
        (found,) = check_store(withdrawn)
        assert (found.code, found.message.split()[0]) == (code, "20")
    report = repaired(withdrawn)
    assert (report.lost, report.uncancelled) == (0, uncancelled)
    cancelled = [b"%d" % number for number in range(20)] if uncancelled else []
    assert sorted(delivered(withdrawn)) == sorted([*OWED, *cancelled])


def test_a_snapshot_tells_what_was_cancelled_before_it(tmp_path: Path) -> None:
    """In a store without copies: only what was cancelled since may come, and is counted among what may."""
    path = tmp_path / "store"
    clock = ManualClock(START_MS)
    with DelayedStore.open(path, dataclasses.replace(CONFIG, snapshot_every_entries=50), clock=clock) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        store.topic("t").send(b"first", deliver_at=START_MS + 60_000)
        store.tick()  # loads the partition
        ids = topic.send_batch([Message(b"%d" % number, deliver_at=START_MS + 60_000) for number in range(60)])
        for message_id in ids[:20]:
            assert topic.cancel(message_id)
        store.tick()  # writes a snapshot
        assert topic.cancel(ids[20])
    without_copies(path)
    flip(path / "main", keys(path / "main", Table.CANCELLED)[0])
    report = repaired(path)
    assert report.uncancelled == 41
    assert delivered(path) == [b"first", *(b"%d" % number for number in range(20, 60))]


def test_an_entry_that_was_never_admitted_is_no_finding_once_its_predecessor_is_cancelled(tmp_path: Path) -> None:
    """A crash in the middle of rescheduling leaves such an entry; where there are copies nothing is made of it."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        message_id = topic.send(b"x", deliver_after=86_400)
        new = topic.reschedule(message_id, deliver_after=5 * 86_400)
    for table in (Table.ADMITTED, Table.CANCELLED):  # as before its main transaction
        (key,) = keys(path / "main", table)
        remove(path / "main", key)
    without_copies(path)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        assert store.topic("t").cancel(message_id)
        assert new is not None
    assert check_store(path, deep=True) == []


@COPIES
def test_a_recurring_message_whose_last_occurrence_fired_has_lost_no_cancellation(tmp_path: Path, copies: bool) -> None:
    """The next one names it, and replaces nothing."""
    path = tmp_path / "store"
    clock = ManualClock(START_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        topic.every("tick", interval=60, payload=b"x")
        for _ in range(5):
            clock.advance(60_000)
            store.tick()
        assert list(store.check(deep=True)) == []
    if not copies:
        without_copies(path)
    assert check_store(path, deep=True) == []
