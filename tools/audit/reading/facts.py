"""What an audit knows from the main environment, all of one point in time.

`read_facts` copies it out of one short read transaction and works on it afterwards. A record that cannot be read is a
finding, and what depends on it is not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import lmdb
from pyroaring import BitMap

from ....cleanup.claims import acknowledged_by_all
from ....partitions.timespan import directory_name
from ....store.codec import format as fmt
from ....store.codec.format import CursorRecord, LedgerRecord, LedgerState, PartitionRecord, Table
from ....store.codec.frontier import FrontierRecord
from ....store.codec.run import RunKind
from ....store.env.environment import Environment
from ....store.errors import CorruptEntry, CorruptRecord, FormatMismatch, InvalidArgument
from ....store.log.ledger import find_tail
from ....store.log.scan import runs
from ....store.names import TopicName
from ....store.policy.policy_records import effective
from ..tables import AuditFinding, LatenessRow, SubscriptionRow, TopicRow, finding
from .marks import MarkerRun, Marks, TopicMarkers, copy_markers

NEVER_KEPT = 1 << 62
"""`kept_since_ms` of a topic whose main log cannot be read whole: no missing marker proves a loss."""

T = TypeVar("T")
Rows = list[tuple[bytes, bytes]]


class KeptLedger(NamedTuple):
    """A ledger of a main log that is not being trimmed. `record` None: it cannot be read."""

    ledger_id: int
    record: LedgerRecord | None
    entries: int
    stored_bytes: int
    messages: int


@dataclass(slots=True)
class TopicFacts:
    """A topic, its main log and its subscriptions."""

    topic_id: int
    name: str
    ledgers: list[KeptLedger] = field(default_factory=list)
    complete: bool = True
    """Whether every run of the kept ledgers could be read."""
    subscriptions: list[tuple[str, CursorRecord]] = field(default_factory=list)
    marks: dict[int, list[Marks]] = field(default_factory=dict)
    retention: tuple[int, int] | None = None
    """The policies `retention_ms` and `retention_bytes` in force; None: not known."""

    @property
    def kept_since_ms(self) -> int:
        """The markers of whatever was due after this are in the kept ledgers, if there are any.

        A marker is never written before its message is due, and ledgers are trimmed from the front; the first ledger
        of all is older than whatever is due later than it was sent.
        """
        first = self.ledgers[0].record if self.ledgers else None
        return NEVER_KEPT if first is None or not self.complete else first.created_ms


@dataclass(slots=True)
class StoreFacts:
    """Everything an audit takes from the main environment."""

    partitions: dict[int, PartitionRecord] = field(default_factory=dict)
    unreadable_partitions: set[int] = field(default_factory=set)
    """Starts of partitions whose catalog record is damaged."""
    topics: dict[int, TopicFacts] = field(default_factory=dict)
    frontiers: dict[tuple[int, int], FrontierRecord] = field(default_factory=dict)
    """(topic id, partition start) -> frontier."""
    unjudged: set[tuple[int, int]] = field(default_factory=set)
    """(topic id, partition start) whose frontier is damaged."""
    withdrawn: dict[int, tuple[BitMap, BitMap]] = field(default_factory=dict)
    """Ledger of a partition log -> entries cancelled, conditional entries admitted."""
    unjudged_ledgers: set[int] = field(default_factory=set)
    """Ledgers of partition logs whose cancellations cannot be read."""
    quarantined: dict[tuple[int, int], str] = field(default_factory=dict)
    """(ledger id, entry id) -> reason."""
    clock_ms: int = 0
    findings: list[AuditFinding] = field(default_factory=list)
    lateness: list[LatenessRow] = field(default_factory=list)
    trimming: set[int] = field(default_factory=set)
    """Main-log ledgers that are being removed."""

    def topic_name(self, topic_id: int) -> str | None:
        """The full name; None: the topic was deleted."""
        topic = self.topics.get(topic_id)
        return None if topic is None else topic.name

    def topic_rows(self) -> list[TopicRow]:
        """A row for each topic."""
        return [
            TopicRow(
                topic.name,
                len(topic.ledgers),
                sum(ledger.messages for ledger in topic.ledgers),
                sum(ledger.entries - ledger.messages for ledger in topic.ledgers),
                sum(ledger.stored_bytes for ledger in topic.ledgers),
                len(topic.subscriptions),
            )
            for topic in sorted(self.topics.values(), key=lambda each: each.name)
        ]


def log_address(topic: str | None, topic_id: int, start_ms: int) -> str:
    """How findings name one topic's log in one partition."""
    return f"{topic or f'deleted topic {topic_id}'}, partition {partition_name(start_ms)}"


def partition_name(start_ms: int) -> str:
    """The directory's name; the number where it is no time (a damaged marker can name anything)."""
    try:
        return directory_name(start_ms)
    except ValueError:
        return str(start_ms)


class _Copy(NamedTuple):
    """What was copied out of the transaction."""

    rows: dict[int, Rows]
    ledgers: dict[int, _LedgerCopy]


class _LedgerCopy(NamedTuple):
    tail: int
    stored_bytes: int
    messages: int
    markers: list[MarkerRun]
    damage: list[AuditFinding]


def read_facts(main: Environment) -> tuple[StoreFacts, list[SubscriptionRow]]:
    """The facts and the subscriptions of a store. O(catalog and headers of main logs)."""
    with main.read() as raw:
        copied = _copy(raw, main.name)
    return _Reader(copied).facts()


def _copy(raw: lmdb.Transaction, name: str) -> _Copy:
    rows: dict[int, Rows] = {}
    cursor = raw.cursor()
    more = cursor.first()
    while more:
        key = bytes(cursor.key())
        if key >= fmt.RUN_PREFIX:
            break
        rows.setdefault(key[0], []).append((key, bytes(cursor.value())))
        more = cursor.next()
    ledgers = {}
    for key, value in rows.get(Table.LEDGER, []):
        try:
            trimming = LedgerRecord.unpack(fmt.unseal(key, value)).state is LedgerState.TRIMMING
        except ValueError:
            trimming = False
        if not trimming:
            ledgers[fmt.trailing_u64(key)] = _copy_ledger(raw, name, fmt.trailing_u64(key))
    return _Copy(rows, ledgers)


def _copy_ledger(raw: lmdb.Transaction, name: str, ledger_id: int) -> _LedgerCopy:
    markers: list[MarkerRun] = []
    damage: list[AuditFinding] = []
    expected = stored = messages = 0
    for run in runs(raw, name, ledger_id):
        if isinstance(run, CorruptEntry):
            damage.append(finding("corrupt-entry", f"main, ledger {ledger_id}, entry {run.entry_id}", run.reason, 1))
            expected = -1
            continue
        if expected not in (-1, run.first_entry):
            damage.append(_gap(ledger_id, expected, run.first_entry))
        expected = run.limit
        stored += run.stored_bytes
        if run.kind == RunKind.MARKERS:
            markers.append(copy_markers(run))
        else:
            messages += run.count
    return _LedgerCopy(find_tail(raw, name, ledger_id), stored, messages, markers, damage)


def _gap(ledger_id: int, start: int, limit: int) -> AuditFinding:
    message = f"entries from {start} to before {limit} are gone"
    return finding("missing-entries", f"main, ledger {ledger_id}", message, max(limit - start, 0))


class _Reader:
    """Makes facts of what was copied."""

    def __init__(self, copied: _Copy) -> None:
        self._copied = copied
        self._facts = StoreFacts()
        self._acked: dict[int, dict[int, bytes]] = {}
        self._damaged_cursors: set[int] = set()

    def facts(self) -> tuple[StoreFacts, list[SubscriptionRow]]:
        facts = self._facts
        self._verify_the_rest()
        for key, mark in self._read(Table.COUNTER, fmt.unpack_u64):
            if key == fmt.counter_key("clock_mark"):
                facts.clock_ms = mark
        for key, record in self._read(
            Table.PARTITION,
            PartitionRecord.unpack,
            lambda key: facts.unreadable_partitions.add(fmt.trailing_u64(key)),
        ):
            facts.partitions[fmt.trailing_u64(key)] = record
        self._topics()
        for key, frontier in self._read(
            Table.FRONTIER,
            FrontierRecord.unpack,
            lambda key: facts.unjudged.add((fmt.leading_u32(key), fmt.trailing_u64(key))),
        ):
            facts.frontiers[fmt.leading_u32(key), fmt.trailing_u64(key)] = frontier
        self._withdrawn()
        for key, reason in self._read(Table.SET_ASIDE, bytes):
            address = fmt.leading_u64(key), fmt.trailing_u32(key)
            facts.quarantined[address] = reason.decode(errors="replace")
        self._cursors()
        self._main_logs()
        return facts, [row for topic in facts.topics.values() for row in self._subscription_rows(topic)]

    def _read(
        self, table: Table, parse: Callable[[bytes], T], damaged: Callable[[bytes], object] | None = None
    ) -> list[tuple[bytes, T]]:
        """(key, record) of a table; a damaged one is a finding, and `damaged` is told its key."""
        found = []
        for key, value in self._copied.rows.get(table, []):
            try:
                found.append((key, parse(fmt.unseal(key, value))))
            except (CorruptRecord, ValueError) as error:
                self._facts.findings.append(finding("corrupt-record", f"main, {table.name} {key.hex()}", str(error)))
                if damaged is not None:
                    damaged(key)
        return found

    def _verify_the_rest(self) -> None:
        read_elsewhere = {Table.COUNTER, Table.PARTITION, Table.TOPIC_NAME, Table.FRONTIER, Table.LEDGER,
                          Table.CURSOR, Table.ACKED, Table.CANCELLED, Table.ADMITTED, Table.SET_ASIDE}  # fmt: skip
        for table in Table:
            if table not in read_elsewhere:
                self._read(table, bytes)

    def _topics(self) -> None:
        facts = self._facts

        def unnamed(key: bytes) -> None:
            topic_id = fmt.trailing_u32(key)
            facts.topics[topic_id] = TopicFacts(topic_id, f"topic {topic_id}")

        sealed = dict(self._copied.rows.get(Table.POLICY, []))
        for key, name in self._read(Table.TOPIC_NAME, bytes, unnamed):
            topic_id = fmt.trailing_u32(key)
            topic = facts.topics[topic_id] = TopicFacts(topic_id, name.decode(errors="replace"))
            with suppress(CorruptRecord, FormatMismatch, InvalidArgument):
                policies = effective(sealed, TopicName.parse(topic.name))
                topic.retention = policies.retention_ms, policies.retention_bytes

    def _withdrawn(self) -> None:
        facts = self._facts
        for table, at in ((Table.CANCELLED, 0), (Table.ADMITTED, 1)):
            for key, entries in self._read(
                table,
                BitMap.deserialize,
                lambda key: facts.unjudged_ledgers.add(fmt.leading_u64(key)),
            ):
                both = facts.withdrawn.setdefault(fmt.leading_u64(key), (BitMap(), BitMap()))
                both[at].update(entries)

    def _cursors(self) -> None:
        facts = self._facts
        for key, row in self._read(Table.ACKED, lambda fields: BitMap.deserialize(fields).serialize()):
            self._acked.setdefault(fmt.leading_u32(key), {})[fmt.trailing_u64(key)] = row
        for key, record in self._read(
            Table.CURSOR, CursorRecord.unpack, lambda key: self._damaged_cursors.add(fmt.leading_u32(key))
        ):
            topic = facts.topics.get(fmt.leading_u32(key))
            if topic is not None:
                topic.subscriptions.append((fmt.split_named_key(key, "replace")[1], record))

    def _main_logs(self) -> None:
        facts, copied = self._facts, self._copied

        def unreadable(key: bytes) -> None:
            topic = facts.topics.get(fmt.leading_u32(key))
            ledger_id = fmt.trailing_u64(key)
            if topic is not None and ledger_id in copied.ledgers:
                topic.ledgers.append(_kept(ledger_id, None, copied.ledgers[ledger_id]))

        for key, record in self._read(Table.LEDGER, LedgerRecord.unpack, unreadable):
            ledger_id = fmt.trailing_u64(key)
            topic = facts.topics.get(fmt.leading_u32(key))
            if record.state is LedgerState.TRIMMING:
                facts.trimming.add(ledger_id)
            elif topic is not None:
                topic.ledgers.append(_kept(ledger_id, record, copied.ledgers[ledger_id]))
        for topic in facts.topics.values():
            topic.ledgers.sort()
            self._markers(topic)

    def _markers(self, topic: TopicFacts) -> None:
        facts = self._facts
        markers = TopicMarkers()
        acked = [(record, self._acked.get(record.subscription_id, {})) for _, record in topic.subscriptions]
        known = topic.topic_id not in self._damaged_cursors  # else some subscription may have acknowledged nothing
        for ledger in topic.ledgers:
            copied = self._copied.ledgers[ledger.ledger_id]
            facts.findings += copied.damage
            record = ledger.record
            if record is None or copied.damage:
                topic.complete = False
            elif record.state is LedgerState.CLOSED and copied.tail != record.entries:
                topic.complete = False
                facts.findings.append(_gap(ledger.ledger_id, copied.tail, record.entries))
            done = acknowledged_by_all(acked, ledger.ledger_id, copied.tail) if known else BitMap()
            markers.add_ledger(copied.markers, copied.tail, done)
        topic.marks = markers.by_target()
        facts.lateness += [LatenessRow(topic.name, *each) for each in sorted(markers.lateness().items())]

    def _subscription_rows(self, topic: TopicFacts) -> list[SubscriptionRow]:
        found = []
        for name, record in topic.subscriptions:
            acked = self._acked.get(record.subscription_id, {})
            backlog = 0
            for ledger in topic.ledgers:
                done = acknowledged_by_all([(record, acked)], ledger.ledger_id, ledger.entries)
                backlog += ledger.entries - len(done)
            found.append(
                SubscriptionRow(
                    topic.name, name, backlog, record.ledger_id, record.next_entry - 1, record.created_ms,
                    bool(record.flags & 1),
                )
            )  # fmt: skip
        return found


def _kept(ledger_id: int, record: LedgerRecord | None, copied: _LedgerCopy) -> KeptLedger:
    return KeptLedger(ledger_id, record, copied.tail, copied.stored_bytes, copied.messages)
