"""Entries of partition logs that never fire, and conditional ones that may: bitmaps in the main environment.

Two tables of the same form, a roaring bitmap for each block of 65,536 entries of a log, so that a
cancelled message costs at most two bytes of a bitmap however many there are. CANCELLED holds entries that
were cancelled or replaced. ADMITTED holds the conditional entries whose reschedule was recorded; one that
is not in it never fires.
"""

from collections.abc import Iterable

from pyroaring import BitMap

from ..store.codec import format as fmt
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


def members_near(raw: Reads, table: Table, ledger_id: int, entries: Iterable[int]) -> BitMap:
    """Read those that `table` holds in the blocks of some entries of a log. O(those blocks). Raises CorruptRecord."""
    found = BitMap()
    for block in {entry_id >> BLOCK_BITS for entry_id in entries}:
        fields = catalog.fields_of(raw, fmt.block_key(table, ledger_id, block))
        if fields is not None:
            found |= BitMap.deserialize(fields)
    return found


def add(transaction: Transaction, table: Table, ledger_id: int, entries: BitMap) -> BitMap:
    """Add entries of a log to `table`; returns those that were not in it before. O(blocks from first to last)."""
    if not entries:
        return BitMap()
    first, last = entries.min() >> BLOCK_BITS, entries.max() >> BLOCK_BITS
    if first == last:
        united: BitMap = transaction.unite(fmt.block_key(table, ledger_id, first), entries)
        return united
    fresh = BitMap()
    for block in range(first, last + 1):
        of_block = entries & BitMap(range(block << BLOCK_BITS, block + 1 << BLOCK_BITS))
        fresh |= transaction.unite(fmt.block_key(table, ledger_id, block), of_block)
    return fresh


def remove_log(transaction: Transaction, ledger_id: int) -> None:
    """Forget everything about a log that is gone."""
    for table in (Table.CANCELLED, Table.ADMITTED):
        for key, _ in list(catalog.rows(transaction.raw, fmt.block_prefix(table, ledger_id))):
            transaction.delete(key)
