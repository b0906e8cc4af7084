"""Export over Spark: the slices of sealed partitions are written by tasks, named by the driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..transfer.parquet_export import Exported, export_packed, export_store
from .session import session_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def export_with_spark(
    store: Path, dest: Path, *, master: str | None = None, spark: SparkSession | None = None, **how: Any
) -> Exported:
    """What `export_store` does, with `how` for its other keywords; all tasks must reach `store` and `dest`.

    spark: a session to use; else one is made as `master` says, and stopped. Raises SparkUnavailable, SparkFailed.
    """
    with session_for("duelog export", spark, master) as session:
        from .tasks import run_tasks

        return export_store(store, dest, run=lambda tasks: run_tasks(session, export_packed, tasks), **how)
