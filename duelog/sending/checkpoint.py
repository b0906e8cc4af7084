"""Checkpoint: what a full segment of the write-ahead log has is applied to LMDB, environment by environment.

Partitions are applied side by side, each in one commit, the main environment last; when all of them are on disk the
record of the oldest segment moves on (catalog.WAL), and the file may be used again. Meanwhile the next segment is
written, and its rows are applied along.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.files.failpoints import reach
from duelog.store.job_threads import Jobs
from duelog.store.log import catalog


class Checkpoint:
    """Applies a segment, and all before it. Begun once; `finish` may be called again after an error."""

    def __init__(self, main: Environment, partitions: PartitionSet, segment: int, ready: Callable[[], None]) -> None:
        """`ready` is called, by any thread, when `finish` has nothing left to wait for."""
        self._main = main
        self._partitions = partitions
        self.segment = segment
        self._jobs = Jobs((partial(self._apply, partition) for partition in partitions.unapplied()), ready)

    @property
    def is_ready(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        return self._jobs.are_tried

    def begin(self, threads: int) -> None:
        """Have so many threads apply the partitions; what they leave `finish` applies."""
        self._jobs.start(threads)

    def finish(self) -> None:
        """Wait until everything is applied, in this thread what no other has. Raises StoreFull, StoreFailed.

        What could not be applied is tried again by the next call.
        """
        self._jobs.finish()
        for partition in self._partitions.held(lambda each: each.is_open):
            partition.environment.sync()  # another commit may have applied its rows, and is not known to be on disk
        reach("wal.applied")
        oldest = fmt.pack_u64(self.segment + 1)

        def record(transaction: Transaction) -> None:
            transaction.put(fmt.counter_key(catalog.WAL), oldest)

        self._main.write(record)
        self._main.sync()
        reach("wal.released")

    def cancel(self) -> None:
        """Leave what is not applied to the next opening, and wait for the threads."""
        self._jobs.cancel()

    def _apply(self, partition: Partition) -> None:
        with self._partitions.lease(partition):
            partition.environment.apply()
            partition.environment.sync()
        reach("wal.part")
