"""The delay index: order, bounds of what is kept, damage, copies in slices; every operation against a dictionary."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyroaring import BitMap

from duelog.partitions.index import buckets, window
from duelog.partitions.index.buckets import PackedBucket
from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.index_cut import IndexCut, Piece
from duelog.partitions.index.window import MAX_ID, OFFSET_LIMIT_MS
from duelog.store.errors import BrokenInvariant, InvalidArgument
from tests.partitions.packing_all import Column, as_packed, buckets_of, drain, pack_all, packed_in, pairs
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


FRESH_ENTRIES = window._FRESH_ENTRIES

bucket_offsets = st.integers(0, 12) | st.integers(0, 300)  # many equal due times, and some spread


class IndexAndDict(RuleBasedStateMachine):
    """Every operation on an index and on a dictionary of what should be in it."""

    @initialize(
        bucket_ms=st.sampled_from([1, 2, 7, 50, 1_000]),
        window_entries=st.integers(1, 8),
        start_ms=st.sampled_from([0, 13, START_MS]),
        fresh_entries=st.sampled_from([0, 2, 5, FRESH_ENTRIES]),
    )
    def begin(self, bucket_ms: int, window_entries: int, start_ms: int, fresh_entries: int) -> None:
        window._FRESH_ENTRIES = fresh_entries
        self.settings = {"start_ms": start_ms, "bucket_ms": bucket_ms, "window_entries": window_entries}
        self.start_ms = start_ms
        self.column = Column()
        self.index = DelayIndex(self.column, **self.settings)
        self.waiting: dict[int, int] = {}
        self.taken: list[tuple[int, int]] = []  # by the last take, for put_back
        self.next_id = 0

    def teardown(self) -> None:
        window._FRESH_ENTRIES = FRESH_ENTRIES

    def note_unreadable(self) -> None:
        """Unreadable entries leave the dictionary; only damaged ones may be."""
        for entry_id in self.index.unreadable:
            assert entry_id in self.column.damaged
            self.waiting.pop(entry_id, None)

    def due_first(self, now_ms: int, limit: int) -> list[tuple[int, int]]:
        return sorted((due, i) for i, due in self.waiting.items() if due <= now_ms)[:limit]

    @rule(offset=bucket_offsets, gap=st.integers(0, 2))
    def add_one(self, offset: int, gap: int) -> None:
        self.next_id += gap
        self.column.put(self.next_id, [self.start_ms + offset])
        self.index.add_one(self.next_id, self.start_ms + offset)
        self.waiting[self.next_id] = self.start_ms + offset
        self.next_id += 1

    @rule(batch=st.lists(bucket_offsets, max_size=25), order=st.randoms(use_true_random=False), dense=st.booleans())
    def add_batch(self, batch: list[int], order: object, dense: bool) -> None:
        ids, dues = self.column.put(self.next_id, (self.start_ms + offset for offset in batch))
        if dense:
            self.index.add(self.next_id, dues)
        else:
            places = list(range(len(batch)))
            order.shuffle(places)  # type: ignore[attr-defined]
            self.index.add(ids[places], dues[places])
        self.waiting.update(zip(ids.tolist(), dues.tolist(), strict=True))
        self.next_id += len(batch)

    @rule(now=bucket_offsets | st.just(-1), limit=st.integers(0, 12) | st.just(1_000))
    def take(self, now: int, limit: int) -> None:
        found = pairs(self.index.take(self.start_ms + now, limit))
        self.note_unreadable()
        assert found == self.due_first(self.start_ms + now, limit)
        self.taken = found
        for _, entry_id in found:
            del self.waiting[entry_id]

    @rule(now=bucket_offsets, limit=st.integers(1, 40), good_calls=st.integers(0, 3))
    def take_while_the_column_fails(self, now: int, limit: int, good_calls: int) -> None:
        self.column.good_calls = good_calls
        try:
            self.index.add(*self.index.take(self.start_ms + now, limit))
        except OSError:
            pass
        finally:
            self.column.good_calls = None
        self.note_unreadable()

    @precondition(lambda self: self.taken)
    @rule()
    def put_back(self) -> None:
        dues, ids = (list(column) for column in zip(*self.taken, strict=True))
        self.index.add(np.array(ids, dtype=np.uint32), np.array(dues, dtype=np.int64))
        self.waiting.update(zip(ids, dues, strict=True))
        self.taken = []

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.integers(0, self.next_id + 1), max_size=12))
        assert self.index.discard(BitMap(ids)) == len(ids & self.waiting.keys())
        for entry_id in ids:
            self.waiting.pop(entry_id, None)

    @rule(data=st.data(), wrong=st.sampled_from([0, 0, 0, 1, -100]))
    def discard_one(self, data: st.DataObject, wrong: int) -> None:
        entry_id = data.draw(st.integers(0, self.next_id))
        due_ms = self.column.due_ms.get(entry_id, self.start_ms) + wrong
        assert self.index.discard_one(entry_id, due_ms) == (self.waiting.pop(entry_id, None) is not None)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.column.damaged.add(data.draw(st.sampled_from(sorted(self.waiting))))

    @rule(now=bucket_offsets)
    def prepare(self, now: int) -> None:
        self.index._load(self.start_ms + now)
        self.note_unreadable()

    @rule()
    def next_due(self) -> None:
        bound = self.index.next_due_ms()
        assert (bound is None) == (not self.waiting)
        assert bound is None or self.start_ms <= bound <= min(self.waiting.values())

    @rule()
    def exact_next_due(self) -> None:
        exact = self.index.exact_next_due_ms()
        self.note_unreadable()
        assert exact == min(self.waiting.values(), default=None)
        assert self.index.next_due_ms() == exact

    @rule(restore=st.sampled_from(["no", "unpacked", "packed", "packed"]))
    def save(self, restore: str) -> None:
        saved = buckets_of(self.index)
        bucket_ms = self.settings["bucket_ms"]
        assert [start for start, _ in saved] == sorted({due - due % bucket_ms for due in self.waiting.values()})
        for start, ids in saved:
            assert set(ids) == {i for i, due in self.waiting.items() if start <= due < start + bucket_ms}
        if restore == "unpacked":
            self.index = DelayIndex.from_buckets(saved, self.column, **self.settings)
        if restore == "packed":
            packed = as_packed(saved, self.next_id)
            self.index = DelayIndex.from_buckets(packed, self.column, **self.settings)
            assert len(packed_in(self.index)) == len(saved)

    @rule(back=st.integers(0, 3))
    def cut(self, back: int) -> None:
        limit_id = max(self.next_id - back, 0)
        cutting = self.index.cut(limit_id)
        cutting.arrange()
        pieces = cutting.more(1 << 32)
        copied = [entry_id for piece in pieces for entry_id in BitMap.deserialize(piece.bitmap)]
        assert sorted(copied) == sorted(entry_id for entry_id in self.waiting if entry_id < limit_id)
        assert sum(piece.entries for piece in pieces) == len(copied)

    @rule(at_once=st.integers(1, 4), slices=st.integers(1, 6) | st.just(1_000))
    def pack(self, at_once: int, slices: int) -> None:
        with patch.object(buckets, "_PACKED_AT_ONCE", at_once):
            after_first = list(self.index._buckets._bitmaps.items())[1:]
            starts = [start for start, kept in after_first if not isinstance(kept, PackedBucket) or kept.added]
            after_ms = self.index.pack()
            for _ in range(slices - 1):
                if after_ms is not None:
                    after_ms = self.index.pack(after_ms)
        assert slices < 1_000 or after_ms is None
        if after_ms is None:
            assert set(starts) <= set(packed_in(self.index))

    @invariant()
    def holds(self) -> None:
        """All that the index relies on is so after every step, and it counts right."""
        if hasattr(self, "index"):
            self.index._check()
            assert len(self.index) == len(self.waiting)


IndexAndDict.TestCase.settings = settings(
    max_examples=length("DUELOG_INDEXES", 25, 100), stateful_step_count=30, deadline=None
)
TestIndexAndDict = pytest.mark.series(IndexAndDict.TestCase)
