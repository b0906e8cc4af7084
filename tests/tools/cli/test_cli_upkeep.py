"""`duelog check`, `backup` and `repair` as commands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from duelog import DelayedStore
from tests.tools.command_line import DUELOG, FUTURE_MS, flip, json_of, make_store, ok, refused, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with a hundred messages that are not due."""
    with make_store(tmp_path / "store") as store:
        store.topic("t").subscribe("s")
        for number in range(100):
            store.topic("t").send(b"payload %d" % number, deliver_at=FUTURE_MS + number)
            if number % 10 == 9:
                assert store._engine.sending.wal_writer is not None
                store._engine.sending.wal_writer.apply_all()  # a run for each ten
    return tmp_path / "store"


def test_check_finds_keys_that_a_page_hides(path: Path) -> None:
    """The newest entries are gone without a gap: only the count of the tree tells."""
    (file,) = path.glob("partitions/*/*/data.mdb")
    content = bytearray(file.read_bytes())
    leaves = [at for at in range(2 * 4096, len(content), 4096) if content[at + 10] == 2]
    for leaf in leaves:  # some are of earlier commits
        content[leaf + 12] -= 2  # one node fewer
    file.write_bytes(content)
    result = run("check", path)
    assert result.exit_code == 1
    assert "page" in result.stdout


def test_a_store_is_backed_up_by_another_process_while_it_is_open(path: Path, tmp_path: Path) -> None:
    """`duelog backup` beside the writing process, which goes on; the copy opens and has everything."""
    with make_store(path) as store:
        topic = store.topic("t")
        command = [*DUELOG, "backup", str(path), str(tmp_path / "copy")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                topic.send(b"meanwhile", deliver_at=FUTURE_MS)
            assert process.stderr is not None
            assert process.returncode == 0, process.stderr.read()
        assert list(store.check(deep=True)) == []
    assert ok("check", tmp_path / "copy", "--deep") == ""
    with make_store(tmp_path / "copy") as copy:
        payloads = {message.payload for message in copy.topic("t").scheduled(limit=None)}
        assert {b"payload %d" % number for number in range(100)} <= payloads


def test_a_backup_of_many_partitions_by_another_process_asks_for_the_descriptors_that_it_needs(
    path: Path, tmp_path: Path
) -> None:
    """It holds all of them at once, and may have more than it begins with."""
    with DelayedStore.open(path) as opened:
        for day in range(30):
            opened.topic("t").send(b"%d" % day, deliver_after=day * 86_400 + 1)
        command = [*DUELOG, "backup", str(path), str(tmp_path / "copy")]
        done = subprocess.run(
            ["sh", "-c", 'ulimit -S -n 40; exec "$@"', "sh", *command], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "copy" / "partitions").iterdir())) >= 30


def test_a_backup_does_not_overwrite(path: Path, tmp_path: Path) -> None:
    """A directory in use is refused with its name."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine").touch()
    assert "empty directory" in refused("backup", path, tmp_path / "copy")


def test_repair_writes_what_it_discards_to_a_file(path: Path, tmp_path: Path) -> None:
    """The bytes of a damaged payload, its address and the reason; then check finds nothing."""
    flip(next(path.glob("partitions/*/*/data.mdb")), b"payload 42")
    figures = [json.loads(line) for line in ok("repair", path, "--json").splitlines()][-1]
    kinds = figures.pop("kinds")
    assert figures == {"given_up": 1, "lost": 1, "again": 0, "uncancelled": 0, "subscriptions": [], "left": []}
    assert kinds["entries of partitions"] == {"found": 100, "kept": 99, "discarded": 1}
    assert all(each["found"] == each["kept"] + each["discarded"] for each in kinds.values())
    (line,) = [json.loads(line) for line in (tmp_path / "store-given-up.jsonl").read_text().splitlines()]
    assert line["entry"] == 42
    assert "checksum" in line["reason"]
    assert ok("check", path, "--deep") == ""
    assert json_of("stats", path)["pending"] == 99


def test_what_repair_discards_is_not_written_into_the_store(path: Path) -> None:
    """Opening the store would remove the file; nothing is repaired, either."""
    flip(next(path.glob("partitions/*/*/data.mdb")), b"payload 7")
    before = {file: file.read_bytes() for file in path.rglob("data.mdb")}
    assert "inside the store" in refused("repair", path, "--output", path / "trash" / "given-up.jsonl")
    assert {file: file.read_bytes() for file in path.rglob("data.mdb")} == before


def test_repair_of_a_store_in_use_is_refused(path: Path) -> None:
    """The writing process holds the lock."""
    with DelayedStore.open(path):
        assert "has this store open" in refused("repair", path)
