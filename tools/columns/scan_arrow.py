"""Messages as Arrow record batches: the schema, and slices read by it, of sealed generations or of what is to come.

This is the schema of the tables `messages` and `pending` and of an export's Parquet files. Which columns are asked for
decides what is read: HEADER_COLUMNS come from the headers of runs; any other has every body read and verified.

The fixed beginning of a body (publish time, length of the payload) is read for all bodies at once. Of a bare message
that is all: payloads are joined and never looked at, and a checksum for each is all that is left to do one by one. A
body of any other form goes through `decode_body`, which knows them all.

To come is a message of an open partition that has not fired and was not cancelled, or one that waits inline in a main
log and is not due as of the view. The view is of one point in time: what main says (fired, cancelled, admitted) is of
one read transaction, and of what was sent there is all that was in the logs when the view began (`logs_now`, before
that transaction), with what took the place of a message of it since. What is sent meanwhile is left out. Nothing is
locked but LMDB's pages: a log's entries never change, so each batch is read in a transaction of its own, and the next
one goes on behind it. An open partition is read under LMDB's reader locks, with what the write-ahead log has of it, on
the machine that has the store open. A partition that closes meanwhile stays readable; one that is deleted or replaced
before it is read is DamagedStore, never a part that is missing.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...opening import Identity
from ...partitions import cancellations
from ...store.codec import format as fmt
from ...store.codec.body import decode_body
from ...store.codec.checksum import crc32
from ...store.codec.format import PartitionRecord, PartitionState, Table
from ...store.codec.frontier import UNREADABLE_DUE
from ...store.codec.run import Int64s, Run
from ...store.env.memtable import Reads
from ...store.errors import DamagedStore, InvalidArgument
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.position import MAX_ID
from ...store.wal.followed_wal import FollowedWal
from .scan_rows import (
    BATCH_ROWS,
    USUAL,
    Batch,
    Bools,
    LogRange,
    Logs,
    Sizes,
    Slice,
    Wanted,
    batches,
    cut,
    kept_ledgers,
    logs_of,
)
from .sealed import Sealed, open_generation, open_main_to_read, read_sealed

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
    """True where `plan_scan` has to read what main says of entries."""
    return not CLAIM_COLUMNS.isdisjoint(columns)


def scan_messages(
    part: Slice, columns: Sequence[str] = tuple(MESSAGES.names), wanted: Wanted | None = None, rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in order of log and entry. Opens the generation, and closes it at the end or on `close`.

    rows: of a batch, about. Raises DamagedStore where the generation is not there any more.
    """
    schema = schema_of(columns)
    bodies = not BODY_COLUMNS.isdisjoint(columns)
    with open_generation(part.sealed, part.store_id) as environment, environment.read() as raw:
        for batch in batches(raw, part.sealed.name, part.ranges, rows=rows, bodies=bodies):
            batch.keep_due(wanted or Wanted())
            if batch.rows:
                yield record_batch(batch, part.sealed, schema)


def record_batch(batch: Batch, place: Sealed | None, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema`, of a batch of a generation; None: of main logs. REQUIRES: the batch's transaction."""
    bodies = None if BODY_COLUMNS.isdisjoint(schema.names) else read_bodies(batch)

    def of_range(values: list[object], kind: pa.DataType) -> pa.Array:
        array = pa.array(values, type=kind)
        return array.take(pa.array(batch.places())) if len(values) > 1 else pa.repeat(array[0], batch.rows)

    def of_place(value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), batch.rows)

    def due_ms() -> pa.Array:
        unreadable = batch.dues == UNREADABLE_DUE
        return pa.array(batch.dues, mask=unreadable if unreadable.any() else None)

    def replaces(which: int) -> pa.Array:
        conditional = batch.conditional()
        if not conditional.any():
            return pa.nulls(batch.rows, pa.int64())
        return pa.array(batch.replaced()[which], mask=np.logical_not(conditional))

    makers: dict[str, Callable[[], pa.Array]] = {
        "topic": lambda: of_range([each.topic for each in batch.ranges], pa.string()),
        "topic_id": lambda: of_range([each.topic_id for each in batch.ranges], pa.int64()),
        "partition": lambda: of_place(None if place is None else place.partition, pa.string()),
        "generation": lambda: of_place(None if place is None else place.generation, pa.int64()),
        "ledger_id": lambda: pa.array(batch.ledger_ids()),
        "entry_id": lambda: pa.array(batch.entry_ids()),
        "due_ms": due_ms,
        "body_bytes": lambda: pa.array(batch.body_spans()[1]),
        "dropped": lambda: pa.array(batch.dropped(batch.body_spans()[1])),
        "withdrawn": lambda: pa.array(batch.withdrawn()),
        "conditional": lambda: pa.array(batch.conditional()),
        "replaces_ledger": lambda: replaces(0),
        "replaces_entry": lambda: replaces(1),
    }
    arrays = [getattr(bodies, name) if name in BODY_COLUMNS else makers[name]() for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_PAD = bytes(16)
_HEAD_BYTES = 16


class Bodies(NamedTuple):
    """The columns of a batch's bodies, a value for each row; null where there is no body, or none that is whole."""

    publish_ms: pa.Array
    payload: pa.Array
    key: pa.Array
    properties: pa.Array
    extra: pa.Array
    reason: pa.Array


def read_bodies(batch: Batch) -> Bodies:
    """Verify and decode. Rows of runs that cannot be read have that for their reason."""
    starts, sizes, checksums, data = _gather(batch)
    view = memoryview(data)
    ends = starts + sizes
    found = [crc32(view[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    there = sizes != 0
    whole = np.fromiter(found, dtype=np.uint32, count=len(found)) == checksums
    reasons: dict[int, str] = dict(batch.damage())
    for row in np.flatnonzero(there & ~whole).tolist():
        reasons[row] = "body does not match its checksum"
    return _decode(data, starts, ends, there & whole, reasons)


def _gather(batch: Batch) -> tuple[Int64s, Int64s, npt.NDArray[np.uint32], bytes]:
    """Where each body lies in the joined bytes of all runs, its size, its checksum, and the bytes."""
    starts, sizes = batch.body_spans()
    counts = [piece.high - piece.low for piece in batch.pieces]
    parts: list[bytes | memoryview] = []
    bases, checksums, at = [], [], 0
    for _, run, _, _, low, high, _ in batch.pieces:
        if run is None:
            bases.append(at)
            checksums.append(np.zeros(1, dtype=np.uint32))
            continue
        first, limit, part = run.body_region(low, high)
        bases.append(at - first)
        checksums.append(run.body_checksums()[low:high])
        parts.append(part)
        if len(part) < limit - first:
            parts.append(bytes(limit - first - len(part)))
        at += limit - first
    offsets = np.repeat(np.array(bases, dtype=np.int64), counts)
    checks = np.concatenate(checksums)
    if batch.kept is not None:
        offsets, checks = offsets[batch.kept], checks[batch.kept]
    parts.append(_PAD)
    return starts + offsets, sizes, checks, b"".join(parts)


def _decode(data: bytes, starts: Int64s, ends: Int64s, whole: Bools, reasons: dict[int, str]) -> Bodies:
    rows = len(starts)
    heads = np.zeros((rows, _HEAD_BYTES), dtype=np.uint8)
    octets = np.frombuffer(data, dtype=np.uint8)
    at = np.flatnonzero(whole)
    heads[at] = np.lib.stride_tricks.sliding_window_view(octets, _HEAD_BYTES)[starts[at]]
    publish = heads[:, 2:10].copy().view(">u8")[:, 0].astype(np.int64)
    width = heads[:, 10]
    lengths = heads[:, 11].astype(np.int64)
    heads_bytes = np.full(rows, 12, dtype=np.int64)
    for code, size, form in ((0xC5, 13, ">u2"), (0xC6, 15, ">u4")):
        wider = np.flatnonzero(width == code)
        lengths[wider] = heads[wider, 11:size].copy().view(form)[:, 0]
        heads_bytes[wider] = size
    first = starts + heads_bytes
    limit = first + lengths
    bare = whole & (heads[:, 0] == 0x92) & (heads[:, 1] == 0xCF) & (width >= 0xC4) & (width <= 0xC6)
    bare &= (limit == ends) & (publish >= 0)
    # Slices of bytes, not of a memoryview: a hundred thousand views at a time keep the garbage collector busy.
    payloads: list[bytes | None] = [None] * rows
    for row, start, end in zip(
        *(each.tolist() for each in (np.flatnonzero(bare), first[bare], ends[bare])), strict=True
    ):
        payloads[row] = data[start:end]
    view = memoryview(data)
    keys: dict[int, str] = {}
    maps: dict[int, dict[str, str]] = {}
    extras: dict[int, bytes] = {}
    for row in np.flatnonzero(whole & ~bare).tolist():
        try:
            publish_ms, payload, key, properties, extra = decode_body(view[int(starts[row]) : int(ends[row])])
            if publish_ms > MAX_ID:
                raise ValueError("publish_ms of a body is no time in ms")
        except ValueError as error:
            reasons[row] = str(error)
            continue
        publish[row], payloads[row] = publish_ms, payload
        if key is not None:
            keys[row] = key
        if properties is not None:
            maps[row] = properties
        if extra is not None:
            extras[row] = msgpack.packb(extra)
    missing = np.array([each is None for each in payloads])
    return Bodies(
        publish_ms=pa.array(publish, mask=missing),
        payload=pa.array(payloads, type=pa.binary()),
        key=_sparse(keys, rows, pa.string()),
        properties=_properties(maps, missing),
        extra=_sparse(extras, rows, pa.binary()),
        reason=_sparse(reasons, rows, pa.string()),
    )


def _properties(maps: dict[int, dict[str, str]], missing: Bools) -> pa.Array:
    """Null where there is no message, an empty map where a message has none."""
    names: list[str] = []
    values: list[str] = []
    ends = np.zeros(len(missing) + 1, dtype=np.int32)
    for row in sorted(maps):
        names.extend(maps[row])
        values.extend(maps[row].values())
        ends[row + 1] = len(maps[row])
    offsets = pa.array(np.cumsum(ends, dtype=np.int32), mask=np.append(missing, False))
    return pa.MapArray.from_arrays(offsets, pa.array(names, pa.string()), pa.array(values, pa.string()))


def _sparse(values: dict[int, str] | dict[int, bytes], rows: int, kind: pa.DataType) -> pa.Array:
    if not values:
        return pa.nulls(rows, kind)
    return pa.array([values.get(row) for row in range(rows)], type=kind)


Known = dict[int, Logs]
"""By start of an open partition, its logs."""


class PendingSlice(NamedTuple):
    """The ranges that one task reads: of the logs of an open partition, or, `sealed` None, of main logs. Picklable."""

    store: str
    store_id: bytes
    sealed: Sealed | None
    ranges: tuple[LogRange, ...]
    as_of_ms: int


# -- planning ------------------------------------------------------------------------------------


def plan_pending(
    store: Path, wanted: Wanted | None = None, *, as_of_ms: int | None = None, sizes: Sizes = USUAL
) -> list[PendingSlice]:
    """Slices of what is pending and `wanted`. O(logs of open partitions, runs of main logs)."""
    known = logs_now(store)

    def plan(raw: Reads, identity: Identity, _: list[Sealed]) -> list[PendingSlice]:
        return pending_in(raw, store, identity, known, wanted or Wanted(), as_of_ms, sizes)

    return read_sealed(store, plan)


def logs_now(store: Path) -> Known:
    """The logs of every open partition. Raises DamagedStore for one that cannot be opened, and is still there."""
    with open_main_to_read(store) as (identity, main):
        wal = FollowedWal(store, identity.store_id)
        with main.read() as raw:
            listed = catalog.partitions(raw)
        found: Known = {}
        for sealed, record in _open_ones(store, listed):
            try:
                found[sealed.start_ms] = _logs_of(sealed, identity.store_id, wal)
            except DamagedStore:
                with main.read() as raw:
                    if (sealed.start_ms, record) in catalog.partitions(raw):
                        raise
        return found


def pending_in(
    raw: Reads,
    store: Path,
    identity: Identity,
    known: Known,
    wanted: Wanted,
    as_of_ms: int | None = None,
    sizes: Sizes = USUAL,
) -> list[PendingSlice]:
    """The plan in a read transaction of main that began after `known` was read.

    as_of_ms: by when what waits inline is not pending any more; None: now, or the store's clock where that is later.
    """
    as_of_ms = now_ms(raw) if as_of_ms is None else as_of_ms
    wal = FollowedWal(store, identity.store_id)
    place = os.fspath(store.absolute())
    found: list[PendingSlice] = []
    for sealed, _ in _open_ones(store, catalog.partitions(raw)):
        if wanted.has_partition(sealed):
            tails = {ledger_id: tail for _, ledger_id, tail in known.get(sealed.start_ms, [])}
            logs = _logs_of(sealed, identity.store_id, wal)
            ranges = _ranges(raw, sealed.start_ms, logs, tails, wanted)
            parts = cut(ranges, sealed.file_bytes, sizes)
            found += [PendingSlice(place, identity.store_id, sealed, part, as_of_ms) for part in parts]
    if wanted.partitions is None:
        parts = cut(_main_ranges(raw, wanted), 0, sizes)
        found += [PendingSlice(place, identity.store_id, None, part, as_of_ms) for part in parts]
    return found


def now_ms(raw: Reads) -> int:
    """Now, or the store's clock where that is later."""
    mark = catalog.fields_of(raw, fmt.counter_key(catalog.CLOCK))
    return max(time.time_ns() // 1_000_000, 0 if mark is None else fmt.unpack_u64(mark))


def _open_ones(store: Path, listed: Iterable[tuple[int, PartitionRecord]]) -> Iterator[tuple[Sealed, PartitionRecord]]:
    for start_ms, record in listed:
        if record.state is PartitionState.OPEN:  # one that is not there: opening it says so
            yield Sealed.of(store, start_ms, record).refuse_away(), record


def _logs_of(sealed: Sealed, store_id: bytes, wal: FollowedWal) -> Logs:
    with open_generation(sealed, store_id, wal) as environment:
        return logs_of(environment)


def _ranges(raw: Reads, start_ms: int, logs: Logs, tails: dict[int, int], wanted: Wanted) -> Iterator[LogRange]:
    """Ranges that may be pending in one partition; of entries that were not known only those that are admitted."""
    for topic_id, ledger_id, tail in logs:
        topic = catalog.topic_name(raw, topic_id)
        if topic is None or not wanted.has_topic(topic):
            continue
        admitted = cancellations.members(raw, Table.ADMITTED, ledger_id)
        cancelled = cancellations.members(raw, Table.CANCELLED, ledger_id)
        known = tails.get(ledger_id, 0)
        limit = min(tail, max(known, admitted.max() + 1 if admitted else 0))
        frontier = catalog.frontier(raw, topic_id, start_ms)
        if limit:
            both = cancelled.serialize(), admitted.serialize()
            yield LogRange(topic_id, topic, ledger_id, 0, limit, *both, frontier, known)


def _main_ranges(raw: Reads, wanted: Wanted) -> Iterator[LogRange]:
    for topic_id, topic, ledger_id, _ in kept_ledgers(raw, wanted):
        if tail := find_tail(raw, "main", ledger_id):
            yield LogRange(topic_id, topic, ledger_id, 0, tail)


# -- reading -------------------------------------------------------------------------------------


def scan_pending(
    part: PendingSlice,
    columns: Sequence[str] = tuple(MESSAGES.names),
    wanted: Wanted | None = None,
    *,
    wal: FollowedWal | None = None,
    raw: Reads | None = None,
    rows: int = BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in order of log and entry.

    wal: that of the store, where the caller follows it; its segments are read once then, not for each slice. raw: the
    caller's transaction of main; None: a slice of main logs opens the main environment. Raises DamagedStore where the
    partition is not there any more.
    """
    schema = schema_of(columns)
    wanted = wanted or Wanted()
    bodies = not BODY_COLUMNS.isdisjoint(columns)
    with ExitStack() as stack:
        if part.sealed is None:
            if raw is None:
                _, main = stack.enter_context(open_main_to_read(Path(part.store)))
                raw = stack.enter_context(main.read())

            def is_early(run: Run) -> bool:
                return run.early and int(run.dues().max()) > part.as_of_ms

            for batch in batches(raw, "main", part.ranges, rows=rows, bodies=bodies, only=is_early):
                batch.keep(batch.dues > part.as_of_ms)  # what cannot be read has no due time: it is no row here
                batch.keep_due(wanted)
                if batch.rows:
                    yield record_batch(batch, None, schema)
            return
        wal = wal or FollowedWal(Path(part.store), part.store_id)
        environment = stack.enter_context(open_generation(part.sealed, part.store_id, wal))
        left = part.ranges
        while left:
            found = None
            with environment.read() as of_batch:
                for batch in batches(of_batch, environment.name, left, rows=rows, bodies=bodies):
                    left_then = batch.rest()
                    batch.keep(_is_pending(batch))
                    batch.keep_due(wanted)
                    if batch.rows:
                        found = record_batch(batch, part.sealed, schema)
                        break
                else:
                    left_then = ()
            left = left_then
            if found is not None:
                yield found


def _is_pending(batch: Batch) -> Bools:
    """True for the rows that are still to come; one that cannot be read may be."""
    ids, places, conditional = batch.entry_ids(), batch.places(), batch.conditional()
    waiting: Bools = ~batch.withdrawn()
    for place in np.unique(places).tolist():
        log = batch.ranges[place]
        rows = np.flatnonzero(places == place)
        waiting[rows] &= (ids[rows] < log.known) | conditional[rows]
        if log.frontier is not None:
            waiting[rows] &= ~log.frontier.has_fired(ids[rows], batch.dues[rows])
    waiting |= batch.dues == UNREADABLE_DUE
    return waiting
