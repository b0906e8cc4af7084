"""Markers under repair: what fired, and whose markers cannot be read, is told by what lies before its frontier.

A run of markers points at messages that lie whole in their partitions. Messages that are before their frontier, were
not cancelled and have no marker are the ones that it pointed at, or such as were trimmed: of these there are more than
the run had only where a topic has trimmed some of a log, and then the latest are taken. Where they are exactly as many
as the hole, and of one log, the run is written anew in its place, and what was acknowledged of it stays so; else they
get markers at the end of the log, and those that a subscription had acknowledged come again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ...partitions import cancellations
from ...store.codec import format as fmt
from ...store.codec.format import LedgerState, Table
from ...store.codec.frontier import NOTHING_FIRED, FrontierRecord
from ...store.codec.run import Int64s, Run, RunKind, pack_markers
from ...store.env.environment import Environment
from ...store.env.transaction import Transaction
from ...store.errors import BrokenInvariant
from ...store.log import catalog
from ...store.log.ledger import MAX_RUN_ENTRIES
from ...store.log.scan import runs
from ...store.position import Position
from .repair_frontiers import append_markers, due_column, fired_in
from .repair_report import Account
from .repair_withdrawals import OpenLog


class _Log(NamedTuple):
    """A log whose fired entries lack markers."""

    ledger_id: int
    start_ms: int
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
                last = append_markers(transaction, topic_id, log.ledger_id, log.start_ms, entries, log.dues)
                key = fmt.frontier_key(topic_id, log.start_ms)
                fields = transaction.get(key)
                if fields is None:
                    raise BrokenInvariant(f"the frontier of ledger {log.ledger_id} is gone")
                frontier = FrontierRecord.unpack(fields)
                moved = frontier._replace(marker_ledger=last.ledger_id, marker_entry=last.entry_id)
                transaction.put(key, moved.pack())

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
        for ledger_id, record in catalog.ledgers(raw, topic_id):
            if record.state is LedgerState.TRIMMING:
                continue
            for run in runs(raw, main.name, ledger_id):
                if isinstance(run, Run) and run.kind == RunKind.MARKERS:
                    marked.setdefault(run.target, BitMap()).update(run.targets().tolist())
                    if (ledger_id, run.first_entry) < hole:
                        pairs = zip(run.dues().tolist(), run.targets().tolist(), strict=True)
                        before[run.target] = max(before.get(run.target, NOTHING_FIRED), *pairs)
        withdrawn = {
            row.ledger_id: [cancellations.members(raw, table, row.ledger_id) for table in _TABLES]
            for _, _, row in frontiers
        }
    for _, start_ms, row in frontiers:
        with open_log(row.ledger_id) as log:
            if log is None:
                continue
            cancelled, admitted = withdrawn[row.ledger_id]
            dues = due_column(log[0], row.ledger_id, admitted)
        passed = fired_in(dues, row)
        unmarked = passed - cancelled - marked.get(row.ledger_id, BitMap())
        if unmarked:
            found.append(_Log(row.ledger_id, start_ms, dues, unmarked, before.get(row.ledger_id, NOTHING_FIRED)))
    return found


_TABLES = (Table.CANCELLED, Table.ADMITTED)


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
    ids = np.array(entries, dtype=np.uint32)
    ids = ids[np.lexsort((ids, log.dues[ids]))]
    for at in range(0, size, MAX_RUN_ENTRIES):
        part = ids[at : at + MAX_RUN_ENTRIES]
        key = fmt.run_key(place.ledger_id, place.entry_id + at)
        transaction.raw.put(key, pack_markers(key, log.ledger_id, log.start_ms, part, log.dues[part]))
