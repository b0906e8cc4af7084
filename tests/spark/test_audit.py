"""The audit by Spark's tasks against the same audit in a loop: every row of every table."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from duelog.tools.audit import Audit, audit_store
from duelog.tools.spark.spark_jobs import audit_with_spark
from tests.audit.histories import build, damage
from tests.audit.planting import PLANTS, Victim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A healthy store of many partitions, and the time at its end."""
    path = tmp_path_factory.mktemp("audit") / "store"
    return path, build(path)


def both(spark: SparkSession, path: Path, as_of_ms: int, verify: bool = True) -> tuple[Audit, Audit]:
    """The audit with Spark and without, but for when each was made."""
    there = audit_with_spark(path, spark=spark, as_of_ms=as_of_ms, verify=verify, patience_s=0)
    return there, replace(audit_store(path, as_of_ms=as_of_ms, verify=verify, patience_s=0), taken_ms=there.taken_ms)


@pytest.mark.parametrize("verify", [True, False], ids=["whole", "headers"])
def test_a_healthy_store_audited_by_tasks(spark: SparkSession, healthy: tuple[Path, int], verify: bool) -> None:
    """No finding, and the same tables as without Spark."""
    there, here = both(spark, *healthy, verify)
    assert there == here
    assert damage(there.findings) == []


def test_a_damaged_store_audited_by_tasks(spark: SparkSession, healthy: tuple[Path, int], tmp_path: Path) -> None:
    """All kinds of damage at once, in an order from a fixed seed."""
    victim = Victim(shutil.copytree(healthy[0], tmp_path / "store"), 3)
    expected = [want for plant in random.Random(3).sample(PLANTS, len(PLANTS)) for want in plant(victim)]
    there, here = both(spark, victim.path, healthy[1])
    assert there == here
    assert sorted(want.code for want in expected) == sorted(found.code for found in damage(there.findings))
