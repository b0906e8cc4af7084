"""Firing: when messages are due, their markers go into the main logs, with the frontiers, in one transaction.

All state that firing changes lies in the main environment, so a crash leaves markers, frontiers and the
clock mark together or none of them. The entries that markers point at are durable before: partition
environments are synced first where `durability` is not "commit".

Partitions that have begun are loaded, a bounded number at a time, in order; a loaded one hears of each
append in commit order. Only the owner's tick calls `load`, `fire` and `close_finished`, one at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from pyroaring import BitMap

from ..partitions.due_column import DueBatch, dues_of, scan_dues
from ..partitions.index import DelayIndex
from ..partitions.partition import Partition, PartitionLog
from ..partitions.partition_set import PartitionSet
from ..store import catalog
from ..store import format as fmt
from ..store.cancellations import members
from ..store.config import StoreConfig
from ..store.environment import Environment
from ..store.errors import CorruptEntry, DamagedStore
from ..store.failpoints import reach
from ..store.format import FrontierRecord, PartitionRecord, PartitionState
from ..store.ledger import find_tail
from ..store.managed_ledger import ManagedLedger
from ..store.reader_gate import ReaderGate
from ..store.run import Int64s, UInt32s
from ..store.transaction import Transaction
from .log_firing import LogFiring, Taken
from .ready_queue import ReadyQueue

LOADED_AT_ONCE = 4
"""Most begun partitions whose indexes are in memory; the next is loaded when one has closed."""


class Firing:
    """The begun partitions of a store and what is due in them."""

    def __init__(
        self,
        main: Environment,
        partitions: PartitionSet,
        config: StoreConfig,
        *,
        main_log: Callable[[int], ManagedLedger | None],
        set_aside: Callable[[CorruptEntry], object],
        wake: Callable[[], None],
    ) -> None:
        """Hold the begun partitions of `partitions`; nothing is loaded yet.

        `main_log` gives a topic's main log by id, None when the topic was deleted; `wake` is called, by any
        thread, when something has become the first to be due.
        """
        self._main = main
        self._partitions = partitions
        self._config = config
        self._main_log = main_log
        self._set_aside = set_aside
        self._wake = wake
        self._ready = ReadyQueue()
        self._loaded: dict[int, dict[int, LogFiring]] = {}
        self.gate = ReaderGate()
        """Firing is alone in it; whoever cancels or reschedules is inside, so that nothing is on its way into
        the main log meanwhile and the recorded frontiers tell what has fired."""
        self.fired = 0
        """Messages fired since the store was opened."""
        self.observe: Callable[[Taken, int], None] | None = None
        """Called with each batch and the time of its markers, for metrics."""

    # -- loading ---------------------------------------------------------------------------------

    def load(self, now_ms: int) -> int:
        """Load partitions that begin within `preload_ms`, in order, a few at a time; returns how many."""
        loaded = 0
        for partition in self._partitions:
            if partition.start_ms - self._config.preload_ms > now_ms or len(self._loaded) >= LOADED_AT_ONCE:
                break
            if partition.state is PartitionState.OPEN and partition.start_ms not in self._loaded:
                self._load(partition)
                loaded += 1
        return loaded

    def next_load_ms(self) -> int | None:
        """When the next partition is to be loaded, None when none waits."""
        if len(self._loaded) >= LOADED_AT_ONCE:
            return None
        for partition in self._partitions:
            if partition.state is PartitionState.OPEN and partition.start_ms not in self._loaded:
                return partition.start_ms - self._config.preload_ms
        return None

    def _load(self, partition: Partition) -> None:
        self._partitions.acquire(partition)  # given back when the partition closes
        tails: dict[int, int] = {}
        logs: dict[int, LogFiring] = {}

        failure: list[Exception] = []

        def listen() -> None:
            try:
                listen_from_here()
            except Exception as error:  # the commit it comes after stands: not the committers' business
                failure.append(error)

        def listen_from_here() -> None:
            # In the leader, between two commits: what is committed now is scanned, what comes is heard.
            with partition.environment.read() as raw, self._main.read() as main:
                for key, fields in catalog.rows(raw, fmt.prefix(fmt.Table.LOG)):
                    topic_id, ledger_id = fmt.trailing_u32(key), fmt.unpack_u64(fields)
                    frontier = catalog.frontier(main, topic_id, partition.start_ms)
                    tails[topic_id] = find_tail(raw, partition.name, ledger_id)
                    logs[topic_id] = self._log(partition, topic_id, frontier or FrontierRecord.start(ledger_id), False)
            self._loaded[partition.start_ms] = logs
            partition.listener = functools.partial(self._heard, partition)

        try:
            partition.environment.write(lambda transaction: transaction.after_commit(listen))
            if failure:
                raise failure[0]
            for topic_id, log in list(logs.items()):
                if topic_id in tails:
                    self._read_back(partition, log, tails[topic_id])
        except BaseException:
            partition.listener = None
            self._loaded.pop(partition.start_ms, None)
            self._partitions.release(partition)
            raise

    def _log(self, partition: Partition, topic_id: int, frontier: FrontierRecord, loaded: bool) -> LogFiring:
        def due_of(entries: UInt32s) -> Int64s:
            return dues_of(partition.environment, frontier.ledger_id, entries)

        index = DelayIndex(due_of, start_ms=partition.start_ms, bucket_ms=self._config.bucket_ms)
        return LogFiring(topic_id, partition.start_ms, frontier, index, loaded=loaded)

    def _read_back(self, partition: Partition, log: LogFiring, tail: int) -> None:
        if self._main_log(log.topic_id) is None:
            return
        if tail < log.frontier.seen:
            raise DamagedStore(
                partition.path,
                f"ledger {log.ledger_id} ends at entry {tail}, its frontier at {log.frontier.seen}: entries were lost",
            )
        with self._main.read() as raw:
            cancelled = members(raw, fmt.Table.CANCELLED, log.ledger_id)
            admitted = members(raw, fmt.Table.ADMITTED, log.ledger_id)
        log.discard(cancelled)
        self._admit(partition, log, admitted - cancelled)
        for batch in scan_dues(partition.environment, log.ledger_id, log.tail, tail, admitted):
            if isinstance(batch, DueBatch):
                log.restore(batch.first_entry, batch.dues)
            else:
                self._set_aside(batch)
        log.skip_unreadable(tail)
        log.finish_loading()
        self._ready.arm(log, log.next_due_ms())

    def _admit(self, partition: Partition, log: LogFiring, entries: BitMap) -> None:
        if entries:
            ids = np.array(entries, dtype=np.uint32)
            log.admit(ids, dues_of(partition.environment, log.ledger_id, ids))

    def _heard(self, partition: Partition, appended: PartitionLog, first_entry: int, dues: Int64s) -> None:
        logs = self._loaded[partition.start_ms]
        log = logs.get(appended.topic_id)
        if log is None:
            frontier = FrontierRecord.start(appended.ledger_id)
            log = logs[appended.topic_id] = self._log(partition, appended.topic_id, frontier, True)
        log.hear(first_entry, dues)
        if log.loaded and self._ready.arm(log, log.next_due_ms()):
            self._wake()

    # -- cancelling and rescheduling ---------------------------------------------------------------

    def withdraw(self, start_ms: int, topic_id: int, entries: BitMap) -> None:
        """Entries were recorded as cancelled. REQUIRES: `gate` held for reading since before that."""
        log = self._loaded.get(start_ms, {}).get(topic_id)
        if log is not None:
            log.discard(entries)

    def admit(self, partition: Partition, topic_id: int, entries: BitMap) -> None:
        """Conditional entries were recorded as admitted.

        REQUIRES: `gate` held for reading since before they were appended, and the partition leased.
        """
        log = self._loaded.get(partition.start_ms, {}).get(topic_id)
        if log is not None:
            self._admit(partition, log, entries)
            if log.loaded and self._ready.arm(log, log.next_due_ms()):
                self._wake()

    # -- firing ------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """When the next message of a loaded partition is due, None when none is left.

        Puts the earliest bucket of the log concerned in order, ahead of its time.
        """
        while (first := self._ready.first()) is not None:
            armed_ms, log = first
            due_ms = log.exact_next_due_ms()
            if due_ms is not None and due_ms <= armed_ms:
                return armed_ms
            self._ready.postpone(log, armed_ms, due_ms)
            self._ready.arm(log, log.next_due_ms())
        return None

    def fire(self, now_ms: int, also: Callable[[Transaction], None] | None = None) -> int:
        """Fire one batch of at most `fire_batch` messages due by `now_ms`; returns how many, 0: none is due.

        One transaction holds their markers, the frontiers, the clock mark and what `also` writes.
        Raises StoreFull or StoreFailed with nothing fired.
        """
        with self.gate.alone():
            return self._fire(now_ms, also)

    def _fire(self, now_ms: int, also: Callable[[Transaction], None] | None) -> int:
        batch: list[tuple[LogFiring, Taken, ManagedLedger]] = []
        came_up: list[LogFiring] = []
        room = self._config.fire_batch
        try:
            while room > 0 and (log := self._ready.pop(now_ms)) is not None:
                came_up.append(log)
                main_log = self._main_log(log.topic_id)
                taken = log.take(now_ms, room) if main_log is not None else None
                self._report_unreadable(log)
                if taken is not None and main_log is not None:
                    batch.append((log, taken, main_log))
                    room -= len(taken.entries)
            if batch:
                self._commit(batch, now_ms, also)
        finally:
            for log in came_up:
                if self._main_log(log.topic_id) is not None:
                    self._ready.arm(log, log.next_due_ms())
        count = sum(len(taken.entries) for _, taken, _ in batch)
        self.fired += count
        return count

    def _report_unreadable(self, log: LogFiring) -> None:
        for entry_id in log.unreadable():
            name = f"partition at {log.start_ms}"
            self._set_aside(CorruptEntry(name, log.ledger_id, entry_id, "its due time cannot be read"))

    def _commit(
        self,
        batch: list[tuple[LogFiring, Taken, ManagedLedger]],
        now_ms: int,
        also: Callable[[Transaction], None] | None,
    ) -> None:
        def work(transaction: Transaction) -> list[FrontierRecord]:
            records = []
            for log, taken, main_log in batch:
                segments = main_log.append_markers(
                    transaction, log.ledger_id, log.start_ms, taken.entries, taken.dues, now_ms
                )
                last = segments[-1]
                record = taken.frontier._replace(
                    marker_ledger=last.ledger_id, marker_entry=last.first_entry + last.length - 1
                )
                transaction.put(fmt.frontier_key(log.topic_id, log.start_ms), record.pack())
                records.append(record)
            transaction.put(fmt.counter_key(catalog.CLOCK), fmt.pack_u64(max(now_ms, 0)))
            if also is not None:
                also(transaction)
            return records

        try:
            for start_ms in {log.start_ms for log, _, _ in batch}:
                partition = self._partitions.get(start_ms)
                if partition is not None:
                    partition.environment.sync()
            reach("fire.before")
            records = self._main.write(work)
        except BaseException:
            for log, taken, _ in reversed(batch):
                log.roll_back(taken)
            raise
        reach("fire.after")
        for (log, taken, _), record in zip(batch, records, strict=True):
            log.confirm(record)
            if self.observe is not None:
                self.observe(taken, now_ms)

    # -- closing -----------------------------------------------------------------------------------

    def close_finished(self, now_ms: int) -> list[int]:
        """Close each loaded partition whose end has passed with nothing left to fire; returns their starts."""
        closed = []
        for start_ms in sorted(self._loaded):
            partition = self._partitions.get(start_ms)
            if partition is not None and partition.end_ms <= now_ms:
                with self.gate.alone():
                    if self._close(partition, now_ms):
                        closed.append(start_ms)
        return closed

    def next_close_ms(self) -> int | None:
        """When the next loaded partition ends."""
        ends = [partition.end_ms for start in self._loaded if (partition := self._partitions.get(start)) is not None]
        return min(ends, default=None)

    def _close(self, partition: Partition, now_ms: int) -> bool:
        if self._left(partition) or not self._partitions.stop_appends(partition):
            return False
        if self._left(partition):  # appended before appends were stopped
            self._partitions.resume_appends(partition)
            return False
        logs = self._loaded[partition.start_ms]

        def work(transaction: Transaction) -> None:
            holders = 0
            for topic_id in list(logs):
                main_log = self._main_log(topic_id)
                key = fmt.frontier_key(topic_id, partition.start_ms)
                fields = transaction.get(key)
                if fields is None:
                    continue
                record = FrontierRecord.unpack(fields)
                held = main_log is not None and record.marker_ledger >= main_log.first_in(transaction)
                transaction.put(key, record._replace(released=int(not held)).pack())
                holders += held
            fields = transaction.get(fmt.partition_key(partition.start_ms))
            if fields is None:
                raise DamagedStore(partition.path, "is not in the catalog")
            closed = PartitionRecord.unpack(fields)._replace(state=PartitionState.CLOSED, holders=holders)
            transaction.put(fmt.partition_key(partition.start_ms), closed.pack())
            transaction.put(fmt.counter_key(catalog.CLOCK), fmt.pack_u64(max(now_ms, 0)))

        try:
            reach("close.before")
            self._main.write(work)
        except BaseException:
            self._partitions.resume_appends(partition)
            raise
        reach("close.after")
        self._unload(partition)
        return True

    def _left(self, partition: Partition) -> bool:
        logs = self._loaded[partition.start_ms]
        return any(len(log) or not log.loaded for topic, log in list(logs.items()) if self._main_log(topic) is not None)

    def _unload(self, partition: Partition) -> None:
        partition.listener = None
        for log in self._loaded.pop(partition.start_ms, {}).values():
            self._ready.discard(log)
        self._partitions.release(partition)

    # -- figures -----------------------------------------------------------------------------------

    def loaded_starts(self) -> list[int]:
        return sorted(self._loaded)

    def logs_of(self, topic_id: int) -> list[LogFiring]:
        """The loaded logs of a topic."""
        return [logs[topic_id] for logs in list(self._loaded.values()) if topic_id in logs]

    def memory_bytes(self, topic_id: int | None = None) -> int:
        """Estimated bytes of the delay indexes in memory, of one topic or of all."""
        return sum(
            log.memory_bytes()
            for logs in list(self._loaded.values())
            for topic, log in list(logs.items())
            if topic_id is None or topic == topic_id
        )

    def forget_topic(self, topic_id: int) -> None:
        """A topic was deleted: nothing of it is fired any more."""
        for logs in list(self._loaded.values()):
            log = logs.pop(topic_id, None)
            if log is not None:
                self._ready.discard(log)
