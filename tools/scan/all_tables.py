"""Every table that a store is read as: names, schemas, and rows of one narrowed to what is wanted."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ...store.errors import InvalidArgument
from .main_tables import MARKERS, SMALL
from .scan_arrow import MESSAGES
from .scan_plan import Wanted

OF_MESSAGES = ("messages", "pending")
"""Tables whose rows are read from partitions, by columns."""

TABLES: dict[str, pa.Schema] = dict.fromkeys(OF_MESSAGES, MESSAGES) | {"markers": MARKERS} | {
    name: schema for name, (schema, _) in SMALL.items()
}  # fmt: skip

_WITH_DUE = (*OF_MESSAGES, "markers", "dead_letters")
"""Tables of which due times are asked for."""


def table_schema(table: str) -> pa.Schema:
    """The columns of a table. Raises InvalidArgument."""
    if table not in TABLES:
        raise InvalidArgument("table", table, f"expected one of {', '.join(TABLES)}")
    return TABLES[table]


def columns_of(table: str, columns: Sequence[str] | None) -> list[str]:
    """The columns that are asked for, None: all. Raises InvalidArgument for one that the table has not, or none."""
    schema = table_schema(table)
    if columns is None:
        return list(schema.names)
    for name in columns:
        if name not in schema.names:
            raise InvalidArgument("columns", name, f"{table} has {', '.join(schema.names)}")
    if not columns or len({*columns}) < len(columns):
        raise InvalidArgument("columns", list(columns), "expected one or more, each once")
    return list(columns)


def narrowed(batch: pa.RecordBatch, table: str, wanted: Wanted, columns: Sequence[str]) -> pa.RecordBatch:
    """The columns and rows that are wanted, of a batch that has all that they are chosen by."""
    names = batch.schema.names
    keep = pa.repeat(pa.scalar(True), batch.num_rows)
    for name, values in (("topic", wanted.topics), ("partition", wanted.partitions)):
        if values is not None and name in names:
            inside = pc.is_in(batch.column(name), pa.array(sorted(values), pa.string()))
            keep = pc.and_(keep, inside)
    if not wanted.every_due and table in _WITH_DUE:
        due = batch.column("due_ms")
        inside = pc.and_(pc.greater_equal(due, wanted.due_from_ms), pc.less(due, wanted.due_until_ms))
        keep = pc.and_(keep, pc.fill_null(inside, False))
    return batch.filter(keep).select(list(columns))
