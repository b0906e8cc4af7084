"""What `check` looks at in the write-ahead log: whether it can be read, and whether the partitions lead up to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lmdb

from duelog.partitions.partition_set import PartitionSet
from duelog.store.errors import CorruptEntry, DamagedStore, FormatMismatch
from duelog.store.wal.wal_file import FILE_NAME, WalRecord, read_wal

from ..sending.wal_replay import missing_entries
from .finding import Finding, error

_LATER = "open the store with the version of duelog that wrote it"


def check_wal(path: Path, store_id: bytes, partitions: PartitionSet) -> Iterator[Finding]:
    """What keeps a store that another process may write from being opened for writing.

    That partitions lack what the WAL holds is no finding: opening brings it home. Nothing false is found beside a
    writer, because the WAL is read before any partition. A group is on disk before the next, and an epoch ends once
    its messages are in their partitions: where an entry of a log was read, so was every one reserved before it that its
    partition did not have then. What it had then it has when it is looked at, since no log becomes shorter. So entries
    past the end of a log begin there and leave no hole.
    """
    address = str(path / FILE_NAME)
    try:
        records = read_wal(path, store_id)
    except DamagedStore as found:
        yield error("journal", address, found.reason)
        return
    except FormatMismatch as found:
        yield error("journal", address, f"{found.field} is {found.found}, {found.expected} is known here", _LATER)
        return
    by_partition: dict[int, list[WalRecord]] = defaultdict(list)
    for record in records:
        by_partition[record.start_ms].append(record)
    for held in by_partition.values():
        yield from _gap(path, partitions, held)


def _gap(path: Path, partitions: PartitionSet, held: list[WalRecord]) -> Iterator[Finding]:
    """The first log of a partition that ends before what the WAL holds of it; other damage is found elsewhere."""
    try:
        for _ in missing_entries(path, held, partitions):
            pass
    except DamagedStore as found:
        if found.path == path / FILE_NAME:
            yield error("journal", str(found.path), found.reason)
    except (CorruptEntry, lmdb.Error, ValueError, LookupError):
        return
