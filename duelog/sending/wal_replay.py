"""WAL replay: every message that a crash left in the write-ahead log gets the entry id that was reserved for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import PartitionState
from duelog.store.env.environment import Environment
from duelog.store.errors import BrokenInvariant, CorruptEntry, DamagedStore
from duelog.store.log.ledger import RunLimits, last_run
from duelog.store.wal.wal_file import FILE_NAME, WalFile, WalRecord, read_wal, remove_unmade

_AT_ONCE = 5_000


def replay_wal(
    path: Path,
    main: Environment,
    partitions: PartitionSet,
    limits: RunLimits,
    store_id: bytes,
    open_wal: Callable[[], WalFile],
) -> int:
    """Have the partitions of the store in `path` get what a crash left in its WAL, which is begun anew.

    Returns how many messages they did not have.

    Raises as `replay`.
    """
    remove_unmade(path)
    records = read_wal(path, store_id)
    if not records:
        return 0
    replayed = replay(path, records, partitions, limits)
    with closing(open_wal()) as wal:
        try:
            wal.restart()
        except OSError as error:
            raise main.fail(error) from error
    return replayed


def replay(path: Path, records: Iterable[WalRecord], partitions: PartitionSet, limits: RunLimits) -> int:
    """Append what the WAL of the store in `path` holds and its partitions do not; how many messages, durable.

    Raises DamagedStore where entries before those of the WAL are missing, StoreFull, StoreFailed.
    """
    appended = 0
    for partition, log, missing in missing_entries(path, records, partitions):
        for at in range(0, len(missing), _AT_ONCE):
            part = missing[at : at + _AT_ONCE]
            dues = np.array([record.due_ms for record in part], dtype=np.int64)
            bodies = Bodies.of([record.body for record in part])
            place = partition.append(log.topic_id, dues, bodies, limits, _no_new_ledger)
            reserved = part[0].ledger_id, part[0].entry_id
            if place != reserved:
                raise BrokenInvariant(f"{partition.name}: {reserved} was reserved, {place} given")
            appended += len(part)
        partition.environment.sync()
    return appended


def missing_entries(
    path: Path, records: Iterable[WalRecord], partitions: PartitionSet
) -> Iterator[tuple[Partition, PartitionLog, list[WalRecord]]]:
    """What the WAL holds and the partitions do not, log by log, each under a lease.

    What was reserved in a partition that has closed since, or is gone, was applied. Raises DamagedStore as `replay`.
    """
    by_log: dict[int, dict[int, list[WalRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_log[record.start_ms][record.ledger_id].append(record)
    for start_ms, ledgers in by_log.items():
        partition = partitions.get(start_ms)
        if partition is None or partition.state is not PartitionState.OPEN:
            continue
        with partitions.lease(partition):
            for log in partition.logs():
                held = ledgers.get(log.ledger_id, ())
                tail = log.ledger.entries
                _refuse_damaged_tail(path, held, partition, log)
                # An interrupted group may have been written twice.
                missing = {record.entry_id: record for record in held if record.entry_id >= tail}
                lost = set(range(tail, max(missing, default=-1) + 1)) - missing.keys()
                if lost:
                    raise DamagedStore(
                        path / FILE_NAME,
                        f"holds entry {max(missing)} of ledger {log.ledger_id} in {partition.name}, which ends at "
                        f"entry {tail}, and not entry {min(lost)}: entries were lost",
                    )
                if missing:
                    yield partition, log, [missing[entry_id] for entry_id in sorted(missing)]


def _refuse_damaged_tail(path: Path, held: Sequence[WalRecord], partition: Partition, log: PartitionLog) -> None:
    """Where the last run of a log cannot be read it is not known which of the WAL's entries the log has."""
    if not held:
        return
    with partition.environment.read() as raw:
        try:
            last_run(raw, partition.name, log.ledger_id)
        except CorruptEntry as error:
            if held[-1].entry_id >= error.entry_id:
                raise DamagedStore(
                    path / FILE_NAME,
                    f"holds entry {held[-1].entry_id} of ledger {log.ledger_id} in {partition.name}, whose last run, "
                    f"from entry {error.entry_id} on, cannot be read",
                ) from error


def _no_new_ledger() -> int:
    raise BrokenInvariant("a log that is there needs no ledger")
