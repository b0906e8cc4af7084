"""The audit over Spark finds what the audit without it does, row by row."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from duelog.tools.audit import Audit, audit_store
from duelog.tools.spark.audit import audit_with_spark
from tests.audit.histories import build as build_history
from tests.audit.planting import PLANTS, Victim
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


def test_damage_is_found_by_tasks_as_without_them(spark: SparkSession, tmp_path: Path) -> None:
    """Every kind at once: the same rows of every table, in the same order."""
    now_ms = build_history(tmp_path / "store")
    victim = Victim(tmp_path / "store", 7)
    expected = [want for plant in PLANTS for want in plant(victim)]
    plain = audit_store(victim.path, as_of_ms=now_ms, patience_s=0)
    assert len(plain.findings) == len(expected)
    assert content(audit_with_spark(victim.path, spark=spark, as_of_ms=now_ms, patience_s=0)) == content(plain)
