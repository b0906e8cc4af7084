"""The audit over Spark: its function of one partition, called by a task for each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..audit import Audit, audit_store
from ..audit.partition_audit import audit_partition
from .session import session_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def audit_with_spark(path: Path, *, master: str | None = None, spark: SparkSession | None = None, **how: Any) -> Audit:
    """The audit of a store as `audit_store` makes it, with `how` for its other keywords.

    spark: a session to use; else one is made as `master` says, and stopped. Facts are read, and findings put together,
    in this process. Raises SparkUnavailable, SparkFailed, and what `audit_store` raises.
    """
    with session_for("duelog audit", spark, master) as session:
        from .tasks import run_tasks

        return audit_store(path, run=lambda tasks: run_tasks(session, audit_partition, tasks), **how)
