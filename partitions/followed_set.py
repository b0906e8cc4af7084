"""The partitions of a store that another process writes: they come, change state and go without being asked.

The catalog is read anew whenever somebody lists the partitions or misses one. A partition that has gone, or has a
newer generation, keeps its environment open as long as somebody holds a lease: its files are unlinked, not emptied.

Deliberately without appends, creation and removal: a read-only store does none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..store import catalog
from .partition import Partition, partition_path
from .partition_set import PartitionSet


class FollowedPartitionSet(PartitionSet):
    """The partitions of a store open read-only. Thread-safe."""

    def load(self) -> None:
        """Read the catalog. A directory that is missing is noticed by whoever opens it: it may just have been deleted."""
        with self._main.read() as raw:
            found = dict(catalog.partitions(raw))
        with self._lock:
            for partition in list(self._partitions.values()):
                record = found.get(partition.start_ms)
                if record is None or record.generation != partition.generation:
                    self._retire(partition)
            for start_ms, record in found.items():
                partition = self._partitions.get(start_ms)
                if partition is None:
                    path = partition_path(self._path, start_ms, record.generation)
                    partition = Partition(path, start_ms, record.end_ms, record.generation, record.state)
                    self._partitions[start_ms] = partition
                partition.state = record.state

    def _retire(self, partition: Partition) -> None:
        del self._partitions[partition.start_ms]
        if not partition.leases and partition.is_open:
            self._close_environment(partition)
        self._open.pop(partition.start_ms, None)

    def __iter__(self) -> Iterator[Partition]:
        self.load()
        return super().__iter__()

    def __len__(self) -> int:
        self.load()
        return super().__len__()

    def get(self, start_ms: int) -> Partition | None:
        """The partition that begins at `start_ms`, None when none is registered."""
        found = super().get(start_ms)
        if found is None:
            self.load()
            found = super().get(start_ms)
        return found

    def registered(self, partition: Partition) -> bool:
        """Whether the catalog still has the partition, and its deletion has not begun."""
        self.load()
        return super().registered(partition)

    def release(self, partition: Partition) -> None:
        with self._lock:
            partition.leases -= 1
            if self._partitions.get(partition.start_ms) is partition:
                self._close_surplus()
                return
            environment = None if partition.leases else partition.detach()
        if environment is not None:
            environment.close()
