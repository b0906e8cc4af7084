"""Frontiers under repair: how far a log has fired, told by its markers and snapshots where the record is lost.

What has a marker has fired, and so has what a snapshot says had. The frontier is at the last of those. What lies before
the first marker that is kept has fired too, since entries fire in order, and its markers were trimmed. What lies in
between and has neither marker nor cancellation gets a marker now: it may be a late entry that was about to fire, or one
whose marker is lost. So none is lost, and at most those come twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import lmdb
import numpy as np
from pyroaring import BitMap

from ...partitions import cancellations
from ...partitions.due_column import DueBatch, scan_dues
from ...snapshot.stored import SnapshotState, inspect_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import LedgerState, PartitionRecord, PartitionState, Table
from ...store.codec.frontier import HELD, NOTHING_FIRED, FrontierRecord, at_or_before
from ...store.codec.run import Int64s, Run, RunKind, pack_markers
from ...store.env.environment import Environment
from ...store.env.transaction import Transaction
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.log.scan import runs
from ...store.position import Position
from .repair_report import Account


class Marked(NamedTuple):
    """The markers of one log that are kept: entries, the first of them as (due, entry), where the last lies."""

    entries: BitMap
    first: tuple[int, int]
    latest: tuple[int, int]
    last: Position


def marked(raw: lmdb.Transaction, topic_id: int, target: int) -> Marked | None:
    """The markers of a log in its topic's main log, as far as they can be read; None: there are none."""
    entries = BitMap()
    first = latest = NOTHING_FIRED
    last = Position(0, 0)
    for ledger_id, record in catalog.ledgers(raw, topic_id):
        if record.state is LedgerState.TRIMMING:
            continue
        for run in runs(raw, "main", ledger_id):
            if isinstance(run, Run) and run.kind == RunKind.MARKERS and run.target == target:
                pairs = list(zip(run.dues().tolist(), run.targets().tolist(), strict=True))
                first = first if entries else pairs[0]
                latest = max(latest, *pairs)
                entries.update(entry for _, entry in pairs)
                last = Position(ledger_id, run.limit - 1)
    return Marked(entries, first, latest, last) if entries else None


def due_column(environment: Environment, ledger_id: int, admitted: BitMap) -> Int64s:
    """The due times of a log by entry id, HELD for what never fires or cannot be read."""
    with environment.read() as raw:
        tail = find_tail(raw, environment.name, ledger_id)
    dues = np.full(tail, HELD, dtype=np.int64)
    for batch in scan_dues(environment, ledger_id, 0, tail, admitted):
        if isinstance(batch, DueBatch):
            dues[batch.first_entry : batch.first_entry + len(batch.dues)] = batch.dues
    return dues


def passed_in(dues: Int64s, place: tuple[int, int]) -> BitMap:
    """The entries of a due column at or before (due, entry), held ones left out."""
    entries = np.arange(len(dues), dtype=np.uint32)
    return BitMap(entries[at_or_before(entries, dues, *place) & (dues != HELD)])


def fired_in(dues: Int64s, frontier: FrontierRecord) -> BitMap:
    """The entries of a due column that have fired."""
    entries = np.arange(len(dues), dtype=np.uint32)
    return BitMap(entries[frontier.has_fired(entries, dues) & (dues != HELD)])


def mend_frontiers(
    main: Environment,
    environment: Environment,
    start_ms: int,
    partition: PartitionRecord,
    logs: dict[int, int],
    lost: Iterable[bytes],
    account: Account,
) -> None:
    """Make the frontiers of a partition anew that are lost: those of `lost` keys, and of logs that have markers."""
    here = [key for key in lost if key[0] == Table.FRONTIER and fmt.trailing_u64(key) == start_ms]
    damaged = {fmt.leading_u32(key) for key in here}
    for topic_id, ledger_id in logs.items():
        with main.read() as raw:
            if catalog.frontier(raw, topic_id, start_ms) is not None or catalog.topic_name(raw, topic_id) is None:
                continue
            found = marked(raw, topic_id, ledger_id)
            admitted = cancellations.members(raw, Table.ADMITTED, ledger_id)
            cancelled = cancellations.members(raw, Table.CANCELLED, ledger_id)
        if found is not None or topic_id in damaged:
            dues = due_column(environment, ledger_id, admitted)
            _mend(main, environment, start_ms, partition, (topic_id, ledger_id), found, dues, cancelled, account)


def _mend(
    main: Environment, environment: Environment, start_ms: int, partition: PartitionRecord, log: tuple[int, int],
    found: Marked | None, dues: Int64s, cancelled: BitMap, account: Account,
) -> None:  # fmt: skip
    topic_id, ledger_id = log
    known = BitMap() if found is None else found.entries
    reached = NOTHING_FIRED if found is None else found.latest
    for snapshot in inspect_snapshots(environment, ledger_id):
        if snapshot.state is SnapshotState.COMPLETE and snapshot.metadata is not None:
            metadata = snapshot.metadata
            place = (metadata.due_ms, metadata.entry_id)
            known = known | passed_in(dues[: metadata.absorbed_end], place)
            reached = max(reached, place)
    closed = partition.state is PartitionState.CLOSED
    if closed:  # then all of it has fired
        reached = (partition.end_ms, 0)
    passed = passed_in(dues, reached) - cancelled
    again = BitMap() if closed else passed - known
    if found is not None:
        again -= passed_in(dues, found.first)
    last = Position(0, 0) if found is None else found.last

    def work(transaction: Transaction) -> None:
        place = append_markers(transaction, topic_id, ledger_id, start_ms, again, dues) if again else last
        released = int(closed and found is None)
        record = FrontierRecord(ledger_id, *reached, len(dues), len(passed), *place, released)
        transaction.put(fmt.frontier_key(topic_id, start_ms), record.pack())

    if reached[0] >= 0:
        main.write(work)
    account.again += len(again)
    account.say(
        f"{environment.name}, ledger {ledger_id}: its frontier was lost, {len(passed)} entries have fired by what is "
        f"there, {len(again)} of them may come twice"
    )


def append_markers(
    transaction: Transaction, topic_id: int, target: int, base_ms: int, entries: BitMap, dues: Int64s
) -> Position:
    """Append markers of entries of a log to the topic's open ledger, in due order; the last one's place."""
    raw = transaction.raw
    open_ledger = next(row[0] for row in catalog.ledgers(raw, topic_id) if row[1].state is LedgerState.OPEN)
    ids = np.array(entries, dtype=np.uint32)
    ids = ids[np.lexsort((ids, dues[ids]))]
    first = find_tail(raw, "main", open_ledger)
    key = fmt.run_key(open_ledger, first)
    raw.put(key, pack_markers(key, target, base_ms, ids, dues[ids]))
    return Position(open_ledger, first + len(ids) - 1)
