"""Claims on a partition log: the entries that may yet be delivered, by the markers in the main log.

Owns the rule of what compaction may drop. Everything is read in the caller's one transaction of the main environment,
so that it is of one point in time; one pass over a topic's main log is for all its partitions, and markers are read as
columns. Reads no partition: what must be known of one (its length, its conditional entries) is an argument.

An entry is needed while a marker that is kept points at it and some subscription has not acknowledged that marker. A
topic without subscriptions has acknowledged nothing. Where what is known does not add up (a run of the main log
cannot be read, or more entries should have fired than did), whatever was not cancelled or acknowledged is needed:
compaction never hides a loss.

Trimming (trim.py) goes by what is in memory and by whole ledgers from the front. Compaction goes by what is on disk,
and may drop single messages of ledgers that a slow subscription still holds: for retention those count here as if
everything had been acknowledged by now, so that what compaction drops is what trimming would not have kept.
"""

import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ..partitions.cancellations import members
from ..store.codec import format as fmt
from ..store.codec.format import CursorRecord, LedgerRecord, LedgerState, Relied, Table
from ..store.codec.frontier import FrontierRecord
from ..store.codec.run import RunKind, UInt32s
from ..store.env.memtable import Reads
from ..store.errors import CorruptEntry
from ..store.log import catalog
from ..store.log.ledger import find_tail
from ..store.log.scan import runs
from ..store.names import TopicName
from ..store.policy.policy_records import effective
from ..store.position import Position


class LogClaims(NamedTuple):
    """The claims of the main environment on one topic's log in one partition.

    topic: full name, None when the topic was deleted. marked: entries that markers in kept ledgers (not being trimmed)
    point at. acknowledged: those of them that every subscription has acknowledged, less what retention keeps; empty
    without subscriptions. quarantined: entries that could not be read. relied_on: by ledger of the main log, the
    positions whose acknowledgement `acknowledged` rests on. complete: every run of the kept ledgers could be read.
    """

    topic_id: int
    ledger_id: int
    frontier: FrontierRecord
    topic: str | None
    cancelled: BitMap
    admitted: BitMap
    marked: BitMap
    acknowledged: BitMap
    subscriptions: int
    quarantined: BitMap
    relied_on: Mapping[int, BitMap]
    complete: bool


def read_claims(raw: Reads, main_name: str, starts: Iterable[int], *, now_ms: int = 0) -> dict[int, list[LogClaims]]:
    """The claims on each of several partitions, by start. O(markers of the topics that have a log there).

    now_ms: when retention is judged by: acknowledged entries count as needed where it keeps the main-log ledger of
    their marker (`ledgers_kept`). 0: what it will let go some day is kept. Raises CorruptRecord.
    """
    claims: dict[int, list[LogClaims]] = {start_ms: [] for start_ms in starts}
    wanted: dict[int, list[tuple[int, FrontierRecord]]] = {}
    for topic_id, start_ms, frontier in catalog.frontiers(raw):
        if start_ms in claims:
            wanted.setdefault(topic_id, []).append((start_ms, frontier))
    for topic_id, rows in sorted(wanted.items()):
        topic = catalog.topic_name(raw, topic_id)
        log = _read_main_log(raw, main_name, topic_id, {row.ledger_id for _, row in rows}, now_ms)
        for start_ms, frontier in rows:
            claims[start_ms].append(_claims(raw, topic_id, topic, frontier, log))
    return claims


def claims_of_logs(raw: Reads, known: Iterable[LogClaims], logs: Iterable[tuple[int, int]]) -> list[LogClaims]:
    """The claims on these logs (topic id, ledger id) of one partition, a row for each.

    known: those on the partition's logs that have a frontier, from the same transaction. They are picklable,
    and small to send: of each bitmap at most 8 KiB for 65,536 entries.
    """
    by_log = {(row.topic_id, row.ledger_id): row for row in known}
    claims = []
    for topic_id, ledger_id in logs:
        claimed = by_log.get((topic_id, ledger_id))
        if claimed is None:  # nothing of it has fired: its entries were cancelled, or its topic deleted
            log = _MainLog(subscriptions=sum(1 for _ in catalog.cursors(raw, topic_id)))
            topic = catalog.topic_name(raw, topic_id)
            claimed = _claims(raw, topic_id, topic, FrontierRecord.start(ledger_id), log)
        claims.append(claimed)
    return claims


def needed(claims: LogClaims, tail: int, conditional: BitMap | None) -> BitMap:
    """The entries of [0, tail) whose bodies must stay.

    conditional: the log's conditional entries; None: not all its runs can be read. REQUIRES: the partition is closed,
    so that what has no marker will never get one.
    """
    every = BitMap(range(tail))
    if claims.topic is None or claims.frontier.released:
        return claims.quarantined & every
    needs = (claims.marked - claims.acknowledged) | claims.quarantined
    never = claims.cancelled.copy()
    if conditional is not None:
        never |= conditional - claims.admitted
    firing = tail - len(never & every)
    if not claims.complete or conditional is None or firing != claims.frontier.fired:
        needs |= every - never - claims.acknowledged
    return needs & every


def _claims(raw: Reads, topic_id: int, topic: str | None, frontier: FrontierRecord, log: "_MainLog") -> LogClaims:
    ledger_id = frontier.ledger_id
    pieces = log.markers.get(ledger_id, [])
    marked, open_ = BitMap(), BitMap()
    relied_on: dict[int, BitMap] = {}
    if pieces:
        targets = np.concatenate([piece.targets for piece in pieces])
        done = np.concatenate([piece.done for piece in pieces])
        marked, open_ = bitmap_of(targets), bitmap_of(targets[~done])
        for main_ledger in {piece.main_ledger for piece in pieces}:
            here = [piece for piece in pieces if piece.main_ledger == main_ledger]
            positions = bitmap_of(np.concatenate([np.flatnonzero(piece.done) + piece.first_entry for piece in here]))
            if positions:
                positions.run_optimize()
                relied_on[main_ledger] = positions
    return LogClaims(
        topic_id,
        ledger_id,
        frontier,
        topic,
        members(raw, Table.CANCELLED, ledger_id),
        members(raw, Table.ADMITTED, ledger_id),
        marked,
        marked - open_,
        log.subscriptions,
        _quarantined(raw, ledger_id),
        relied_on,
        log.complete,
    )


# -- the main log ------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Markers of one run (views into the transaction): where they point, which are done with, and where they lie."""

    targets: UInt32s
    done: npt.NDArray[np.bool_]
    main_ledger: int
    first_entry: int


@dataclass(slots=True)
class _MainLog:
    """The markers of a topic's kept ledgers, by the partition log they point into."""

    subscriptions: int
    markers: dict[int, list[_Piece]] = field(default_factory=dict)
    complete: bool = True


def _read_main_log(raw: Reads, name: str, topic_id: int, targets: set[int], now_ms: int) -> _MainLog:
    cursors = [record for _, _, record in catalog.cursors(raw, topic_id)]
    log = _MainLog(len(cursors))
    kept = [row for row in catalog.ledgers(raw, topic_id) if row[1].state is not LedgerState.TRIMMING]
    retained = ledgers_kept(raw, topic_id, now_ms)
    acked = [(cursor, dict(catalog.acked(raw, cursor.subscription_id))) for cursor in cursors]
    for ledger_id, record in kept:
        tail = find_tail(raw, name, ledger_id)
        done = np.zeros(tail, dtype=np.bool_)
        if cursors and ledger_id not in retained:
            done[ids_of(acknowledged_by_all(acked, ledger_id, tail))] = True
        expected = 0
        for run in runs(raw, name, ledger_id):
            if isinstance(run, CorruptEntry) or run.first_entry != expected:
                log.complete = False
            if isinstance(run, CorruptEntry):
                continue
            expected = run.limit
            if run.kind == RunKind.MARKERS and run.target in targets:
                piece = _Piece(run.targets(), done[run.first_entry : run.limit], ledger_id, run.first_entry)
                log.markers.setdefault(run.target, []).append(piece)
        if record.state is LedgerState.CLOSED and expected != record.entries:
            log.complete = False
    return log


def acknowledged_by_all(
    cursors: Sequence[tuple[CursorRecord, Mapping[int, bytes]]], ledger_id: int, tail: int
) -> BitMap:
    """Entries of [0, tail) of a main-log ledger that every one of the subscriptions has acknowledged.

    cursors: each with its serialised bitmaps by ledger id (`catalog.acked`). Without any: none.
    """
    acknowledged: BitMap | None = None
    for cursor, rows in cursors:
        row = rows.get(ledger_id)
        positions = BitMap() if row is None else BitMap.deserialize(row)
        if cursor.ledger_id > ledger_id:
            positions.add_range(0, tail)
        elif cursor.ledger_id == ledger_id:
            positions.add_range(0, min(cursor.next_entry, tail))
        acknowledged = positions if acknowledged is None else acknowledged & positions
    return BitMap() if acknowledged is None else acknowledged & BitMap(range(tail))


def _quarantined(raw: Reads, ledger_id: int) -> BitMap:
    return BitMap(fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.block_prefix(Table.SET_ASIDE, ledger_id)))


def bitmap_of(ids: npt.NDArray[np.integer]) -> BitMap:
    """A bitmap of an array of entry ids, in any order."""
    return BitMap(array.array("I", ids.astype(np.uint32).tobytes()))


def ids_of(entries: BitMap) -> UInt32s:
    """The entry ids of a bitmap, ascending."""
    entry_ids: UInt32s = np.frombuffer(entries.to_array(), dtype=np.uint32)
    return entry_ids


# -- retention ---------------------------------------------------------------------------------


def ledgers_kept(raw: Reads, topic_id: int, now_ms: int) -> set[int]:
    """Ids of the ledgers of a topic's main log whose acknowledged messages are kept to be sought back to.

    O(ledgers of the topic). Raises CorruptRecord.
    """
    name = catalog.topic_name(raw, topic_id)
    if name is None:
        return set()
    policies = effective(raw, TopicName.parse(name))
    if not policies.retention_ms and not policies.retention_bytes:
        return set()
    mark_deletes = [cursor.mark_delete for _, _, cursor in catalog.cursors(raw, topic_id)]
    ledgers = catalog.ledgers(raw, topic_id)
    return kept_of(ledgers, mark_deletes, policies.retention_ms, policies.retention_bytes, now_ms)


def retention_by_topic(raw: Reads) -> dict[int, tuple[int, int]]:
    """The policies `retention_ms` and `retention_bytes` in force, by topic id. Raises CorruptRecord."""
    retention = {}
    for key, name in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME)):
        policies = effective(raw, TopicName.parse(name.decode()))
        retention[fmt.trailing_u32(key)] = (policies.retention_ms, policies.retention_bytes)
    return retention


def kept_of(
    ledgers: Iterable[tuple[int, LedgerRecord]],
    mark_deletes: Sequence[Position],
    retention_ms: int,
    retention_bytes: int,
    now_ms: int,
) -> set[int]:
    """The same of a main log's (ledger id, record), with the mark-delete positions of its subscriptions."""
    passed_bytes = closed_bytes = 0  # of the ledgers after the one that is looked at
    kept = set()
    for ledger_id, record in sorted(ledgers, reverse=True):
        if record.state is LedgerState.TRIMMING:
            continue
        is_open = record.state is LedgerState.OPEN
        last = Position(ledger_id, record.entries - 1)
        passed = not is_open and all(mark_delete >= last for mark_delete in mark_deletes)
        young = is_open or record.closed_ms + retention_ms > now_ms
        newer_bytes = passed_bytes if passed else closed_bytes
        if (retention_ms and young) or newer_bytes < retention_bytes:
            kept.add(ledger_id)
        passed_bytes += record.stored_bytes if passed else 0
        closed_bytes += 0 if is_open else record.stored_bytes
    return kept


def reason_to_keep(raw: Reads, relied_on: Sequence[Relied], now_ms: int) -> str | None:
    """Why bodies whose acknowledgements lie at these positions are to stay by now; None: retention lets them go."""
    for topic_id in {relied.topic_id for relied in relied_on}:
        kept = ledgers_kept(raw, topic_id, now_ms)
        for relied in relied_on:
            if relied.topic_id == topic_id and relied.ledger_id in kept:
                name = catalog.topic_name(raw, topic_id)
                return f"by the retention of {name} messages are kept by now that it drops"
    return None
