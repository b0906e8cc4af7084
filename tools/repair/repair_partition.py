"""One partition under repair, once its logs are known: what cannot be read of them is discarded, snapshots follow.

Last, what has fired and the topics that hold the partition are counted again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap

from ...cleanup.mend import Mended, mend_ledger
from ...partitions import cancellations
from ...partitions.due_column import dues_of, fired_entries
from ...snapshot.stored import SnapshotState, inspect_snapshots
from ...snapshot.writer import remove_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import PartitionRecord, PartitionState, Table
from ...store.codec.frontier import FrontierRecord
from ...store.env.environment import Environment
from ...store.env.transaction import Transaction
from ...store.log import catalog
from ...store.log.ledger import find_tail
from .repair_catalog import main_ledgers, topic_ids
from .repair_fired import marker_runs
from .repair_report import Account


class PartitionRepair:
    """Mends the logs of partitions, one after the other."""

    def __init__(self, main: Environment, account: Account) -> None:
        self._main = main
        self._account = account
        self._markers: dict[int, dict[int, int]] = {}
        """What the markers of the main logs point at: due times by entry, by ledger of a partition log."""
        with main.read() as raw:
            for run in marker_runs(raw, main_ledgers(raw)):
                pairs = zip(run.targets().tolist(), run.dues().tolist(), strict=True)
                self._markers.setdefault(run.target, {}).update(pairs)

    def mend(self, environment: Environment, start_ms: int, logs: dict[int, int]) -> dict[int, BitMap]:
        """Mend a partition; the entries of its logs that were discarded, by ledger. logs: ledger ids by topic."""
        lost: dict[int, BitMap] = {}
        for topic_id, ledger_id in logs.items():
            mended = self._mend_log(environment, start_ms, topic_id, ledger_id)
            self._account.count("entries of partitions", mended.entries, len(mended.holes | mended.bodies))
            if mended.holes or mended.bodies:
                lost[ledger_id] = mended.holes | mended.bodies
                self._account.say(f"{environment.name}, ledger {ledger_id}: discarded {len(lost[ledger_id])}")
        damaged = any(each.state is SnapshotState.DAMAGED for each in inspect_snapshots(environment, read_parts=True))
        if (lost or damaged) and (removed := remove_snapshots(environment)):
            self._account.say(f"{environment.name}: removed {removed} records of snapshots")
        return lost

    def _mend_log(self, environment: Environment, start_ms: int, topic_id: int, ledger_id: int) -> Mended:
        known = self._markers.get(ledger_id, {})
        with self._main.read() as raw:
            frontier = catalog.frontier(raw, topic_id, start_ms)
            named = cancellations.members(raw, Table.CANCELLED, ledger_id)
            named |= cancellations.members(raw, Table.ADMITTED, ledger_id)
        least = [
            0 if frontier is None else frontier.absorbed_end,
            max(named, default=-1) + 1,
            max(known, default=-1) + 1,
        ]
        for snapshot in inspect_snapshots(environment, ledger_id):
            if snapshot.metadata is not None:
                least.append(snapshot.metadata.tail)
        mended = mend_ledger(
            environment,
            ledger_id,
            least_entries=max(least),
            base_ms=start_ms,
            dues=known,
            discard=self._account.discard,
        )
        passed = BitMap() if frontier is None else _passed(environment, frontier, mended.bodies)
        unfired = (mended.holes | mended.bodies) - BitMap(known) - passed
        if unfired:
            fresh = self._main.write(
                lambda transaction: cancellations.add(transaction, Table.CANCELLED, ledger_id, unfired)
            )
            self._account.report.lost += len(fresh)
        return mended


def _passed(environment: Environment, frontier: FrontierRecord, entries: Iterable[int]) -> BitMap:
    """Those of `entries`, whose due times can be read, that the frontier says have fired."""
    ids = np.array(list(entries), dtype=np.uint32)
    return BitMap(ids[frontier.has_fired(ids, dues_of(environment, frontier.ledger_id, ids))])


def recount(main: Environment, environment: Environment, start_ms: int, account: Account) -> None:
    """Count again what a partition's logs have fired and its references."""

    def work(transaction: Transaction) -> None:
        raw = transaction.raw
        topics = topic_ids(raw)
        references = 0
        for topic_id, start, frontier in list(catalog.frontiers(raw)):
            if start != start_ms or topic_id not in topics:
                continue
            ledger_id = frontier.ledger_id
            fired = _fired(transaction, environment, frontier)
            changed = frontier._replace(fired=fired)
            ledgers = dict(catalog.ledgers(raw, topic_id))
            if frontier.fired and all(run.target != ledger_id for run in marker_runs(raw, ledgers)):
                changed = changed._replace(marker_ledger=0, marker_entry=0)
            if changed != frontier and (fired != frontier.fired or not changed.marker_ledger):
                transaction.put(fmt.frontier_key(topic_id, start_ms), changed.pack())
                account.say(f"{environment.name}, ledger {ledger_id}: {fired} have fired, not {frontier.fired}")
            references += not frontier.released
        key = fmt.partition_key(start_ms)
        fields = transaction.get(key)
        record = None if fields is None else PartitionRecord.unpack(fields)
        if record is not None and record.state is PartitionState.CLOSED and record.references != references:
            transaction.put(key, record._replace(references=references).pack())
            account.say(f"{environment.name}: {references} topics hold it, not {record.references}")

    account.write(main, work)


def _fired(transaction: Transaction, environment: Environment, frontier: FrontierRecord) -> int:
    ledger_id = frontier.ledger_id
    admitted = cancellations.members(transaction.raw, Table.ADMITTED, ledger_id)
    with environment.read() as raw:
        tail = find_tail(raw, environment.name, ledger_id)
    passed, _ = fired_entries(environment, frontier, tail, admitted)
    return len(passed - cancellations.members(transaction.raw, Table.CANCELLED, ledger_id))
