"""The data source `duelog`: sealed partitions, and the tables of the main environment, as DataFrames.

    spark.read.format("duelog").option("table", "messages").load(store)

Options: `table` (messages, markers, or one of main_tables.SMALL; messages is the default), `topic` and
`partition` (one, or several with commas between), `due_from_ms` (inclusive), `due_until_ms` (exclusive),
`slice_entries` and `slice_bytes` (about how much one task reads). A schema given to `.schema()` chooses columns: where
all of them are in HEADER_COLUMNS, bodies are not read.

What one task of `messages` reads is a key range of one sealed generation; which generations there are, topic names and
withdrawn entries are of one point in time, when the query is planned. The environment is opened inside the task and
closed before it ends: Spark uses its workers again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from ...store.errors import InvalidArgument
from ..scan import main_tables
from ..scan.main_tables import MARKERS, MarkerLedger, marker_ledgers, read_small, scan_markers
from ..scan.scan_arrow import MESSAGES, needs_claims, scan_messages
from ..scan.scan_plan import SLICE_BYTES, SLICE_ENTRIES, Wanted, plan_scan
from ..scan.sealed import open_main_to_read
from .filters import PUSHDOWN, narrow

TABLES: dict[str, pa.Schema] = {"messages": MESSAGES, "markers": MARKERS} | {
    name: schema for name, (schema, _) in main_tables.SMALL.items()
}
_TYPES: dict[pa.DataType, DataType] = {
    pa.string(): StringType(),
    pa.int64(): LongType(),
    pa.bool_(): BooleanType(),
    pa.binary(): BinaryType(),
    pa.map_(pa.string(), pa.string()): MapType(StringType(), StringType()),
}
_MARKER_ENTRIES = 1 << 20
_OPTIONS = ("table", "topic", "partition", "due_from_ms", "due_until_ms", "slice_entries", "slice_bytes", "path")


def spark_schema(schema: pa.Schema) -> StructType:
    """The same schema as Spark's types."""
    return StructType([StructField(field.name, _TYPES[field.type]) for field in schema])


class DuelogReader(DataSourceReader):
    """Plans tasks on the driver, and reads one of them on a worker. Picklable."""

    def __init__(self, table: str, options: Mapping[str, str], columns: Sequence[str]) -> None:
        self.table = table
        self.columns = tuple(columns)
        self.path = Path(options["path"])
        self.wanted = Wanted.of(
            _list(options.get("topic")),
            _list(options.get("partition")),
            _number(options, "due_from_ms"),
            _number(options, "due_until_ms"),
        )
        self.slice_entries = _number(options, "slice_entries") or SLICE_ENTRIES
        self.slice_bytes = _number(options, "slice_bytes") or SLICE_BYTES

    def partitions(self) -> Sequence[InputPartition]:
        """What each task reads. Spark asks once for each query."""
        if self.table == "messages":
            plan: Sequence[Any] = plan_scan(
                self.path,
                self.wanted,
                claims=needs_claims(self.columns),
                slice_entries=self.slice_entries,
                slice_bytes=self.slice_bytes,
            )
        elif self.table == "markers":
            plan = self._plan_markers()
        else:
            plan = [self.path]
        return [InputPartition(part) for part in plan]

    def _plan_markers(self) -> list[list[MarkerLedger]]:
        with open_main_to_read(self.path) as (_, main), main.read() as raw:
            ledgers = marker_ledgers(raw, self.wanted.topics)
        plan: list[list[MarkerLedger]] = []
        room = 0
        for ledger in ledgers:
            if room <= 0:
                plan.append([])
                room = min(_MARKER_ENTRIES, self.slice_entries)
            plan[-1].append(ledger)
            room -= max(ledger.entries, 1)
        return plan

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task as Arrow record batches."""
        if partition.value is None:  # Spark's way to ask for nothing
            return
        if self.table == "messages":
            yield from scan_messages(partition.value, self.columns, self.wanted)
        elif self.table == "markers":
            with open_main_to_read(self.path) as (_, main):
                for ledger in partition.value:
                    yield from map(self._narrowed, scan_markers(ledger, main.read))
        else:
            yield self._narrowed(read_small(partition.value, self.table))

    def _narrowed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns and rows that are wanted, of a batch that has all of its table."""
        wanted = self.wanted
        keep = pa.repeat(pa.scalar(True), batch.num_rows)
        for name, values in (("topic", wanted.topics), ("partition", wanted.partitions)):
            if values is not None and name in batch.schema.names:
                inside = pa.compute.is_in(batch.column(name), pa.array(sorted(values), pa.string()))
                keep = pa.compute.and_(keep, inside)
        if not wanted.every_due and self.table == "markers":
            due = batch.column("due_ms")
            inside = pa.compute.and_(
                pa.compute.greater_equal(due, wanted.due_from_ms), pa.compute.less(due, wanted.due_until_ms)
            )
            keep = pa.compute.and_(keep, pa.compute.fill_null(inside, False))
        return batch.filter(keep).select(list(self.columns))


class PushingDuelogReader(DuelogReader):
    """A reader that takes what it understands of a query's filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Narrow what is wanted; the filters that are not wholly done by that go back to Spark."""
        left: list[Filter] = []
        for each in filters:
            self.wanted, done = narrow(self.wanted, each)
            if not (done and self.table == "messages"):
                left.append(each)
        return left


class DuelogSource(DataSource):
    """The data source where filters are not pushed down: it goes by its options and the schema alone."""

    reader_class = DuelogReader

    @classmethod
    def name(cls) -> str:
        """What `spark.read.format` calls it."""
        return "duelog"

    @property
    def table(self) -> str:
        """The table that is read."""
        name = self.options.get("table", "messages")
        if name not in TABLES:
            raise InvalidArgument("table", name, f"expected one of {', '.join(TABLES)}")
        return name

    def schema(self) -> StructType:
        """All columns of the table."""
        return spark_schema(TABLES[self.table])

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns of `schema`."""
        options = dict(self.options)
        for name in options:
            if name not in _OPTIONS:
                raise InvalidArgument("option", name, f"expected one of {', '.join(_OPTIONS)}")
        if not options.get("path"):
            raise InvalidArgument("path", None, "load() needs the directory of a store")
        return self.reader_class(self.table, options, _columns(self.table, schema))


class PushingDuelogSource(DuelogSource):
    """The data source where Spark hands it filters. Spark refuses it while `PUSHDOWN` is off."""

    reader_class = PushingDuelogReader


def _columns(table: str, schema: StructType) -> list[str]:
    """The names of the columns of a schema, all of which the table has, of the same types. Raises InvalidArgument."""
    known = {field.name: field.dataType for field in spark_schema(TABLES[table])}
    for field in schema:
        if field.name not in known:
            raise InvalidArgument("schema", field.name, f"{table} has {', '.join(known)}")
        if field.dataType != known[field.name]:
            raise InvalidArgument("schema", field.simpleString(), f"is {known[field.name].simpleString()}")
    return schema.names


def _list(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise InvalidArgument(name, text, "expected a whole number, not negative")
    return int(text)


def register(spark: SparkSession) -> None:
    """Make `duelog` known to a session: the source that takes filters where Spark hands them on, else the other."""
    pushes = spark.conf.get(PUSHDOWN, "false") == "true"
    spark.dataSource.register(PushingDuelogSource if pushes else DuelogSource)
