"""The data source `duelog`: sealed partitions, and the tables of the main environment, as DataFrames.

    spark.read.format("duelog").option("table", "messages").load(store)
    spark.read.format("duelog").load(["/srv/a", "/srv/b"])      # or "/srv/*": several stores

Several stores (tools/fleet.py: a list, a glob, a placement table) have the column `store` first, the path by which each
is meant, and `reason` in every table. Each is planned on its own: of one that cannot be read there is one row, with
`store` and `reason` alone, and a line on standard error; so of a task that fails, for what it could not read. With the
option `unreadable` set to `error` either is an error that names every such store.

Options: `table` (one of main_tables.TABLES; messages is the default), `topic` and `partition` (one, or several with
commas between), `due_from_ms` (inclusive), `due_until_ms` (exclusive), `as_of_ms` (of pending: when it is now),
`slice_entries` and `slice_bytes` (about how much one task reads), `unreadable` (`row` or `error`). A schema given to
`.schema()` chooses columns: where all of them are in HEADER_COLUMNS, bodies are not read. Filters on topic, partition,
due time and store prune before reading; Spark evaluates the others itself.

What one task of `messages` reads is a key range of one sealed generation; which generations there are, topic names and
withdrawn entries are of one point in time, when the query is planned. The environment is opened inside the task and
closed before it ends: Spark uses its workers again. A store may be given by the URL of its copy in object storage: then
a task fetches one partition, and reads all of it (main_tables.py).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import BinaryType, BooleanType, DataType, LongType, MapType, StringType, StructField, StructType

from ...replica.copied_store import open_copy
from ...store.errors import DamagedStore, InvalidArgument
from ...store.message import MAX_DUE_MS
from ..columns.main_tables import (
    OF_MESSAGES,
    TABLES,
    CopyTask,
    MarkerLedger,
    marker_ledgers,
    narrowed,
    plan_copy,
    scan_copy,
    scan_markers,
    small_batches,
    table_schema,
)
from ..columns.scan_arrow import needs_claims, plan_pending, scan_messages, scan_pending
from ..columns.scan_rows import USUAL, Sizes, Wanted, plan_scan
from ..columns.sealed import copy_url, open_main_to_read, store_name
from ..fleet import FAILURES, attempt, is_fleet, reason_of, stores_of
from ..output import say

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
"""The setting of Spark with which it hands filters to data sources.

Spark keeps what a reader planned for the last filters of a DataFrame with it, and another use of the same DataFrame, in
a later query or in the same one, gets the rows of those: with it, each filter wants a `load` of its own.
"""

_BOUNDS: dict[type[Filter], Callable[[int], tuple[int, int]]] = {
    EqualTo: lambda value: (value, value + 1),
    GreaterThan: lambda value: (value + 1, MAX_DUE_MS + 1),
    GreaterThanOrEqual: lambda value: (value, MAX_DUE_MS + 1),
    LessThan: lambda value: (0, value),
    LessThanOrEqual: lambda value: (0, value + 1),
}
"""The due times [start, limit) that meet a comparison."""


def narrow(wanted: Wanted, condition: Filter) -> tuple[Wanted, bool]:
    """Narrow `wanted` by a condition; True: every row that is left meets it.

    `IsNotNull` of a due time, which Spark adds to every comparison, is left to Spark: it says nothing about what to
    read.
    """
    if isinstance(condition, IsNotNull):
        return wanted, False
    if getattr(condition, "attribute", ()) == ("due_ms",):
        narrowed, done = _narrow_due(wanted, condition, getattr(condition, "value", None))
        return narrowed, done and not narrowed.every_due  # every: also those that have no due time to compare
    if names := text_values(condition, "topic"):
        return wanted._replace(topics=names if wanted.topics is None else wanted.topics & names), True
    if names := text_values(condition, "partition"):
        return wanted._replace(partitions=names if wanted.partitions is None else wanted.partitions & names), True
    return wanted, False


def text_values(condition: Filter, column: str) -> frozenset[str]:
    """The texts of which a column has to be one, by a condition; none: the condition says nothing of the kind."""
    if getattr(condition, "attribute", ()) != (column,):
        return frozenset()
    value: Any = getattr(condition, "value", None)
    values = value if isinstance(condition, In) else (value,) if isinstance(condition, EqualTo) else ()
    return frozenset(values) if all(isinstance(each, str) for each in values) else frozenset()


def _narrow_due(wanted: Wanted, condition: Filter, value: Any) -> tuple[Wanted, bool]:
    if isinstance(condition, In):
        values = [each for each in condition.value if isinstance(each, int)]
        if not values or len(values) < len(condition.value):
            return wanted, False
        (start, limit), exact = (min(values), max(values) + 1), len(set(values)) == 1
    elif type(condition) in _BOUNDS and isinstance(value, int):
        (start, limit), exact = _BOUNDS[type(condition)](value), True
    else:
        return wanted, False
    start, limit = max(wanted.due_from_ms, start), min(wanted.due_until_ms, limit)
    return wanted._replace(due_from_ms=start, due_until_ms=limit), exact


_TYPES: dict[pa.DataType, DataType] = {
    pa.string(): StringType(),
    pa.int64(): LongType(),
    pa.bool_(): BooleanType(),
    pa.binary(): BinaryType(),
    pa.map_(pa.string(), pa.string()): MapType(StringType(), StringType()),
}
_MARKER_ENTRIES = 1 << 20
_OPTIONS = ("table", "topic", "partition", "due_from_ms", "due_until_ms", "as_of_ms", "slice_entries", "slice_bytes",
            "unreadable", "path", "paths")  # fmt: skip
_UNREADABLE = ("row", "error")


class Part(NamedTuple):
    """The part of one store that a task reads; `planned` None: nothing, as the store cannot be read, for a `reason`."""

    store: str
    planned: Any
    reason: str = ""


def source_schema(table: str, fleet: bool) -> pa.Schema:
    """The columns of a table, of one store or of several."""
    schema = table_schema(table)
    if not fleet:
        return schema
    reason = [] if "reason" in schema.names else [pa.field("reason", pa.string())]
    return pa.schema([pa.field("store", pa.string()), *schema, *reason])


def spark_schema(schema: pa.Schema) -> StructType:
    """The same schema as Spark's types."""
    return StructType([StructField(field.name, _TYPES[field.type]) for field in schema])


class DuelogReader(DataSourceReader):
    """Plans tasks on the driver, and reads one of them on a worker. Picklable."""

    def __init__(self, table: str, options: Mapping[str, str], columns: Sequence[str]) -> None:
        self.table = table
        self.columns = tuple(columns)
        given = _given(options)
        self.fleet = is_fleet(given)
        self.stores = stores_of(given) if self.fleet else [Path(given[0])]
        self.unreadable = options.get("unreadable", "row")
        if self.unreadable not in _UNREADABLE:
            raise InvalidArgument("unreadable", self.unreadable, f"expected one of {', '.join(_UNREADABLE)}")
        self.wanted = Wanted.of(
            _list(options.get("topic")),
            _list(options.get("partition")),
            _number(options, "due_from_ms"),
            _number(options, "due_until_ms"),
        )
        sizes = _number(options, "slice_entries"), _number(options, "slice_bytes")
        self.sizes = Sizes(sizes[0] or USUAL.entries, sizes[1] or USUAL.bytes)
        self.as_of_ms = _number(options, "as_of_ms")

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks. Spark asks once for each query."""
        if not self.fleet:
            (store,) = self.stores
            return [InputPartition(Part(store_name(store), each)) for each in self._plan(store)]
        found: list[Part] = []
        for outcome in (attempt(store, self._plan) for store in self.stores):
            if outcome.result is None:
                say(f"{outcome.name} is not read: {outcome.reason}")
                found.append(Part(outcome.name, None, outcome.reason))
            else:
                found += [Part(outcome.name, each) for each in outcome.result]
        if self.unreadable == "error" and (left := [part for part in found if part.planned is None]):
            raise DamagedStore(Path(left[0].store), "; ".join(f"{part.store}: {part.reason}" for part in left))
        return [InputPartition(part) for part in found]

    def _plan(self, store: Path) -> Sequence[Any]:
        if (url := copy_url(store)) is not None:
            with open_copy(url) as copy:
                return plan_copy(copy, self.table, self.wanted, self.as_of_ms)
        if self.table == "messages":
            return plan_scan(store, self.wanted, claims=needs_claims(self._of_table()), sizes=self.sizes)
        if self.table == "pending":
            return plan_pending(store, self.wanted, as_of_ms=self.as_of_ms, sizes=self.sizes)
        if self.table == "markers":
            return self._plan_markers(store)
        if self.fleet:
            with open_main_to_read(store):  # a store that cannot be read is to be told of here, with the others
                pass
        return [store]

    def _plan_markers(self, store: Path) -> list[list[MarkerLedger]]:
        with open_main_to_read(store) as (_, main), main.read() as raw:
            ledgers = marker_ledgers(raw, self.wanted)
        plan: list[list[MarkerLedger]] = []
        room = 0
        for ledger in ledgers:
            if room <= 0:
                plan.append([])
                room = min(_MARKER_ENTRIES, self.sizes.entries)
            plan[-1].append(ledger)
            room -= max(ledger.entries, 1)
        return plan

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        part = partition.value
        if part is None:  # Spark's way to ask for nothing
            return
        if part.planned is None:
            yield self._unreadable(part)
            return
        try:
            for batch in self._read(part):
                yield self._complete(batch, part.store)
        except FAILURES as error:
            if not self.fleet or self.unreadable == "error":
                raise
            yield self._unreadable(part._replace(reason=reason_of(error)))

    def _read(self, part: Part) -> Iterator[pa.RecordBatch]:
        if isinstance(part.planned, CopyTask):
            yield from scan_copy(part.planned, self._of_table())
        elif self.table == "messages":
            yield from scan_messages(part.planned, self._of_table(), self.wanted)
        elif self.table == "markers":
            with open_main_to_read(Path(part.store)) as (_, main):
                for ledger in part.planned:
                    yield from map(self._narrowed, scan_markers(ledger, main.read))
        elif self.table == "pending":
            yield from scan_pending(part.planned, self._of_table(), self.wanted)
        else:
            with open_main_to_read(Path(part.store)) as (_, main), main.read() as raw:
                yield from map(self._narrowed, small_batches(raw, Path(part.store), self.table))

    def _narrowed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return narrowed(batch, self.table, self.wanted, self._of_table())

    def _of_table(self) -> list[str]:
        """The columns of the table that are read: one at least, so that rows can be counted."""
        own = TABLES[self.table].names
        return [name for name in self.columns if name in own] or ["topic_id" if self.table in OF_MESSAGES else own[0]]

    def _complete(self, batch: pa.RecordBatch, store: str) -> pa.RecordBatch:
        """The columns that are wanted, with those that only several stores have."""
        if batch.schema.names == list(self.columns):
            return batch
        more = {"store": pa.repeat(pa.scalar(store), batch.num_rows), "reason": pa.nulls(batch.num_rows, pa.string())}
        own = batch.schema.names
        columns = [batch.column(name) if name in own else more[name] for name in self.columns]
        return pa.RecordBatch.from_arrays(columns, list(self.columns))

    def _unreadable(self, part: Part) -> pa.RecordBatch:
        """The row of a store that could not be read, or not wholly."""
        schema = source_schema(self.table, True)
        row = {"store": part.store, "reason": part.reason}
        return pa.RecordBatch.from_pylist([row], schema=pa.schema([schema.field(name) for name in self.columns]))


class PushingDuelogReader(DuelogReader):
    """A reader that takes what it understands of a query's filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Narrow what is wanted; the filters that are not wholly done by that go back to Spark."""
        left: list[Filter] = []
        for each in filters:
            self.wanted, done = narrow(self.wanted, each)
            if self.fleet and (names := text_values(each, "store")):
                self.stores = [store for store in self.stores if store_name(store) in names]
            if (
                not (done and self.table in OF_MESSAGES) or self.fleet
            ):  # the rows of stores that cannot be read meet none
                left.append(each)
        return left


class DuelogSource(DataSource):
    """The data source where filters are not pushed down: it goes by its options and the schema alone."""

    reader_class = DuelogReader

    @classmethod
    def name(cls) -> str:
        return "duelog"

    @property
    def table(self) -> str:
        name = self.options.get("table", "messages")
        table_schema(name)
        return name

    def schema(self) -> StructType:
        return spark_schema(source_schema(self.table, is_fleet(_given(self.options))))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = dict(self.options)
        for name in options:
            if name not in _OPTIONS:
                raise InvalidArgument("option", name, f"expected one of {', '.join(_OPTIONS)}")
        known = source_schema(self.table, is_fleet(_given(options)))
        return self.reader_class(self.table, options, _columns(self.table, known, schema))


class PushingDuelogSource(DuelogSource):
    """The data source where Spark hands it filters. Spark refuses it while `PUSHDOWN` is off."""

    reader_class = PushingDuelogReader


def _given(options: Mapping[str, str]) -> list[str]:
    """The path, or several, that `load` was given. Raises InvalidArgument for none."""
    if options.get("paths"):
        return list(json.loads(options["paths"]))
    if not options.get("path"):
        raise InvalidArgument("path", None, "load() needs the directory of a store, the URL of a copy, or several")
    return [options["path"]]


def _columns(table: str, of_table: pa.Schema, schema: StructType) -> list[str]:
    """The names of the columns of a schema, all of which the table has, of the same types. Raises InvalidArgument."""
    known = {field.name: field.dataType for field in spark_schema(of_table)}
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
