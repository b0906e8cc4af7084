"""All time partitions of a store: created when first written to, opened when needed, closed when many.

A lease keeps a partition's environment open for reading or appending; without leases the least
recently used environment is closed once more than `max_open_partitions` are open. An append lease is
refused by a partition that is closing or closed, and a partition closes only without append leases.

Creation: a complete directory is built in staging/, renamed into place, registered in the main
environment, then used. A crash before the registration leaves a directory that nothing refers to, which
the next open removes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sortedcontainers import SortedDict

from ..store.codec import format as fmt
from ..store.codec.format import PartitionRecord, PartitionState
from ..store.config import StoreConfig
from ..store.env.environment import Environment
from ..store.env.transaction import Transaction
from ..store.errors import ClosedError, DamagedStore
from ..store.files.directory import discard_tree
from ..store.files.failpoints import reach
from ..store.files.system_errors import explained
from ..store.listener import StoreListener
from ..store.log import catalog
from .creation import build_partition
from .partition import Partition, partition_path

_LEDGER_BLOCK = 64
"""Ledger ids reserved at once for partition logs; what a crash leaves of a block is never given out."""

Watcher = Callable[[Partition, Environment], None]
"""Told of an environment that was opened."""


class PartitionSet:
    """The partitions of one open store. Thread-safe."""

    def __init__(
        self,
        path: Path,
        main: Environment,
        config: StoreConfig,
        store_id: bytes,
        *,
        read_only: bool = False,
        listeners: Sequence[StoreListener] = (),
    ) -> None:
        """`listeners` hear of partitions that come into being, and of the commits and failures of each."""
        self._path = path
        self._main = main
        self._config = config
        self._store_id = store_id
        self._read_only = read_only
        self._lock = threading.Lock()
        self._creating, self._numbering = threading.Lock(), threading.Lock()
        self._partitions: SortedDict[int, Partition] = SortedDict()
        self._open: OrderedDict[int, Partition] = OrderedDict()
        self._ledger_ids = iter(range(0))
        self._closed = False
        self._listeners = listeners
        self._watcher: Watcher | None = None

    def load(self) -> None:
        """Read the catalog. Raises DamagedStore naming a registered partition whose directory is missing.

        Partitions whose deletion is recorded are left out: opening finishes that.
        """
        with self._main.read() as raw:
            found = catalog.partitions(raw)
        for start_ms, record in found:
            if record.state is PartitionState.DELETING:
                continue
            path = partition_path(self._path, start_ms, record.generation)
            if not (path / "data.mdb").is_file():
                raise DamagedStore(path, "is registered in the catalog, and is missing")
            self._partitions[start_ms] = Partition(path, start_ms, record.end_ms, record.generation, record.state)

    def __iter__(self) -> Iterator[Partition]:
        with self._lock:
            return iter(list(self._partitions.values()))

    def __len__(self) -> int:
        return len(self._partitions)

    def get(self, start_ms: int) -> Partition | None:
        """The partition that begins at `start_ms`, None when none is registered."""
        return self._partitions.get(start_ms)

    def unregistered(self) -> list[Path]:
        """Directories of partitions that the catalog does not know: a crash left them."""
        with self._creating:
            known = {partition.path.parent.name for partition in self}
            return [directory for directory in self._directories() if directory.name not in known]

    def _directories(self) -> list[Path]:
        return sorted((self._path / "partitions").glob("*"))

    def open_count(self) -> int:
        """Environments open now."""
        return len(self._open)

    # -- leases ----------------------------------------------------------------------------------

    @contextmanager
    def lease(self, partition: Partition) -> Iterator[Partition]:
        """Keep the partition's environment open inside the block."""
        self.acquire(partition)
        try:
            yield partition
        finally:
            self.release(partition)

    def acquire(self, partition: Partition) -> None:
        """Open the environment if need be and count a lease; `release` gives it back."""
        with self._lock:
            if self._closed:
                raise ClosedError("store")
            if self._partitions.get(partition.start_ms) is not partition or partition.state is PartitionState.DELETING:
                raise DamagedStore(partition.path, "was deleted")
            if not partition.is_open or partition.outdated:
                self._open_environment(partition)
            partition.leases += 1
            self._open.move_to_end(partition.start_ms)

    def watch(self, watcher: Watcher | None) -> list[Partition]:
        """Have a backup told of each environment that is opened from now on, under the lock and before it is used.

        Returns the partitions that are open already, each with a lease that the caller gives back. None: none is told.
        """
        with self._lock:
            self._watcher = watcher
            for partition in self._open.values():
                partition.leases += 1
            return list(self._open.values())

    def held(self, wanted: Callable[[Partition], bool] | None = None) -> Iterator[Partition]:
        """Every partition, or every `wanted` one, by start, each under a lease while it is the current one.

        What is deleted meanwhile is left out. Raises DamagedStore for one that is registered and cannot be opened.
        """
        for partition in self:
            if wanted is not None and not wanted(partition):
                continue
            try:
                self.acquire(partition)
            except DamagedStore:
                if self.registered(partition):
                    raise
                continue
            try:
                yield partition
            finally:
                self.release(partition)

    def registered(self, partition: Partition) -> bool:
        """Whether the catalog still has the partition, and its deletion has not begun."""
        return self._partitions.get(partition.start_ms) is partition and partition.state is not PartitionState.DELETING

    def release(self, partition: Partition) -> None:
        with self._lock:
            partition.leases -= 1
            self._let_go(partition)
            self._close_surplus()

    @contextmanager
    def append_lease(self, start_ms: int, now_ms: int) -> Iterator[Partition | None]:
        """A partition to append to inside the block, created when missing; None when it takes no more messages."""
        partition = self.begin_append(start_ms, now_ms)
        try:
            yield partition
        finally:
            if partition is not None:
                self.end_append(partition)

    def begin_append(self, start_ms: int, now_ms: int) -> Partition | None:
        """`append_lease` without the block: what it gives is given back by `end_append`."""
        partition = self._partitions.get(start_ms) or self._create(start_ms, now_ms)
        with self._lock:
            if self._closed:
                raise ClosedError("store")
            accepted = partition.state is PartitionState.OPEN and self._partitions.get(start_ms) is partition
            if accepted:
                if not partition.is_open:
                    self._open_environment(partition)
                partition.leases += 1
                partition.appenders += 1
                self._open.move_to_end(start_ms)
        if not accepted:
            return None
        if not partition.keeps_pages and start_ms - self._config.preload_ms <= now_ms:
            partition.stop_evicting()
        return partition

    def end_append(self, partition: Partition) -> None:
        """Give a lease of `begin_append` back."""
        with self._lock:
            partition.leases -= 1
            partition.appenders -= 1
            if len(self._open) > self._config.max_open_partitions:
                self._close_surplus()

    def stop_appends(self, partition: Partition) -> bool:
        """Refuse append leases from now on; False, nothing changed, while there is one or entries are unapplied."""
        with self._lock:
            if partition.appenders or partition.has_unapplied:
                return False
            partition.state = PartitionState.CLOSED
            return True

    def resume_appends(self, partition: Partition) -> None:
        """Undo `stop_appends` of a partition whose closing was not recorded."""
        with self._lock:
            partition.state = PartitionState.OPEN

    def has_unapplied(self) -> bool:
        """Whether some partition has reserved entries that are unapplied."""
        with self._lock:
            return any(partition.has_unapplied for partition in self._open.values())

    def apply_all(self, run: Callable[[Sequence[Callable[[], None]]], object]) -> None:
        """Have all partitions commit unapplied entries; `run` runs one job or more. Raises StoreFull, StoreFailed."""
        with self._lock:
            unapplied = [partition for partition in self._open.values() if partition.has_unapplied]
            for partition in unapplied:
                partition.leases += 1
        if not unapplied:
            return
        try:
            run([partition.environment.apply_deferred for partition in unapplied])
        finally:
            for partition in unapplied:
                self.release(partition)

    def apply_one_partition(self) -> bool:
        """Have one partition commit its unapplied entries, failed ones last; False: none has. Raises as `apply_all`."""
        with self._lock:
            all_unapplied = [partition for partition in self._open.values() if partition.has_unapplied]
            if not all_unapplied:
                return False
            unapplied = min(all_unapplied, key=lambda partition: partition.environment.failed is not None)
            unapplied.leases += 1
        try:
            unapplied.environment.apply_deferred()
        finally:
            self.release(unapplied)
        return True

    def _open_environment(self, partition: Partition) -> None:
        partition.verify_pages()
        environment = Environment(
            partition.path,
            name=partition.name,
            durability=self._config.durability,
            map_bytes=self._config.map_bytes,
            read_only=self._read_only,
            evicts=partition.state is PartitionState.OPEN,
            listeners=self._listeners,
        )
        try:
            partition.verify_identity(self._store_id, environment)
            self._open[partition.start_ms] = partition
            partition.attach(environment)
        except BaseException:
            if environment not in partition.environments():
                environment.close()
            raise
        if self._watcher is not None:
            self._watcher(partition, environment)
        self._close_surplus(keep=partition)

    def _close_surplus(self, keep: Partition | None = None) -> None:
        surplus = len(self._open) - self._config.max_open_partitions
        if surplus <= 0:
            return
        idle = [p for p in self._open.values() if not p.leases and not p.has_unapplied and p is not keep]
        for partition in idle[:surplus]:
            self._close_environment(partition)

    def _close_environment(self, partition: Partition) -> None:
        partition.detach()
        self._open.pop(partition.start_ms, None)

    # -- generations -------------------------------------------------------------------------------

    def replace(self, partition: Partition, generation: int) -> None:
        """Have leases of a partition from now on get the generation that the catalog names now.

        A lease that exists goes on with its environment, which is closed after the last of them.
        """
        with self._lock:
            self._replace(partition, generation)

    def _replace(self, partition: Partition, generation: int) -> None:
        partition.path = partition_path(self._path, partition.start_ms, generation)
        partition.generation = generation
        partition.outdated = partition.is_open
        self._let_go(partition)

    def _let_go(self, partition: Partition) -> None:
        """Close what is of older generations, if there is no lease."""
        if partition.leases:
            return
        partition.unpark()
        if partition.outdated:
            self._close_environment(partition)

    # -- creation and removal ----------------------------------------------------------------------

    def _create(self, start_ms: int, now_ms: int) -> Partition:
        with self._creating:
            partition = self._partitions.get(start_ms)
            if partition is not None:
                return partition
            end_ms = start_ms + self._config.partition_ms
            path = partition_path(self._path, start_ms, 1)
            partition = Partition(path, start_ms, end_ms, 1, PartitionState.OPEN)
            registered: list[Partition] = []

            def register(transaction: Transaction) -> None:
                record = PartitionRecord(end_ms, 1, PartitionState.OPEN, 0, now_ms)
                transaction.put(fmt.partition_key(start_ms), record.pack())
                transaction.after_commit(lambda: registered.append(partition))

            try:
                with explained(self._path):
                    build_partition(self._path, path.parent, start_ms, end_ms, self._store_id, self._config.map_bytes)
                self._main.write(register)
                self._main.sync()  # else a power cut takes it, with all the commits that come after this one
                reach("partition.registered")
            finally:
                with self._lock:
                    self._partitions.update((start_ms, each) for each in registered)
                if not registered and self._main.failed is None:  # else it may be in the catalog
                    discard_tree(path.parent)
            for listener in self._listeners:
                listener.partition_created(start_ms)
            return partition

    def retire(self, partition: Partition) -> bool:
        """Close a partition whose deletion is recorded, for good; False while there is a lease.

        It stays in the set until `forget`, so that it is not made anew while its directory is removed.
        """
        with self._lock:
            if partition.leases:
                return False
            if partition.is_open:
                self._close_environment(partition)
            return True

    def forget(self, partition: Partition) -> None:
        """Take a partition that was removed from disk and catalog out of the set."""
        with self._lock:
            self._partitions.pop(partition.start_ms, None)

    def new_ledger(self) -> int:
        """A ledger id for a new partition log. Not inside a transaction of the main environment."""
        with self._numbering:
            for ledger_id in self._ledger_ids:
                return ledger_id
            first = self._main.write(
                lambda transaction: catalog.take_numbers(transaction, catalog.LEDGERS, _LEDGER_BLOCK)
            )
            self._main.sync()  # ids that a power cut takes back would be given out again
            self._ledger_ids = iter(range(first, first + _LEDGER_BLOCK))
            return next(self._ledger_ids)

    def close(self) -> None:
        """Close every environment; the caller has seen to it that none is used, but by a backup: it is awaited."""
        with self._lock:
            self._closed = True
            opened = list(self._open.values())
        for partition in opened:
            partition.detach()
