"""The delay index: order, bounds of what is kept, damage, copies in slices; test_delay_index_model.py has the rest."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.index_cut import IndexCut, Piece
from duelog.partitions.index.window import MAX_ID, OFFSET_LIMIT_MS
from duelog.store.errors import BrokenInvariant, InvalidArgument
from tests.partitions.packing_all import Column, as_packed, buckets_of, drain, pack_all, pairs
from tests.proof import length

MINUTE_MS = 60_000
DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS
CUT_MS = 60_000


@pytest.fixture
def column() -> Column:
    """An empty due column."""
    return Column()


def test_a_dense_bucket_comes_out_in_order_within_bounded_memory(column: Column) -> None:
    """A bucket 200 times the window is taken in order, and each of its due times read a few times only."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=100)
    dues = np.random.default_rng(7).integers(START_MS, START_MS + MINUTE_MS, 20_000)
    index.add(*column.put(0, dues.tolist()))
    expected = sorted(zip(dues.tolist(), range(20_000), strict=True))
    found: list[tuple[int, int]] = []
    while more := pairs(index.take(START_MS + MINUTE_MS, 170)):
        assert len(index._window) <= 200
        found += more
    assert found == expected
    assert column.reads < 4 * 20_000
    assert not index._buckets._cuts  # they go with what they divided


def test_a_crowded_instant_does_not_read_the_due_column_over_and_over(column: Column) -> None:
    """At one instant entry ids are firing order: 100 windows' worth among others costs three reads an entry."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=100)
    dues = np.full(10_000, START_MS + 30_000)
    dues[::50] += np.random.default_rng(8).integers(-20_000, 20_000, 200)
    index.add(*column.put(0, dues.tolist()))
    assert drain(index, START_MS + 50_000, 1_000) == sorted(zip(dues.tolist(), range(10_000), strict=True))
    index = DelayIndex(column, start_ms=START_MS, window_entries=100)
    index.add(*column.put(0, dues.tolist()))
    column.reads = 0
    while len(index.take(START_MS + 50_000, 1_000)[0]):
        pass
    assert column.reads <= 3 * 10_000


@pytest.mark.parametrize("garbage", [-1, START_MS - 1, START_MS + OFFSET_LIMIT_MS])
def test_a_bucket_of_nothing_but_unreadable_entries_is_passed(column: Column, garbage: int) -> None:
    """A due time outside the partition counts as unreadable, and the next bucket's entry is found at once."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=2)
    index.add(*column.put(0, [START_MS + 5] * 9 + [START_MS + 100_000]))
    column.put(0, [garbage] * 9)
    assert index.exact_next_due_ms() == START_MS + 100_000
    assert list(index.unreadable) == list(range(9))
    assert len(index) == 1


def test_a_split_that_fails_midway_is_undone(column: Column, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a later block of a large bucket cannot be read, its parts become one bucket again."""
    monkeypatch.setattr("duelog.partitions.index.delay_index._READ_ENTRIES", 64)
    index = DelayIndex(column, start_ms=START_MS, window_entries=10)
    dues = [START_MS + i * 37 % 50_000 for i in range(300)]
    index.add(*column.put(0, dues))
    column.good_calls = 3  # the sample and two blocks
    with pytest.raises(OSError, match="cannot be read"):
        index._load(START_MS)
    column.good_calls = None
    index._check()
    assert [(start, len(ids)) for start, ids in buckets_of(index)] == [(START_MS, 300)]
    assert index.next_due_ms() == START_MS
    assert drain(index, START_MS + 50_000, 7) == sorted(zip(dues, range(300), strict=True))


def test_an_entry_restored_into_the_wrong_bucket_is_late_perhaps_but_never_early(column: Column) -> None:
    """The due column decides: what a bitmap has too early waits for its time, what it has too late fires when found."""
    column.put(0, [START_MS + 200_000, START_MS + 10, START_MS + 130_000, START_MS + 20])
    saved = [(START_MS, BitMap([0, 1])), (START_MS + 120_000, BitMap([2, 3]))]
    for window_entries in (1, 100):
        copies = [(start, ids.copy()) for start, ids in saved]
        index = DelayIndex.from_buckets(copies, column, start_ms=START_MS, window_entries=window_entries)
        assert pairs(index.take(START_MS + 119_999, 10)) == [(START_MS + 10, 1)]
        assert pairs(index.take(START_MS + 120_000, 10)) == [(START_MS + 20, 3)]
        assert pairs(index.take(START_MS + 199_999, 10)) == [(START_MS + 130_000, 2)]
        assert pairs(index.take(START_MS + 200_000, 10)) == [(START_MS + 200_000, 0)]
        index._check()


@pytest.mark.parametrize("window_entries", [1, 100])
@pytest.mark.parametrize("bucket_ms", [1, 7, MINUTE_MS, 1 << 31, 1 << 32])
def test_the_whole_range_of_offsets_and_ids_is_kept(column: Column, bucket_ms: int, window_entries: int) -> None:
    """The first and last ms of the longest partition and the largest entry ids survive packing and saving."""
    start_ms = START_MS + 100  # off every bucket grid but the finest
    last_ms = start_ms + OFFSET_LIMIT_MS - 1
    column.due_ms = {0: start_ms, 1: last_ms, MAX_ID: last_ms, MAX_ID - 1: start_ms}
    ids, dues = np.array(list(column.due_ms), dtype=np.uint32), np.array(list(column.due_ms.values()), dtype=np.int64)
    sizes = {"start_ms": start_ms, "bucket_ms": bucket_ms, "window_entries": window_entries}
    index = DelayIndex(column, **sizes)
    index.add(ids, dues)
    index._check()
    index = DelayIndex.from_buckets(buckets_of(index), column, **sizes)
    assert pairs(index.take(start_ms - 1, 10)) == []
    assert pairs(index.take(last_ms - 1, 10)) == [(start_ms, 0), (start_ms, MAX_ID - 1)]
    assert pairs(index.take(last_ms + OFFSET_LIMIT_MS, 10)) == [(last_ms, 1), (last_ms, MAX_ID)]
    index.add(ids, dues)
    index._check()
    assert index.exact_next_due_ms() == start_ms


def test_a_due_time_outside_the_partition_is_refused_whole(column: Column) -> None:
    """One wrong due time in a batch leaves the index as it was."""
    index = DelayIndex(column, start_ms=START_MS)
    for wrong in (START_MS - 1, START_MS + OFFSET_LIMIT_MS):
        with pytest.raises(InvalidArgument, match="due_ms"):
            index.add(0, np.array([START_MS, wrong]))
        with pytest.raises(InvalidArgument, match="due_ms"):
            index.add(0, np.array([wrong]))
    index._check()
    assert len(index) == 0


def test_buckets_of_another_grid_or_partition_and_settings_out_of_range_are_refused(column: Column) -> None:
    """A restore with a different bucket span or start says so instead of firing at wrong times."""
    for wrong in ({"start_ms": -1}, {"bucket_ms": 0}, {"bucket_ms": 1 << 33}, {"window_entries": 0}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            DelayIndex(column, **{"start_ms": 0, **wrong})
    for start in (START_MS + 1, START_MS - MINUTE_MS, START_MS + MINUTE_MS * (OFFSET_LIMIT_MS // MINUTE_MS + 1)):
        with pytest.raises(InvalidArgument, match="bucket_start_ms"):
            DelayIndex.from_buckets([(start, BitMap([1]))], column, start_ms=START_MS)


def test_a_column_that_gives_too_few_due_times_is_a_bug_and_loses_nothing(column: Column) -> None:
    """The callback's contract is checked before an entry moves."""
    index = DelayIndex(lambda ids: column(ids)[1:], start_ms=START_MS)
    index.add(*column.put(0, [START_MS, START_MS + 1]))
    with pytest.raises(BrokenInvariant, match="due_of gave 1 due times for 2"):
        index.take(START_MS + 5, 5)
    assert len(index) == 2


def test_a_day_of_messages_takes_few_bytes_each(column: Column) -> None:
    """At the density of ten million over a day, 60 s buckets are estimated below four bytes a message, packed 2.5."""
    index = DelayIndex(column, start_ms=START_MS)
    dues = np.random.default_rng(11).integers(START_MS, START_MS + 30 * MINUTE_MS, 200_000)
    index.add(np.arange(0, 9_600_000, 48, dtype=np.uint32), dues)
    assert 3 < index.memory_bytes() / 200_000 < 4
    pack_all(index)
    assert 2 < index.memory_bytes() / 200_000 < 2.5


def test_consecutive_entries_of_one_minute_take_no_memory_to_speak_of(column: Column) -> None:
    """A burst of a hundred thousand messages due together is a few runs, not a bitmap of single entries."""
    index = DelayIndex(column, start_ms=START_MS)
    for first in range(0, 100_000, 5_000):
        index.add(first, np.full(5_000, START_MS + 100))
    assert index.memory_bytes() < 2_000


BUCKET_MS = 10


def append(column: Column, index: DelayIndex, offsets: list[int]) -> None:
    """Append entries and add them to the index."""
    index.add(*column.put(len(column.due_ms), (CUT_MS + offset for offset in offsets)))


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
    index = DelayIndex(column, start_ms=CUT_MS, bucket_ms=BUCKET_MS, window_entries=window)
    append(column, index, before)
    index.take(CUT_MS + 100, taken)
    index.exact_next_due_ms()  # loads the window, and splits a crowded bucket
    expected = {start_ms: set(ids) for start_ms, ids in buckets_of(index)}
    if packed:
        restored = as_packed(buckets_of(index), len(before))
        index = DelayIndex.from_buckets(restored, column, start_ms=CUT_MS, bucket_ms=BUCKET_MS, window_entries=window)
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
    index = DelayIndex(column, start_ms=CUT_MS, bucket_ms=BUCKET_MS)
    append(column, index, [50])
    append(column, index, [offset for offset in range(0, 50, 10) for _ in range(3)])
    assert as_dict(gathered(index.cut(1))) == {CUT_MS + 50: {0}}


def test_a_bucket_restored_in_overlapping_pieces_counts_each_entry_once(column: Column) -> None:
    """Pieces of one bucket are united, and the count is that of the union."""
    column.put(0, [START_MS + 9, START_MS + 8, START_MS + 7])
    pieces = [(START_MS, BitMap([0, 1])), (START_MS, BitMap()), (START_MS, BitMap([1, 2]))]
    index = DelayIndex.from_buckets(pieces, column, start_ms=START_MS)
    index._check()
    assert len(index) == 3
