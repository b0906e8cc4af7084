"""Entries of partition logs that may still fire: found by id, cancelled, and appended in the place of others.

The steps that cancelling, rescheduling and recurring messages are made of (withdrawal.py).

REQUIRES of the caller: the gate that firing is alone in, held for reading from the first step of a request to the end
of its transaction; so nothing is on its way into the main log meanwhile, and the frontiers in that transaction say what
has fired. The delay indexes hear from the commit itself what it cancelled and admitted.

What takes the place of another is a conditional entry: it names that one, and fires because the transaction that
appends it admits it too. (Versions before appended it in a commit of its own: one that is not admitted never fires.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ..partitions import cancellations
from ..partitions.partition import Partition, PartitionLog
from ..partitions.partition_set import PartitionSet
from ..partitions.timespan import partition_start
from ..store.codec import format as fmt
from ..store.codec.format import PartitionRecord, PartitionState, Table
from ..store.codec.frontier import FrontierRecord
from ..store.codec.run import Int64s, RunKind, RunLimits, UInt32s
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.env.transaction import Transaction
from ..store.errors import BrokenInvariant, CorruptEntry
from ..store.log import catalog
from ..store.log.ledger import Replaced
from ..store.log.managed_ledger import ManagedLedger
from ..store.log.scan import RunFinder
from ..store.position import MessageId, Position
from .firing.firing import Firing
from .lookup import find_partition


class Outcome(Enum):
    """Outcome of a request to cancel or reschedule a message."""

    CANCELLED = "cancelled"
    ALREADY_CANCELLED = "already cancelled"
    FIRED = "fired"
    UNKNOWN = "unknown"


class FoundEntries(NamedTuple):
    """Entries of one partition log that a request names, and the rows of the request that do."""

    partition: Partition
    ledger_id: int
    rows: list[int]
    entries: UInt32s
    dues: Int64s


class Destination(NamedTuple):
    """The log of a partition that messages of some rows of a request go to."""

    partition: Partition
    log: PartitionLog
    rows: list[int]


class Successors(NamedTuple):
    """Messages of one topic by row of a request: due times, bodies, and the entries whose place each takes."""

    topic_id: int
    ids: Sequence[MessageId]
    dues: Sequence[int]
    bodies: Mapping[int, bytes]


@dataclass(eq=False, repr=False)
class PendingEntries:
    """The entries of a store's partition logs, as far as they may still fire. Thread-safe."""

    _main: Environment
    _partitions: PartitionSet
    _firing: Firing
    _span_ms: int
    _limits: RunLimits

    @contextmanager
    def located(
        self, log: ManagedLedger, ids: Sequence[MessageId], known: Partition | None = None
    ) -> Iterator[tuple[list[FoundEntries], list[Outcome]]]:
        """The entries of the ids by partition, under leases; and outcomes, UNKNOWN or FIRED where there is no entry.

        known: the partition that they are in; None: it is looked for.
        """
        outcomes = [Outcome.UNKNOWN] * len(ids)
        rows_of: dict[int, list[int]] = {}
        for row, (ledger_id, entry_id) in enumerate(ids):
            in_main = log.entries_of(ledger_id)
            if in_main is None:
                rows_of.setdefault(ledger_id, []).append(row)
            elif 0 <= entry_id < in_main:
                outcomes[row] = Outcome.FIRED
        found: list[FoundEntries] = []
        with ExitStack() as leases:
            for ledger_id, rows in rows_of.items():
                partition = known or find_partition(self._partitions, log.topic_id, ledger_id)
                if partition is not None:
                    leases.enter_context(self._partitions.lease(partition))
                    found.append(self._existing(partition, log.topic_id, ledger_id, rows, ids))
            yield found, outcomes

    def _existing(
        self, partition: Partition, topic_id: int, ledger_id: int, rows: list[int], ids: Sequence[MessageId]
    ) -> FoundEntries:
        partition_log = partition.log(topic_id)
        tail = 0 if partition_log is None else partition_log.ledger.entries
        rows = sorted((row for row in rows if 0 <= ids[row].entry_id < tail), key=lambda row: ids[row].entry_id)
        kept: list[tuple[int, int, int]] = []
        conditional = BitMap()
        with partition.environment.read() as raw:
            finder, run = RunFinder(raw, partition.name), None
            for row in rows:
                entry_id = ids[row].entry_id
                if run is None or entry_id >= run.limit:
                    try:
                        run = finder.find(ledger_id, entry_id)
                    except CorruptEntry:
                        run = None
                if run is not None:
                    kept.append((row, entry_id, run.due(entry_id - run.first_entry)))
                    if run.conditional:
                        conditional.add(entry_id)
        if conditional:
            with self._main.read() as main:
                conditional -= cancellations.members(main, Table.ADMITTED, ledger_id)
            kept = [each for each in kept if each[1] not in conditional]
        entries = np.array([entry_id for _, entry_id, _ in kept], dtype=np.uint32)
        dues = np.array([due_ms for _, _, due_ms in kept], dtype=np.int64)
        return FoundEntries(partition, ledger_id, [row for row, _, _ in kept], entries, dues)

    def bodies_of(self, found: FoundEntries) -> dict[int, bytes]:
        bodies = {}
        with found.partition.environment.read() as raw:
            finder = RunFinder(raw, found.partition.name)
            for row, entry_id in zip(found.rows, found.entries.tolist(), strict=True):
                run = finder.find(found.ledger_id, entry_id)
                if run is not None and run.kind == RunKind.MESSAGES:
                    body = run.body(entry_id - run.first_entry)
                    if body is not None:
                        bodies[row] = body
        return bodies

    def states(self, topic_id: int, logs: list[FoundEntries], outcomes: list[Outcome]) -> list[Outcome | None]:
        """Return the outcomes that `cancel` would give, None for an entry that it would cancel. Changes nothing."""
        with self._main.read() as raw:
            return states_in(raw, topic_id, logs, outcomes)

    def fired(self, topic_id: int, logs: list[FoundEntries]) -> tuple[int, Position] | None:
        """Return the due time of a located entry and its log's last marker, if it fired and was not cancelled."""
        with self._main.read() as raw:
            for found in logs:
                frontier = catalog.frontier(raw, topic_id, found.partition.start_ms)
                if not found.rows or frontier is None or not frontier.has_fired(found.entries, found.dues)[0]:
                    continue
                last, cancelled = frontier.last_marker, cancellations.members(raw, Table.CANCELLED, found.ledger_id)
                if last is not None and int(found.entries[0]) not in cancelled:
                    return int(found.dues[0]), last
        return None

    # -- inside the transaction ----------------------------------------------------------------------

    def cancel(self, transaction: Transaction, topic_id: int, found: FoundEntries, outcomes: list[Outcome]) -> None:
        """Cancel entries that have not fired, and set their `outcomes`; the commit tells the index."""
        if _gone(found, transaction.get(fmt.partition_key(found.partition.start_ms))):
            for row in found.rows:
                outcomes[row] = Outcome.UNKNOWN
            return
        fields = transaction.get(fmt.frontier_key(topic_id, found.partition.start_ms))
        fired = _fired(found, fields)
        wanted = BitMap(found.entries[~fired].tolist())
        fresh = cancellations.add(transaction, Table.CANCELLED, found.ledger_id, wanted)
        known = BitMap(found.entries[fired].tolist())
        if known:
            known &= cancellations.members(transaction.raw, Table.CANCELLED, found.ledger_id)
        unused = fresh.copy()
        for row, entry_id, has_fired in zip(found.rows, found.entries.tolist(), fired.tolist(), strict=True):
            if has_fired:
                outcomes[row] = Outcome.ALREADY_CANCELLED if entry_id in known else Outcome.FIRED
            elif entry_id in unused:
                outcomes[row] = Outcome.CANCELLED
                unused.remove(entry_id)  # the same id again in one request is cancelled already
            else:
                outcomes[row] = Outcome.ALREADY_CANCELLED
        transaction.after_commit(lambda: self._withdraw(topic_id, found, fresh))

    def append(
        self,
        transaction: Transaction,
        to: Destination,
        new: Successors,
        rows: Sequence[int],
        cancelled: AbstractSet[int] = frozenset(),
    ) -> dict[int, MessageId]:
        """Append the messages of some rows of a destination; their ids by row.

        cancelled: those of them that are cancelled at the same time.
        """
        partition, ledger_id, topic_id = to.partition, to.log.ledger_id, new.topic_id
        if not rows:
            return {}
        replaced = Replaced(
            np.array([new.ids[row].ledger_id for row in rows], dtype=np.uint64),
            np.array([new.ids[row].entry_id for row in rows], dtype=np.uint32),
        )
        dues: Int64s = np.array([new.dues[row] for row in rows], dtype=np.int64)
        bodies = [new.bodies[row] for row in rows]
        rows_there = transaction.to(partition.start_ms, partition.memtable)
        first = partition.add(rows_there, to.log, dues, bodies, self._limits, replaced)
        entry_ids = {row: first + offset for offset, row in enumerate(rows)}
        refused = BitMap([entry_id for row, entry_id in entry_ids.items() if row in cancelled])
        cancellations.add(transaction, Table.ADMITTED, ledger_id, BitMap(entry_ids.values()))
        cancellations.add(transaction, Table.CANCELLED, ledger_id, refused)
        fires = np.array([row not in cancelled for row in rows], dtype=np.bool_)
        if fires.any():
            ids = np.arange(first, first + len(rows), dtype=np.uint32)[fires]
            transaction.after_commit(partial(self._firing.admit, partition.start_ms, topic_id, ids, dues[fires]))
        return {row: MessageId(ledger_id, entry_id) for row, entry_id in entry_ids.items()}

    def _withdraw(self, topic_id: int, found: FoundEntries, cancelled: BitMap) -> None:
        rows = np.array([entry_id in cancelled for entry_id in found.entries.tolist()], dtype=np.bool_)
        self._firing.withdraw(found.partition.start_ms, topic_id, found.entries[rows], found.dues[rows])

    # -- before the transaction ----------------------------------------------------------------------

    @contextmanager
    def destinations(self, new: Successors, now_ms: int) -> Iterator[list[Destination]]:
        """The logs that messages whose time has not come go to, under leases; the others are of no partition."""
        by_start: dict[int, list[int]] = {}
        for row in new.bodies:
            if new.dues[row] > now_ms:
                by_start.setdefault(partition_start(new.dues[row], self._span_ms), []).append(row)
        found: list[Destination] = []
        with ExitStack() as leases:
            for start_ms, rows in sorted(by_start.items()):
                partition = leases.enter_context(self._partitions.append_lease(start_ms, now_ms))
                if partition is None:
                    raise BrokenInvariant(f"partition {start_ms} is closed before its end, now {now_ms}")
                log = partition.log_to_append(new.topic_id, self._partitions.new_ledger)
                found.append(Destination(partition, log, rows))
            yield found


def states_in(
    raw: Reads, topic_id: int, logs: Sequence[FoundEntries], outcomes: Sequence[Outcome]
) -> list[Outcome | None]:
    """The outcomes that cancelling would have, as the main environment is; see `PendingEntries.states`."""
    states: list[Outcome | None] = list(outcomes)
    for found in logs:
        if _gone(found, catalog.fields_of(raw, fmt.partition_key(found.partition.start_ms))):
            continue
        fired = _fired(found, catalog.fields_of(raw, fmt.frontier_key(topic_id, found.partition.start_ms)))
        cancelled = cancellations.members(raw, Table.CANCELLED, found.ledger_id)
        for row, entry_id, has_fired in zip(found.rows, found.entries.tolist(), fired, strict=True):
            if entry_id in cancelled:
                states[row] = Outcome.ALREADY_CANCELLED
            else:
                states[row] = Outcome.FIRED if has_fired else None
    return states


def _gone(found: FoundEntries, fields: bytes | None) -> bool:
    """Return whether the partition's deletion is recorded: its cancellations are not known any more.

    The lease keeps the directory, not the record.
    """
    return fields is None or PartitionRecord.unpack(fields).state is PartitionState.DELETING


def _fired(found: FoundEntries, fields: bytes | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which entries of a log the recorded frontier has passed."""
    if found.partition.state is not PartitionState.OPEN:
        return np.ones(len(found.entries), dtype=np.bool_)
    if fields is None:
        return np.zeros(len(found.entries), dtype=np.bool_)
    return FrontierRecord.unpack(fields).has_fired(found.entries, found.dues)
