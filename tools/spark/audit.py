"""The audit over Spark: its function of one partition, called by a task for each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..audit import Audit, audit_store
from ..audit.checking.partition_audit import audit_packed
from ..audit.survey import Runner
from .session import make_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def spark_runner(spark: SparkSession) -> Runner:
    """What runs the tasks of an audit on the workers of a session."""

    from .tasks import run_tasks

    def run(tasks: list[bytes]) -> Iterable[bytes]:
        return run_tasks(spark, audit_packed, tasks)

    return run


def audit_with_spark(path: Path, *, master: str | None = None, spark: SparkSession | None = None, **how: Any) -> Audit:
    """The audit of a store as `audit_store` makes it, with `how` for its other keywords.

    spark: a session to use; else one is made as `master` says, and stopped. Facts are read, and findings put together,
    in this process. Raises SparkUnavailable, SparkFailed, and what `audit_store` raises.
    """
    session = spark or make_session(master, name="duelog audit")
    try:
        return audit_store(path, run=spark_runner(session), **how)
    finally:
        if spark is None:
            session.stop()
