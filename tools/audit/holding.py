"""Why a partition whose time has passed is still there: partition, topic, ledger of its last marker, subscription."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ...cleanup.retention import kept_of
from ...store.codec.format import CursorRecord, LedgerRecord, LedgerState, PartitionRecord, PartitionState
from ...store.message import MAX_DUE_MS
from ...store.position import Position
from ..values import iso_time
from .catalog_findings import unreleased
from .facts import KeptLedger, StoreFacts, TopicFacts, partition_name
from .tables import AuditFinding, HeldRow, finding


class Judged(NamedTuple):
    """The reasons that hold partitions, and the partitions that nothing holds."""

    rows: list[HeldRow]
    findings: list[tuple[int, AuditFinding]]
    """(start, finding) of each partition that should have been deleted."""


def judge_holding(facts: StoreFacts, pending: Mapping[tuple[int, int], int], as_of_ms: int) -> Judged:
    """Every partition that ended by `as_of_ms`, and what holds it.

    pending: messages by (topic id, start) that have not fired.
    """
    judged = Judged([], [])
    for start_ms, record in facts.partitions.items():
        if record.end_ms > as_of_ms:
            continue
        if record.state is PartitionState.OPEN:
            judged.rows.extend(_open(facts, start_ms, pending))
            continue
        rows, why_not = _closed(facts, start_ms, record, as_of_ms)
        judged.rows.extend(rows)
        if not rows:
            address = f"partition {partition_name(start_ms)}"
            judged.findings.append((start_ms, finding("not-deleted", address, why_not)))
    return judged


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
    rows = []
    for subscription, cursor in topic.subscriptions:
        if cursor.mark_delete < Position(ledger_id, ledger.entries - 1):
            behind = _lag(topic.ledgers, ledger_id, cursor)
            mark = cursor.mark_delete
            done = f"nothing from ledger {mark.ledger_id} on"
            if cursor.next_entry:
                done = f"up to entry {mark.entry_id} of ledger {mark.ledger_id}"
            why = f"has acknowledged {done}; the partition's last marker is in ledger {ledger_id}"
            rows.append(HeldRow(name, topic.name, "subscription", subscription, ledger_id, behind, why))
    if rows:
        return rows, ""
    if ledger.record.state is LedgerState.OPEN:
        why = f"its last marker is in ledger {ledger_id}, which is still written to: it is closed by size or age"
        return [HeldRow(name, topic.name, "open ledger", "", ledger_id, 0, why)], ""
    closed = f"every subscription has passed ledger {ledger_id}, closed {iso_time(ledger.record.closed_ms)}"
    why = f"{closed}: {_retention(topic, ledger_id, ledger.record, as_of_ms)}"
    return [HeldRow(name, topic.name, "retention", "", ledger_id, 0, why)], ""


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


def _lag(ledgers: list[KeptLedger], last: int, cursor: CursorRecord) -> int:
    """Entries after the mark-delete position, up to the end of ledger `last`."""
    after = [ledger for ledger in ledgers if cursor.ledger_id <= ledger.ledger_id <= last]
    skipped = cursor.next_entry if after and after[0].ledger_id == cursor.ledger_id else 0
    return max(sum(ledger.entries for ledger in after) - skipped, 0)
