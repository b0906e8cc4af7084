"""Cancellations under repair: what conditional entries and snapshots tell of records that are lost.

What was rescheduled names what it replaces, so of the two records either tells the other; a snapshot holds what was
pending when it was taken, so what it should hold and does not was cancelled. Messages that were cancelled since, and
by no rescheduling, cannot be told: they may be delivered, and how many those are at most is counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap

from ...check.check_withdrawals import (
    Conditionals,
    Withdrawn,
    lost_admissions,
    lost_cancellations,
    passed_of,
    waited_for,
)
from ...partitions import cancellations
from ...partitions.cancellations import BLOCK_BITS
from ...snapshot.snapshot_format import Unusable, read_part
from ...snapshot.stored import SnapshotState, inspect_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import Table
from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Int64s, UInt32s
from ...store.env.environment import Environment
from ...store.log import catalog
from .repair_catalog import main_ledgers
from .repair_fired import OpenLog, due_column, fired_in, marked, marker_runs, passed_in
from .repair_report import Account


def mend_withdrawals(
    main: Environment, lost: Iterable[bytes], conditionals: Conditionals, open_log: OpenLog, account: Account
) -> None:
    """Make cancellations and admissions anew. lost: keys of records that cannot be read."""
    blocks = {(fmt.leading_u64(key), fmt.trailing_u32(key)) for key in lost if key[0] == Table.CANCELLED}

    def fired(ledger_id: int, entries: UInt32s) -> BitMap | None:
        with open_log(ledger_id) as log, main.read() as raw:
            if log is None:
                return None
            environment, topic_id, start_ms = log
            passed = passed_of(environment, catalog.frontier(raw, topic_id, start_ms), ledger_id, entries)
            return passed | marked(raw, topic_id, ledger_id).entries

    with main.read() as raw:
        cancelled = lost_cancellations(Withdrawn(raw), conditionals, fired)
        blocks |= {(ledger_id, each >> BLOCK_BITS) for ledger_id, of in cancelled.items() for each in of}
    for ledger_id in sorted({ledger_id for ledger_id, _ in blocks}):
        with open_log(ledger_id) as log:
            if log is not None:
                here = [block for each, block in blocks if each == ledger_id]
                _cancel(main, log, ledger_id, here, cancelled.get(ledger_id, BitMap()), account)
    with main.read() as raw:
        certain = waited_for(raw)
        for run in marker_runs(raw, main_ledgers(raw)):
            certain.setdefault(run.target, BitMap()).update(run.targets().tolist())
        admitted = lost_admissions(Withdrawn(raw), conditionals, certain)
    for ledger_id, entries in admitted.items():
        main.write(lambda transaction: cancellations.add(transaction, Table.ADMITTED, ledger_id, entries))  # noqa: B023
        account.say(f"ADMITTED, ledger {ledger_id}: {len(entries)} rescheduled messages admitted again")


def _cancel(
    main: Environment, log: tuple[Environment, int, int], ledger_id: int, blocks: list[int], named: BitMap,
    account: Account,
) -> None:  # fmt: skip
    """Cancel what the rest tells was cancelled in some blocks of a log; count what else may have been."""
    environment, topic_id, start_ms = log
    with main.read() as raw:
        admitted = cancellations.members(raw, Table.ADMITTED, ledger_id)
        frontier = catalog.frontier(raw, topic_id, start_ms) or FrontierRecord.start(ledger_id)
    dues = due_column(environment, ledger_id, admitted)
    inside = BitMap()
    for block in blocks:
        inside.add_range(block << BLOCK_BITS, min(block + 1 << BLOCK_BITS, len(dues)))
    found = (named | _missing_in_snapshot(environment, ledger_id, dues, admitted)) & inside
    fresh = main.write(lambda transaction: cancellations.add(transaction, Table.CANCELLED, ledger_id, found))
    passed = fired_in(dues, frontier)
    held = BitMap(np.flatnonzero(dues < 0).astype(np.uint32))
    most = len(inside - found - passed - held)
    account.report.uncancelled += most
    account.say(
        f"CANCELLED, ledger {ledger_id}: {len(fresh)} entries cancelled again; of {most} that are still to fire it is "
        "not known whether they were cancelled"
    )


def _missing_in_snapshot(environment: Environment, ledger_id: int, dues: Int64s, admitted: BitMap) -> BitMap:
    """What the newest snapshot of a log should hold and does not: it had been cancelled."""
    newest = None
    for each in inspect_snapshots(environment, ledger_id, read_parts=True):
        if each.state is SnapshotState.COMPLETE:
            newest = each
    if newest is None or newest.metadata is None:
        return BitMap()
    metadata = newest.metadata
    pending = BitMap()
    try:
        for number in range(len(metadata.parts)):
            for _, saved in read_part(environment, ledger_id, newest.snapshot_id, metadata, number):
                pending |= saved.bitmap()
    except Unusable:
        return BitMap()
    covered = dues[: metadata.tail]
    expected = BitMap(np.flatnonzero(covered >= 0).astype(np.uint32)) - admitted
    return expected - passed_in(covered, (metadata.due_ms, metadata.entry_id)) - pending
