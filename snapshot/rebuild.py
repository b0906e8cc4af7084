"""Making a log's snapshot anew from its entries, in a store that no process has open for writing.

Every entry is read and its checksum verified, which a replay by the engine does not do. The snapshot that is written
is the one that the engine would write: entries that have fired, were cancelled, or are conditional and not admitted
are left out. Works whatever is there of snapshots: nothing of them is read, and the new one is complete before they
are removed.

The caller holds the store's lock, and opens the environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..partitions.cancellations import members
from ..partitions.due_column import dues_of
from ..partitions.index.delay_index import DelayIndex
from ..partitions.index.index_cut import Piece
from ..store.codec.format import Table
from ..store.codec.frontier import FrontierRecord
from ..store.codec.run import Int64s, Run, UInt32s
from ..store.env.environment import Environment
from ..store.errors import CorruptEntry
from ..store.log import catalog
from ..store.log.ledger import find_tail
from ..store.log.scan import runs
from .writer import Cut, SnapshotWritten, write_snapshot

_RUNS_A_TRANSACTION = 1_024
_ALL = 1 << 62


class Rebuilt(NamedTuple):
    """What was found in one log, and the snapshot that was written of it.

    entries: read and whole. pending: left to fire and in the snapshot. damaged: every entry that cannot be read (the
    first of a run whose header is damaged, or before which entries are missing). written: None when the log ends
    before its frontier, so that no snapshot of it could be right.
    """

    topic_id: int
    ledger_id: int
    entries: int
    pending: int
    damaged: list[CorruptEntry]
    written: SnapshotWritten | None


def rebuild_log(
    main: Environment,
    environment: Environment,
    topic_id: int,
    ledger_id: int,
    *,
    start_ms: int,
    bucket_ms: int,
    part_bytes: int,
    created_ms: int,
    quarantine: Callable[[CorruptEntry], object] = lambda error: None,
    progress: Callable[[int], object] = lambda entries: None,
) -> Rebuilt:
    """Read a topic's log in the partition at `start_ms` and replace its snapshots with one made from it.

    `quarantine` is told of each run whose header is damaged, as by a start that replays the log: one from the new
    snapshot does not come across it. `progress` is told, some ms apart, how many further entries have been read.
    O(bytes of the log); 4 bytes of memory a pending message. Raises StoreFull, StoreFailed, CorruptRecord (the
    catalog is damaged).
    """
    rebuild = _Rebuild(main, environment, topic_id, ledger_id, start_ms, bucket_ms, quarantine)
    return rebuild.run(part_bytes, created_ms, progress)


class _Rebuild:
    def __init__(
        self,
        main: Environment,
        environment: Environment,
        topic_id: int,
        ledger_id: int,
        start_ms: int,
        bucket_ms: int,
        quarantine: Callable[[CorruptEntry], object],
    ) -> None:
        self._quarantine = quarantine
        self._environment = environment
        self._topic_id = topic_id
        self._start_ms = start_ms
        with main.read() as raw:
            self._frontier = catalog.frontier(raw, topic_id, start_ms) or FrontierRecord.start(ledger_id)
            self._cancelled = members(raw, Table.CANCELLED, ledger_id)
            self._admitted = members(raw, Table.ADMITTED, ledger_id)
        with environment.read() as raw:
            self._tail = find_tail(raw, environment.name, ledger_id)
        self._ledger_id = ledger_id
        self._index = DelayIndex(
            lambda ids: dues_of(environment, ledger_id, ids), start_ms=start_ms, bucket_ms=bucket_ms
        )
        self._first_late = self._tail
        self._damaged: list[CorruptEntry] = []
        self._entries = 0

    def run(self, part_bytes: int, created_ms: int, progress: Callable[[int], object]) -> Rebuilt:
        for ids, dues, read in self._batches():
            self._add(ids, dues)
            progress(read)
        if self._tail < self._frontier.absorbed_end:
            reason = f"the log ends here, its frontier is at {self._frontier.absorbed_end}: entries were lost"
            self._damaged.append(self._corrupt(self._tail, reason))
            return Rebuilt(self._topic_id, self._ledger_id, self._entries, 0, self._damaged, None)
        self._index.discard(self._cancelled)
        # What follows a late entry that has not fired is replayed with it.
        cutting = self._index.cut(self._first_late)
        cutting.arrange()
        pieces: list[Piece] = cutting.more(_ALL)
        cut = Cut(self._start_ms, self._index.bucket_ms, self._first_late, self._frontier, pieces)
        written = write_snapshot(self._environment, cut, part_bytes, created_ms)
        return Rebuilt(self._topic_id, self._ledger_id, self._entries, written.entries, self._damaged, written)

    def _batches(self) -> Iterator[tuple[UInt32s, Int64s, int]]:
        """(entry ids, due times, entries read) of the entries that may fire, thousands of runs at a time."""
        start = 0
        hole = False  # whether what comes next follows a damaged run, whose length is unknown
        while start < self._tail:
            ids: list[UInt32s] = [np.empty(0, np.uint32)]
            dues: list[Int64s] = [np.empty(0, np.int64)]
            begun = start
            with self._environment.read() as raw:
                for number, run in enumerate(runs(raw, self._environment.name, self._ledger_id, start, self._tail)):
                    if number >= _RUNS_A_TRANSACTION and not hole:
                        break
                    if isinstance(run, CorruptEntry):
                        self._damaged.append(run)
                        self._quarantine(run)
                        hole = True
                        continue
                    if run.first_entry > start and not hole:
                        reason = f"entries {start} to {run.first_entry - 1} are missing"
                        self._damaged.append(self._corrupt(start, reason))
                    entries, due_ms = self._intact(run)
                    ids.append(entries)
                    dues.append(due_ms)
                    start, hole = run.limit, False
                else:
                    start = self._tail
            yield np.concatenate(ids), np.concatenate(dues), start - begun

    def _intact(self, run: Run) -> tuple[UInt32s, Int64s]:
        """Entries of a run that may fire; every body is verified, and a damaged one fires, to be quarantined then."""
        for _, body in run.bodies():
            if isinstance(body, CorruptEntry):
                self._damaged.append(body)
            else:
                self._entries += 1
        ids = np.arange(run.first_entry, run.limit, dtype=np.uint32)
        dues = run.dues()
        if run.conditional:
            may_fire = np.array([entry_id in self._admitted for entry_id in ids.tolist()], dtype=np.bool_)
            ids, dues = ids[may_fire], dues[may_fire]
        return ids, dues

    def _add(self, ids: UInt32s, dues: Int64s) -> None:
        passed = self._frontier.passes(ids, dues)
        late = ids[passed & ~self._frontier.has_fired(ids, dues)]
        if len(late):
            self._first_late = min(self._first_late, int(late[0]))
        self._index.add(ids[~passed], dues[~passed])

    def _corrupt(self, entry_id: int, reason: str) -> CorruptEntry:
        return CorruptEntry(self._environment.name, self._ledger_id, entry_id, reason)
