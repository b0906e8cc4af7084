"""Facts that an audit takes from the main environment, all of one point in time.

`read_facts` copies it out of one short read transaction and works on it afterwards. A record that cannot be read is a
finding, and what depends on it is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from pyroaring import BitMap

from ...cleanup.log_claims import acknowledged_by_all
from ...partitions.timespan import directory_name
from ...store.codec import format as fmt
from ...store.codec.format import CursorRecord, LedgerRecord, LedgerState, PartitionRecord, Table, unpack_attempts
from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Run, RunKind
from ...store.env.environment import Environment
from ...store.env.memtable import Reads, unapplied_records
from ...store.errors import CorruptEntry, CorruptRecord, FormatMismatch, InvalidArgument
from ...store.log.ledger import find_tail
from ...store.log.scan import runs
from ...store.names import TopicName
from ...store.policy.policy_records import effective
from ...survey.contents import Gap, dense_runs
from ...survey.markers import MarkerRun, Marks, TopicMarkers, copy_markers
from ...topics.dead_letters import DeadLetter
from ...topics.subscription_state import KEEPER
from ..columns.held_letters import read_letters
from .audit_tables import AuditFinding, DeadLetterRow, LatenessRow, SubscriptionRow, TopicRow, finding

NEVER_KEPT = 1 << 62
"""`kept_since_ms` of a topic whose main log cannot be read whole: no missing marker proves a loss."""

_LETTERS_A_TRANSACTION = 1_000
_RUNS_A_TRANSACTION = 512

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
    """Every run of the kept ledgers could be read."""
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
    acknowledged: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Subscription id -> ledger id -> serialised entries that it has acknowledged beyond its mark-delete position."""
    findings: list[AuditFinding] = field(default_factory=list)
    lateness: list[LatenessRow] = field(default_factory=list)

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

    def subscription_rows(self) -> list[SubscriptionRow]:
        """A row for each subscription, in order."""
        found = []
        for topic in self.topics.values():
            for name, record in topic.subscriptions:
                backlog = sum(each.entries - len(self.acknowledged_of([record], each)) for each in topic.ledgers)
                mark = record.mark_delete
                found.append(
                    SubscriptionRow(
                        topic.name, name, backlog, mark.ledger_id, mark.entry_id, record.created_ms,
                        bool(record.flags & 1),
                    )
                )  # fmt: skip
        return sorted(found)

    def take_markers(self, topic: TopicFacts, markers: Mapping[int, list[MarkerRun]], *, known: bool = True) -> None:
        """Gather the markers of a topic, by the ledger that they stand in.

        known False: a subscription that cannot be read may have acknowledged nothing.
        """
        topic.ledgers.sort()
        gathered = TopicMarkers()
        cursors = [record for _, record in topic.subscriptions] if known else []
        for ledger in topic.ledgers:
            done = self.acknowledged_of(cursors, ledger)
            gathered.add_ledger(markers.get(ledger.ledger_id, []), ledger.entries, done)
        topic.marks = gathered.by_target()
        self.lateness += [LatenessRow(topic.name, *each) for each in sorted(gathered.lateness().items())]

    def acknowledged_of(self, cursors: Sequence[CursorRecord], ledger: KeptLedger) -> BitMap:
        rows = [(cursor, self.acknowledged.get(cursor.subscription_id, {})) for cursor in cursors]
        return acknowledged_by_all(rows, ledger.ledger_id, ledger.entries)


def log_address(topic: str | None, topic_id: int, start_ms: int) -> str:
    """How findings name one topic's log in one partition."""
    return f"{topic or f'deleted topic {topic_id}'}, partition {partition_name(start_ms)}"


def partition_name(start_ms: int) -> str:
    """The directory's name; the number where it is no time (a damaged marker can name anything)."""
    try:
        return directory_name(start_ms)
    except ValueError:
        return str(start_ms)


class _LedgerCopy(NamedTuple):
    tail: int
    stored_bytes: int
    messages: int
    markers: list[MarkerRun]
    damage: list[AuditFinding]


class _Copy(NamedTuple):
    """Rows and ledgers copied out of the transaction."""

    rows: dict[int, Rows]
    ledgers: dict[int, _LedgerCopy]


def read_facts(main: Environment) -> StoreFacts:
    """The facts of a store. O(catalog and headers of main logs)."""
    with main.read() as raw:
        copied = _copy(raw, main.name)
    return _Reader(copied).facts()


def records_before(raw: Reads, limit: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of every record whose key is below `limit`: copied, with the checksum that it has. By key."""
    unapplied = sorted(unapplied_records(raw, b"").items(), reverse=True)

    def before(key: bytes) -> Iterator[tuple[bytes, bytes]]:
        while unapplied and unapplied[-1][0] < min(key, limit):
            later, fields = unapplied.pop()
            yield later, fmt.seal(later, fields)

    for view, value in raw.cursor():
        key = bytes(view)
        yield from before(key)
        if key >= limit:
            return
        if unapplied and unapplied[-1][0] == key:
            yield from before(key + b"\0")
        else:
            yield key, bytes(value)
    yield from before(limit)


def _copy(raw: Reads, name: str) -> _Copy:
    rows: dict[int, Rows] = {}
    for key, value in records_before(raw, fmt.RUN_PREFIX):
        rows.setdefault(key[0], []).append((key, value))
    ledgers = {}
    for key, value in rows.get(Table.LEDGER, []):
        trimming = False
        with suppress(ValueError):
            trimming = LedgerRecord.unpack(fmt.unseal(key, value)).state is LedgerState.TRIMMING
        if not trimming:
            ledgers[fmt.trailing_u64(key)] = _copy_ledger(raw, name, fmt.trailing_u64(key))
    return _Copy(rows, ledgers)


def _copy_ledger(raw: Reads, name: str, ledger_id: int) -> _LedgerCopy:
    markers: list[MarkerRun] = []
    damage: list[AuditFinding] = []
    stored = messages = 0
    for run in dense_runs(raw, name, ledger_id):
        if isinstance(run, CorruptEntry):
            damage.append(finding("corrupt-entry", f"main, ledger {ledger_id}, entry {run.entry_id}", run.reason, 1))
        elif isinstance(run, Gap):
            damage.append(_gap(ledger_id, *run))
        else:
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

    def facts(self) -> StoreFacts:
        facts = self._facts
        read_elsewhere = {Table.COUNTER, Table.PARTITION, Table.TOPIC_NAME, Table.FRONTIER, Table.LEDGER,
                          Table.CURSOR, Table.ACKED, Table.CANCELLED, Table.ADMITTED, Table.SET_ASIDE}  # fmt: skip
        parsers: dict[Table, Callable[[bytes], object]] = {
            Table.ATTEMPTS: partial(unpack_attempts, 0),
            Table.PAUSE: fmt.unpack_u64,
        }
        for table in Table:
            if table not in read_elsewhere:
                self._read(table, parsers.get(table, bytes))
        facts.clock_ms = dict(self._read(Table.COUNTER, fmt.unpack_u64)).get(fmt.counter_key("clock_mark"), 0)
        partitions, damaged = self._read_or_not(Table.PARTITION, PartitionRecord.unpack)
        facts.partitions = {fmt.trailing_u64(key): record for key, record in partitions}
        facts.unreadable_partitions = {fmt.trailing_u64(key) for key in damaged}
        self._topics()
        frontiers, damaged = self._read_or_not(Table.FRONTIER, FrontierRecord.unpack)
        facts.frontiers = {_place(key): frontier for key, frontier in frontiers}
        facts.unjudged = {_place(key) for key in damaged}
        for table, at in ((Table.CANCELLED, 0), (Table.ADMITTED, 1)):
            bitmaps, damaged = self._read_or_not(table, BitMap.deserialize)
            facts.unjudged_ledgers |= {fmt.leading_u64(key) for key in damaged}
            for key, entries in bitmaps:
                facts.withdrawn.setdefault(fmt.leading_u64(key), (BitMap(), BitMap()))[at].update(entries)
        for key, reason in self._read(Table.SET_ASIDE, bytes):
            facts.quarantined[fmt.leading_u64(key), fmt.trailing_u32(key)] = reason.decode(errors="replace")
        for key, row in self._read(Table.ACKED, lambda fields: BitMap.deserialize(fields).serialize()):
            facts.acknowledged.setdefault(fmt.leading_u32(key), {})[fmt.trailing_u64(key)] = row
        self._main_logs(self._cursors())
        return facts

    def _read(self, table: Table, parse: Callable[[bytes], T]) -> list[tuple[bytes, T]]:
        """(key, record) of a table; a damaged one is a finding."""
        return self._read_or_not(table, parse)[0]

    def _read_or_not(self, table: Table, parse: Callable[[bytes], T]) -> tuple[list[tuple[bytes, T]], list[bytes]]:
        """The same, and the keys of the damaged ones."""
        found, damaged = [], []
        for key, value in self._copied.rows.get(table, []):
            try:
                found.append((key, parse(fmt.unseal(key, value))))
            except (CorruptRecord, ValueError) as error:
                self._facts.findings.append(finding("corrupt-record", f"main, {table.name} {key.hex()}", str(error)))
                damaged.append(key)
        return found, damaged

    def _topics(self) -> None:
        topics = self._facts.topics
        sealed = dict(self._copied.rows.get(Table.POLICY, []))
        names, damaged = self._read_or_not(Table.TOPIC_NAME, bytes)
        for topic_id in map(fmt.trailing_u32, damaged):
            topics[topic_id] = TopicFacts(topic_id, f"topic {topic_id}")
        for key, name in names:
            topic_id = fmt.trailing_u32(key)
            topic = topics[topic_id] = TopicFacts(topic_id, name.decode(errors="replace"))
            with suppress(CorruptRecord, FormatMismatch, InvalidArgument):
                policies = effective(sealed, TopicName.parse(topic.name))
                topic.retention = policies.retention_ms, policies.retention_bytes

    def _cursors(self) -> set[int]:
        """Give the topics their subscriptions; ids of those that have one that is damaged."""
        cursors, damaged = self._read_or_not(Table.CURSOR, CursorRecord.unpack)
        for key, record in cursors:
            topic = self._facts.topics.get(fmt.leading_u32(key))
            if topic is not None:
                topic.subscriptions.append((fmt.split_named_key(key, "replace")[1], record))
        return {fmt.leading_u32(key) for key in damaged}

    def _main_logs(self, damaged_cursors: set[int]) -> None:
        facts, copied = self._facts, self._copied.ledgers
        ledgers, damaged = self._read_or_not(Table.LEDGER, LedgerRecord.unpack)
        for key, record in (*ledgers, *((key, None) for key in damaged)):
            topic_id, ledger_id = _place(key)
            if topic_id in facts.topics and ledger_id in copied:  # else it is being trimmed
                kept = KeptLedger(ledger_id, record, *copied[ledger_id][:3])
                facts.topics[topic_id].ledgers.append(kept)
        markers = {ledger_id: ledger.markers for ledger_id, ledger in copied.items()}
        for topic in facts.topics.values():
            facts.take_markers(topic, markers, known=topic.topic_id not in damaged_cursors)
            for ledger in topic.ledgers:
                self._complete(topic, ledger, copied[ledger.ledger_id].damage)

    def _complete(self, topic: TopicFacts, ledger: KeptLedger, damage: list[AuditFinding]) -> None:
        """Note what of a ledger is gone; it is a finding, and the topic is not complete."""
        findings, record = self._facts.findings, ledger.record
        findings += damage
        if record is None or damage:
            topic.complete = False
        elif record.state is LedgerState.CLOSED and ledger.entries != record.entries:
            topic.complete = False
            findings.append(_gap(ledger.ledger_id, ledger.entries, record.entries))


def _place(key: bytes) -> tuple[int, int]:
    """(topic id, partition start or ledger id)."""
    return fmt.leading_u32(key), fmt.trailing_u64(key)


# -- what is read after the facts, in short transactions ---------------------------------------


def dead_letter_rows(main: Environment, facts: StoreFacts) -> list[DeadLetterRow]:
    """A row for each topic, subscription and reason. What cannot be read is not counted. O(letters)."""
    held = _held_letters(main, facts)
    return count_letters((letter.topic, letter.subscription, letter.reason, letter.dead_ms) for letter in held)


def count_letters(letters: Iterable[tuple[str, str, str, int]]) -> list[DeadLetterRow]:
    """The rows of letters, of which topic, subscription, reason and time of death are given.

    Of a reason counts what stands before its first colon: of an exception's type and text, the type.
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    for topic, subscription, reason, dead_ms in letters:
        found.setdefault((topic, subscription, reason.partition(": ")[0]), []).append(dead_ms)
    return [DeadLetterRow(*key, len(times), min(times), max(times)) for key, times in sorted(found.items())]


def _held_letters(main: Environment, facts: StoreFacts) -> Iterator[DeadLetter]:
    for topic in facts.topics.values():
        for _, cursor in topic.subscriptions:
            for ledger in topic.ledgers if cursor.flags & KEEPER else ():
                acknowledged = facts.acknowledged_of([cursor], ledger)
                left = (each for each in range(ledger.entries) if each not in acknowledged)
                while some := list(islice(left, _LETTERS_A_TRANSACTION)):
                    yield from _read_letters(main, topic.name, ledger.ledger_id, some)


def _read_letters(main: Environment, name: str, ledger_id: int, entries: list[int]) -> list[DeadLetter]:
    with main.read() as raw:
        return [each for each in read_letters(raw, name, ledger_id, entries) if isinstance(each, DeadLetter)]


def main_body_findings(main: Environment, facts: StoreFacts) -> Iterator[AuditFinding]:
    """Damaged messages of main logs. What was trimmed meanwhile is not looked at. O(bytes)."""
    for topic in facts.topics.values():
        for ledger in topic.ledgers:
            if ledger.messages:
                for entry_id, reason in _damaged(main, ledger.ledger_id, ledger.entries):
                    address = f"main, ledger {ledger.ledger_id}, entry {entry_id}"
                    yield finding("corrupt-entry", address, reason, 1)


def _damaged(main: Environment, ledger_id: int, limit: int) -> Iterator[tuple[int, str]]:
    start = 0
    while start < limit:
        found: list[tuple[int, str]] = []
        with main.read() as raw:
            some = list(islice(runs(raw, main.name, ledger_id, start, limit), _RUNS_A_TRANSACTION))
            for run in some:
                if isinstance(run, Run) and run.kind == RunKind.MESSAGES:
                    found += run.damaged_bodies()
            last = some[-1] if len(some) == _RUNS_A_TRANSACTION else None
            start = limit if last is None else last.limit if isinstance(last, Run) else last.entry_id + 1
        yield from found
