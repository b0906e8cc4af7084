"""What a log still lacks that fires already: the buckets of its snapshot from a time on.

Until then its index is whole, and it hears, cancels and admits as a loaded log does. What is removed from it
meanwhile, or is in it already, must not come with a bucket that is read later.
"""

from __future__ import annotations

from pyroaring import BitMap

from ...partitions.index.packed_buckets import Asleep
from ...snapshot.parts import SavedBucket


class Missing:
    """Buckets still to be read; belongs to the log's lock."""

    __slots__ = ("_tail", "gone", "limit_ms")

    def __init__(self, limit_ms: int, tail: int, gone: BitMap) -> None:
        """limit_ms: nothing missing is due before it. tail: no entry missing has this id or a larger one."""
        self.limit_ms = limit_ms
        self.gone = gone
        """Entries that are not to be taken from a snapshot: cancelled, or added since."""
        self._tail = tail

    def before_limit(self, due_ms: int | None) -> int | None:
        """A time at which something is due, None from the limit on: it is not known what is due then."""
        return due_ms if due_ms is not None and due_ms < self.limit_ms else None

    def without_gone(self, buckets: list[SavedBucket]) -> list[SavedBucket]:
        """Buckets that have been read, less what is gone; those that have none of it stay asleep.

        O(1) where nothing of the snapshot is gone, else as long as making the bitmaps.
        """
        if not self.gone or self.gone.min() >= self._tail:
            return buckets
        kept: list[SavedBucket] = []
        for start_ms, saved in buckets:
            ids = saved.bitmap() if isinstance(saved, Asleep) else saved
            kept.append((start_ms, saved if ids.isdisjoint(self.gone) else ids - self.gone))
        return kept
