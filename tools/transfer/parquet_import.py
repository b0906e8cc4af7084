"""Importing an export: its messages are sent again into an empty store, equal in all but their ids.

An archive is of closed partitions, so every message in it has fired once; which of them were acknowledged is not
carried over. They go into the main logs in order of due time, of equal ones in append order, and are due at once, with
the payload, key, properties, due time and publish time that they had; delay policies do not apply. Subscriptions are
made first, with nothing acknowledged: a topic without subscriptions would be trimmed. What never fires (cancelled,
replaced), what compaction dropped, what could not be read, and what belonged to a topic that was deleted, is counted
and left out. Messages that were still to come, where the export has them, are sent last and due when they were. The
deduplication keys of those and, where a key holds though its message has fired, of others are theirs again, for as long
as they were to be. Every file is read before anything is written, since a part of an archive could only be removed with
its store.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ... import DelayedStore, Message
from ...store.codec.body import EncodedBatch, encode_one
from ...store.codec.sent_ids import dedup_key_in
from ...store.errors import InvalidArgument
from ...store.message import Dedup
from .export_layout import PENDING, Export, ExportedFile

_COLUMNS = ["ledger_id", "entry_id", "due_ms", "publish_ms", "key", "properties", "payload", "extra"]
_LEFT_OUT = ("dropped", "withdrawn", "reason")
_WINDOW_ROWS = 200_000
"""Rows of a topic and day that are sorted in memory at a time."""

_BATCH_ROWS = 5_000
_BATCH_BYTES = 32 << 20


@dataclass
class Imported:
    """How far an import has come."""

    messages: int = 0
    pending: int = 0
    """The number of them that were still to come."""
    dropped: int = 0
    withdrawn: int = 0
    damaged: int = 0
    deleted_topics: int = 0
    topics: set[str] = field(default_factory=set)


def import_export(
    store: DelayedStore,
    export: Export,
    *,
    subscriptions: Sequence[str] | None = None,
    progress: Callable[[Imported], object] = lambda done: None,
) -> Imported:
    """Send the messages of an export to an empty store.

    subscriptions: names to make in every topic; None: those that each topic had. Raises InvalidArgument for a store
    that has a topic already, DamagedStore for a file that cannot be read, both with nothing done; and what sending
    raises: then what was sent before stands, and `progress` was told of it.
    """
    if next(iter(store.topics()), None) is not None:
        raise InvalidArgument("STORE", str(store.path), "has topics; an export is imported into an empty store")
    for file in export.message_files:
        export.messages(file, [*_COLUMNS, *_LEFT_OUT])
    for _ in export.batches(PENDING):
        pass
    done = Imported()
    held = _held(export, store.clock.now_ms())
    names = _subscriptions(export, subscriptions)
    files = sorted(export.message_files, key=lambda file: (file.topic or "", file.day, file.path))
    for (topic, _), group in groupby(files, key=lambda file: (file.topic, file.day)):
        day = list(group)
        if topic is None:
            done.deleted_topics += sum(file.rows for file in day)
            continue
        _make(store, topic, names, done)
        for table in _in_order(export, day, done):
            _send(store, topic, table, held)
            done.messages += table.num_rows
            progress(done)
    for batch in export.batches(PENDING):
        table = pa.Table.from_batches([batch])
        readable = table.filter(pc.is_null(table["reason"]))
        done.damaged += table.num_rows - readable.num_rows
        for topic in pc.unique(readable["topic"]).to_pylist():
            of_topic = readable.filter(pc.equal(readable["topic"], topic)).select(_COLUMNS)
            _make(store, topic, names, done)
            _send(store, topic, of_topic, held, pending=True)
            done.messages += of_topic.num_rows
            done.pending += of_topic.num_rows
            progress(done)
    return done


def _make(store: DelayedStore, topic: str, names: dict[str, list[str]], done: Imported) -> None:
    if topic not in done.topics:
        done.topics.add(topic)
        for name in names.get(topic, []):
            store.topic(topic).subscribe(name).close()


def _subscriptions(export: Export, wanted: Sequence[str] | None) -> dict[str, list[str]]:
    if wanted is not None:
        topics = {file.topic for file in export.message_files}
        topics.update(name for batch in export.batches(PENDING) for name in pc.unique(batch["topic"]).to_pylist())
        return {topic: list(wanted) for topic in topics if topic is not None}
    found: dict[str, list[str]] = {}
    for row in export.table("subscriptions").select(["topic", "subscription"]).to_pylist():
        found.setdefault(row["topic"], []).append(row["subscription"])
    return found


def _held(export: Export, now_ms: int) -> dict[tuple[int, int], int]:
    """By ledger and entry, until when the key of a message holds although it has fired; those that do."""
    found: dict[tuple[int, int], int] = {}
    for batch in export.batches("keys"):
        until = batch.filter(pc.fill_null(pc.greater(batch["until_ms"], now_ms), False))
        for row in until.select(["ledger_id", "entry_id", "until_ms"]).to_pylist():
            found[row["ledger_id"], row["entry_id"]] = row["until_ms"]
    return found


def _in_order(export: Export, files: list[ExportedFile], done: Imported) -> Iterator[pa.Table]:
    """The rows of a topic and day that are to be sent, in order, a window of due times at a time."""
    heads = pa.concat_tables([export.messages(file, ["due_ms", *_LEFT_OUT]) for file in files])
    reasons = pc.is_valid(heads["reason"])
    done.damaged += pc.sum(reasons).as_py() or 0
    done.dropped += pc.sum(pc.and_not(heads["dropped"], heads["withdrawn"])).as_py() or 0
    done.withdrawn += pc.sum(heads["withdrawn"]).as_py() or 0
    dues = np.sort(heads.filter(_wanted(heads))["due_ms"].to_numpy())
    limits = [int(dues[at]) for at in range(_WINDOW_ROWS, len(dues), _WINDOW_ROWS)]
    start = -1
    for limit in [*dict.fromkeys(limits), 1 << 62]:
        parts = []
        for file in files:
            table = export.messages(file, [*_COLUMNS, *_LEFT_OUT])
            due = table["due_ms"]
            inside = pc.and_(pc.greater_equal(due, start), pc.less(due, limit))
            parts.append(table.filter(pc.and_(_wanted(table), pc.fill_null(inside, False))).select(_COLUMNS))
        table = pa.concat_tables(parts)
        order = [("due_ms", "ascending"), ("ledger_id", "ascending"), ("entry_id", "ascending")]
        if table.num_rows:
            yield table.sort_by(order)
        start = limit


def _wanted(table: pa.Table) -> pa.ChunkedArray:
    left_out = pc.or_(pc.or_(table["dropped"], table["withdrawn"]), pc.is_valid(table["reason"]))
    return pc.invert(left_out)


def _send(
    store: DelayedStore, topic: str, table: pa.Table, held: dict[tuple[int, int], int], *, pending: bool = False
) -> None:
    """Messages with their keys: of those that are pending all, of others those in `held`."""
    limit = 1 << 30  # it was within the limit of the store that took it
    bodies: list[bytes] = []
    dues: list[int] = []
    keys: dict[int, tuple[str, int]] = {}
    size = 0

    def flush() -> None:
        now_ms = store.clock.now_ms()
        column = np.array(dues, dtype=np.int64)
        dedups = {at: Dedup(key, max(until_ms - now_ms, 0), replace=False) for at, (key, until_ms) in keys.items()}
        batch = EncodedBatch(column, column > now_ms, list(bodies), dedups=dedups or None)
        store.topic(topic).sender.write(batch, now_ms)
        bodies.clear()
        dues.clear()
        keys.clear()

    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        for ledger_id, entry_id, due_ms, publish_ms, key, properties, payload, extra in zip(
            *(batch.column(name).to_pylist() for name in _COLUMNS), strict=True
        ):
            message = Message(payload, key=key, properties=dict(properties))
            facts = None if extra is None else msgpack.unpackb(extra)
            dedup_key, until_ms = dedup_key_in(facts), held.get((ledger_id, entry_id), 0)
            if dedup_key is not None and (pending or until_ms):
                keys[len(bodies)] = dedup_key, until_ms
            bodies.append(encode_one(message, publish_ms, limit, facts)[1])
            dues.append(due_ms)
            size += len(bodies[-1])
            if len(bodies) == _BATCH_ROWS or size >= _BATCH_BYTES:
                flush()
                size = 0
    if bodies:
        flush()
