"""WAL replay: what a crash left in the write-ahead log is put into the memtables, and sending goes on behind it.

A row whose group the environment has applied (memtable.APPLIED_KEY) is passed over. The runs that are left follow the
applied ones without a gap; else entries were lost, and the store is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec.format import PartitionState
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Memtable, Reads, applied_position
from duelog.store.errors import CorruptEntry, DamagedStore
from duelog.store.files.system_errors import explained
from duelog.store.log import catalog
from duelog.store.log.ledger import last_applied_run
from duelog.store.wal.environment_rows import EnvironmentRows, LedgerRows, rows_by_environment
from duelog.store.wal.segment import MAIN, Group
from duelog.store.wal.wal_reader import DIRECTORY, WalContent, flush_wal, read_wal
from duelog.store.wal.write_batch import add_row


def replay_wal(
    path: Path, store_id: bytes, main: Environment, memtable: Memtable, partitions: PartitionSet
) -> WalContent:
    """Put what a crash left into the memtables; what the log holds.

    Raises DamagedStore where a segment, a group or entries before it are missing; FormatMismatch.
    """
    content = read_wal(path, store_id, catalog.oldest_segment(main))
    with explained(path):
        flush_wal(path, content)
    fill_memtables(path, content.groups, main, memtable, partitions)
    return content


def fill_memtables(
    path: Path, groups: Iterable[Group], main: Environment, memtable: Memtable, partitions: PartitionSet
) -> None:
    """Put the rows of groups that are not applied into the memtables of a store that nothing reads yet.

    What is of a partition that has closed, or is gone, was applied. Raises DamagedStore.
    """
    for start_ms, rows in rows_by_environment(groups).items():
        if start_ms == MAIN:
            with main.read() as raw:
                _fill(path, main.name, raw, memtable, rows)
            continue
        partition = partitions.get(start_ms)
        if partition is not None and partition.state is PartitionState.OPEN:
            with partitions.glance(partition) as raw:
                _fill(path, partition.name, raw, partition.memtable, rows)


def _fill(path: Path, name: str, raw: Reads, memtable: Memtable, rows: EnvironmentRows) -> None:
    """`raw` reads what is applied of an environment."""
    left = rows.after(applied_position(raw))
    if not left:
        return
    for _, row in left.others:
        add_row(memtable, row)
    for ledger in left.ledgers():
        _refuse_gap(path, name, raw, ledger)
        memtable.view.runs[ledger.ledger_id] = ledger.rows
    memtable.position = left.last


def _refuse_gap(path: Path, name: str, raw: Reads, ledger: LedgerRows) -> None:
    """Raise DamagedStore where the unapplied runs of a ledger do not follow what is applied of it."""
    ledger_id = ledger.ledger_id
    try:
        run = last_applied_run(raw, name, ledger_id)
    except CorruptEntry as error:
        raise DamagedStore(
            path / DIRECTORY,
            f"holds entry {ledger.firsts[0]} of ledger {ledger_id} in {name}, whose last run, from entry "
            f"{error.entry_id} on, cannot be read",
        ) from error
    gap = ledger.gap(0 if run is None else run.limit)
    if gap is not None:
        raise DamagedStore(
            path / DIRECTORY,
            f"holds entry {gap[0]} of ledger {ledger_id} in {name}, which ends at entry {gap[1]}: entries were lost",
        )
