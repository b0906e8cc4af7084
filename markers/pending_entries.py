"""Entries of partition logs that may still fire: found by id, cancelled, and appended in the place of others.

The steps that cancelling, rescheduling and recurring messages are made of (duelog/sending/withdrawal.py).

REQUIRES of the caller: the gate that firing is alone in, held for reading from the first step of a request to the end
of its transaction; so nothing is on its way into the main log meanwhile, and the frontiers in that transaction say what
has fired. The delay indexes hear from the commit itself what it cancelled and admitted.

What takes the place of another is a conditional entry: it names that one, and fires because the transaction that
appends it admits it too. (Versions before appended it in a commit of its own: one that is not admitted never fires.)
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ..partitions import cancellations
from ..partitions.partition import Partition, PartitionLog
from ..partitions.partition_set import Storage
from ..partitions.timespan import partition_start
from ..store.codec import format as fmt
from ..store.codec.bits import bitmap
from ..store.codec.format import PartitionRecord, PartitionState, Table
from ..store.codec.frontier import HELD, FrontierRecord
from ..store.codec.run import Int64s, RunKind, RunLimits, fields_of_message
from ..store.codec.sent_ids import IN_MAIN
from ..store.env.memtable import Reads
from ..store.env.reader_gate import Reading
from ..store.env.transaction import Transaction
from ..store.errors import BrokenInvariant, CorruptEntry, DamagedStore
from ..store.held import Held
from ..store.listener import StoreListener, tell
from ..store.log import catalog
from ..store.log.ledger import Replaced
from ..store.log.managed_ledger import ManagedLedger
from ..store.log.scan import RunFinder
from ..store.position import MessageId, Position
from .firing.firing import Firing
from .lookup import find_partition

_NONE = BitMap()

Get = Callable[[bytes], bytes | None]
"""Reads the fields of a small record."""


class Outcome(Enum):
    """Outcome of a request to cancel or reschedule a message."""

    CANCELLED = "cancelled"
    ALREADY_CANCELLED = "already cancelled"
    FIRED = "fired"
    UNKNOWN = "unknown"


class FoundEntries(NamedTuple):
    """Entries of one partition log that a request names, and the rows of the request that do.

    dues: none where nothing in the partition has fired, or is in memory. bodies: by row, where they were asked for, and
    can be read.
    """

    partition: Partition
    ledger_id: int
    rows: list[int]
    entries: list[int]
    dues: Sequence[int] = ()
    bodies: Mapping[int, bytes] = MappingProxyType({})
    unreadable: Sequence[CorruptEntry] = ()


_NOTHING = MessageId(0, 0), None
"""The predecessor of a message that replaces nothing: no ledger has this id."""


class Successors(NamedTuple):
    """Messages of one topic that are sent together, by row of a request, some of them in the place of others.

    olds: by row, what is cancelled for the message, and the partition that this is in, None: it is looked for; a row
    without a message has what is cancelled for none. passing: rows whose message is cancelled as well, for another of
    them takes its place.
    """

    log: ManagedLedger
    dues: Sequence[int]
    bodies: Mapping[int, bytes]
    olds: Mapping[int, tuple[MessageId, Partition | None]] = MappingProxyType({})
    passing: AbstractSet[int] = frozenset()

    def olds_by_partition(self) -> dict[Partition | None, list[MessageId]]:
        """List the messages to be cancelled, by the partition that each is known to be in."""
        by_partition: dict[Partition | None, list[MessageId]] = {}
        for old, partition in self.olds.values():
            by_partition.setdefault(partition, []).append(old)
        return by_partition


class Placed(NamedTuple):
    """Where a message is: the start of its partition, IN_MAIN for the main log, and its id."""

    start_ms: int
    message_id: MessageId


@dataclass(eq=False, repr=False)
class PendingEntries:
    """The entries of a store's partition logs, as far as they may still fire. Thread-safe."""

    _storage: Storage
    _firing: Firing

    def __post_init__(self) -> None:
        self._main, self._partitions, config = self._storage.main, self._storage.partitions, self._storage.config
        self._span_ms, self._limits = config.partition_ms, RunLimits(config.run_entries, config.run_bytes)
        self.gate = self._firing.gate

    def enter_gate(self, held: Held) -> None:
        """Hold the gate of firing for reading until `held` ends."""
        reading = Reading(self.gate)
        reading.__enter__()
        held.ends.append(reading.__exit__)

    def located(
        self,
        held: Held,
        log: ManagedLedger,
        ids: Sequence[MessageId],
        known: Partition | None = None,
        *,
        bodies: bool = False,
        dues: bool = False,
    ) -> tuple[list[FoundEntries], list[Outcome]]:
        """The entries of the ids by partition, under leases if need be, and outcomes: of no entry UNKNOWN, or FIRED.

        known: the partition that they are in; None: it is looked for. bodies: read those as well, where they may still
        be cancelled. dues: read due times of those that have fired as well.
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
        for ledger_id, rows in rows_of.items():
            partition = known or find_partition(self._partitions, log.topic_id, ledger_id)
            if partition is None:
                continue
            try:
                is_read = self._is_read(partition, bodies=bodies, dues=dues)
                tail = None if is_read else self._tail(partition, log.topic_id, ledger_id)
                if tail is None:
                    self._partitions.acquire(partition)
                    held.ends.append(partial(self._partitions.release, partition))
                    found.append(self._existing(partition, log.topic_id, ledger_id, rows, ids, bodies=bodies))
                else:
                    there = [row for row in rows if 0 <= ids[row].entry_id < tail]
                    found.append(FoundEntries(partition, ledger_id, there, [ids[row].entry_id for row in there]))
            except DamagedStore:
                if self._partitions.registered(partition):
                    raise  # else it was deleted meanwhile: all of it had fired
        return found, outcomes

    def fetch(
        self,
        log: ManagedLedger,
        ids: Sequence[MessageId],
        known: Partition | None = None,
        *,
        bodies: bool = False,
        dues: bool = False,
    ) -> None:
        """Have the partitions that `located` reads be on this machine, whatever that takes: `gate` is not held.

        Raises as `PartitionSet.at_hand`.
        """
        if not self._partitions.away:
            return
        for ledger_id in {message_id.ledger_id for message_id in ids}:
            if log.entries_of(ledger_id) is None:
                partition = known or find_partition(self._partitions, log.topic_id, ledger_id)
                if partition is not None and self._is_read(partition, bodies=bodies, dues=dues):
                    self._partitions.at_hand(partition)

    def _is_read(self, partition: Partition, *, bodies: bool, dues: bool) -> bool:
        """Return whether entries have to be read to answer for them.

        Not in a partition so far away that none has fired, or is in memory; nor in one that is away and has closed:
        all have fired.
        """
        firing, start_ms = self._firing, partition.start_ms
        if partition.state is PartitionState.OPEN:
            return bodies or start_ms <= firing.passed_ms or start_ms in firing.loaded.logs
        return dues or partition.away is None

    def _tail(self, partition: Partition, topic_id: int, ledger_id: int) -> int | None:
        """Return the end of a log as far as it is known without its entries; None: it is not known to be one."""
        log = partition.known_log(topic_id)
        if log is None and partition.away is not None:
            with self._partitions.lease(partition, partial=True):
                log = partition.log(topic_id)
        return None if log is None or log.ledger_id != ledger_id else log.ledger.entries

    def _existing(
        self,
        partition: Partition,
        topic_id: int,
        ledger_id: int,
        rows: list[int],
        ids: Sequence[MessageId],
        *,
        bodies: bool,
    ) -> FoundEntries:
        partition_log, environment = partition.log(topic_id), partition.environment
        tail = 0 if partition_log is None else partition_log.ledger.entries
        there: list[int] = []
        entries: list[int] = []
        dues: list[int] = []
        conditional: list[int] = []
        unreadable: list[CorruptEntry] = []
        read: dict[int, bytes] = {}
        with environment.read() as raw:
            finder, run = RunFinder(raw, partition.name), None
            for row in sorted(rows, key=ids.__getitem__):
                entry_id = ids[row].entry_id
                if not 0 <= entry_id < tail:
                    continue
                if run is None or entry_id >= run.limit:
                    try:
                        run = finder.find(ledger_id, entry_id)
                    except CorruptEntry:
                        run = None
                if run is not None:
                    there.append(row)
                    entries.append(entry_id)
                    dues.append(run.due(entry_id - run.first_entry))
                    if run.conditional:
                        conditional.append(entry_id)
                    if bodies and run.kind == RunKind.MESSAGES:
                        try:
                            body = run.body(entry_id - run.first_entry)
                        except CorruptEntry as error:
                            unreadable.append(error)
                        else:
                            if body is not None:
                                read[row] = body
        if conditional:
            with self._main.read() as main:
                admitted = cancellations.members_near(main, Table.ADMITTED, ledger_id, conditional)
            never = BitMap(conditional) - admitted
            kept = [at for at, entry_id in enumerate(entries) if entry_id not in never]
            there, entries, dues = ([column[at] for at in kept] for column in (there, entries, dues))
        return FoundEntries(partition, ledger_id, there, entries, dues, read, unreadable)

    def states(self, topic_id: int, logs: Sequence[FoundEntries], outcomes: Sequence[Outcome]) -> list[Outcome | None]:
        """Return the outcomes that `cancel` would give, None for an entry that it would cancel. Changes nothing."""
        states: list[Outcome | None] = list(outcomes)
        with self._main.read() as raw:
            get = partial(catalog.fields_of, raw)
            for found in logs:
                if found.partition.state is not PartitionState.OPEN and _gone(get, found):
                    continue
                fired = self._fired(get, topic_id, found)
                cancelled = _cancelled(raw, found)
                for row, entry_id in zip(found.rows, found.entries, strict=True):
                    if entry_id in cancelled:
                        states[row] = Outcome.ALREADY_CANCELLED
                    else:
                        states[row] = Outcome.FIRED if entry_id in fired else None
        return states

    def _fired(self, get: Get, topic_id: int, found: FoundEntries) -> BitMap:
        """The entries that the recorded frontier has passed, which is read where that can be."""
        if found.partition.state is not PartitionState.OPEN:
            return BitMap(found.entries)
        if not found.dues or min(found.dues) > self._firing.passed_ms:
            return _NONE
        fields = get(fmt.frontier_key(topic_id, found.partition.start_ms))
        if fields is None:
            return _NONE
        frontier, entries = FrontierRecord.unpack(fields), np.array(found.entries, dtype=np.uint32)
        return BitMap(entries[frontier.has_fired(entries, np.array(found.dues, dtype=np.int64))])

    def fired(self, topic_id: int, logs: list[FoundEntries]) -> tuple[int, Position] | None:
        """Return the due time of a located entry and its log's last marker, if it fired and was not cancelled."""
        with self._main.read() as raw:
            for found in logs:
                frontier = catalog.frontier(raw, topic_id, found.partition.start_ms)
                if not found.rows or frontier is None:
                    continue
                entries, dues = np.array(found.entries, dtype=np.uint32), np.array(found.dues, dtype=np.int64)
                if not frontier.has_fired(entries, dues)[0]:
                    continue
                last, cancelled = frontier.last_marker, _cancelled(raw, found)
                if last is not None and found.entries[0] not in cancelled:
                    return found.dues[0], last
        return None

    # -- inside the transaction ----------------------------------------------------------------------

    def cancel(self, transaction: Transaction, topic_id: int, found: FoundEntries, outcomes: list[Outcome]) -> None:
        """Cancel entries that have not fired, and set their `outcomes`; the commit tells the index."""
        if found.partition.state is not PartitionState.OPEN and _gone(transaction.get, found):
            for row in found.rows:
                outcomes[row] = Outcome.UNKNOWN
            return
        rows, entries = found.rows, found.entries
        fired = self._fired(transaction.get, topic_id, found)
        known = _cancelled(transaction.raw, found) if fired else _NONE
        wanted = bitmap(entries) - fired if fired else bitmap(entries)
        fresh = cancellations.add(transaction, Table.CANCELLED, found.ledger_id, wanted)
        unused = set(fresh)
        for row, entry_id in zip(rows, entries, strict=True):
            if entry_id in unused:
                outcomes[row] = Outcome.CANCELLED
                unused.remove(entry_id)  # the same id again in one request is cancelled already
            elif entry_id in fired and entry_id not in known:
                outcomes[row] = Outcome.FIRED
            else:
                outcomes[row] = Outcome.ALREADY_CANCELLED
        if fresh:
            start_ms, dues = found.partition.start_ms, found.dues
            transaction.after_commit(partial(self._firing.withdraw, start_ms, topic_id, fresh, entries, dues))

    # -- what takes the place of others --------------------------------------------------------------

    def place(self, held: Held, topic_id: int, due_ms: int, now_ms: int) -> PartitionLog | None:
        """The log that messages of a topic which are due then go into, with an append lease until `held` ends.

        None: they go into the main log, they are due.
        """
        if due_ms <= now_ms:
            return None
        partition = self._partitions.begin_append(due_ms, now_ms, topic_id)
        if partition is None:
            raise BrokenInvariant(f"the partition of {due_ms} is closed before its end, now {now_ms}")
        held.ends.append(partial(self._partitions.end_appends, (partition,)))
        return partition.log_to_append(topic_id, self._partitions.new_ledger)

    def places(self, held: Held, new: Successors, now_ms: int) -> list[tuple[PartitionLog | None, list[int]]]:
        """The place of each message, as `place`, and the rows that go there."""
        rows_of: dict[int, list[int]] = {}
        for row in new.bodies:
            due_ms = new.dues[row]
            start_ms = IN_MAIN if due_ms <= now_ms else partition_start(due_ms, self._span_ms)
            rows_of.setdefault(start_ms, []).append(row)
        return [
            (self.place(held, new.log.topic_id, new.dues[rows[0]], now_ms), rows) for _, rows in sorted(rows_of.items())
        ]

    def append(
        self,
        transaction: Transaction,
        place: PartitionLog | None,
        new: Successors,
        rows: Sequence[int],
        now_ms: int,
    ) -> list[Placed]:
        """Append the messages of some rows to their place in a transaction."""
        if not rows:
            return []
        if place is not None:
            first = self._append(transaction, place, new, rows)
            start_ms, limit = place.partition.start_ms, first + len(rows)
            return [Placed(start_ms, MessageId(place.ledger_id, entry_id)) for entry_id in range(first, limit)]
        dues = np.array([new.dues[row] for row in rows], dtype=np.int64)
        segments = new.log.append_messages(transaction, dues, [new.bodies[row] for row in rows], now_ms)
        ids = [MessageId(ledger, first + at) for ledger, first, count in segments for at in range(count)]
        return [Placed(IN_MAIN, message_id) for message_id in ids]

    def _append(self, transaction: Transaction, log: PartitionLog, new: Successors, rows: Sequence[int]) -> int:
        """Append messages to one log; the first entry id."""
        partition, start_ms = log.partition, log.partition.start_ms
        rows_there = transaction.to(start_ms, partition.memtable)
        _, dues, bodies, olds, passing = new
        if len(rows) == 1:
            (row,) = rows
            fields = fields_of_message(start_ms, dues[row], bodies[row], olds.get(row, _NOTHING)[0])
            heard_ms = HELD if row in passing else dues[row]
            first = partition.add_message(rows_there, log, heard_ms, fields, bodies[row])
        else:
            old_ledgers, old_entries = zip(*(olds.get(row, _NOTHING)[0] for row in rows), strict=True)
            replaced = Replaced(np.array(old_ledgers, dtype=np.uint64), np.array(old_entries, dtype=np.uint32))
            column: Int64s = np.array([dues[row] for row in rows], dtype=np.int64)
            heard = np.array([HELD if row in passing else dues[row] for row in rows], dtype=np.int64)
            messages = [bodies[row] for row in rows]
            first = partition.add(rows_there, log, column, messages, self._limits, replaced, heard)
        entries = bitmap(range(first, first + len(rows)))
        cancellations.add(transaction, Table.ADMITTED, log.ledger_id, entries)
        pending = len(rows)
        if passing:
            refused = BitMap([at for at, row in enumerate(rows, first) if row in passing])
            cancellations.add(transaction, Table.CANCELLED, log.ledger_id, refused)
            pending -= len(refused)
        if pending:
            listeners = self._storage.listeners
            transaction.after_commit(partial(tell, listeners, StoreListener.admitted, new.log.topic_id, pending))
        return first


def _cancelled(raw: Reads, found: FoundEntries) -> BitMap:
    return cancellations.members_near(raw, Table.CANCELLED, found.ledger_id, found.entries)


def _gone(get: Get, found: FoundEntries) -> bool:
    """Return whether the deletion of a closed partition is recorded: its cancellations are not known any more.

    The lease keeps the directory, not the record. An open partition is not deleted: firing, which closes it first, is
    alone in the gate.
    """
    fields = get(fmt.partition_key(found.partition.start_ms))
    return fields is None or PartitionRecord.unpack(fields).state is PartitionState.DELETING
