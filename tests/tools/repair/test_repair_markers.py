"""`duelog repair` and markers: what fired is told by the partitions, where its markers or its frontier are lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import pytest

from duelog import DelayedStore, ManualClock
from duelog.store.codec.format import Table, quarantine_key, seal
from duelog.store.codec.run import HEADER_BYTES
from duelog.tools.store_check import check_store
from tests.conftest import START_MS
from tests.tools.repair.test_repair_records import CONFIG, DAMAGE, DAY_MS, delivered, repaired
from tests.tools.small_records import DAMAGES, flip, forget_applied, keys, without_copies

SENT = [b"%d" % number for number in range(3_000)]


@pytest.fixture
def fired(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A store in which three thousand messages have fired in three runs, and what its subscription is to get."""
    path = tmp_path / "store"
    clock = ManualClock(START_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        topic = store.topic("t")
        with topic.subscribe("s") as reader:
            topic.send_payloads(SENT, deliver_at=[START_MS + 1_000 + at for at in range(3_000)])
            for _ in range(3):
                clock.advance(1_500)
                store.tick()
            reader.ack(reader.receive(2_000)[::2], durable=True)
    return path, [*SENT[1:2_000:2], *SENT[2_000:]]


@DAMAGE
@pytest.mark.parametrize("run", [0, 1, 2])
def test_a_run_of_markers_that_is_lost_costs_no_message(fired: tuple[Path, list[bytes]], run: int, damage: str) -> None:
    """What it pointed at lies whole in the partition; what was acknowledged of it stays acknowledged."""
    path, owed = fired
    DAMAGES[damage](path / "main", keys(path / "main", Table.RUN)[run])
    report = repaired(path)
    assert (report.lost, report.again) == (0, 0)
    assert delivered(path) == owed


def test_markers_of_two_partitions_that_are_lost_together_get_new_ones(tmp_path: Path) -> None:
    """Which of them lay where is not told: those that were acknowledged may come again, and are counted."""
    path = tmp_path / "store"
    clock = ManualClock(START_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        topic = store.topic("t")
        with topic.subscribe("s") as reader:
            for day in (1, 2):
                payloads = [b"%d %d" % (day, number) for number in range(100)]
                topic.send_payloads(payloads, deliver_at=START_MS + day * DAY_MS)
            clock.advance(3 * DAY_MS)
            store.tick()
            reader.ack(reader.receive(30), durable=True)
    for segment in (path / "wal").glob("*.wal"):  # which are applied, and still have the markers
        segment.unlink()
    for key in keys(path / "main", Table.RUN):
        flip(path / "main", key)
    report = repaired(path)
    assert (report.lost, report.again) == (0, 30)
    assert sorted(delivered(path)) == sorted(b"%d %d" % (day, number) for day in (1, 2) for number in range(100))


@DAMAGE
def test_a_lost_frontier_is_told_by_the_markers(fired: tuple[Path, list[bytes]], damage: str) -> None:
    """In a store without copies: nothing fires twice, and nothing that has not fired is held back."""
    path, owed = fired
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS + 10_000)) as store:
        store.topic("t").send_payloads([b"to come"] * 50, deliver_at=START_MS + 60_000)
    without_copies(path)
    DAMAGES[damage](path / "main", keys(path / "main", Table.FRONTIER)[0])
    report = repaired(path)
    assert (report.lost, report.again) == (0, 0)
    assert delivered(path) == owed + [b"to come"] * 50


def test_what_was_quarantined_and_can_be_read_is_delivered(fired: tuple[Path, list[bytes]]) -> None:
    """Quarantined by a process that had no descriptors left: nothing of it is damaged, so nothing is discarded."""
    path, owed = fired
    (log,) = keys(next(path.glob("partitions/*/g*")), Table.LOG)
    assert len(log) == 5
    with lmdb.open(str(path / "main"), map_size=1 << 30) as environment, environment.begin(write=True) as raw:
        key = quarantine_key(2, 2_500)
        raw.put(key, seal(key, b"no descriptors"))
    assert [found.code for found in check_store(path)] == ["set-aside"]
    report = repaired(path)
    assert (report.lost, report.given_up) == (0, 0)
    assert delivered(path) == owed


def test_messages_whose_run_cannot_be_read_are_counted_exactly(tmp_path: Path) -> None:
    """Also those of the last run of a log, of which nothing but its own length tells how many they are."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("t").subscribe("s").close()
        store.topic("t").send_payloads(SENT, deliver_at=START_MS + DAY_MS)
        store.topic("t").send_payloads(SENT)
    forget_applied(path)
    for directory in (path / "main", next(path.glob("partitions/*/g*"))):
        whole = shutil.copytree(path, tmp_path / "copy")
        last = keys(directory, Table.RUN)[-1]
        flip(whole / directory.relative_to(path), last, at=HEADER_BYTES + 1)
        count = 3_000 - int.from_bytes(last[9:], "big")
        assert 0 < count < 192
        report = repaired(whole)
        assert report.lost == count
        assert len(delivered(whole)) == 6_000 - count
        shutil.rmtree(whole)
