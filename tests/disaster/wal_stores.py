"""A WAL that a test forces into use, keeps small, and looks at as bytes."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

from duelog import StoreConfig
from duelog.opening import read_identity, stored_span_ms
from duelog.store.wal.wal_file import WalRecord, read_wal, salvage

SECTOR = 512
_FIRST_GROUP = 8192
_GROUP = struct.Struct("<IIQII")
"""crc, count, epoch, number, length of the records."""


def with_wal(config: StoreConfig) -> StoreConfig:
    """With every single send going by the WAL that can, and a WAL that is soon full."""
    return replace(config, journal_from=1, journal_bytes=24 << 10)


def store_id(path: Path) -> bytes:
    """The id that the store in `path` has."""
    return read_identity(path, StoreConfig(partition_ms=stored_span_ms(path) or 0)).store_id


def _ids(records: list[WalRecord]) -> list[str]:
    return [f"{record.ledger_id}:{record.entry_id}" for record in records]


def in_wal(path: Path) -> list[str]:
    """Ids of the messages that the WAL holds, in order."""
    return _ids(read_wal(path, store_id(path)))


def taken_home(path: Path) -> list[str]:
    """Ids of the messages of earlier epochs that can still be read, too."""
    return _ids(salvage(path, store_id(path)))


def groups(content: bytes) -> list[tuple[int, int]]:
    """Where the groups of the newest epoch begin and end."""
    found: list[tuple[int, int]] = []
    at, newest = _FIRST_GROUP, _GROUP.unpack_from(content, _FIRST_GROUP)[2]
    while at < len(content):
        _, count, epoch, number, length = _GROUP.unpack_from(content, at)
        if not count or (epoch, number) != (newest, len(found)):
            break
        limit = at + _GROUP.size + length
        found.append((at, limit))
        at = limit + -limit % SECTOR
    return found
