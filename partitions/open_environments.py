"""The environments of partitions that are open: one is opened where a lease needs it, and closed when there are many.

Each is opened and closed under its partition's own lock (`Partition.opening`), so that this takes place side by side;
the lock of the partition set is taken inside that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from ..store.env.environment import Environment
from ..store.errors import DamagedStore
from .partition import Partition

Watcher = Callable[[Partition, Environment], None]
"""Told of an environment that was opened."""


class OpenEnvironments:
    """The partitions of one store that are open, the least recently used first."""

    def __init__(self, lock: threading.Lock, most: int, make: Callable[[Partition], Environment]) -> None:
        """`lock` guards leases; `most` may be open without one. `make` opens and verifies a partition's environment."""
        self._lock = lock
        self._most = most
        self._make = make
        self._open: OrderedDict[int, Partition] = OrderedDict()
        self._watcher: Watcher | None = None

    def __len__(self) -> int:
        return len(self._open)

    def use(self, partition: Partition) -> bool:
        """Note that a partition is used; False: it is not open. REQUIRES: the lock, a lease."""
        if not partition.is_ready:
            return False
        self._open.move_to_end(partition.start_ms)
        return True

    def open(self, partition: Partition) -> None:
        """Open the environment where it is not. REQUIRES: a lease."""
        with partition.opening:
            if partition.is_ready:
                return
            if partition.closing:
                self.close(partition)
            environment = self._make(partition)
            try:
                with self._lock:
                    if environment.path != partition.path:
                        raise DamagedStore(environment.path, "was replaced by a newer generation")
                    self._open[partition.start_ms] = partition
                    partition.attach(environment)
                    if self._watcher is not None:
                        self._watcher(partition, environment)
                    surplus = self.surplus()
            except BaseException:
                if environment not in partition.environments():
                    environment.close()
                raise
        self.close_idle(surplus)

    def watch(self, watcher: Watcher | None) -> list[Partition]:
        """As `PartitionSet.watch`; the open partitions. REQUIRES: the lock."""
        self._watcher = watcher
        return list(self._open.values())

    def surplus(self) -> list[Partition]:
        """Those that are to be closed by `close_idle`: the least recently used without a lease. REQUIRES: the lock."""
        surplus = len(self._open) - self._most
        if surplus <= 0:
            return []
        idle = list(islice((partition for partition in self._open.values() if not partition.leases), surplus))
        for partition in idle:
            partition.closing = True
            partition.forget_logs()
            del self._open[partition.start_ms]
        return idle

    def close_idle(self, partitions: Sequence[Partition]) -> None:
        """Close those that no lease has opened anew meanwhile."""
        for partition in partitions:
            with partition.opening:
                if partition.closing:
                    self.close(partition)

    def close(self, partition: Partition) -> None:
        """Close an environment. REQUIRES: no lease, or none that uses it."""
        partition.detach()
        self.forget(partition)

    def forget(self, partition: Partition) -> None:
        """Leave an environment to its leases."""
        if self._open.get(partition.start_ms) is partition:
            del self._open[partition.start_ms]
