"""The record of failed deliveries: the messages that were delivered and not acknowledged, how often, and when.

A record has the messages of one subscription in one block of a main-log ledger, in the order of their entry ids.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import CorruptRecord
from .format import Table

BLOCK_BITS = 10
"""A block has 1,024 entries, so that one failed delivery rewrites at most 22 KiB."""

_KEY = struct.Struct(">BIQI")
_ROW = struct.Struct(">HIQQ")


class FailedDeliveries(NamedTuple):
    """Failed deliveries of one message: how many, and when the first and the last of them ended (epoch ms)."""

    times: int
    first_ms: int
    last_ms: int


def attempts_key(subscription_id: int, ledger_id: int, block: int) -> bytes:
    """Key of a record."""
    return _KEY.pack(Table.ATTEMPTS, subscription_id, ledger_id, block)


def split_attempts_key(key: bytes) -> tuple[int, int, int]:
    """(subscription id, ledger id, block) of a key of ATTEMPTS."""
    _, subscription_id, ledger_id, block = _KEY.unpack(key)
    return subscription_id, ledger_id, block


def pack_attempts(rows: Mapping[int, FailedDeliveries]) -> bytes:
    """Pack failed deliveries by entry id, all of one block, into the fields of a record."""
    mask = (1 << BLOCK_BITS) - 1
    return b"".join(
        _ROW.pack(entry_id & mask, min(row.times, 2**32 - 1), max(row.first_ms, 0), max(row.last_ms, 0))
        for entry_id, row in sorted(rows.items())
    )


def unpack_attempts(block: int, fields: bytes) -> dict[int, FailedDeliveries]:
    """The inverse of `pack_attempts`. Raises CorruptRecord."""
    if len(fields) % _ROW.size or not fields:
        raise CorruptRecord(f"record of failed deliveries has {len(fields)} bytes, not rows of {_ROW.size}")
    rows: dict[int, FailedDeliveries] = {}
    before = -1
    for offset, times, first_ms, last_ms in _ROW.iter_unpack(fields):
        if not before < offset < 1 << BLOCK_BITS or not times:
            raise CorruptRecord(f"record of failed deliveries has {times} of entry {offset} after entry {before}")
        before = offset
        rows[block << BLOCK_BITS | offset] = FailedDeliveries(times, first_ms, last_ms)
    return rows
