"""The audit of what `duelog export` wrote: the same judgement of every log, from Parquet files in place of a store.

An export has the sealed partitions and what the main environment said at one time. What it has not cannot be judged:
open partitions, pages, records of the catalog, directories, and gaps in main logs (a marker in one is a lost message
here). Where the export was filtered, entries that are not in it are not taken for missing.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from ...cleanup.log_claims import bitmap_of
from ...partitions.timespan import parse_directory_name
from ...store.codec.format import CursorRecord, LedgerRecord, LedgerState, PartitionRecord, PartitionState
from ...store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from ..transfer.export_layout import Export, ExportedFile, open_export
from .audit_tables import Audit, finding
from .facts import UNTIMED, KeptLedger, MarkerRun, StoreFacts, TopicFacts, count_letters
from .partition_audit import LogResult, LogTask, PartitionResult, between, consecutive, tally_log
from .store_audit import Gathering, log_tasks

_COLUMNS = [
    "topic_id", "ledger_id", "entry_id", "due_ms", "body_bytes", "dropped", "withdrawn", "conditional", "reason",
]  # fmt: skip


def audit_export(path: Path, *, as_of_ms: int | None = None) -> Audit:
    """Audit the export in `path`, by the time that it was made, or as of another.

    Raises InvalidArgument for what is no export, FormatMismatch, DamagedStore for a file that is not as it was written.
    """
    export = open_export(path)
    as_of_ms = int(export.manifest["exported_ms"]) if as_of_ms is None else as_of_ms
    facts = _facts(export)
    gathering = Gathering(facts, Audit(str(path), as_of_ms, time.time_ns() // 1_000_000, "export"))
    filtered = bool(export.manifest.get("filtered", False))
    for partition in export.manifest["partitions"]:
        start_ms = parse_directory_name(partition["partition"])
        files = [file for file in export.message_files if file.partition == partition["partition"]]
        logs = [
            log._replace(issues=[each for each in log.issues if not (filtered and each.code == "missing-entries")])
            for log in _logs(export, files, facts, start_ms, as_of_ms)
        ]
        gathering.take(PartitionResult(start_ms, "", int(partition.get("file_bytes", 0)), logs, []), "whole")
    audit = gathering.finish()
    audit.held = [row for row in audit.held if row.reason != "pending"]
    audit.dead_letters = count_letters(
        (row["topic"], row["subscription"], row["cause"], row["dead_ms"])
        for batch in export.batches("dead_letters")
        for row in batch.select(["topic", "subscription", "cause", "dead_ms", "reason"]).to_pylist()
        if row["reason"] is None
    )
    return audit


def _facts(export: Export) -> StoreFacts:
    facts = StoreFacts()
    for row in _rows(export, "partitions"):
        state = PartitionState[row["state"].upper()]
        record = PartitionRecord(row["end_ms"], row["generation"], state, row["holders"] or 0, row["created_ms"])
        facts.partitions[row["start_ms"]] = record
    for row in _rows(export, "frontiers"):
        facts.frontiers[row["topic_id"], row["start_ms"]] = FrontierRecord(
            row["ledger_id"], row["due_ms"], row["entry_id"], row["seen"], row["fired"], row["marker_ledger"],
            row["marker_entry"], int(row["released"]),
        )  # fmt: skip
        both = BitMap.deserialize(row["cancelled"]), BitMap.deserialize(row["admitted"])
        facts.withdrawn[row["ledger_id"]] = both
    for row in _rows(export, "acknowledgements"):
        facts.acknowledged.setdefault(row["subscription_id"], {})[row["ledger_id"]] = row["entries"]
    table = export.table("markers")
    damaged = set()
    for row in table.filter(table.column("reason").is_valid()).to_pylist():
        address = f"main, ledger {row['ledger_id']}, entry {row['entry_id']}"
        facts.findings.append(finding("corrupt-entry", address, row["reason"], 1))
        damaged.add(row["ledger_id"])
    markers = _markers(table, int(export.manifest["partition_ms"]))
    retention = export.manifest.get("retention", {})  # exports of earlier versions say nothing of it
    for row in _rows(export, "ledgers"):
        if row["topic"] is None or row["state"] == "trimming":
            continue
        topic = facts.topics.setdefault(row["topic_id"], TopicFacts(row["topic_id"], row["topic"]))
        topic.complete &= row["ledger_id"] not in damaged
        if policies := retention.get(str(topic.topic_id)):
            topic.retention = int(policies[0]), int(policies[1])
        topic.ledgers.append(_ledger(row, markers.get(row["ledger_id"], [])))
    for row in _rows(export, "subscriptions"):
        if row["topic_id"] in facts.topics:
            mark = row["mark_delete_ledger"], row["mark_delete_entry"] + 1
            cursor = CursorRecord(row["subscription_id"], row["created_ms"], *mark, int(row["paused"]))
            facts.topics[row["topic_id"]].subscriptions.append((row["subscription"], cursor))
    for topic in facts.topics.values():
        facts.take_markers(topic, markers)
    return facts


def _rows(export: Export, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = export.table(table).to_pylist()
    return found


def _ledger(row: dict[str, Any], markers: list[MarkerRun]) -> KeptLedger:
    state = LedgerState[row["state"].upper()]
    record = LedgerRecord(row["created_ms"], row["closed_ms"], row["entries"], row["stored_bytes"], state)
    last = markers[-1].first_entry + len(markers[-1].entries) if markers else 0
    entries = max(record.entries, last)  # of an open ledger only its markers are known
    messages = entries - sum(len(run.entries) for run in markers)
    return KeptLedger(row["ledger_id"], record, entries, row["stored_bytes"], messages)


def _markers(table: pa.Table, span_ms: int) -> dict[int, list[MarkerRun]]:
    """Runs of markers by the ledger that they stand in; what could not be read is left out."""
    table = table.filter(table.column("reason").is_null())
    if not table.num_rows:
        return {}
    table = table.sort_by([("ledger_id", "ascending"), ("entry_id", "ascending")])
    ledgers, ids, targets, entries, dues = (
        table.column(name).to_numpy() for name in ("ledger_id", "entry_id", "target_ledger", "target_entry", "due_ms")
    )
    fired = table.column("fired_ms").fill_null(UNTIMED).to_numpy()
    bases = dues - dues % span_ms
    breaks = np.diff(ids) != 1
    for column in (ledgers, targets, bases, fired):
        breaks |= np.diff(column) != 0
    found: dict[int, list[MarkerRun]] = {}
    for start, limit in between(breaks):
        run = MarkerRun(int(ids[start]), int(targets[start]), int(bases[start]), int(fired[start]),
                        entries[start:limit].astype(np.uint32), dues[start:limit])  # fmt: skip
        found.setdefault(int(ledgers[start]), []).append(run)
    return found


def _logs(
    export: Export, files: list[ExportedFile], facts: StoreFacts, start_ms: int, as_of_ms: int
) -> Iterator[LogResult]:
    if not files:
        return
    table = pa.concat_tables([export.messages(file, _COLUMNS) for file in files])
    table = table.sort_by([("topic_id", "ascending"), ("ledger_id", "ascending"), ("entry_id", "ascending")])
    tasks = {task.frontier.ledger_id: task for task in log_tasks(facts, start_ms)}
    ledgers = table.column("ledger_id").to_numpy()
    for start, limit in between(np.diff(ledgers) != 0):
        rows = table.slice(start, limit - start)
        ledger_id = int(ledgers[start])
        task = tasks.get(ledger_id)
        if task is None:
            withdrawn = bitmap_of(rows.filter(rows.column("withdrawn")).column("entry_id").to_numpy())
            task = LogTask.unknown(int(rows.column("topic_id")[0].as_py()), ledger_id, withdrawn, BitMap())
        sizes = rows.column("body_bytes").fill_null(0).to_numpy()
        dropped = rows.column("dropped").fill_null(False).to_numpy()
        damaged = np.flatnonzero(rows.column("reason").is_valid().to_numpy()).tolist()
        batches = consecutive(
            rows.column("entry_id").to_numpy(),
            rows.column("due_ms").fill_null(UNREADABLE_DUE).to_numpy(),
            np.where(dropped, 0, np.maximum(sizes, 1)),
            rows.column("conditional").fill_null(False).to_numpy(),
            {row: rows.column("reason")[row].as_py() for row in damaged},
        )
        yield tally_log(batches, task, as_of_ms)
