"""Results of partitions gathered into the tables of an audit: ids become names, days of several partitions one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from ...check.check_lateness import LATE_MS
from ...store.codec.format import PartitionState
from ...survey.markers import UNTIMED
from ..values import iso_time
from .catalog_findings import marker_findings, quarantine_findings, reference_findings
from .facts import StoreFacts, log_address, partition_name
from .holding import judge_holding
from .log_tally import Issue, LogResult
from .partition_audit import PartitionResult
from .tables import NO_TOPIC, Audit, AuditFinding, PartitionRow, RetentionRow, UpcomingRow, finding


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
        """A partition that nothing can be said of."""
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
            self.audit.findings.append(_of_log(issue, address))
        judged = (log.topic_id, start_ms) not in self._facts.unjudged
        if topic is not None and judged:
            self.pending[log.topic_id, start_ms] = log.unfired
            self._hours.update(dict(log.hours))
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
        record = self._facts.partitions[start_ms]
        self.audit.partitions.append(
            PartitionRow(
                partition_name(start_ms),
                start_ms,
                record.end_ms,
                record.state.name.lower(),
                record.generation,
                scope,
                len(result.logs),
                sum(log.entries for log in result.logs),
                sum(day.payload_bytes for log in result.logs for day in log.days),
                sum(self.pending.get((log.topic_id, start_ms), 0) for log in result.logs),
                result.file_bytes,
            )
        )

    def _lateness(self) -> Iterator[AuditFinding]:
        """Find what is overdue, and what fired late, by topic."""
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
        judged = judge_holding(facts, self.pending, audit.as_of_ms)
        found = [
            *audit.findings,
            *facts.findings,
            *marker_findings(facts),
            *reference_findings(facts),
            *(each for start_ms, each in judged.findings if stands(start_ms)),
            *self._lateness(),
        ]
        audit.findings = sorted({*found, *quarantine_findings(facts, found)})
        audit.retention = [row._replace(topic=topic) for (topic, _), row in sorted(self._days.items())]
        audit.ahead = [UpcomingRow(*each) for each in sorted(self._hours.items())]
        audit.partitions.sort(key=lambda row: row.start_ms)
        audit.held = sorted(judged.rows)
        audit.lateness = sorted(facts.lateness)
        audit.subscriptions = facts.subscription_rows()
        audit.topics = facts.topic_rows()
        return audit


def _of_log(issue: Issue, address: str) -> AuditFinding:
    at = f"{address}, entry {issue.entry_id}" if issue.code == "corrupt-entry" else address
    return finding(issue.code, at, issue.message, issue.entries)
