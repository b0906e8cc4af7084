"""Spark over sealed partitions: sessions, the data source `duelog`, and the jobs that spread over its tasks.

Needs the extra `duelog[spark]`; importing this package does not import PySpark, using it does. Every job is a plain
function of one generation (scan_arrow.py, parquet_export.py, cleanup/compaction.py, tools/audit) that Spark
only spreads over cores and machines. DataFrames alone, no RDD: all of it works over Spark Connect too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make the data source `duelog` known to a session. To be repeated after its filter pushdown is switched."""
    from .source import register as register_source

    register_source(spark)
