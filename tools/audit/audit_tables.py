"""The rows of an audit, flat, and every kind of finding: what JSON and Parquet hold and the page shows.

Times in epoch ms, sizes in bytes. docs/audit.md lists the kinds too, and a test holds the two against each other.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

ERROR, WARNING = "error", "warning"


class Code(NamedTuple):
    """A kind of finding. `severity`: "error": something is lost or wrong; "warning": something is late or left over."""

    severity: str
    meaning: str
    advice: str


BEHIND_TIME = frozenset(("late", "overdue"))
"""Kinds of findings that are about time, and not about what is stored: they do not change an exit status."""

_REPAIR = "run `duelog repair` on a copy of the store, or restore a backup"

CODES: dict[str, Code] = {
    "lost": Code(
        ERROR,
        "messages were due, the store has gone past them, and no marker hands them out",
        "send them again from a backup or from their source; `duelog dump --entries` shows them",
    ),
    "doubled-marker": Code(
        ERROR,
        "messages were put into the main log more than once: subscriptions receive them again",
        "have receivers ignore message ids that they know; keep the store and report it",
    ),
    "dangling-marker": Code(
        ERROR, "the main log points at messages that do not exist: no subscription can receive them", _REPAIR
    ),
    "stray-marker": Code(
        ERROR,
        "the main log hands out messages that were cancelled, or that have not fired by the record of it",
        "expect cancelled messages, or the same ones once more when they fire; keep the store and report it",
    ),
    "deleted-too-early": Code(
        ERROR, "a partition is gone, and something that is kept still points into it", "restore it from a backup"
    ),
    "missing-partition": Code(
        ERROR, "the catalog has a partition whose directory is not there", "restore its directory from a backup"
    ),
    "unreadable-partition": Code(
        ERROR, "a partition cannot be opened, or its pages do not hold together; it was not looked at", _REPAIR
    ),
    "damaged-main": Code(
        ERROR, "the pages of the main environment do not hold together; nothing else was looked at", _REPAIR
    ),
    "corrupt-entry": Code(ERROR, "entries do not match their checksums: they are never delivered", _REPAIR),
    "missing-entries": Code(ERROR, "entries of a log are gone: their numbers leave a gap", _REPAIR),
    "corrupt-record": Code(ERROR, "a record of the catalog does not match its checksum", _REPAIR),
    "set-aside": Code(
        ERROR,
        "an entry could not be read when it was to be delivered; it holds its partition until it is discarded",
        "restore it from a backup, or discard it with `duelog repair`",
    ),
    "wrong-holders": Code(
        ERROR,
        "the catalog counts other references to a closed partition than there are: it goes too early, or never",
        _REPAIR,
    ),
    "overdue": Code(
        WARNING,
        "messages have been due for more than a minute and have not fired",
        "open the store; where a process has it open, its log and `store.suspended()` say what keeps them from firing",
    ),
    "late": Code(
        WARNING,
        "messages fired more than a minute after they were due",
        "see that a process has the store open all the time, and that its firing does not stand still; old ones go "
        "with their ledgers",
    ),
    "not-deleted": Code(
        WARNING,
        "nothing holds a partition any more, and it is still there",
        "open the store for writing: a tick removes it; if it comes back, run `duelog repair` on a copy",
    ),
    "orphan-directory": Code(
        WARNING,
        "a directory under partitions/ that the catalog does not know",
        "it is removed when the store is next opened for writing, unless it holds messages",
    ),
    "orphan-generation": Code(
        WARNING,
        "a generation of a partition that is not the one in the catalog",
        "it is removed when the store is next opened for writing",
    ),
    "leftover": Code(
        WARNING,
        "something that a crash left in staging/ or trash/",
        "it is removed when the store is next opened for writing",
    ),
    "incomplete-snapshot": Code(
        WARNING,
        "a snapshot of a delay index that was not finished or cannot be read: the next start takes longer",
        "nothing is lost; `duelog snapshot rebuild` makes it anew",
    ),
}


DAY_MS = 86_400_000
HOUR_MS = 3_600_000

NO_TOPIC = "(deleted topic)"
"""Stands for the name of a topic that was deleted and whose messages go with their partition."""


class AuditFinding(NamedTuple):
    """One problem: how bad, which kind (`CODES`), where, what, what to do, and how many entries it is about."""

    severity: str
    code: str
    address: str
    message: str
    advice: str
    entries: int


def finding(code: str, address: str, message: str, entries: int = 0) -> AuditFinding:
    """A finding of a kind that CODES has."""
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

    def plus(self, other: "RetentionRow") -> "RetentionRow":
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
    """Bytes that the store takes on disk, by part (`disk_parts`); of an export or a copy none."""
    group: int | None = None
    """The last group of the log that a copy has; `group_ms`: that was written by then."""
    group_ms: int = 0


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
