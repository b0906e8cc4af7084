"""Tasks on Spark: one answer for each value whatever becomes of attempts; the audit by tasks is the audit in a loop."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.functions import expr

from duelog.tools.audit import audit_store
from duelog.tools.spark.session import SparkFailed
from duelog.tools.spark.spark_jobs import audit_fleet, audit_with_spark, compact_fleet, export_fleet, export_with_spark
from duelog.tools.spark.tasks import TaskReader, TaskSource, run_tasks
from duelog.tools.transfer.export_layout import open_export
from duelog.tools.transfer.parquet_export import export_store
from tests.audit.histories import build, damage
from tests.audit.planting import PLANTS, Victim
from tests.tools.closed_days import Built, build_half_acknowledged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_damaged_store_audited_by_tasks(spark: SparkSession, tmp_path: Path) -> None:
    """All kinds of damage at once, in an order from a fixed seed; the same tables without Spark, but for the time."""
    victim = Victim(tmp_path / "store", 3)
    as_of_ms = build(victim.path)
    expected = [want for plant in random.Random(3).sample(PLANTS, len(PLANTS)) for want in plant(victim)]
    there = audit_with_spark(victim.path, spark=spark, as_of_ms=as_of_ms, patience_s=0)
    assert replace(audit_store(victim.path, as_of_ms=as_of_ms, patience_s=0), taken_ms=there.taken_ms) == there
    assert sorted(want.code for want in expected) == sorted(found.code for found in damage(there.findings))


def content(path: Path) -> list[tuple[str, list[dict[str, object]]]]:
    """Every file of messages and its rows."""
    export = open_export(path)
    return [(file.path, export.messages(file).to_pylist()) for file in export.message_files]


def test_tasks_write_the_same_files(spark: SparkSession, built: Built, tmp_path: Path) -> None:
    """Rows and places; and Spark itself reads them, topic and day as columns."""
    plain = export_store(built.path, tmp_path / "plain")
    over_spark = export_with_spark(built.path, tmp_path / "spark", spark=spark)
    assert over_spark._replace(bytes=0) == plain._replace(bytes=0)
    assert content(tmp_path / "spark") == content(tmp_path / "plain")
    frame = spark.read.parquet(str(tmp_path / "spark" / "messages"))
    # Spark takes each encoded byte of a path for a character: docs/spark.md.
    frame = frame.withColumn("topic", expr("decode(encode(topic, 'ISO-8859-1'), 'UTF-8')"))
    counts = {(row.topic, str(row.day)): row["count"] for row in frame.groupBy("topic", "day").count().collect()}
    expected = {(file.topic, file.day): file.rows for file in open_export(tmp_path / "plain").message_files}
    assert counts == expected


@pytest.fixture
def stores(tmp_path: Path) -> list[Path]:
    """Three stores of three closed days; that in the middle has lost its main environment."""
    first = build_half_acknowledged(tmp_path / "a", 300).path
    for name in ("b", "c"):
        shutil.copytree(first, tmp_path / name)
    shutil.rmtree(tmp_path / "b" / "main")
    return [tmp_path / name for name in "abc"]


def test_jobs_over_several_stores_name_the_damaged_one_and_finish_the_others(
    spark: SparkSession, stores: list[Path], tmp_path: Path
) -> None:
    """Several stores at a time in one session; an export of each, and a file that says which there are."""
    audits = list(audit_fleet(stores, session=spark, verify=False, as_of_ms=1_790_400_000_000))
    assert [each.store for each in audits] == stores
    for audit, store in ((audits[0].result, stores[0]), (audits[2].result, stores[2])):
        assert audit is not None
        here = audit_store(store, verify=False, as_of_ms=1_790_400_000_000)
        assert audit == replace(here, taken_ms=audit.taken_ms)
    assert audits[1].result is None
    exports = list(export_fleet(stores, dest=tmp_path / "archive", session=spark))
    listed = json.loads((tmp_path / "archive" / "STORES.json").read_text())["stores"]
    assert [row["store"] for row in listed] == [str(store) for store in stores]
    for row, outcome in zip(listed, exports, strict=True):
        if outcome.result is None:
            assert row["reason"] == outcome.reason != ""
        else:
            export = open_export(tmp_path / "archive" / row["directory"])
            assert sum(file.rows for file in export.message_files) == outcome.result.rows > 0
    assert [path.name for path in (tmp_path / "archive").iterdir() if path.is_dir()] != []
    assert len([path for path in (tmp_path / "archive").iterdir() if path.is_dir()]) == 2
    compacted = [each.result for each in compact_fleet(stores, session=spark)]
    assert compacted[1] is None
    for report in (compacted[0], compacted[2]):
        assert report is not None
        assert {each.outcome for each in report.partitions} == {"adopted"}


def test_each_value_is_answered_once_in_order(spark: SparkSession) -> None:
    """More tasks than cores; none for no values."""
    values = [str(number).encode() for number in range(9)]
    assert run_tasks(spark, lambda value: value * 2, values) == [value * 2 for value in values]
    assert run_tasks(spark, lambda value: value, []) == []


def test_a_worker_that_dies_is_replaced(spark: SparkSession, tmp_path: Path) -> None:
    """The process of each first attempt ends without a word; the second answers."""
    directory = str(tmp_path)

    def dies_once(value: bytes) -> bytes:
        mark = os.path.join(directory, value.decode())
        if not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(9)
        return value

    assert run_tasks(spark, dies_once, [b"a", b"b"]) == [b"a", b"b"]


def test_what_a_task_raises_is_the_error(spark: SparkSession) -> None:
    """After as many attempts as Spark makes; in a line."""

    def refuses(value: bytes) -> bytes:
        raise ValueError(f"cannot do {value!r}")

    with pytest.raises(SparkFailed, match="ValueError: cannot do b'x'") as caught:
        run_tasks(spark, refuses, [b"x"])
    assert "\n" not in str(caught.value)


def test_a_task_gets_its_own_value_and_no_other() -> None:
    """The reader that every task is sent holds none of the values."""
    source = TaskSource({"tasks": ""})
    assert source.options
    reader = TaskReader(bytes, [b"one", b"two"])
    assert len(reader.partitions()) == 2
    assert reader.__getstate__()["_values"] == []
