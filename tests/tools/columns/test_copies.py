"""Tables, audits, exports and compactions of a store's copy are those of the store, and leave the store alone."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("obstore")

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import ReplicaDamaged, ReplicaRefused, ReplicaUnreachable
from duelog.replica.bucket import Bucket
from duelog.replica.copied_store import open_copy
from duelog.tools.arrow import open_tables
from duelog.tools.audit import audit_store
from duelog.tools.columns.main_tables import TABLES, plan_copy, scan_copy
from duelog.tools.columns.scan_rows import Wanted
from duelog.tools.compact_store import compact_store
from duelog.tools.transfer.export_layout import open_export
from duelog.tools.transfer.parquet_export import export_store
from tests.duelog.busy_store import BusyStore
from tests.duelog.replica.faulty import ship, shipping_of
from tests.proof import length
from tests.tools.closed_days import DAY_MS, TOPICS, Built, build_half_acknowledged
from tests.tools.command_line import json_of, run

SEEDS = length("DUELOG_COPIES", 3, 50)

NOT_COPIED = {"generation", "file_bytes", "body_bytes", "dropped"}
"""Columns that compaction changes: a copy keeps the generation before."""


class Copied(NamedTuple):
    """A store of three closed days, half acknowledged, that is open and ships; the directory of its copy."""

    built: Built
    store: DelayedStore
    bucket: Path

    @property
    def url(self) -> str:
        return f"file://{self.bucket}"

    def file(self, label: str) -> Path:
        """The newest file of an environment."""
        return max(self.bucket.glob(f"files/{label}-*.mdb"), key=lambda file: file.stat().st_mtime_ns)


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Copied]:
    """With a manifest, and behind it in the log messages for a new day, and acknowledgements."""
    built = build_half_acknowledged(tmp_path / "store", 600)
    bucket = tmp_path / "bucket"
    config = StoreConfig(replica=f"file://{bucket}")
    with DelayedStore.open(built.path, config, clock=ManualClock(built.now_ms)) as store:
        ship(store)
        store.topic(TOPICS[0]).send(b"later", deliver_at=built.now_ms + 9 * DAY_MS)
        with store.topic(TOPICS[1]).subscribe("slow") as consumer:
            consumer.ack(consumer.receive(20), durable=True)
        ship(store)
        yield Copied(built, store, bucket)


def rows_of(place: Path | str, table: str, as_of_ms: int) -> list[dict[str, Any]]:
    """The rows of a table, but for what is no part of a copy; bodies that were dropped are no part of either."""
    names = [name for name in TABLES[table].names if name not in NOT_COPIED]
    with open_tables(place, as_of_ms=as_of_ms) as tables:
        rows = [row for row in tables.table(table, names).to_pylist() if row.get("state") != "trimming"]
    return sorted(rows, key=lambda row: str(sorted(row.items(), key=str)))


@pytest.mark.series
@pytest.mark.parametrize("seed", range(SEEDS))
def test_rows_of_a_copy_are_those_of_the_store(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions that were made, closed, compacted, deleted behind the manifest; with few manifests and with many."""
    random = Random(seed)
    monkeypatch.setattr("duelog.replica.shipping.MANIFEST_MS", (1 << 50, 1_000, 7_200_000)[seed % 3])
    busy = BusyStore(tmp_path / "store", seed, replica=f"file://{tmp_path / 'bucket'}")
    ship(busy.store)
    for _ in range(50):
        busy.act(random.randrange(1, 4))
        if random.random() < 0.4:
            ship(busy.store)
    ship(busy.store)
    still = shutil.copytree(busy.store.path, tmp_path / "still")
    now_ms = busy.clock.now_ms()
    bodies = {"publish_ms", "payload", "key", "properties", "extra"}
    for table in TABLES:
        there, here = (rows_of(place, table, now_ms) for place in (busy.config.replica or "", still))
        if table == "messages":
            gone = {(row["ledger_id"], row["entry_id"]) for row in here if row["payload"] is None}
            for row in (*there, *here):
                if (row["ledger_id"], row["entry_id"]) in gone:
                    row.update(dict.fromkeys(bodies))
        key = str if table == "messages" else None
        assert sorted(there, key=key) == sorted(here, key=key) if key else there == here, table
    busy.store.close()


def test_an_audit_of_a_copy_is_that_of_the_store_and_names_the_group_it_stands_at(copied: Copied) -> None:
    """But for bytes on disk. The command says the group, too."""
    as_of_ms = copied.built.now_ms
    place = shipping_of(copied.store).state().place - 1
    there = audit_store(Path(copied.url), as_of_ms=as_of_ms)
    copied.store.close()
    here = audit_store(copied.built.path, as_of_ms=as_of_ms)
    assert (there.store, there.group, here.group) == (copied.url, place, None)
    partitions = [[row._replace(file_bytes=0) for row in audit.partitions] for audit in (there, here)]
    assert partitions[0] == partitions[1]
    same: dict[str, Any] = {"store": "", "taken_ms": 0, "group": None, "group_ms": 0, "disk": {}, "partitions": []}
    assert replace(there, **same) == replace(here, **same)
    assert f"of group {place} of the log" in run("audit", copied.url).stdout
    assert json_of("audit", copied.url, "--as-of", str(as_of_ms))["group"] == place


def test_an_export_of_a_copy_is_that_of_the_store(copied: Copied, tmp_path: Path) -> None:
    """Files, rows, and the table of what is pending."""
    there = export_store(Path(copied.url), tmp_path / "there", pending=True)
    copied.store.close()
    here = export_store(copied.built.path, tmp_path / "here", pending=True)
    assert there._replace(bytes=0) == here._replace(bytes=0)
    assert here.rows == len(copied.built.sealed)
    exports = [open_export(tmp_path / name) for name in ("there", "here")]
    found = [[(file.path, one.messages(file).to_pylist()) for file in one.message_files] for one in exports]
    assert found[0] == found[1]
    pending = [one.table("pending").to_pylist() for one in exports]
    assert pending[0] == pending[1]
    assert b"later" in [row["payload"] for row in pending[0]]


def unreachable(names: list[str]) -> None:
    """Refuse to remove anything."""
    raise ReplicaUnreachable("file:///", "is down")


def test_a_compaction_of_a_copy_is_adopted_with_the_next_manifest_of_the_store(copied: Copied) -> None:
    """The store's directory is not touched before; what comes a second time, or is damaged, is thrown away.

    Nothing is compacted again before a manifest has what was adopted. A removal that fails has it fetched once more.
    """
    report = compact_store(Path(copied.url))
    assert [each.outcome for each in report.partitions] == ["waiting"] * 3
    assert all(each.dead_messages for each in report.partitions)
    assert not (copied.built.path / "staging" / "ready").exists()
    assert len(list(copied.bucket.glob("compacted/*"))) == 3
    assert compact_store(Path(copied.url)).partitions == []
    for made in list(copied.bucket.glob("compacted/*")):
        start, generation, _, size, crc = made.name.split("-")
        content = made.read_bytes()
        made.with_name("-".join((start, generation, "again", size, crc))).write_bytes(content)
        made.with_name("-".join((start, generation, "torn", size, crc))).write_bytes(content[:-1] + b"?")
    with patch.object(shipping_of(copied.store).bucket, "delete", unreachable):
        shipping_of(copied.store).make_manifest()
        ship(copied.store)
    assert len(list(copied.bucket.glob("compacted/*"))) == 9
    shipping_of(copied.store).make_manifest()
    ship(copied.store)
    assert list(copied.bucket.glob("compacted/*")) == []
    assert sum(copied.store.tick().adopted for _ in range(9)) == 3
    assert [each.file_bytes_after for each in report.partitions] == [
        path.stat().st_size for path in sorted(copied.built.path.glob("partitions/*/g000002/data.mdb"))
    ]
    assert list(copied.store.check(deep=True)) == []
    ship(copied.store)
    assert compact_store(Path(copied.url)).partitions == []
    shipping_of(copied.store).make_manifest()
    ship(copied.store)
    assert {each.outcome for each in compact_store(Path(copied.url)).partitions} == {"skipped"}


def test_an_object_that_is_damaged_or_missing_is_named(copied: Copied, tmp_path: Path) -> None:
    """Of a partition by who reads it, and the others are read; for a manifest the one before makes up."""
    missing, damaged = (copied.file(str(copied.built.open_due_ms - days * DAY_MS)) for days in (1, 2))
    missing.unlink()
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    named = {f"files/{missing.name} is missing", f"files/{damaged.name} does not match the manifest's checksum"}
    audit = audit_store(Path(copied.url), as_of_ms=copied.built.now_ms)
    unread = [found.message for found in audit.findings if found.code == "unreadable-partition"]
    assert {text.partition(": ")[2] for text in unread} == named
    compacted = compact_store(Path(copied.url))
    assert {each.reason.partition(": ")[2] for each in compacted.failed} == named
    assert [each.outcome for each in compacted.partitions].count("waiting") == 1
    with open_tables(copied.url) as tables, pytest.raises(ReplicaDamaged, match="does not match"):
        tables.table("messages")
    copied.store.topic(TOPICS[0]).subscribe("other").close()
    shipping_of(copied.store).make_manifest()
    ship(copied.store)
    newest = max(copied.bucket.glob("snap/*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    again = audit_store(Path(copied.url), as_of_ms=copied.built.now_ms)
    assert again.group == shipping_of(copied.store).state().place - 1
    assert "other" in [row.subscription for row in again.subscriptions]
    log = max(copied.bucket.glob("log/*"))
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(ReplicaDamaged, match=log.name):
        audit_store(Path(copied.url))


def test_a_machine_of_executors_fetches_main_once_for_all_tasks(
    copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the directory of the Spark application, where tasks leave nothing else."""
    with open_copy(copied.url) as copy:
        tasks = [task for table in ("messages", "pending") for task in plan_copy(copy, table, Wanted())]
    fetched: list[str] = []
    original = Bucket.download

    def download(bucket: Bucket, name: str) -> Iterator[bytes] | None:
        fetched.append(name)
        return original(bucket, name)

    monkeypatch.setattr(Bucket, "download", download)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "scratch"))
    rows = sum(batch.num_rows for task in tasks for batch in scan_copy(task, ["topic"]))
    assert rows > len(copied.built.sealed)
    assert len([name for name in fetched if name.startswith("files/main")]) == 1
    assert len(fetched) == len({*fetched}) > 3
    assert [path.name.startswith("duelog-main-") for path in (tmp_path / "scratch").iterdir()] == [True]


def test_a_copy_of_another_format_is_refused(copied: Copied) -> None:
    """Its STORE says so."""
    store = copied.bucket / "STORE"
    fields = {**json.loads(store.read_bytes()), "format": 9}
    del fields["crc"]
    store.write_bytes(json.dumps({**fields, "crc": crc32(json.dumps(fields, sort_keys=True).encode())}).encode())
    for read in (audit_store, compact_store, lambda place: open_tables(place).__enter__()):
        with pytest.raises(ReplicaRefused, match="is of format 9, expected 1"):
            read(Path(copied.url))


def test_what_is_no_copy_is_refused_and_credentials_are_not_shown(tmp_path: Path) -> None:
    """By every command that takes one; nothing is made."""
    made = tmp_path / "made"
    for command in (("audit",), ("compact",), ("export", made), ("table", "pending", "-o", made / "pending.parquet")):
        name, *rest = command
        answer = run(name, f"file://{tmp_path / 'nothing'}", *rest)
        assert answer.exit_code == 2
        assert "holds no copy of a store: there is no STORE" in answer.stderr
        answer = run(name, "s3://user:not-to-be-shown@bucket/orders", *rest)
        assert answer.exit_code == 2
        assert "expected no credentials" in answer.stderr
        assert "not-to-be-shown" not in answer.stderr
    assert not made.exists()
