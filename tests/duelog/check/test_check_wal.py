"""`check` and the WAL: what keeps a store from opening is a finding, and what is as it should be is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from duelog import DelayedStore, Finding, ManualClock, StoreConfig
from duelog.check import check_wal
from duelog.errors import DamagedStore, FormatMismatch
from duelog.partitions.partition import Partition, PartitionLog
from duelog.store.wal import wal_file
from duelog.store.wal.wal_file import WalRecord, read_wal
from duelog.tools.store_check import check_store
from tests.conftest import START_MS, OpenStore
from tests.disaster.wal_stores import groups, in_wal, with_wal
from tests.duelog.writing_process import WritingProcess
from tests.model.driver import copy_store

HOUR_MS = 3_600_000
CONFIG = with_wal(StoreConfig(partition_ms=HOUR_MS, background=False))
DUES = (START_MS + 3 * HOUR_MS, START_MS + 9 * HOUR_MS)


def send(store: DelayedStore, count: int) -> None:
    """Messages for the two partitions in turn."""
    for number in range(count):
        store.topic("t").send(b"%d" % number, deliver_at=DUES[number % 2] + number)


@pytest.fixture
def crashed(open_store: OpenStore, tmp_path: Path) -> Path:
    """A copy of an open store whose WAL has eight messages that no partition has."""
    send(open_store(config=CONFIG), 10)
    copy_store(tmp_path / "store", tmp_path / "crashed")
    assert len(in_wal(tmp_path / "crashed")) == 8
    return tmp_path / "crashed"


def opened(path: Path) -> list[Finding]:
    """What the check of the store opened read-only finds."""
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS), read_only=True) as store:
        return list(store.check())


def write_at(path: Path, at: int, content: bytes) -> None:
    """Overwrite part of a WAL."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def put_back(crashed: Path, before: Path) -> str:
    """Give the second partition the file that it had `before`; the name of its directory."""
    file, older = (sorted(store.glob("partitions/*/g*/data.mdb"))[1] for store in (crashed, before))
    file.write_bytes(older.read_bytes())
    return file.parts[-3]


def test_what_a_crash_left_in_the_wal_is_no_finding_and_comes_home(crashed: Path) -> None:
    """Looked at twice: nothing is changed, and opening brings every message home."""
    assert opened(crashed) == check_store(crashed, deep=True) == check_store(crashed) == []
    assert len(in_wal(crashed)) == 8
    with DelayedStore.open(crashed, CONFIG, clock=ManualClock(START_MS)) as store:
        assert sum(partition.pending for partition in store.partitions()) == 10
        assert list(store.check(deep=True)) == []


def test_a_store_without_a_wal_has_no_finding(crashed: Path) -> None:
    """A store has no WAL until threads have sent side by side."""
    (crashed / "JOURNAL").unlink()
    assert opened(crashed) == check_store(crashed) == []


@pytest.mark.parametrize("damage", ["group", "slots", "cut", "empty"])
def test_a_damaged_wal_is_an_error_with_its_path(crashed: Path, damage: str) -> None:
    """A group before the last, both slots, the end of the file, the whole file: told before a writer is refused."""
    file = crashed / "JOURNAL"
    if damage == "group":
        write_at(file, groups(file.read_bytes())[2][0] + 30, b"\xff")
    elif damage == "slots":
        write_at(file, 0, bytes(8192))
    else:
        os.truncate(file, 0 if damage == "empty" else file.stat().st_size - 1)
    for findings in (opened(crashed), check_store(crashed), check_store(crashed, deep=True)):
        assert [(found.severity, found.code, found.address) for found in findings] == [("error", "journal", str(file))]
        assert "duelog repair" in findings[0].advice
    with pytest.raises(DamagedStore, match="JOURNAL"):
        DelayedStore.open(crashed, CONFIG, clock=ManualClock(START_MS))


def test_a_log_that_ends_before_the_wal_goes_on_is_an_error(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """The file of a partition of before: its last commits are gone, and the WAL does not begin where it ends."""
    store = open_store(config=CONFIG)
    send(store, 2)
    copy_store(store.path, tmp_path / "before")
    for due_ms in DUES:
        store.topic("t").send_payloads([b"batch"] * 5, deliver_at=due_ms)
    send(store, 4)
    copy_store(store.path, tmp_path / "crashed")
    name = put_back(tmp_path / "crashed", tmp_path / "before")
    for findings in (opened(tmp_path / "crashed"), check_store(tmp_path / "crashed", deep=True)):
        (found,) = findings
        assert (found.severity, found.code) == ("error", "journal")
        assert found.address == str(tmp_path / "crashed" / "JOURNAL")
        assert name in found.message
        assert "ends at entry 1, and not entry 1" in found.message
    with pytest.raises(DamagedStore, match="entries were lost"):
        DelayedStore.open(tmp_path / "crashed", CONFIG, clock=clock)


def test_a_wal_of_a_later_version_is_not_taken_for_damage(crashed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairing it would throw away what the version that wrote it can read."""
    monkeypatch.setattr(wal_file, "JOURNAL_VERSION", 0)
    (found,) = check_store(crashed)
    assert (found.code, "version is 1" in found.message, "repair" in found.advice) == ("journal", True, False)
    with pytest.raises(FormatMismatch):
        DelayedStore.open(crashed, CONFIG, clock=ManualClock(START_MS))


def test_nothing_is_found_beside_a_writer_whenever_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after the WAL was read, and before each partition is: reserved, applied, begun anew, fired, deleted."""
    listed = Partition.logs
    steps = 0
    with WritingProcess(tmp_path / "store", journal_from=1, journal_bytes=24 << 10) as writer:
        writer.do("send_singly", "t", [3 * HOUR_MS, 9 * HOUR_MS] * 3)

        def go_on() -> None:
            nonlocal steps
            steps += 1
            delays_ms = [(3 + number % 2 * 6) * HOUR_MS + number for number in range((1, 4, 40)[steps % 3])]
            writer.do("send_singly", "t", delays_ms)
            if steps % 2:
                writer.send("t", "batch", *delays_ms[:4])
            if steps % 7 == 0:
                writer.do("advance", HOUR_MS)
            writer.do("send_singly", "t", delays_ms[:3])

        def read_and_go_on(path: Path, store_id: bytes) -> list[WalRecord]:
            found = read_wal(path, store_id)
            go_on()
            return found

        def go_on_and_list(partition: Partition) -> list[PartitionLog]:
            go_on()
            return listed(partition)

        with DelayedStore.open(tmp_path / "store", CONFIG, clock=ManualClock(START_MS), read_only=True) as beside:
            monkeypatch.setattr(Partition, "logs", go_on_and_list)
            monkeypatch.setattr(check_wal, "read_wal", read_and_go_on)
            for _ in range(8):
                assert list(beside.check()) == []
    assert steps >= 40


def test_the_process_that_writes_the_store_does_not_look_at_its_own_wal(open_store: OpenStore) -> None:
    """It has the reserved entries in memory; looking at a partition applies them first."""
    store = open_store(config=CONFIG)
    send(store, 6)
    write_at(store.path / "JOURNAL", 8192, bytes(512))
    assert list(store.check()) == []
