"""Cancelling and rescheduling: what has not fired is taken back, with a truthful answer.

The answer comes from the transaction that records it: the entry is cancelled if the frontier in that
transaction has not passed it, and nothing is on its way into the main log meanwhile, because everything
here happens inside the gate that firing is alone in. The delay indexes hear of it from the commit itself, so that
they are what is on disk whatever becomes of the caller.

Rescheduling appends the message to the partition of its new due time as a conditional entry, which never
fires unless it is admitted; then one main transaction cancels the old entry and admits the new one. At
any crash exactly one of the two fires. Between the two nothing fires, so that T of the frontier is not above an entry
that is admitted: one that firing has gone ahead of (C) is late, as one that was appended would be, and fires next. A
new due time that has come already needs no partition: the message goes into the main log in that same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import lmdb
import numpy as np
from pyroaring import BitMap

from ..partitions import cancellations
from ..partitions.due_column import dues_of
from ..partitions.partition import Partition
from ..partitions.partition_set import PartitionSet
from ..partitions.timespan import partition_start
from ..store.clock import Clock
from ..store.codec import format as fmt
from ..store.codec.format import PartitionRecord, PartitionState, Table
from ..store.codec.frontier import FrontierRecord
from ..store.codec.run import Int64s, RunKind, UInt32s
from ..store.config import StoreConfig
from ..store.env.environment import Environment
from ..store.env.transaction import Transaction
from ..store.errors import BrokenInvariant, CorruptEntry
from ..store.log.ledger import Replaced, RunLimits
from ..store.log.managed_ledger import ManagedLedger
from ..store.log.scan import find_run
from ..store.position import MessageId
from .firing.firing import Firing
from .lookup import find_partition


class Outcome(Enum):
    """What became of a request to take a message back."""

    CANCELLED = "cancelled"
    ALREADY_CANCELLED = "already cancelled"
    FIRED = "fired"
    UNKNOWN = "unknown"


class _Log(NamedTuple):
    """A topic's log in a partition, and the entries of it that are asked about, by their place in the request."""

    partition: Partition
    ledger_id: int
    rows: list[int]
    entries: UInt32s
    dues: Int64s


class _New(NamedTuple):
    """Conditional entries appended for a request: first entry id in a log, the rows they belong to, their due times."""

    partition: Partition
    ledger_id: int
    first_entry: int
    rows: list[int]
    dues: Int64s


class Withdrawals:
    """Takes messages back from the partition logs of a store. Thread-safe; requests share commits."""

    def __init__(
        self,
        main: Environment,
        partitions: PartitionSet,
        firing: Firing,
        clock: Clock,
        config: StoreConfig,
        limits: RunLimits,
    ) -> None:
        self._main = main
        self._partitions = partitions
        self._firing = firing
        self._clock = clock
        self._span_ms = config.partition_ms
        self._limits = limits

    def cancel(self, log: ManagedLedger, ids: Sequence[MessageId]) -> list[Outcome]:
        """Cancel messages of a topic; the outcome of each, in order, once it is durable.

        CANCELLED and ALREADY_CANCELLED: it is never delivered. FIRED: it is in the main log. UNKNOWN: the
        topic has no such message, or none any more. Raises StoreFull, StoreFailed; then nothing is cancelled.
        """
        with self._firing.gate.reading():
            logs, outcomes = self._locate(log, ids)
            try:
                if not logs:
                    return outcomes

                def work(transaction: Transaction) -> None:
                    for found in logs:
                        self._cancel_in(transaction, log.topic_id, found, outcomes)

                self._sync(logs)
                self._main.write(work)
                return outcomes
            finally:
                self._give_back(logs)

    def states(self, log: ManagedLedger, ids: Sequence[MessageId]) -> list[Outcome | None]:
        """What `cancel` would answer, None for a message that it would cancel. Changes nothing."""
        with self._firing.gate.reading():
            logs, outcomes = self._locate(log, ids)
            try:
                states: list[Outcome | None] = list(outcomes)
                with self._main.read() as raw:
                    for found in logs:
                        if _gone(found, _fields(raw, fmt.partition_key(found.partition.start_ms))):
                            continue
                        fields = _fields(raw, fmt.frontier_key(log.topic_id, found.partition.start_ms))
                        fired = _fired(found, fields)
                        cancelled = cancellations.members(raw, Table.CANCELLED, found.ledger_id)
                        for row, entry_id, has_fired in zip(found.rows, found.entries.tolist(), fired, strict=True):
                            if entry_id in cancelled:
                                states[row] = Outcome.ALREADY_CANCELLED
                            else:
                                states[row] = Outcome.FIRED if has_fired else None
                return states
            finally:
                self._give_back(logs)

    def reschedule(self, log: ManagedLedger, ids: Sequence[MessageId], dues: Sequence[int]) -> list[MessageId | None]:
        """Give messages of a topic new due times (epoch ms); their new ids, None where it is too late.

        All of them in one main transaction; each message is then delivered once, under one of its two ids.
        Raises StoreFull, StoreFailed (nothing is rescheduled), CorruptEntry (a body cannot be read).
        """
        with self._firing.gate.reading():
            now_ms = self._clock.now_ms()
            logs, outcomes = self._locate(log, ids)
            leased: list[Partition] = []
            try:
                bodies: dict[int, bytes] = {}
                for found in logs:
                    bodies.update(self._bodies(found))
                new = self._append_conditional(log.topic_id, ids, dues, bodies, now_ms, leased)
                self._sync(logs)
                placed = {row for appended in new for row in appended.rows}
                direct = [row for row in bodies if row not in placed]

                def work(transaction: Transaction) -> dict[int, MessageId]:
                    for found in logs:
                        self._cancel_in(transaction, log.topic_id, found, outcomes)
                    taken = _first_rows(ids, outcomes)
                    results: dict[int, MessageId] = {}
                    for appended in new:
                        self._admit_in(transaction, log.topic_id, appended, taken, results)
                    now = [row for row in direct if row in taken]
                    if now:
                        self._append_direct(transaction, log, now, bodies, now_ms, results)
                    return results

                results = self._main.write(work)
                return [results.get(row) for row in range(len(ids))]
            finally:
                self._give_back(logs)
                for partition in leased:
                    self._partitions.release(partition)

    def _sync(self, logs: list[_Log]) -> None:
        """See that entries are on disk before their cancellation: others that get their ids would be cancelled too."""
        for found in logs:
            found.partition.environment.sync()

    def _withdraw(self, topic_id: int, found: _Log, cancelled: BitMap) -> None:
        rows = np.array([entry_id in cancelled for entry_id in found.entries.tolist()], dtype=np.bool_)
        self._firing.withdraw(found.partition.start_ms, topic_id, found.entries[rows], found.dues[rows])

    # -- finding -----------------------------------------------------------------------------------

    def _locate(self, log: ManagedLedger, ids: Sequence[MessageId]) -> tuple[list[_Log], list[Outcome]]:
        """The partition logs of the ids, leased; and outcomes, UNKNOWN or FIRED where no log is concerned."""
        outcomes = [Outcome.UNKNOWN] * len(ids)
        rows_of: dict[int, list[int]] = {}
        for row, (ledger_id, entry_id) in enumerate(ids):
            in_main = log.entries_of(ledger_id)
            if in_main is None:
                rows_of.setdefault(ledger_id, []).append(row)
            elif 0 <= entry_id < in_main:
                outcomes[row] = Outcome.FIRED
        found: list[_Log] = []
        try:
            for ledger_id, rows in rows_of.items():
                partition = find_partition(self._partitions, log.topic_id, ledger_id)
                if partition is not None:
                    self._partitions.acquire(partition)
                    try:
                        found.append(self._existing(partition, log.topic_id, ledger_id, rows, ids))
                    except BaseException:
                        self._partitions.release(partition)
                        raise
        except BaseException:
            self._give_back(found)
            raise
        return found, outcomes

    def _existing(
        self, partition: Partition, topic_id: int, ledger_id: int, rows: list[int], ids: Sequence[MessageId]
    ) -> _Log:
        partition_log = partition.log(topic_id)
        tail = 0 if partition_log is None else partition_log.ledger.entries
        rows = sorted((row for row in rows if 0 <= ids[row].entry_id < tail), key=lambda row: ids[row].entry_id)
        entries = np.array([ids[row].entry_id for row in rows], dtype=np.uint32)
        dues = dues_of(partition.environment, ledger_id, entries)
        held = self._held(partition, ledger_id, entries)
        kept = [at for at in range(len(rows)) if dues[at] >= 0 and int(entries[at]) not in held]
        return _Log(partition, ledger_id, [rows[at] for at in kept], entries[kept], dues[kept])

    def _held(self, partition: Partition, ledger_id: int, entries: UInt32s) -> BitMap:
        """Those of `entries` that are conditional and not admitted."""
        held = BitMap()
        with self._main.read() as main:
            admitted = cancellations.members(main, Table.ADMITTED, ledger_id)
        with partition.environment.read() as raw:
            cursor = raw.cursor()
            for entry_id in entries.tolist():
                if entry_id in admitted:
                    continue
                try:
                    run = find_run(cursor, partition.name, ledger_id, entry_id)
                except CorruptEntry:
                    continue
                if run is not None and run.conditional:
                    held.add(entry_id)
        return held

    def _bodies(self, found: _Log) -> dict[int, bytes]:
        bodies = {}
        with found.partition.environment.read() as raw:
            cursor = raw.cursor()
            for row, entry_id in zip(found.rows, found.entries.tolist(), strict=True):
                run = find_run(cursor, found.partition.name, found.ledger_id, entry_id)
                if run is not None and run.kind == RunKind.MESSAGES:
                    body = run.body(entry_id - run.first_entry)
                    if body is not None:
                        bodies[row] = body
        return bodies

    def _give_back(self, logs: list[_Log]) -> None:
        for found in logs:
            self._partitions.release(found.partition)

    # -- inside the transaction ----------------------------------------------------------------------

    def _cancel_in(self, transaction: Transaction, topic_id: int, found: _Log, outcomes: list[Outcome]) -> None:
        """Cancel what has not fired, and say so in `outcomes`; the index hears of it from the commit."""
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

    def _admit_in(
        self, transaction: Transaction, topic_id: int, new: _New, taken: set[int], results: dict[int, MessageId]
    ) -> None:
        start_ms = new.partition.start_ms
        fields = transaction.get(fmt.frontier_key(topic_id, start_ms))
        # Invariant: nothing fired since they were appended. Below T the record would say that they have.
        if fields is not None and new.first_entry < FrontierRecord.unpack(fields).seen:
            raise BrokenInvariant(f"entry {new.first_entry} of ledger {new.ledger_id} is admitted behind the frontier")
        entries = BitMap()
        refused = BitMap()
        for offset, row in enumerate(new.rows):
            entry_id = new.first_entry + offset
            if row in taken:
                entries.add(entry_id)
                results[row] = MessageId(new.ledger_id, entry_id)
            else:
                refused.add(entry_id)
        cancellations.add(transaction, Table.ADMITTED, new.ledger_id, entries)
        cancellations.add(transaction, Table.CANCELLED, new.ledger_id, refused)
        if entries:
            ids = np.array(entries, dtype=np.uint32)
            dues = new.dues[ids - np.uint32(new.first_entry)]
            transaction.after_commit(lambda: self._firing.admit(start_ms, topic_id, ids, dues))

    def _append_direct(
        self,
        transaction: Transaction,
        log: ManagedLedger,
        rows: list[int],
        bodies: dict[int, bytes],
        now_ms: int,
        results: dict[int, MessageId],
    ) -> None:
        dues = np.full(len(rows), now_ms, dtype=np.int64)
        at = 0
        for segment in log.append_messages(transaction, dues, [bodies[row] for row in rows], now_ms):
            for entry_id in range(segment.first_entry, segment.first_entry + segment.length):
                results[rows[at]] = MessageId(segment.ledger_id, entry_id)
                at += 1

    # -- appending -----------------------------------------------------------------------------------

    def _append_conditional(
        self,
        topic_id: int,
        ids: Sequence[MessageId],
        dues: Sequence[int],
        bodies: dict[int, bytes],
        now_ms: int,
        leased: list[Partition],
    ) -> list[_New]:
        """Append the messages whose new time is ahead to their new partitions, on disk before it returns."""
        by_start: dict[int, list[int]] = {}
        for row in bodies:
            if dues[row] > now_ms:
                by_start.setdefault(partition_start(dues[row], self._span_ms), []).append(row)
        new = []
        for start_ms, rows in sorted(by_start.items()):
            with self._partitions.append_lease(start_ms, now_ms) as partition:
                if partition is None:
                    raise BrokenInvariant(f"partition {start_ms} is closed before its end, now {now_ms}")
                replaced = Replaced(
                    np.array([ids[row].ledger_id for row in rows], dtype=np.uint64),
                    np.array([ids[row].entry_id for row in rows], dtype=np.uint32),
                )
                new_dues: Int64s = np.array([dues[row] for row in rows], dtype=np.int64)
                ledger_id, first = partition.append(
                    topic_id,
                    new_dues,
                    [bodies[row] for row in rows],
                    self._limits,
                    self._partitions.new_ledger,
                    replaced,
                )
                partition.environment.sync()
                self._partitions.acquire(partition)
                leased.append(partition)
                new.append(_New(partition, ledger_id, first, rows, new_dues))
        return new


def _fields(raw: lmdb.Transaction, key: bytes) -> bytes | None:
    value = raw.get(key)
    return None if value is None else fmt.unseal(key, value)


def _gone(found: _Log, fields: bytes | None) -> bool:
    """Whether the partition's deletion is recorded: what was cancelled in it is not known any more.

    The lease keeps the directory, not the record.
    """
    return fields is None or PartitionRecord.unpack(fields).state is PartitionState.DELETING


def _fired(found: _Log, fields: bytes | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which entries of a log the recorded frontier has passed."""
    if found.partition.state is not PartitionState.OPEN:
        return np.ones(len(found.entries), dtype=np.bool_)
    if fields is None:
        return np.zeros(len(found.entries), dtype=np.bool_)
    return FrontierRecord.unpack(fields).has_fired(found.entries, found.dues)


def _first_rows(ids: Sequence[MessageId], outcomes: Sequence[Outcome]) -> set[int]:
    """Rows that this request cancelled."""
    return {row for row in range(len(ids)) if outcomes[row] is Outcome.CANCELLED}
