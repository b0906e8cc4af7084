"""Every table that a store is read as: names, schemas, and the rows of the main environment as Arrow record batches.

All but markers are read in one transaction, so that their rows are of one point in time. Markers are read in many short
ones beside a process that writes the store, ledger by ledger: what is trimmed or fired meanwhile may or may not be
read, but never half of a run. Everything here needs the main environment, so it runs on the machine that has the store.

Of attempts those that count: of messages that their subscription has not acknowledged. What is in flight is not among
them; the store's delivery log has it, for the case that the process is killed.

The tables of a store's copy in object storage are read in tasks, of one partition or of the main environment alone:
each fetches what it reads, and reads it as of a store. All tasks of a plan are of one group of the log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ...cleanup.log_claims import acknowledged_by_all
from ...opening import Identity
from ...partitions import cancellations
from ...partitions.timespan import directory_name
from ...replica.copied_store import CopiedStore, Excerpt
from ...store.codec import format as fmt
from ...store.codec.format import PartitionState, Table
from ...store.codec.run import Run, RunKind
from ...store.codec.sent_ids import IN_MAIN, KeyRecord
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.errors import CorruptEntry, InvalidArgument
from ...store.log import catalog
from ...store.log.scan import runs
from ...store.wal.followed_wal import FollowedWal
from .held_letters import Unreadable, held_letters
from .scan_arrow import MESSAGES, Known, logs_now, needs_claims, now_ms, pending_in, scan_messages, scan_pending
from .scan_rows import Wanted, kept_ledgers, plan_in
from .sealed import Sealed, copied_partitions, excerpt, open_main_to_read, sealed_in

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
        ("topic", pa.string()),  # with subscription: where it came from; null, as all down to dead_ms: unreadable
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

Rows = Iterator[tuple[object, ...]]
"""Values in the order of the table's schema."""

_RUNS_A_TRANSACTION = 2_000
_BATCH_ROWS = 10_000
_BATCH_BYTES = 16 << 20
_PAUSED = 0x01


class MarkerLedger(NamedTuple):
    """A ledger of a main log whose markers one task may read. Picklable."""

    topic_id: int
    topic: str
    ledger_id: int
    entries: int


def _partitions(raw: Reads, store: Path) -> Rows:
    for start_ms, record in catalog.partitions(raw):
        file_bytes = Sealed.of(store, start_ms, record).file_bytes or None
        references = None if record.state is PartitionState.OPEN else record.references
        yield (directory_name(start_ms), start_ms, record.end_ms, record.generation, record.state.name.lower(),
               references, record.created_ms, file_bytes)  # fmt: skip


def _subscriptions(raw: Reads, store: Path) -> Rows:
    for topic_id, name, record in catalog.cursors(raw):
        topic, number, mark = catalog.topic_name(raw, topic_id), record.subscription_id, record.mark_delete
        after = sum(len(BitMap.deserialize(fields)) for _, fields in catalog.acked(raw, number))
        paused = bool(record.flags & _PAUSED)
        yield topic, topic_id, name, number, record.created_ms, mark.ledger_id, mark.entry_id, after, paused


def _frontiers(raw: Reads, store: Path) -> Rows:
    for topic_id, start_ms, record in catalog.frontiers(raw):
        ledger_id, due_ms, entry_id, seen, fired, marker_ledger, marker_entry, released = record
        cancelled, admitted = (
            cancellations.members(raw, table, ledger_id).serialize() for table in (Table.CANCELLED, Table.ADMITTED)
        )
        yield (catalog.topic_name(raw, topic_id), topic_id, directory_name(start_ms), start_ms, ledger_id, due_ms,
               entry_id, seen, fired, marker_ledger, marker_entry, bool(released), cancelled, admitted)  # fmt: skip


def _ledgers(raw: Reads, store: Path) -> Rows:
    for key, fields in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
        topic_id, record = fmt.leading_u32(key), fmt.LedgerRecord.unpack(fields)
        yield (catalog.topic_name(raw, topic_id), topic_id, fmt.trailing_u64(key), record.created_ms, record.closed_ms,
               record.entries, record.stored_bytes, record.state.name.lower())  # fmt: skip


def _acknowledgements(raw: Reads, store: Path) -> Rows:
    for topic_id, _, record in catalog.cursors(raw):
        for ledger_id, fields in catalog.acked(raw, record.subscription_id):
            yield topic_id, record.subscription_id, ledger_id, fields


def _keys(raw: Reads, store: Path) -> Rows:
    """Also those of messages that have fired or were cancelled."""
    for key, fields in catalog.rows(raw, fmt.prefix(Table.KEY)):
        (topic_id, name), record = fmt.split_named_key(key), KeyRecord.unpack(fields)
        partition = None if record.start_ms == IN_MAIN else directory_name(record.start_ms)
        topic, until_ms = catalog.topic_name(raw, topic_id), record.until_ms or None
        yield topic, topic_id, name, partition, record.ledger_id, record.entry_id, until_ms


def _attempts(raw: Reads, store: Path) -> Rows:
    for topic_id, name, cursor in catalog.cursors(raw):
        topic, number = catalog.topic_name(raw, topic_id), cursor.subscription_id
        acknowledged = dict(catalog.acked(raw, number))
        for ledger_id, rows in catalog.attempts(raw, number):
            done = acknowledged_by_all([(cursor, acknowledged)], ledger_id, max(rows) + 1)
            for entry_id, (failed, first_ms, last_ms) in sorted(rows.items()):
                if entry_id not in done:
                    yield topic, topic_id, name, number, ledger_id, entry_id, failed, first_ms, last_ms


def _dead_letters(raw: Reads, store: Path) -> Rows:
    for letter in held_letters(raw):
        if isinstance(letter, Unreadable):
            yield letter.topic, *letter.position, *[None] * 14, letter.reason
        else:
            yield (letter.dead_letter_topic, *letter.position, letter.topic, letter.subscription,
                   *letter.message_id[:2], letter.due_ms, letter.publish_ms, letter.key, letter.properties,
                   letter.payload, letter.reason, letter.attempts, letter.first_ms, letter.last_ms, letter.dead_ms,
                   None)  # fmt: skip


SMALL: dict[str, tuple[pa.Schema, Callable[[Reads, Path], Rows]]] = {
    "partitions": (PARTITIONS, _partitions),
    "subscriptions": (SUBSCRIPTIONS, _subscriptions),
    "frontiers": (FRONTIERS, _frontiers),
    "ledgers": (LEDGERS, _ledgers),
    "acknowledgements": (ACKNOWLEDGEMENTS, _acknowledgements),
    "attempts": (ATTEMPTS, _attempts),
    "dead_letters": (DEAD_LETTERS, _dead_letters),
    "keys": (KEYS, _keys),
}
"""Tables that one transaction reads."""


def small_batches(raw: Reads, store: Path, table: str) -> Iterator[pa.RecordBatch]:
    """The rows of one of these tables, some at a time."""
    schema, rows = SMALL[table]
    found: list[dict[str, Any]] = []
    size = 0
    for values in rows(raw, store):
        found.append(dict(zip(schema.names, values, strict=True)))
        size += len(found[-1].get("payload") or b"")
        if len(found) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield pa.RecordBatch.from_pylist(found, schema=schema)
            found, size = [], 0
    if found:
        yield pa.RecordBatch.from_pylist(found, schema=schema)


# -- markers -------------------------------------------------------------------------------------


def marker_ledgers(raw: Reads, wanted: Wanted) -> list[MarkerLedger]:
    """The ledgers of the main logs of topics that are wanted."""
    found = kept_ledgers(raw, wanted)
    return [MarkerLedger(topic_id, topic, ledger_id, record.entries) for topic_id, topic, ledger_id, record in found]


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


class View(NamedTuple):
    """The tables of a store as of one read transaction of its main environment."""

    store: Path
    identity: Identity
    raw: Reads
    known: Known | None
    """The logs of open partitions when the view began (`logs_now`); None: nobody asks for what is pending."""

    def batches(
        self, table: str, columns: Sequence[str], wanted: Wanted, as_of_ms: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a table that are wanted. as_of_ms: of `pending`, as in `pending_in`. Raises DamagedStore."""
        if table == "messages":
            generations = sealed_in(self.store, catalog.partitions(self.raw))
            for part in plan_in(self.raw, self.identity.store_id, generations, wanted, needs_claims(columns)):
                yield from scan_messages(part, columns, wanted)
            return
        if table == "pending":
            if self.known is None:
                raise InvalidArgument("table", table, "open_tables was told pending=False")
            wal = FollowedWal(self.store, self.identity.store_id)
            for each in pending_in(self.raw, self.store, self.identity, self.known, wanted, as_of_ms):
                yield from scan_pending(each, columns, wanted, wal=wal, raw=self.raw)
            return
        found: Iterable[pa.RecordBatch]
        if table == "markers":
            ledgers = marker_ledgers(self.raw, wanted)
            found = chain.from_iterable(scan_markers(each, lambda: nullcontext(self.raw)) for each in ledgers)
        else:
            found = small_batches(self.raw, self.store, table)
        for batch in found:
            yield narrowed(batch, table, wanted, columns)


_STATES = {"messages": PartitionState.CLOSED, "pending": PartitionState.OPEN}


class CopyTask(NamedTuple):
    """The rows of a table that one task reads; as_of_ms: of `pending`, as in `pending_in`. Picklable."""

    excerpt: Excerpt
    table: str
    wanted: Wanted
    as_of_ms: int | None = None


def plan_copy(copy: CopiedStore, table: str, wanted: Wanted, as_of_ms: int | None = None) -> list[CopyTask]:
    """The tasks of everything that is wanted of a table."""
    main = Excerpt(copy.main, {}, None, str(copy.path))
    state = _STATES.get(table)
    if state is None:
        return [CopyTask(main._replace(catalog=copy.catalog), table, wanted)]
    if as_of_ms is None and table == "pending":
        with closing(Environment(copy.path / "main", name="main", read_only=True)) as opened, opened.read() as raw:
            as_of_ms = now_ms(raw)
    tasks = [
        CopyTask(
            excerpt(copy, sealed.start_ms), table, wanted._replace(partitions=frozenset({sealed.partition})), as_of_ms
        )
        for sealed, its_state, _ in copied_partitions(copy)
        if its_state is state and wanted.has_partition(sealed)
    ]
    if table == "pending" and wanted.partitions is None:  # what waits in main logs
        tasks.append(CopyTask(main, table, wanted, as_of_ms))
    return tasks


def scan_copy(task: CopyTask, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a task. Raises ReplicaDamaged, ReplicaRefused, ReplicaUnreachable, DamagedStore, StoreFull."""
    with task.excerpt.fetched() as path:
        known = logs_now(path) if task.table == "pending" else None
        with open_main_to_read(path) as (identity, main), main.read() as raw:
            view = View(path, identity, raw, known)
            yield from view.batches(task.table, columns, task.wanted, task.as_of_ms)
