"""Audit, export and compaction of several stores on Spark are those of each store without it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from duelog.tools.audit import audit_store
from duelog.tools.spark.spark_jobs import audit_fleet, compact_fleet, export_fleet
from duelog.tools.transfer.export_layout import open_export
from tests.tools.closed_days import build_half_acknowledged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    exports = list(export_fleet(stores, tmp_path / "archive", session=spark))
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
