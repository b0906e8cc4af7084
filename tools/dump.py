"""The content of a store's environments, key by key: catalog records, runs with their headers, markers, entries.

Reads the LMDB environments themselves, so that a store which does not open can still be looked at, and decodes with
the format modules of store/ only. A record that is damaged comes with its error, and the rest goes on. Works beside a
writing process; reads in short transactions, so that what changes meanwhile may be dumped in part.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from pyroaring import BitMap, BitMap64

from ..partitions import producer_numbers
from ..partitions.partition import environment_path
from ..partitions.timespan import directory_name, parse_directory_name
from ..store.codec import format as fmt
from ..store.codec.body import decode_body
from ..store.codec.format import Table, copied_key, seal, split_attempts_key
from ..store.codec.run import ReadBodies, Run, RunKind
from ..store.codec.sent_ids import split_numbered_key
from ..store.env.body_file import BodyMaps, BodyReader
from ..store.env.environment import Environment
from ..store.errors import CorruptEntry, DamagedStore, DuelogError, InvalidArgument
from ..store.log import catalog
from ..store.wal.segment import MAIN, RowKind, numbers_in, salvage
from ..store.wal.wal_reader import DIRECTORY
from ..store.wal.write_batch import single_rows
from ..survey.contents import read_record
from .output import payload_fields, preview, printable
from .values import iso_time, stored_identity

_KEYS_A_TRANSACTION = 500
_SHOWN_RANGES = 20

Fields = dict[str, Any]


class Row(NamedTuple):
    """One key of an environment, or one entry of a run: its table, key, value, and the error where it is damaged."""

    table: str
    key: Fields
    value: Fields
    error: str | None = None

    def as_json(self) -> Fields:
        shown: Fields = {"table": self.table, "key": self.key}
        if self.error is not None:
            return {**shown, "error": self.error}
        value = dict(self.value)
        payload = value.pop("payload", None)
        return {**shown, "value": value if payload is None else {**value, **payload_fields(payload)}}

    def as_line(self) -> str:
        head = f"{self.table:<14} {_named(self.key)}"
        return f"{head}  DAMAGED: {printable(self.error)}" if self.error else f"{head}  {_named(self.value)}"


def _named(fields: Fields) -> str:
    return " ".join(f"{name}={_shown(name, value)}" for name, value in fields.items())


def _shown(name: str, value: object) -> str:
    if isinstance(value, bytes):
        return preview(value)
    if isinstance(value, int) and name.endswith("_ms") and value > 0:
        return iso_time(value)
    return printable(str(value))


# -- where to look -------------------------------------------------------------------------------


def partition_directory(store: Path, name: str) -> Path:
    """The directory of a partition's generation: the registered one, else the newest there is.

    Raises InvalidArgument for a name that is none, or of a partition that is not there.
    """
    start_ms = parse_directory_name(name)
    directory = store / "partitions" / name
    found = sorted(child for child in directory.glob("g*") if child.is_dir())
    if not found:
        reason = "has no directory: `duelog partitions` lists those there are, --wal shows all of one that is new"
        raise InvalidArgument("--partition", name, reason)
    try:
        with closing(open_environment(store / "main", "main")) as main, main.read() as raw:
            record = dict(catalog.partitions(raw)).get(start_ms)
    except DuelogError:
        record = None
    registered = None if record is None else directory / f"g{record.generation:06d}"
    return registered if registered in found else found[-1]


def open_environment(path: Path, name: str) -> Environment:
    """Open one environment to look at it. Raises DamagedStore."""
    if not path.is_dir():
        raise DamagedStore(path, "is missing")
    return Environment(path, name=name, read_only=True)


# -- rows ----------------------------------------------------------------------------------------


def rows(
    environment: Environment, *, table: Table | None = None, ledger_id: int | None = None, entries: bool = False
) -> Iterator[Row]:
    """Rows of an environment in order of key: all, or those of one table, or the runs of one ledger.

    `entries`: each run is followed by its entries.
    """
    first = b"\0" if table is None else fmt.prefix(table)
    if ledger_id is not None:
        first = fmt.run_prefix(ledger_id)
    start = first
    while True:
        page: list[Row] = []
        keys = 0
        with environment.read() as raw:
            cursor = raw.cursor()
            more = cursor.set_range(start)
            while more and keys < _KEYS_A_TRANSACTION:
                key = bytes(cursor.key())
                if (table is not None or ledger_id is not None) and not key.startswith(first):
                    more = False
                    break
                page.extend(_rows_of(environment.name, key, cursor.value(), entries, raw.read_bodies))
                keys += 1
                start = key + b"\0"
                more = cursor.next()
        yield from page
        if not more:
            return


def wal_rows(store: Path, *, entries: bool = False) -> Iterator[Row]:
    """The groups of the write-ahead log, each followed by its rows, as they are applied or will be.

    Also those of segments that are applied and will be used again. `entries`: each run is followed by its entries.
    Raises InvalidArgument, DamagedStore.
    """
    store_id = stored_identity(store).store_id
    for number in numbers_in(store / DIRECTORY):
        for group in salvage(store / DIRECTORY, number, store_id):
            key = {"segment": group.number, "sequence": group.sequence}
            where = {} if group.number == number else {"in_segment": number}
            yield Row("GROUP", key, {"flushed": group.flushed, "rows": group.row_count, **where})
            for row in single_rows(group.rows()):
                place = "main" if row.start_ms == MAIN else f"partition {directory_name(row.start_ms)}"
                if row.kind == RowKind.RUN:
                    read = BodyReader(BodyMaps(str(environment_path(store, row.start_ms))))
                    found = _run_rows(place, row.key, bytes(row.value), entries, read)
                elif row.kind == RowKind.DELETE:
                    found = iter([Row(Table(row.key[0]).name, _KEYS[Table(row.key[0])](row.key), {"deleted": True})])
                else:
                    found = _rows_of(place, row.key, seal(row.key, bytes(row.value)), entries, None)
                    if row.kind == RowKind.SUBTRACT:
                        found = (each._replace(value={**each.value, "subtracted": True}) for each in found)
                for each in found:
                    yield each._replace(value={"environment": place, **each.value})


def _rows_of(
    environment: str, key: bytes, value: bytes | memoryview, entries: bool, read: ReadBodies | None
) -> Iterator[Row]:
    try:
        table = Table(key[0])
    except ValueError:
        yield Row(f"0x{key[0]:02x}", {"key": key.hex()}, {}, f"no table has this byte; {len(value)} bytes")
        return
    if table is Table.RUN:
        yield from _run_rows(environment, key, value, entries, read)
        return
    try:
        fields = _KEYS[table](key)
    except (ValueError, KeyError, IndexError) as error:
        yield Row(table.name, {"key": key.hex()}, {}, f"key: {error}")
        return
    try:
        yield Row(table.name, fields, _value(table, *read_record(key, value)))
    except (ValueError, KeyError) as error:
        yield Row(table.name, fields, {}, str(error))


def _run_rows(
    environment: str, key: bytes, value: bytes | memoryview, entries: bool, read: ReadBodies | None
) -> Iterator[Row]:
    ledger_id, first = fmt.split_run_key(key)
    fields = {"ledger_id": ledger_id, "first_entry": first}
    try:
        run = Run(environment, key, value, read)
    except CorruptEntry as error:
        yield Row("RUN", fields, {}, error.reason)
        return
    dues = run.dues()
    head: Fields = {"kind": RunKind(run.kind).name, "count": run.count, "stored_bytes": run.stored_bytes}
    head |= {"base_ms": run.base_ms, "first_due_ms": int(dues.min()), "last_due_ms": int(dues.max())}
    if run.kind == RunKind.MARKERS:
        head["target_ledger"] = run.target
        if (fired_ms := run.fired_ms()) is not None:
            head["fired_ms"] = fired_ms
    if run.conditional:
        head["conditional"] = True
    if run.bodies_at is not None:
        head["bodies_at"] = run.bodies_at
    yield Row("RUN", fields, head)
    if entries:
        yield from _marker_rows(run) if run.kind == RunKind.MARKERS else _message_rows(run)


def _marker_rows(run: Run) -> Iterator[Row]:
    for index, (target, due_ms) in enumerate(zip(run.targets().tolist(), run.dues().tolist(), strict=True)):
        key = {"ledger_id": run.ledger_id, "entry_id": run.first_entry + index}
        yield Row("MARKER", key, {"due_ms": due_ms, "target_ledger": run.target, "target_entry": target})


def _message_rows(run: Run) -> Iterator[Row]:
    replaced = list(zip(*(column.tolist() for column in run.replaced()), strict=True)) if run.conditional else None
    for entry_id, body in run.bodies():
        key = {"ledger_id": run.ledger_id, "entry_id": entry_id}
        index = entry_id - run.first_entry
        value: Fields = {"due_ms": run.due(index)}
        if replaced is not None:
            value["replaces"] = f"{replaced[index][0]}:{replaced[index][1]}"
        if isinstance(body, CorruptEntry):
            yield Row("MESSAGE", key, {}, body.reason)
        elif body is None:
            yield Row("MESSAGE", key, {**value, "body": "dropped"})
        else:
            try:
                publish_ms, payload, message_key, properties, extra = decode_body(body)
            except ValueError as error:
                yield Row("MESSAGE", key, {}, str(error))
                continue
            value |= {"publish_ms": publish_ms, "key": message_key, "properties": properties or {}}
            yield Row("MESSAGE", key, value | ({"extra": str(extra)} if extra else {}) | {"payload": payload})


# -- small records -------------------------------------------------------------------------------


def _parts(**parts: Callable[[bytes], object]) -> Callable[[bytes], Fields]:
    """Decodes a key by a function for each of its parts."""
    return lambda key: {name: part(key) for name, part in parts.items()}


def _split(split: Callable[[bytes], tuple[object, ...]], *names: str) -> Callable[[bytes], Fields]:
    """Decodes a key by a function that gives all of its parts."""
    return lambda key: dict(zip(names, split(key), strict=True))


_SNAPSHOT = _split(fmt.split_snapshot_key, "ledger_id", "snapshot_id")
_KEYS: dict[Table, Callable[[bytes], Fields]] = {
    Table.COUNTER: _parts(name=fmt.name_of),
    Table.TOPIC: _parts(topic=fmt.name_of),
    Table.TOPIC_NAME: _parts(topic_id=fmt.trailing_u32),
    Table.POLICY: _parts(scope=fmt.name_of),
    Table.DOCUMENT: _parts(document=fmt.name_of),
    Table.PARTITION: _parts(start_ms=fmt.trailing_u64),
    Table.LOG: _parts(topic_id=fmt.trailing_u32),
    Table.PARTITION_INFO: _parts(),
    Table.ORIGIN: _parts(),
    Table.FRONTIER: _parts(topic_id=fmt.leading_u32, start_ms=fmt.trailing_u64),
    Table.LEDGER: _parts(topic_id=fmt.leading_u32, ledger_id=fmt.trailing_u64),
    Table.CURSOR: _split(fmt.split_named_key, "topic_id", "subscription"),
    Table.ACKED: _parts(subscription_id=fmt.leading_u32, ledger_id=fmt.trailing_u64),
    Table.ATTEMPTS: _split(split_attempts_key, "subscription_id", "ledger_id", "block"),
    Table.PAUSE: _parts(subscription_id=fmt.trailing_u32),
    Table.CANCELLED: _parts(ledger_id=fmt.leading_u64, block=fmt.trailing_u32),
    Table.ADMITTED: _parts(ledger_id=fmt.leading_u64, block=fmt.trailing_u32),
    Table.SEQUENCE: _split(producer_numbers.split_key, "topic_id", "producer", "block"),
    Table.KEY: _split(fmt.split_named_key, "topic_id", "key"),
    Table.NUMBERED: _split(split_numbered_key, "topic_id", "producer", "last"),
    Table.RECURRENCE: _split(fmt.split_named_key, "topic_id", "schedule"),
    Table.SET_ASIDE: _parts(ledger_id=fmt.leading_u64, entry_id=fmt.trailing_u32),
    Table.SNAPSHOT_PART: lambda key: {**_SNAPSHOT(key), "part": fmt.trailing_u32(key)},
    Table.SNAPSHOT_META: _SNAPSHOT,
    Table.COPY: lambda key: {"of": Table(key[1]).name, **_KEYS[Table(key[1])](copied_key(key))},
}


_SHOWN_AS = {"absorbed_end": "seen", "references": "holders"}
"""Keys of the output that programs know by another name than the record's field."""


def _plain(value: object) -> object:
    if isinstance(value, IntEnum):
        return value.name
    return value.hex() if isinstance(value, bytes) else value


def _value(table: Table, fields: bytes, record: Any) -> Fields:
    """A record as it is shown. Numbers of producers and entries of failed deliveries count from the record's first."""
    if table is Table.COPY:
        return _opaque(fields)
    if table in _SINGLE:
        return {_SINGLE[table]: record}
    if isinstance(record, (BitMap, BitMap64)):
        return _bitmap(record)
    if table is Table.ATTEMPTS:
        return {"count": len(record), "failed": {str(entry): row._asdict() for entry, row in record.items()}}
    if table is Table.NUMBERED:
        return {"messages": {str(number - record[0][0]): row._asdict() for number, row in record}}
    if table is Table.DOCUMENT:
        return {"version": record.version, **_opaque(record.value)}
    if table is Table.SET_ASIDE:
        return {"reason": record.decode(errors="replace")}
    if not hasattr(record, "_asdict"):
        return _opaque(fields)
    shown = {_SHOWN_AS.get(name, name): _plain(value) for name, value in record._asdict().items()}
    if table is Table.ORIGIN:
        relied_on = [
            (row.topic_id, row.ledger_id, _bitmap(BitMap.deserialize(row.positions))) for row in record.relied_on
        ]
        shown["relied_on"] = [{"topic_id": topic, "ledger_id": ledger, **bits} for topic, ledger, bits in relied_on]
    return shown


_SINGLE = {Table.COUNTER: "value", Table.TOPIC_NAME: "topic", Table.LOG: "ledger_id", Table.PAUSE: "until_ms"}
"""Records of one value, and what it is called."""


def _bitmap(members: BitMap | BitMap64) -> Fields:
    ranges: list[list[int]] = []
    for member in members:
        if ranges and member == ranges[-1][1] + 1:
            ranges[-1][1] = member
        elif len(ranges) == _SHOWN_RANGES:
            break
        else:
            ranges.append([member, member])
    return {
        "count": len(members),
        "ranges": [f"{first}-{last}" if first < last else f"{first}" for first, last in ranges],
    }


def _opaque(fields: bytes) -> Fields:
    return {"bytes": len(fields), "begins_with": fields[:32].hex()}
