"""An audit put together: facts, the partitions that are not sealed, the sealed ones by a runner, then what holds what.

The runner is what differs between one machine and many: it gets the packed tasks of the sealed partitions and gives
their packed results back, in any order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyroaring import BitMap

from ...partitions.partition import partition_path
from ...store.codec.format import PartitionRecord, PartitionState
from ...store.env.environment import Environment
from ...store.log import catalog
from ..scan.sealed import Sealed, open_main_to_read
from ..store_check import check_file
from ..values import require_store
from .checking.catalog_findings import (
    directory_findings,
    marker_findings,
    missing_findings,
    quarantine_findings,
    reference_findings,
)
from .checking.holding import judge_holding
from .checking.log_tally import LogTask
from .checking.open_partitions import PATIENCE_S, audit_open
from .checking.partition_audit import PartitionResult, PartitionTask, audit_packed
from .gathering import Gathering
from .reading.facts import StoreFacts, read_facts
from .reading.main_bodies import main_body_findings
from .tables import Audit, AuditFinding, finding

Runner = Callable[[list[bytes]], Iterable[bytes]]
"""From packed PartitionTasks to packed PartitionResults (partition_audit.audit_packed of each), in any order."""

Progress = Callable[[int, int], object]
"""Told how many partitions are done, of how many."""


def run_here(tasks: list[bytes]) -> Iterator[bytes]:
    """The runner of one process: one partition after another."""
    return map(audit_packed, tasks)


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
        facts, subscriptions = read_facts(main)
        as_of_ms = max(taken_ms, facts.clock_ms) if as_of_ms is None else as_of_ms
        audit = Audit(str(path), as_of_ms, taken_ms, "store", subscriptions=sorted(subscriptions))
        audit.findings += facts.findings
        if verify:
            audit.findings += main_body_findings(main, facts)
        gathering = Gathering(facts, audit)
        _partitions(path, main, identity.store_id, facts, gathering, (as_of_ms, verify, run, progress, patience_s))
        audit.findings += _directories(path, main, facts, patience_s)
        _conclude(main, facts, gathering, as_of_ms)
    return audit


def _partitions(
    path: Path,
    main: Environment,
    store_id: bytes,
    facts: StoreFacts,
    gathering: Gathering,
    options: tuple[int, bool, Runner, Progress | None, float],
) -> None:
    as_of_ms, verify, run, progress, patience_s = options
    missing = dict(missing_findings(path, facts))
    for start_ms, found in list(missing.items()):
        again = _replaced(main, start_ms, facts)
        if again is not None:
            facts.partitions[start_ms] = again
            del missing[start_ms]
        elif _as_before(main, start_ms, facts.partitions[start_ms]):
            gathering.not_read(start_ms, found)
        else:
            gathering.gone(start_ms)
    records = {
        start_ms: record
        for start_ms, record in facts.partitions.items()
        if record.state is not PartitionState.DELETING and start_ms not in missing
    }
    left = set(facts.withdrawn) - {frontier.ledger_id for frontier in facts.frontiers.values()}
    done = 0

    def task_of(start_ms: int, record: PartitionRecord) -> PartitionTask:
        sealed = _descriptor(path, start_ms, record)
        withdrawn = tuple((ledger_id, *_packed(*facts.withdrawn[ledger_id])) for ledger_id in sorted(left))
        return PartitionTask(sealed, store_id, as_of_ms, verify, log_tasks(facts, start_ms), withdrawn)

    def take(result: PartitionResult, *, sealed: bool) -> None:
        nonlocal done
        record = facts.partitions[result.start_ms]
        if result.unreadable and not _as_before(main, result.start_ms, record):
            gathering.gone(result.start_ms)
        else:
            gathering.take(result, "open" if not sealed else "whole" if verify else "headers")
        done += 1
        if progress is not None:
            progress(done, len(records))

    for start_ms, record in records.items():
        if record.state is PartitionState.OPEN:
            result, ledgers = audit_open(task_of(start_ms, record), patience_s)
            left -= ledgers
            take(result, sealed=False)
    closed = [(start_ms, record) for start_ms, record in records.items() if record.state is PartitionState.CLOSED]
    for packed in run([task_of(*each).pack() for each in closed]):
        result = PartitionResult.unpack(packed)
        again = _replaced(main, result.start_ms, facts) if result.unreadable else None
        if again is not None:  # compaction put a newer generation in its place meanwhile
            facts.partitions[result.start_ms] = again
            result = PartitionResult.unpack(audit_packed(task_of(result.start_ms, again).pack()))
        take(result, sealed=True)


def log_tasks(facts: StoreFacts, start_ms: int) -> tuple[LogTask, ...]:
    """What the facts say of the logs of one partition of which something has fired."""
    found = []
    none = BitMap()
    for (topic_id, start), frontier in facts.frontiers.items():
        if start != start_ms or topic_id not in facts.topics:
            continue
        topic = facts.topics[topic_id]
        ledger_id = frontier.ledger_id
        marks = [each for each in topic.marks.get(ledger_id, []) if each.start_ms == start_ms]
        cancelled, admitted = facts.withdrawn.get(ledger_id, (none, none))
        marked, acknowledged = (marks[0].marked, marks[0].acknowledged) if marks else (none, none)
        judged = ledger_id not in facts.unjudged_ledgers
        found.append(
            LogTask(
                topic_id, ledger_id, frontier.due_ms, frontier.entry_id, frontier.absorbed_end, frontier.fired, judged,
                topic.kept_since_ms, *_packed(cancelled, admitted), *_packed(marked, acknowledged),
            )
        )  # fmt: skip
    return tuple(sorted(found))


def _packed(one: BitMap, other: BitMap) -> tuple[bytes, bytes]:
    return one.serialize(), other.serialize()


def _descriptor(path: Path, start_ms: int, record: PartitionRecord) -> Sealed:
    try:
        file_bytes = (partition_path(path, start_ms, record.generation) / "data.mdb").stat().st_size
    except FileNotFoundError:  # it has just gone: opening it says so
        file_bytes = 0
    return Sealed(str(path.absolute()), start_ms, record.end_ms, record.generation, file_bytes)


def _as_before(main: Environment, start_ms: int, record: PartitionRecord) -> bool:
    """Whether the catalog still says of a partition what the facts say."""
    with main.read() as raw:
        return dict(catalog.partitions(raw)).get(start_ms) == record


def _replaced(main: Environment, start_ms: int, facts: StoreFacts) -> PartitionRecord | None:
    """The catalog's record of a partition that compaction has given a newer generation than in the facts."""
    with main.read() as raw:
        record = dict(catalog.partitions(raw)).get(start_ms)
    known = facts.partitions[start_ms]
    newer = record is not None and record.state is PartitionState.CLOSED and record.generation != known.generation
    return record if newer else None


def _directories(path: Path, main: Environment, facts: StoreFacts, patience_s: float) -> list[AuditFinding]:
    """What the catalog as it is now does not know; read twice, as a process may be about to register or remove it."""

    def look() -> list[AuditFinding]:
        with main.read() as raw:
            known = dict(catalog.partitions(raw))
        return list(directory_findings(path, known, facts.unreadable_partitions))

    found = look()
    if found and patience_s:
        time.sleep(patience_s)
        again = set(look())
        found = [each for each in found if each in again]
    return found


def _conclude(main: Environment, facts: StoreFacts, gathering: Gathering, as_of_ms: int) -> None:
    """What needs no partition, or all of them."""
    audit = gathering.audit
    audit.findings += marker_findings(facts)
    audit.findings += reference_findings(facts)
    audit.findings += quarantine_findings(facts, audit.findings)
    judged = judge_holding(facts, gathering.pending, as_of_ms)
    audit.held = judged.rows
    audit.findings += [
        found for start_ms, found in judged.findings if _as_before(main, start_ms, facts.partitions[start_ms])
    ]
    audit.topics = facts.topic_rows()
    audit.lateness = facts.lateness
    gathering.finish()
