"""`duelog repair` and directories that are not where they belong, or gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock
from duelog.errors import DamagedStore
from duelog.store.codec.format import PARTITION_INFO_KEY
from duelog.tools.repair.repair_store import repair_store
from duelog.tools.store_check import check_store
from tests.conftest import START_MS
from tests.tools.repair.test_repair_records import CONFIG, DAY_MS, delivered, repaired
from tests.tools.small_records import environments, forget_applied, remove

SENT = [b"%d %d" % (day, number) for day in range(2, 5) for number in range(50)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with fifty messages on each of three days to come."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        for day in range(2, 5):
            payloads = [b"%d %d" % (day, number) for number in range(50)]
            topic.send_payloads(payloads, deliver_at=START_MS + day * DAY_MS)
    return path


def turn(path: Path) -> None:
    """Have each partition's directory lie in the place of the next."""
    directories = environments(path)[1:]
    for number, directory in enumerate(directories):
        os.rename(directory, path / f"on-the-way-{number}")
    for number in range(len(directories)):
        os.rename(path / f"on-the-way-{number}", directories[number - 1])


@pytest.mark.parametrize("described", [True, False])
def test_directories_that_lie_in_each_others_place_are_put_back(path: Path, described: bool) -> None:
    """Each says where it belongs; where it does not, its runs do."""
    turn(path)
    if not described:
        remove(environments(path)[1], PARTITION_INFO_KEY)
    with pytest.raises(DamagedStore), DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        for _ in store.topic("t").scheduled():
            pass
    report = repaired(path)
    assert (report.lost, report.given_up) == (0, 0)
    assert delivered(path) == SENT


def test_directories_that_a_killed_repair_was_putting_back_are_put_back_by_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in a place that opening does not clear."""
    turn(path)
    whole = os.rename
    calls = []

    def rename(source: object, target: object) -> None:
        calls.append(source)
        if len(calls) == 5:
            raise KeyboardInterrupt
        whole(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        repair_store(path, path.with_name("given-up"))
    monkeypatch.undo()
    with pytest.raises(DamagedStore):
        DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS))
    assert repaired(path).lost == 0
    assert delivered(path) == SENT


def test_a_directory_whose_place_is_taken_goes_to_the_quarantine(path: Path) -> None:
    """A copy of one day in the place of another: that day is lost, which is said, and nothing comes twice."""
    one, other, _ = environments(path)[1:]
    forget_applied(path)
    shutil.copy(one / "data.mdb", other / "data.mdb")
    report = repaired(path)
    assert [each.name for each in (path / "quarantine").iterdir()] == [f"{other.parent.name}-{other.name}-1"]
    found = delivered(path)
    assert found == [payload for payload in SENT if not payload.startswith(b"3")]
    assert any("written anew with the 0 records" in action for action in report.actions)


def test_a_directory_of_another_store_goes_to_the_quarantine(path: Path, tmp_path: Path) -> None:
    """It may be of the same day, and full of messages."""
    with DelayedStore.open(tmp_path / "other", CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("t").send_payloads([b"not mine"] * 9, deliver_at=START_MS + 9 * DAY_MS)
    (theirs,) = environments(tmp_path / "other")[1:]
    shutil.copytree(theirs.parent, path / "partitions" / theirs.parent.name)
    repaired(path)
    assert len(list((path / "quarantine").iterdir())) == 1
    assert delivered(path) == SENT


@pytest.mark.parametrize("content", [None, b"", b"\0" * 65_536])
def test_a_store_whose_main_environment_is_gone_is_left_as_it_is(path: Path, content: bytes | None) -> None:
    """Every partition stays, what to do is said, and with main/ of a backup beside them all is delivered."""
    backup = shutil.copytree(path / "main", path.with_name("backup"))
    shutil.rmtree(path / "main")
    if content is not None:
        (path / "main").mkdir()
        (path / "main" / "data.mdb").write_bytes(content)
    before = {file: file.read_bytes() for file in path.glob("partitions/*/*/data.mdb")}
    report = repair_store(path, path.with_name("given-up"))
    assert report.left
    assert any("3 partitions with messages are there" in action for action in report.actions)
    assert {file: file.read_bytes() for file in path.glob("partitions/*/*/data.mdb")} == before
    shutil.rmtree(path / "main", ignore_errors=True)
    shutil.move(backup, path / "main")
    assert check_store(path, deep=True) == []
    assert delivered(path) == SENT
