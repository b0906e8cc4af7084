"""Facts that an audit takes from the main environment, all of one point in time, markers as columns.

`read_facts` copies them out of one short read transaction and works on them afterwards; no object is made per marker. A
record that cannot be read is a finding, and what depends on it is not judged.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ...cleanup.log_claims import acknowledged_by_all, bitmap_of, ids_of
from ...partitions.timespan import directory_name
from ...store.codec import format as fmt
from ...store.codec.format import CursorRecord, LedgerRecord, LedgerState, PartitionRecord, Table
from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Int64s, Run, RunKind, UInt32s
from ...store.env.environment import Environment
from ...store.env.memtable import ABSENT, Entry, Reads, fields_over, overlaid, unapplied_records
from ...store.errors import CorruptEntry, CorruptRecord, FormatMismatch, InvalidArgument
from ...store.log.ledger import find_tail
from ...store.names import TopicName
from ...store.policy.policy_records import effective
from ...survey.contents import Gap, dense_runs, read_record, table_name
from ...topics.dead_letters import DeadLetter
from ...topics.topic_state import KEEPER
from ..columns.held_letters import read_letters
from .audit_tables import AuditFinding, DeadLetterRow, LatenessRow, SubscriptionRow, TopicRow, finding

_MOST_SHOWN = 10

UNTIMED = -1
"""Stands for the time of markers written by a version that did not store it."""

LATENESS_EDGES_MS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 900_000, 3_600_000,
    21_600_000, 86_400_000, 604_800_000,
)  # fmt: skip
"""Upper bounds of the bins of lateness, exclusive; one more bin has none."""

_EDGES = np.array(LATENESS_EDGES_MS, dtype=np.int64)


class MarkerRun(NamedTuple):
    """The markers of one run, copied."""

    first_entry: int
    target: int
    base_ms: int
    fired_ms: int
    entries: UInt32s
    dues: Int64s

    @classmethod
    def copied(cls, run: Run) -> Self:
        """The columns of a run, to be kept after its transaction."""
        fired_ms = run.fired_ms()
        timed = UNTIMED if fired_ms is None else fired_ms
        return cls(run.first_entry, run.target, run.base_ms, timed, run.targets().copy(), run.dues())


class Marks(NamedTuple):
    """The markers in kept ledgers that point into one partition log.

    `markers` counts them, doubled ones too. `start_ms`: the partition that they name.
    """

    start_ms: int
    markers: int
    marked: BitMap
    doubled: BitMap
    acknowledged: BitMap


def ranges_text(entries: BitMap) -> str:
    """Some entry ids for people: `3, 5, 7 and 12 more`."""
    shown = ", ".join(str(entry_id) for entry_id in entries[:_MOST_SHOWN])
    return shown if len(entries) <= _MOST_SHOWN else f"{shown} and {len(entries) - _MOST_SHOWN:,} more"


NEVER_KEPT = 1 << 62
"""`kept_since_ms` of a topic whose main log cannot be read whole: no missing marker proves a loss."""

_LETTERS_A_TRANSACTION = 1_000


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
    """By the ledger that they point into; more than one where they name several partitions for it."""
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
        """Gather the markers of a topic, by the ledger that they stand in: marks by target, and how late they were.

        known False: a subscription that cannot be read may have acknowledged nothing.
        """
        topic.ledgers.sort()
        cursors = [record for _, record in topic.subscriptions] if known else []
        pieces: dict[tuple[int, int], list[tuple[UInt32s, npt.NDArray[np.bool_]]]] = defaultdict(list)
        bins = np.zeros(len(_EDGES) + 1, dtype=np.int64)
        untimed = 0
        for ledger in topic.ledgers:
            done = np.zeros(ledger.entries, dtype=np.bool_)
            done[ids_of(self.acknowledged_of(cursors, ledger))] = True
            late = []
            for run in markers.get(ledger.ledger_id, []):
                count = len(run.entries)
                pieces[run.target, run.base_ms].append((run.entries, done[run.first_entry : run.first_entry + count]))
                if run.fired_ms == UNTIMED:
                    untimed += count
                else:
                    late.append(run.fired_ms - run.dues)
            if late:
                bins += np.bincount(np.searchsorted(_EDGES, np.concatenate(late), side="right"), minlength=len(bins))
        for (target, start_ms), parts in pieces.items():
            entries, acknowledged = (np.concatenate(column) for column in zip(*parts, strict=True))
            marked = bitmap_of(entries)
            doubled = BitMap()
            if len(marked) < len(entries):
                values, counts = np.unique(entries, return_counts=True)
                doubled = bitmap_of(values[counts > 1])
            marks = Marks(start_ms, len(entries), marked, doubled, marked - bitmap_of(entries[~acknowledged]))
            topic.marks.setdefault(target, []).append(marks)
        by_bin = {UNTIMED: untimed, **dict(zip((*LATENESS_EDGES_MS, 0), bins.tolist(), strict=True))}
        self.lateness += [LatenessRow(topic.name, *each) for each in sorted(by_bin.items()) if each[1]]

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


def records_before(raw: Reads, limit: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of every record whose key is below `limit`: copied, with the checksum that it has. By key."""
    applied = takewhile(lambda row: row[0] < limit, ((bytes(key), value) for key, value in raw.cursor()))

    def value_of(key: bytes, value: bytes | memoryview | None, entry: Entry) -> bytes | None:
        if entry is ABSENT:
            return bytes(value or b"")
        fields = fields_over(key, value, entry)
        return None if fields is None else fmt.seal(key, fields)

    merged = overlaid(applied, unapplied_records(raw, b"", limit=limit), value_of)
    return ((key, value) for key, value in merged if value is not None)


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
                markers.append(MarkerRun.copied(run))
            else:
                messages += run.count
    return _LedgerCopy(find_tail(raw, name, ledger_id), stored, messages, markers, damage)


def _gap(ledger_id: int, start: int, limit: int) -> AuditFinding:
    message = f"entries from {start} to before {limit} are gone"
    return finding("missing-entries", f"main, ledger {ledger_id}", message, max(limit - start, 0))


def read_facts(main: Environment) -> StoreFacts:
    """The facts of a store. O(catalog and headers of main logs)."""
    copied = {}
    with main.read() as raw:
        rows = list(records_before(raw, fmt.RUN_PREFIX))
        for key, value in rows:
            if key[0] == Table.LEDGER:
                ledger_id, trimming = fmt.trailing_u64(key), False
                with suppress(ValueError):
                    trimming = LedgerRecord.unpack(fmt.unseal(key, value)).state is LedgerState.TRIMMING
                if not trimming:
                    copied[ledger_id] = _copy_ledger(raw, main.name, ledger_id)
    facts = StoreFacts()
    records: dict[int, list[tuple[bytes, Any]]] = defaultdict(list)
    damaged: dict[int, list[bytes]] = defaultdict(list)
    for key, value in rows:
        try:
            records[key[0]].append((key, read_record(key, value)[1]))
        except ValueError as error:
            facts.findings.append(finding("corrupt-record", f"main, {table_name(key)} {key.hex()}", str(error)))
            damaged[key[0]].append(key)
    facts.clock_ms = dict(records[Table.COUNTER]).get(fmt.counter_key("clock_mark"), 0)
    facts.partitions = {fmt.trailing_u64(key): record for key, record in records[Table.PARTITION]}
    facts.unreadable_partitions = {fmt.trailing_u64(key) for key in damaged[Table.PARTITION]}
    facts.frontiers = {_place(key): frontier for key, frontier in records[Table.FRONTIER]}
    facts.unjudged = {_place(key) for key in damaged[Table.FRONTIER]}
    for at, table in enumerate((Table.CANCELLED, Table.ADMITTED)):
        facts.unjudged_ledgers |= {fmt.leading_u64(key) for key in damaged[table]}
        for key, entries in records[table]:
            facts.withdrawn.setdefault(fmt.leading_u64(key), (BitMap(), BitMap()))[at].update(entries)
    for key, reason in records[Table.SET_ASIDE]:
        facts.quarantined[fmt.leading_u64(key), fmt.trailing_u32(key)] = reason.decode(errors="replace")
    for key, entries in records[Table.ACKED]:
        facts.acknowledged.setdefault(fmt.leading_u32(key), {})[fmt.trailing_u64(key)] = entries.serialize()
    policies = {key: value for key, value in rows if key[0] == Table.POLICY}
    for topic_id in map(fmt.trailing_u32, damaged[Table.TOPIC_NAME]):
        facts.topics[topic_id] = TopicFacts(topic_id, f"topic {topic_id}")
    for key, name in records[Table.TOPIC_NAME]:
        topic = facts.topics[fmt.trailing_u32(key)] = TopicFacts(fmt.trailing_u32(key), name)
        with suppress(CorruptRecord, FormatMismatch, InvalidArgument):
            in_force = effective(policies, TopicName.parse(name))
            topic.retention = in_force.retention_ms, in_force.retention_bytes
    for key, cursor in records[Table.CURSOR]:
        if (owner := facts.topics.get(fmt.leading_u32(key))) is not None:
            owner.subscriptions.append((fmt.split_named_key(key, "replace")[1], cursor))
    _read_main_logs(facts, [*records[Table.LEDGER], *((key, None) for key in damaged[Table.LEDGER])], copied)
    unknown = {fmt.leading_u32(key) for key in damaged[Table.CURSOR]}
    markers = {ledger_id: ledger.markers for ledger_id, ledger in copied.items()}
    for topic in facts.topics.values():
        facts.take_markers(topic, markers, known=topic.topic_id not in unknown)
    return facts


def _read_main_logs(
    facts: StoreFacts, ledgers: list[tuple[bytes, LedgerRecord | None]], copied: dict[int, _LedgerCopy]
) -> None:
    for key, record in ledgers:
        topic_id, ledger_id = _place(key)
        if topic_id in facts.topics and ledger_id in copied:  # else it is being trimmed
            topic, ledger = facts.topics[topic_id], copied[ledger_id]
            topic.ledgers.append(KeptLedger(ledger_id, record, *ledger[:3]))
            gone = list(ledger.damage)
            if record is not None and record.state is LedgerState.CLOSED and not gone and ledger.tail != record.entries:
                gone.append(_gap(ledger_id, ledger.tail, record.entries))
            facts.findings += gone
            topic.complete &= record is not None and not gone


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
                    with main.read() as raw:
                        letters = list(read_letters(raw, topic.name, ledger.ledger_id, some))
                    yield from (letter for letter in letters if isinstance(letter, DeadLetter))
