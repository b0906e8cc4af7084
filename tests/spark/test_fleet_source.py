"""Several stores in one DataFrame: a column says of which store a row is, and one that is damaged hides no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import EqualTo, In

from duelog.tools.columns.main_tables import SMALL, TABLES
from duelog.tools.columns.sealed import sealed_generations
from duelog.tools.spark.session import SparkFailed, spark_errors
from duelog.tools.spark.source import PushingDuelogReader, source_schema
from tests.spark.test_source import ordered, plain_rows, rows_of
from tests.tools.closed_days import Built, build

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> list[Built]:
    """Three stores of two days each, of which one is closed."""
    parent = tmp_path_factory.mktemp("fleet")
    return [build(parent / name, messages=200, days=2, seed=seed) for seed, name in enumerate(("a", "b", "c"))]


@pytest.fixture
def damaged(fleet: list[Built], tmp_path: Path) -> Path:
    """Copies of the three; the main environment of `b` is gone."""
    for built in fleet:
        shutil.copytree(built.path, tmp_path / built.path.name)
    (tmp_path / "b" / "main" / "data.mdb").write_bytes(b"nothing")
    return tmp_path


def load(spark: SparkSession, given: str | list[str], schema: str | None = None, **options: str) -> DataFrame:
    """A table of several stores."""
    reader = spark.read.format("duelog").options(**options)
    return (reader if schema is None else reader.schema(schema)).load(given)


def test_rows_of_several_stores_say_of_which_store_they_are(spark: SparkSession, fleet: list[Built]) -> None:
    """By a list and by a glob: every column of every message, and every small table."""
    expected = ordered([{"store": str(each.path), **row} for each in fleet for row in plain_rows(each.path)])
    assert rows_of(load(spark, [str(each.path) for each in fleet])) == expected
    assert rows_of(load(spark, f"{fleet[0].path.parent}/*")) == expected
    rows = [
        {"store": str(each.path), **row, "reason": None}
        for each in fleet
        for row in plain_rows(each.path, "partitions")
    ]
    assert rows_of(load(spark, f"{fleet[0].path.parent}/*", table="partitions")) == ordered(rows)


def test_a_damaged_store_is_a_row_with_its_reason_and_hides_no_other(
    spark: SparkSession, fleet: list[Built], damaged: Path
) -> None:
    """In messages, markers and a small table; as an error, with the store's name, where that is asked for."""
    for table in ("messages", "subscriptions"):
        frame = load(spark, f"{damaged}/*", table=table)
        (left,) = frame.filter("topic is null").collect()
        assert left.store == str(damaged / "b")
        assert left.reason
        assert {row.store for row in frame.select("store").collect()} == {str(damaged / name) for name in "abc"}
    with pytest.raises(SparkFailed, match=str(damaged / "b")), spark_errors():
        load(spark, f"{damaged}/*", table="markers", unreadable="error").count()
    sealed = [len(each.sealed) for each in fleet]
    assert load(spark, f"{damaged}/*").filter("topic is not null").count() == sealed[0] + sealed[2]


def test_a_partition_that_goes_while_it_is_read_is_a_row_of_its_store(
    spark: SparkSession, fleet: list[Built], damaged: Path
) -> None:
    """What other tasks read is there; a single store raises in this case."""
    options = {"paths": f'["{damaged / "a"}", "{damaged / "c"}"]'}
    reader = PushingDuelogReader("messages", options, ["store", "due_ms", "reason"])
    plan = reader.partitions()
    shutil.rmtree(sealed_generations(damaged / "a")[0].path)
    rows = [row for part in plan for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["store"] for row in rows if row["reason"]] == [str(damaged / "a")]
    assert "deleted or replaced" in next(row["reason"] for row in rows if row["reason"])
    assert sum(row["store"] == str(damaged / "c") for row in rows) == len(fleet[2].sealed)


def test_a_filter_of_the_store_leaves_out_the_others_before_they_are_opened(
    spark: SparkSession, fleet: list[Built], damaged: Path
) -> None:
    """A damaged store that the filter leaves out is not looked at; narrow schemas read no bodies."""
    frame = load(spark, f"{damaged}/*", "store string", unreadable="error").filter(f"store = '{damaged / 'c'}'")
    assert frame.count() == len(fleet[2].sealed)
    reader = PushingDuelogReader("messages", {"path": f"{damaged}/*"}, ["store"])
    condition = In(("store",), (str(damaged / "a"), "none"))
    assert list(reader.pushFilters([condition, EqualTo(("topic",), "x")])) == [condition, EqualTo(("topic",), "x")]
    assert reader.stores == [damaged / "a"]
    assert reader.partitions() == []


def test_every_table_of_several_stores_has_store_and_reason() -> None:
    """First the store; a table that has no reason of its own gets one."""
    for table in TABLES:
        names = source_schema(table, True).names
        assert names[0] == "store"
        assert names.count("reason") == 1
        assert source_schema(table, False) == TABLES[table]
    assert set(SMALL) < set(TABLES)
