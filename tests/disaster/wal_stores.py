"""The write-ahead log of a store as a test looks at it: as ids, and as bytes."""

import struct
from dataclasses import replace
from pathlib import Path

from duelog import StoreConfig
from duelog.opening import read_identity, stored_span_ms
from duelog.store.codec import format as fmt
from duelog.store.codec.run import HEADER
from duelog.store.env.environment import Environment
from duelog.store.log import catalog
from duelog.store.wal.segment import Group, RowKind, file_name, numbers_in, salvage
from duelog.store.wal.wal_reader import DIRECTORY, read_wal
from duelog.store.wal.write_batch import single_rows

SECTOR = 512
FIRST_GROUP = 4096
HEADER_BYTES = 32
"""Bytes of a segment's header: its checksum, version, size and store."""
GROUP_BYTES = 28
"""Bytes of a group before its rows."""
_GROUP = struct.Struct("<IQIIII")
"""crc, number, sequence, flushed, count, length of the rows."""


def with_wal(config: StoreConfig) -> StoreConfig:
    """With segments that are soon full."""
    return replace(config, wal_bytes=24 << 10)


def store_id(path: Path) -> bytes:
    """The id that the store in `path` has."""
    return read_identity(path, StoreConfig(partition_ms=stored_span_ms(path) or 0)).store_id


def oldest_segment(path: Path) -> int:
    """The number of the oldest segment that a store needs which nothing has open."""
    main = Environment(path / "main", name="main", read_only=True)
    try:
        fields = main.get(fmt.counter_key(catalog.WAL))
    finally:
        main.close()
    assert fields is not None, "the write-ahead log was not begun"
    return fmt.unpack_u64(fields)


def needed(path: Path) -> list[Path]:
    """The segments, relative to the store, that hold what is needed."""
    directory, oldest = path / DIRECTORY, oldest_segment(path)
    return [Path(DIRECTORY, file_name(number)) for number in numbers_in(directory) if number >= oldest]


def _ids(groups: list[Group]) -> list[str]:
    found: list[str] = []
    for group in groups:
        for row in single_rows(group.rows()):
            if row.kind == RowKind.RUN:
                ledger_id, first = fmt.split_run_key(row.key)
                found += [f"{ledger_id}:{first + at}" for at in range(HEADER.unpack_from(row.value)[4])]
    return found


def in_wal(path: Path) -> list[str]:
    """Ids of the messages that the needed segments hold, in order."""
    return _ids(read_wal(path, store_id(path), oldest_segment(path)).groups)


def salvaged(path: Path) -> list[str]:
    """Ids of the messages that can be read in any segment."""
    directory, id_ = path / DIRECTORY, store_id(path)
    return _ids([group for number in numbers_in(directory) for group in salvage(directory, number, id_)])


def groups(content: bytes) -> list[tuple[int, int]]:
    """Where the groups of a segment begin and end."""
    found: list[tuple[int, int]] = []
    at, newest = FIRST_GROUP, _GROUP.unpack_from(content, FIRST_GROUP)[1]
    while at + GROUP_BYTES < len(content):
        _, number, sequence, _, count, length = _GROUP.unpack_from(content, at)
        if not count or (number, sequence) != (newest, len(found)):
            break
        limit = at + _GROUP.size + length
        found.append((at, limit))
        at = limit + -limit % SECTOR
    return found
