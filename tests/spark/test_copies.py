"""Spark reads the copy of a store: each task fetches its partition, and no task touches the store's directory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("obstore")

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.tools.arrow import open_tables
from duelog.tools.audit import audit_store
from duelog.tools.compact_store import compact_store
from duelog.tools.spark.spark_jobs import audit_with_spark, compact_with_spark, export_with_spark
from duelog.tools.transfer.parquet_export import export_store
from tests.duelog.replica.faulty import ship
from tests.tools.closed_days import DAY_MS, TOPICS, build_half_acknowledged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Lost(NamedTuple):
    """The copy of a store whose directory is gone."""

    url: str
    bucket: Path
    now_ms: int


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """With a manifest, and behind it a message for a new day."""
    path = tmp_path_factory.mktemp("copies")
    built = build_half_acknowledged(path / "store", 600)
    url = f"file://{path / 'bucket'}"
    with DelayedStore.open(built.path, StoreConfig(replica=url), clock=ManualClock(built.now_ms)) as store:
        ship(store)
        store.topic(TOPICS[0]).send(b"later", deliver_at=built.now_ms + 9 * DAY_MS)
    shutil.rmtree(built.path)
    return Lost(url, path / "bucket", built.now_ms)


@pytest.mark.parametrize("table", ["messages", "pending", "markers", "subscriptions"])
def test_a_table_of_a_copy_is_the_same_over_spark(spark: SparkSession, lost: Lost, table: str) -> None:
    """Of partitions, of main alone, and of both."""
    frame = spark.read.format("duelog").option("table", table).option("as_of_ms", lost.now_ms).load(lost.url)
    with open_tables(lost.url, as_of_ms=lost.now_ms) as tables:
        expected = tables.table(table).to_pylist()
    assert sorted(map(str, frame.toArrow().to_pylist())) == sorted(map(str, expected))
    assert expected


def test_jobs_on_a_copy_are_the_same_over_spark(spark: SparkSession, lost: Lost, tmp_path: Path) -> None:
    """Audit, export and compaction, whose results lie in the bucket."""
    store = Path(lost.url)
    audit = audit_with_spark(store, spark=spark, as_of_ms=lost.now_ms)
    assert audit.group
    assert replace(audit_store(store, as_of_ms=lost.now_ms), taken_ms=audit.taken_ms) == audit
    there = export_with_spark(store, tmp_path / "spark", spark=spark)
    assert there._replace(bytes=0) == export_store(store, tmp_path / "plain")._replace(bytes=0)
    here = compact_store(store)
    shutil.rmtree(lost.bucket / "compacted")
    assert compact_store(store, run=lambda tasks, progress: compact_with_spark(tasks, spark=spark)) == here
    assert [each.outcome for each in here.partitions] == ["waiting"] * 3
    assert len(list(lost.bucket.glob("compacted/*"))) == 3


def test_several_copies_and_stores_are_read_together(spark: SparkSession, lost: Lost) -> None:
    """A copy that cannot be read is a row with its reason."""
    frame = spark.read.format("duelog").schema("store string, reason string").load([lost.url, lost.url + "-not"])
    found = {row["store"]: row["reason"] for row in frame.distinct().collect()}
    assert found[lost.url] is None
    assert "there is no STORE" in found[lost.url + "-not"]
