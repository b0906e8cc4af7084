"""Firing: when messages are due, their markers go into the main logs, with the frontiers, in one transaction.

All state that firing changes lies in the main environment, so a crash leaves markers, frontiers and the
clock mark together or none of them. The entries that markers point at are durable before: partition
environments are synced first where `durability` is not "commit".

Partitions that have begun are loaded, a bounded number at a time, in order; a loaded one hears of each
append in commit order. Only the owner's tick calls `load`, `fire`, `save` and `close_finished`, one at a time;
`load` and `save` do some ten ms of work a call, so that what is due is fired in between.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

from ..partitions.partition import Partition, PartitionLog
from ..partitions.partition_set import PartitionSet
from ..snapshot.writer import remove_snapshots
from ..store import catalog
from ..store import format as fmt
from ..store.config import StoreConfig
from ..store.environment import Environment
from ..store.errors import CorruptEntry
from ..store.failpoints import reach
from ..store.format import FrontierRecord, PartitionState
from ..store.managed_ledger import ManagedLedger
from ..store.reader_gate import ReaderGate
from ..store.run import Int64s, UInt32s
from ..store.transaction import Transaction
from .closing import record_closed
from .loading import Loading, new_log
from .log_firing import LogFiring, Taken
from .ready_queue import ReadyQueue
from .saving import Saving
from .settling import Settling
from .warming import Warming

LOADED_AT_ONCE = 4
"""The first so many partitions that are open and have begun have their indexes in memory; the next is loaded when
one has closed."""

_LOAD_SLICE_S = 0.02
"""How long `load` goes on before it lets others fire."""

_Batch = list[tuple[LogFiring, Taken, ManagedLedger]]


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
        self._loading: tuple[Partition, Iterator[bool]] | None = None
        self.saving = Saving(config)
        self.settling = Settling()
        self.warming = Warming()
        self.gate = ReaderGate()
        """Firing is alone in it; whoever cancels or reschedules is inside, so that nothing is on its way into
        the main log meanwhile and the recorded frontiers tell what has fired."""
        self.reached: Callable[[int], object] = lambda now_ms: None
        """Told, inside the gate, the time that has been recorded with a firing: the store's clock never goes back
        behind it, so that nobody who is let in next finds it earlier."""
        self.recorded_ms = 0
        """The clock mark on the disk, which may be a moment ahead; it never goes back. 0: nothing was recorded yet."""
        self.fired = 0
        """Messages fired since the store was opened."""
        self.observe: Callable[[int, Taken, int], None] | None = None
        """Called with topic id, each batch and the time, for metrics."""

    # -- loading ---------------------------------------------------------------------------------

    def load(self, now_ms: int) -> bool:
        """Load partitions that begin within `preload_ms`, in order, for a while; True while there is more to load.

        Less than a while where it would pay to fire first.
        """
        until = time.perf_counter() + _LOAD_SLICE_S
        while self._loading is not None or self._begin_loading(now_ms):
            fire_first = self._load_more()
            if fire_first is not None and (fire_first or time.perf_counter() >= until):
                return True
        return False

    def next_load_ms(self) -> int | None:
        """When the next partition is to be loaded, None when none waits."""
        partition = self._next_to_load()
        return None if partition is None else partition.start_ms - self._config.preload_ms

    def _next_to_load(self) -> Partition | None:
        if self._loading is not None:
            return self._loading[0]
        begun = [partition for partition in self._partitions if partition.state is PartitionState.OPEN]
        for partition in begun[:LOADED_AT_ONCE]:
            if partition.start_ms not in self._loaded:
                return partition
        return None

    def _begin_loading(self, now_ms: int) -> bool:
        partition = self._next_to_load()
        if partition is None or partition.start_ms - self._config.preload_ms > now_ms:
            return False
        self._partitions.acquire(partition)  # given back when the partition closes
        start_ms, dropped = partition.start_ms, partition.keep_pages()
        self.saving.begin(start_ms)
        loading = Loading(
            self._main,
            partition,
            self._config.bucket_ms,
            registered=functools.partial(self._loaded.__setitem__, start_ms),
            listener=functools.partial(self._heard, partition),
            exists=lambda topic_id: self._main_log(topic_id) is not None,
            set_aside=self._set_aside,
            fires=lambda log: self._ready.arm(log, log.next_due_ms()),
        )
        directory = partition.environment.path
        self._loading = partition, self.warming.begun(start_ms, directory, dropped, loading.steps(), loading.reads_all)
        return True

    def _load_more(self) -> bool | None:
        """One step: whether it would pay to fire before the next; None when the partition is loaded with it."""
        assert self._loading is not None
        partition, steps = self._loading
        try:
            return next(steps)
        except StopIteration:
            self._loading = None
            self.saving.loaded(partition.start_ms, logs := self._loaded_logs(partition.start_ms))
            self.settling.loaded(logs)
            return None
        except BaseException:
            self._loading = None
            self._unload(partition)
            raise

    def _loaded_logs(self, start_ms: int) -> list[LogFiring]:
        return [log for log in list(self._loaded.get(start_ms, {}).values()) if log.loaded]

    def _heard(self, partition: Partition, appended: PartitionLog, first_entry: int, dues: Int64s) -> None:
        logs = self._loaded.get(partition.start_ms)
        if logs is None:  # its loading failed this instant
            return
        log = logs.get(appended.topic_id)
        if log is None:
            frontier = FrontierRecord.start(appended.ledger_id)
            log = new_log(partition, appended.topic_id, frontier, self._config.bucket_ms, loaded=True)
            logs[appended.topic_id] = log
        log.hear(first_entry, dues)
        save = self.saving.heard(partition.start_ms, len(dues))
        settle = self.settling.heard(log)
        if (log.fires and self._ready.arm(log, log.next_due_ms())) or save or settle:
            self._wake()

    # -- cancelling and rescheduling ---------------------------------------------------------------

    def withdraw(self, start_ms: int, topic_id: int, entries: UInt32s, dues: Int64s) -> None:
        """Entries are recorded as cancelled. REQUIRES: called as its commit ends, `gate` held for reading."""
        log = self._loaded.get(start_ms, {}).get(topic_id)
        if log is not None:
            log.withdraw(entries, dues)

    def admit(self, start_ms: int, topic_id: int, entries: UInt32s, dues: Int64s) -> None:
        """Conditional entries are recorded as admitted.

        REQUIRES: called as its commit ends, `gate` held for reading since before they were appended.
        """
        log = self._loaded.get(start_ms, {}).get(topic_id)
        if log is not None:
            log.admit(entries, dues)
            if log.fires and self._ready.arm(log, log.next_due_ms()):
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

    def fire(self, now_ms: int, until_ms: int | None = None) -> int:
        """Fire one batch of at most `fire_batch` messages due by `now_ms`; returns how many, 0: nothing is to be fired.

        One transaction holds their markers, the frontiers and the clock mark. With `until_ms`, which is a moment later,
        those due by then are written as well, and nobody reads one before it is due (`ManagedLedger.readable`).
        Raises StoreFull or StoreFailed with nothing fired.
        """
        with self.gate.alone():
            fired = self._fire(now_ms, now_ms if until_ms is None else max(until_ms, now_ms))
            if fired:
                self.reached(now_ms)
            return fired

    def _fire(self, now_ms: int, until_ms: int) -> int:
        batch: _Batch = []
        came_up: list[LogFiring] = []
        room = self._config.fire_batch
        try:
            while room > 0 and (log := self._ready.pop(until_ms)) is not None:
                came_up.append(log)
                main_log = self._main_log(log.topic_id)
                taken = log.take(until_ms, room) if main_log is not None else None
                self._report_unreadable(log)
                if taken is not None and main_log is not None:
                    batch.append((log, taken, main_log))
                    room -= len(taken.entries)
            if batch:
                self._commit(batch, now_ms)
        finally:
            for log in came_up:
                if self._main_log(log.topic_id) is not None:
                    self._ready.arm(log, log.next_due_ms())
        return sum(len(taken.entries) for _, taken, _ in batch)

    def _report_unreadable(self, log: LogFiring) -> None:
        for entry_id in log.unreadable():
            name = f"partition at {log.start_ms}"
            self._set_aside(CorruptEntry(name, log.ledger_id, entry_id, "its due time cannot be read"))

    def _commit(self, batch: _Batch, now_ms: int) -> None:
        by_ms = max(now_ms, *(int(taken.dues.max()) for _, taken, _ in batch))
        mark_ms, ahead_of_ms = max(by_ms, self.recorded_ms), now_ms if by_ms > now_ms else None

        def work(transaction: Transaction) -> list[FrontierRecord]:
            records = []
            for log, taken, main_log in batch:
                segments = main_log.append_markers(
                    transaction, log.ledger_id, log.start_ms, taken.entries, taken.dues, by_ms, ahead_of_ms
                )
                last = segments[-1]
                record = taken.frontier._replace(
                    marker_ledger=last.ledger_id, marker_entry=last.first_entry + last.length - 1
                )
                transaction.put(fmt.frontier_key(log.topic_id, log.start_ms), record.pack())
                records.append(record)
            transaction.put(fmt.counter_key(catalog.CLOCK), fmt.pack_u64(max(mark_ms, 0)))
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
        self.recorded_ms = mark_ms
        for (log, taken, _), record in zip(batch, records, strict=True):
            log.confirm(record)
            self.fired += len(taken.entries)
            if self.observe is not None:
                self.observe(log.topic_id, taken, now_ms)

    # -- closing -----------------------------------------------------------------------------------

    def close_finished(self, now_ms: int) -> Iterator[int]:
        """Close each loaded partition whose end has passed with nothing left to fire; gives each start at once."""
        for start_ms in sorted(self._loaded):
            partition = self._partitions.get(start_ms)
            if partition is not None and partition.end_ms <= now_ms and self._may_close(partition):
                with self.gate.alone():
                    closed = self._close(partition, now_ms)
                    if closed:
                        self.reached(now_ms)
                if closed:
                    yield start_ms

    def next_close_ms(self) -> int | None:
        """When the next loaded partition ends."""
        loaded = [partition for start in self._loaded if (partition := self._partitions.get(start)) is not None]
        return min((partition.end_ms for partition in loaded if self._may_close(partition)), default=None)

    def _may_close(self, partition: Partition) -> bool:
        """Not while it is loaded, nor when it can no longer be written to: its snapshots go first."""
        loading = self._loading is not None and self._loading[0] is partition
        return not loading and partition.environment.failed is None

    def _close(self, partition: Partition, now_ms: int) -> bool:
        if self._left(partition) or not self._partitions.stop_appends(partition):
            return False
        if self._left(partition):  # appended before appends were stopped
            self._partitions.resume_appends(partition)
            return False
        topic_ids = list(self._loaded[partition.start_ms])

        def work(transaction: Transaction) -> None:
            record_closed(transaction, partition, topic_ids, self._main_log, max(now_ms, self.recorded_ms))

        try:
            remove_snapshots(partition.environment, self._config.snapshot_part_bytes)
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
        self.saving.forget(partition.start_ms)
        self.warming.closed(partition.start_ms)
        for log in self._loaded.pop(partition.start_ms, {}).values():
            self._ready.discard(log)
            self.settling.forget(log)
        self._partitions.release(partition)

    # -- saving ------------------------------------------------------------------------------------

    def save(self, now_ms: int) -> int:
        """Write one transaction of the snapshots that are due; returns how many it completed."""
        return self.saving.step(self._saveable(), now_ms) if self.saving.is_due() else 0

    def save_all(self, now_ms: int) -> int:
        """Save what the next start would take long to replay; returns how many snapshots. Before the store closes."""
        return self.saving.save_all(self._saveable(), now_ms)

    def give_back_pages(self) -> None:
        """Have the pages that due times were read from no longer count as memory of this process."""
        for start_ms in self._loaded:
            if (partition := self._partitions.get(start_ms)) is not None:
                partition.give_back_pages()

    def _saveable(self) -> dict[int, tuple[Partition, list[LogFiring]]]:
        loading = None if self._loading is None else self._loading[0]
        return {
            start_ms: (partition, self._loaded_logs(start_ms))
            for start_ms in sorted(self._loaded)
            if (partition := self._partitions.get(start_ms)) is not None and partition is not loading
        }

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
                self.settling.forget(log)
