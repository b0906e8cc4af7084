"""The audit of a store put together: facts, open partitions, sealed ones by a runner, and the tables.

The runner is what differs between one machine and many: it gets the tasks of the sealed partitions and gives their
results back, in any order. `Gathering` puts them into tables: ids become names, days of several partitions one row.

What needs no partition to be read is judged here, and why a partition whose time has passed is still there. Markers and
frontiers are held against the catalog, the catalog against the disk, and a partition that has ended against the topics,
ledgers and subscriptions that hold it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyroaring import BitMap

from ...check.check_store import LATE_MS, is_kept
from ...cleanup.log_claims import kept_of
from ...partitions.away import directory_in_use
from ...partitions.partition import partition_path
from ...partitions.timespan import parse_directory_name
from ...replica.copied_store import CopiedStore, open_copy
from ...stats import holding
from ...store.codec.format import LedgerRecord, LedgerState, PartitionRecord, PartitionState
from ...store.env.environment import Environment
from ...store.errors import DamagedStore
from ...store.files.directory import children, disk_parts
from ...store.log import catalog
from ...store.log.managed_ledger import LedgerInfo
from ...store.message import MAX_DUE_MS
from ...store.wal.followed_wal import FollowedWal
from ..columns.sealed import Sealed, copied_partitions, copy_url, open_main_to_read
from ..columns.sealed import excerpt as excerpt_of
from ..store_check import check_file
from ..values import iso_time, require_store
from .audit_tables import NO_TOPIC, Audit, AuditFinding, HeldRow, PartitionRow, RetentionRow, UpcomingRow, finding
from .facts import (
    UNTIMED,
    StoreFacts,
    TopicFacts,
    dead_letter_rows,
    log_address,
    partition_name,
    ranges_text,
    read_facts,
)
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

SETTLED_S = 60.0
"""A directory under partitions/ that is older would be in the catalog by now if its process lived."""

LEFT_OVER_S = 3_600.0
"""Nothing in staging/ or trash/ that is untouched for longer is some process's work under way."""


def marker_findings(facts: StoreFacts) -> Iterator[AuditFinding]:
    """Doubled markers, markers of logs that no partition has, and what points into partitions that are gone."""
    gone: dict[tuple[int, int], int] = {}
    for topic_id, start_ms in facts.frontiers:
        if start_ms not in facts.partitions and start_ms not in facts.unreadable_partitions:
            gone[topic_id, start_ms] = 0
    marks = [
        (topic, target, mark)
        for topic in facts.topics.values()
        for target, of_target in sorted(topic.marks.items())
        for mark in of_target
    ]
    for topic, target, mark in marks:
        address = f"{log_address(topic.name, topic.topic_id, mark.start_ms)}, ledger {target}"
        if mark.doubled:
            message = f"more than one marker: entries {ranges_text(mark.doubled)}"
            yield finding("doubled-marker", address, message, len(mark.doubled))
        place = topic.topic_id, mark.start_ms
        frontier = facts.frontiers.get(place)
        if mark.start_ms in facts.unreadable_partitions or place in facts.unjudged:
            continue
        if mark.start_ms not in facts.partitions:
            gone[place] = gone.get(place, 0) + mark.markers
        elif frontier is None:
            message = f"{mark.markers:,} markers point into a log of which nothing has fired"
            yield finding("dangling-marker", address, message, mark.markers)
        elif frontier.ledger_id != target:
            message = f"{mark.markers:,} markers; the topic's log in that partition is ledger {frontier.ledger_id}"
            yield finding("dangling-marker", address, message, mark.markers)
    for (topic_id, start_ms), markers in sorted(gone.items()):
        address = log_address(facts.topic_name(topic_id), topic_id, start_ms)
        what = f"{markers:,} markers that are kept point" if markers else "the record of what has fired points"
        message = f"the partition is not in the catalog; {what} into it"
        yield finding("deleted-too-early", address, message, markers)


def quarantine_findings(facts: StoreFacts, known: Iterable[AuditFinding]) -> Iterator[AuditFinding]:
    """Quarantined entries, but for those that a finding names already."""
    named = {each.address for each in known}
    for (ledger_id, entry_id), reason in sorted(facts.quarantined.items()):
        address = f"ledger {ledger_id}, entry {entry_id}"
        if not any(each.endswith(address) for each in named):
            yield finding("set-aside", address, f"could not be read and was not delivered: {reason}", 1)


def reference_findings(facts: StoreFacts) -> Iterator[AuditFinding]:
    """Closed partitions whose count of references is not that of the topics that have not released them."""
    for start_ms, record in facts.partitions.items():
        unreadable = any(start == start_ms for _, start in facts.unjudged)
        if record.state is not PartitionState.CLOSED or unreadable:
            continue
        references = unreleased(facts, start_ms)
        if references and len(references) != record.references:
            names = ", ".join(facts.topic_name(topic_id) or str(topic_id) for topic_id in references[:5])
            message = f"{len(references)} topics hold it ({names}), the catalog says {record.references}"
            yield finding("wrong-holders", f"partition {partition_name(start_ms)}", message)


def unreleased(facts: StoreFacts, start_ms: int) -> list[int]:
    """Ids of the topics that hold a closed partition."""
    return [
        topic_id
        for (topic_id, start), frontier in facts.frontiers.items()
        if start == start_ms and not frontier.released and topic_id in facts.topics
    ]


def directory_findings(
    store: Path, partitions: Mapping[int, PartitionRecord], unjudged: Iterable[int]
) -> Iterator[AuditFinding]:
    """Directories that the catalog does not know, generations that it has not, and what a crash left.

    partitions: the catalog's, by start; unjudged: starts of those whose record is damaged. What was made a moment ago
    is left out: a process may be at it.
    """
    now_s = time.time()
    known = {partition_name(start_ms): record for start_ms, record in partitions.items()}
    unreadable = {partition_name(start_ms) for start_ms in unjudged}
    for directory in children(store / "partitions"):
        record = known.get(directory.name)
        if record is None:
            if directory.name not in unreadable and _age_s(directory, now_s) > SETTLED_S:
                yield finding("orphan-directory", f"partitions/{directory.name}", _what_it_is(directory))
            continue
        for generation in children(directory):
            if generation.name != f"g{record.generation:06d}" and _age_s(generation, now_s) > SETTLED_S:
                message = f"the catalog has generation {record.generation}"
                yield finding("orphan-generation", f"partitions/{directory.name}/{generation.name}", message)
    for place in ("staging", "trash"):
        for child in children(store / place):
            if child.name != "ready" and _age_s(child, now_s) > LEFT_OVER_S:  # ready: to be adopted at the next open
                yield finding("leftover", f"{place}/{child.name}", f"untouched for {_age_s(child, now_s) / 3600:.0f} h")


def _what_it_is(directory: Path) -> str:
    try:
        parse_directory_name(directory.name)
    except ValueError:
        return "its name is not that of a partition"
    return "no partition of the catalog lies there"


def _age_s(path: Path, now_s: float) -> float:
    """Seconds since anything at or below the path was written; 0 when it has just gone."""
    try:
        newest = path.stat().st_mtime
        for child in path.rglob("*"):
            if child.name != "lock.mdb":  # a reader writes into it
                newest = max(newest, child.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
    return now_s - newest


def missing_findings(store: Path, facts: StoreFacts, wal: FollowedWal) -> Iterator[tuple[int, AuditFinding]]:
    """(start, finding) of each partition of the catalog whose file is not there, and that is not vacant."""
    for start_ms, record in facts.partitions.items():
        path = partition_path(store, start_ms, record.generation)
        is_there = (directory_in_use(path) / "data.mdb").is_file
        if record.state is PartitionState.DELETING or is_there():
            continue
        if record.state is not PartitionState.OPEN or not (wal.registers(start_ms) or is_there()):
            address = f"partition {partition_name(start_ms)}"
            yield start_ms, finding("missing-partition", address, f"{path.relative_to(store)}/data.mdb is not there")


def judge_holding(
    facts: StoreFacts, pending: Mapping[tuple[int, int], int], as_of_ms: int
) -> tuple[list[HeldRow], list[tuple[int, AuditFinding]]]:
    """Every partition that ended by `as_of_ms`: the reasons that hold it, or (start, finding) where nothing does.

    pending: messages by (topic id, start) that have not fired.
    """
    held: list[HeldRow] = []
    findings = []
    for start_ms, record in facts.partitions.items():
        if record.end_ms > as_of_ms:
            continue
        if record.state is PartitionState.OPEN:
            held += _open(facts, start_ms, pending)
            continue
        rows, why_not = _closed(facts, start_ms, record, as_of_ms)
        held += rows
        if not rows:
            findings.append((start_ms, finding("not-deleted", f"partition {partition_name(start_ms)}", why_not)))
    return held, findings


def _open(facts: StoreFacts, start_ms: int, pending: Mapping[tuple[int, int], int]) -> Iterator[HeldRow]:
    name = partition_name(start_ms)
    waiting = {topic_id: count for (topic_id, start), count in pending.items() if start == start_ms and count}
    for topic_id, count in sorted(waiting.items()):
        topic = facts.topic_name(topic_id)
        if topic is not None:
            why = f"{count:,} messages have not fired: a process that has the store open fires those that are due"
            yield HeldRow(name, topic, "pending", "", 0, count, why)
    if not waiting:
        yield HeldRow(name, "", "pending", "", 0, 0, "everything has fired: the next tick of an open store closes it")


def _closed(facts: StoreFacts, start_ms: int, record: PartitionRecord, as_of_ms: int) -> tuple[list[HeldRow], str]:
    """Find what holds a closed partition; no rows: nothing does, and why it should have gone."""
    name = partition_name(start_ms)
    ledgers = {frontier.ledger_id for (_, start), frontier in facts.frontiers.items() if start == start_ms}
    rows = [
        HeldRow(name, "", "set aside", "", ledger_id, 1, f"entry {entry_id} of ledger {ledger_id} could not be read")
        for ledger_id, entry_id in sorted(facts.quarantined)
        if ledger_id in ledgers
    ]
    if record.state is PartitionState.DELETING:
        return rows, "its deletion is recorded and was not finished"
    if any(start == start_ms for _, start in facts.unjudged):
        return [HeldRow(name, "", "unreadable", "", 0, 0, "a damaged record hides what holds it")], ""
    references = unreleased(facts, start_ms)
    passed = []
    for topic_id in references:
        held, why_not = _topic(facts, topic_id, start_ms, name, as_of_ms)
        rows += held
        if not held:
            passed.append(why_not)
    if passed:
        return rows, "; ".join(passed[:3])
    counted = f", but the catalog counts {record.references}" if record.references else ""
    return rows, f"every topic has released it{counted}"


def _topic(facts: StoreFacts, topic_id: int, start_ms: int, name: str, as_of_ms: int) -> tuple[list[HeldRow], str]:
    topic = facts.topics[topic_id]
    ledger_id = facts.frontiers[topic_id, start_ms].marker_ledger
    if ledger_id < min((each.ledger_id for each in topic.ledgers), default=0):
        return [], f"{topic.name} has trimmed ledger {ledger_id} with its last marker, and has not released it"
    ledger = next((each for each in topic.ledgers if each.ledger_id == ledger_id), None)
    if ledger is None or ledger.record is None:
        why = f"its last marker is in ledger {ledger_id} of the main log, which cannot be read"
        return [HeldRow(name, topic.name, "unreadable", "", ledger_id, 0, why)], ""
    ledgers = [
        LedgerInfo(each.ledger_id, 0, 0, each.entries, 0, not (each.record and each.record.state is LedgerState.OPEN))
        for each in topic.ledgers
    ]
    marks = ((of, cursor.mark_delete) for of, cursor in topic.subscriptions)
    rows = []
    for each in holding(topic.name, ledger_id, ledgers, marks):
        why = each.explanation
        if each.reason == "retention":
            closed = f"every subscription has passed ledger {ledger_id}, closed {iso_time(ledger.record.closed_ms)}"
            why = f"{closed}: {_retention(topic, ledger_id, ledger.record, as_of_ms)}"
        rows.append(HeldRow(name, topic.name, each.reason, each.subscription, ledger_id, each.behind, why))
    return rows, ""


def _retention(topic: TopicFacts, ledger_id: int, record: LedgerRecord, as_of_ms: int) -> str:
    """Why a ledger that every subscription has passed is still there. The store does not say if it ticked since."""
    if topic.retention is None:
        return "retention keeps it, or the next tick of an open store removes it"
    retention_ms, retention_bytes = topic.retention
    known = [(each.ledger_id, each.record) for each in topic.ledgers if each.record is not None]
    mark_deletes = [cursor.mark_delete for _, cursor in topic.subscriptions]
    if ledger_id not in kept_of(known, mark_deletes, retention_ms, retention_bytes, as_of_ms):
        return "retention does not keep it, and the next tick of an open store removes it"
    if retention_ms and record.closed_ms + retention_ms > as_of_ms:
        until_ms = record.closed_ms + retention_ms
        return f"retention keeps it until {iso_time(until_ms)}" if until_ms <= MAX_DUE_MS else "it is kept for ever"
    return f"retention keeps it among the newest {retention_bytes:,} bytes"


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

    path: or the URL of the store's copy in object storage, of which each task fetches the partition that it reads; the
    audit tells the group of the log at which it stands.
    as_of_ms: the time to judge by; None: now, or the store's clock where that is later. verify: read every page and
    body of sealed partitions; else headers only. patience_s: how long an unfinished snapshot is watched. O(bytes),
    without `verify` O(headers).
    Not for the process that has the store open itself. Raises InvalidArgument for that one, and for a path that holds
    no store; FormatMismatch; DamagedStore where main cannot be opened; of a copy what `open_copy` raises, and
    ReplicaUnreachable.
    """
    how: dict[str, Any] = {"as_of_ms": as_of_ms, "verify": verify, "run": run, "progress": progress}
    if (url := copy_url(path)) is None:
        require_store(path)
        return _audit(path, None, patience_s=patience_s, **how)
    with open_copy(url) as copy:
        audit = _audit(copy.path, copy, patience_s=0, **how)
    audit.store, audit.group, audit.group_ms = url, copy.place, copy.time_ms
    return audit


def _audit(
    path: Path,
    copy: CopiedStore | None,
    *,
    as_of_ms: int | None,
    verify: bool,
    run: Runner,
    progress: Progress | None,
    patience_s: float,
) -> Audit:
    taken_ms = time.time_ns() // 1_000_000
    if verify and (problems := [found.message for found in check_file(path / "main")]):  # reading it might kill us
        audit = Audit(str(path), taken_ms if as_of_ms is None else as_of_ms, taken_ms, "store")
        audit.findings.append(finding("damaged-main", "main", "; ".join(problems[:5])))
        return audit
    with open_main_to_read(path) as (identity, main):
        facts = read_facts(main)
        judged_ms = max(taken_ms, facts.clock_ms) if as_of_ms is None else as_of_ms
        audit = Audit(str(path), judged_ms, taken_ms, "store")
        audit.disk = disk_parts(path) if copy is None else {}
        copied = {} if copy is None else {sealed.start_ms: sealed for sealed, _, _ in copied_partitions(copy)}
        if verify:
            audit.findings += _damaged_bodies(main, facts)
        audit.dead_letters = dead_letter_rows(main, facts)
        gathering, wal = Gathering(facts, audit), FollowedWal(path, identity.store_id)
        records = {
            start: record for start, record in facts.partitions.items() if record.state is not PartitionState.DELETING
        }
        for start_ms, found in list(missing_findings(path, facts, wal)) if copy is None else ():
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
            sealed = copied.get(start_ms) or Sealed.of(path, start_ms, facts.partitions[start_ms]).refuse_away()
            excerpt = None if copy is None else excerpt_of(copy, start_ms)._replace(main=None)
            logs = log_tasks(facts, start_ms)
            return PartitionTask(sealed, identity.store_id, judged_ms, verify, logs, dict(left), excerpt)

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

        for start_ms, record in records.items():
            if record.state is PartitionState.OPEN and copy is None:
                result = audit_partition(task_of(start_ms), wal, patience_s)
                for log in result.logs:
                    left.pop(log.ledger_id, None)
                take(result, "open")
        scope = "whole" if verify else "headers"
        left_over = [
            start for start, each in records.items() if copy is not None or each.state is PartitionState.CLOSED
        ]
        for result in run([task_of(start_ms) for start_ms in left_over]):
            record = _now(main, result.start_ms) if result.unreadable else None
            if record is not None and _is_newer(record, facts.partitions[result.start_ms]):
                facts.partitions[result.start_ms] = record
                take(audit_partition(task_of(result.start_ms)), scope)
            else:
                take(result, scope if records[result.start_ms].state is PartitionState.CLOSED else "open")

        def strange_directories() -> list[AuditFinding]:
            with main.read() as raw:
                known = dict(catalog.partitions(raw))
            return list(directory_findings(path, known, facts.unreadable_partitions))

        if copy is None:
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
