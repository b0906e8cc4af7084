"""Late entries of one partition log: those at or before C that have not fired.

They came after firing had passed their due time, or were admitted after it. T of the frontier cannot pass one until it
has fired. Few as a rule, so every operation is O(entries).
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap

from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Int64s, UInt32s
from ...store.errors import BrokenInvariant


class LateEntries:
    """Entry ids, ascending, and due times. REQUIRES of every call: the log's lock."""

    __slots__ = ("dues", "entries")

    def __init__(self) -> None:
        self.entries: UInt32s = np.empty(0, np.uint32)
        self.dues: Int64s = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entries: UInt32s, dues: Int64s) -> None:
        """Add entries; one that is here already stays once."""
        self.entries, kept = np.unique(np.concatenate((self.entries, entries)), return_index=True)
        self.dues = np.concatenate((self.dues, dues))[kept]

    def first(self, count: int) -> tuple[UInt32s, Int64s]:
        """The first so many appended, in firing order."""
        entries, dues = self.entries[:count], self.dues[:count]
        order = np.lexsort((entries, dues))
        return entries[order], dues[order]

    def remove_first(self, count: int) -> None:
        self.entries, self.dues = self.entries[count:], self.dues[count:]

    def remove_after(self, frontier: FrontierRecord) -> tuple[UInt32s, Int64s]:
        """Remove and return those that come after C of `frontier`."""
        late = frontier.passes(self.entries, self.dues)
        removed = self.entries[~late], self.dues[~late]
        self.entries, self.dues = self.entries[late], self.dues[late]
        return removed

    def discard(self, entries: BitMap) -> None:
        if len(self.entries):
            keep = np.array([entry_id not in entries for entry_id in self.entries.tolist()])
            self.entries, self.dues = self.entries[keep], self.dues[keep]

    def check(self, frontier: FrontierRecord) -> None:
        """Raise BrokenInvariant unless all are at or before C and not below T, ascending."""
        if len(self.entries) and not (
            frontier.passes(self.entries, self.dues).all()
            and int(self.entries[0]) >= frontier.absorbed_end
            and (np.diff(self.entries.astype(np.int64)) > 0).all()
        ):
            raise BrokenInvariant(f"entries {self.entries} at {self.dues} are not late by {frontier}")
