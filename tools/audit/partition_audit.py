"""The audit of one partition: a plain function of its generation and what the main environment says of it.

Of sealed partitions the command line calls it in a loop, Spark's tasks call it on other machines: arguments and result
are picklable. It opens the generation without locks, touches nothing else, and changes nothing.

An open partition is read under LMDB's locks beside a writing process, with what the write-ahead log has of it: headers
only, as of that moment. What the facts say has fired lies in entries that never change, so losses are told exactly here
too; what is pending is of the moment of reading, not of the facts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple, TypeVar

import lmdb
import numpy as np
from pyroaring import BitMap

from ...snapshot.stored import SnapshotInfo, SnapshotState, inspect_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import Table
from ...store.codec.run import Run
from ...store.env.environment import Environment
from ...store.errors import CorruptEntry, CorruptRecord, DamagedStore
from ...store.log.scan import runs
from ...store.wal.followed_wal import FollowedWal
from ...survey.contents import table_name
from ..scan.sealed import Sealed, open_sealed
from ..store_check import check_file
from .facts import records_before
from .log_tally import NO_ENTRY, Batch, Issue, LogResult, LogTask, tally_log

T = TypeVar("T")

PATIENCE_S = 1.0
"""A snapshot that is being written has grown or is complete after this long."""

_BATCH_ENTRIES = 1 << 20
_BATCH_RUNS = 1 << 14


class PartitionTask(NamedTuple):
    """The audit of one partition, to be done anywhere that its generation can be read from.

    logs: those of which something has fired. withdrawn: (entries cancelled, entries admitted) by ledger, of logs that
    may lie in it and of which nothing has. verify: read every page and body too, not only headers.
    """

    sealed: Sealed
    store_id: bytes
    as_of_ms: int
    verify: bool
    logs: tuple[LogTask, ...]
    withdrawn: Mapping[int, tuple[BitMap, BitMap]]


class PartitionResult(NamedTuple):
    """The result for one partition. `unreadable`: why nothing of it was looked at; empty: it was."""

    start_ms: int
    unreadable: str
    file_bytes: int
    logs: list[LogResult]
    issues: list[Issue]


def audit_partition(task: PartitionTask) -> PartitionResult:
    """Audit one sealed partition. O(headers), with `verify` O(bytes). Raises nothing for what the files hold."""
    return _audit(task, None)


def audit_open(task: PartitionTask, wal: FollowedWal, patience_s: float = PATIENCE_S) -> PartitionResult:
    """Audit a partition that a process may be writing to, and has in `wal`. Bodies are not read."""
    return _audit(task, wal, patience_s)


def _audit(task: PartitionTask, wal: FollowedWal | None, patience_s: float = 0) -> PartitionResult:
    """wal: what is not applied of the store; None: the partition is sealed.

    patience_s: how long an unfinished snapshot of an open one is watched.
    """
    sealed = task.sealed
    try:
        if task.verify and (problems := [found.message for found in check_file(sealed.path)]):
            return PartitionResult(sealed.start_ms, "; ".join(problems[:5]), sealed.file_bytes, [], [])
        if wal is None:
            with open_sealed(sealed, task.store_id) as environment:
                logs, issues = audit_environment(environment, task)
                if any(inspect_snapshots(environment)):
                    message = "snapshots were left when the partition closed"
                    issues.append(Issue("incomplete-snapshot", NO_ENTRY, message, 0))
            return PartitionResult(sealed.start_ms, "", sealed.file_bytes, logs, issues)
        follow = wal.of(sealed.start_ms)
        with closing(Environment(sealed.path, name=sealed.name, read_only=True, follow=follow)) as environment:
            logs, issues = audit_environment(environment, task._replace(verify=False))
            issues += _incomplete_snapshots(environment, patience_s)
            return PartitionResult(sealed.start_ms, "", environment.file_bytes(), logs, issues)
    except (DamagedStore, CorruptRecord, lmdb.Error) as error:
        return PartitionResult(sealed.start_ms, str(error) or type(error).__name__, sealed.file_bytes, [], [])


def audit_environment(environment: Environment, task: PartitionTask) -> tuple[list[LogResult], list[Issue]]:
    """The logs of an open environment, sealed or under locks, and what is wrong with its records."""
    issues: list[Issue] = []
    found: dict[int, int] = {}
    with environment.read() as raw:
        # A snapshot says of itself whether it is whole, and runs are read below.
        for key, value in records_before(raw, fmt.prefix(Table.SNAPSHOT_PART)):
            try:
                fields = fmt.unseal(key, value)
                if key[0] == Table.LOG:
                    found[fmt.trailing_u32(key)] = fmt.unpack_u64(fields)
            except ValueError as error:
                issues.append(Issue("corrupt-record", NO_ENTRY, f"{table_name(key)} {key.hex()}: {error}", 0))
    known = {log.topic_id: log for log in task.logs}
    results = []
    for topic_id, ledger_id in sorted(found.items()):
        log = known.pop(topic_id, None)
        if log is not None and log.frontier.ledger_id != ledger_id:
            message = f"its log is ledger {ledger_id}, the frontier is of ledger {log.frontier.ledger_id}"
            issues.append(Issue("missing-entries", NO_ENTRY, message, 0))
            log = None
        if log is None:
            log = LogTask.unknown(topic_id, ledger_id, *task.withdrawn.get(ledger_id, (BitMap(), BitMap())))
        results.append(tally_log(_batches(environment, ledger_id, task.verify), log, task.as_of_ms))
    if not issues:
        for log in known.values():  # the log table has none of them
            results.append(tally_log([], log, task.as_of_ms))
    return results, issues


def _batches(environment: Environment, ledger_id: int, verify: bool) -> Iterator[Batch | Issue]:
    """The entries of a log in batches, each a read transaction of its own; what is damaged as an Issue."""
    start = 0
    more = True
    while more:
        gathered: list[Run] = []
        issues: list[Issue] = []
        entries = 0
        more = False
        with environment.read() as raw:
            for run in runs(raw, environment.name, ledger_id, start):
                full = entries >= _BATCH_ENTRIES or len(gathered) >= _BATCH_RUNS
                if gathered and (full or isinstance(run, CorruptEntry) or run.first_entry != start):
                    more = True
                    break
                if isinstance(run, CorruptEntry):
                    issues.append(Issue("corrupt-entry", run.entry_id, run.reason, 0))
                    start = run.entry_id + 1
                    continue
                gathered.append(run)
                entries += run.count
                start = run.limit
                if verify:
                    issues += [Issue("corrupt-entry", entry_id, reason, 1) for entry_id, reason in run.damaged_bodies()]
            batch = _together(gathered) if gathered else None
        yield from issues
        if batch is not None:
            yield batch


def _together(gathered: list[Run]) -> Batch:
    """The columns of runs that follow each other."""
    counts = np.fromiter((run.count for run in gathered), np.int64, len(gathered))
    bases = np.fromiter((run.base_ms for run in gathered), np.int64, len(gathered))
    dues = np.concatenate([run.due_offsets() for run in gathered]).astype(np.int64) + np.repeat(bases, counts)
    ends = np.concatenate([run.ends() for run in gathered]).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    starts = np.cumsum(counts) - counts
    sizes[starts] = ends[starts]
    return Batch(gathered[0].first_entry, dues, sizes, np.repeat([run.conditional for run in gathered], counts))


def _incomplete_snapshots(environment: Environment, patience_s: float) -> list[Issue]:
    """Snapshots that are torn or damaged and that no process is writing."""

    def look() -> list[SnapshotInfo]:
        snapshots = inspect_snapshots(environment, read_parts=True)
        return [info for info in snapshots if info.state is not SnapshotState.COMPLETE]

    return [
        Issue(
            "incomplete-snapshot", NO_ENTRY, f"snapshot {info.snapshot_id} of ledger {info.ledger_id}: {info.reason}", 0
        )
        for info in still_there(look, patience_s)
    ]


def still_there(look: Callable[[], list[T]], patience_s: float) -> list[T]:
    """Look, and look again after that long: what both find. In one look only, a process may be at it. 0: one look."""
    found = look()
    if found and patience_s:
        time.sleep(patience_s)
        again = look()
        found = [each for each in found if each in again]
    return found
