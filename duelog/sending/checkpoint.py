"""Checkpoint: what a full segment of the write-ahead log has is applied to LMDB, environment by environment.

Partitions are applied side by side, each in one commit, the main environment last; when all of them are on disk the
record of the oldest segment moves on (catalog.WAL), and the file may be used again. Meanwhile the next segment is
written, and its rows are applied along.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import DuelogError
from duelog.store.files.failpoints import reach
from duelog.store.log import catalog


class Checkpoint:
    """Applies a segment, and all before it. Begun once; `finish` may be called again after an error."""

    def __init__(self, main: Environment, partitions: PartitionSet, segment: int, ready: Callable[[], None]) -> None:
        """`ready` is called, by any thread, when `finish` has nothing left to wait for."""
        self._main = main
        self._partitions = partitions
        self.segment = segment
        self._ready = ready
        self._left = dict.fromkeys(partitions.unapplied())
        """The partitions that are not applied yet."""
        self._waiting = deque(self._left)
        """Those that no thread of the pool has taken."""
        self._under_way: list[Future[None]] = []
        self._running = 0
        """Threads that have not come to their end."""
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        return not self._running

    def begin(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Have so many threads of `pool` apply the partitions; what they leave `finish` applies."""
        self._running = threads
        for _ in range(threads):
            try:
                self._under_way.append(pool.submit(self._apply_beside))
            except RuntimeError:  # none can be started
                break
        self._ended(threads - len(self._under_way))

    def _ended(self, count: int) -> None:
        """So many threads have come to their end, or were not begun."""
        with self._lock:
            self._running -= count
            running = self._running
        if not running:
            self._ready()

    def _apply_beside(self) -> None:
        try:
            while self._waiting:
                with suppress(Exception):  # `finish` tries it again, and raises
                    self._apply(self._waiting.popleft())
        finally:
            self._ended(1)

    def finish(self) -> None:
        """Wait until everything is applied, in this thread what no other has. Raises StoreFull, StoreFailed.

        What could not be applied is tried again by the next call.
        """
        for future in self._under_way:
            future.exception()
        self._under_way = []
        self._apply_rest()
        reach("wal.applied")
        oldest = fmt.pack_u64(self.segment + 1)

        def record(transaction: Transaction) -> None:
            transaction.put(fmt.counter_key(catalog.WAL), oldest)

        self._main.write(record)
        self._main.sync()
        reach("wal.released")

    def _apply_rest(self) -> None:
        """Have everything be in LMDB and on disk, as far as that can be; then raise the first error that there was."""
        failed: DuelogError | None = None
        for partition in list(self._left):
            try:
                self._apply(partition)
            except DuelogError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        for partition in self._partitions.held(lambda each: each.is_open):
            partition.environment.sync()  # another commit may have applied its rows, and is not known to be on disk

    def _apply(self, partition: Partition) -> None:
        with self._partitions.lease(partition):
            partition.environment.apply()
            partition.environment.sync()
        del self._left[partition]
        reach("wal.part")
