"""The partitions of a store that are loaded: bringing them into memory, letting them go, saving them, their figures.

Partitions that have begun are loaded, a bounded number at a time, in order; a loaded one hears of each append in commit
order. One that cannot be loaded is suspended, and others are loaded meanwhile. Memory follows the disk: what an
interrupt or an error has left half done, in a log or in the queue of what is due, is forgotten and loaded again
(`recover`). Does not fire: firing.py.

To load one, the log of every topic is registered and from then on hears of what is committed; then each is restored
from a snapshot and the due column after it, up to where listening began; then what was heard meanwhile is added, and
the log fires.

The kernel is advised to read the partition's file, which it may not have in memory: what was written to a day to come
was dropped from the page cache (store/env/page_cache.py), and messages that are due are read one here, one there. Where
there is no snapshot that comes first, since the file is then read from beginning to end; else last.

All of it is done by the thread that fires, a slice at a time between batches: a partition of ten million entries takes
seconds, and the messages of others are not late for it. A thread of its own would not make it faster (most of it is
Python holding the interpreter's lock) and would need the indexes to be guarded against it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from pyroaring import BitMap

from ...partitions.cancellations import members
from ...partitions.due_column import DueBatch, dues_of, scan_dues
from ...partitions.index.delay_index import DelayIndex
from ...partitions.partition import Partition, PartitionLog
from ...partitions.partition_set import Storage
from ...snapshot.restore import covered_by_snapshots, restore_steps
from ...snapshot.snapshot_format import Unusable, snapshot_keys
from ...store.codec import format as fmt
from ...store.codec.format import PartitionState
from ...store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from ...store.codec.run import Int64s, UInt32s
from ...store.env import page_cache
from ...store.errors import BrokenInvariant, CorruptEntry, DamagedStore
from ...store.limited_log import LimitedLog
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.log.managed_ledger import ManagedLedger
from ...store.timer_queue import TimerQueue
from .pending_log import HAND_OVER_S, PendingLog
from .saving import Saving
from .suspensions import Part, Suspensions

_log = logging.getLogger("duelog.maintenance")

_MANY_ENTRIES = 1 << 17
"""Entries read back after which it is worth giving back the pages they were read from."""


def new_log(
    partition: Partition, topic_id: int, frontier: FrontierRecord, bucket_ms: int, *, loaded: bool
) -> PendingLog:
    """A log with an empty index."""

    def due_of(entries: UInt32s) -> Int64s:
        partition.dues_read += len(entries)
        return dues_of(partition.environment, frontier.ledger_id, entries)

    index = DelayIndex(due_of, start_ms=partition.start_ms, bucket_ms=bucket_ms)
    return PendingLog(topic_id, partition.start_ms, frontier, index, loaded=loaded)


@dataclass(eq=False, repr=False)
class Loading:
    """One partition on its way into memory. REQUIRES of the owner: a lease on it until it closes."""

    owner: LoadedPartitions
    partition: Partition
    _tails: dict[int, int] = field(default_factory=dict, init=False)
    _read: int = field(default=0, init=False)
    _log: LimitedLog = field(default_factory=lambda: LimitedLog(_log), init=False)

    def steps(self) -> Iterator[None]:
        """Load; each step is some ten ms of work at most.

        REQUIRES: nothing is on its way into the main log between steps. Raises DamagedStore, CorruptRecord; the owner
        then stops listening.
        """
        logs = self._listen()
        yield
        with self.partition.environment.read() as raw:
            has_snapshot = next(snapshot_keys(raw, fmt.Table.SNAPSHOT_META), None) is not None
        prefetching = page_cache.prefetch(self.partition.environment.path / "data.mdb")
        if not has_snapshot:
            yield from prefetching
        for topic_id, log in list(logs.items()):
            if topic_id in self._tails and self.owner.exists(topic_id):
                yield from self._read_back(log, self._tails[topic_id])
                self.owner.ready.arm(log, log.next_due_ms())
                yield
        if self._read >= _MANY_ENTRIES:
            self.partition.dues_read = _MANY_ENTRIES
        yield from prefetching  # nothing is left where it came first

    def _listen(self) -> dict[int, PendingLog]:
        """Between two groups of the write-ahead log: what is there now is scanned, what comes is heard."""
        logs: dict[int, PendingLog] = {}
        owner, partition, start_ms = self.owner, self.partition, self.partition.start_ms
        with partition.memtable.publishing:
            with partition.environment.read() as raw, owner.storage.main.read() as main:
                for key, fields in catalog.rows(raw, fmt.prefix(fmt.Table.LOG)):
                    topic_id, ledger_id = fmt.trailing_u32(key), fmt.unpack_u64(fields)
                    frontier = catalog.frontier(main, topic_id, start_ms) or FrontierRecord.start(ledger_id)
                    self._tails[topic_id] = find_tail(raw, partition.name, ledger_id)
                    logs[topic_id] = new_log(partition, topic_id, frontier, owner.bucket_ms, loaded=False)
            owner.logs[start_ms] = logs  # before the first append is heard
            partition.listener = functools.partial(owner.heard, partition)
        return logs

    def _read_back(self, log: PendingLog, tail: int) -> Iterator[None]:
        partition, bucket_ms = self.partition, self.owner.bucket_ms
        covered = covered_by_snapshots(partition.environment, log.ledger_id)
        for record, end in ("its frontier", log.frontier.absorbed_end), ("a snapshot of it", covered):
            if tail < end:
                reason = f"ledger {log.ledger_id} ends at entry {tail}, {record} at {end}: entries were lost"
                raise DamagedStore(partition.path, reason)
        restored = yield from restore_steps(
            partition.environment,
            log.frontier,
            tail,
            log.due_of,
            start_ms=partition.start_ms,
            bucket_ms=bucket_ms,
            refused=functools.partial(self._refused, log),
        )
        if restored is not None:
            log.restore_index(restored.pending, restored.tail)
            self._read += len(restored.pending)
        with self.owner.storage.main.read() as raw:
            cancelled = members(raw, fmt.Table.CANCELLED, log.ledger_id)
            admitted = members(raw, fmt.Table.ADMITTED, log.ledger_id)
        log.discard(cancelled)
        if restored is not None:
            self._admit(log, admitted - cancelled)
        damaged: list[int] = []  # first entries of runs that cannot be read, whose length is unknown
        for batch in scan_dues(partition.environment, log.ledger_id, log.tail, tail, admitted):
            if isinstance(batch, DueBatch):
                missing = range(log.tail, batch.first_entry)
                never = cancelled.range_cardinality(missing.start, missing.stop)  # ids passed over at a takeover
                if len(missing) > never and not any(entry_id in missing for entry_id in damaged):
                    reason = f"entries {log.tail} to {batch.first_entry - 1} are missing"
                    self.owner.quarantine(CorruptEntry(partition.name, log.ledger_id, log.tail, reason))
                log.restore(batch.first_entry, batch.dues)
                self._read += len(batch.dues)
            else:
                damaged.append(batch.entry_id)
                self.owner.quarantine(batch)
            yield
        log.skip_unreadable(tail)
        log.finish_loading()

    def _refused(self, log: PendingLog, snapshot_id: int, reason: Unusable) -> None:
        text = "%s: snapshot %d of ledger %d is refused, an older one or the messages are read: %s"
        self._log.log(logging.WARNING, text, self.partition.environment.path, snapshot_id, log.ledger_id, reason)

    def _admit(self, log: PendingLog, admitted: BitMap) -> None:
        """Have what a snapshot covers of conditional entries fire that were admitted after it, by a version before."""
        ids = np.array([each for each in admitted if each < log.tail], dtype=np.uint32)
        dues = dues_of(self.partition.environment, log.ledger_id, ids)
        for entry_id in ids[dues == UNREADABLE_DUE].tolist():
            name, reason = self.partition.name, "its due time cannot be read"
            self.owner.quarantine(CorruptEntry(name, log.ledger_id, entry_id, reason))
        log.restore_admitted(ids[dues != UNREADABLE_DUE], dues[dues != UNREADABLE_DUE])


class ReadyQueue:
    """Logs by the time for which they are armed. Thread-safe."""

    def __init__(self) -> None:
        self._armed: TimerQueue[PendingLog] = TimerQueue()
        self._lock = threading.Lock()

    def arm(self, log: PendingLog, due_ms: int | None) -> bool:
        """Have `log` come up at `due_ms`, or earlier if it is armed so; True when it is now the first of all."""
        if due_ms is None:
            return False
        with self._lock:
            return self._armed.push(log, due_ms) and self._armed.next() == (due_ms, log)

    def postpone(self, log: PendingLog, armed_ms: int, due_ms: int | None) -> None:
        """`log` was armed at `armed_ms`, too early: have it come up at `due_ms`, unless it was armed again.

        The caller arms it once more by what is left of it then, so that an entry that came in between,
        and found it armed early enough, is not forgotten.
        """
        with self._lock:
            if self._armed.due_ms(log) == armed_ms:
                if due_ms is None:
                    self._armed.discard(log)
                else:
                    self._armed.replace(log, due_ms)

    def pop(self, now_ms: int) -> PendingLog | None:
        """The log armed earliest, if that is by `now_ms`; it has to be armed again."""
        with self._lock:
            return self._armed.pop_due(now_ms)

    def first(self) -> tuple[int, PendingLog] | None:
        with self._lock:
            return self._armed.next()

    def discard(self, log: PendingLog) -> None:
        with self._lock:
            self._armed.discard(log)

    def arm_anew(self, logs: Sequence[PendingLog]) -> None:
        """Forget every time, also one that an interrupt has left half noted, and arm these logs, which are all."""
        with self._lock:
            self._armed.clear()
        for log in logs:
            self.arm(log, log.next_due_ms())


LOADED_AT_ONCE = 4
"""Partitions with indexes in memory: the first that are open and have begun. The next is loaded when one closes."""

_LOAD_SLICE_S = 0.02
"""How long `load` goes on before it lets others fire."""

_PACK_SLICE_S = 0.01


@dataclass(eq=False, repr=False)
class LoadedPartitions:
    """The begun partitions of a store, as far as they are in memory; at first none is.

    `main_log` gives a topic's main log by id, None when the topic was deleted; `_wake` is called, by any thread, when
    something has become the first to be due.
    """

    storage: Storage
    suspensions: Suspensions
    """The parts of firing and upkeep that failed and are tried again later."""
    main_log: Callable[[int], ManagedLedger | None]
    quarantine: Callable[[CorruptEntry], object]
    _wake: Callable[[], None]

    def __post_init__(self) -> None:
        self.ready = ReadyQueue()
        self.bucket_ms = self.storage.config.bucket_ms
        self.logs: dict[int, dict[int, PendingLog]] = {}
        self._loading: tuple[Partition, Iterator[None]] | None = None
        self._leased: set[int] = set()
        self.unsure = False
        """True during a step of loading or firing, or a look for the next log, and once one was broken off."""
        self.saving = Saving(self.storage, self.suspensions)
        self._to_pack: dict[PendingLog, None] = {}
        """Logs with so much in them that it is worth it to `pack`; added to by appends, by single operations."""

    # -- loading ---------------------------------------------------------------------------------

    def load(self, now_ms: int) -> bool:
        """Load partitions that begin within `preload_ms`, in order, for a while; True while there is more to load."""
        until = time.perf_counter() + _LOAD_SLICE_S
        self.recover()
        for start_ms in self.logs.keys() & self.storage.partitions.away:  # the clock went on as it was given back
            self._forget(start_ms)
        while (partition := self._next_to_load(now_ms)) is not None and (
            self._loading is not None or partition.start_ms - self.storage.config.preload_ms <= now_ms
        ):
            part = Part("load", start_ms=partition.start_ms)
            try:
                done = self._load_step(partition)
            except Exception as error:
                self.suspensions.failed(part, error, now_ms)
                continue
            if done:
                self.suspensions.succeeded(part, now_ms)
            elif time.perf_counter() >= until:
                return True
        return False

    def next_load_ms(self, now_ms: int) -> int | None:
        """When the next partition is to be loaded, None when none waits but for those that are suspended."""
        partition = self._next_to_load(now_ms)
        return None if partition is None else partition.start_ms - self.storage.config.preload_ms

    def _next_to_load(self, now_ms: int) -> Partition | None:
        if self._loading is not None:
            return self._loading[0]
        may_load = (
            partition
            for partition in self.storage.partitions
            if partition.state is PartitionState.OPEN
            and partition.away is None
            and not self.suspensions.is_suspended(Part("load", start_ms=partition.start_ms), now_ms)
        )
        return next((each for each in islice(may_load, LOADED_AT_ONCE) if each.start_ms not in self.logs), None)

    def _load_step(self, partition: Partition) -> bool:
        if self._loading is None:
            try:
                self._begin_loading(partition)
            except BaseException:
                self.unload(partition)
                raise
        return self._load_more()

    def _begin_loading(self, partition: Partition) -> None:
        if partition.start_ms not in self._leased:
            self.storage.partitions.acquire(partition)  # given back when the partition closes
            self._leased.add(partition.start_ms)
        partition.stop_evicting()
        self.saving.begin(partition.start_ms)
        self._loading = partition, Loading(self, partition).steps()

    def _load_more(self) -> bool:
        """Take one step, and return whether the partition is loaded now."""
        if self._loading is None:
            raise BrokenInvariant("no partition is being loaded")
        partition, steps = self._loading
        self.unsure = True
        try:
            done = next(steps, True) is True
            if done:
                self.saving.loaded(partition.start_ms, logs := self._loaded_logs(partition.start_ms))
                self._to_pack.update((log, None) for log in logs if log.is_worth_packing)
                self._loading = None
        except BaseException:
            self.recover()
            raise
        self.unsure = False
        return done

    def _forget(self, start_ms: int) -> None:
        if self._loading is not None and self._loading[0].start_ms == start_ms:
            self._loading = None
        partition = self.storage.partitions.get(start_ms)
        if partition is not None:
            self.unload(partition)

    def recover(self) -> None:
        """Have memory follow the disk after an interrupt: what is loading, or torn, is forgotten, and loaded again.

        REQUIRES: nothing is being fired.
        """
        if not self.unsure:
            return
        if self._loading is not None:
            self.unload(self._loading[0])
            self._loading = None
        for start_ms, logs in list(self.logs.items()):
            partition = self.storage.partitions.get(start_ms)
            if partition is not None and not all(log.whole for log in list(logs.values())):
                self.unload(partition)
        logs_left = [log for logs in list(self.logs.values()) for log in list(logs.values())]
        self.ready.arm_anew([log for log in logs_left if self.exists(log.topic_id)])
        self.unsure = False

    def is_loading(self, partition: Partition) -> bool:
        return self._loading is not None and self._loading[0] is partition

    def _loaded_logs(self, start_ms: int) -> list[PendingLog]:
        return [log for log in list(self.logs.get(start_ms, {}).values()) if log.loaded]

    def exists(self, topic_id: int) -> bool:
        """Return whether a topic has not been deleted."""
        return self.main_log(topic_id) is not None

    def heard(self, partition: Partition, appended: PartitionLog, first_entry: int, dues: Int64s) -> None:
        logs = self.logs.get(partition.start_ms)
        if logs is None:  # its loading failed this instant
            return
        log = logs.get(appended.topic_id)
        if log is None:
            frontier = FrontierRecord.start(appended.ledger_id)
            log = new_log(partition, appended.topic_id, frontier, self.bucket_ms, loaded=True)
            logs[appended.topic_id] = log
        log.hear(first_entry, dues)
        save = self.saving.heard(partition.start_ms, len(dues))
        pack = log.is_worth_packing and log not in self._to_pack
        if pack:
            self._to_pack[log] = None
        if self.ready.arm(log, log.next_due_ms()) or save or pack:
            self._wake()

    def unload(self, partition: Partition) -> None:
        """Forget a partition. A call after an interrupted one completes it."""
        partition.listener = None
        self.saving.forget(partition.start_ms)
        for log in self.logs.get(partition.start_ms, {}).values():
            self._drop(log)
        self.logs.pop(partition.start_ms, None)
        if partition.start_ms in self._leased:
            self._leased.discard(partition.start_ms)
            self.storage.partitions.release(partition)

    # -- saving ------------------------------------------------------------------------------------

    def save(self, now_ms: int) -> int:
        """Write one transaction of the snapshots that are due; returns how many it completed."""
        return self.saving.step(self._saveable(), now_ms) if self.saving.is_due() or self.suspensions else 0

    def save_all(self, now_ms: int) -> int:
        """Save the logs that the next start would take long to replay; returns the number of snapshots."""
        return self.saving.save_all(self._saveable(), now_ms)

    def give_back_pages(self) -> None:
        """Have the pages that due times were read from no longer count as memory of this process."""
        for start_ms in self.logs:
            if (partition := self.storage.partitions.get(start_ms)) is not None:
                partition.give_back_pages()

    def _saveable(self) -> dict[int, tuple[Partition, list[PendingLog]]]:
        return {
            start_ms: (partition, self._loaded_logs(start_ms))
            for start_ms in sorted(self.logs)
            if (partition := self.storage.partitions.get(start_ms)) is not None and not self.is_loading(partition)
        }

    # -- packing -----------------------------------------------------------------------------------

    def is_worth_packing(self) -> bool:
        return bool(self._to_pack)

    def pack(self) -> None:
        """Pack delay indexes that appends have filled, for some ten ms at most; appends get the lock in between."""
        until = time.perf_counter() + _PACK_SLICE_S
        for log in list(self._to_pack):
            more = True
            while more:
                more = log.pack()
                if not more:
                    self._to_pack.pop(log, None)
                if time.perf_counter() >= until:
                    return
                time.sleep(HAND_OVER_S)

    # -- figures -----------------------------------------------------------------------------------

    def loaded_starts(self) -> list[int]:
        return sorted(self.logs)

    def memory_bytes(self, topic_id: int | None = None) -> int:
        """Estimated bytes of the delay indexes in memory, of one topic or of all."""
        return sum(
            log.memory_bytes()
            for logs in list(self.logs.values())
            for topic, log in list(logs.items())
            if topic_id is None or topic == topic_id
        )

    def memory_by_topic(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for logs in list(self.logs.values()):
            for topic, log in list(logs.items()):
                found[topic] = found.get(topic, 0) + log.memory_bytes()
        return found

    def forget_topic(self, topic_id: int) -> None:
        """A topic was deleted: nothing of it is fired any more."""
        self.suspensions.forget(topic_id=topic_id)
        for logs in list(self.logs.values()):
            log = logs.pop(topic_id, None)
            if log is not None:
                self._drop(log)

    def _drop(self, log: PendingLog) -> None:
        log.close()
        self.ready.discard(log)
        self._to_pack.pop(log, None)
