"""A copy of a delay index gathered in slices, while the index changes in between."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.index_cut import IndexCut, Piece
from tests.partitions.packing_all import Column, as_packed, buckets_of, pack_all
from tests.proof import length

START_MS = 60_000
BUCKET_MS = 10


def append(column: Column, index: DelayIndex, offsets: list[int]) -> None:
    """Append entries and add them to the index."""
    index.add(*column.put(len(column.due_ms), (START_MS + offset for offset in offsets)))


def gathered(cutting: IndexCut, between: object = None) -> list[Piece]:
    """All pieces, one entry at a time; `between` is called before each slice."""
    cutting.arrange()
    pieces: list[Piece] = []
    while True:
        if callable(between):
            between()
        more = cutting.more(1)
        if not more:
            return pieces
        pieces += more


def as_dict(pieces: list[Piece]) -> dict[int, set[int]]:
    """Entries by bucket; no entry comes twice, and the counts are right."""
    found: dict[int, set[int]] = {}
    for piece in pieces:
        ids = set(BitMap.deserialize(piece.bitmap))
        assert len(ids) == piece.entries > 0
        known = found.setdefault(piece.start_ms, set())
        assert not known & ids
        known |= ids
    return found


offsets = st.lists(st.integers(0, 60), min_size=1, max_size=30)


@pytest.mark.series
@settings(max_examples=length("DUELOG_CUTS", 40, 150), deadline=None)
@given(
    before=offsets,
    taken=st.integers(0, 20),
    window=st.integers(1, 8),
    added=st.lists(offsets, max_size=8),
    packed=st.booleans(),
)
def test_what_comes_in_meanwhile_is_not_in_the_copy(
    before: list[int], taken: int, window: int, added: list[list[int]], packed: bool
) -> None:
    """Whatever is added or packed between slices, also what pushes the window back, the copy is of the beginning."""
    column = Column()
    index = DelayIndex(column, start_ms=START_MS, bucket_ms=BUCKET_MS, window_entries=window)
    append(column, index, before)
    index.take(START_MS + 100, taken)
    index.exact_next_due_ms()  # loads the window, and splits a crowded bucket
    expected = {start_ms: set(ids) for start_ms, ids in buckets_of(index)}
    if packed:
        restored = as_packed(buckets_of(index), len(before))
        index = DelayIndex.from_buckets(restored, column, start_ms=START_MS, bucket_ms=BUCKET_MS, window_entries=window)
        if taken % 2:
            index.exact_next_due_ms()
    left = list(added)

    def more_comes_in() -> None:
        if left:
            append(column, index, left.pop())
        if packed:
            pack_all(index)

    cutting = index.cut(len(before))
    assert as_dict(gathered(cutting, more_comes_in)) == expected
    index._check()


def test_copying_goes_on_past_buckets_that_hold_nothing_below_the_limit() -> None:
    """A slice is empty only when the copy is complete."""
    column = Column()
    index = DelayIndex(column, start_ms=START_MS, bucket_ms=BUCKET_MS)
    append(column, index, [50])
    append(column, index, [offset for offset in range(0, 50, 10) for _ in range(3)])
    assert as_dict(gathered(index.cut(1))) == {START_MS + 50: {0}}
