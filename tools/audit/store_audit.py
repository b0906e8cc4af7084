"""The audit of a store put together: facts, open partitions, sealed ones by a runner, and the tables.

The runner is what differs between one machine and many: it gets the tasks of the sealed partitions and gives their
results back, in any order. `Gathering` puts them into tables: ids become names, days of several partitions one row.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyroaring import BitMap

from ...check.check_store import LATE_MS, is_kept
from ...store.codec.format import PartitionRecord, PartitionState
from ...store.env.environment import Environment
from ...store.errors import DamagedStore
from ...store.files.directory import disk_parts
from ...store.log import catalog
from ...store.wal.followed_wal import FollowedWal
from ..columns.sealed import Sealed, open_main_to_read
from ..store_check import check_file
from ..values import iso_time, require_store
from .audit_findings import (
    directory_findings,
    judge_holding,
    marker_findings,
    missing_findings,
    quarantine_findings,
    reference_findings,
)
from .audit_tables import NO_TOPIC, Audit, AuditFinding, PartitionRow, RetentionRow, UpcomingRow, finding
from .facts import UNTIMED, StoreFacts, dead_letter_rows, log_address, partition_name, read_facts
from .partition_audit import (
    PATIENCE_S,
    Issue,
    LogResult,
    LogTask,
    PartitionResult,
    PartitionTask,
    audit_partition,
    log_batches,
    still_there,
)


class Gathering:
    """The tables of an audit while its partitions come in, in any order."""

    def __init__(self, facts: StoreFacts, audit: Audit) -> None:
        self._facts = facts
        self.audit = audit
        self.pending: dict[tuple[int, int], int] = {}
        """(topic id, partition start) -> messages that have not fired."""
        self._days: dict[tuple[str, int], RetentionRow] = {}
        self._hours: Counter[int] = Counter()
        self._overdue: dict[str, tuple[int, int]] = {}
        """By topic: how many messages, and when the first of them was due."""

    def take(self, result: PartitionResult, scope: str) -> None:
        """A partition that was looked at, or could not be."""
        start_ms = result.start_ms
        address = f"partition {partition_name(start_ms)}"
        if result.unreadable:
            self.not_read(start_ms, finding("unreadable-partition", address, result.unreadable), result.file_bytes)
            return
        for issue in result.issues:
            self.audit.findings.append(finding(issue.code, address, issue.message, issue.entries))
        for log in result.logs:
            self._take_log(start_ms, log)
        self._row(start_ms, scope, result)

    def not_read(self, start_ms: int, found: AuditFinding, file_bytes: int = 0) -> None:
        self.audit.findings.append(found)
        self._row(start_ms, "not read", PartitionResult(start_ms, "", file_bytes, [], []))

    def gone(self, start_ms: int) -> None:
        """A partition that was deleted while the audit ran: nothing is said of it."""
        del self._facts.partitions[start_ms]
        for place in [place for place in self._facts.frontiers if place[1] == start_ms]:
            del self._facts.frontiers[place]
        for topic in self._facts.topics.values():
            for target in list(topic.marks):
                topic.marks[target] = [marks for marks in topic.marks[target] if marks.start_ms != start_ms]

    def _take_log(self, start_ms: int, log: LogResult) -> None:
        topic = self._facts.topic_name(log.topic_id)
        address = f"{log_address(topic, log.topic_id, start_ms)}, ledger {log.ledger_id}"
        for issue in log.issues:
            at = f"{address}, entry {issue.entry_id}" if issue.code == "corrupt-entry" else address
            self.audit.findings.append(finding(issue.code, at, issue.message, issue.entries))
        judged = (log.topic_id, start_ms) not in self._facts.unjudged
        if topic is not None and judged:
            self.pending[log.topic_id, start_ms] = log.unfired
            self._hours.update(log.hours)
            if log.overdue and self._facts.partitions[start_ms].state is PartitionState.OPEN:
                count, oldest_ms = self._overdue.get(topic, (0, log.oldest_ms))
                self._overdue[topic] = count + log.overdue, min(oldest_ms, log.oldest_ms)
            if log.unfired and self._facts.partitions[start_ms].state is PartitionState.CLOSED:
                message = f"{log.unfired:,} had not fired when the partition was closed: entries {log.some_unfired}"
                self.audit.findings.append(finding("lost", address, message, log.unfired))
        for found in log.days:
            day = found if topic is not None and judged else found._replace(pending=0, overdue=0)
            key = topic or NO_TOPIC, day.day_ms
            self._days[key] = self._days[key].plus(day) if key in self._days else day

    def _row(self, start_ms: int, scope: str, result: PartitionResult) -> None:
        record, logs = self._facts.partitions[start_ms], result.logs
        messages = sum(log.entries for log in logs)
        payload_bytes = sum(day.payload_bytes for log in logs for day in log.days)
        pending = sum(self.pending.get((log.topic_id, start_ms), 0) for log in logs)
        head = partition_name(start_ms), start_ms, record.end_ms, record.state.name.lower(), record.generation
        row = PartitionRow(*head, scope, len(logs), messages, payload_bytes, pending, result.file_bytes)
        self.audit.partitions.append(row)

    def _lateness(self) -> Iterator[AuditFinding]:
        for topic, (count, oldest_ms) in self._overdue.items():
            yield finding(
                "overdue", topic, f"{count:,} have not fired, the oldest due since {iso_time(oldest_ms)}", count
            )
        fired: Counter[str] = Counter()
        late: Counter[str] = Counter()
        for row in self._facts.lateness:
            if row.below_ms != UNTIMED:
                fired[row.topic] += row.markers
                late[row.topic] += row.markers if row.below_ms > LATE_MS or not row.below_ms else 0
        for topic, count in late.items():
            if count:
                yield finding("late", topic, f"{count:,} of {fired[topic]:,} whose markers are kept fired late", count)

    def finish(self, stands: Callable[[int], bool] = lambda start_ms: True) -> Audit:
        """Judge what needs no partition, or all of them, and put the tables in order: results come in any.

        stands: whether a partition, by its start, is still as the facts have it.
        """
        audit, facts = self.audit, self._facts
        held, not_deleted = judge_holding(facts, self.pending, audit.as_of_ms)
        found = [
            *audit.findings,
            *facts.findings,
            *marker_findings(facts),
            *reference_findings(facts),
            *(each for start_ms, each in not_deleted if stands(start_ms)),
            *self._lateness(),
        ]
        audit.findings = sorted({*found, *quarantine_findings(facts, found)})
        audit.retention = [row._replace(topic=topic) for (topic, _), row in sorted(self._days.items())]
        audit.ahead = [UpcomingRow(*each) for each in sorted(self._hours.items())]
        audit.partitions.sort(key=lambda row: row.start_ms)
        audit.held = sorted(held)
        audit.lateness = sorted(facts.lateness)
        audit.subscriptions = facts.subscription_rows()
        audit.topics = facts.topic_rows()
        return audit


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
        judged_ms = max(taken_ms, facts.clock_ms) if as_of_ms is None else as_of_ms
        audit = Audit(str(path), judged_ms, taken_ms, "store")
        audit.disk = disk_parts(path)
        if verify:
            audit.findings += _damaged_bodies(main, facts)
        audit.dead_letters = dead_letter_rows(main, facts)
        gathering = Gathering(facts, audit)
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
            sealed = Sealed.of(path, start_ms, facts.partitions[start_ms])  # gone: opening it says so
            return PartitionTask(sealed, identity.store_id, judged_ms, verify, log_tasks(facts, start_ms), dict(left))

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

        wal = FollowedWal(path, identity.store_id)
        for start_ms, record in records.items():
            if record.state is PartitionState.OPEN:
                result = audit_partition(task_of(start_ms), wal, patience_s)
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

        def strange_directories() -> list[AuditFinding]:
            with main.read() as raw:
                known = dict(catalog.partitions(raw))
            return list(directory_findings(path, known, facts.unreadable_partitions))

        audit.findings += still_there(strange_directories, patience_s)
        return gathering.finish(lambda start_ms: _now(main, start_ms) == facts.partitions[start_ms])


def _damaged_bodies(main: Environment, facts: StoreFacts) -> Iterator[AuditFinding]:
    """Damaged messages of main logs. What was trimmed meanwhile is not looked at. O(bytes)."""
    for topic_id, topic in facts.topics.items():
        for ledger in (ledger for ledger in topic.ledgers if ledger.messages):
            try:
                for issue in log_batches(main, ledger.ledger_id, verify=True):
                    if isinstance(issue, Issue) and issue.entries:  # runs that cannot be read are among the facts
                        address = f"main, ledger {ledger.ledger_id}, entry {issue.entry_id}"
                        yield finding("corrupt-entry", address, issue.message, 1)
            except DamagedStore as missing:  # the file with the bodies of its large runs
                if is_kept(main, topic_id, ledger.ledger_id):
                    yield finding("corrupt-entry", f"main, ledger {ledger.ledger_id}", str(missing))


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


def _now(main: Environment, start_ms: int) -> PartitionRecord | None:
    with main.read() as raw:
        return catalog.partition(raw, start_ms)


def _is_newer(record: PartitionRecord, known: PartitionRecord) -> bool:
    """True where compaction has given a partition a newer generation than in the facts."""
    return record.state is PartitionState.CLOSED and record.generation != known.generation
