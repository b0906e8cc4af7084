"""Every table that a store is read as: names, schemas, and the rows of the main environment as Arrow record batches.

All but markers are read in one transaction, so that their rows are of one point in time. Markers are read in many short
ones beside a process that writes the store, ledger by ledger: what is trimmed or fired meanwhile may or may not be
read, but never half of a run. Everything here needs the main environment, so it runs on the machine that has the store.

Of attempts those that count: of messages that their subscription has not acknowledged. What is in flight is not among
them; the store's delivery log has it, for the case that the process is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ...cleanup.log_claims import acknowledged_by_all
from ...partitions import cancellations
from ...partitions.partition import partition_path
from ...partitions.timespan import directory_name
from ...store.codec import format as fmt
from ...store.codec.format import LedgerState, PartitionState, Table
from ...store.codec.run import Run, RunKind
from ...store.codec.sent_ids import IN_MAIN, KeyRecord
from ...store.env.memtable import Reads
from ...store.errors import CorruptEntry, InvalidArgument
from ...store.log import catalog
from ...store.log.scan import runs
from .held_letters import Unreadable, held_letters
from .scan_arrow import MESSAGES
from .scan_plan import Wanted
from .sealed import open_main_to_read

MARKERS = pa.schema(
    [
        ("topic", pa.string()),  # full name
        ("topic_id", pa.int64()),
        ("ledger_id", pa.int64()),  # with entry_id: where the marker stands in the topic's main log
        ("entry_id", pa.int64()),
        ("due_ms", pa.int64()),  # of the message; null: a run that cannot be read, with the id of its first entry
        ("target_ledger", pa.int64()),  # with target_entry: the message in its partition; null like due_ms
        ("target_entry", pa.int64()),
        ("fired_ms", pa.int64()),  # when it was written, by the store's clock; null: an older version did not say
        ("reason", pa.string()),  # why the run cannot be read; null: it can
    ]
)
PARTITIONS = pa.schema(
    [
        ("partition", pa.string()),  # name of its directory
        ("start_ms", pa.int64()),
        ("end_ms", pa.int64()),
        ("generation", pa.int64()),
        ("state", pa.string()),  # open, closed (sealed), deleting
        ("holders", pa.int64()),  # topics that have not released it; null while it is open
        ("created_ms", pa.int64()),
        ("file_bytes", pa.int64()),  # null: the file is not there
    ]
)
SUBSCRIPTIONS = pa.schema(
    [
        ("topic", pa.string()),
        ("topic_id", pa.int64()),
        ("subscription", pa.string()),
        ("subscription_id", pa.int64()),
        ("created_ms", pa.int64()),
        ("mark_delete_ledger", pa.int64()),  # everything up to this position is acknowledged
        ("mark_delete_entry", pa.int64()),  # -1: nothing of that ledger
        ("acknowledged_after", pa.int64()),  # entries after it that are
        ("paused", pa.bool_()),
    ]
)
FRONTIERS = pa.schema(
    [
        ("topic", pa.string()),  # null: the topic was deleted
        ("topic_id", pa.int64()),
        ("partition", pa.string()),
        ("start_ms", pa.int64()),
        ("ledger_id", pa.int64()),
        ("due_ms", pa.int64()),  # with entry_id: C of the frontier (docs/design.md, "The frontier")
        ("entry_id", pa.int64()),
        ("seen", pa.int64()),  # T of the frontier
        ("fired", pa.int64()),
        ("marker_ledger", pa.int64()),
        ("marker_entry", pa.int64()),
        ("released", pa.bool_()),
        ("cancelled", pa.binary()),  # serialised roaring bitmap of entries that were cancelled or replaced
        ("admitted", pa.binary()),  # of conditional entries that may fire
    ]
)
LEDGERS = pa.schema(
    [
        ("topic", pa.string()),
        ("topic_id", pa.int64()),
        ("ledger_id", pa.int64()),
        ("created_ms", pa.int64()),
        ("closed_ms", pa.int64()),  # this and the next two hold once it is no longer open
        ("entries", pa.int64()),
        ("stored_bytes", pa.int64()),
        ("state", pa.string()),  # open, closed, trimming
    ]
)
ACKNOWLEDGEMENTS = pa.schema(
    [
        ("topic_id", pa.int64()),
        ("subscription_id", pa.int64()),
        ("ledger_id", pa.int64()),
        ("entries", pa.binary()),  # serialised roaring bitmap of entries acknowledged after the mark-delete position
    ]
)

ATTEMPTS = pa.schema(
    [
        ("topic", pa.string()),
        ("topic_id", pa.int64()),
        ("subscription", pa.string()),
        ("subscription_id", pa.int64()),
        ("ledger_id", pa.int64()),  # with entry_id: where the message, or its marker, stands in the topic's main log
        ("entry_id", pa.int64()),
        ("failed", pa.int64()),  # deliveries that ended without an acknowledgement
        ("first_ms", pa.int64()),  # when the first of them ended
        ("last_ms", pa.int64()),
    ]
)
DEAD_LETTERS = pa.schema(
    [
        ("dead_letter_topic", pa.string()),
        ("ledger_id", pa.int64()),  # with entry_id: where it lies in the dead-letter topic's main log
        ("entry_id", pa.int64()),
        (
            "topic",
            pa.string(),
        ),  # with subscription: where it came from; null, as all down to dead_ms: unreadable
        ("subscription", pa.string()),
        ("message_ledger", pa.int64()),  # with message_entry: the message's id there
        ("message_entry", pa.int64()),
        ("due_ms", pa.int64()),
        ("publish_ms", pa.int64()),
        ("key", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("payload", pa.binary()),
        ("cause", pa.string()),  # why it died
        ("attempts", pa.int64()),  # how often it was delivered
        ("first_ms", pa.int64()),  # when the first of these deliveries ended
        ("last_ms", pa.int64()),
        ("dead_ms", pa.int64()),
        ("reason", pa.string()),  # why it cannot be read; null: it can
    ]
)

KEYS = pa.schema(
    [
        ("topic", pa.string()),
        ("topic_id", pa.int64()),
        ("dedup_key", pa.string()),
        ("partition", pa.string()),  # with ledger_id and entry_id: the message; null: it went into the main log
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("until_ms", pa.int64()),  # how long the key holds although it has fired; null: no longer than it is pending
    ]
)

Rows = list[dict[str, Any]]

_RUNS_A_TRANSACTION = 2_000
_BATCH_ROWS = 10_000
_BATCH_BYTES = 16 << 20
_PAUSED = 0x01


class MarkerLedger(NamedTuple):
    """A ledger of a main log whose markers one task may read. Picklable."""

    topic: str
    topic_id: int
    ledger_id: int
    entries: int


def partitions(raw: Reads, store: Path) -> Rows:
    """Every registered partition, by start."""
    rows = []
    for start_ms, record in catalog.partitions(raw):
        path = partition_path(store, start_ms, record.generation) / "data.mdb"
        try:
            file_bytes = path.stat().st_size
        except FileNotFoundError:
            file_bytes = None
        row = record._asdict() | {"partition": directory_name(start_ms), "start_ms": start_ms, "file_bytes": file_bytes}
        row["state"] = record.state.name.lower()
        row["holders"] = None if record.state is PartitionState.OPEN else record.references
        rows.append(row)
    return rows


def subscriptions(raw: Reads, store: Path) -> Rows:
    """Every subscription, by topic."""
    rows = []
    for topic_id, name, record in catalog.cursors(raw):
        after = sum(len(BitMap.deserialize(fields)) for _, fields in catalog.acked(raw, record.subscription_id))
        rows.append(
            {
                "topic": catalog.topic_name(raw, topic_id),
                "topic_id": topic_id,
                "subscription": name,
                "subscription_id": record.subscription_id,
                "created_ms": record.created_ms,
                "mark_delete_ledger": record.mark_delete.ledger_id,
                "mark_delete_entry": record.mark_delete.entry_id,
                "acknowledged_after": after,
                "paused": bool(record.flags & _PAUSED),
            }
        )
    return rows


def frontiers(raw: Reads, store: Path) -> Rows:
    """Every partition log of which something has fired, with what main says of its entries."""
    rows = []
    for topic_id, start_ms, record in catalog.frontiers(raw):
        row = record._asdict() | {"topic_id": topic_id, "start_ms": start_ms, "partition": directory_name(start_ms)}
        row["topic"] = catalog.topic_name(raw, topic_id)
        row["seen"] = record.absorbed_end
        row["released"] = bool(record.released)
        for name, table in (("cancelled", Table.CANCELLED), ("admitted", Table.ADMITTED)):
            row[name] = cancellations.members(raw, table, record.ledger_id).serialize()
        rows.append(row)
    return rows


def ledgers(raw: Reads, store: Path) -> Rows:
    """Every ledger of a main log, by topic and age."""
    rows = []
    for key, fields in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
        topic_id, record = fmt.leading_u32(key), fmt.LedgerRecord.unpack(fields)
        row = record._asdict() | {"topic_id": topic_id, "ledger_id": fmt.trailing_u64(key)}
        rows.append(row | {"topic": catalog.topic_name(raw, topic_id), "state": record.state.name.lower()})
    return rows


def acknowledgements(raw: Reads, store: Path) -> Rows:
    """What subscriptions have acknowledged after their mark-delete positions, by subscription and ledger."""
    rows = []
    for topic_id, _, record in catalog.cursors(raw):
        for ledger_id, fields in catalog.acked(raw, record.subscription_id):
            row = {"topic_id": topic_id, "subscription_id": record.subscription_id, "ledger_id": ledger_id}
            rows.append(row | {"entries": fields})
    return rows


def keys(raw: Reads, store: Path) -> Iterator[dict[str, Any]]:
    """The record of every deduplication key, by topic and key, also of messages that have fired or were cancelled."""
    for key, fields in catalog.rows(raw, fmt.prefix(Table.KEY)):
        (topic_id, name), record = fmt.split_named_key(key), KeyRecord.unpack(fields)
        yield {
            "topic": catalog.topic_name(raw, topic_id),
            "topic_id": topic_id,
            "dedup_key": name,
            "partition": None if record.start_ms == IN_MAIN else directory_name(record.start_ms),
            "ledger_id": record.ledger_id,
            "entry_id": record.entry_id,
            "until_ms": record.until_ms or None,
        }


def attempts(raw: Reads, store: Path) -> Iterator[dict[str, Any]]:
    """A row for each message and subscription, by subscription and position."""
    for topic_id, name, cursor in catalog.cursors(raw):
        acknowledged = dict(catalog.acked(raw, cursor.subscription_id))
        for ledger_id, rows in catalog.attempts(raw, cursor.subscription_id):
            done = acknowledged_by_all([(cursor, acknowledged)], ledger_id, max(rows) + 1)
            for entry_id, (failed, first_ms, last_ms) in sorted(rows.items()):
                if entry_id not in done:
                    yield {
                        "topic": catalog.topic_name(raw, topic_id),
                        "topic_id": topic_id,
                        "subscription": name,
                        "subscription_id": cursor.subscription_id,
                        "ledger_id": ledger_id,
                        "entry_id": entry_id,
                        "failed": failed,
                        "first_ms": first_ms,
                        "last_ms": last_ms,
                    }


def dead_letters(raw: Reads, store: Path) -> Iterator[dict[str, Any]]:
    """A row for each letter that is held, by dead-letter topic and position."""
    for letter in held_letters(raw):
        if isinstance(letter, Unreadable):
            topic, (ledger_id, entry_id), reason = letter
            yield {"dead_letter_topic": topic, "ledger_id": ledger_id, "entry_id": entry_id, "reason": reason}
            continue
        yield {
            "dead_letter_topic": letter.dead_letter_topic,
            "ledger_id": letter.position.ledger_id,
            "entry_id": letter.position.entry_id,
            "topic": letter.topic,
            "subscription": letter.subscription,
            "message_ledger": letter.message_id.ledger_id,
            "message_entry": letter.message_id.entry_id,
            "due_ms": letter.due_ms,
            "publish_ms": letter.publish_ms,
            "key": letter.key,
            "properties": letter.properties,
            "payload": letter.payload,
            "cause": letter.reason,
            "attempts": letter.attempts,
            "first_ms": letter.first_ms,
            "last_ms": letter.last_ms,
            "dead_ms": letter.dead_ms,
        }


SMALL: dict[str, tuple[pa.Schema, Callable[[Reads, Path], Iterable[dict[str, Any]]]]] = {
    "partitions": (PARTITIONS, partitions),
    "subscriptions": (SUBSCRIPTIONS, subscriptions),
    "frontiers": (FRONTIERS, frontiers),
    "ledgers": (LEDGERS, ledgers),
    "acknowledgements": (ACKNOWLEDGEMENTS, acknowledgements),
    "attempts": (ATTEMPTS, attempts),
    "dead_letters": (DEAD_LETTERS, dead_letters),
    "keys": (KEYS, keys),
}
"""Tables that one transaction reads."""


def read_small(store: Path, table: str) -> pa.Table:
    """One of the tables in SMALL, as of now. Raises InvalidArgument for what is no store or no table."""
    if table not in SMALL:
        raise InvalidArgument("table", table, f"expected one of {', '.join(SMALL)}")
    with open_main_to_read(store) as (_, main), main.read() as raw:
        return pa.Table.from_batches(small_batches(raw, store, table), SMALL[table][0])


def small_batches(raw: Reads, store: Path, table: str) -> Iterator[pa.RecordBatch]:
    """The same in a transaction of the caller's, some rows at a time."""
    schema, rows = SMALL[table]
    found: Rows = []
    size = 0
    for row in rows(raw, store):
        found.append(row)
        size += len(row.get("payload") or b"")
        if len(found) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield pa.RecordBatch.from_pylist(found, schema=schema)
            found, size = [], 0
    if found:
        yield pa.RecordBatch.from_pylist(found, schema=schema)


# -- markers -------------------------------------------------------------------------------------


def marker_ledgers(raw: Reads, topics: frozenset[str] | None = None) -> list[MarkerLedger]:
    """The ledgers of the main logs of all topics, or of some; those being removed are left out."""
    found = []
    for key, fields in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
        topic_id, ledger_id = fmt.leading_u32(key), fmt.trailing_u64(key)
        record = fmt.LedgerRecord.unpack(fields)
        topic = catalog.topic_name(raw, topic_id)
        if record.state is LedgerState.TRIMMING or topic is None or (topics is not None and topic not in topics):
            continue
        found.append(MarkerLedger(topic, topic_id, ledger_id, record.entries))
    return found


def scan_markers(
    ledger: MarkerLedger, transaction: Callable[[], AbstractContextManager[Reads]]
) -> Iterator[pa.RecordBatch]:
    """The markers of one ledger, in order; each batch in a read transaction of the main environment."""
    start = 0
    while start >= 0:
        with transaction() as raw:
            batch, start = _some_markers(raw, ledger, start)
        if batch is not None:
            yield batch


def _some_markers(raw: Reads, ledger: MarkerLedger, start: int) -> tuple[pa.RecordBatch | None, int]:
    """A batch of markers from `start` on, and where the next begins; -1: there is no more."""
    found: list[Run] = []
    errors: list[CorruptEntry] = []
    for count, run in enumerate(runs(raw, "main", ledger.ledger_id, start)):
        if count == _RUNS_A_TRANSACTION:
            start = run.entry_id if isinstance(run, CorruptEntry) else run.first_entry
            break
        if isinstance(run, CorruptEntry):
            errors.append(run)
        elif run.kind == RunKind.MARKERS:
            found.append(run)
    else:
        start = -1
    return (_markers(found, errors, ledger) if found or errors else None), start


def _markers(found: list[Run], errors: list[CorruptEntry], ledger: MarkerLedger) -> pa.RecordBatch:
    counts = [run.count for run in found]
    rows, bad = sum(counts), len(errors)

    def each(values: list[int | None]) -> pa.Array:
        """A column whose rows have the value of their run; null of those that cannot be read."""
        places = np.repeat(np.arange(len(found)), counts)
        taken = pa.array(values, type=pa.int64()).take(pa.array(places))
        return pa.concat_arrays([taken, pa.nulls(bad, pa.int64())])

    def column(parts: list[Any]) -> pa.Array:
        values = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
        return pa.concat_arrays([pa.array(values), pa.nulls(bad, pa.int64())])

    ids = [np.arange(run.first_entry, run.limit) for run in found]
    ids += [np.array([error.entry_id]) for error in errors]
    columns = [
        pa.repeat(pa.scalar(ledger.topic), rows + bad),
        pa.repeat(pa.scalar(ledger.topic_id, pa.int64()), rows + bad),
        pa.repeat(pa.scalar(ledger.ledger_id, pa.int64()), rows + bad),
        pa.array(np.concatenate(ids)),
        column([run.dues() for run in found]),
        each([run.target for run in found]),
        column([run.targets() for run in found]),
        each([run.fired_ms() for run in found]),
        pa.array([None] * rows + [error.reason for error in errors], type=pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=MARKERS)


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
