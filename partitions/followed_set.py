"""The partitions of a store that another process writes: they come, change state and go at any time.

The catalog is read again whenever the partitions are listed, one is missing, or one cannot be opened; the write-ahead
log is followed at each read. A partition that has gone keeps its environment open as long as there is a lease: its
files are unlinked, not emptied. One that has a newer generation, which compaction made, is never taken for gone: the
next lease is on that one.

Deliberately without appends, creation and removal: a read-only store does none of them.
"""

from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

from ..store.codec.format import PartitionState
from ..store.config import StoreConfig
from ..store.env.environment import Environment
from ..store.env.memtable import Follow, Look, Publication, Unapplied
from ..store.errors import DamagedStore, DayAway
from ..store.log import catalog
from ..store.wal.followed_wal import FollowedWal
from .away import directory_in_use
from .partition import Partition, partition_path
from .partition_set import PartitionSet


class _RowsInPlace(NamedTuple):
    """The unapplied rows of a partition, as long as it is in the directory that was opened.

    From then on they are applied to another (away.py), and the log forgets them.
    """

    follow: Follow
    generation: Path
    opened: Path

    def __call__(self) -> Look:
        look = self.follow()

        def in_place(applied: int) -> Unapplied:
            if directory_in_use(self.generation) != self.opened:
                raise DayAway(self.opened, "was given back, or fetched, as it was read")
            return look(applied)

        return in_place

    def is_registered(self) -> bool:
        return self.follow.is_registered()


class FollowedPartitionSet(PartitionSet):
    """The partitions of a store open read-only. Thread-safe."""

    def __init__(self, path: Path, main: Environment, config: StoreConfig, store_id: bytes, wal: FollowedWal) -> None:
        """`wal` has the unapplied rows of the store."""
        super().__init__(path, main, config, store_id, Publication(), read_only=True)
        self._wal = wal

    def load(self, registered: Set[int] = frozenset()) -> None:
        """Read the catalog. A missing directory is noticed when it is opened: it may just have been deleted."""
        with self._main.read() as raw:
            records = dict(catalog.partitions(raw))
        with self._lock:
            for partition in list(self._partitions.values()):
                record = records.get(partition.start_ms)
                if record is None:
                    self._retire(partition)
                elif record.generation != partition.generation or self._has_moved(partition):
                    self._replace(partition, record.generation)
            for start_ms, record in records.items():
                if start_ms in self._partitions:
                    self._partitions[start_ms].state = record.state
                    continue
                self._partitions[start_ms] = self._new(start_ms, record.end_ms, record.generation, record.state)

    def _follow(self, partition: Partition) -> Follow | None:
        """Follow an open partition only: one that has closed is applied, and a newer generation does not say so."""
        if partition.state is not PartitionState.OPEN:
            return None
        generation = partition_path(self._path, partition.start_ms, partition.generation)
        return _RowsInPlace(self._wal.of(partition.start_ms), generation, partition.path)

    def _has_moved(self, partition: Partition) -> bool:
        generation = partition_path(self._path, partition.start_ms, partition.generation)
        is_elsewhere = directory_in_use(generation) != partition.path
        return is_elsewhere or any(each.in_place.is_replaced for each in partition.environments()[-1:])

    def _retire(self, partition: Partition) -> None:
        del self._partitions[partition.start_ms]
        if not partition.leases and partition.is_open:
            self._open.close(partition)
        self._open.forget(partition)

    def __iter__(self) -> Iterator[Partition]:
        self.load()
        return super().__iter__()

    def __len__(self) -> int:
        self.load()
        return super().__len__()

    def get(self, start_ms: int) -> Partition | None:
        """The partition that begins at `start_ms`, None when none is registered."""
        partition = super().get(start_ms)
        if partition is None:
            self.load()
            partition = super().get(start_ms)
        return partition

    def registered(self, partition: Partition) -> bool:
        """True while the catalog has the partition, and its deletion has not begun."""
        self.load()
        return super().registered(partition)

    def acquire(self, partition: Partition, *, partial: bool = False) -> None:
        """Open the environment if need be, in the directory that it is in by now; count a lease."""
        if partition.is_open and self._has_moved(partition):
            self.load()
        while True:
            path = partition.path
            try:
                super().acquire(partition, partial=partial)
            except DamagedStore:
                if not self.registered(partition) or partition.path == path:
                    raise
            else:
                return

    def release(self, partition: Partition, *, keep: bool = True) -> None:
        with self._lock:
            partition.leases -= 1
            if self._partitions.get(partition.start_ms) is partition:
                self._let_go(partition)
                surplus = self._open.surplus(None if keep else partition)
            else:
                surplus = [] if partition.leases else [partition]
                partition.closing = partition.closing or bool(surplus)
        self._open.close_idle(surplus)
