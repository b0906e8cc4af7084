"""One partition under repair, once its logs are known: what cannot be read of them is discarded, snapshots follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import lmdb
import numpy as np
from pyroaring import BitMap

from ...cleanup.mend import Mended, mend_ledger
from ...partitions import cancellations
from ...partitions.due_column import dues_of
from ...snapshot.stored import SnapshotState, inspect_snapshots
from ...snapshot.writer import remove_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import PartitionState, Table
from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Run, RunKind
from ...store.env.environment import Environment
from ...store.errors import CorruptEntry
from ...store.log import catalog
from ...store.log.scan import runs
from .repair_report import Account
from .repair_wal import WalRepair


class Markers:
    """What the markers of the main logs point at: due times by entry, by ledger of a partition log."""

    def __init__(self, main: Environment) -> None:
        self.dues: dict[int, dict[int, int]] = {}
        with main.read() as raw:
            for run in runs_of_main(raw):
                if run.kind == RunKind.MARKERS:
                    pairs = zip(run.targets().tolist(), run.dues().tolist(), strict=True)
                    self.dues.setdefault(run.target, {}).update(pairs)


def runs_of_main(raw: lmdb.Transaction) -> Iterator[Run]:
    """Every run of the main logs that can be read."""
    for key, _ in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
        for run in runs(raw, "main", fmt.trailing_u64(key)):
            if not isinstance(run, CorruptEntry):
                yield run


class PartitionRepair:
    """Mends the logs of partitions, one after the other."""

    def __init__(self, main: Environment, wal: WalRepair, account: Account) -> None:
        self._main = main
        self._wal = wal
        self._account = account
        self._markers = Markers(main)

    def mend(
        self, environment: Environment, start_ms: int, state: PartitionState, logs: dict[int, int]
    ) -> dict[int, BitMap]:
        """Mend a partition; the entries of its logs that were discarded, by ledger. logs: ledger ids by topic."""
        lost: dict[int, BitMap] = {}
        if state is PartitionState.OPEN:
            self._wal.discard_logs(environment.name, start_ms, set(logs.values()))
        for topic_id, ledger_id in logs.items():
            mended = self._mend_log(environment, start_ms, topic_id, ledger_id)
            if mended.holes or mended.bodies:
                lost[ledger_id] = mended.holes | mended.bodies
                self._account.say(f"{environment.name}, ledger {ledger_id}: discarded {len(lost[ledger_id])}")
        damaged = any(each.state is SnapshotState.DAMAGED for each in inspect_snapshots(environment, read_parts=True))
        if (lost or damaged) and (removed := remove_snapshots(environment)):
            self._account.say(f"{environment.name}: removed {removed} records of snapshots")
        return lost

    def _mend_log(self, environment: Environment, start_ms: int, topic_id: int, ledger_id: int) -> Mended:
        known = self._markers.dues.get(ledger_id, {})
        with self._main.read() as raw:
            frontier = catalog.frontier(raw, topic_id, start_ms)
            named = cancellations.members(raw, Table.CANCELLED, ledger_id)
            named |= cancellations.members(raw, Table.ADMITTED, ledger_id)
        least = [
            0 if frontier is None else frontier.absorbed_end,
            max(named, default=-1) + 1,
            max(known, default=-1) + 1,
        ]
        least.append(self._wal.least_entries(start_ms, ledger_id))
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
        self._wal.discard_holes(environment.name, start_ms, ledger_id, mended.holes)
        passed = BitMap() if frontier is None else _passed(environment, frontier, mended.bodies)
        unfired = (mended.holes | mended.bodies) - BitMap(known) - passed
        if unfired:
            fresh = self._main.write(
                lambda transaction: cancellations.add(transaction, Table.CANCELLED, ledger_id, unfired)
            )
            self._account.lost += len(fresh)
        return mended


def _passed(environment: Environment, frontier: FrontierRecord, entries: Iterable[int]) -> BitMap:
    """Those of `entries`, whose due times can be read, that the frontier says have fired."""
    ids = np.array(list(entries), dtype=np.uint32)
    return BitMap(ids[frontier.has_fired(ids, dues_of(environment, frontier.ledger_id, ids))])
