"""Messages that are still to come, as record batches of the same columns: planned by main, read beside a writer.

A row is a message of an open partition that has not fired and was not cancelled, or one that waits inline in a main log
and is not due as of the view. The view is of one point in time: what main says (fired, cancelled, admitted) is of one
read transaction, and of what was sent there is all that was in the logs when the view began (`logs_now`, before that
transaction), with what took the place of a message of it since. What is sent meanwhile is left out.

Nothing is locked but LMDB's pages: a log's entries never change, so each batch is read in a transaction of its own, and
the next one goes on behind it. An open partition is read under LMDB's reader locks, with what the write-ahead log has
of it, on the machine that has the store open. A partition that closes meanwhile stays readable; one that is deleted or
replaced before it is read is DamagedStore, never a part that is missing.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ...opening import Identity
from ...partitions import cancellations
from ...store.codec import format as fmt
from ...store.codec.format import LedgerRecord, LedgerState, PartitionRecord, PartitionState, Table
from ...store.codec.frontier import UNREADABLE_DUE
from ...store.codec.run import Run
from ...store.env.memtable import Reads
from ...store.errors import DamagedStore
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.wal.followed_wal import FollowedWal
from .scan_arrow import BODY_COLUMNS, MESSAGES, record_batch, schema_of
from .scan_plan import USUAL, LogRange, Logs, Sizes, Wanted, cut, logs_of
from .scan_rows import BATCH_ROWS, Batch, Bools, batches
from .sealed import Sealed, open_generation, open_main_to_read, read_sealed

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
    if as_of_ms is None:
        mark = catalog.fields_of(raw, fmt.counter_key(catalog.CLOCK))
        as_of_ms = max(time.time_ns() // 1_000_000, 0 if mark is None else fmt.unpack_u64(mark))
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


def _open_ones(store: Path, listed: Iterable[tuple[int, PartitionRecord]]) -> Iterator[tuple[Sealed, PartitionRecord]]:
    for start_ms, record in listed:
        if record.state is PartitionState.OPEN:  # one that is not there: opening it says so
            yield Sealed.of(store, start_ms, record), record


def _logs_of(sealed: Sealed, store_id: bytes, wal: FollowedWal) -> Logs:
    with open_generation(sealed, store_id, wal) as environment:
        return logs_of(environment)


def _ranges(raw: Reads, start_ms: int, logs: Logs, tails: dict[int, int], wanted: Wanted) -> Iterator[LogRange]:
    """Ranges that may be pending in one partition; of entries that were not known only those that are admitted."""
    for topic_id, ledger_id, tail in logs:
        topic = catalog.topic_name(raw, topic_id)
        if topic is None or (wanted.topics is not None and topic not in wanted.topics):
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
    for key, fields in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
        topic_id, ledger_id = fmt.leading_u32(key), fmt.trailing_u64(key)
        topic = catalog.topic_name(raw, topic_id)
        trimming = LedgerRecord.unpack(fields).state is LedgerState.TRIMMING
        if trimming or topic is None or (wanted.topics is not None and topic not in wanted.topics):
            continue
        tail = find_tail(raw, "main", ledger_id)
        if tail:
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
