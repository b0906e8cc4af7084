"""The data source `duelog`, of one store and of several: its rows are those of plain scans, whatever is damaged."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, IsNotNull, LessThan
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.partitions.timespan import directory_name
from duelog.store.errors import InvalidArgument
from duelog.tools.arrow import open_tables
from duelog.tools.audit import audit_store
from duelog.tools.columns.main_tables import OF_MESSAGES, SMALL, TABLES
from duelog.tools.columns.scan_rows import Wanted
from duelog.tools.columns.sealed import sealed_generations
from duelog.tools.compact_store import compact_store
from duelog.tools.spark import register
from duelog.tools.spark.session import SparkFailed, spark_errors
from duelog.tools.spark.source import PUSHDOWN, PushingDuelogReader, PushingDuelogSource, source_schema, spark_schema
from duelog.tools.spark.spark_jobs import audit_with_spark, compact_with_spark, export_with_spark
from duelog.tools.transfer.parquet_export import export_store
from tests.conftest import HOUR_MS
from tests.duelog.replica.faulty import ship
from tests.duelog.writing_process import WritingProcess
from tests.tools.arrow.every_table import fill
from tests.tools.closed_days import DAY_MS, FIRST_MS, TOPICS, Built, build, build_half_acknowledged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession


def load(spark: SparkSession, given: Path | str | list[str], schema: str | None = None, **options: object) -> DataFrame:
    """A table of a store, or of several."""
    reader = spark.read.format("duelog").options(**{name: str(value) for name, value in options.items()})
    reader = reader if schema is None else reader.schema(schema)
    return reader.load(given if isinstance(given, list) else str(given))


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame in some order that does not depend on tasks."""
    return ordered([row.asDict() for row in frame.collect()])


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by their text, maps as maps and payloads as bytes."""
    plain = [
        {
            name: bytes(value) if isinstance(value, bytearray) else dict(value) if name == "properties" else value
            for name, value in row.items()
        }
        for row in rows
    ]
    return sorted(plain, key=str)


def met(frame: DataFrame, filters: list[str]) -> list[list[dict[str, Any]]]:
    """The rows that meet each of some conditions, which Spark evaluates as columns: none is handed to the source."""
    rows = frame.selectExpr("*", *(f"({each}) as filter_{at}" for at, each in enumerate(filters))).collect()
    return [ordered([{name: row[name] for name in frame.columns} for row in rows if row[f"filter_{at}"]])
            for at in range(len(filters))]  # fmt: skip


def plain_rows(store: Path, table: str = "messages") -> list[dict[str, Any]]:
    """A table of a store without Spark."""
    with open_tables(store, pending=False) as tables:
        return ordered(tables.table(table).to_pylist())


@pytest.fixture
def without_pushdown(spark: SparkSession) -> Iterator[SparkSession]:
    """The session with Spark's default: no filter is handed to a data source."""
    spark.conf.set(PUSHDOWN, "false")
    register(spark)
    yield spark
    spark.conf.set(PUSHDOWN, "true")
    register(spark)


def test_every_table_is_that_of_the_arrow_extra(spark: SparkSession, tmp_path: Path) -> None:
    """Whichever way they are read: the same rows, and columns of the same types, in however many tasks.

    Of those that one transaction reads, two that have all types of columns.
    """
    made = fill(tmp_path / "store")
    with open_tables(made.path, as_of_ms=made.now_ms) as tables:
        expected = {name: tables.table(name) for name in (*OF_MESSAGES, "markers", "frontiers", "dead_letters")}
    for name, table in expected.items():
        frame = load(spark, made.path, table=name, slice_entries=150, as_of_ms=made.now_ms)
        assert frame.schema == spark_schema(table.schema)
        assert rows_of(frame) == ordered(table.to_pylist())
    filters = [f"topic = '{TOPICS[1]}'", f"due_ms < {made.now_ms + HOUR_MS}", "partition is null"]
    pushed = [rows_of(load(spark, made.path, table="pending", as_of_ms=made.now_ms).filter(each)) for each in filters]
    assert pushed == met(load(spark, made.path, table="pending", as_of_ms=made.now_ms), filters)
    assert all(pushed)


def test_a_narrow_schema_reads_no_body(spark: SparkSession, built: Built, tmp_path: Path) -> None:
    """Payloads that are damaged on disk do not show in a scan of headers, and do in one of everything."""
    store = shutil.copytree(built.path, tmp_path / "store")
    victim = next(sent for sent in built.sealed if len(sent.payload) == 3_000)
    for sealed in sealed_generations(store):
        path = sealed.path / "data.mdb"
        path.write_bytes(path.read_bytes().replace(victim.payload, bytes(3_000)))
    narrow = load(spark, store, "due_ms bigint, topic string")
    assert sorted(row.due_ms for row in narrow.collect()) == sorted(sent.due_ms for sent in built.sealed)
    damaged = load(spark, store).filter("reason is not null").collect()
    assert [(row.ledger_id, row.entry_id, row.payload) for row in damaged] == [
        (victim.ledger_id, victim.entry_id, None)
    ]


FILTERS = [
    f"topic = '{TOPICS[1]}'",
    f"topic in ('{TOPICS[0]}', '{TOPICS[2]}', 'none')",
    f"due_ms >= {FIRST_MS + 3_600_000} and due_ms < {FIRST_MS + DAY_MS + 7_200_000}",
    f"due_ms > {FIRST_MS + 3_600_000} and due_ms <= {FIRST_MS + DAY_MS + 7_200_000}",
    f"due_ms = {FIRST_MS + 7_200_000}",
    f"due_ms in ({FIRST_MS}, {FIRST_MS + 7_200_000}, {FIRST_MS + DAY_MS})",
    "due_ms >= 0",
    f"partition = '{directory_name(FIRST_MS + DAY_MS)}' and key is not null",
    f"topic = '{TOPICS[0]}' or due_ms = {FIRST_MS}",
    f"not (topic = '{TOPICS[0]}')",
    "topic = 'none'",
    f"due_ms < {FIRST_MS} and due_ms > {FIRST_MS}",
]


def test_filters_give_the_same_rows_pushed_down_or_not(spark: SparkSession, built: Built) -> None:
    """Each kind of filter: what Spark hands on, what it keeps, and what nothing is left of."""
    columns = "topic string, partition string, due_ms bigint, key string, entry_id bigint"
    pushed = [rows_of(load(spark, built.path, columns).filter(each)) for each in FILTERS]
    assert pushed == met(load(spark, built.path, columns), FILTERS)
    assert [bool(rows) for rows in pushed] == [True] * 10 + [False] * 2
    of_markers = [FILTERS[0], FILTERS[2], FILTERS[6]]
    pushed = [rows_of(load(spark, built.path, table="markers").filter(each)) for each in of_markers]
    assert pushed == met(load(spark, built.path, table="markers"), of_markers)
    partitions = load(spark, built.path, table="partitions").filter(FILTERS[7].partition(" and ")[0])
    assert [row.start_ms for row in partitions.collect()] == [FIRST_MS + DAY_MS]


def test_what_filters_leave_out_is_not_planned(built: Built) -> None:
    """A day and a topic are one task with one log; Spark need not look at the rows again."""
    reader = PushingDuelogReader("messages", {"path": str(built.path)}, ["due_ms"])
    null = IsNotNull(("due_ms",))
    other = EqualTo(("key",), "x")
    day = [GreaterThanOrEqual(("due_ms",), FIRST_MS + DAY_MS), LessThan(("due_ms",), FIRST_MS + 2 * DAY_MS)]
    assert list(reader.pushFilters([null, other, EqualTo(("topic",), TOPICS[0]), *day])) == [null, other]
    (partition,) = reader.partitions()
    assert partition.value.planned.sealed.start_ms == FIRST_MS + DAY_MS
    assert [each.topic for each in partition.value.planned.ranges] == [TOPICS[0]]


def test_options_prune_where_filters_are_not_handed_on(without_pushdown: SparkSession, built: Built) -> None:
    """Spark's default is to keep its filters; the source that is registered then defines no pushFilters."""
    wanted = Wanted.of([TOPICS[0], TOPICS[1]], None, FIRST_MS + 3_600_000, FIRST_MS + DAY_MS)
    frame = load(
        without_pushdown,
        built.path,
        topic=f"{TOPICS[0]}, shop/mail/reminders",
        due_from_ms=wanted.due_from_ms,
        due_until_ms=wanted.due_until_ms,
    )
    expected = [
        row
        for row in plain_rows(built.path)
        if row["topic"] in TOPICS[:2] and wanted.due_from_ms <= row["due_ms"] < wanted.due_until_ms
    ]
    assert rows_of(frame) == expected
    assert rows_of(frame.filter(f"topic = '{TOPICS[0]}'")) == [row for row in expected if row["topic"] == TOPICS[0]]
    days = load(without_pushdown, built.path, partition=directory_name(FIRST_MS), table="partitions").collect()
    assert [row.start_ms for row in days] == [FIRST_MS]


def test_a_frame_that_was_filtered_once_still_has_all_of_its_rows(without_pushdown: SparkSession, built: Built) -> None:
    """Where Spark hands on filters it keeps what was planned for the first; a session of ours has that off."""
    frame = load(without_pushdown, built.path, "topic string, due_ms bigint")
    for topic in TOPICS:
        assert frame.filter(f"topic = '{topic}'").count() == sum(sent.topic == topic for sent in built.sealed)
    assert frame.count() == len(built.sealed)
    both = frame.filter(f"topic = '{TOPICS[0]}'").union(frame.filter(f"topic = '{TOPICS[1]}'"))
    assert both.count() == sum(sent.topic in TOPICS[:2] for sent in built.sealed)


def test_a_store_that_a_process_has_open_can_be_read(spark: SparkSession, tmp_path: Path) -> None:
    """A closed partition is there, each time it is looked at; an open one is not."""
    store = tmp_path / "store"
    with WritingProcess(store) as process:
        process.do("subscribe", "t", "slow")
        process.send("t", "a", 10, 20, HOUR_MS, 5 * HOUR_MS)
        assert load(spark, store).count() == 0
        process.do("advance", HOUR_MS)
        assert load(spark, store).count() == 2
        assert load(spark, store, table="markers").count() == 3
        process.do("advance", HOUR_MS)
        assert [row.payload for row in load(spark, store).collect()] == [b"a"] * 3


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (None, {"table": "nothing"}, "table='nothing'"),
        (StructField("due", LongType()), {}, "schema='due'"),
        (StructField("due_ms", IntegerType()), {}, "is bigint"),
        (None, {"due_from_ms": "now"}, "due_from_ms='now'"),
        (None, {"partition": "today"}, "name='today'"),
        (None, {"topics": "t"}, "option='topics'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    built: Built, column: StructField | None, options: dict[str, str], message: str
) -> None:
    """The error says which option or column, and what there is."""
    source = PushingDuelogSource({"path": str(built.path), **options})
    with pytest.raises(InvalidArgument, match=message):
        source.reader(StructType([column]) if column else source.schema())


def test_a_generation_that_goes_between_planning_and_reading_is_an_error(
    spark: SparkSession, built: Built, tmp_path: Path
) -> None:
    """Rows are never silently missing."""
    store = shutil.copytree(built.path, tmp_path / "store")
    reader = PushingDuelogReader("messages", {"path": str(store)}, ["due_ms"])
    plan = reader.partitions()
    shutil.rmtree(sealed_generations(store)[0].path)
    with pytest.raises(Exception, match="deleted or replaced"):
        list(reader.read(plan[0]))
    with pytest.raises(SparkFailed, match="missing"), spark_errors():
        load(spark, store).count()


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
    """The rows of other tasks are there; a single store raises in this case."""
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


pytest.importorskip("pyspark")


pytest.importorskip("obstore")


if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Lost(NamedTuple):
    """The copy of a store whose directory is gone."""

    url: str
    bucket: Path
    now_ms: int


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """With a manifest, and behind it a message for a new day."""
    path = tmp_path_factory.mktemp("copies")
    built = build_half_acknowledged(path / "store", 600)
    url = f"file://{path / 'bucket'}"
    with DelayedStore.open(built.path, StoreConfig(replica=url), clock=ManualClock(built.now_ms)) as store:
        ship(store)
        store.topic(TOPICS[0]).send(b"later", deliver_at=built.now_ms + 9 * DAY_MS)
    shutil.rmtree(built.path)
    return Lost(url, path / "bucket", built.now_ms)


@pytest.mark.parametrize("table", ["messages", "pending", "markers", "subscriptions"])
def test_a_table_of_a_copy_is_the_same_over_spark(spark: SparkSession, lost: Lost, table: str) -> None:
    """Of partitions, of main alone, and of both."""
    frame = spark.read.format("duelog").option("table", table).option("as_of_ms", lost.now_ms).load(lost.url)
    with open_tables(lost.url, as_of_ms=lost.now_ms) as tables:
        expected = tables.table(table).to_pylist()
    assert sorted(map(str, frame.toArrow().to_pylist())) == sorted(map(str, expected))
    assert expected


def test_jobs_on_a_copy_are_the_same_over_spark(spark: SparkSession, lost: Lost, tmp_path: Path) -> None:
    """Audit, export and compaction, whose results lie in the bucket."""
    store = Path(lost.url)
    audit = audit_with_spark(store, spark=spark, as_of_ms=lost.now_ms)
    assert audit.group
    assert replace(audit_store(store, as_of_ms=lost.now_ms), taken_ms=audit.taken_ms) == audit
    there = export_with_spark(store, tmp_path / "spark", spark=spark)
    assert there._replace(bytes=0) == export_store(store, tmp_path / "plain")._replace(bytes=0)
    here = compact_store(store)
    shutil.rmtree(lost.bucket / "compacted")
    assert compact_store(store, run=lambda tasks, progress: compact_with_spark(tasks, spark=spark)) == here
    assert [each.outcome for each in here.partitions] == ["waiting"] * 3
    assert len(list(lost.bucket.glob("compacted/*"))) == 3


def test_several_copies_and_stores_are_read_together(spark: SparkSession, lost: Lost) -> None:
    """A copy that cannot be read is a row with its reason."""
    frame = spark.read.format("duelog").schema("store string, reason string").load([lost.url, lost.url + "-not"])
    found = {row["store"]: row["reason"] for row in frame.distinct().collect()}
    assert found[lost.url] is None
    assert "there is no STORE" in found[lost.url + "-not"]
