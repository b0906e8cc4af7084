"""Reading a snapshot part by part: buckets after the frontier, as soon as they are whole.

Does not decide whether a snapshot may be used, nor what of the bucket that the frontier lies in has fired: restore.py.
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap

from ..partitions.index.packed_buckets import Asleep
from ..store.codec.format import snapshot_part_key
from ..store.codec.frontier import FrontierRecord
from ..store.env.environment import Environment
from .snapshot_format import Metadata, Part, Unusable

SavedBucket = tuple[int, BitMap | Asleep]
"""Where a bucket starts, and entries of it; several may be of one bucket. Asleep where that is safe."""

_NOTHING_MS = -1
"""A limit before every due time."""


class Parts:
    """The parts of one snapshot, of which the first are read. One thread; each part is a read transaction of its own.

    left: how many parts are still to be read. limit_ms: while there are any, what they hold is due in buckets that
    start at this time or later, and what is due before has been given; -1 if they are in no order. around: entries of
    the bucket that C lies in, whole once limit_ms is after C, and not given; empty if C is that of the snapshot.
    """

    def __init__(
        self,
        environment: Environment,
        ledger_id: int,
        snapshot_id: int,
        metadata: Metadata,
        frontier: FrontierRecord,
    ) -> None:
        """REQUIRES: the snapshot may be used with this frontier (see restore.py)."""
        self.snapshot_id = snapshot_id
        self.left = len(metadata.parts)
        self.limit_ms = _NOTHING_MS
        self.around = BitMap()
        self._environment = environment
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._moved = (metadata.due_ms, metadata.entry_id) != (frontier.due_ms, frontier.entry_id)
        self._c_ms = frontier.due_ms
        self._held_back: list[SavedBucket] = []
        """Of buckets that a part still to be read may hold more of."""

    @property
    def tail(self) -> int:
        """Entries from it on are in no part."""
        return self._metadata.tail

    def read(self) -> list[SavedBucket]:
        """Read one part: the buckets after C that are whole with it. Raises Unusable. REQUIRES: one is left.

        About a ms a MiB.
        """
        part = self._next_part()
        starts_ms = part.starts_ms
        ahead = after = np.ones(len(starts_ms), dtype=np.bool_)
        if self._moved:
            ahead = starts_ms + self._metadata.bucket_ms > self._c_ms
            after = starts_ms > self._c_ms
        asleep = after & part.vouched(self.tail)
        found = self._held_back
        found += part.asleep(asleep, self.tail)
        for start_ms, ids in part.bitmaps(ahead & ~asleep):
            if ids and ids.max() >= self.tail:
                raise Unusable(f"bucket {start_ms} holds entry {ids.max()}, the tail is {self.tail}")
            if self._moved and start_ms <= self._c_ms:
                self.around |= ids
            else:
                found.append((start_ms, ids))
        self._held_back = []
        self.left -= 1
        if self.left:
            self._held_back = [saved for saved in found if saved[0] >= self.limit_ms]
            found = [saved for saved in found if saved[0] < self.limit_ms]
        return found

    def _next_part(self) -> Part:
        """The next part, verified; the limit is moved on to where it ends."""
        records = self._metadata.parts
        number = len(records) - self.left
        key = snapshot_part_key(self._ledger_id, self.snapshot_id, number)
        with self._environment.read() as raw:
            value = raw.get(key)
            if value is None:
                raise Unusable(f"part {number} of {len(records)} is missing")
            part = Part(key, value, records[number])
        if self._metadata.ordered and len(part.starts_ms):
            if int(part.starts_ms[0]) < self.limit_ms or (part.starts_ms[1:] < part.starts_ms[:-1]).any():
                raise Unusable(f"part {number} is not in the order that the metadata promises")
            self.limit_ms = int(part.starts_ms[-1])
        return part
