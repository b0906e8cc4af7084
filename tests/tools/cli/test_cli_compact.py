"""`duelog compact`, offline and beside a process that has the store open; audit, export, compact of several stores."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.cleanup.compaction import stage_generation
from duelog.store.env.body_file import length_of
from duelog.tools import compact_store as compaction
from duelog.tools.columns.sealed import sealed_generations
from duelog.tools.compact_store import CompactionReport, CompactionTask, PartitionAnswer, compact_store, run_here
from duelog.tools.transfer.export_layout import open_export
from tests.conftest import HOUR_MS
from tests.duelog.writing_process import WritingProcess
from tests.tools.closed_days import build_half_acknowledged
from tests.tools.command_line import json_lines_of, json_of, ok, refused, run

DAY = 1_790_035_200_000
DAY_MS = 86_400_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three closed days: of 300 messages of 1 KB each the first day's are all acknowledged, of the second's a third."""
    clock = ManualClock(DAY - 1_000)
    with DelayedStore.open(tmp_path / "store", StoreConfig(), clock=clock) as store:
        topic = store.topic("a")
        with topic.subscribe("one") as subscription:
            for day in range(3):
                batch = [Message(b"x" * 1_000, deliver_at=DAY + day * DAY_MS + 1 + at) for at in range(300)]
                topic.send_batch(batch)
                clock.set(DAY + (day + 1) * DAY_MS)
                store.tick()
            received = subscription.receive(1_000)
            subscription.ack(received[:300], durable=True)
            subscription.ack(received[300:600:3], durable=True)
    return tmp_path / "store"


def left(path: Path) -> int:
    """How many messages the subscription still gets."""
    clock = ManualClock(DAY + 3 * DAY_MS)
    with DelayedStore.open(path, StoreConfig(), clock=clock) as store:
        assert list(store.check(deep=True)) == []
        with store.topic("a").subscribe("one") as subscription:
            return len(subscription.receive(1_000))


def test_a_store_that_no_process_has_open_is_compacted_at_once(path: Path) -> None:
    """Partitions that are worth it are rewritten and adopted; the figures are those of the files."""
    answer = json_of("compact", path)
    rows = {row["partition"]: row for row in answer["partitions"]}
    assert [row["outcome"] for row in rows.values()] == ["adopted", "adopted", "skipped"]
    first = rows["20260922T000000Z"]
    assert (first["messages"], first["dead_messages"], first["dead_ratio"]) == (300, 300, 1.0)
    assert first["file_bytes_after"] < first["file_bytes"] / 5
    assert (path / "partitions" / "20260922T000000Z" / "g000002" / "data.mdb").stat().st_size == first[
        "file_bytes_after"
    ]
    assert answer["bytes_after"] < answer["bytes_before"]
    assert list((path / "staging").iterdir()) == []
    (origin,) = json_lines_of("dump", path, "--partition", "20260922T000000Z", "--table", "ORIGIN")
    assert [(row["count"], row["ranges"]) for row in origin["value"]["relied_on"]] == [(300, ["0-299"])]
    assert left(path) == 500
    assert run("compact", path, "--min-dead-ratio", "2").exit_code == 2
    assert {row["outcome"] for row in json_of("compact", path)["partitions"]} == {"skipped"}


def test_a_dry_run_changes_nothing(path: Path) -> None:
    """It says what would be dropped; so does the table, of what was."""
    rows = json_of("compact", path, "--dry-run", "--min-dead-ratio", "0.5")["partitions"]
    assert [(row["outcome"], row["dead_messages"]) for row in rows] == [
        ("planned", 300),
        ("skipped", 100),
        ("skipped", 0),
    ]
    assert [child.name for child in path.glob("partitions/*/*")] == ["g000001"] * 3
    shown = run("compact", path, "--min-dead-ratio", "0.9")  # for people
    assert "closed partitions: 3" in shown.stdout
    assert "compacted: 1 partitions" in shown.stderr


def test_beside_a_process_finished_partitions_wait_for_its_next_tick(tmp_path: Path) -> None:
    """Nothing is locked, nothing adopted here; the process takes them over, and goes on."""
    path = tmp_path / "store"
    with WritingProcess(path) as writer:
        for topic in "ab":
            writer.do("subscribe", topic, "one")
            writer.send(topic, "x" * 500, *range(HOUR_MS, HOUR_MS + 20))
        writer.do("advance", 3 * HOUR_MS)
        writer.do("drain", "a", "one")
        result = run("compact", path)
        assert result.exit_code == 0
        assert "1 are taken over by the process that has the store open" in result.stderr
        assert len(list((path / "staging" / "ready").iterdir())) == 1
        writer.do("advance", 0)
        assert not (path / "staging" / "ready").exists()
        assert [child.name for child in path.glob("partitions/*/*")] == ["g000002"]
        assert writer.do("drain", "b", "one") == 20


def test_a_store_that_is_opened_meanwhile_loses_nothing(path: Path) -> None:
    """Opening clears staging/: what was being copied is reported, and the partition is as it was."""

    def opened(done: int, total: int) -> None:
        if done:
            shutil.rmtree(path / "staging", ignore_errors=True)

    report = compact_store(path, progress=opened)
    assert [each.outcome for each in report.partitions] == ["failed", "failed", "skipped"]
    assert "opened meanwhile" in report.failed[0].reason
    assert left(path) == 500


def test_a_partition_that_cannot_be_compacted_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1, and the others are done."""
    calls = []
    stage = stage_generation

    def fail_once(*arguments: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return stage(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(compaction, "stage_generation", fail_once)
    result = run("compact", path)
    assert result.exit_code == 1
    assert "No space left" in result.stdout
    assert "1 could not be compacted" in result.stderr
    assert left(path) == 500


def test_a_damaged_partition_is_reported_and_the_others_are_compacted(path: Path) -> None:
    """Nothing can be said of what is in it, so its figures are 0; with --dry-run it is told as well."""
    first, second, _ = sealed_generations(path)
    with (first.path / "data.mdb").open("r+b") as file:
        file.truncate(8192)
    for arguments, outcomes in (
        (["--dry-run"], ["failed", "planned", "skipped"]),
        ([], ["failed", "adopted", "skipped"]),
    ):
        result = run("compact", path, "--json", *arguments)
        assert result.exit_code == 1
        rows = json.loads(result.stdout)["partitions"]
        assert [row["outcome"] for row in rows] == outcomes
        assert (rows[0]["messages"], rows[0]["dead_bytes"], rows[0]["file_bytes"]) == (0, 0, length_of(first.path))
        assert "8192 bytes" in rows[0]["reason"]
    assert [sealed.generation for sealed in sealed_generations(path)] == [1, 2, 1]
    assert sealed_generations(path)[1].start_ms == second.start_ms


def compact_after(path: Path, change: Callable[[], object], *, dry_run: bool = False) -> CompactionReport:
    """Compact a store in which something is done when all claims have been read and nothing is planned yet."""

    def runner(tasks: Sequence[CompactionTask], progress: Callable[[int], object]) -> Iterator[PartitionAnswer]:
        change()
        return run_here(tasks, progress)

    return compact_store(path, run=runner, dry_run=dry_run)


def delete_all(path: Path) -> None:
    """Open the store, and have it delete everything."""
    with DelayedStore.open(path, StoreConfig(), clock=ManualClock(DAY + 3 * DAY_MS)) as store:
        store.delete_topic("a")
        store.tick()
    assert sealed_generations(path) == []


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_partition_that_is_deleted_meanwhile_is_left_out(path: Path, dry_run: bool) -> None:
    """It is no failure that there is nothing left to compact."""
    assert compact_after(path, lambda: delete_all(path), dry_run=dry_run).partitions == []
    assert not (path / "staging").exists() or list((path / "staging").iterdir()) == []


def test_a_partition_that_is_compacted_meanwhile_is_left_out(path: Path) -> None:
    """Another process has done it; what was skipped is still told."""
    others: list[CompactionReport] = []
    report = compact_after(path, lambda: others.append(compact_store(path)))
    assert [each.outcome for each in others[0].partitions] == ["adopted", "adopted", "skipped"]
    assert [each.outcome for each in report.partitions] == ["skipped"]
    assert left(path) == 500


def test_one_that_goes_after_it_was_copied_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had been planned by then, so it is told: adoption sees that there is another generation."""
    publish = compaction.publish
    others: list[CompactionReport] = []

    def late(store: Path, answer: PartitionAnswer) -> PartitionAnswer:
        if not others:
            monkeypatch.setattr(compaction, "publish", publish)
            others.append(compact_store(path, min_dead_ratio=0.9))
        return publish(store, answer)

    monkeypatch.setattr(compaction, "publish", late)
    monkeypatch.setattr("duelog.tools.compact_store._ADOPTED_AT_ONCE", 1)
    report = compact_store(path, min_dead_ratio=0.9)
    assert [each.outcome for each in others[0].partitions] == ["adopted", "skipped", "skipped"]
    assert [each.outcome for each in report.partitions] == ["failed", "skipped", "skipped"]
    assert report.failed[0].reason
    assert report.failed[0].dead_messages == 300
    assert left(path) == 500


@pytest.mark.parametrize("dry_run", [False, True])
def test_progress_ends_with_all_bytes_dealt_with(path: Path, dry_run: bool) -> None:
    """Twice those of the files, and never back, whether or not they are copied."""
    told: list[tuple[int, int]] = []
    compact_store(path, dry_run=dry_run, progress=lambda done, total: told.append((done, total)))
    total = 2 * sum(sealed.file_bytes for sealed in sealed_generations(path)) if dry_run else told[0][1]
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_all_that_was_handed_over_at_once_is_reported_as_adopted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that tells of its partitions when all are done, and adoption that begins with the first it hears of."""
    monkeypatch.setattr("duelog.tools.compact_store._ADOPTED_AT_ONCE", 1)
    report = compact_store(path, run=lambda tasks, progress: list(run_here(tasks, progress)))
    assert [each.outcome for each in report.partitions] == ["adopted", "adopted", "skipped"]
    assert all(each.file_bytes_after for each in report.partitions[:2])


@pytest.fixture(scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("fleet")
    first = build_half_acknowledged(parent / "a", 200).path
    for name in ("b", "c"):
        shutil.copytree(first, parent / name)
    return parent


@pytest.fixture
def fleet(_built: Path, tmp_path: Path) -> Path:
    """Three stores side by side."""
    return shutil.copytree(_built, tmp_path / "fleet")


def test_an_audit_of_several_stores_has_the_rows_of_each(fleet: Path, tmp_path: Path) -> None:
    """JSON, and Parquet files with a column `store` beside a report of each store."""
    output = tmp_path / "report"
    found = json_of("audit", f"{fleet}/*", "--output", output)
    assert [each["store"] for each in found["stores"]] == [str(fleet / name) for name in "abc"]
    assert found["unreadable"] == []
    table = pq.read_table(output / "partitions.parquet")
    assert table.column_names[0] == "store"
    assert table["store"].unique().to_pylist() == [str(fleet / name) for name in "abc"]
    assert len(list(output.glob("store=*/audit.html"))) == 3


def test_a_table_of_brokers_stands_for_their_stores_and_for_the_copies_of_those_that_name_one(fleet: Path) -> None:
    """Only directories were taken; a broker of neither is named."""
    url = f"file://{fleet}/copy"
    ok("replica", "init", fleet / "b", url)
    ok("backup", fleet / "b")
    shutil.rmtree(fleet / "b")
    table = fleet / "placement.toml"
    table.write_text(f'[brokers.a]\nurl = "pulsar://h:1"\nstore = "a"\n[brokers.b]\nreplica = "{url}"\n')
    found = json_of("audit", table)
    assert [each["store"] for each in found["stores"]] == [str(fleet / "a"), url]
    a, b = (each["partitions"] for each in found["stores"])
    assert len(a) == len(b) > 0
    table.write_text('[brokers.c]\nurl = "pulsar://h:1"\n')
    assert "brokers.c.store" in refused("audit", table)
    assert "brokers.c.store" in refused("compact", table, "--dry-run")
    assert "matches no store" in refused("audit", f"{fleet}/x*")


def test_a_store_that_is_damaged_ends_with_status_2_after_the_others_are_done(fleet: Path, tmp_path: Path) -> None:
    """Its line on standard error has its path and the reason; export leaves no directory of it."""
    (fleet / "b" / "STORE").write_bytes(b"nothing")
    for arguments in (["audit", f"{fleet}/*"], ["compact", f"{fleet}/*"], ["export", f"{fleet}/*", tmp_path / "to"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert str(fleet / "a") in result.stdout
        assert str(fleet / "c") in result.stdout
        assert str(fleet / "b") not in result.stdout
        assert f"{fleet / 'b'}: " in result.stderr
        assert "stores: 3, of which failed: 1" in result.stderr
    listed = json.loads((tmp_path / "to" / "STORES.json").read_text())["stores"]
    assert [("reason" in row) for row in listed] == [False, True, False]
    assert open_export(tmp_path / "to" / listed[2]["directory"]).message_files
    assert len(list((tmp_path / "to").iterdir())) == 3


def test_a_store_that_this_process_has_open_is_named_and_the_others_are_audited(fleet: Path) -> None:
    """It is busy: another process could read it."""
    with DelayedStore.open(fleet / "b"):
        result = run("audit", fleet / "a", fleet / "b", fleet / "c")
    assert result.exit_code == 2
    assert f"{fleet / 'b'}: " in result.stderr
    assert str(fleet / "c") in result.stdout
