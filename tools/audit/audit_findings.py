"""Findings that need no partition to be read, and why a partition whose time has passed is still there.

Markers and frontiers are held against the catalog, the catalog against the disk, and a partition that has ended against
the topics, ledgers and subscriptions that hold it.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ...cleanup.log_claims import kept_of
from ...partitions.partition import partition_path
from ...partitions.timespan import parse_directory_name
from ...store.codec.format import CursorRecord, LedgerRecord, LedgerState, PartitionRecord, PartitionState
from ...store.files.directory import children
from ...store.message import MAX_DUE_MS
from ...store.position import Position
from ..values import iso_time
from .audit_tables import AuditFinding, HeldRow, finding
from .facts import KeptLedger, StoreFacts, TopicFacts, log_address, partition_name, ranges_text

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


def missing_findings(store: Path, facts: StoreFacts) -> Iterator[tuple[int, AuditFinding]]:
    """(start, finding) of each partition of the catalog whose file is not there."""
    for start_ms, record in facts.partitions.items():
        path = partition_path(store, start_ms, record.generation)
        if record.state is not PartitionState.DELETING and not (path / "data.mdb").is_file():
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
