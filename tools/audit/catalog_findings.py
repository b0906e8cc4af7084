"""Findings that need no partition to be read: markers and frontiers against the catalog, the catalog against disk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ...partitions.partition import partition_path
from ...partitions.timespan import parse_directory_name
from ...store.codec.format import PartitionRecord, PartitionState
from ...store.files.directory import children
from ...survey.markers import Marks, ranges_text
from .facts import StoreFacts, TopicFacts, log_address, partition_name
from .tables import AuditFinding, finding

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
    for topic in facts.topics.values():
        for target, marks in sorted(topic.marks.items()):
            for mark in marks:
                address = f"{log_address(topic.name, topic.topic_id, mark.start_ms)}, ledger {target}"
                if mark.doubled:
                    message = f"more than one marker: entries {ranges_text(mark.doubled)}"
                    yield finding("doubled-marker", address, message, len(mark.doubled))
                yield from _targets(facts, topic, target, mark, address, gone)
    for (topic_id, start_ms), markers in sorted(gone.items()):
        address = log_address(facts.topic_name(topic_id), topic_id, start_ms)
        what = f"{markers:,} markers that are kept point" if markers else "the record of what has fired points"
        message = f"the partition is not in the catalog; {what} into it"
        yield finding("deleted-too-early", address, message, markers)


def _targets(
    facts: StoreFacts, topic: TopicFacts, target: int, mark: Marks, address: str, gone: dict[tuple[int, int], int]
) -> Iterator[AuditFinding]:
    place = topic.topic_id, mark.start_ms
    if mark.start_ms in facts.unreadable_partitions or place in facts.unjudged:
        return
    if mark.start_ms not in facts.partitions:
        gone[place] = gone.get(place, 0) + mark.markers
        return
    frontier = facts.frontiers.get(place)
    if frontier is None:
        message = f"{mark.markers:,} markers point into a log of which nothing has fired"
        yield finding("dangling-marker", address, message, mark.markers)
    elif frontier.ledger_id != target:
        message = f"{mark.markers:,} markers; the topic's log in that partition is ledger {frontier.ledger_id}"
        yield finding("dangling-marker", address, message, mark.markers)


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
