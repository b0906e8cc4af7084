"""Exports: every sealed message with all that is said of it, and a store made of one is equal message for message."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow.dataset as ds

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.partitions.timespan import directory_name
from duelog.store.errors import DamagedStore, InvalidArgument
from duelog.store.files.directory import remove_tree
from duelog.tools.columns.scan_arrow import scan_messages
from duelog.tools.columns.scan_rows import Wanted, plan_scan
from duelog.tools.columns.sealed import sealed_generations
from duelog.tools.transfer.export_layout import TABLE_SCHEMAS, day_of, message_path, open_export
from duelog.tools.transfer.parquet_export import Exported, StagedFile, Task, export_slice, export_store
from duelog.tools.transfer.parquet_import import import_export
from tests.conftest import OpenStore
from tests.tools.closed_days import DAY_MS, FIRST_MS, TOPICS, Built, Sent, build
from tests.tools.command_line import json_of, ok, refused, run

CANCELLED = 40


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A store of three closed days, which tests do not change."""
    return build(tmp_path_factory.mktemp("export") / "store", cancelled=CANCELLED)


@pytest.fixture(scope="module")
def exported(built: Built, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Exported]:
    """An export of it."""
    path = tmp_path_factory.mktemp("export") / "archive"
    return path, export_store(built.path, path)


def alive(built: Built) -> list[Sent]:
    """The messages that an import brings back: those sealed and not cancelled."""
    cancelled = {sent[1:3] for sent in built.sent[:CANCELLED]}
    return [sent for sent in built.sealed if sent[1:3] not in cancelled]


def received(store: DelayedStore, subscription: str = "slow") -> list[Sent]:
    """Everything that a subscription of each topic gets, in order."""
    found = []
    for topic in TOPICS:
        with store.topic(topic).subscribe(subscription) as consumer:
            while batch := consumer.receive(1_000):
                consumer.ack(batch)
                found += [Sent(m.topic, 0, 0, m.due_ms, m.publish_ms, m.key, m.properties, m.payload) for m in batch]
    return found


def test_an_export_has_every_sealed_message_where_its_topic_and_day_say(
    built: Built, exported: tuple[Path, Exported]
) -> None:
    """The rows are those of a scan; the manifest counts them; nothing else is left in the directory."""
    path, done = exported
    rows = [
        row for part in plan_scan(built.path, claims=True) for each in scan_messages(part) for row in each.to_pylist()
    ]
    export = open_export(path)
    found: list[dict[str, Any]] = []
    for file in export.message_files:
        table = export.messages(file)
        assert table.num_rows == file.rows
        found += [{**row, "topic": file.topic} for row in table.to_pylist()]
        assert {day_of(due_ms) for due_ms in table["due_ms"].to_pylist()} == {file.day}
    assert sorted(found, key=str) != []
    assert sorted(found, key=lambda row: (row["ledger_id"], row["entry_id"])) == [
        {**row} for row in sorted(rows, key=lambda row: (row["ledger_id"], row["entry_id"]))
    ]
    assert (done.rows, done.partitions, done.withdrawn, done.damaged) == (
        len(rows),
        3,
        sum(r["withdrawn"] for r in rows),
        0,
    )
    assert not export.manifest["filtered"]
    table = ds.dataset(path / "messages", partitioning="hive").to_table(columns=["topic", "day", "due_ms"])
    assert (set(table["topic"].to_pylist()), table.num_rows) == (set(TOPICS), done.rows)  # as other readers see it
    names = {child.name for child in path.iterdir()}
    assert names == {"MANIFEST.json", "messages", *(f"{name}.parquet" for name in TABLE_SCHEMAS)}


def test_a_topic_of_any_name_has_a_directory() -> None:
    """Names of 400 bytes, three to a byte when they are encoded; those that begin alike are apart."""
    name = "persistent://public/default/" + "ö" * 185
    paths = [message_path(name + last, "2026-09-22", "x.parquet") for last in ("a", "b")]
    parts = [part for path in paths for part in path.split("/")]
    assert all(len(part.encode()) <= 255 and part.isascii() for part in parts)
    assert paths[0] != paths[1]


def test_a_part_of_a_store_is_exported_by_topic_and_partition(built: Built, tmp_path: Path) -> None:
    """Nothing else is read."""
    export_store(built.path, tmp_path / "a", wanted=Wanted.of([TOPICS[2]], [directory_name(FIRST_MS + DAY_MS)]))
    export = open_export(tmp_path / "a")
    assert [(file.topic, file.day) for file in export.message_files] == [(TOPICS[2], day_of(FIRST_MS + DAY_MS))]
    assert [row["partition"] for row in export.manifest["partitions"]] == [directory_name(FIRST_MS + DAY_MS)]
    assert export.manifest["filtered"]


def test_a_destination_that_is_not_empty_is_refused(built: Built, tmp_path: Path) -> None:
    """Nothing is written over, nor mixed."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").touch()
    with pytest.raises(InvalidArgument, match="empty"):
        export_store(built.path, tmp_path / "a")
    assert [child.name for child in (tmp_path / "a").iterdir()] == ["mine"]


def test_an_export_that_fails_leaves_the_destination_as_it_was(built: Built, tmp_path: Path) -> None:
    """Half of the slices are written, then one fails."""

    def fails(tasks: Any) -> Any:
        yield export_slice(tasks[0])
        raise OSError("no")

    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(OSError, match="no"):
            export_store(built.path, tmp_path / name, run=fails)
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "there").iterdir()) == []


def test_a_task_that_goes_on_when_an_export_has_failed_leaves_nothing_in_its_destination(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark fails a job when one task has failed; the others may still be writing while all of it is removed."""
    tasks_left: list[Task] = []
    late: list[str] = []

    def removing(path: Path) -> None:
        try:
            export_slice(tasks_left[0])
        except FileNotFoundError as error:
            late.append(str(error))
        remove_tree(path)

    def fails(tasks: Sequence[Task]) -> Iterator[list[StagedFile]]:
        tasks_left.extend(tasks)
        yield export_slice(tasks[0])
        monkeypatch.setattr("duelog.tools.transfer.parquet_export.remove_tree", removing)
        raise OSError("the disk says no")

    with pytest.raises(OSError, match="the disk says no"):
        export_store(built.path, tmp_path / "a", run=fails)
    assert late
    assert not (tmp_path / "a").exists()


def test_of_two_attempts_of_one_slice_one_is_kept(built: Built, tmp_path: Path) -> None:
    """Each task runs twice, as speculation has it: no row comes twice, and no file is left over."""

    def twice(tasks: Any) -> Any:
        for task in tasks:
            export_slice(task)
            yield export_slice(task)

    assert export_store(built.path, tmp_path / "a", run=twice).rows == len(built.sealed)
    export = open_export(tmp_path / "a")
    assert sum(file.rows for file in export.message_files) == len(built.sealed)
    assert len(list((tmp_path / "a" / "messages").rglob("*.parquet"))) == len(export.message_files)


@pytest.mark.parametrize("small", [False, True], ids=["at once", "in windows"])
def test_an_import_gives_back_every_message_equal_and_in_order(
    built: Built, exported: tuple[Path, Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Every field, in order of due time, equal ones in append order; also where memory holds a part of a day."""
    if small:
        monkeypatch.setattr("duelog.tools.transfer.parquet_import._WINDOW_ROWS", 13)
        monkeypatch.setattr("duelog.tools.transfer.parquet_import._BATCH_ROWS", 7)
    clock = ManualClock(built.now_ms)
    with DelayedStore.open(tmp_path / "store", StoreConfig(), clock=clock) as store:
        done = import_export(store, open_export(exported[0]))
        expected = sorted(alive(built), key=lambda sent: (TOPICS.index(sent.topic), sent.due_ms))
        assert done.messages == len(expected)
        assert done.withdrawn == len(built.sealed) - len(expected) > 0
        assert [store.topic(topic).subscriptions() for topic in TOPICS] == [["slow"]] * 3
        assert received(store) == [sent._replace(ledger_id=0, entry_id=0) for sent in expected]
        assert list(store.check(deep=True)) == []
        with pytest.raises(InvalidArgument, match="empty store"):
            import_export(store, open_export(exported[0]))


def test_an_export_that_is_damaged_is_refused(exported: tuple[Path, Exported], tmp_path: Path) -> None:
    """Without its manifest it is none; a file that is missing, short or changed is named."""
    archive = Path(shutil.copytree(exported[0], tmp_path / "archive"))
    file = archive / open_export(archive).message_files[0].path
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DamagedStore, match="manifest says"):
        open_export(archive)
    file.write_bytes(bytes(len(content)))
    export = open_export(archive)
    with pytest.raises(DamagedStore, match="cannot be read"):
        export.messages(export.message_files[0])
    file.unlink()
    with pytest.raises(DamagedStore, match="is missing"):
        open_export(archive)
    (archive / "MANIFEST.json").unlink()
    with pytest.raises(InvalidArgument, match="no export"):
        open_export(archive)


def test_a_file_of_an_archive_that_cannot_be_read_is_found_before_anything_is_imported(
    exported: tuple[Path, Exported], tmp_path: Path, open_store: OpenStore
) -> None:
    """The last one, of its right size; the store stays empty, and takes the archive once it is whole."""
    copy = tmp_path / "archive"
    shutil.copytree(exported[0], copy)
    export = open_export(copy)
    last = copy / max(export.message_files, key=lambda file: (file.topic or "", file.day, file.path)).path
    content = last.read_bytes()
    last.write_bytes(bytes(len(content)))
    store = open_store(config=StoreConfig(partition_ms=export.manifest["partition_ms"]))
    with pytest.raises(DamagedStore, match="cannot be read"):
        import_export(store, export)
    assert list(store.topics()) == []
    last.write_bytes(content)
    assert import_export(store, export).messages > 0


def test_export_and_import_from_the_command_line(built: Built, tmp_path: Path) -> None:
    """From a store to Parquet to a store."""
    done = json_of("export", built.path, tmp_path / "archive")
    assert done["rows"] == len(built.sealed)
    assert refused("export", built.path, tmp_path / "archive")
    assert "messages of 3 partitions" in ok("export", built.path, tmp_path / "other")
    assert "never fire" in run("export", built.path, tmp_path / "third", "--topic", built.sent[0].topic).stderr
    done = json_of("import", tmp_path / "store", "--parquet", tmp_path / "archive", "--subscription", "reader")
    assert (done["messages"], done["topics"]) == (len(alive(built)), 3)
    assert "empty store" in refused("import", tmp_path / "store", "--parquet", tmp_path / "archive")
    assert "FILE" in refused("import", tmp_path / "store")
    assert "FILE" in refused("import", tmp_path / "store", "-", "--parquet", tmp_path / "archive")
    assert json.loads((tmp_path / "archive" / "MANIFEST.json").read_text())["format"] == "duelog-export"


def test_a_partition_that_is_damaged_fails_the_export_by_name(built: Built, tmp_path: Path) -> None:
    """A file that would kill its reader is found before it is mapped."""
    store = shutil.copytree(built.path, tmp_path / "store")
    with (sealed_generations(store)[1].path / "data.mdb").open("r+b") as file:
        file.truncate(8192)
    assert "truncated" in refused("export", store, tmp_path / "archive")
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize("place", ["trash/archive", "staging/archive", "link/archive", "archive"])
def test_an_export_into_the_store_is_refused(open_store: OpenStore, place: str) -> None:
    """Opening the store would remove it; a link that leads there is followed."""
    path = open_store().path
    (path / "link").symlink_to(path / "staging")
    before = sorted(path.rglob("*"))
    assert "inside the store" in refused("export", path, path / place)
    assert sorted(path.rglob("*")) == before


def test_keys_are_exported_and_are_of_the_same_messages_after_an_import(tmp_path: Path) -> None:
    """Keys of pending messages, of rescheduled ones, and of fired ones where the key still holds."""
    clock = ManualClock(FIRST_MS)
    hours = StoreConfig(partition_ms=3_600_000, background=False)
    with DelayedStore.open(tmp_path / "store", hours, clock=clock) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        topic.send(b"free", deliver_after=10, dedup_key="free")
        topic.send(b"held", deliver_after=10, dedup_key="held", dedup_for=50_000)
        topic.send_batch([Message(b"waits", deliver_after=90_000, dedup_key="waits", dedup_for=95_000)])
        topic.reschedule(topic.send(b"moved", deliver_after=20, dedup_key="moved"), deliver_after=90_000)
        topic.send(b"gone", deliver_after=90_000, dedup_key="gone")
        topic.cancel_key("gone")
        topic.send(b"plain", deliver_after=90_000)
        clock.advance(7_200_000)
        store.tick()
    export_store(tmp_path / "store", tmp_path / "archive", pending=True)
    export = open_export(tmp_path / "archive")
    found = {row["dedup_key"]: row for row in export.table("keys").to_pylist()}
    assert {"held", "waits", "moved"} <= found.keys()
    assert found["waits"]["until_ms"] == FIRST_MS + 95_000_000
    with DelayedStore.open(tmp_path / "copy", hours, clock=clock) as store:
        import_export(store, export)
        topic = store.topic("t")
        assert list(topic.keys()) == ["moved", "waits"]
        pending = {each.payload: each for each in topic.scheduled()}
        assert {each.dedup_key for each in pending.values()} == {"moved", "waits", None}
        for key in ("moved", "waits"):
            assert topic.send(b"again", dedup_key=key) == pending[key.encode()].message_id
        held = topic.send(b"again", deliver_after=60, dedup_key="held")
        assert topic.send(b"again", deliver_after=60, dedup_key="free") != held
        assert len(list(topic.scheduled())) == 4
        clock.advance(50_000_000)
        assert topic.send(b"again", deliver_after=60, dedup_key="held") != held
        clock.advance(35_000_000)  # what waited has fired, and its key still holds
        store.tick()
        assert topic.send(b"again", dedup_key="waits") == pending[b"waits"].message_id
        clock.advance(10_000_000)
        assert topic.send(b"again", dedup_key="waits") != pending[b"waits"].message_id
        assert list(store.check(deep=True)) == []
