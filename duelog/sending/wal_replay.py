"""WAL replay: what a crash left in the write-ahead log is put into the memtables, and sending goes on behind it.

A row whose group the environment has applied (memtable.APPLIED_KEY) is passed over. The runs that are left follow the
applied ones without a gap; else entries were lost, and the store is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import APPLIED_KEY, Memtable
from duelog.store.errors import CorruptEntry, DamagedStore
from duelog.store.files.system_errors import explained
from duelog.store.log import catalog
from duelog.store.log.ledger import applied_tail, last_applied_run
from duelog.store.wal.segment import MAIN, Group, Row
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
    by_environment: dict[int, list[tuple[int, Row]]] = defaultdict(list)
    for group in groups:
        position = group.position
        for row in group.rows():
            by_environment[row.start_ms].append((position, row))
    for start_ms, rows in by_environment.items():
        if start_ms == MAIN:
            _fill(path, main, memtable, rows)
            continue
        partition = partitions.get(start_ms)
        if partition is not None and partition.state is PartitionState.OPEN:
            with partitions.glance(partition) as environment:
                _fill(path, environment, partition.memtable, rows)


def _fill(path: Path, environment: Environment, memtable: Memtable, rows: Iterable[tuple[int, Row]]) -> None:
    fields = environment.get(APPLIED_KEY)
    applied = -1 if fields is None else fmt.unpack_u64(fields)
    view = memtable.view
    for position, row in rows:
        if position > applied:
            add_row(view, row)
            memtable.position = position
    _refuse_gaps(path, environment, memtable)


def _refuse_gaps(path: Path, environment: Environment, memtable: Memtable) -> None:
    """Raise DamagedStore where the unapplied runs of a ledger do not follow what is applied of it."""
    with environment.read() as raw:
        for ledger_id, runs in memtable.view.runs.items():
            try:
                last_applied_run(raw, environment.name, ledger_id)
            except CorruptEntry as error:
                raise DamagedStore(
                    path / DIRECTORY,
                    f"holds entry {runs[0].first} of ledger {ledger_id} in {environment.name}, whose last run, from "
                    f"entry {error.entry_id} on, cannot be read",
                ) from error
            tail = applied_tail(raw, environment.name, ledger_id)
            for run in runs:
                if run.first != tail:
                    raise DamagedStore(
                        path / DIRECTORY,
                        f"holds entry {run.first} of ledger {ledger_id} in {environment.name}, which ends at entry "
                        f"{tail}: entries were lost",
                    )
                tail = run.limit
