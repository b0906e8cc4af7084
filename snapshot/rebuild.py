"""Rebuilding a log's snapshot from its entries, in a store that no process has open for writing.

Every entry is read and its checksum verified, which a replay by the engine does not do. The snapshot that is written
is the one that the engine would write: entries that have fired, were cancelled, or are conditional and not admitted
are left out. Works whatever is there of snapshots: nothing of them is read, and the new one is complete before they
are removed.

The caller holds the store's lock, and opens the environments.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ..partitions.cancellations import members
from ..partitions.due_column import dues_of
from ..partitions.index.delay_index import DelayIndex
from ..store.batches import batches
from ..store.codec.format import Table
from ..store.codec.frontier import FrontierRecord
from ..store.codec.run import Int64s, UInt32s
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.errors import CorruptEntry
from ..store.log import catalog
from ..store.log.ledger import find_tail
from ..store.log.scan import runs
from .writer import Cut, SnapshotWritten, write_snapshot

_ENTRIES_AT_ONCE = 1 << 18
_ALL = 1 << 62


class Rebuilt(NamedTuple):
    """The entries of one log, counted, and the snapshot that was written of it.

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
    with main.read() as raw:
        frontier = catalog.frontier(raw, topic_id, start_ms) or FrontierRecord.start(ledger_id)
        cancelled = members(raw, Table.CANCELLED, ledger_id)
        admitted = members(raw, Table.ADMITTED, ledger_id)
    with environment.read() as raw:
        tail = find_tail(raw, environment.name, ledger_id)
    index = DelayIndex(lambda ids: dues_of(environment, ledger_id, ids), start_ms=start_ms, bucket_ms=bucket_ms)
    log = _Log(environment.name, ledger_id, admitted, quarantine)
    first_late, read = tail, 0
    with environment.read() as raw:
        for some in batches(log.runs(raw, tail), lambda run: len(run[0]), _ENTRIES_AT_ONCE):
            ids, dues = np.concatenate([run[0] for run in some]), np.concatenate([run[1] for run in some])
            passed = frontier.passes(ids, dues)
            late = ids[passed & ~frontier.has_fired(ids, dues)]
            if len(late):
                first_late = min(first_late, int(late[0]))
            index.add(ids[~passed], dues[~passed])
            progress(some[-1][2] - read)
            read = some[-1][2]
    if tail < frontier.absorbed_end:
        log.damage(tail, f"the log ends here, its frontier is at {frontier.absorbed_end}: entries were lost")
        return Rebuilt(topic_id, ledger_id, log.entries, 0, log.damaged, None)
    index.discard(cancelled)
    # What follows a late entry that has not fired is replayed with it.
    cutting = index.cut(first_late)
    cutting.arrange()
    cut = Cut(start_ms, bucket_ms, first_late, frontier, cutting.more(_ALL))
    written = write_snapshot(environment, cut, part_bytes, created_ms)
    return Rebuilt(topic_id, ledger_id, log.entries, written.entries, log.damaged, written)


@dataclass(slots=True)
class _Log:
    """A log that is read to its end, with the counts of its entries and damage."""

    environment: str
    ledger_id: int
    admitted: BitMap
    quarantine: Callable[[CorruptEntry], object]
    damaged: list[CorruptEntry] = field(default_factory=list)
    entries: int = 0

    def runs(self, raw: Reads, tail: int) -> Iterator[tuple[UInt32s, Int64s, int]]:
        """(ids and due times of the entries that may fire, one past the last entry) of each run that can be read.

        Every body is verified, and a damaged one fires, to be quarantined then.
        """
        expected: int | None = 0  # None: after a damaged run, whose length is unknown
        for run in runs(raw, self.environment, self.ledger_id, 0, tail):
            if isinstance(run, CorruptEntry):
                self.damaged.append(run)
                self.quarantine(run)
                expected = None
                continue
            if expected is not None and run.follows > expected:
                self.damage(expected, f"entries {expected} to {run.follows - 1} are missing")
            expected = run.limit
            damaged = [body for body in run.body_views(range(run.count)) if isinstance(body, CorruptEntry)]
            self.damaged += damaged
            self.entries += run.count - len(damaged)
            ids, dues = np.arange(run.first_entry, run.limit, dtype=np.uint32), run.dues()
            if run.conditional:
                may_fire = np.array([entry_id in self.admitted for entry_id in ids.tolist()], dtype=np.bool_)
                ids, dues = ids[may_fire], dues[may_fire]
            yield ids, dues, run.limit

    def damage(self, entry_id: int, reason: str) -> None:
        self.damaged.append(CorruptEntry(self.environment, self.ledger_id, entry_id, reason))
