"""What `check` looks at in any environment: its pages, the checksum of every record, the runs of every ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from pyroaring import BitMap, BitMap64

from duelog.cleanup.origin import OriginRecord
from duelog.store.codec import format as fmt
from duelog.store.codec.attempt_rows import unpack_attempts
from duelog.store.codec.body import decode_body
from duelog.store.codec.format import Table, copied_key
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Run
from duelog.store.codec.sent_ids import KeyRecord, unpack_numbered
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads
from duelog.store.errors import CorruptEntry
from duelog.store.log.documents import Document
from duelog.store.log.scan import runs

from ..background.schedule_record import unpack_schedule
from .finding import REPAIR, Finding, corrupt, error

_SNAPSHOTS = (Table.SNAPSHOT_PART, Table.SNAPSHOT_META)
_BITMAPS = (Table.ACKED, Table.CANCELLED, Table.ADMITTED)
_READERS: dict[int, Callable[[bytes], object]] = {
    Table.COUNTER: fmt.unpack_u64,
    Table.TOPIC: fmt.TopicRecord.unpack,
    Table.TOPIC_NAME: bytes.decode,
    Table.DOCUMENT: Document.unpack,
    Table.PARTITION: fmt.PartitionRecord.unpack,
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
    **dict.fromkeys(_BITMAPS, BitMap.deserialize),
}


def check_pages(environment: Environment) -> Iterator[Finding]:
    """Every page of the data file. O(pages)."""
    for problem in environment.find_problems():
        yield error("page", environment.name, problem)


def verify_record(key: bytes, value: bytes | memoryview) -> bytes:
    """The fields of a small record or of its copy. Raises ValueError (CorruptRecord is one): it cannot be read."""
    fields = fmt.unseal(key, value)
    table = key[1] if key[0] == Table.COPY else key[0]
    reader = _READERS.get(table)
    if reader is not None:
        reader(fields)
    elif table == Table.NUMBERED:
        unpack_numbered(fmt.trailing_u64(key), fields)
    return fields


def check_records(raw: Reads, name: str, ledgers: Collection[int]) -> Iterator[Finding]:
    """Every small record against its checksum, and runs that belong to none of `ledgers`. O(records + ledgers)."""
    cursor = raw.cursor()
    more = cursor.first()
    known = {int(table) for table in Table}
    while more:
        key = bytes(cursor.key())
        table = key[0]
        if table == Table.RUN:
            ledger_id = fmt.leading_u64(key)
            if ledger_id not in ledgers:
                yield error("unknown-ledger", f"{name}, ledger {ledger_id}", "has entries, and is in no catalog")
            more = cursor.set_range(fmt.run_key(ledger_id + 1, 0))
            continue
        address = f"{name}, {Table(table).name if table in known else 'table'} {key.hex()}"
        if table not in known:
            yield error("unknown-table", address, "no table of a store has this number")
        elif table not in _SNAPSHOTS:  # a snapshot says of itself whether it is whole
            try:
                if table == Table.COPY:  # what it says is told of the record that it is the copy of
                    fmt.unseal(key, cursor.value())
                else:
                    verify_record(key, cursor.value())
            except ValueError as reason:
                yield error("corrupt-record", address, str(reason))
            if table == Table.COPY and raw.get(copied_key(key)) is None:
                yield error("lost-record", address, "is the copy of a record that is gone")
        more = cursor.next()


def dense_runs(raw: Reads, environment: Environment, ledger_id: int) -> Iterator[Run | Finding]:
    """The runs of a ledger, with a finding for each that is damaged, missing or overlaps."""
    expected = 0
    for run in runs(raw, environment.name, ledger_id):
        if isinstance(run, CorruptEntry):
            yield corrupt(run)
            expected = -1
            continue
        if expected not in (-1, run.first_entry):
            message = f"entry {run.first_entry} follows entry {expected - 1}"
            yield Finding("error", "gap", f"{environment.name}, ledger {ledger_id}", message, REPAIR)
        expected = run.limit
        yield run


def check_bodies(run: Run) -> Iterator[Finding]:
    """Every body of a run against its checksum and its form."""
    for entry_id, body in run.bodies():
        if isinstance(body, CorruptEntry):
            yield corrupt(body)
        elif body is not None:
            try:
                decode_body(body)
            except ValueError as reason:
                yield corrupt(CorruptEntry(run.environment, run.ledger_id, entry_id, str(reason)))
