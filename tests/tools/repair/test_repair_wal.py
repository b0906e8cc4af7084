"""`duelog repair` and the WAL: discarded where it is damaged, kept where a partition is, no id given out twice."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import FormatMismatch
from duelog.store.codec.body import decode_body
from duelog.store.codec.format import Table
from duelog.store.wal import wal_file
from duelog.tools.repair.repair_store import RepairReport, repair_store
from duelog.tools.store_check import check_store
from tests.conftest import START_MS, OpenStore
from tests.disaster.damage import copy
from tests.disaster.running import forked
from tests.disaster.wal_stores import groups, in_wal, with_wal
from tests.model.driver import copy_store
from tests.tools.small_records import flip, keys

HOUR_MS = 3_600_000
CONFIG = with_wal(StoreConfig(partition_ms=HOUR_MS, background=False))
DUES = (START_MS + 3 * HOUR_MS, START_MS + 9 * HOUR_MS)


class Crashed:
    """A copy of an open store, and what was sent to it: payloads by id."""

    def __init__(self, path: Path, sent: dict[str, str], output: Path) -> None:
        self.path = path
        self.sent = sent
        self.output = output
        self.wal = path / "JOURNAL"
        self.in_wal = in_wal(path)

    def repair(self) -> RepairReport:
        """Repair it; nothing is left, and check agrees."""
        report = repair_store(self.path, self.output)
        assert report.left == check_store(self.path, deep=True) == []
        return report

    def given_up(self) -> dict[str, str]:
        """Payloads, by id, of the output's lines that have a body."""
        lines: list[dict[str, Any]] = [json.loads(line) for line in self.output.read_text().splitlines()]
        return {
            f"{line['ledger']}:{line['entry']}": bytes(decode_body(base64.b64decode(line["raw"]))[1]).decode()
            for line in lines
            if line["raw"] and "write-ahead log" in line["reason"]
        }

    def delivered(self) -> dict[str, str]:
        """What comes out of it, by id, once all is due; what is sent to it before gets new ids."""
        clock = ManualClock(START_MS)
        found: dict[str, str] = {}
        with DelayedStore.open(self.path, CONFIG, clock=clock) as store:
            reader = store.topic("t").subscribe("s")
            new = {str(store.topic("t").send(b"new", deliver_at=due_ms)) for due_ms in DUES}
            assert not new & self.sent.keys()
            clock.advance(24 * HOUR_MS)
            store.tick()
            for message in reader.receive(1_000, timeout=0):
                found[str(message.message_id)] = message.payload.decode()
            assert list(store.check(deep=True)) == []
        assert new <= found.keys()
        return {message_id: payload for message_id, payload in found.items() if message_id not in new}


@pytest.fixture
def crashed(open_store: OpenStore, tmp_path: Path) -> Crashed:
    """Two partitions with ten messages each, the first six of them committed, the others in the WAL alone.

    `tmp_path`/before is the store with two.
    """
    store = open_store(config=CONFIG)
    store.topic("t").subscribe("s").close()
    sent: dict[str, str] = {}

    def send(number: int) -> None:
        sent[str(store.topic("t").send(b"one %d" % number, deliver_at=DUES[number % 2] + number))] = f"one {number}"

    for number in range(4):
        send(number)
    copy_store(store.path, tmp_path / "before")
    for due_ms in DUES:
        for message_id in store.topic("t").send_payloads([b"batch"] * 4, deliver_at=due_ms):
            sent[str(message_id)] = "batch"
    for number in range(8):
        send(number)
    copy_store(store.path, tmp_path / "crashed")
    return Crashed(tmp_path / "crashed", sent, tmp_path / "given-up")


def partition_file(store: Path, number: int) -> Path:
    """The data file of one of the partitions."""
    return sorted(store.glob("partitions/*/g*/data.mdb"))[number]


def break_group(crashed: Crashed, number: int) -> None:
    """Break a group of the WAL."""
    content = bytearray(crashed.wal.read_bytes())
    content[groups(bytes(content))[number][0] + 40] ^= 1
    crashed.wal.write_bytes(content)


def test_a_damaged_wal_is_discarded_with_what_no_partition_has(crashed: Crashed) -> None:
    """What can be read, before the hole and after it, is in the output; partitions keep what they have."""
    alone = crashed.in_wal[-8:]
    break_group(crashed, len(crashed.in_wal) - 5)
    readable = [each for each in alone if each != alone[3]]
    report = crashed.repair()
    assert any("JOURNAL" in action and "with 7 messages" in action for action in report.actions)
    assert not crashed.wal.exists()
    assert crashed.given_up() == {each: crashed.sent[each] for each in readable}
    assert report.given_up >= 7
    again = crashed.repair()
    assert (again.actions, again.given_up) == ([], 0)
    assert crashed.delivered() == {each: payload for each, payload in crashed.sent.items() if each not in alone}


@pytest.mark.parametrize("left", [0, 8192, 8192 + 512 * 4])
def test_a_wal_cut_short_is_discarded(crashed: Crashed, left: int) -> None:
    """What is before the cut is in the output; with nothing readable the store opens with what partitions have."""
    os.truncate(crashed.wal, left)
    crashed.repair()
    assert not crashed.wal.exists()
    alone = crashed.in_wal[-8:]
    survivors = [] if left <= 8192 else [each for each in crashed.in_wal[:4] if each in alone]
    given_up = crashed.given_up() if crashed.output.exists() else {}
    assert sorted(given_up) == sorted(survivors)


def test_an_intact_wal_is_left_alone(crashed: Crashed) -> None:
    """Another file's damage is mended, and what is in the WAL comes home when the store is opened."""
    directory = partition_file(crashed.path, 0).parent
    flip(directory, keys(directory, Table.RUN)[-1], at=-1)
    before = crashed.wal.read_bytes()
    report = crashed.repair()
    assert report.given_up == 1
    assert crashed.wal.read_bytes() == before
    delivered = crashed.delivered()
    assert len(delivered) == len(crashed.sent) - 1
    assert delivered.items() <= crashed.sent.items()


def test_entries_that_a_partition_lost_before_those_of_the_wal_are_discarded_and_the_wal_is_kept(
    crashed: Crashed, tmp_path: Path
) -> None:
    """An older file of a partition: the messages between are lost, those that the WAL has are delivered."""
    shutil.copyfile(partition_file(tmp_path / "before", 1), partition_file(crashed.path, 1))
    assert [found.code for found in check_store(crashed.path)] == ["journal"]
    report = crashed.repair()
    assert crashed.wal.exists()
    assert any("discarded" in action for action in report.actions)
    delivered = crashed.delivered()
    assert delivered.items() <= crashed.sent.items()
    assert crashed.in_wal[-8:] == [each for each in crashed.in_wal[-8:] if each in delivered]
    lost = crashed.sent.keys() - delivered.keys()
    in_wal = {each for each in lost if each in crashed.given_up()}
    assert [crashed.sent[each] for each in lost - in_wal] == ["batch"] * 4


@pytest.mark.parametrize("gone", [False, True], ids=["its pages", "its file"])
def test_of_a_partition_that_is_lost_the_wal_s_messages_come_or_are_reported(crashed: Crashed, gone: bool) -> None:
    """Its pages, and with them the end of its log, or its file, and with it the log's name: there is no gap."""
    file = partition_file(crashed.path, 1)
    size = file.stat().st_size
    if gone:
        file.unlink()
    else:
        os.truncate(file, 2 * 4096)
        os.truncate(file, size)
        assert "page" in {found.code for found in check_store(crashed.path)}
    crashed.repair()
    delivered = crashed.delivered()
    assert delivered.items() <= crashed.sent.items()
    assert len(delivered) >= len(crashed.sent) // 2
    assert set(crashed.in_wal) <= delivered.keys() | crashed.given_up().keys()


def test_a_wal_and_a_partition_damaged_together_are_repaired(crashed: Crashed, tmp_path: Path) -> None:
    """Three bits of a data file and one of the WAL, again and again: what can be read comes or is reported."""
    random_ = random.Random(11)
    whole = crashed.path
    broken = crashed.in_wal[-4]
    left = 0
    for number in range(20):
        trial = Crashed(copy(whole, tmp_path / "trial"), crashed.sent, tmp_path / f"given-up-{number}")
        break_group(trial, len(crashed.in_wal) - 4)
        file = partition_file(trial.path, number % 2)
        content = bytearray(file.read_bytes())
        for _ in range(3):
            content[random_.randrange(2 * 4096, len(content))] ^= 1 << random_.randrange(8)
        file.write_bytes(content)

        def work(trial: Crashed = trial) -> list[str]:
            return [found.message for found in repair_store(trial.path, trial.output).left]

        found, died = forked(work, tmp_path / "report")
        assert not died
        if found:
            left += 1
            continue
        assert check_store(trial.path, deep=True) == []
        delivered = trial.delivered()
        assert delivered.items() <= crashed.sent.items(), number
        assert set(crashed.in_wal[-8:]) - {broken} <= delivered.keys() | trial.given_up().keys(), number
    assert left < 5


def test_a_wal_of_a_later_version_is_not_repaired(crashed: Crashed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not damaged; the version that wrote it reads it."""
    before = crashed.wal.read_bytes()
    monkeypatch.setattr(wal_file, "JOURNAL_VERSION", 0)
    with pytest.raises(FormatMismatch):
        repair_store(crashed.path, crashed.output)
    assert crashed.wal.read_bytes() == before
