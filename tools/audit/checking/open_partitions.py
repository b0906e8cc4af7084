"""Partitions that are not sealed, read under LMDB's locks beside a writing process: headers only, as of that moment.

What the facts say has fired lies in entries that never change, so losses are told exactly here too; what is pending is
of the moment of reading, not of the facts.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import lmdb

from ....partitions.partition import partition_path
from ....snapshot.stored import SnapshotInfo, SnapshotState, inspect_snapshots
from ....store.env.environment import Environment
from ....store.errors import CorruptRecord, DamagedStore
from ...scan.sealed import Sealed
from ...store_check import check_file
from .log_tally import NO_ENTRY, Issue
from .partition_audit import PartitionResult, PartitionTask, audit_environment

PATIENCE_S = 1.0
"""A snapshot that is being written has grown or is complete after this long."""


class OpenResult(NamedTuple):
    """A partition as it was when it was read, and the ledgers of its logs, with entries or without."""

    result: PartitionResult
    ledgers: set[int]


def audit_open(task: PartitionTask, patience_s: float = PATIENCE_S) -> OpenResult:
    """As `audit_partition`, of a partition that a process may be writing to. Bodies are not read."""
    sealed = task.sealed
    path = partition_path(Path(sealed.store), sealed.start_ms, sealed.generation)
    try:
        problems = [found.message for found in check_file(path)] if task.verify else []
        if problems:
            return OpenResult(_unreadable(sealed, "; ".join(problems[:5])), set())
        with closing(Environment(path, name=sealed.name, read_only=True)) as environment:
            logs, issues = audit_environment(environment, task._replace(verify=False))
            issues += _snapshots(environment, patience_s)
            file_bytes = environment.file_bytes()
        ledgers = {log.ledger_id for log in logs}
        return OpenResult(PartitionResult(sealed.start_ms, "", file_bytes, logs, issues), ledgers)
    except (DamagedStore, CorruptRecord, lmdb.Error) as error:
        return OpenResult(_unreadable(sealed, str(error) or type(error).__name__), set())


def _unreadable(sealed: Sealed, reason: str) -> PartitionResult:
    return PartitionResult(sealed.start_ms, reason, sealed.file_bytes, [], [])


def _snapshots(environment: Environment, patience_s: float) -> list[Issue]:
    """Snapshots that are torn or damaged and that no process is writing."""
    found = _incomplete(environment)
    if found and patience_s:
        time.sleep(patience_s)
        again = _incomplete(environment)
        found = {key: info for key, info in found.items() if again.get(key) == info}
    return [
        Issue("incomplete-snapshot", NO_ENTRY, f"snapshot {snapshot_id} of ledger {ledger_id}: {info.reason}", 0)
        for (ledger_id, snapshot_id), info in sorted(found.items())
    ]


def _incomplete(environment: Environment) -> dict[tuple[int, int], SnapshotInfo]:
    return {
        (info.ledger_id, info.snapshot_id): info
        for info in inspect_snapshots(environment, read_parts=True)
        if info.state is not SnapshotState.COMPLETE
    }
