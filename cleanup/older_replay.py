"""What a crash of an older version left in its write-ahead log is applied when the store is opened; the file goes then.

That version reserved the entry ids of single messages in the logs of partitions, and made them durable in the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..partitions.partition import Partition, PartitionLog
from ..partitions.partition_set import PartitionSet
from ..store.codec.bodies import Bodies
from ..store.codec.format import PartitionState
from ..store.codec.run import RunLimits
from ..store.errors import BrokenInvariant, CorruptEntry, DamagedStore
from ..store.files.directory import sync_directory
from ..store.log.ledger import last_applied_run
from ..store.wal.older_wal import FILE_NAME, OlderRecord, read_older_wal

_AT_ONCE = 5_000


def replay_older_wal(path: Path, store_id: bytes, partitions: PartitionSet, limits: RunLimits) -> None:
    """Append what the file in the store's directory holds and its partitions do not, and remove the file.

    What was reserved in a partition that has closed since, or is gone, was applied. Raises DamagedStore where entries
    before those of the file are missing, FormatMismatch, StoreFull, StoreFailed.
    """
    file = path / FILE_NAME
    if not file.exists():
        return
    by_partition: dict[int, dict[int, list[OlderRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in read_older_wal(path, store_id):
        by_partition[record.start_ms][record.ledger_id].append(record)
    for start_ms, ledgers in by_partition.items():
        partition = partitions.get(start_ms)
        if partition is None or partition.state is not PartitionState.OPEN:
            continue
        with partitions.lease(partition):
            for log in partition.logs():
                if log.ledger_id in ledgers:
                    _append(file, partition, log, _missing(file, partition, log, ledgers[log.ledger_id]), limits)
            partition.environment.sync()
    file.unlink()
    (path / "JOURNAL.tmp").unlink(missing_ok=True)
    sync_directory(path)


def _missing(file: Path, partition: Partition, log: PartitionLog, records: Sequence[OlderRecord]) -> list[OlderRecord]:
    """What a log lacks, in order of entry id. Raises DamagedStore where it does not lead up to it."""
    with partition.environment.read() as raw:
        try:
            last_applied_run(raw, partition.name, log.ledger_id)
        except CorruptEntry as error:
            raise DamagedStore(
                file,
                f"holds entry {records[-1].entry_id} of ledger {log.ledger_id} in {partition.name}, whose last run, "
                f"from entry {error.entry_id} on, cannot be read",
            ) from error
    tail = log.ledger.entries
    missing = {record.entry_id: record for record in records if record.entry_id >= tail}  # some were written twice
    lost = set(range(tail, max(missing, default=-1) + 1)) - missing.keys()
    if lost:
        raise DamagedStore(
            file,
            f"holds entry {max(missing)} of ledger {log.ledger_id} in {partition.name}, which ends at entry {tail}, "
            f"and not entry {min(lost)}: entries were lost",
        )
    return [missing[entry_id] for entry_id in sorted(missing)]


def _append(
    file: Path, partition: Partition, log: PartitionLog, records: Sequence[OlderRecord], limits: RunLimits
) -> None:
    for at in range(0, len(records), _AT_ONCE):
        part = records[at : at + _AT_ONCE]
        dues = np.array([record.due_ms for record in part], dtype=np.int64)
        bodies = Bodies.of([record.body for record in part])
        place = partition.append(log.topic_id, dues, bodies, limits, _no_new_ledger)
        if place != (part[0].ledger_id, part[0].entry_id):
            raise BrokenInvariant(f"{file}: entry {part[0].entry_id} was reserved, {place[1]} given")


def _no_new_ledger() -> int:
    raise BrokenInvariant("a log that is there needs no ledger")
