"""Export over Spark writes what export without it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.functions import expr

from duelog.tools.spark.spark_jobs import export_with_spark
from duelog.tools.transfer.export_layout import open_export
from duelog.tools.transfer.parquet_export import export_store
from tests.tools.closed_days import Built

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
