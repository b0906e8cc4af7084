"""Messages of sealed generations as Arrow record batches: the schema, and slices read by it.

This is the schema of the tables `messages` and `pending` and of an export's Parquet files. Which columns are asked for
decides what is read: HEADER_COLUMNS come from the headers of runs; any other has every body read and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from ...store.codec.frontier import UNREADABLE_DUE
from ...store.errors import InvalidArgument
from .scan_bodies import Bodies, read_bodies
from .scan_plan import Slice, Wanted
from .scan_rows import BATCH_ROWS, Batch, batches
from .sealed import Sealed, open_sealed

MESSAGES = pa.schema(
    [
        ("topic", pa.string()),  # full name; null: the topic was deleted
        ("topic_id", pa.int64()),
        ("partition", pa.string()),  # name of its directory: 20261120T000000Z; null: it waits in a main log
        ("generation", pa.int64()),  # null like the partition
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("due_ms", pa.int64()),  # null: a run that cannot be read, with the id of its first entry
        ("publish_ms", pa.int64()),
        ("key", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),  # empty where a message has none
        ("payload", pa.binary()),  # null: dropped, or damaged
        ("extra", pa.binary()),  # msgpack of what the library itself added to the message, null mostly
        ("body_bytes", pa.int64()),  # as stored
        ("dropped", pa.bool_()),  # compaction dropped the body: no subscription needs it any more
        ("withdrawn", pa.bool_()),  # never fires: cancelled, replaced, or a reschedule that was not recorded
        ("conditional", pa.bool_()),  # a rescheduled message: stands for the older one named by the next two
        ("replaces_ledger", pa.int64()),
        ("replaces_entry", pa.int64()),
        ("reason", pa.string()),  # why the entry cannot be read; null: it can
    ]
)
"""Every column may be null for Spark's sake; the comments say which are."""

BODY_COLUMNS = frozenset({"publish_ms", "key", "properties", "payload", "extra", "reason"})
HEADER_COLUMNS = frozenset(MESSAGES.names) - BODY_COLUMNS
CLAIM_COLUMNS = frozenset({"withdrawn"})
"""Columns for which `plan_scan` has to be asked for `claims`."""


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """The schema of some columns, in the order given. Raises InvalidArgument for one that there is not."""
    for name in columns:
        if name not in MESSAGES.names:
            raise InvalidArgument("columns", name, f"expected some of {', '.join(MESSAGES.names)}")
    return pa.schema([MESSAGES.field(name) for name in columns])


def needs_claims(columns: Sequence[str]) -> bool:
    """Whether `plan_scan` has to read what main says of entries."""
    return not CLAIM_COLUMNS.isdisjoint(columns)


def scan_messages(
    part: Slice, columns: Sequence[str] = tuple(MESSAGES.names), wanted: Wanted | None = None, rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in order of log and entry. Opens the generation, and closes it at the end or on `close`.

    rows: of a batch, about. Raises DamagedStore where the generation is not there any more.
    """
    schema = schema_of(columns)
    bodies = not BODY_COLUMNS.isdisjoint(columns)
    with open_sealed(part.sealed, part.store_id) as environment, environment.read() as raw:
        for batch in batches(raw, part.sealed.name, part.ranges, rows=rows, bodies=bodies):
            batch.keep_due(wanted or Wanted())
            if batch.rows:
                yield record_batch(batch, part.sealed, schema)


def record_batch(batch: Batch, place: Sealed | None, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema`, of a batch of a generation; None: of main logs. REQUIRES: the batch's transaction."""
    bodies = None if BODY_COLUMNS.isdisjoint(schema.names) else read_bodies(batch)
    made = _Columns(batch, place, bodies)
    return pa.RecordBatch.from_arrays([made.get(name) for name in schema.names], schema=schema)


class _Columns:
    """The columns of one batch, made when they are asked for."""

    def __init__(self, batch: Batch, place: Sealed | None, bodies: Bodies | None) -> None:
        self._batch = batch
        self._place = place
        self._bodies = bodies

    def get(self, name: str) -> pa.Array:
        if name in BODY_COLUMNS:
            return getattr(self._bodies, name)
        return _MAKERS[name](self)

    def _of_range(self, values: list[object], kind: pa.DataType) -> pa.Array:
        """A column whose rows have the value of their range."""
        array = pa.array(values, type=kind)
        return array.take(pa.array(self._batch.places())) if len(values) > 1 else pa.repeat(array[0], self._batch.rows)

    def topic(self) -> pa.Array:
        return self._of_range([each.topic for each in self._batch.ranges], pa.string())

    def topic_id(self) -> pa.Array:
        return self._of_range([each.topic_id for each in self._batch.ranges], pa.int64())

    def partition(self) -> pa.Array:
        name = None if self._place is None else self._place.partition
        return pa.repeat(pa.scalar(name, pa.string()), self._batch.rows)

    def generation(self) -> pa.Array:
        number = None if self._place is None else self._place.generation
        return pa.repeat(pa.scalar(number, pa.int64()), self._batch.rows)

    def due_ms(self) -> pa.Array:
        dues = self._batch.dues
        unreadable = dues == UNREADABLE_DUE
        return pa.array(dues, mask=unreadable if unreadable.any() else None)

    def body_bytes(self) -> pa.Array:
        return pa.array(self._batch.body_spans()[1])

    def dropped(self) -> pa.Array:
        return pa.array(self._batch.dropped(self._batch.body_spans()[1]))

    def replaces(self, which: int) -> pa.Array:
        conditional = self._batch.conditional()
        if not conditional.any():
            return pa.nulls(self._batch.rows, pa.int64())
        return pa.array(self._batch.replaced()[which], mask=np.logical_not(conditional))


_MAKERS: dict[str, Callable[[_Columns], pa.Array]] = {
    "topic": _Columns.topic,
    "topic_id": _Columns.topic_id,
    "partition": _Columns.partition,
    "generation": _Columns.generation,
    "ledger_id": lambda columns: pa.array(columns._batch.ledger_ids()),
    "entry_id": lambda columns: pa.array(columns._batch.entry_ids()),
    "due_ms": _Columns.due_ms,
    "body_bytes": _Columns.body_bytes,
    "dropped": _Columns.dropped,
    "withdrawn": lambda columns: pa.array(columns._batch.withdrawn()),
    "conditional": lambda columns: pa.array(columns._batch.conditional()),
    "replaces_ledger": lambda columns: columns.replaces(0),
    "replaces_entry": lambda columns: columns.replaces(1),
}
