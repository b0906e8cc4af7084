"""The WAL writer: single messages that several threads send side by side share one flush of the write-ahead log.

A message that is sent alone is a commit of its partition: two waits for the disk, for each day. So where several sends
are under way, the first leads: it has the partition of each message reserve an entry id, appends all messages to the
log as one group, and flushes once. The reserved entries are applied later, together: with the next commit of their
partition, before a reader begins, when the log is full, or `CHECKPOINT_MS` after. So ids keep the order of the sends,
and readers know nothing of the log.

Where no id can be reserved (a log that is not registered, or has a listener; no space) the message is appended to its
partition: the log makes sends quicker, and no send depends on it. By default a lone send bypasses it: it is written
once, seen by other processes at once, and needs no replay (`journal_from=1` makes it about twice as fast). A batch
has enough to share, and would write every byte twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from duelog.partitions.partition import Partition, Wanted
from duelog.partitions.partition_set import PartitionSet
from duelog.store.clock import Clock
from duelog.store.env.commit_queue import CommitQueue, Request
from duelog.store.env.environment import Environment
from duelog.store.errors import DuelogError, ResourceShortage, StoreFailed, StoreFull, StoreUnavailable
from duelog.store.files.failpoints import reach
from duelog.store.files.process import here
from duelog.store.listener import StoreListener
from duelog.store.log.ledger import RunLimits
from duelog.store.wal.wal_file import RECORD_BYTES, Fields, WalFile

from .worker_pool import WorkerPool

CHECKPOINT_MS = 1_000
"""After so long reserved entries are applied, where a thread looks after the store."""

_MOST_BYTES = 64 << 10
"""A larger body goes to its partition at once: written once, not twice."""


_Arrival = tuple[Partition, Wanted]
"""A message for a partition."""


class WalWriter:
    """Takes single messages for time partitions. Thread-safe."""

    def __init__(
        self,
        main: Environment,
        partitions: PartitionSet,
        limits: RunLimits,
        pool: WorkerPool,
        together: int,
        clock: Clock,
        open_wal: Callable[[], WalFile],
        wake: Callable[[], None],
        listeners: Sequence[StoreListener],
    ) -> None:
        """`together`: from so many sends under way at once on they share flushes.

        `open_wal` is called when it is first needed, `wake` when `due_ms` has come forward.
        """
        self._main = main
        self._partitions = partitions
        self._limits = limits
        self._pool = pool
        self.together = together
        self._clock = clock
        self._open_wal = open_wal
        self._wake = wake
        self._wal: WalFile | None = None
        self._unavailable = False
        """Whether there was no space for a WAL: there is none as long as the store is open."""
        self._closed = False
        self._under_way: list[None] = []
        """As long as sends are under way: appending and popping need no lock."""
        self._queue = CommitQueue(self._admit, self._commit_group, self._broke_off)
        self._unwritten: list[Fields] = []
        """Reserved, and not known to be in the WAL: the next leader writes them first."""
        self._reserving = False
        self._due_ms: int | None = None
        self._process = here.pid
        self._listeners = listeners

    def append(self, partition: Partition, topic_id: int, due_ms: int, body: bytes) -> tuple[int, int]:
        """Append a message; (ledger id, entry id) once it is durable. REQUIRES: an append lease.

        Raises StoreFull, StoreFailed, ClosedError.
        """
        self._under_way.append(None)
        try:
            if len(self._under_way) >= self.together and len(body) <= _MOST_BYTES:
                reserved: tuple[int, int] | None = self._queue.run((partition, (topic_id, due_ms, body)))
                if reserved is not None:
                    return reserved
            return partition.append(topic_id, (due_ms,), (body,), self._limits, self._partitions.new_ledger)
        finally:
            self._under_way.pop()

    # -- leading -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        if self._main.failed is not None:
            raise self._main.failed

    def _broke_off(self, error: BaseException, _: bool) -> None:
        """Where memory may not know what was reserved, nothing more is written."""
        if self._reserving or isinstance(error, Exception):
            self._main.fail(error)

    def _commit_group(self, batch: list[Request]) -> None:
        """Give every request its id, or None: it is to be appended."""
        try:
            self._write()  # what an interrupted leader reserved; there is capacity for it
            arrivals = [request for request in batch if request.value is None and request.work is not None]
            if self._closed or not arrivals or not self._fits(arrivals):
                return
            self._reserving = True
            by_partition: dict[Partition, list[Request]] = {}
            for request in arrivals:
                by_partition.setdefault(request.work[0], []).append(request)
            for partition, requests in by_partition.items():
                self._reserve(partition, requests)
            self._reserving = False
            self._write()
        except OSError as error:
            failed = self._main.fail(error)
            for request in batch:
                request.error = failed

    def _reserve(self, partition: Partition, requests: list[Request]) -> None:
        wanted: list[Wanted] = [request.work[1] for request in requests]
        try:
            places = partition.reserve(wanted, self._limits)
        except DuelogError as error:
            for request in requests:
                request.error = error
            return
        start_ms = partition.start_ms
        for request, place, (_, due_ms, body) in zip(requests, places, wanted, strict=True):
            if place is not None:
                self._unwritten.append((start_ms, place[0], due_ms, place[1], body))
                request.value = place

    def _write(self) -> None:
        """Write the reserved entries to the WAL, on disk. Raises OSError."""
        if not self._unwritten or self._wal is None:
            return
        started = time.perf_counter_ns()
        reach("wal.before")
        self._wal.append(self._unwritten)
        elapsed_ns, messages = time.perf_counter_ns() - started, len(self._unwritten)
        for listener in self._listeners:
            listener.committed("journal", elapsed_ns, messages, messages)
        self._unwritten = []
        reach("wal.after")
        if self._due_ms is None:
            self._due_ms = self._clock.now_ms() + CHECKPOINT_MS
            self._wake()

    def _fits(self, arrivals: list[Request]) -> bool:
        """Whether the WAL has capacity for them, begun anew if it has to be. Raises OSError."""
        if self._wal is None and not self._unavailable:
            try:
                self._wal = self._open_wal()
            except DuelogError as error:
                self._unavailable = not isinstance(error, ResourceShortage)
        if self._wal is None:
            return False
        size = sum(RECORD_BYTES + len(request.work[1][2]) for request in arrivals)
        if not self._wal.fits(size):
            try:
                self._checkpoint_all(self._wal)
            except (StoreFull, StoreFailed, StoreUnavailable):  # an append is told
                return False
        return self._wal.fits(size)

    def _checkpoint_all(self, wal: WalFile) -> None:
        """Have the partitions apply reserved entries, and begin the WAL anew. Raises as `apply_all`; OSError."""
        self._partitions.apply_all(self._pool.run)
        reach("wal.applied")
        wal.restart()

    # -- afterwards --------------------------------------------------------------------------------

    def due_ms(self) -> int | None:
        """When `checkpoint` has something to do; None: never, as it is. Soon, also where the clock was set back."""
        due_ms = self._due_ms
        return None if due_ms is None else min(due_ms, self._clock.now_ms() + CHECKPOINT_MS)

    def checkpoint(self, now_ms: int) -> bool:
        """Have one partition apply its reserved entries, if it is time; whether there may be more to do now.

        Raises StoreFull.

        What is unapplied of a partition that has failed stays in the WAL, until the store is opened again.
        """
        due_ms = self._due_ms
        if due_ms is None:
            return False
        if due_ms > now_ms:
            self._due_ms = min(due_ms, now_ms + CHECKPOINT_MS)  # the clock may have been set back
            return False
        with suppress(StoreFailed):  # failed ones come last
            if self._partitions.apply_one_partition():
                return True
        self._due_ms = None
        if self._partitions.has_unapplied():  # reserved since it was looked
            self._due_ms = now_ms + CHECKPOINT_MS
        return False

    def close(self) -> None:
        """Take nothing more together, and have the partitions apply reserved entries.

        Where they cannot (no space, a failed disk) it stays in the WAL, and they get it when the store is opened.
        """
        self._closed = True
        if here.pid != self._process:
            return  # the WAL, and the leader, is the parent's
        try:
            self._queue.run(None)  # the leader has ended then
            if self._wal is not None:
                self._checkpoint_all(self._wal)
        except (DuelogError, OSError):
            pass
        finally:
            if self._wal is not None:
                self._wal.close()
