"""The rows of an audit, flat: what JSON and Parquet hold and the page shows. Times in epoch ms, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .codes import BEHIND_TIME, CODES

DAY_MS = 86_400_000
HOUR_MS = 3_600_000

NO_TOPIC = "(deleted topic)"
"""Stands for the name of a topic that was deleted and whose messages go with their partition."""


class AuditFinding(NamedTuple):
    """One problem: how bad, which kind (codes.py), where, what, what to do, and how many entries it is about."""

    severity: str
    code: str
    address: str
    message: str
    advice: str
    entries: int


def finding(code: str, address: str, message: str, entries: int = 0) -> AuditFinding:
    """A finding of a kind that codes.py knows."""
    known = CODES[code]
    return AuditFinding(known.severity, code, address, message, known.advice, entries)


class RetentionRow(NamedTuple):
    """The messages of one topic due on one day (UTC), in partitions that are there.

    `pending` have not fired; `overdue` of them were due by the time of the audit. `acknowledged` of those that
    `fired`: by every subscription. `withheld`: moved to another time, never to fire from here. `dropped`: bodies that
    compaction removed. `payload_bytes`: encoded bodies that are there. The counts after `dropped` can overlap with it.
    """

    topic: str
    day_ms: int
    messages: int
    payload_bytes: int
    oldest_due_ms: int
    newest_due_ms: int
    pending: int
    overdue: int
    fired: int
    acknowledged: int
    cancelled: int
    withheld: int
    dropped: int

    def plus(self, other: RetentionRow) -> RetentionRow:
        """The counts of both, under the topic and day of this one."""
        return RetentionRow(
            self.topic,
            self.day_ms,
            self.messages + other.messages,
            self.payload_bytes + other.payload_bytes,
            min(self.oldest_due_ms, other.oldest_due_ms),
            max(self.newest_due_ms, other.newest_due_ms),
            *(mine + theirs for mine, theirs in zip(self[6:], other[6:], strict=True)),
        )


class LatenessRow(NamedTuple):
    """Markers of a topic that were written less than `below_ms` after their messages were due, in no earlier bin.

    below_ms -1: when they were written is not stored (a store of an older version); 0: no upper bound.
    """

    topic: str
    below_ms: int
    markers: int


class UpcomingRow(NamedTuple):
    """Messages of all topics that are pending and due in one hour."""

    hour_ms: int
    messages: int


class PartitionRow(NamedTuple):
    """One partition.

    `scope`: "whole" (sealed; every entry and body was read), "headers" (sealed; bodies were not), "open" (headers, as
    of the moment it was read), or "not read".
    """

    partition: str
    start_ms: int
    end_ms: int
    state: str
    generation: int
    scope: str
    topics: int
    messages: int
    payload_bytes: int
    pending: int
    file_bytes: int


class HeldRow(NamedTuple):
    """Why a partition whose end has passed is still there: one row for each topic and subscription that holds it.

    `reason`: "pending" (it has not fired everything), "subscription" (has not acknowledged), "open ledger" (the main
    log's ledger is still being written), "retention" (acknowledged messages are kept, or the next tick lets go),
    "set aside" (a quarantined entry). `behind`: entries of the main log that the subscription is behind.
    """

    partition: str
    topic: str
    reason: str
    subscription: str
    ledger_id: int
    behind: int
    explanation: str


class SubscriptionRow(NamedTuple):
    """One subscription. `backlog`: entries of the main log that it has not acknowledged."""

    topic: str
    subscription: str
    backlog: int
    mark_delete_ledger: int
    mark_delete_entry: int
    created_ms: int
    paused: bool


class DeadLetterRow(NamedTuple):
    """Dead letters of one origin and reason that were neither requeued nor purged, and when the first and last died.

    reason: what stands before the first colon of theirs.
    """

    topic: str
    subscription: str
    reason: str
    letters: int
    oldest_ms: int
    newest_ms: int


class TopicRow(NamedTuple):
    """One topic's main log: entries are `messages` that lie in it and `markers` of messages in partitions."""

    topic: str
    ledgers: int
    messages: int
    markers: int
    stored_bytes: int
    subscriptions: int


@dataclass(slots=True)
class Audit:
    """The result of an audit."""

    store: str
    as_of_ms: int
    """The time it judges by: what is due, what should have gone."""
    taken_ms: int
    """When it was made."""
    source: str
    """The source: "store" or "export"."""
    findings: list[AuditFinding] = field(default_factory=list)
    retention: list[RetentionRow] = field(default_factory=list)
    lateness: list[LatenessRow] = field(default_factory=list)
    ahead: list[UpcomingRow] = field(default_factory=list)
    partitions: list[PartitionRow] = field(default_factory=list)
    held: list[HeldRow] = field(default_factory=list)
    subscriptions: list[SubscriptionRow] = field(default_factory=list)
    topics: list[TopicRow] = field(default_factory=list)
    dead_letters: list[DeadLetterRow] = field(default_factory=list)
    disk: dict[str, int] = field(default_factory=dict)
    """Bytes that the store takes on disk, by part (`disk_parts`); of an export none."""


def is_faulty(audit: Audit) -> bool:
    """True where anything was found but messages that come late."""
    return any(found.code not in BEHIND_TIME for found in audit.findings)


TABLES: dict[str, type[tuple[object, ...]]] = {
    "findings": AuditFinding,
    "retention": RetentionRow,
    "lateness": LatenessRow,
    "ahead": UpcomingRow,
    "partitions": PartitionRow,
    "held": HeldRow,
    "subscriptions": SubscriptionRow,
    "topics": TopicRow,
    "dead_letters": DeadLetterRow,
}
"""Every table of an audit, by its name in `Audit`, JSON and Parquet."""
