"""What has fired, under repair: of frontiers and markers each tells the other.

A frontier whose record is lost is at the last of what has fired: what has a marker, and what a snapshot says had. What
lies before the first marker that is kept has fired too, since entries fire in order, and its markers were trimmed. What
lies in between and has neither marker nor cancellation gets a marker now: it may be a late entry that was about to
fire, or one whose marker is lost. So none is lost, and at most those come twice.

A run of markers that cannot be read points at messages that lie whole in their partitions. Messages that are before
their frontier, were not cancelled and have no marker are the ones that it pointed at, or such as were trimmed: of these
there are more than the run had only where a topic has trimmed some of a log, and then the latest are taken. Where they
are exactly as many as the hole, and of one log, the run is written anew in its place, and what was acknowledged of it
stays so; else they get markers at the end of the log, and those that a subscription had acknowledged come again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ...partitions import cancellations
from ...partitions.due_column import DueBatch, scan_dues
from ...snapshot.stored import SnapshotState, inspect_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import LedgerState, PartitionRecord, PartitionState, Table
from ...store.codec.frontier import HELD, NOTHING_FIRED, FrontierRecord, at_or_before
from ...store.codec.run import Int64s, Run, RunKind, UInt32s, pack_markers
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.env.transaction import Transaction
from ...store.log import catalog
from ...store.log.ledger import MAX_RUN_ENTRIES, find_tail
from ...store.log.scan import runs
from ...store.position import Position
from .repair_catalog import kept_ledgers
from .repair_report import Account

OpenLog = Callable[[int], AbstractContextManager[tuple[Environment, int, int] | None]]
"""(environment, topic id, start of the partition) of the partition log with a ledger id, open inside the block."""


def marker_runs(raw: Reads, ledgers: Iterable[int]) -> Iterator[Run]:
    """The runs of markers in some ledgers of main logs, as far as they can be read."""
    for ledger_id in ledgers:
        for run in runs(raw, "main", ledger_id):
            if isinstance(run, Run) and run.kind == RunKind.MARKERS:
                yield run


class Marked(NamedTuple):
    """The markers of one log that are kept: entries, first and latest of them as (due, entry), where the last lies.

    Where there are none: NOTHING_FIRED twice, and position 0:0.
    """

    entries: BitMap
    first: tuple[int, int]
    latest: tuple[int, int]
    last: Position


def marked(raw: Reads, topic_id: int, target: int) -> Marked:
    """The markers of a log in its topic's main log, as far as they can be read."""
    entries = BitMap()
    first = latest = NOTHING_FIRED
    last = Position(0, 0)
    for run in marker_runs(raw, kept_ledgers(raw, topic_id)):
        if run.target == target:
            pairs = list(zip(run.dues().tolist(), run.targets().tolist(), strict=True))
            first = first if entries else pairs[0]
            latest = max(latest, *pairs)
            entries.update(entry for _, entry in pairs)
            last = Position(run.ledger_id, run.limit - 1)
    return Marked(entries, first, latest, last)


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
        if found.entries or topic_id in damaged:
            dues = due_column(environment, ledger_id, admitted)
            _mend(main, environment, start_ms, partition, (topic_id, ledger_id), found, dues, cancelled, account)


def _mend(
    main: Environment, environment: Environment, start_ms: int, partition: PartitionRecord, log: tuple[int, int],
    found: Marked, dues: Int64s, cancelled: BitMap, account: Account,
) -> None:  # fmt: skip
    topic_id, ledger_id = log
    known, reached = found.entries, found.latest
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
    again = BitMap() if closed else passed - known - passed_in(dues, found.first)

    def work(transaction: Transaction) -> None:
        place = append_markers(transaction, topic_id, ledger_id, start_ms, again, dues) if again else found.last
        released = int(closed and not found.entries)
        record = FrontierRecord(ledger_id, *reached, len(dues), len(passed), *place, released)
        transaction.put(fmt.frontier_key(topic_id, start_ms), record.pack())

    if reached[0] >= 0:
        main.write(work)
    account.report.again += len(again)
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
    ids = _in_due_order(entries, dues)
    first = find_tail(raw, "main", open_ledger)
    key = fmt.run_key(open_ledger, first)
    raw.put(key, pack_markers(key, target, base_ms, ids, dues[ids]))
    return Position(open_ledger, first + len(ids) - 1)


def _in_due_order(entries: BitMap, dues: Int64s) -> UInt32s:
    ids = np.array(entries, dtype=np.uint32)
    return ids[np.lexsort((ids, dues[ids]))]


class _Log(NamedTuple):
    """A log whose fired entries lack markers."""

    start_ms: int
    frontier: FrontierRecord
    dues: Int64s
    unmarked: BitMap
    before: tuple[int, int]
    """(due, entry) of the last marker before the hole; what is at or before it was trimmed, or fired late."""


def restore_markers(
    main: Environment, topic_id: int, holes: dict[int, BitMap], open_log: OpenLog, account: Account
) -> tuple[dict[int, BitMap], int]:
    """Give entries markers again whose markers were lost with `holes` of the topic's main log.

    Returns the positions that are whole again, and how many markers were appended instead.
    """
    size = sum(map(len, holes.values()))
    if not size:
        return {}, 0
    logs = _logs(main, topic_id, min(Position(ledger, of.min()) for ledger, of in holes.items() if of), open_log)
    found = sorted((int(log.dues[entry]), entry, at) for at, log in enumerate(logs) for entry in log.unmarked)
    if len(found) > size:
        found = [row for row in found if row[:2] > logs[row[2]].before][-size:]
    taken = [BitMap(entry for _, entry, at in found if at == number) for number in range(len(logs))]
    if not found:
        return {}, 0
    place = _one_range(holes)
    alone = logs[found[0][2]]
    if (
        place is not None
        and len(found) == size
        and len({at for _, _, at in found}) == 1
        and found[0][:2] > alone.before
    ):
        main.write(lambda transaction: _write_in_place(transaction, place, size, alone, taken[found[0][2]]))
        account.say(f"main, ledger {place.ledger_id}: {size} markers made anew from {place.entry_id} on")
        return holes, 0

    def work(transaction: Transaction) -> None:
        for log, entries in zip(logs, taken, strict=True):
            if entries:
                ledger_id = log.frontier.ledger_id
                last = append_markers(transaction, topic_id, ledger_id, log.start_ms, entries, log.dues)
                moved = log.frontier._replace(marker_ledger=last.ledger_id, marker_entry=last.entry_id)
                transaction.put(fmt.frontier_key(topic_id, log.start_ms), moved.pack())

    main.write(work)
    account.say(f"topic {topic_id}: {len(found)} messages whose markers are lost got new ones at the end of its log")
    return {}, len(found)


def _logs(main: Environment, topic_id: int, hole: Position, open_log: OpenLog) -> list[_Log]:
    """The logs of a topic in which entries have fired that have no marker."""
    found = []
    with main.read() as raw:
        frontiers = [row for row in catalog.frontiers(raw, topic_id) if row[2].fired and not row[2].released]
        marked: dict[int, BitMap] = {}
        before: dict[int, tuple[int, int]] = {}
        for run in marker_runs(raw, kept_ledgers(raw, topic_id)):
            marked.setdefault(run.target, BitMap()).update(run.targets().tolist())
            if (run.ledger_id, run.first_entry) < hole:
                pairs = zip(run.dues().tolist(), run.targets().tolist(), strict=True)
                before[run.target] = max(before.get(run.target, NOTHING_FIRED), *pairs)
    for _, start_ms, row in frontiers:
        ledger_id = row.ledger_id
        with main.read() as raw:
            cancelled = cancellations.members(raw, Table.CANCELLED, ledger_id)
            admitted = cancellations.members(raw, Table.ADMITTED, ledger_id)
        with open_log(ledger_id) as log:
            if log is None:
                continue
            dues = due_column(log[0], ledger_id, admitted)
        unmarked = fired_in(dues, row) - cancelled - marked.get(ledger_id, BitMap())
        if unmarked:
            found.append(_Log(start_ms, row, dues, unmarked, before.get(ledger_id, NOTHING_FIRED)))
    return found


def _one_range(holes: dict[int, BitMap]) -> Position | None:
    """Where the hole begins, if it is one."""
    (ledger_id, entries), *others = [(ledger_id, entries) for ledger_id, entries in holes.items() if entries]
    if others or entries.max() - entries.min() + 1 != len(entries):
        return None
    return Position(ledger_id, entries.min())


def _write_in_place(transaction: Transaction, place: Position, size: int, log: _Log, entries: BitMap) -> None:
    """Replace what fills a hole by runs of markers, in due order."""
    cursor = transaction.raw.cursor()
    limit = fmt.run_key(place.ledger_id, place.entry_id + size)
    while cursor.set_range(fmt.run_key(*place)) and bytes(cursor.key()) < limit:
        cursor.delete()
    ids = _in_due_order(entries, log.dues)
    for at in range(0, size, MAX_RUN_ENTRIES):
        part = ids[at : at + MAX_RUN_ENTRIES]
        key = fmt.run_key(place.ledger_id, place.entry_id + at)
        transaction.raw.put(key, pack_markers(key, log.frontier.ledger_id, log.start_ms, part, log.dues[part]))
