"""Tasks on Spark: one answer for each value, whatever becomes of attempts, and errors that say what failed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from duelog.tools.spark.session import SparkFailed
from duelog.tools.spark.tasks import TaskReader, TaskSource, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_each_value_is_answered_once_in_order(spark: SparkSession) -> None:
    """More tasks than cores; none for no values."""
    values = [str(number).encode() for number in range(9)]
    assert run_tasks(spark, lambda value: value * 2, values) == [value * 2 for value in values]
    assert run_tasks(spark, lambda value: value, []) == []


def test_a_worker_that_dies_is_replaced(spark: SparkSession, tmp_path: Path) -> None:
    """The process of each first attempt ends without a word; the second answers."""
    directory = str(tmp_path)

    def dies_once(value: bytes) -> bytes:
        mark = os.path.join(directory, value.decode())
        if not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(9)
        return value

    assert run_tasks(spark, dies_once, [b"a", b"b"]) == [b"a", b"b"]


def test_what_a_task_raises_is_the_error(spark: SparkSession) -> None:
    """After as many attempts as Spark makes; in a line."""

    def refuses(value: bytes) -> bytes:
        raise ValueError(f"cannot do {value!r}")

    with pytest.raises(SparkFailed, match="ValueError: cannot do b'x'") as caught:
        run_tasks(spark, refuses, [b"x"])
    assert "\n" not in str(caught.value)


def test_a_task_gets_its_own_value_and_no_other() -> None:
    """The reader that every task is sent holds none of the values."""
    source = TaskSource({"tasks": ""})
    assert source.options
    reader = TaskReader(bytes, [b"one", b"two"])
    assert len(reader.partitions()) == 2
    assert reader.__getstate__()["_values"] == []
