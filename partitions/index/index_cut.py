"""A copy of a delay index as of one instant, gathered a few buckets at a time while entries go on coming in.

Copying ten million entries at once would hold up appends. What is below a limit of entry ids only ever gets
less by firing and by cancelling, so a copy that keeps to those ids, taken in slices, is the index of the instant at
which it began, provided that

- nothing fires between the first slice and the last: the owner sees to it, or throws the copy away;
- that an entry is discarded is recorded elsewhere: it may be in the copy or not.

The window is taken first and given last. An entry that moves from the window into a bucket meanwhile is left out of
the bucket's piece, so that it comes once.
"""

from typing import NamedTuple

from pyroaring import BitMap

from .buckets import Buckets
from .window import MAX_ID, Keys, unpack


class Piece(NamedTuple):
    """Entries due in the bucket of the grid that starts at ``start_ms``: how many, and their serialised BitMap.

    Several pieces of one bucket have no entry in common.
    """

    start_ms: int
    entries: int
    bitmap: bytes


class IndexCut:
    """A copy under way. The owner's lock is held around the constructor and every ``more``."""

    def __init__(self, buckets: Buckets, window: Keys, start_ms: int, bucket_ms: int, limit_id: int) -> None:
        """Made by DelayIndex.cut; only entries below ``limit_id`` are copied."""
        self._buckets = buckets
        self._bucket_ms = bucket_ms
        self._limit_id = limit_id
        self._last_ms = -1
        self._buckets_done = False
        self._window: Keys | None = window  # never written to: the index replaces it
        self._start_ms = start_ms
        self._near: dict[int, BitMap] = {}

    def arrange(self) -> None:
        """Bring the window's entries into buckets, without the owner's lock. Before the first ``more``."""
        if self._window is not None and len(self._window):
            near = Buckets(self._bucket_ms)
            near.add(*unpack(self._window, self._start_ms))
            self._near = {bucket.start_ms: bucket.ids for bucket in near}
        self._window = None

    def more(self, max_entries: int) -> list[Piece]:
        """The next pieces, of about ``max_entries`` entries together; empty: there are no more.

        REQUIRES ``arrange``. O(size of their bitmaps): 3 ms for a million entries.
        """
        pieces: list[Piece] = []
        taken = 0
        if not self._buckets_done:
            for start_ms in self._buckets.starts_after(self._last_ms):
                piece = self._piece(start_ms)
                self._last_ms = start_ms
                if piece.entries:
                    pieces.append(piece)
                    taken += piece.entries
                    if taken >= max_entries:
                        return pieces
            self._buckets_done = True  # a bucket that comes later holds what came later, or what the window had
        while self._near and taken < max_entries:
            start_ms, ids = self._near.popitem()
            piece = self._below_limit(start_ms, ids)
            if piece.entries:
                pieces.append(piece)
                taken += piece.entries
        return pieces

    def _piece(self, start_ms: int) -> Piece:
        grid_ms = start_ms - start_ms % self._bucket_ms
        near = self._near.get(grid_ms)
        saved = self._buckets.saved_below(start_ms, self._limit_id) if near is None else None
        if saved is not None:
            return Piece(grid_ms, *saved)
        ids = self._buckets.entries_of(start_ms)
        return self._below_limit(grid_ms, ids if near is None else ids - near)

    def _below_limit(self, grid_ms: int, ids: BitMap) -> Piece:
        if ids and ids.max() >= self._limit_id:
            ids = ids.copy()
            ids.remove_range(self._limit_id, MAX_ID + 1)
        return Piece(grid_ms, len(ids), ids.serialize())
