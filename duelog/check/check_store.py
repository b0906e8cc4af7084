"""Every invariant of a store, looked at from outside: problems come as values, nothing is changed.

Here: the catalog, the main logs with their markers, and the subscriptions. Partitions are in check_partitions.py,
the journal is in check_journal.py, what every environment has in check_records.py. Damage that kills whoever reads it
through LMDB is the business of `duelog check` (tools/store_check.py), which looks at the pages before anything is
opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import lmdb
from pyroaring import BitMap

from duelog.partitions.cancellations import members
from duelog.store.codec import format as fmt
from duelog.store.codec.format import CorruptRecord, LedgerRecord, LedgerState, PartitionRecord, Table
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Run, RunKind
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail
from duelog.store.position import Position

from .check_journal import check_journal
from .check_partitions import check_partitions, lost_partitions, was_used
from .check_records import check_bodies, check_pages, check_records, dense_runs
from .check_withdrawals import Conditionals, check_conditionals
from .finding import Finding, error, warning

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Finding", "Survey", "check"]


def check(engine: Engine, *, deep: bool = False) -> Iterator[Finding]:
    """Findings of an open store; `deep` also reads every page and body. Runs beside producers, not beside a tick."""
    with engine.maintenance.lock:
        survey = Survey(engine, deep)
        findings = list(survey.run())
    return iter(findings)


class Survey:
    """One check under way: what was read of the catalog, and what is known so far of ledgers and markers."""

    def __init__(self, engine: Engine, deep: bool) -> None:
        self.engine = engine
        self.deep = deep
        self.raw: lmdb.Transaction
        """The one transaction of the main environment."""
        self.records: dict[int, PartitionRecord] = {}
        self.frontiers: dict[tuple[int, int], FrontierRecord] = {}
        self.topics: dict[int, str] = {}
        self.ledgers: dict[int, tuple[int, LedgerRecord]] = {}
        """Main-log ledger id -> topic id, record."""
        self.tails: dict[int, int] = {}
        """Ledger id -> number of entries, of main logs and then of partition logs."""
        self.markers: dict[int, BitMap] = {}
        """Partition log's ledger id -> entries that markers point at."""
        self.places: dict[int, tuple[int, int]] = {}
        """Partition log's ledger id -> topic id, start of its partition."""
        self.conditionals = Conditionals()
        """Of all partition logs."""
        self.all_read = True
        """Whether every registered partition could be read, and its logs are in `tails`."""

    def run(self) -> Iterator[Finding]:
        """Every finding."""
        main = self.engine.main
        yield from self._suspended()
        yield from check_journal(self.engine)
        # One transaction for all of main, so that what another process or a producer writes meanwhile is no finding.
        # Partitions are read after it began, and hold whatever it knows of: entries are on disk before they fire.
        with main.read() as self.raw:
            if self.deep:
                yield from check_pages(main)
            known = {fmt.trailing_u64(key) for key in _keys(self.raw, fmt.prefix(Table.LEDGER))}
            yield from check_records(self.raw, main.name, known)
            try:
                yield from self._catalog()
                yield from self._main_logs()
                yield from check_partitions(self)
                yield from self._withdrawals()
                yield from check_conditionals(self)
                yield from self._cursors()
                yield from self._counters()
                yield from self._set_aside()
            except (CorruptRecord, ValueError) as reason:
                yield error("corrupt-record", main.name, f"{reason}; what depends on it was not looked at")

    def _suspended(self) -> Iterator[Finding]:
        """What this process has stopped doing, if it is the one that writes."""
        for found in self.engine.firing.suspensions.all():
            message = f"is suspended since {found.since_ms}, after {found.failures} failures: {found.reason}"
            yield error("suspended", str(found), message, "mend the cause; it is tried again by itself")

    def _catalog(self) -> Iterator[Finding]:
        raw = self.raw
        self.records = dict(catalog.partitions(raw))
        for topic_id, start_ms, record in catalog.frontiers(raw):
            self.frontiers[topic_id, start_ms] = record
        for key, fields in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME)):
            self.topics[fmt.trailing_u32(key)] = fields.decode()
        for key, fields in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
            self.ledgers[fmt.trailing_u64(key)] = fmt.leading_u32(key), LedgerRecord.unpack(fields)
        named = {
            fmt.name_of(key): fmt.TopicRecord.unpack(fields).topic_id
            for key, fields in catalog.rows(raw, fmt.prefix(Table.TOPIC))
        }
        for name in {*named, *self.topics.values()}:
            if self.topics.get(named.get(name, -1)) != name:
                yield error("topic", name, "its name and its number do not lead to each other")
        for topic_id, start_ms in self.frontiers:
            address = f"topic {topic_id}, partition {start_ms}"
            if start_ms not in self.records:
                yield error("frontier-without-partition", address, "names a partition that is not in the catalog")
        for ledger_id, (topic_id, ledger) in self.ledgers.items():
            if topic_id not in self.topics and ledger.state is not LedgerState.TRIMMING:
                yield error("ledger-without-topic", f"ledger {ledger_id}", f"topic {topic_id} does not exist")
        yield from lost_partitions(self)
        for directory in self.engine.partitions.unregistered():
            if any(was_used(generation) for generation in directory.glob("g*")):
                continue  # found above
            advice = "it is removed when the store is next opened for writing"
            yield warning("orphan-directory", str(directory), "is not in the catalog", advice)

    # -- main logs -------------------------------------------------------------------------------

    def _main_logs(self) -> Iterator[Finding]:
        for topic_id, name in self.topics.items():
            ledgers = catalog.ledgers(self.raw, topic_id)
            if [record.state for _, record in ledgers].count(LedgerState.OPEN) != 1:
                yield error("open-ledgers", name, "has not exactly one open ledger")
            for ledger_id, record in ledgers:
                if record.state is not LedgerState.TRIMMING:
                    yield from self._ledger(topic_id, name, ledger_id, record)

    def _ledger(self, topic_id: int, name: str, ledger_id: int, record: LedgerRecord) -> Iterator[Finding]:
        main = self.engine.main
        tail = self.tails[ledger_id] = find_tail(self.raw, main.name, ledger_id)
        if record.state is LedgerState.CLOSED and tail != record.entries:
            message = f"was closed with {record.entries} entries, has {tail}"
            yield error("ledger-length", f"{name}, ledger {ledger_id}", message)
        for run in dense_runs(self.raw, main, ledger_id):
            if isinstance(run, Finding):
                yield run
            elif run.kind == RunKind.MARKERS:
                yield from self._check_markers(run, topic_id)
            elif self.deep:
                yield from check_bodies(run)

    def _check_markers(self, run: Run, topic_id: int) -> Iterator[Finding]:
        known = self.markers.setdefault(run.target, BitMap())
        targets = BitMap(run.targets().tolist())
        address = f"main, ledger {run.ledger_id}, entries {run.first_entry} to {run.limit - 1}"
        doubled = known & targets
        if doubled or len(targets) < run.count:
            yield error("doubled-marker", address, f"markers of ledger {run.target} doubled: {list(doubled)[:10]}")
        known |= targets
        start_ms = run.base_ms
        frontier = self.frontiers.get((topic_id, start_ms))
        if frontier is None or start_ms not in self.records:
            yield error("dangling-marker", address, f"point into partition {start_ms}, which is gone")
            return
        if frontier.ledger_id != run.target:
            message = f"point into ledger {run.target}, the frontier is of ledger {frontier.ledger_id}"
            yield error("dangling-marker", address, message)
        entries, dues = run.targets(), run.dues()
        beyond = ~frontier.has_fired(entries, dues)
        if beyond.any():
            message = f"{int(beyond.sum())} markers point past the frontier of partition {start_ms}"
            yield error("marker-past-frontier", address, message)

    # -- the rest ----------------------------------------------------------------------------------

    def _withdrawals(self) -> Iterator[Finding]:
        """Cancelled and admitted entries lie within logs of partitions."""
        for table in (Table.CANCELLED, Table.ADMITTED):
            logs = {fmt.leading_u64(key) for key in _keys(self.raw, fmt.prefix(table))}
            for ledger_id in sorted(logs):
                address = f"{table.name}, ledger {ledger_id}"
                entries = members(self.raw, table, ledger_id)
                if ledger_id in self.tails:
                    if entries and entries.max() >= self.tails[ledger_id]:
                        yield error("lost-entries", address, f"names entry {entries.max()}, past the end of the log")
                elif self.all_read:
                    yield error("withdrawn-without-log", address, "names a log that no partition has")

    def _cursors(self) -> Iterator[Finding]:
        subscriptions = set()
        for topic_id, name, record in list(catalog.cursors(self.raw)):
            subscriptions.add(record.subscription_id)
            address = f"topic {topic_id}, subscription {name!r}"
            if topic_id not in self.topics:
                yield error("cursor-without-topic", address, "its topic does not exist")
                continue
            ledgers = {ledger_id for ledger_id, (owner, _) in self.ledgers.items() if owner == topic_id}
            mark_delete: Position = record.mark_delete
            if ledgers and mark_delete.ledger_id > max(ledgers):
                yield error("cursor", address, f"mark-delete {mark_delete} is past the main log")
            elif mark_delete.ledger_id in ledgers & self.tails.keys() and (
                mark_delete.entry_id >= self.tails[mark_delete.ledger_id]
            ):
                yield error("cursor", address, f"mark-delete {mark_delete} is past its ledger")
            for ledger_id, row in catalog.acked(self.raw, record.subscription_id):
                acked = BitMap.deserialize(row)
                if ledger_id in self.tails and acked and acked.max() >= self.tails[ledger_id]:
                    yield error("cursor", address, f"acknowledged entries past the end of ledger {ledger_id}")
        for key in _keys(self.raw, fmt.prefix(Table.ACKED)):
            number = fmt.leading_u32(key)
            if number not in subscriptions:
                message = "has acknowledged entries, and no record: what it is owed is not delivered"
                yield error("acked-without-subscription", f"subscription {number}", message)

    def _counters(self) -> Iterator[Finding]:
        """Numbers that are in use must not be given out again."""
        used = {
            catalog.LEDGERS: max([*self.ledgers, *self.tails], default=0),
            catalog.TOPICS: max(self.topics, default=0),
            catalog.SUBSCRIPTIONS: max((row.subscription_id for _, _, row in catalog.cursors(self.raw)), default=0),
        }
        for name, highest in used.items():
            fields = self.engine.main.get(fmt.counter_key(name))  # as of now: a log may be newer than the transaction
            following = 1 if fields is None else fmt.unpack_u64(fields)
            if following <= highest:
                yield error("counter", name, f"gives out {following} next, {highest} is in use")

    def _set_aside(self) -> Iterator[Finding]:
        addresses: dict[tuple[int, int], str] = {}
        for key, fields in catalog.rows(self.raw, fmt.prefix(Table.SET_ASIDE)):
            addresses[fmt.leading_u64(key), fmt.trailing_u32(key)] = fields.decode(errors="replace")
        addresses.update({(ledger, entry): reason for ledger, entry, reason in self.engine.set_aside.items()})
        for (ledger_id, entry_id), reason in sorted(addresses.items()):
            message = f"could not be read and was not delivered: {reason}"
            advice = "restore it from a backup, or run `duelog repair` to give it up"
            yield error("set-aside", f"ledger {ledger_id}, entry {entry_id}", message, advice)


def _keys(raw: lmdb.Transaction, prefix: bytes) -> Iterator[bytes]:
    """Keys that begin with `prefix`; their records are not verified."""
    cursor = raw.cursor()
    more = cursor.set_range(prefix)
    while more:
        key = bytes(cursor.key())
        if not key.startswith(prefix):
            return
        yield key
        more = cursor.next()
