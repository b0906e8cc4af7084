"""Entries of partition logs that never fire, and conditional ones that may: bitmaps in the main environment.

Two tables of the same form, a roaring bitmap for each block of 65,536 entries of a log, so that a
cancelled message costs at most two bytes of a bitmap however many there are. CANCELLED holds entries that
were cancelled or replaced. ADMITTED holds the conditional entries whose reschedule was recorded; one that
is not in it never fires.
"""

from collections.abc import Iterable

from pyroaring import BitMap

from ..store.codec import format as fmt
from ..store.codec.bits import BitChange
from ..store.codec.format import Table
from ..store.env.memtable import Reads
from ..store.env.transaction import Transaction
from ..store.log import catalog

BLOCK_BITS = 16


def members(raw: Reads, table: Table, ledger_id: int) -> BitMap:
    """Read the entries of a log that `table` (CANCELLED or ADMITTED) holds. O(blocks). Raises CorruptRecord."""
    entries = BitMap()
    for _, fields in catalog.rows(raw, fmt.block_prefix(table, ledger_id)):
        entries |= BitMap.deserialize(fields)
    return entries


def blocks(entries: Iterable[int]) -> dict[int, BitMap]:
    """Group entries by the block that they lie in."""
    by_block: dict[int, BitMap] = {}
    for entry_id in entries:
        by_block.setdefault(entry_id >> BLOCK_BITS, BitMap()).add(entry_id)
    return by_block


def add(transaction: Transaction, table: Table, ledger_id: int, entries: BitMap) -> BitMap:
    """Add entries of a log to `table`; returns those that were not in it before."""
    fresh = BitMap()
    for block, wanted in blocks(entries).items():
        key = fmt.block_key(table, ledger_id, block)
        held = transaction.bits(key)
        new = wanted if wanted.isdisjoint(held) else wanted - held
        if new:
            transaction.change_bits(key, BitChange(new, BitMap()), held)
            fresh = fresh | new if fresh else new
    return fresh


def add_range(transaction: Transaction, table: Table, ledger_id: int, first: int, limit: int) -> None:
    """Add the entries [first, limit) of a log to `table`, none of which is in it. O(blocks)."""
    for block in range(first >> BLOCK_BITS, (limit - 1 >> BLOCK_BITS) + 1):
        new = BitMap()
        new.add_range(max(first, block << BLOCK_BITS), min(limit, block + 1 << BLOCK_BITS))
        key = fmt.block_key(table, ledger_id, block)
        transaction.change_bits(key, BitChange(new, BitMap()), transaction.bits(key))


def remove_log(transaction: Transaction, ledger_id: int) -> None:
    """Forget everything about a log that is gone."""
    for table in (Table.CANCELLED, Table.ADMITTED):
        for key, _ in list(catalog.rows(transaction.raw, fmt.block_prefix(table, ledger_id))):
            transaction.delete(key)
