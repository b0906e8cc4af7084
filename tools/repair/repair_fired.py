"""Frontiers, markers and cancellations under repair: what has fired, and what never will, each tells the others.

A frontier whose record is lost is at the last of what has fired: what has a marker, and what a snapshot says had. What
lies before the first marker that is kept has fired too, since entries fire in order, and its markers were trimmed. What
lies in between and has neither marker nor cancellation gets a marker now: it may be a late entry that was about to
fire, or one whose marker is lost. So none is lost, and at most those come twice.

A run of markers that cannot be read points at messages that lie whole in their partitions. Messages that are before
their frontier, were not cancelled and have no marker are the ones that it pointed at, or such as were trimmed: of these
there are more than the run had only where a topic has trimmed some of a log, and then the latest are taken. Where they
are exactly as many as the hole, and of one log, the run is written anew in its place, and what was acknowledged of it
stays so; else they get markers at the end of the log, and those that a subscription had acknowledged come again.

What was rescheduled names what it replaces, so of a cancellation and an admission either tells the other; a snapshot
holds what was pending when it was taken, so what it should hold and does not was cancelled. Messages that were
cancelled since, and by no rescheduling, cannot be told: they may be delivered, and how many those are at most is
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ...partitions import cancellations
from ...partitions.cancellations import BLOCK_BITS
from ...partitions.due_column import DueBatch, scan_dues
from ...snapshot.snapshot_format import Unusable, read_part
from ...snapshot.stored import SnapshotState, inspect_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import LedgerState, PartitionRecord, PartitionState, Table
from ...store.codec.frontier import HELD, NOTHING_FIRED, FrontierRecord, at_or_before
from ...store.codec.run import Int64s, UInt32s, pack_markers
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.env.transaction import Transaction
from ...store.log import catalog
from ...store.log.ledger import MAX_RUN_ENTRIES, find_tail
from ...store.position import Position
from ...survey.contents import kept_ledgers, main_ledgers, marker_runs
from ...survey.withdrawals import (
    Conditionals,
    Withdrawn,
    lost_admissions,
    lost_cancellations,
    passed_of,
    waited_for,
)
from .repair_report import Account


class PartitionLog(NamedTuple):
    """The log of a topic in a partition that is open."""

    environment: Environment
    topic_id: int
    start_ms: int
    ledger_id: int


OpenLog = Callable[[int], AbstractContextManager[PartitionLog | None]]
"""The partition log with a ledger id, open inside the block; None: there is none."""


class Marked(NamedTuple):
    """The markers of one log: entries and due times in the order in which they fired, and the place of the last."""

    entries: UInt32s
    dues: Int64s
    last: Position

    def bitmap(self) -> BitMap:
        return BitMap(self.entries)

    def place(self, at: int) -> tuple[int, int]:
        """(due, entry) of a marker."""
        return int(self.dues[at]), int(self.entries[at])

    def latest(self) -> tuple[int, int]:
        """The largest (due, entry)."""
        return self.place(int(np.lexsort((self.entries, self.dues))[-1])) if len(self.entries) else NOTHING_FIRED


NO_MARKERS = Marked(np.empty(0, np.uint32), np.empty(0, np.int64), Position(0, 0))


def read_marked(raw: Reads) -> dict[int, Marked]:
    """The markers in the main logs, as far as they can be read, by the ledger that they point into."""
    pieces: dict[int, list[Marked]] = {}
    for run in marker_runs(raw, main_ledgers(raw)):
        piece = Marked(run.targets().copy(), run.dues(), Position(run.ledger_id, run.limit - 1))
        pieces.setdefault(run.target, []).append(piece)
    return {
        target: Marked(np.concatenate([p.entries for p in of]), np.concatenate([p.dues for p in of]), of[-1].last)
        for target, of in pieces.items()
    }


def due_column(environment: Environment, ledger_id: int, admitted: BitMap) -> Int64s:
    """The due times of a log by entry id, HELD for what never fires or cannot be read."""
    with environment.read() as raw:
        tail = find_tail(raw, environment.name, ledger_id)
    dues = np.full(tail, HELD, dtype=np.int64)
    for batch in scan_dues(environment, ledger_id, 0, tail, admitted):
        if isinstance(batch, DueBatch):
            dues[batch.first_entry : batch.first_entry + len(batch.dues)] = batch.dues
    return dues


def _passed_in(dues: Int64s, place: tuple[int, int]) -> BitMap:
    """The entries of a due column at or before (due, entry), held ones left out."""
    entries = np.arange(len(dues), dtype=np.uint32)
    return BitMap(entries[at_or_before(entries, dues, *place) & (dues != HELD)])


def fired_in(dues: Int64s, frontier: FrontierRecord | None) -> BitMap:
    """The entries of a due column that have fired."""
    if frontier is None:
        return BitMap()
    entries = np.arange(len(dues), dtype=np.uint32)
    return BitMap(entries[frontier.has_fired(entries, dues) & (dues != HELD)])


# -- frontiers ---------------------------------------------------------------------------------


def mend_frontiers(
    transaction: Transaction, environment: Environment, start_ms: int, partition: PartitionRecord, logs: dict[int, int],
    lost: Iterable[bytes], markers: Mapping[int, Marked], account: Account,
) -> None:  # fmt: skip
    """Make the frontiers of a partition anew that are lost: those of `lost` keys, and of logs that have markers."""
    here = [key for key in lost if key[0] == Table.FRONTIER and fmt.trailing_u64(key) == start_ms]
    damaged = {fmt.leading_u32(key) for key in here}
    for topic_id, ledger_id in logs.items():
        raw = transaction.raw
        if catalog.frontier(raw, topic_id, start_ms) is None and catalog.topic_name(raw, topic_id) is not None:
            marked = markers.get(ledger_id, NO_MARKERS)
            if len(marked.entries) or topic_id in damaged:
                log = PartitionLog(environment, topic_id, start_ms, ledger_id)
                _mend_frontier(transaction, log, partition, marked, account)


def _mend_frontier(
    transaction: Transaction, log: PartitionLog, partition: PartitionRecord, marked: Marked, account: Account
) -> None:
    environment, topic_id, start_ms, ledger_id = log
    dues = due_column(environment, ledger_id, cancellations.members(transaction.raw, Table.ADMITTED, ledger_id))
    known, reached = marked.bitmap(), marked.latest()
    for snapshot in inspect_snapshots(environment, ledger_id):
        if snapshot.state is SnapshotState.COMPLETE and snapshot.metadata is not None:
            metadata = snapshot.metadata
            place = (metadata.due_ms, metadata.entry_id)
            known |= _passed_in(dues[: metadata.absorbed_end], place)
            reached = max(reached, place)
    closed = partition.state is PartitionState.CLOSED
    if closed:  # then all of it has fired
        reached = (partition.end_ms, 0)
    passed = _passed_in(dues, reached) - cancellations.members(transaction.raw, Table.CANCELLED, ledger_id)
    first = marked.place(0) if len(marked.entries) else NOTHING_FIRED
    again = BitMap() if closed else passed - known - _passed_in(dues, first)
    if reached[0] >= 0:
        last = _append_markers(transaction, log, again, dues) if again else marked.last
        released = int(closed and not len(marked.entries))
        record = FrontierRecord(ledger_id, *reached, len(dues), len(passed), *last, released)
        transaction.put(fmt.frontier_key(topic_id, start_ms), record.pack())
    account.report.again += len(again)
    account.say(
        f"{environment.name}, ledger {ledger_id}: its frontier was lost, {len(passed)} entries have fired by what is "
        f"there, {len(again)} of them may come twice"
    )


def _append_markers(transaction: Transaction, log: PartitionLog, entries: BitMap, dues: Int64s) -> Position:
    """Append markers of entries of a log to the topic's open ledger, in due order; the last one's place."""
    raw = transaction.raw
    ledgers = catalog.ledgers(raw, log.topic_id)
    place = Position(next(number for number, row in ledgers if row.state is LedgerState.OPEN), 0)
    place = place._replace(entry_id=find_tail(raw, "main", place.ledger_id))
    _write_markers(transaction, place, log, entries, dues)
    return place._replace(entry_id=place.entry_id + len(entries) - 1)


def _write_markers(transaction: Transaction, place: Position, log: PartitionLog, entries: BitMap, dues: Int64s) -> None:
    ids = np.array(entries, dtype=np.uint32)
    ids = ids[np.lexsort((ids, dues[ids]))]
    for at in range(0, len(ids), MAX_RUN_ENTRIES):
        part = ids[at : at + MAX_RUN_ENTRIES]
        key = fmt.run_key(place.ledger_id, place.entry_id + at)
        transaction.raw.put(key, pack_markers(key, log.ledger_id, log.start_ms, part, dues[part]))


# -- markers -----------------------------------------------------------------------------------


class _Unmarked(NamedTuple):
    """A log of which entries have fired that have no marker."""

    log: PartitionLog
    frontier: FrontierRecord
    dues: Int64s
    entries: BitMap
    before: tuple[int, int]
    """(due, entry) of the last marker before the hole; what is at or before it was trimmed, or fired late."""


def restore_markers(
    transaction: Transaction, topic_id: int, holes: dict[int, BitMap], open_log: OpenLog, account: Account
) -> tuple[bool, int]:
    """Give entries markers again whose markers were lost with `holes` of the topic's main log.

    Returns whether all of the holes is whole again, and how many markers were appended instead.
    """
    size = sum(map(len, holes.values()))
    if not size:
        return False, 0
    begin = min(Position(ledger, entries.min()) for ledger, entries in holes.items() if entries)
    logs = _unmarked(transaction.raw, topic_id, begin, open_log)
    found = sorted((int(each.dues[entry]), entry, at) for at, each in enumerate(logs) for entry in each.entries)
    if len(found) > size:
        found = [row for row in found if row[:2] > logs[row[2]].before][-size:]
    taken = {at: BitMap(entry for _, entry, of in found if of == at) for _, _, at in found}
    ends = max(Position(ledger, entries.max()) for ledger, entries in holes.items() if entries)
    one_range = ends == begin._replace(entry_id=begin.entry_id + size - 1)
    if one_range and len(found) == size and len(taken) == 1:
        (at,) = taken
        log = logs[at]
        if found[0][:2] > log.before:
            cursor = transaction.raw.cursor()
            limit = fmt.run_key(begin.ledger_id, begin.entry_id + size)
            while cursor.set_range(fmt.run_key(*begin)) and bytes(cursor.key()) < limit:
                cursor.delete()
            _write_markers(transaction, begin, log.log, taken[at], log.dues)
            account.say(f"main, ledger {begin.ledger_id}: {size} markers made anew from {begin.entry_id} on")
            return True, 0
    for at, entries in taken.items():
        log = logs[at]
        last = _append_markers(transaction, log.log, entries, log.dues)
        moved = log.frontier._replace(marker_ledger=last.ledger_id, marker_entry=last.entry_id)
        transaction.put(fmt.frontier_key(topic_id, log.log.start_ms), moved.pack())
    if found:
        account.say(
            f"topic {topic_id}: {len(found)} messages whose markers are lost got new ones at the end of its log"
        )
    return False, len(found)


def _unmarked(raw: Reads, topic_id: int, hole: Position, open_log: OpenLog) -> list[_Unmarked]:
    """The logs of a topic in which entries have fired that have no marker."""
    marked: dict[int, BitMap] = {}
    before: dict[int, tuple[int, int]] = {}
    for run in marker_runs(raw, kept_ledgers(raw, topic_id)):
        marked.setdefault(run.target, BitMap()).update(run.targets().tolist())
        if (run.ledger_id, run.first_entry) < hole:
            pairs = zip(run.dues().tolist(), run.targets().tolist(), strict=True)
            before[run.target] = max(before.get(run.target, NOTHING_FIRED), *pairs)
    found = []
    for _, _, row in catalog.frontiers(raw, topic_id):
        if not row.fired or row.released:
            continue
        with open_log(row.ledger_id) as log:
            if log is None:
                continue
            dues = due_column(log.environment, row.ledger_id, cancellations.members(raw, Table.ADMITTED, row.ledger_id))
        entries = fired_in(dues, row) - cancellations.members(raw, Table.CANCELLED, row.ledger_id)
        entries -= marked.get(row.ledger_id, BitMap())
        if entries:
            found.append(_Unmarked(log, row, dues, entries, before.get(row.ledger_id, NOTHING_FIRED)))
    return found


# -- cancellations -----------------------------------------------------------------------------


def mend_withdrawals(
    transaction: Transaction, lost: Iterable[bytes], conditionals: Conditionals, markers: Mapping[int, Marked],
    open_log: OpenLog, account: Account,
) -> None:  # fmt: skip
    """Make cancellations and admissions anew. lost: keys of records that cannot be read."""
    raw = transaction.raw
    certain = waited_for(raw)
    for target, marked in markers.items():
        certain.setdefault(target, BitMap()).update(marked.entries)

    def fired(ledger_id: int, entries: UInt32s) -> BitMap | None:
        with open_log(ledger_id) as log:
            if log is None:
                return None
            passed = passed_of(log.environment, catalog.frontier(raw, log.topic_id, log.start_ms), ledger_id, entries)
            return passed | markers.get(ledger_id, NO_MARKERS).bitmap()

    cancelled = lost_cancellations(Withdrawn(raw), conditionals, fired)
    blocks = {(fmt.leading_u64(key), fmt.trailing_u32(key)) for key in lost if key[0] == Table.CANCELLED}
    blocks |= {(ledger_id, each >> BLOCK_BITS) for ledger_id, of in cancelled.items() for each in of}
    for ledger_id in sorted({ledger_id for ledger_id, _ in blocks}):
        with open_log(ledger_id) as log:
            if log is not None:
                here = [block for each, block in blocks if each == ledger_id]
                _cancel(transaction, log, here, cancelled.get(ledger_id, BitMap()), account)
    for ledger_id, entries in lost_admissions(Withdrawn(raw), conditionals, certain).items():
        cancellations.add(transaction, Table.ADMITTED, ledger_id, entries)
        account.say(f"ADMITTED, ledger {ledger_id}: {len(entries)} rescheduled messages admitted again")


def _cancel(transaction: Transaction, log: PartitionLog, blocks: list[int], named: BitMap, account: Account) -> None:
    """Cancel what the rest tells was cancelled in some blocks of a log; count what else may have been."""
    raw, ledger_id = transaction.raw, log.ledger_id
    admitted = cancellations.members(raw, Table.ADMITTED, ledger_id)
    dues = due_column(log.environment, ledger_id, admitted)
    inside = BitMap()
    for block in blocks:
        inside.add_range(block << BLOCK_BITS, min(block + 1 << BLOCK_BITS, len(dues)))
    found = (named | _missing_in_snapshot(log.environment, ledger_id, dues, admitted)) & inside
    fresh = cancellations.add(transaction, Table.CANCELLED, ledger_id, found)
    fired = fired_in(dues, catalog.frontier(raw, log.topic_id, log.start_ms))
    held = BitMap(np.flatnonzero(dues < 0).astype(np.uint32))
    most = len(inside - found - fired - held)
    account.report.uncancelled += most
    account.say(
        f"CANCELLED, ledger {ledger_id}: {len(fresh)} entries cancelled again; of {most} that are still to fire it is "
        "not known whether they were cancelled"
    )


def _missing_in_snapshot(environment: Environment, ledger_id: int, dues: Int64s, admitted: BitMap) -> BitMap:
    """The entries that the newest snapshot of a log should hold and does not: they had been cancelled."""
    whole = inspect_snapshots(environment, ledger_id, read_parts=True)
    newest = [each for each in whole if each.state is SnapshotState.COMPLETE][-1:]
    for snapshot in newest:
        metadata = snapshot.metadata
        if metadata is None:
            continue
        pending = BitMap()
        try:
            for number in range(len(metadata.parts)):
                for _, saved in read_part(environment, ledger_id, snapshot.snapshot_id, metadata, number):
                    pending |= saved.bitmap()
        except Unusable:
            continue
        covered = dues[: metadata.tail]
        expected = BitMap(np.flatnonzero(covered >= 0).astype(np.uint32)) - admitted
        return expected - _passed_in(covered, (metadata.due_ms, metadata.entry_id)) - pending
    return BitMap()
