"""The contents of an environment: small records with their checksums, logs and ledgers by their owners, dense runs.

Cancellations and admissions tell of each other: what was rescheduled fires under one of its two ids, and not under
both. A conditional entry names the entry that it replaces. The transaction that admits it cancels that one, unless it
has fired. So an admitted entry whose predecessor could still fire has lost a cancellation, exactly. The other way round
is not exact: an entry that was never admitted, because the process ended in between, looks like one whose admission is
lost once its predecessor is cancelled for another reason. So that is gone by only where an admission cannot be read.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap, BitMap64

from duelog.cleanup import sweep
from duelog.partitions.cancellations import BLOCK_BITS, members
from duelog.partitions.due_column import dues_of
from duelog.store.codec import format as fmt
from duelog.store.codec.body import decode_body
from duelog.store.codec.format import LedgerRecord, LedgerState, OriginRecord, Table, unpack_attempts
from duelog.store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from duelog.store.codec.run import Run, RunKind, UInt32s
from duelog.store.codec.sent_ids import KeyRecord, unpack_numbered
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads
from duelog.store.errors import CorruptEntry, CorruptRecord, DamagedStore
from duelog.store.log import catalog
from duelog.store.log.documents import Document
from duelog.store.log.scan import runs

from ..upkeep.schedule import schedule_rows, unpack_schedule

SNAPSHOTS = (Table.SNAPSHOT_PART, Table.SNAPSHOT_META)
"""Tables of snapshots: a snapshot says of itself whether it is whole."""

_READERS: dict[int, Callable[[bytes], object]] = {
    Table.COUNTER: fmt.unpack_u64,
    Table.TOPIC: fmt.TopicRecord.unpack,
    Table.TOPIC_NAME: bytes.decode,
    Table.DOCUMENT: Document.unpack,
    Table.PARTITION: fmt.PartitionRecord.unpack,
    Table.PARTITION_INFO: fmt.PartitionInfo.unpack,
    Table.LOG: fmt.unpack_u64,
    Table.FRONTIER: FrontierRecord.unpack,
    Table.LEDGER: fmt.LedgerRecord.unpack,
    Table.CURSOR: fmt.CursorRecord.unpack,
    Table.ATTEMPTS: partial(unpack_attempts, 0),
    Table.PAUSE: fmt.unpack_u64,
    Table.SEQUENCE: BitMap64.deserialize,
    Table.KEY: KeyRecord.unpack,
    Table.ORIGIN: OriginRecord.unpack,
    Table.RECURRENCE: unpack_schedule,
    **dict.fromkeys((Table.ACKED, Table.CANCELLED, Table.ADMITTED), BitMap.deserialize),
}


# -- small records -----------------------------------------------------------------------------


def read_record(key: bytes, value: bytes | memoryview) -> tuple[bytes, Any]:
    """(fields, what they say) of a small record or of its copy; without a form of their own they say themselves.

    Raises ValueError (CorruptRecord is one): it cannot be read.
    """
    fields = fmt.unseal(key, value)
    table = key[1] if key[0] == Table.COPY else key[0]
    if table == Table.NUMBERED:
        return fields, unpack_numbered(fmt.trailing_u64(key), fields)
    return fields, _READERS.get(table, bytes)(fields)


def table_name(key: bytes) -> str:
    """The name of a record's table, its number where no table of a store has it."""
    return Table(key[0]).name if key[0] in {int(table) for table in Table} else f"table {key[0]:#04x}"


def topic_ids(raw: Reads) -> set[int]:
    """The topics that have a name."""
    return {fmt.trailing_u32(key) for key in catalog.keys(raw, fmt.prefix(Table.TOPIC_NAME))}


def topic_names(raw: Reads) -> dict[int, str]:
    """Topic id -> full name. Raises CorruptRecord."""
    rows = catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))
    return {fmt.trailing_u32(key): fields.decode() for key, fields in rows}


def main_ledgers(raw: Reads) -> dict[int, int]:
    """Ledger id -> topic id of the main logs."""
    return {fmt.trailing_u64(key): fmt.leading_u32(key) for key in catalog.keys(raw, fmt.prefix(Table.LEDGER))}


def kept_ledgers(raw: Reads, topic_id: int) -> dict[int, LedgerRecord]:
    """The ledgers of a main log that are not being trimmed, by id."""
    return {number: row for number, row in catalog.ledgers(raw, topic_id) if row.state is not LedgerState.TRIMMING}


def read_logs(raw: Reads) -> dict[int, int]:
    """Topic id -> ledger id of the logs of a partition. Raises CorruptRecord."""
    rows = catalog.rows(raw, fmt.prefix(Table.LOG))
    return {fmt.trailing_u32(key): fmt.unpack_u64(fields) for key, fields in rows}


def was_used(generation: Path) -> bool:
    """True where a generation can be read, and holds messages."""
    try:
        return sweep.was_used(generation)
    except DamagedStore:
        return False


# -- runs --------------------------------------------------------------------------------------


class Gap(NamedTuple):
    """Entries [start, limit) of a ledger that are gone; `limit` below `start`: the run there overlaps another."""

    start: int
    limit: int


def run_ledgers(raw: Reads) -> list[int]:
    """The ledgers that have runs in an environment. O(ledgers)."""
    found = []
    cursor = raw.cursor()
    more = cursor.set_range(fmt.RUN_PREFIX)
    while more and len(key := bytes(cursor.key())) == fmt.RUN_KEY_BYTES:
        found.append(fmt.split_run_key(key)[0])
        more = cursor.set_range(fmt.run_key(found[-1] + 1, 0))
    return found


def dense_runs(raw: Reads, environment: str, ledger_id: int) -> Iterator[Run | CorruptEntry | Gap]:
    """The runs of a ledger; one that is damaged as its error, and what is missing between two that are whole."""
    expected = 0
    for run in runs(raw, environment, ledger_id):
        if isinstance(run, CorruptEntry):
            expected = -1
        else:
            if expected not in (-1, run.follows):
                yield Gap(expected, run.follows)
            expected = run.limit
        yield run


def marker_runs(raw: Reads, ledgers: Iterable[int]) -> Iterator[Run]:
    """The runs of markers in some ledgers of main logs, as far as they can be read."""
    for ledger_id in ledgers:
        for run in runs(raw, "main", ledger_id):
            if isinstance(run, Run) and run.kind == RunKind.MARKERS:
                yield run


def unreadable_bodies(run: Run) -> Iterator[CorruptEntry]:
    """The bodies of a run that do not match their checksum or have not their form. O(bytes)."""
    for entry_id, body in run.bodies():
        if isinstance(body, CorruptEntry):
            yield body
        elif body is not None:
            try:
                decode_body(body)
            except ValueError as reason:
                yield CorruptEntry(run.environment, run.ledger_id, entry_id, str(reason))


ByLedger = dict[int, BitMap]
"""Entries by the ledger id of their log."""


class Conditional(NamedTuple):
    """A conditional entry, and the one that it replaces."""

    ledger_id: int
    entry_id: int
    old_ledger: int
    old_entry: int


class Conditionals:
    """Every conditional entry that was met: 12 bytes each. One that replaces nothing names a ledger 0."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, npt.NDArray[np.uint64], UInt32s]] = []

    def add(self, run: Run) -> None:
        if run.kind == RunKind.MESSAGES and run.conditional:
            ledgers, entries = run.replaced()
            self._runs.append((run.ledger_id, run.first_entry, ledgers.copy(), entries.copy()))

    def add_all(self, environment: Environment, ledgers: Iterable[int]) -> None:
        """Take in all runs of some logs. O(headers)."""
        with environment.read() as raw:
            for ledger_id in ledgers:
                for run in runs(raw, environment.name, ledger_id):
                    if isinstance(run, Run):
                        self.add(run)

    def __iter__(self) -> Iterator[Conditional]:
        for ledger_id, first, ledgers, entries in self._runs:
            for at, (old_ledger, old_entry) in enumerate(zip(ledgers.tolist(), entries.tolist(), strict=True)):
                yield Conditional(ledger_id, first + at, old_ledger, old_entry)


class Withdrawn:
    """Cancelled and admitted entries as one transaction of the main environment has them."""

    def __init__(self, raw: Reads) -> None:
        self._raw = raw
        self._known: dict[tuple[Table, int], BitMap] = {}

    def of(self, table: Table, ledger_id: int) -> BitMap:
        """Members of CANCELLED or ADMITTED of a log. Raises CorruptRecord."""
        found = self._known.get((table, ledger_id))
        if found is None:
            found = self._known[table, ledger_id] = members(self._raw, table, ledger_id)
        return found


def lost_admissions(
    withdrawn: Withdrawn, conditionals: Conditionals, certain: ByLedger, unknown: Collection[tuple[int, int]] = ()
) -> ByLedger:
    """Entries that were admitted by what else there is. One for each entry replaced.

    certain: entries that have markers, or that schedules wait for. unknown: ledger and block of admissions that cannot
    be read: an entry there was admitted if the one that it replaces is cancelled.
    """
    found: ByLedger = {}
    suspects: dict[tuple[int, int], Conditional] = {}
    for each in conditionals:
        if each.entry_id in withdrawn.of(Table.ADMITTED, each.ledger_id):
            continue
        if each.entry_id in certain.get(each.ledger_id, ()):
            found.setdefault(each.ledger_id, BitMap()).add(each.entry_id)
        elif (
            (each.ledger_id, each.entry_id >> BLOCK_BITS) in unknown
            and each.old_entry in withdrawn.of(Table.CANCELLED, each.old_ledger)
            and each.entry_id not in withdrawn.of(Table.CANCELLED, each.ledger_id)
        ):
            suspects[each.old_ledger, each.old_entry] = each
    for each in conditionals if suspects else ():
        if each.entry_id in withdrawn.of(Table.ADMITTED, each.ledger_id):
            suspects.pop((each.old_ledger, each.old_entry), None)
    for each in suspects.values():
        found.setdefault(each.ledger_id, BitMap()).add(each.entry_id)
    return found


def waited_for(raw: Reads) -> ByLedger:
    """The occurrences that schedules wait for: recorded in the transaction that admits them."""
    found: ByLedger = {}
    for _, fields in schedule_rows(raw):
        try:
            waiting = unpack_schedule(fields).next_id
        except CorruptRecord:  # a finding of its own
            continue
        if waiting is not None:
            found.setdefault(waiting.ledger_id, BitMap()).add(waiting.entry_id)
    return found


def lost_cancellations(
    withdrawn: Withdrawn, conditionals: Conditionals, fired: Callable[[int, UInt32s], BitMap | None]
) -> ByLedger:
    """Entries whose successors are admitted, and that could fire all the same.

    fired: of a log's entries those that have fired, or None where the log is not there.
    """
    suspects: ByLedger = {}
    for each in conditionals:
        if each.entry_id in withdrawn.of(Table.ADMITTED, each.ledger_id) and (
            each.old_entry not in withdrawn.of(Table.CANCELLED, each.old_ledger)
        ):
            suspects.setdefault(each.old_ledger, BitMap()).add(each.old_entry)
    found: ByLedger = {}
    for ledger_id, entries in suspects.items():
        done = fired(ledger_id, np.array(entries, dtype=np.uint32))
        if done is not None and entries - done:
            found[ledger_id] = entries - done
    return found


def passed_of(environment: Environment, frontier: FrontierRecord | None, ledger_id: int, entries: UInt32s) -> BitMap:
    """Those of a log's entries that its frontier has passed, or that cannot be read."""
    dues = dues_of(environment, ledger_id, entries)
    passed = dues == UNREADABLE_DUE
    if frontier is not None:
        passed |= frontier.has_fired(entries, dues)
    return BitMap(entries[passed])
