"""Bringing the delay indexes of a partition into memory, in slices, while others fire and producers append.

First the log of every topic is registered and from then on hears of what is committed; then each is restored from a
snapshot and the due column after it, up to where listening began; then what was heard meanwhile is added, and the log
fires.

The kernel is advised to read the partition's file, which it may not have in memory: what was written to a day to come
was dropped from the page cache (store/env/page_cache.py), and messages that are due are read one here, one there. Where
there is no snapshot that comes first, since the file is then read from beginning to end; else last.

All of it is done by the thread that fires, a slice at a time between batches: a partition of ten million entries takes
seconds, and the messages of others are not late for it. A thread of its own would not make it faster (most of it is
Python holding the interpreter's lock) and would need the indexes to be guarded against it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from pyroaring import BitMap

from ...partitions.cancellations import members
from ...partitions.due_column import DueBatch, dues_of, scan_dues
from ...partitions.index.delay_index import DelayIndex
from ...partitions.partition import Listener, Partition
from ...snapshot.restore import Restored, RestoreStep, SnapshotSkipped, covered_by_snapshots, restore_steps
from ...snapshot.snapshot_format import snapshot_keys
from ...store.codec import format as fmt
from ...store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from ...store.codec.run import Int64s, UInt32s
from ...store.env import page_cache
from ...store.env.environment import Environment
from ...store.errors import CorruptEntry, DamagedStore
from ...store.limited_log import LimitedLog
from ...store.log import catalog
from ...store.log.ledger import find_tail
from .pending_log import PendingLog

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


class LoadStep(Enum):
    """The result of a step of loading, besides restoring from a snapshot."""

    LISTENING = "the logs hear what is appended"
    PREFETCHED = "some of the partition's file was asked for"
    DUES_READ = "due times of some thousand runs were read"
    LOADED = "a log fires"


@dataclass(eq=False, repr=False)
class Loading:
    """One partition on its way into memory. REQUIRES of the owner: a lease on it until it closes.

    `registered` is given the logs before `listener` hears of the first append, both in the leader of a commit.
    `exists`: whether a topic has not been deleted; `fires`: a log may fire.
    """

    main: Environment
    partition: Partition
    bucket_ms: int
    registered: Callable[[dict[int, PendingLog]], None]
    listener: Listener
    exists: Callable[[int], bool]
    quarantine: Callable[[CorruptEntry], object]
    fires: Callable[[PendingLog], object]
    _tails: dict[int, int] = field(default_factory=dict, init=False)
    _read: int = field(default=0, init=False)
    _log: LimitedLog = field(default_factory=lambda: LimitedLog(_log), init=False)

    def steps(self) -> Iterator[LoadStep | RestoreStep]:
        """Load; each step is some ten ms of work at most.

        REQUIRES: nothing is on its way into the main log between steps. Raises DamagedStore, CorruptRecord; the owner
        then stops listening.
        """
        logs = self._listen()
        yield LoadStep.LISTENING
        with self.partition.environment.read() as raw:
            has_snapshot = next(snapshot_keys(raw, fmt.Table.SNAPSHOT_META), None) is not None
        if not has_snapshot:
            yield from self._prefetch()
        for topic_id, log in list(logs.items()):
            if topic_id in self._tails and self.exists(topic_id):
                yield from self._read_back(log, self._tails[topic_id])
                self.fires(log)
                yield LoadStep.LOADED
        if self._read >= _MANY_ENTRIES:
            self.partition.dues_read = _MANY_ENTRIES
        if has_snapshot:
            yield from self._prefetch()

    def _prefetch(self) -> Iterator[LoadStep]:
        for _ in page_cache.prefetch(self.partition.environment.path / "data.mdb"):
            yield LoadStep.PREFETCHED

    def _listen(self) -> dict[int, PendingLog]:
        logs: dict[int, PendingLog] = {}
        failure: list[BaseException] = []

        def listen() -> None:
            # In the leader, between two commits, and two groups of the write-ahead log: what is there now is scanned,
            # what comes is heard.
            partition, start_ms = self.partition, self.partition.start_ms
            try:
                with partition.memtable.publishing:
                    with partition.environment.read() as raw, self.main.read() as main:
                        for key, fields in catalog.rows(raw, fmt.prefix(fmt.Table.LOG)):
                            topic_id, ledger_id = fmt.trailing_u32(key), fmt.unpack_u64(fields)
                            frontier = catalog.frontier(main, topic_id, start_ms) or FrontierRecord.start(ledger_id)
                            self._tails[topic_id] = find_tail(raw, partition.name, ledger_id)
                            logs[topic_id] = new_log(partition, topic_id, frontier, self.bucket_ms, loaded=False)
                    self.registered(logs)
                    partition.listener = self.listener
            except BaseException as error:  # the commit it comes after stands: not the committers' business
                failure.append(error)

        self.partition.environment.write(lambda transaction: transaction.after_commit(listen))
        if failure:
            raise failure[0]
        return logs

    def _read_back(self, log: PendingLog, tail: int) -> Iterator[LoadStep | RestoreStep]:
        """Have a log fire."""
        partition = self.partition
        if tail < log.frontier.absorbed_end:
            raise DamagedStore(
                partition.path,
                f"ledger {log.ledger_id} ends at entry {tail}, its frontier at {log.frontier.absorbed_end}: "
                "entries were lost",
            )
        covered = covered_by_snapshots(partition.environment, log.ledger_id)
        if tail < covered:
            reason = f"ledger {log.ledger_id} ends at entry {tail}, a snapshot of it at {covered}: entries were lost"
            raise DamagedStore(partition.path, reason)
        restored = yield from self._restore(log, tail)
        if restored is not None:
            log.restore_index(restored.pending, restored.tail)
            self._read += len(restored.pending)
        with self.main.read() as raw:
            cancelled = members(raw, fmt.Table.CANCELLED, log.ledger_id)
            admitted = members(raw, fmt.Table.ADMITTED, log.ledger_id)
        log.discard(cancelled)
        self._admit(log, admitted - cancelled)
        damaged: list[int] = []  # first entries of runs that cannot be read, whose length is unknown
        for batch in scan_dues(partition.environment, log.ledger_id, log.tail, tail, admitted):
            if isinstance(batch, DueBatch):
                missing = range(log.tail, batch.first_entry)
                if missing and not any(entry_id in missing for entry_id in damaged):
                    reason = f"entries {log.tail} to {batch.first_entry - 1} are missing"
                    self.quarantine(CorruptEntry(partition.name, log.ledger_id, log.tail, reason))
                log.restore(batch.first_entry, batch.dues)
                self._read += len(batch.dues)
            else:
                damaged.append(batch.entry_id)
                self.quarantine(batch)
            yield LoadStep.DUES_READ
        log.skip_unreadable(tail)
        log.finish_loading()

    def _restore(self, log: PendingLog, tail: int) -> Generator[RestoreStep, None, Restored | None]:
        """Take the steps of `restore_steps`, and log a snapshot that is refused."""
        path, start_ms = self.partition.environment.path, self.partition.start_ms
        steps = restore_steps(
            self.partition.environment, log.frontier, tail, log.due_of, start_ms=start_ms, bucket_ms=self.bucket_ms
        )
        while True:
            try:
                step = next(steps)
            except StopIteration as done:
                restored: Restored | None = done.value
                return restored
            if isinstance(step, SnapshotSkipped):
                text = "%s: snapshot %d of ledger %d is refused, an older one or the messages are read: %s"
                self._log.log(logging.WARNING, text, path, step.snapshot_id, log.ledger_id, step.reason)
            yield step

    def _admit(self, log: PendingLog, admitted: BitMap) -> None:
        """Have conditional entries fire when they are due."""
        if not admitted:
            return
        ids = np.array(admitted, dtype=np.uint32)
        dues = dues_of(self.partition.environment, log.ledger_id, ids)
        for entry_id in ids[dues == UNREADABLE_DUE].tolist():
            self.quarantine(CorruptEntry(self.partition.name, log.ledger_id, entry_id, "its due time cannot be read"))
        log.admit(ids[dues != UNREADABLE_DUE], dues[dues != UNREADABLE_DUE])
