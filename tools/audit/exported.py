"""The audit of what `duelog export` wrote: the same judgement of every log, from Parquet files in place of a store.

An export has the sealed partitions and what the main environment said at one time. What it has not cannot be judged:
open partitions, pages, records of the catalog, directories, and gaps in main logs (a marker in one is a lost message
here). Where the export was filtered, entries that are not in it are not taken for missing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from ...cleanup.claims import acknowledged_by_all
from ...partitions.timespan import parse_directory_name
from ...store.codec.format import CursorRecord, LedgerRecord, LedgerState, PartitionRecord, PartitionState
from ...store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from ..transfer.export_layout import Export, ExportedFile, open_export
from .checking.catalog_findings import marker_findings, reference_findings
from .checking.holding import judge_holding
from .checking.log_tally import Batch, Issue, LogResult, LogTask, tally_log
from .checking.partition_audit import PartitionResult
from .gathering import Gathering
from .reading.facts import KeptLedger, StoreFacts, TopicFacts
from .reading.marks import UNTIMED, MarkerRun, TopicMarkers, bitmap_of
from .survey import log_tasks
from .tables import Audit, LatenessRow, SubscriptionRow, finding

_COLUMNS = [
    "topic_id", "ledger_id", "entry_id", "due_ms", "body_bytes", "dropped", "withdrawn", "conditional", "reason",
]  # fmt: skip


def audit_export(path: Path, *, as_of_ms: int | None = None) -> Audit:
    """Audit the export in `path`, by the time that it was made, or as of another.

    Raises InvalidArgument for what is no export, FormatMismatch, DamagedStore for a file that is not as it was written.
    """
    export = open_export(path)
    exported_ms = int(export.manifest["exported_ms"])
    as_of_ms = exported_ms if as_of_ms is None else as_of_ms
    audit = Audit(str(path), as_of_ms, time.time_ns() // 1_000_000, "export")
    facts = _Facts(export, audit).read()
    audit.findings += facts.findings
    gathering = Gathering(facts, audit)
    files: dict[str, list[ExportedFile]] = {}
    for file in export.message_files:
        files.setdefault(file.partition, []).append(file)
    filtered = bool(export.manifest.get("filtered", False))
    for partition in export.manifest["partitions"]:
        start_ms = parse_directory_name(partition["partition"])
        logs = [
            log._replace(issues=[each for each in log.issues if not (filtered and each.code == "missing-entries")])
            for log in _logs(export, files.get(partition["partition"], []), facts, start_ms, as_of_ms)
        ]
        gathering.take(PartitionResult(start_ms, "", int(partition.get("file_bytes", 0)), logs, []), "whole")
    audit.findings += marker_findings(facts)
    audit.findings += reference_findings(facts)
    judged = judge_holding(facts, gathering.pending, as_of_ms)
    audit.held = [row for row in judged.rows if row.reason != "pending"]
    audit.findings += [found for _, found in judged.findings]
    audit.topics = facts.topic_rows()
    audit.lateness = facts.lateness
    gathering.finish()
    return audit


class _Facts:
    """StoreFacts from the tables of an export."""

    def __init__(self, export: Export, audit: Audit) -> None:
        self._export = export
        self._audit = audit
        self._span_ms = int(export.manifest["partition_ms"])
        retention = export.manifest.get("retention", {})  # exports of earlier versions say nothing of it
        self._retention = {int(topic_id): (int(ms), int(size)) for topic_id, (ms, size) in retention.items()}
        self._acked: dict[int, dict[int, bytes]] = {}

    def _rows(self, table: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._export.table(table).to_pylist()
        return found

    def read(self) -> StoreFacts:
        facts = StoreFacts()
        for row in self._rows("partitions"):
            state = PartitionState[row["state"].upper()]
            record = PartitionRecord(row["end_ms"], row["generation"], state, row["holders"] or 0, row["created_ms"])
            facts.partitions[row["start_ms"]] = record
        for row in self._rows("frontiers"):
            place = row["topic_id"], row["start_ms"]
            facts.frontiers[place] = FrontierRecord(
                row["ledger_id"], row["due_ms"], row["entry_id"], row["seen"], row["fired"], row["marker_ledger"],
                row["marker_entry"], int(row["released"]),
            )  # fmt: skip
            both = BitMap.deserialize(row["cancelled"]), BitMap.deserialize(row["admitted"])
            facts.withdrawn[row["ledger_id"]] = both
        for row in self._rows("acknowledgements"):
            self._acked.setdefault(row["subscription_id"], {})[row["ledger_id"]] = row["entries"]
        markers = self._markers()
        self._ledgers(facts, markers)
        self._subscriptions(facts)
        for topic in facts.topics.values():
            self._mark(facts, topic, markers)
        return facts

    def _markers(self) -> dict[int, list[MarkerRun]]:
        """Runs of markers by the ledger that they stand in; what cannot be read is a finding."""
        table = self._export.table("markers")
        for row in table.filter(table.column("reason").is_valid()).to_pylist():
            address = f"main, ledger {row['ledger_id']}, entry {row['entry_id']}"
            self._audit.findings.append(finding("corrupt-entry", address, row["reason"], 1))
        table = table.filter(table.column("reason").is_null()).sort_by(
            [("ledger_id", "ascending"), ("entry_id", "ascending")]
        )
        if not table.num_rows:
            return {}
        ledgers, ids, targets, entries, dues = (
            table.column(name).to_numpy()
            for name in ("ledger_id", "entry_id", "target_ledger", "target_entry", "due_ms")
        )
        fired = table.column("fired_ms").fill_null(UNTIMED).to_numpy()
        bases = dues - dues % self._span_ms
        same = (np.diff(ids) == 1) & (np.diff(ledgers) == 0) & (np.diff(targets) == 0) & (np.diff(bases) == 0)
        same &= np.diff(fired) == 0
        found: dict[int, list[MarkerRun]] = {}
        cuts = [0, *(np.flatnonzero(~same) + 1).tolist(), len(ids)]
        for start, limit in itertools.pairwise(cuts):
            run = MarkerRun(int(ids[start]), int(targets[start]), int(bases[start]), int(fired[start]),
                            entries[start:limit].astype(np.uint32), dues[start:limit])  # fmt: skip
            found.setdefault(int(ledgers[start]), []).append(run)
        return found

    def _ledgers(self, facts: StoreFacts, markers: dict[int, list[MarkerRun]]) -> None:
        for row in self._rows("ledgers"):
            if row["topic"] is None or row["state"] == "trimming":
                continue
            topic = facts.topics.setdefault(row["topic_id"], TopicFacts(row["topic_id"], row["topic"]))
            topic.retention = self._retention.get(topic.topic_id)
            state = LedgerState[row["state"].upper()]
            record = LedgerRecord(row["created_ms"], row["closed_ms"], row["entries"], row["stored_bytes"], state)
            runs = markers.get(row["ledger_id"], [])
            last = runs[-1].first_entry + len(runs[-1].entries) if runs else 0
            entries = max(record.entries, last)  # of an open ledger only its markers are known
            messages = entries - sum(len(run.entries) for run in runs)
            topic.ledgers.append(KeptLedger(row["ledger_id"], record, entries, row["stored_bytes"], messages))

    def _subscriptions(self, facts: StoreFacts) -> None:
        for row in self._rows("subscriptions"):
            topic = facts.topics.get(row["topic_id"])
            if topic is None:
                continue
            ledger_id, entry_id = row["mark_delete_ledger"], row["mark_delete_entry"]
            record = CursorRecord(
                row["subscription_id"], row["created_ms"], ledger_id, entry_id + 1, int(row["paused"])
            )
            topic.subscriptions.append((row["subscription"], record))
            acked = [(record, self._acked.get(record.subscription_id, {}))]
            backlog = sum(
                each.entries - len(acknowledged_by_all(acked, each.ledger_id, each.entries)) for each in topic.ledgers
            )
            self._audit.subscriptions.append(
                SubscriptionRow(topic.name, row["subscription"], backlog, ledger_id, entry_id, row["created_ms"],
                                row["paused"])
            )  # fmt: skip
        self._audit.subscriptions.sort()

    def _mark(self, facts: StoreFacts, topic: TopicFacts, markers: dict[int, list[MarkerRun]]) -> None:
        topic.ledgers.sort()
        damaged = {each.address for each in self._audit.findings}
        gathered = TopicMarkers()
        acked = [(record, self._acked.get(record.subscription_id, {})) for _, record in topic.subscriptions]
        for ledger in topic.ledgers:
            if any(address.startswith(f"main, ledger {ledger.ledger_id}, ") for address in damaged):
                topic.complete = False
            done = acknowledged_by_all(acked, ledger.ledger_id, ledger.entries)
            gathered.add_ledger(markers.get(ledger.ledger_id, []), ledger.entries, done)
        topic.marks = gathered.by_target()
        facts.lateness += [LatenessRow(topic.name, *each) for each in sorted(gathered.lateness().items())]


def _logs(
    export: Export, files: list[ExportedFile], facts: StoreFacts, start_ms: int, as_of_ms: int
) -> Iterator[LogResult]:
    """The result of each log of a partition that the export has rows of."""
    if not files:
        return
    table = pa.concat_tables([export.messages(file, _COLUMNS) for file in files])
    table = table.sort_by([("topic_id", "ascending"), ("ledger_id", "ascending"), ("entry_id", "ascending")])
    tasks = {task.ledger_id: task for task in log_tasks(facts, start_ms)}
    ledgers = table.column("ledger_id").to_numpy()
    cuts = [0, *(np.flatnonzero(np.diff(ledgers)) + 1).tolist(), len(ledgers)]
    for start, limit in itertools.pairwise(cuts):
        rows = table.slice(start, limit - start)
        ledger_id = int(ledgers[start])
        task = tasks.get(ledger_id)
        if task is None:
            entries = rows.filter(rows.column("withdrawn")).column("entry_id").to_numpy()
            none = BitMap().serialize()
            task = LogTask.unknown(
                int(rows.column("topic_id")[0].as_py()), ledger_id, bitmap_of(entries).serialize(), none
            )
        yield tally_log(_batches(rows), task, as_of_ms)


def _batches(rows: pa.Table) -> Iterator[Batch | Issue]:
    """The rows of one log, in order, cut where entries are missing."""
    ids = rows.column("entry_id").to_numpy()
    unreadable = rows.column("due_ms").is_null().to_numpy()
    damaged = rows.column("reason").is_valid().to_numpy()
    dues = rows.column("due_ms").fill_null(UNREADABLE_DUE).to_numpy()
    sizes = rows.column("body_bytes").fill_null(0).to_numpy()
    dropped = rows.column("dropped").fill_null(False).to_numpy()
    sizes = np.where(dropped, 0, np.maximum(sizes, 1))
    conditional = rows.column("conditional").fill_null(False).to_numpy()
    breaks = (np.diff(ids) != 1) | unreadable[1:] | unreadable[:-1]
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(ids)]
    for start, limit in itertools.pairwise(cuts):
        for index in (np.flatnonzero(damaged[start:limit]) + start).tolist():
            reason = rows.column("reason")[index].as_py()
            yield Issue("corrupt-entry", int(ids[index]), reason, 0 if unreadable[index] else 1)
        if not unreadable[start]:
            mask = conditional[start:limit]
            yield Batch(int(ids[start]), dues[start:limit], sizes[start:limit], mask if mask.any() else None)
