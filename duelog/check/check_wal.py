"""What `check` looks at in the write-ahead log: whether it can be read, and whether the logs lead up to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lmdb

from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState, split_run_key
from duelog.store.codec.run import HEADER
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import APPLIED_KEY
from duelog.store.errors import CorruptEntry, CorruptRecord, DamagedStore, FormatMismatch
from duelog.store.log import catalog
from duelog.store.log.ledger import applied_tail
from duelog.store.wal.older_wal import read_older_wal
from duelog.store.wal.segment import MAIN, Group, RowKind
from duelog.store.wal.wal_reader import DIRECTORY, read_beside

from .finding import Finding, error

_LATER = "open the store with the version of duelog that wrote it"


def check_wal(path: Path, store_id: bytes, main: Environment, partitions: PartitionSet) -> Iterator[Finding]:
    """What keeps a store that another process may write from being opened for writing.

    That an environment lacks what the log holds is no finding: opening the store replays it. Nothing false is found
    beside a writer, because the log is read before any environment.
    """
    try:
        read_older_wal(path, store_id)
        groups = read_beside(path, store_id, lambda: catalog.oldest_segment(main)).groups
    except DamagedStore as found:
        yield error("wal", str(found.path), found.reason)
        return
    except FormatMismatch as found:
        yield error("wal", str(found.path), f"{found.field} is {found.found}, {found.expected} is known here", _LATER)
        return
    except CorruptRecord:  # found elsewhere
        return
    by_environment: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        for start_ms in {row.start_ms for row in group.rows()}:
            by_environment[start_ms].append(group)
    for start_ms, found_groups in by_environment.items():
        if start_ms == MAIN:
            yield from _gap(path, main, MAIN, found_groups)
            continue
        partition = partitions.get(start_ms)
        if partition is not None and partition.state is PartitionState.OPEN:
            try:
                with partitions.lease(partition):
                    yield from _gap(path, partition.environment, start_ms, found_groups)
            except DamagedStore:  # found elsewhere
                continue


def _gap(path: Path, environment: Environment, start_ms: int, groups: list[Group]) -> Iterator[Finding]:
    """The first log of an environment that ends before what the write-ahead log holds of it."""
    tails: dict[int, int] = {}
    try:
        with environment.read() as raw:
            value = raw.get(APPLIED_KEY)
            applied = -1 if value is None else fmt.unpack_u64(fmt.unseal(APPLIED_KEY, value))
            for group in groups:
                if group.position <= applied:
                    continue
                for row in group.rows():
                    if row.kind != RowKind.RUN or row.start_ms != start_ms:
                        continue
                    ledger_id, first = split_run_key(row.key)
                    if ledger_id not in tails:
                        tails[ledger_id] = applied_tail(raw, environment.name, ledger_id)
                    if first != tails[ledger_id]:
                        yield error(
                            "wal",
                            str(path / DIRECTORY),
                            f"holds entry {first} of ledger {ledger_id} in {environment.name}, which ends at entry "
                            f"{tails[ledger_id]}: entries were lost",
                        )
                        return
                    tails[ledger_id] = first + HEADER.unpack_from(row.value)[4]
    except (CorruptEntry, CorruptRecord, lmdb.Error, ValueError):
        return
