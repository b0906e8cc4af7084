"""The contents of an environment: small records with their checksums, logs and ledgers by their owners, dense runs."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pyroaring import BitMap, BitMap64

from duelog.store.codec import format as fmt
from duelog.store.codec.body import decode_body
from duelog.store.codec.format import LedgerRecord, LedgerState, OriginRecord, Table, unpack_attempts
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Run, RunKind
from duelog.store.codec.sent_ids import KeyRecord, unpack_numbered
from duelog.store.env.memtable import Reads
from duelog.store.errors import CorruptEntry, DamagedStore
from duelog.store.files import pages
from duelog.store.log import catalog
from duelog.store.log.documents import Document
from duelog.store.log.scan import runs

from ..upkeep.schedule import unpack_schedule

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
    """True where a generation has had a commit after the one that describes it: with that come messages."""
    try:
        return pages.inspect(generation).transaction > 1
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
