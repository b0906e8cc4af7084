"""One check under way: what it looks at, and what it has learnt so far of the catalog, the ledgers and the markers.

The modules of the room fill it and read it; it knows none of them but for the conditional entries that it collects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pyroaring import BitMap

from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec.format import LedgerRecord, PartitionRecord
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads

from .check_withdrawals import Conditionals


@dataclass(eq=False, repr=False)
class Survey:
    """What is known so far. `raw`: the one transaction of the main environment."""

    path: Path
    raw: Reads
    main: Environment
    partitions: PartitionSet
    deep: bool
    records: dict[int, PartitionRecord] = field(default_factory=dict)
    frontiers: dict[tuple[int, int], FrontierRecord] = field(default_factory=dict)
    topics: dict[int, str] = field(default_factory=dict)
    ledgers: dict[int, tuple[int, LedgerRecord]] = field(default_factory=dict)
    """Main-log ledger id -> topic id, record."""
    tails: dict[int, int] = field(default_factory=dict)
    """Ledger id -> number of entries, of main logs and then of partition logs."""
    markers: dict[int, BitMap] = field(default_factory=dict)
    """Partition log's ledger id -> entries that markers point at."""
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Partition log's ledger id -> topic id, start of its partition."""
    conditionals: Conditionals = field(default_factory=Conditionals)
    """Of all partition logs."""
    all_read: bool = True
    """Whether every registered partition could be read, and its logs are in `tails`."""
