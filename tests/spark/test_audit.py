"""The audit over Spark as the command calls it; that it agrees on damage is in test_audit_agrees.py."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from duelog.tools.audit import Audit, audit_store
from duelog.tools.spark.audit import audit_with_spark
from tests.tools.closed_days import Built

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def content(audit: Audit) -> dict[str, Any]:
    """All of an audit but when it was made."""
    return {name: value for name, value in asdict(audit).items() if name != "taken_ms"}


def test_a_healthy_store_audited_by_tasks(spark: SparkSession, built: Built) -> None:
    """No finding, and the same tables as without Spark."""
    over_spark = audit_with_spark(built.path, spark=spark, as_of_ms=built.now_ms)
    assert over_spark.findings == []
    assert content(over_spark) == content(audit_store(built.path, as_of_ms=built.now_ms))
