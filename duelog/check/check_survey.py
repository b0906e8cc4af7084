"""One check under way: what it looks at, and what it has learnt so far of the catalog, the ledgers and the markers.

The modules of the room fill it and read it; it knows none of them but for the conditional entries that it collects.
"""

from __future__ import annotations

from pathlib import Path

import lmdb
from pyroaring import BitMap

from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec.format import LedgerRecord, PartitionRecord
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.env.environment import Environment

from .check_withdrawals import Conditionals


class Survey:
    """What is known so far."""

    def __init__(
        self, path: Path, raw: lmdb.Transaction, main: Environment, partitions: PartitionSet, *, deep: bool
    ) -> None:
        """`raw`: the one transaction of the main environment."""
        self.path = path
        self.raw = raw
        self.main = main
        self.partitions = partitions
        self.deep = deep
        self.records: dict[int, PartitionRecord] = {}
        self.frontiers: dict[tuple[int, int], FrontierRecord] = {}
        self.topics: dict[int, str] = {}
        self.ledgers: dict[int, tuple[int, LedgerRecord]] = {}
        """Main-log ledger id -> topic id, record."""
        self.tails: dict[int, int] = {}
        """Ledger id -> number of entries, of main logs and then of partition logs."""
        self.markers: dict[int, BitMap] = {}
        """Partition log's ledger id -> entries that markers point at."""
        self.places: dict[int, tuple[int, int]] = {}
        """Partition log's ledger id -> topic id, start of its partition."""
        self.conditionals = Conditionals()
        """Of all partition logs."""
        self.all_read = True
        """Whether every registered partition could be read, and its logs are in `tails`."""
