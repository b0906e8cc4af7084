"""The audit by Spark's tasks against the same audit in a loop: every row of every table."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from duelog.tools.audit import Audit, audit_store
from duelog.tools.audit.tables import TABLES
from duelog.tools.spark.audit import spark_runner
from tests.audit.histories import build
from tests.audit.planting import PLANTS, Expected, Victim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def tables(audit: Audit) -> dict[str, object]:
    """The rows of every table."""
    return {name: getattr(audit, name) for name in TABLES}


def test_the_audit_of_a_damaged_store_is_the_same_row_by_row_with_spark(spark: SparkSession, tmp_path: Path) -> None:
    """All kinds of damage at once, in an order from a fixed seed."""
    now_ms = build(tmp_path / "store")
    victim = Victim(tmp_path / "store", 3)
    plants = list(PLANTS)
    random.Random(3).shuffle(plants)
    expected: list[Expected] = [want for plant in plants for want in plant(victim)]
    here = audit_store(victim.path, as_of_ms=now_ms, patience_s=0)
    there = audit_store(victim.path, as_of_ms=now_ms, patience_s=0, run=spark_runner(spark))
    assert tables(there) == tables(here)
    assert sorted(want.code for want in expected) == sorted(found.code for found in there.findings)


def test_the_audit_of_a_healthy_store_is_the_same_with_spark(spark: SparkSession, tmp_path: Path) -> None:
    """Headers only as well as whole."""
    now_ms = build(tmp_path / "store", seed=8)
    for verify in (True, False):
        here = audit_store(tmp_path / "store", as_of_ms=now_ms, verify=verify)
        there = audit_store(tmp_path / "store", as_of_ms=now_ms, verify=verify, run=spark_runner(spark))
        assert (tables(there), there.findings) == (tables(here), [])
