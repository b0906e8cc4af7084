"""Every invariant of a store, looked at from outside: problems come as values, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb
import numpy as np
from pyroaring import BitMap

from duelog.partitions.due_column import DueBatch, scan_dues
from duelog.partitions.partition import Partition
from duelog.store import catalog
from duelog.store import format as fmt
from duelog.store.body import decode_body
from duelog.store.cancellations import members
from duelog.store.environment import Environment
from duelog.store.errors import CorruptEntry, DamagedStore
from duelog.store.format import CorruptRecord, FrontierRecord, LedgerState, PartitionRecord, PartitionState
from duelog.store.ledger import HELD, find_tail
from duelog.store.run import Run, RunKind
from duelog.store.scan import runs

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: `severity` is "error" (something is lost or wrong) or "warning" (something is left over).

    `code` names the kind, `address` says where, `message` what, `advice` what to do about it.
    """

    severity: str
    code: str
    address: str
    message: str
    advice: str


REPAIR = "run `duelog repair` on a copy of the store, or restore a backup"


def check(engine: Engine, *, deep: bool = False) -> Iterator[Finding]:
    """Findings of an open store; `deep` also reads and decodes every body. Runs beside producers, not beside a tick."""
    with engine.maintenance.lock:
        findings = list(_Check(engine, deep).run())
    return iter(findings)


class _Check:
    def __init__(self, engine: Engine, deep: bool) -> None:
        self._engine = engine
        self._main = engine.main
        self._deep = deep
        self._records: dict[int, PartitionRecord] = {}
        self._frontiers: dict[tuple[int, int], FrontierRecord] = {}
        self._topics: dict[int, str] = {}
        self._raw: lmdb.Transaction
        self._markers: dict[int, BitMap] = {}  # partition log's ledger id -> entries that markers point at

    def run(self) -> Iterator[Finding]:
        # One transaction for all of main, so that what another process or a producer writes meanwhile is no finding.
        # Partitions are read after it began, and hold whatever it knows of: entries are on disk before they fire.
        with self._main.read() as self._raw:
            try:
                yield from self._catalog()
            except CorruptRecord as error:
                yield Finding("error", "corrupt-record", "main", str(error), REPAIR)
                return
            yield from self._main_logs()
            yield from self._partitions()
            yield from self._cursors()
            yield from self._set_aside()

    @contextmanager
    def _read_main(self) -> Iterator[lmdb.Transaction]:
        yield self._raw

    def _catalog(self) -> Iterator[Finding]:
        with self._read_main() as raw:
            self._records = dict(catalog.partitions(raw))
            for topic_id, start_ms, record in catalog.frontiers(raw):
                self._frontiers[topic_id, start_ms] = record
            for key, fields in catalog.rows(raw, fmt.prefix(fmt.Table.TOPIC_NAME)):
                self._topics[fmt.trailing_u32(key)] = fields.decode()
        for (topic_id, start_ms), _ in self._frontiers.items():
            if start_ms not in self._records:
                yield Finding(
                    "error",
                    "frontier-without-partition",
                    f"topic {topic_id}, partition {start_ms}",
                    "a frontier names a partition that is not in the catalog",
                    REPAIR,
                )
        for directory in self._engine.partitions.unregistered():
            yield Finding(
                "warning",
                "orphan-directory",
                str(directory),
                "is not in the catalog",
                "it is removed when the store is next opened for writing",
            )

    # -- main logs -------------------------------------------------------------------------------

    def _main_logs(self) -> Iterator[Finding]:
        for topic_id, name in self._topics.items():
            with self._read_main() as raw:
                ledgers = catalog.ledgers(raw, topic_id)
                if [record.state for _, record in ledgers].count(LedgerState.OPEN) != 1:
                    yield Finding("error", "open-ledgers", name, "has not exactly one open ledger", REPAIR)
                for ledger_id, record in ledgers:
                    if record.state is LedgerState.TRIMMING:
                        continue
                    tail = find_tail(raw, self._main.name, ledger_id)
                    if record.state is LedgerState.CLOSED and tail != record.entries:
                        message = f"was closed with {record.entries} entries, has {tail}"
                        yield Finding("error", "ledger-length", f"{name}, ledger {ledger_id}", message, REPAIR)
                    for run in self._dense(raw, self._main, ledger_id):
                        if isinstance(run, Finding):
                            yield run
                        elif run.kind == RunKind.MARKERS:
                            yield from self._check_markers(run, topic_id)
                        elif self._deep:
                            yield from self._bodies(run)

    def _dense(self, raw: object, environment: Environment, ledger_id: int) -> Iterator[Run | Finding]:
        """The runs of a ledger, with a finding for each that is damaged, missing or overlaps."""
        expected = 0
        for run in runs(raw, environment.name, ledger_id):  # type: ignore[arg-type]
            if isinstance(run, CorruptEntry):
                yield _corrupt(run)
                expected = -1
                continue
            if expected not in (-1, run.first_entry):
                message = f"entry {run.first_entry} follows entry {expected - 1}"
                yield Finding("error", "gap", f"{environment.name}, ledger {ledger_id}", message, REPAIR)
            expected = run.limit
            yield run

    def _bodies(self, run: Run) -> Iterator[Finding]:
        for entry_id, body in run.bodies():
            if isinstance(body, CorruptEntry):
                yield _corrupt(body)
            elif body is not None:
                try:
                    decode_body(body)
                except ValueError as error:
                    yield _corrupt(CorruptEntry(run.environment, run.ledger_id, entry_id, str(error)))

    def _check_markers(self, run: Run, topic_id: int) -> Iterator[Finding]:
        known = self._markers.setdefault(run.target, BitMap())
        targets = BitMap(run.targets().tolist())
        address = f"main, ledger {run.ledger_id}, entries {run.first_entry} to {run.limit - 1}"
        doubled = known & targets
        if doubled or len(targets) < run.count:
            message = f"markers of ledger {run.target} doubled: entries {list(doubled)[:10]}"
            yield Finding("error", "doubled-marker", address, message, REPAIR)
        known |= targets
        start_ms = run.base_ms
        frontier = self._frontiers.get((topic_id, start_ms))
        if frontier is None or start_ms not in self._records:
            yield Finding(
                "error", "dangling-marker", address, f"point into partition {start_ms}, which is gone", REPAIR
            )
            return
        if frontier.ledger_id != run.target:
            message = f"point into ledger {run.target}, the frontier is of ledger {frontier.ledger_id}"
            yield Finding("error", "dangling-marker", address, message, REPAIR)
        entries, dues = run.targets(), run.dues()
        beyond = (entries >= frontier.seen) | (dues > frontier.due_ms)
        beyond |= (dues == frontier.due_ms) & (entries.astype(np.int64) > frontier.entry_id)
        if beyond.any():
            message = f"{int(beyond.sum())} markers point past the frontier of partition {start_ms}"
            yield Finding("error", "marker-past-frontier", address, message, REPAIR)

    # -- partitions --------------------------------------------------------------------------------

    def _partitions(self) -> Iterator[Finding]:
        for start_ms, record in self._records.items():
            partition = self._engine.partitions.get(start_ms)
            if record.state is PartitionState.DELETING or partition is None:
                continue
            try:
                with self._engine.partitions.lease(partition):
                    yield from self._partition(partition, record)
            except (DamagedStore, CorruptRecord) as error:
                if self._engine.partitions.registered(partition):
                    yield Finding("error", "partition", partition.name, str(error), REPAIR)

    def _partition(self, partition: Partition, record: PartitionRecord) -> Iterator[Finding]:
        holders = 0
        for log in partition.logs():
            frontier = self._frontiers.get((log.topic_id, partition.start_ms))
            address = f"{partition.name}, topic {log.topic_id}, ledger {log.ledger_id}"
            with partition.environment.read() as raw:
                tail = find_tail(raw, partition.name, log.ledger_id)
                for run in self._dense(raw, partition.environment, log.ledger_id):
                    if isinstance(run, Finding):
                        yield run
                    elif self._deep:
                        yield from self._bodies(run)
            if frontier is None:
                continue
            if log.topic_id in self._topics:
                holders += not frontier.released
            if frontier.ledger_id != log.ledger_id:
                message = f"the frontier is of ledger {frontier.ledger_id}"
                yield Finding("error", "frontier-ledger", address, message, REPAIR)
            if tail < frontier.seen:
                message = f"ends at entry {tail}, before its frontier at {frontier.seen}: entries were lost"
                yield Finding("error", "lost-entries", address, message, "restore a backup")
            if log.topic_id in self._topics:
                yield from self._fired(partition, log.topic_id, log.ledger_id, tail, frontier, address)
        if record.state is PartitionState.CLOSED and holders != record.holders:
            message = f"{holders} topics hold it, the catalog says {record.holders}"
            yield Finding("error", "holders", partition.name, message, REPAIR)

    def _fired(
        self, partition: Partition, topic_id: int, ledger_id: int, tail: int, frontier: FrontierRecord, address: str
    ) -> Iterator[Finding]:
        """What the frontier says has fired against the markers that are there."""
        passed = BitMap()
        damaged = False
        with self._read_main() as raw:
            admitted = members(raw, fmt.Table.ADMITTED, ledger_id)
        for batch in scan_dues(partition.environment, ledger_id, 0, min(tail, frontier.seen), admitted):
            if not isinstance(batch, DueBatch):
                damaged = True
                continue
            first, dues = batch
            entries = np.arange(first, first + len(dues), dtype=np.int64)
            done = (dues < frontier.due_ms) | ((dues == frontier.due_ms) & (entries <= frontier.entry_id))
            done &= dues != HELD
            passed.update(entries[done].astype(np.uint32))
        passed -= self._not_to_fire(ledger_id)
        if len(passed) != frontier.fired and not damaged:
            message = f"{frontier.fired} entries have fired, {len(passed)} lie before the frontier"
            yield Finding("error", "fired-count", address, message, REPAIR)
        marked = self._markers.get(ledger_id, BitMap())
        stray = marked - passed
        if stray and not damaged:
            message = f"{len(stray)} markers of entries that have not fired: {list(stray)[:10]}"
            yield Finding("error", "stray-marker", address, message, REPAIR)
        with self._read_main() as raw:
            kept = [ledger for ledger, row in catalog.ledgers(raw, topic_id) if row.state is not LedgerState.TRIMMING]
            first_ledger = min(kept, default=0)
        kept_all = frontier.fired and frontier.marker_ledger >= first_ledger
        if kept_all and frontier.last_marker is not None and not marked:
            yield Finding("error", "lost-marker", address, f"its last marker {frontier.last_marker} is gone", REPAIR)

    def _not_to_fire(self, ledger_id: int) -> BitMap:
        """Entries before the frontier that did not fire for a reason: set aside, or cancelled."""
        with self._read_main() as raw:
            first, limit = fmt.set_aside_key(ledger_id, 0), fmt.set_aside_key(ledger_id + 1, 0)
            cancelled = members(raw, fmt.Table.CANCELLED, ledger_id)
            return cancelled | BitMap([fmt.trailing_u32(key) for key, _ in catalog.rows(raw, first[:9], first, limit)])

    # -- the rest ----------------------------------------------------------------------------------

    def _cursors(self) -> Iterator[Finding]:
        with self._read_main() as raw:
            found = list(catalog.cursors(raw))
        for topic_id, name, record in found:
            address = f"topic {topic_id}, subscription {name!r}"
            if topic_id not in self._topics:
                yield Finding("error", "cursor-without-topic", address, "its topic does not exist", REPAIR)
                continue
            with self._read_main() as raw:
                ledgers = catalog.ledgers(raw, topic_id)
                acked = dict(catalog.acked(raw, record.subscription_id))
                tails = {ledger_id: find_tail(raw, self._main.name, ledger_id) for ledger_id, _ in ledgers}
            mark_delete = record.mark_delete
            if ledgers and mark_delete.ledger_id > ledgers[-1][0]:
                yield Finding("error", "cursor", address, f"mark-delete {mark_delete} is past the main log", REPAIR)
            elif mark_delete.entry_id >= tails.get(mark_delete.ledger_id, mark_delete.entry_id + 1):
                yield Finding("error", "cursor", address, f"mark-delete {mark_delete} is past its ledger", REPAIR)
            for ledger_id, row in acked.items():
                if ledger_id in tails and BitMap.deserialize(row).max() >= tails[ledger_id]:
                    message = f"acknowledged entries past the end of ledger {ledger_id}"
                    yield Finding("error", "cursor", address, message, REPAIR)

    def _set_aside(self) -> Iterator[Finding]:
        addresses: dict[tuple[int, int], str] = {}
        for key, fields in catalog.rows(self._raw, fmt.prefix(fmt.Table.SET_ASIDE)):
            addresses[fmt.trailing_u64(key[:9]), fmt.trailing_u32(key)] = fields.decode(errors="replace")
        addresses.update({(ledger, entry): reason for ledger, entry, reason in self._engine.set_aside.items()})
        for (ledger_id, entry_id), reason in sorted(addresses.items()):
            yield Finding(
                "error",
                "set-aside",
                f"ledger {ledger_id}, entry {entry_id}",
                f"could not be read and was not delivered: {reason}",
                "restore it from a backup, or run `duelog repair` to give it up",
            )


def _corrupt(error: CorruptEntry) -> Finding:
    address = f"{error.environment}, ledger {error.ledger_id}, entry {error.entry_id}"
    return Finding("error", "corrupt-entry", address, error.reason, REPAIR)
