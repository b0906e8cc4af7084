"""Creation of time partitions: each is complete and durable before it has its name, and registered before it is used.

A directory is built in staging/, which every open clears, renamed into place, and registered in the catalog, several by
one commit; a crash before that leaves a directory that nothing refers to, which the next open removes. And the ids of
ledgers for their logs, which no two logs of a store share.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..store.codec import format as fmt
from ..store.codec.format import PartitionInfo, PartitionRecord, PartitionState
from ..store.env.environment import Environment
from ..store.env.transaction import Transaction
from ..store.files.directory import discard_tree, make_directory, move, remove_tree
from ..store.files.failpoints import reach
from ..store.files.system_errors import explained
from ..store.log import catalog
from ..store.parallel_jobs import Jobs
from .partition import Partition

_BUILDERS = 8
"""Threads that make the directories of several partitions."""

_LEDGER_BLOCK, _MOST_LEDGERS = 64, 4_096
"""Ledger ids reserved at once for partition logs, twice as many each time; what a crash leaves is never given out."""


class LedgerNumbers:
    """Ids of ledgers for the logs of partitions, reserved in blocks. Thread-safe."""

    def __init__(self, main: Environment) -> None:
        self._main = main
        self._lock = threading.Lock()
        self._left = iter(range(0))
        self._block = _LEDGER_BLOCK

    def next(self) -> int:
        """Return an id that no ledger of the store has. Not inside a transaction of the main environment."""
        with self._lock:
            for ledger_id in self._left:
                return ledger_id
            count = self._block
            first = self._main.write(lambda transaction: catalog.take_numbers(transaction, catalog.LEDGERS, count))
            self._main.sync()  # ids that a power cut takes back would be given out again
            self._left = iter(range(first, first + count))
            self._block = min(2 * count, _MOST_LEDGERS)
            return next(self._left)


def create_partitions(
    store: Path,
    main: Environment,
    made: Sequence[Partition],
    now_ms: int,
    store_id: bytes,
    map_bytes: int,
    publish: Callable[[Sequence[Partition]], None],
) -> None:
    """Make the directories of new partitions side by side, and register them by one commit of the main environment.

    `publish` has those be known that are registered, once that is on disk. No directory is removed that the catalog
    names, and none while a thread may be making it. Raises as `build_partition`, StoreFailed; then nothing is left, or
    what the next opening removes.
    """

    def build(partition: Partition) -> None:
        target = partition.path.parent
        build_partition(store, target, partition.start_ms, partition.end_ms, store_id, map_bytes)

    def register(transaction: Transaction) -> None:
        for partition in made:
            record = PartitionRecord(partition.end_ms, 1, PartitionState.OPEN, 0, now_ms)
            transaction.put(fmt.partition_key(partition.start_ms), record.pack())
            partition.knows_logs = True

    directories = Jobs([partial(build, partition) for partition in made])
    try:
        with explained(store):
            if len(made) > 1:
                directories.start(_BUILDERS)
            directories.finish()
        main.write(register)
    finally:
        directories.cancel()
        with main.read() as raw:
            registered = [each for each in made if raw.get(fmt.partition_key(each.start_ms)) is not None]
        try:
            if registered:
                main.sync()  # else a power cut takes it, and groups that were sent to them are not whole
        finally:
            publish(registered)
        if not registered and main.failed is None:  # else they may be in the catalog
            for partition in made:
                discard_tree(partition.path.parent)
    reach("partition.registered")


def build_partition(store: Path, target: Path, start_ms: int, end_ms: int, store_id: bytes, map_bytes: int) -> None:
    """Build a partition directory with an empty first generation, under `target` in the directory of the store.

    REQUIRES: the catalog does not name it. What is there already was left by a creation whose registration failed:
    nothing in it was acknowledged. Raises StoreFull, StoreUnavailable, OSError; then nothing is left, or what the next
    opening removes.
    """
    staged = store / "staging" / f"{target.name}-{uuid.uuid4().hex[:8]}"
    staged.mkdir()  # what is in it is made durable, its place in staging/ need not be
    try:
        _build_generation(staged / "g000001", start_ms, end_ms, store_id, map_bytes)
        reach("directory.staged")
        make_directory(target.parent)
        if target.exists():
            remove_tree(target)
        move(staged, target)
    except BaseException:
        discard_tree(staged)  # where the disk is full, it is not to take what is left
        raise
    reach("directory.renamed")


def _build_generation(path: Path, start_ms: int, end_ms: int, store_id: bytes, map_bytes: int) -> None:
    # Closing it syncs it once, after the commit.
    environment = Environment(path, name="staging", durability="none", map_bytes=map_bytes, create=True)
    info = PartitionInfo(fmt.FORMAT_VERSION, store_id, start_ms, end_ms, 1)

    def describe(transaction: Transaction) -> None:
        transaction.put(fmt.PARTITION_INFO_KEY, info.pack())

    try:
        environment.write(describe)
    finally:
        environment.close()
