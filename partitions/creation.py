"""Making the directory of a new time partition: complete and durable before it has its name.

It is built in staging/, which every open clears, and renamed into place. Registering it in the catalog is left to the
partition set; a crash before that leaves a directory that nothing refers to, which the next open removes.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from ..store.codec import format as fmt
from ..store.codec.format import PartitionInfo
from ..store.env.environment import Environment
from ..store.env.transaction import Transaction
from ..store.files.directory import discard_tree, make_directory, move, remove_tree
from ..store.files.failpoints import reach


def build_partition(store: Path, target: Path, start_ms: int, end_ms: int, store_id: bytes, map_bytes: int) -> None:
    """A partition directory with an empty first generation, under `target` in the directory of the store.

    What is there already was left by a creation whose registration failed: nothing in it was acknowledged. Raises
    StoreFull, StoreUnavailable, OSError; then nothing is left, or what the next opening removes.
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
