"""What `check` looks at in the write-ahead log: whether it can be read, and whether the logs lead up to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb

from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import APPLIED_KEY
from duelog.store.errors import CorruptEntry, CorruptRecord, DamagedStore, FormatMismatch
from duelog.store.log import catalog
from duelog.store.log.ledger import applied_tail
from duelog.store.wal.environment_rows import EnvironmentRows, rows_by_environment
from duelog.store.wal.segment import MAIN
from duelog.store.wal.wal_reader import DIRECTORY, read_beside

from .finding import Finding, error

_LATER = "open the store with the version of duelog that wrote it"


def check_wal(path: Path, store_id: bytes, main: Environment, partitions: PartitionSet) -> Iterator[Finding]:
    """What keeps a store that another process may write from being opened for writing.

    That an environment lacks what the log holds is no finding: opening the store replays it. Nothing false is found
    beside a writer, because the log is read before any environment.
    """
    try:
        groups = read_beside(path, store_id, lambda: catalog.oldest_segment(main)).groups
    except DamagedStore as found:
        yield error("wal", str(found.path), found.reason)
        return
    except FormatMismatch as found:
        yield error("wal", str(found.path), f"{found.field} is {found.found}, {found.expected} is known here", _LATER)
        return
    except CorruptRecord:  # found elsewhere
        return
    for start_ms, rows in rows_by_environment(groups).items():
        if start_ms == MAIN:
            yield from _gap(path, main, rows)
            continue
        partition = partitions.get(start_ms)
        if partition is not None and partition.state is PartitionState.OPEN:
            try:
                with partitions.lease(partition):
                    yield from _gap(path, partition.environment, rows)
            except DamagedStore:  # found elsewhere
                continue


def _gap(path: Path, environment: Environment, rows: EnvironmentRows) -> Iterator[Finding]:
    """The first log of an environment that ends before what the write-ahead log holds of it."""
    try:
        with environment.read() as raw:
            value = raw.get(APPLIED_KEY)
            applied = -1 if value is None else fmt.unpack_u64(fmt.unseal(APPLIED_KEY, value))
            for ledger in rows.after(applied).ledgers():
                gap = ledger.gap(applied_tail(raw, environment.name, ledger.ledger_id))
                if gap is not None:
                    yield error(
                        "wal",
                        str(path / DIRECTORY),
                        f"holds entry {gap[0]} of ledger {ledger.ledger_id} in {environment.name}, which ends at entry "
                        f"{gap[1]}: entries were lost",
                    )
                    return
    except (CorruptEntry, CorruptRecord, lmdb.Error, ValueError):
        return
