"""An audit put together: facts, the partitions that are not sealed, the sealed ones by a runner, then what holds what.

The runner is what differs between one machine and many: it gets the tasks of the sealed partitions and gives their
results back, in any order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyroaring import BitMap

from ...partitions.partition import partition_path
from ...store.codec.format import PartitionRecord, PartitionState
from ...store.env.environment import Environment
from ...store.files.directory import disk_parts
from ...store.log import catalog
from ...store.wal.followed_wal import FollowedWal
from ..scan.sealed import Sealed, open_main_to_read
from ..store_check import check_file
from ..values import require_store
from .catalog_findings import directory_findings, missing_findings
from .facts import StoreFacts, dead_letter_rows, main_body_findings, read_facts
from .gathering import Gathering
from .log_tally import LogTask
from .partition_audit import (
    PATIENCE_S,
    PartitionResult,
    PartitionTask,
    audit_open,
    audit_partition,
    still_there,
)
from .tables import Audit, AuditFinding, finding

Runner = Callable[[list[PartitionTask]], Iterable[PartitionResult]]
"""From tasks to their results (`audit_partition` of each), in any order."""

Progress = Callable[[int, int], object]
"""Told how many partitions are done, of how many."""


def run_here(tasks: list[PartitionTask]) -> Iterator[PartitionResult]:
    """The runner of one process: one partition after another."""
    return map(audit_partition, tasks)


def audit_store(
    path: Path,
    *,
    as_of_ms: int | None = None,
    verify: bool = True,
    run: Runner = run_here,
    progress: Progress | None = None,
    patience_s: float = PATIENCE_S,
) -> Audit:
    """Audit the store in `path`, beside a process that has it open too; nothing is changed.

    as_of_ms: the time to judge by; None: now, or the store's clock where that is later. verify: read every page and
    body of sealed partitions; else headers only. patience_s: how long an unfinished snapshot is watched. O(bytes),
    without `verify` O(headers).
    Not for the process that has the store open itself. Raises InvalidArgument for that one, and for a path that holds
    no store; FormatMismatch; DamagedStore where main cannot be opened.
    """
    require_store(path)
    taken_ms = time.time_ns() // 1_000_000
    if verify and (problems := [found.message for found in check_file(path / "main")]):  # reading it might kill us
        audit = Audit(str(path), taken_ms if as_of_ms is None else as_of_ms, taken_ms, "store")
        audit.findings.append(finding("damaged-main", "main", "; ".join(problems[:5])))
        return audit
    with open_main_to_read(path) as (identity, main):
        facts = read_facts(main)
        as_of_ms = max(taken_ms, facts.clock_ms) if as_of_ms is None else as_of_ms
        audit = Audit(str(path), as_of_ms, taken_ms, "store")
        audit.disk = disk_parts(path)
        if verify:
            audit.findings += main_body_findings(main, facts)
        audit.dead_letters = dead_letter_rows(main, facts)
        gathering = Gathering(facts, audit)
        _partitions(path, main, identity.store_id, facts, gathering, (as_of_ms, verify, run, progress, patience_s))
        audit.findings += _directories(path, main, facts, patience_s)
        return gathering.finish(lambda start_ms: _now(main, start_ms) == facts.partitions[start_ms])


def _partitions(
    path: Path,
    main: Environment,
    store_id: bytes,
    facts: StoreFacts,
    gathering: Gathering,
    options: tuple[int, bool, Runner, Progress | None, float],
) -> None:
    as_of_ms, verify, run, progress, patience_s = options
    records = {
        start: record for start, record in facts.partitions.items() if record.state is not PartitionState.DELETING
    }
    for start_ms, found in list(missing_findings(path, facts)):
        record = _now(main, start_ms)
        if record is not None and _is_newer(record, records[start_ms]):
            facts.partitions[start_ms] = records[start_ms] = record
        elif record == records.pop(start_ms):
            gathering.not_read(start_ms, found)
        else:
            gathering.gone(start_ms)
    left = dict(facts.withdrawn)
    for frontier in facts.frontiers.values():
        left.pop(frontier.ledger_id, None)
    done = 0

    def task_of(start_ms: int) -> PartitionTask:
        sealed = _descriptor(path, start_ms, facts.partitions[start_ms])
        return PartitionTask(sealed, store_id, as_of_ms, verify, log_tasks(facts, start_ms), dict(left))

    def take(result: PartitionResult, scope: str) -> None:
        nonlocal done
        start_ms = result.start_ms
        if result.unreadable and _now(main, start_ms) != facts.partitions[start_ms]:
            gathering.gone(start_ms)
        else:
            gathering.take(result, scope)
        done += 1
        if progress is not None:
            progress(done, len(records))

    wal = FollowedWal(path, store_id)
    for start_ms, record in records.items():
        if record.state is PartitionState.OPEN:
            result = audit_open(task_of(start_ms), wal, patience_s)
            for log in result.logs:
                left.pop(log.ledger_id, None)
            take(result, "open")
    scope = "whole" if verify else "headers"
    closed = [start_ms for start_ms, record in records.items() if record.state is PartitionState.CLOSED]
    for result in run([task_of(start_ms) for start_ms in closed]):
        record = _now(main, result.start_ms) if result.unreadable else None
        if record is not None and _is_newer(record, facts.partitions[result.start_ms]):
            facts.partitions[result.start_ms] = record
            take(audit_partition(task_of(result.start_ms)), scope)
        else:
            take(result, scope)


def log_tasks(facts: StoreFacts, start_ms: int) -> tuple[LogTask, ...]:
    """Make the tasks for the logs of one partition of which something has fired."""
    found = []
    for (topic_id, start), frontier in sorted(facts.frontiers.items()):
        if start != start_ms or topic_id not in facts.topics:
            continue
        topic = facts.topics[topic_id]
        ledger_id = frontier.ledger_id
        marks = [each for each in topic.marks.get(ledger_id, []) if each.start_ms == start_ms]
        marked, acknowledged = (marks[0].marked, marks[0].acknowledged) if marks else (BitMap(), BitMap())
        withdrawn = facts.withdrawn.get(ledger_id, (BitMap(), BitMap()))
        judged = ledger_id not in facts.unjudged_ledgers
        found.append(LogTask(topic_id, frontier, judged, topic.kept_since_ms, *withdrawn, marked, acknowledged))
    return tuple(found)


def _descriptor(path: Path, start_ms: int, record: PartitionRecord) -> Sealed:
    try:
        file_bytes = (partition_path(path, start_ms, record.generation) / "data.mdb").stat().st_size
    except FileNotFoundError:  # it has just gone: opening it says so
        file_bytes = 0
    return Sealed(str(path.absolute()), start_ms, record.end_ms, record.generation, file_bytes)


def _now(main: Environment, start_ms: int) -> PartitionRecord | None:
    """Read what the catalog has of a partition by now."""
    with main.read() as raw:
        return dict(catalog.partitions(raw)).get(start_ms)


def _is_newer(record: PartitionRecord, known: PartitionRecord) -> bool:
    """True where compaction has given a partition a newer generation than in the facts."""
    return record.state is PartitionState.CLOSED and record.generation != known.generation


def _directories(path: Path, main: Environment, facts: StoreFacts, patience_s: float) -> list[AuditFinding]:
    """Find directories that the catalog does not know; look twice, as a process may be at one."""

    def look() -> list[AuditFinding]:
        with main.read() as raw:
            known = dict(catalog.partitions(raw))
        return list(directory_findings(path, known, facts.unreadable_partitions))

    return still_there(look, patience_s)
