"""Entries under repair: first what the write-ahead log has of them, then what cannot be read of a ledger is discarded.

A row of the write-ahead log whose group an environment has not applied yet is applied as opening would, whether its log
leads up to it or not: entries that are missing between are a hole like any other. What was applied is still in the
files until they are used again: it fills what an environment has lost since. A damaged log goes to the trash then,
since what it has lost cannot be told; an intact one stays, and opening finds all of it applied.

The bytes of what is discarded are kept in a file, and its place stays: entry ids are dense and never given out twice,
so a hole is filled with entries that have no body, as compaction leaves them, and a damaged body leaves its run. An
entry of a partition that is discarded before it has fired is cancelled; what points at one that has, and what is
discarded of a main log, is acknowledged for every subscription, so that they go on. Then what has fired, and the topics
that hold a partition, are counted again.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ...delivery.acks import AckSet
from ...partitions import cancellations
from ...snapshot.snapshot_format import SnapshotState, inspect_snapshots
from ...snapshot.writer import remove_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import CursorRecord, LedgerState, PartitionRecord, PartitionState, Table, run_key
from ...store.codec.run import (
    APART_BYTES,
    APART_VERSION,
    FLAG_CONDITIONAL,
    HEADER,
    HEADER_BYTES,
    PackedRun,
    Run,
    RunKind,
    RunLimits,
)
from ...store.config import MIB
from ...store.env.environment import Environment
from ...store.env.memtable import APPLIED_KEY, Reads
from ...store.env.transaction import LmdbTransaction as Transaction
from ...store.errors import CorruptEntry, DamagedStore
from ...store.files.directory import make_directory, move, remove_tree
from ...store.log import catalog
from ...store.log.ledger import MAX_RUN_ENTRIES
from ...store.log.managed_ledger import LedgerLimits, ManagedLedger
from ...store.log.scan import runs
from ...store.wal.segment import MAIN, Group, Row, RowKind, Segment, file_name, numbers_in, place_of, salvage
from ...store.wal.wal_reader import DIRECTORY, read_wal
from ...store.wal.write_batch import bit_change, single_rows
from ...survey.contents import kept_ledgers, main_ledgers, marker_runs, topic_ids, unreadable_bodies
from .repair_files import Account, Discarded
from .repair_records import NO_MARKERS, Marked, OpenLog, PartitionLog, due_column, fired_in, restore_markers

_THE_LOG = "the write-ahead log"


class WalRepair:
    """The log of a store under repair: its rows by environment, and its end."""

    def __init__(self, path: Path, store_id: bytes, oldest: int | None, account: Account) -> None:
        """Read it from the segment `oldest` on (catalog.WAL). Raises FormatMismatch: a later version wrote it."""
        self._path = path
        self._store_id = store_id
        self._oldest = oldest
        self._account = account
        self._damage: str | None = None
        directory = path / DIRECTORY
        needed: list[Group] | None = None
        try:
            needed = read_wal(path, store_id, oldest).groups
        except DamagedStore as error:
            self._damage = f"{error.path.name}: {error.reason}"
        numbers = numbers_in(directory)
        self._last = max([oldest or 0, *numbers])
        """The number of the last segment that there was, or that an environment knows of."""
        salvaged = {group.position: group for number in numbers for group in salvage(directory, number, store_id)}
        if needed is not None:  # what lies behind its end was never told to be stored
            first = place_of(oldest or 0, 0)
            salvaged = {at: group for at, group in salvaged.items() if at < first}
            salvaged |= {group.position: group for group in needed}
        self._rows: dict[int, list[tuple[int, Row]]] = defaultdict(list)
        """By start of the partition, in order: the place of a row's group, and the row."""
        for position, group in sorted(salvaged.items()):
            for row in single_rows(group.rows()):
                self._rows[row.start_ms].append((position, row))

    def apply(self, environment: Environment, start_ms: int) -> None:
        """Have an environment, whose small records are mended, store what it lacks. Once for each."""
        rows = self._rows.pop(start_ms, [])
        fields = environment.get(APPLIED_KEY)
        applied = -1 if fields is None else fmt.unpack_u64(fields)
        if fields is None and start_ms == MAIN:
            applied = place_of(self._oldest or 0, 0) - 1
        self._last = max(self._last, applied >> 32)
        if not rows:
            return
        runs = self._missing_runs(environment, start_ms, applied, rows)

        def work(transaction: Transaction) -> None:
            for position, row in rows:
                if row.kind == RowKind.RECORD:
                    if position > applied or (row.key[0] == Table.LOG and transaction.get(row.key) is None):
                        transaction.put(row.key, bytes(row.value))
                elif row.kind == RowKind.DELETE:
                    if position > applied:
                        transaction.delete(row.key)
                elif row.kind != RowKind.RUN and (position > applied or row.key[0] == Table.SEQUENCE):
                    transaction.change_bits(row.key, bit_change(row))
            for row in runs:
                transaction.raw.put(row.key, bytes(row.value))
            transaction.put(APPLIED_KEY, fmt.pack_u64(max(rows[-1][0], applied)))

        environment.commit(work)
        if runs:
            entries = sum(_run(row).count for row in runs)
            self._account.say(f"{environment.name}: {entries} entries applied from {_THE_LOG}")

    def _missing_runs(
        self, environment: Environment, start_ms: int, applied: int, rows: list[tuple[int, Row]]
    ) -> list[Row]:
        """The runs that an environment lacks; of two of one entry the later one."""
        found: list[Row] = []
        placed = [(position, row, _run(row)) for position, row in rows if row.kind == RowKind.RUN]
        with environment.read() as raw:
            known = main_ledgers(raw) if start_ms == MAIN else None
            in_log: dict[int, BitMap] = defaultdict(BitMap)
            for _, _, run in placed:
                in_log[run.ledger_id].add_range(run.first_entry, run.limit)
            covered = {ledger_id: _intact(raw, environment.name, ledger_id, of) for ledger_id, of in in_log.items()}
            for position, row, run in reversed(placed):
                if position <= applied and known is not None and run.ledger_id not in known:
                    continue  # trimmed
                entries = BitMap(range(run.first_entry, run.limit))
                if not entries & covered[run.ledger_id]:
                    covered[run.ledger_id] |= entries
                    found.append(row)
        return found

    def end(self, main: Environment) -> None:
        """Report what is of partitions that are gone, and begin a damaged log anew. REQUIRES: the rest is applied."""
        for start_ms, rows in self._rows.items():
            for _, row in rows:
                if row.kind == RowKind.RUN and self._damage is not None:
                    run = _run(row)
                    self._account.count("entries of the write-ahead log", run.count, run.count)
                    for entry_id, body in run.bodies():
                        raw = body if isinstance(body, bytes) else b""
                        reason = f"its partition, from {start_ms} on, is gone; this is from {_THE_LOG}"
                        self._account.discard(Discarded(_THE_LOG, run.ledger_id, entry_id, reason, raw))
        if self._damage is None:
            return
        directory = self._path / DIRECTORY
        make_directory(directory)
        Segment(directory, self._last + 1, self._store_id, MIB).close()
        begins = fmt.pack_u64(self._last + 1)
        main.commit(lambda transaction: transaction.put(fmt.counter_key(catalog.WAL), begins))
        trash = self._path / "trash" / "repair-wal"
        remove_tree(trash)
        make_directory(trash)
        for number in numbers_in(directory):
            if number <= self._last:
                move(directory / file_name(number), trash / file_name(number))
        self._account.say(f"{DIRECTORY}: {self._damage}; what can be read of it is applied, and it is begun anew")


def _run(row: Row) -> Run:
    return Run(_THE_LOG, row.key, memoryview(row.value), lambda *_: memoryview(b""))  # bodies apart went with it


def _intact(raw: Reads, environment: str, ledger_id: int, in_log: BitMap) -> BitMap:
    """Entries of a ledger that an environment has; a run that is damaged counts unless the log has all of it."""
    found = BitMap()
    for run in runs(raw, environment, ledger_id):
        if isinstance(run, Run):
            found.add_range(run.first_entry, run.limit)
            continue
        count = entries_told(bytes(raw.get(run_key(ledger_id, run.entry_id), b"")))
        lost = BitMap(range(run.entry_id, run.entry_id + (count or 1)))
        if count is None or lost - in_log:
            found |= lost
    return found


_FILLED_AT_ONCE = 50_000


class Mended(NamedTuple):
    """A ledger after mending: its length, and the entries discarded, apart by whether their due times are known."""

    entries: int
    holes: BitMap
    bodies: BitMap


def mend_ledger(
    transaction: Transaction, name: str, ledger_id: int, least_entries: int, dues: Mapping[int, int],
    discard: Callable[[Discarded], object], *, base_ms: int = 0,
) -> Mended:  # fmt: skip
    """Make the entries [0, tail) of a ledger dense and readable; tail is at least `least_entries`.

    name: of the environment. base_ms: of runs that fill a hole. dues: due times known from elsewhere (markers) of
    entries in holes; the others get base_ms. Does nothing where nothing is damaged. O(bytes).
    """
    changes: dict[bytes, bytes | None] = {}
    holes, bodies = BitMap(), BitMap()
    expected, least = 0, least_entries
    damaged_last: bytes | None = None
    for run in runs(transaction.reads, name, ledger_id):
        if isinstance(run, CorruptEntry) or run.first_entry < expected:
            overlaps = f"entries up to {expected - 1} come before"
            first, reason = (run.entry_id, run.reason) if isinstance(run, CorruptEntry) else (run.first_entry, overlaps)
            key = damaged_last = run_key(ledger_id, first)
            discard(Discarded(name, ledger_id, first, reason, bytes(transaction.raw.get(key, b""))))
            changes[key] = None
            continue
        damaged_last, key, first = None, run_key(ledger_id, run.first_entry), run.first_entry
        holes.add_range(expected, run.follows)
        expected = run.limit
        keep = np.ones(run.count, np.bool_)
        for damaged in unreadable_bodies(run) if run.kind == RunKind.MESSAGES else ():
            bodies.add(damaged.entry_id)
            keep[damaged.entry_id - first] = False
            raw = run.raw_body(damaged.entry_id - first)
            discard(Discarded(name, ledger_id, damaged.entry_id, damaged.reason, raw))
        if not keep.all():
            changes[key] = run.keeping(keep)
    if damaged_last is not None:  # then the hole ends where its own length says
        told = entries_told(bytes(transaction.raw.get(damaged_last, b""))) or MAX_RUN_ENTRIES
        least = max(least, fmt.split_run_key(damaged_last)[1] + told)
    tail = max(expected, least)
    holes.add_range(expected, tail)
    for first, limit in _ranges(holes):
        discard(Discarded(name, ledger_id, first, f"entries {first} to {limit - 1} are gone", b""))
        for start in range(first, limit, _FILLED_AT_ONCE):
            count = min(_FILLED_AT_ONCE, limit - start)
            filled = np.fromiter((dues.get(start + at, base_ms) for at in range(count)), np.int64, count)
            key = run_key(ledger_id, start)
            changes[key] = bytes(PackedRun(base_ms, filled, [b""] * count).sealed(key))
    for key, change in changes.items():
        if change is None:
            transaction.raw.delete(key)
        else:
            transaction.raw.put(key, change)
    return Mended(tail, holes, bodies)


def entries_told(value: bytes) -> int | None:
    """How many entries a run had whose header does not match its checksum; None: its length does not agree.

    The count, the columns that it makes and the length of the value tell the same, or one of them is damaged.
    """
    if len(value) < HEADER_BYTES:
        return None
    _, version, kind, flags, count, *_ = HEADER.unpack_from(value)
    if not 0 < count <= MAX_RUN_ENTRIES:
        return None
    if kind == RunKind.MARKERS:
        return count if len(value) == HEADER_BYTES + 8 * count else None
    bodies = HEADER_BYTES + (24 if flags & FLAG_CONDITIONAL else 12) * count
    if bodies > len(value):
        return None
    if version == APART_VERSION:
        return count if bodies + APART_BYTES == len(value) else None
    ends = np.frombuffer(value, "<u4", count, HEADER_BYTES + 4 * count)
    return count if bodies + int(ends[-1]) == len(value) else None


def _ranges(entries: BitMap) -> list[tuple[int, int]]:
    ids = np.array(entries, dtype=np.int64)
    pieces = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces if len(piece)]


# -- partitions --------------------------------------------------------------------------------


def mend_partition(
    main: Environment, environment: Environment, start_ms: int, logs: dict[int, int], markers: Mapping[int, Marked],
    account: Account,
) -> dict[int, BitMap]:  # fmt: skip
    """Mend a partition; the entries of its logs that were discarded, by ledger. logs: ledger ids by topic."""
    lost: dict[int, BitMap] = {}
    for topic_id, ledger_id in logs.items():
        log = PartitionLog(environment, topic_id, start_ms, ledger_id)
        mended = _mend_log(main, log, markers.get(ledger_id, NO_MARKERS), account)
        discarded = mended.holes | mended.bodies
        account.count("entries of partitions", mended.entries, len(discarded))
        if discarded:
            lost[ledger_id] = discarded
            account.say(f"{environment.name}, ledger {ledger_id}: discarded {len(discarded)}")
    damaged = any(each.state is SnapshotState.DAMAGED for each in inspect_snapshots(environment, read_parts=True))
    if (lost or damaged) and (removed := remove_snapshots(environment)):
        account.say(f"{environment.name}: removed {removed} records of snapshots")
    return lost


def _mend_log(main: Environment, log: PartitionLog, marked: Marked, account: Account) -> Mended:
    environment, topic_id, start_ms, ledger_id = log
    known = dict(zip(marked.entries.tolist(), marked.dues.tolist(), strict=True))
    with main.read() as raw:
        frontier = catalog.frontier(raw, topic_id, start_ms)
        admitted = cancellations.members(raw, Table.ADMITTED, ledger_id)
        named = cancellations.members(raw, Table.CANCELLED, ledger_id) | admitted
    tails = [each.metadata.tail for each in inspect_snapshots(environment, ledger_id) if each.metadata is not None]
    least = max(
        0 if frontier is None else frontier.absorbed_end, max(named, default=-1) + 1, max(known, default=-1) + 1, *tails
    )
    mended = account.write(
        environment, mend_ledger, environment.name, ledger_id, least, known, account.discard, base_ms=start_ms
    )
    fired = fired_in(due_column(environment, ledger_id, admitted), frontier)
    unfired = (mended.holes | mended.bodies) - BitMap(known) - (fired & mended.bodies)

    def count(transaction: Transaction) -> None:
        account.report.lost += len(cancellations.add(transaction, Table.CANCELLED, ledger_id, unfired))
        left = len(fired - cancellations.members(transaction.raw, Table.CANCELLED, ledger_id))
        named = catalog.topic_name(transaction.raw, topic_id) is not None
        if named and frontier is not None and frontier.ledger_id == ledger_id and left != frontier.fired:
            transaction.put(fmt.frontier_key(topic_id, start_ms), frontier._replace(fired=left).pack())
            account.say(f"{environment.name}, ledger {ledger_id}: {left} have fired, not {frontier.fired}")

    account.write(main, count)
    return mended


def recount_references(transaction: Transaction, account: Account) -> None:
    """Have frontiers without markers name none, and closed partitions know how many topics hold them."""
    raw = transaction.raw
    topics = topic_ids(raw)
    marked = {
        topic_id: {run.target for run in marker_runs(raw, dict(catalog.ledgers(raw, topic_id)))} for topic_id in topics
    }
    holders: dict[int, int] = {}
    for topic_id, start_ms, frontier in list(catalog.frontiers(raw)):
        if topic_id not in topics:
            continue
        holders[start_ms] = holders.get(start_ms, 0) + (not frontier.released)
        if frontier.fired and frontier.marker_ledger and frontier.ledger_id not in marked[topic_id]:
            none = frontier._replace(marker_ledger=0, marker_entry=0)
            transaction.put(fmt.frontier_key(topic_id, start_ms), none.pack())
            account.say(f"topic {topic_id}: no marker is left of its log in partition {start_ms}")
    for start_ms, record in catalog.partitions(raw):
        references = holders.get(start_ms, 0)
        if record.state is PartitionState.CLOSED and record.references != references:
            changed: PartitionRecord = record._replace(references=references)
            transaction.put(fmt.partition_key(start_ms), changed.pack())
            account.say(f"partition {start_ms}: {references} topics hold it, not {record.references}")


# -- main logs ---------------------------------------------------------------------------------


def reconcile(transaction: Transaction, lost: dict[int, BitMap], open_log: OpenLog, account: Account) -> None:
    """Mend the main logs, and acknowledge for every subscription what was discarded. `lost`: by ledger.

    What was quarantined and can be read now is delivered; what cannot is in `lost`, or is found here.
    """
    for topic_id in sorted(topic_ids(transaction.raw)):
        _reconcile_topic(transaction, topic_id, lost, open_log, account)
    keys = [key for key, _ in catalog.rows(transaction.raw, fmt.prefix(Table.SET_ASIDE))]
    if cleared := sum(transaction.delete(key) for key in keys):
        account.say(f"main: {cleared} entries are no longer quarantined")


def _reconcile_topic(
    transaction: Transaction, topic_id: int, lost: dict[int, BitMap], open_log: OpenLog, account: Account
) -> None:
    raw = transaction.raw
    ledgers = kept_ledgers(raw, topic_id)
    cursors = {name: row for _, name, row in catalog.cursors(raw, topic_id)}
    singly = {name: dict(catalog.acked(raw, row.subscription_id)) for name, row in cursors.items()}
    acks = {name: AckSet.load(row.mark_delete, singly[name]) for name, row in cursors.items()}
    frontiers = [row for _, _, row in catalog.frontiers(raw, topic_id) if row.fired]
    holes: dict[int, BitMap] = {}
    discarded: dict[int, BitMap] = {}
    found = 0
    for ledger_id, record in ledgers.items():
        closed = record.state is LedgerState.CLOSED
        least = [record.entries if closed else 0]
        least += [row.marker_entry + 1 for row in frontiers if row.marker_ledger == ledger_id]
        least += [row.next_entry for row in cursors.values() if row.ledger_id == ledger_id]
        least += [
            max(BitMap.deserialize(rows[ledger_id]), default=-1) + 1 for rows in singly.values() if ledger_id in rows
        ]
        mended = mend_ledger(transaction, "main", ledger_id, max(least), {}, account.discard)
        holes[ledger_id], discarded[ledger_id] = mended.holes, mended.bodies
        found += mended.entries
        if closed and mended.entries != record.entries:
            transaction.put(fmt.ledger_key(topic_id, ledger_id), record._replace(entries=mended.entries).pack())
    whole, appended = restore_markers(transaction, topic_id, holes, open_log, account)
    again = max((sum(len(of - _unacked(one, at, of)) for at, of in holes.items()) for one in acks.values()), default=0)
    account.report.again += min(appended, again)
    if not whole:
        for ledger_id, entries in holes.items():
            discarded[ledger_id] |= entries
    account.count("entries of main logs", found, sum(map(len, discarded.values())))
    for run in marker_runs(raw, ledgers if lost else ()):
        targets = enumerate(run.targets().tolist(), run.first_entry)
        discarded[run.ledger_id].update(at for at, entry in targets if entry in lost.get(run.target, ()))
    discarded = {ledger_id: entries for ledger_id, entries in discarded.items() if entries}
    owed = 0
    for ledger_id, entries in discarded.items():  # all of them where there is no subscription
        each = [_unacked(one, ledger_id, entries) for one in acks.values()]
        owed += len(BitMap.union(*each) if each else entries)
        account.say(f"main, ledger {ledger_id}: {len(entries)} entries are acknowledged for every subscription")
    account.report.lost += max(owed - appended, 0)
    _acknowledge(transaction, topic_id, cursors, acks, discarded, account)


def _acknowledge(
    transaction: Transaction, topic_id: int, cursors: Mapping[str, CursorRecord], acks: Mapping[str, AckSet],
    discarded: Mapping[int, BitMap], account: Account,
) -> None:  # fmt: skip
    """Acknowledge entries of a main log for each of its subscriptions, by name."""
    log = ManagedLedger.load(transaction.raw, "main", topic_id, RunLimits(), LedgerLimits(1 << 31, 1 << 62, 1 << 62))
    last = log.ledgers()[-1]
    for name, one in acks.items():
        record = cursors[name]
        if record.ledger_id > last.ledger_id:
            one.reset(log.end._replace(entry_id=last.entries - 1))
            account.say(f"topic {topic_id}: subscription {name} is at the end of the log")
        one.trim_to(log.first_ledger, log)
        for ledger_id, entries in discarded.items():
            one.ack(ledger_id, entries, log)
        if not (changes := one.take_changes()):
            continue
        mark = changes.mark_delete
        moved = record._replace(ledger_id=mark.ledger_id, next_entry=mark.entry_id + 1)
        transaction.put(fmt.cursor_key(topic_id, name), moved.pack())
        for ledger_id, change in changes.acked.items():
            transaction.change_bits(fmt.acked_key(record.subscription_id, ledger_id), change)


def _unacked(acks: AckSet, ledger_id: int, entries: BitMap) -> BitMap:
    return entries & acks.unacked(ledger_id, entries.min(), entries.max() + 1) if entries else BitMap()
