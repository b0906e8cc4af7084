"""`duelog check`, `backup`, `repair` and `snapshot` as commands."""

import json
import subprocess
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.partitions.timespan import directory_name
from duelog.store.codec.format import snapshot_meta_key
from duelog.store.env.environment import Environment
from tests.conftest import applied, present
from tests.tools.command_line import (
    DAY_MS,
    DUELOG,
    FUTURE_MS,
    flip,
    json_lines_of,
    json_of,
    make_store,
    ok,
    refused,
    run,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with a hundred messages that are not due."""
    with make_store(tmp_path / "store") as store:
        store.topic("t").subscribe("s")
        for number in range(100):
            store.topic("t").send(b"payload %d" % number, deliver_at=FUTURE_MS + number)
            if number % 10 == 9:
                store._engine.writer().apply_all()  # a run for each ten
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
            assert process.returncode == 0, present(process.stderr).read()
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
        applied(opened)
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


def test_the_store_in_which_one_stands_is_repaired(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` has no name to put what is discarded beside: it ended with a traceback."""
    flip(next(path.glob("partitions/*/*/data.mdb")), b"payload 42")
    monkeypatch.chdir(path)
    ok("repair", ".")
    assert (path.parent / "store-given-up.jsonl").exists()


def test_repair_of_what_is_no_store_leaves_nothing_there(tmp_path: Path) -> None:
    """A lock stayed in a directory that was given by mistake. Or nothing is there at all."""
    (tmp_path / "other").mkdir()
    assert "it has no file named STORE" in refused("repair", tmp_path / "other")
    assert "there is no such directory" in refused("repair", tmp_path / "none")
    assert list((tmp_path / "other").iterdir()) == []


def test_repair_of_a_store_in_use_is_refused(path: Path) -> None:
    """The writing process holds the lock."""
    with DelayedStore.open(path):
        assert "has this store open" in refused("repair", path)


START_MS = FUTURE_MS - FUTURE_MS % DAY_MS
PARTITION = directory_name(START_MS)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store whose one day has begun, with a snapshot of 500 messages."""
    path = tmp_path / "store"
    config = StoreConfig(snapshot_every_entries=1_000)
    with DelayedStore.open(path, config, clock=ManualClock(START_MS)) as opened:
        opened.topic("t").send_batch([Message(b"m", deliver_at=START_MS + 1_000 * at) for at in range(1, 501)])
        opened.tick()
        assert list(opened.check()) == []
    return path


def test_list_shows_what_there_is(store: Path) -> None:
    """One line for each snapshot, with what it covers; JSON has every field."""
    text = ok("snapshot", "list", store)
    assert "snapshots: 1" in text
    assert PARTITION in text
    (found,) = json_lines_of("snapshot", "list", store)
    assert (found["state"], found["usable"], found["entries"], found["tail"]) == ("complete", True, 500, 500)
    assert ok("snapshot", "list", store, "--topic", "t", "--partition", PARTITION).count("complete") == 1


def test_list_works_beside_a_writing_process_and_the_others_refuse(store: Path) -> None:
    """Listing takes no lock; verifying and rebuilding say that the store is in use."""
    with DelayedStore.open(store, clock=ManualClock(START_MS)):
        assert "open already" in refused("snapshot", "rebuild", store)
        assert "open already" in refused("snapshot", "verify", store)


def test_rebuild_makes_a_damaged_snapshot_whole(store: Path) -> None:
    """Verify finds it with status 1, rebuild replaces it, verify finds nothing."""
    assert ok("snapshot", "verify", store)
    (found,) = json_lines_of("snapshot", "list", store)
    environment = Environment(store / "partitions" / PARTITION / "g000001", name="partition")
    key = snapshot_meta_key(found["ledger_id"], found["snapshot_id"])
    environment.commit(lambda transaction: transaction.raw.put(key, b"nonsense"))
    environment.close()
    result = run("snapshot", "verify", store)
    assert result.exit_code == 1
    assert "damaged" in result.stdout
    assert "rebuilt: 1" in ok("snapshot", "rebuild", store)
    (rebuilt,) = json_lines_of("snapshot", "rebuild", store)
    assert (rebuilt["entries"], rebuilt["pending"], rebuilt["written"]["parts"]) == (500, 500, 1)
    assert ok("snapshot", "verify", store)


def test_a_damaged_entry_is_named_with_status_1(store: Path) -> None:
    """The address and the reason, as a line and as JSON."""
    environment = Environment(store / "partitions" / PARTITION / "g000001", name="partition")
    with environment.read() as raw:
        cursor = raw.cursor()
        assert cursor.last()
        key, value = bytes(cursor.key()), bytearray(cursor.value())
    value[-1] ^= 1
    environment.commit(lambda transaction: transaction.raw.put(key, bytes(value)))
    environment.close()
    result = run("snapshot", "rebuild", store)
    assert result.exit_code == 1
    assert "entry 499" in result.stdout
    assert '"entry_id": 499' in run("snapshot", "rebuild", store, "--json").stdout


def test_unknown_names_are_refused(store: Path) -> None:
    """A partition or topic that is not there, and a directory that is no store."""
    assert "there is none" in refused("snapshot", "rebuild", store, "--partition", "20300101T000000Z")
    assert "nobody" in refused("snapshot", "list", store, "--topic", "nobody")
    assert "no store" in refused("snapshot", "list", store.parent)
