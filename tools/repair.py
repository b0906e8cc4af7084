"""`duelog repair`: what cannot be read is given up, written to a file with its reason, and the rest made usable.

In this order: files whose pages are broken are written anew from what can be reached; records of the catalog that do
not match their checksums are removed, and made anew where other records say what they were; holes and damaged bodies
of every ledger are given up (cleanup/mend.py); what points at them is acknowledged for every subscription, or
cancelled where it has not fired; counts are counted again; snapshots of a partition that was changed are removed; a
damaged journal is given up (repair_journal.py). Then the store is checked: what is left is reported, and needs a
backup.

Deliberately not here: guessing. A frontier that cannot be read is left, since messages would fire twice or never.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pyroaring import BitMap

from .. import Finding, StoreConfig
from ..cleanup.mend import GivenUp, Mended, mend_ledger
from ..opening import StoreLock, read_identity, stored_span_ms
from ..partitions.due_column import dues_of
from ..partitions.partition import partition_path
from ..partitions.timespan import directory_name, parse_directory_name
from ..snapshot.inspection import SnapshotState, inspect_snapshots
from ..snapshot.writer import remove_snapshots
from ..store import cancellations, catalog
from ..store import format as fmt
from ..store.directory import make_directory, move, remove_tree
from ..store.environment import Environment
from ..store.errors import CorruptEntry, DamagedStore
from ..store.format import CorruptRecord, FrontierRecord, PartitionInfo, PartitionRecord, PartitionState, Table
from ..store.pages import read_values
from ..store.run import Run, RunKind
from ..store.scan import runs
from ..store.transaction import Transaction
from .repair_catalog import mend_catalog
from .repair_claims import recount, settle
from .repair_journal import JournalRepair
from .store_check import check_file, check_store, environments


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair did: its steps in words, how many things it gave up, and the findings that are left."""

    actions: list[str]
    given_up: int
    left: list[Finding]


def repair_store(path: Path, output: Path) -> RepairReport:
    """Repair the store in `path`, which no process has open; `output` is added to, where anything is given up.

    May be repeated; does nothing to a store without findings, and stops where it would have to guess (`left` says what
    is left). O(bytes). Raises StoreLocked, FormatMismatch, DamagedStore (the STORE file cannot be read), StoreFull.
    """
    lock = StoreLock(path)
    try:
        config = StoreConfig(partition_ms=stored_span_ms(path) or StoreConfig().partition_ms)
        identity = read_identity(path, config)
        if not check_store(path, deep=True):
            return RepairReport([], 0, [])
        work = _Repair(path, output, identity.store_id, config)
        try:
            work.run()
        except (DamagedStore, CorruptRecord) as error:
            work.actions.append(f"stopped: {error}")
    finally:
        lock.release()
    return RepairReport(work.actions, work.given_up, check_store(path, deep=True))


class _Repair:
    def __init__(self, path: Path, output: Path, store_id: bytes, config: StoreConfig) -> None:
        self._path = path
        self._output = output
        self._store_id = store_id
        self._config = config
        self.actions: list[str] = []
        self.given_up = 0
        self._journal = JournalRepair(path, store_id, self._give_up)

    def run(self) -> None:
        # Before LMDB opens any of them: what is broken may kill the process.
        self._rewrite_file(self._path / "main", "main", PartitionInfo(fmt.FORMAT_VERSION, self._store_id, 0, 0, 0))
        for directory in environments(self._path)[1:]:
            start_ms, generation = parse_directory_name(directory.parent.name), int(directory.name[1:])
            info = PartitionInfo(
                fmt.FORMAT_VERSION, self._store_id, start_ms, start_ms + self._config.partition_ms, generation
            )
            self._rewrite_file(directory, _name(start_ms), info)
        with closing(Environment(self._path / "main", name="main")) as main:
            self._describe(main, PartitionInfo(fmt.FORMAT_VERSION, self._store_id, 0, 0, 0))
            self.actions += mend_catalog(main, self._path, self._give_up)
            markers = _Markers(main)
            partitions = self._partitions(main)
            lost: dict[int, BitMap] = {}
            for start_ms, record in partitions:
                lost.update(self._partition(main, start_ms, record, markers))
            self.actions += settle(main, lost, self._give_up)
            for start_ms, record in partitions:
                with closing(self._open(start_ms, record)) as environment:
                    self.actions += recount(main, environment, start_ms)
        self.actions += self._journal.end()

    def _partitions(self, main: Environment) -> list[tuple[int, PartitionRecord]]:
        with main.read() as raw:
            return [row for row in catalog.partitions(raw) if row[1].state is not PartitionState.DELETING]

    def _open(self, start_ms: int, record: PartitionRecord) -> Environment:
        return Environment(partition_path(self._path, start_ms, record.generation), name=_name(start_ms))

    def _give_up(self, lost: GivenUp) -> None:
        self.given_up += 1
        fields = {"environment": lost.environment, "ledger": lost.ledger_id, "entry": lost.entry_id}
        line = {**fields, "reason": lost.reason, "raw": base64.b64encode(lost.raw).decode()}
        with self._output.open("a") as file:
            file.write(json.dumps(line) + "\n")

    # -- files -------------------------------------------------------------------------------------

    def _rewrite_file(self, directory: Path, name: str, info: PartitionInfo) -> None:
        """Write a file with broken pages, or none, anew from what can be reached of it."""
        if directory.exists() and not list(check_file(directory)):
            return
        values = list(read_values(directory)) if (directory / "data.mdb").is_file() else []
        staged = self._path / "staging" / f"repair-{name.replace(' ', '-')}"
        remove_tree(staged)
        make_directory(staged.parent)

        def fill(transaction: Transaction) -> None:
            transaction.put(fmt.PARTITION_INFO_KEY, info.pack())
            for key, value in values:
                if 0 < len(key) < 511 and key != fmt.PARTITION_INFO_KEY:
                    transaction.raw.put(key, value)

        with closing(Environment(staged, name=name, create=True)) as environment:
            environment.write(fill)
        make_directory(directory.parent)
        if directory.exists():
            trash = self._path / "trash" / f"repair-{directory.parent.name}-{directory.name}"
            make_directory(trash.parent)
            remove_tree(trash)
            move(directory, trash)
        move(staged, directory)
        self.given_up += 1
        self.actions.append(f"{name}: written anew with the {len(values)} records that could be reached")

    def _describe(self, environment: Environment, info: PartitionInfo) -> None:
        try:
            fields = environment.get(fmt.PARTITION_INFO_KEY)
        except CorruptRecord:
            fields = None
        if fields != info.pack():
            environment.write(lambda transaction: transaction.put(fmt.PARTITION_INFO_KEY, info.pack()))
            self.actions.append(f"{environment.name}: described anew")

    # -- partitions --------------------------------------------------------------------------------

    def _partition(
        self, main: Environment, start_ms: int, record: PartitionRecord, markers: _Markers
    ) -> dict[int, BitMap]:
        """Mend one partition; the entries of its logs that were given up, by ledger."""
        path = partition_path(self._path, start_ms, record.generation)
        info = PartitionInfo(fmt.FORMAT_VERSION, self._store_id, start_ms, record.end_ms, record.generation)
        self._rewrite_file(path, _name(start_ms), info)
        lost: dict[int, BitMap] = {}
        with closing(self._open(start_ms, record)) as environment:
            self._describe(environment, info)
            self._drop_records(environment)
            logs = self._logs(main, environment, start_ms)
            if record.state is PartitionState.OPEN:
                self._journal.give_up_logs(environment.name, start_ms, set(logs.values()))
            changed = self._drop_unknown_runs(environment, set(logs.values()))
            for topic_id, ledger_id in logs.items():
                mended = self._mend_log(main, environment, start_ms, topic_id, ledger_id, markers)
                if mended.holes or mended.bodies:
                    changed = True
                    lost[ledger_id] = mended.holes | mended.bodies
                    self.actions.append(f"{environment.name}, ledger {ledger_id}: gave up {len(lost[ledger_id])}")
            damaged = any(
                each.state is SnapshotState.DAMAGED for each in inspect_snapshots(environment, read_parts=True)
            )
            if (changed or damaged) and (removed := remove_snapshots(environment)):
                self.actions.append(f"{environment.name}: removed {removed} records of snapshots")
        return lost

    def _drop_records(self, environment: Environment) -> None:
        """Records of a partition that do not match their checksums; its logs are found again from the frontiers."""
        bad = []
        with environment.read() as raw:
            for key, value in raw.cursor():
                if bytes(key)[0] in (Table.RUN, Table.SNAPSHOT_PART, Table.SNAPSHOT_META):
                    continue
                try:
                    fmt.unseal(bytes(key), value)
                except CorruptRecord as error:
                    bad.append(bytes(key))
                    self._give_up(GivenUp(environment.name, 0, None, str(error), bytes(key) + bytes(value)))
        if bad:
            environment.write(lambda transaction: [transaction.delete(key) for key in bad])
            self.actions.append(f"{environment.name}: removed {len(bad)} damaged records")

    def _logs(self, main: Environment, environment: Environment, start_ms: int) -> dict[int, int]:
        """Topic id -> ledger id, from the partition and, what it lacks, from the frontiers."""
        with environment.read() as raw:
            rows = catalog.rows(raw, fmt.prefix(Table.LOG))
            logs = {fmt.trailing_u32(key): fmt.unpack_u64(fields) for key, fields in rows}
        missing = {}
        with main.read() as raw:
            for topic_id, start, frontier in catalog.frontiers(raw):
                if start == start_ms and logs.get(topic_id) != frontier.ledger_id:
                    missing[topic_id] = frontier.ledger_id

        def register(transaction: Transaction) -> None:
            for topic_id, ledger_id in missing.items():
                transaction.put(fmt.log_key(topic_id), fmt.pack_u64(ledger_id))

        if missing:
            environment.write(register)
            self.actions.append(f"{environment.name}: {len(missing)} logs registered again")
        return {**logs, **missing}

    def _drop_unknown_runs(self, environment: Environment, ledgers: set[int]) -> bool:
        bad = []
        with environment.read() as raw:
            cursor = raw.cursor()
            more = cursor.set_range(fmt.RUN_PREFIX)
            while more:
                key = bytes(cursor.key())
                ledger_id, first = fmt.split_run_key(key)
                if ledger_id not in ledgers:
                    bad.append(key)
                    reason = "its ledger is in no catalog"
                    self._give_up(GivenUp(environment.name, ledger_id, first, reason, bytes(cursor.value())))
                more = cursor.next()
        if bad:
            environment.write(lambda transaction: [transaction.raw.delete(key) for key in bad])
            self.actions.append(f"{environment.name}: removed {len(bad)} runs of unknown ledgers")
        return bool(bad)

    def _mend_log(
        self, main: Environment, environment: Environment, start_ms: int, topic_id: int, ledger_id: int,
        markers: _Markers,
    ) -> Mended:  # fmt: skip
        known = markers.dues.get(ledger_id, {})
        with main.read() as raw:
            frontier = catalog.frontier(raw, topic_id, start_ms)
            named = cancellations.members(raw, Table.CANCELLED, ledger_id)
            named |= cancellations.members(raw, Table.ADMITTED, ledger_id)
        least = [0 if frontier is None else frontier.seen, max(named, default=-1) + 1, max(known, default=-1) + 1]
        least.append(self._journal.least_entries(start_ms, ledger_id))
        for snapshot in inspect_snapshots(environment, ledger_id):
            if snapshot.metadata is not None:
                least.append(snapshot.metadata.tail)
        mended = mend_ledger(
            environment, ledger_id, least_entries=max(least), base_ms=start_ms, dues=known, give_up=self._give_up
        )
        self._journal.give_up_holes(environment.name, start_ms, ledger_id, mended.holes)
        passed = BitMap() if frontier is None else _passed(environment, frontier, mended.bodies)
        unfired = (mended.holes | mended.bodies) - BitMap(known) - passed
        if unfired:
            main.write(lambda transaction: cancellations.add(transaction, Table.CANCELLED, ledger_id, unfired))
        return mended


def _passed(environment: Environment, frontier: FrontierRecord, entries: BitMap) -> BitMap:
    """Those of `entries`, whose due times can be read, that the frontier says have fired."""
    found = BitMap()
    ids = np.frombuffer(entries.to_array(), dtype=np.uint32)
    for entry_id, due_ms in zip(ids.tolist(), dues_of(environment, frontier.ledger_id, ids).tolist(), strict=True):
        if entry_id < frontier.seen and (due_ms, entry_id) <= (frontier.due_ms, frontier.entry_id):
            found.add(entry_id)
    return found


class _Markers:
    """What the markers of the main logs point at: due times by entry, by ledger of a partition log."""

    def __init__(self, main: Environment) -> None:
        self.dues: dict[int, dict[int, int]] = {}
        with main.read() as raw:
            for run in _runs_of_main(raw, main):
                if run.kind == RunKind.MARKERS:
                    pairs = zip(run.targets().tolist(), run.dues().tolist(), strict=True)
                    self.dues.setdefault(run.target, {}).update(pairs)


def _runs_of_main(raw: object, main: Environment) -> Iterator[Run]:
    for key, _ in catalog.rows(raw, fmt.prefix(Table.LEDGER)):  # type: ignore[arg-type]
        for run in runs(raw, main.name, fmt.trailing_u64(key)):  # type: ignore[arg-type]
            if not isinstance(run, CorruptEntry):
                yield run


def _name(start_ms: int) -> str:
    return f"partition {directory_name(start_ms)}"
