"""The delay index against a plain dictionary, and the findings it must keep."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyroaring import BitMap

from duelog.partitions.index import buckets, window
from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.packed_buckets import PackedBucket
from duelog.partitions.index.window import MAX_ID, OFFSET_LIMIT_MS, Dues, Ids
from duelog.store.errors import BrokenInvariant, InvalidArgument
from tests.partitions.packing_all import as_packed, buckets_of, pack_all, packed_in

MINUTE_MS = 60_000
DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS
FRESH_ENTRIES = window._FRESH_ENTRIES


class Column:
    """A due column in memory: counts what is read of it, and can be damaged or made to fail."""

    def __init__(self) -> None:
        self.due_ms: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.reads = 0
        self.good_calls: int | None = None  # then every call raises; None: never

    def __call__(self, ids: Ids) -> Dues:
        if self.good_calls is not None:
            if not self.good_calls:
                raise OSError("the column cannot be read")
            self.good_calls -= 1
        assert (ids[1:] > ids[:-1]).all()
        self.reads += len(ids)
        return np.array([-1 if i in self.damaged else self.due_ms[i] for i in ids.tolist()], dtype=np.int64)

    def put(self, first: int, dues: Iterable[int]) -> tuple[Ids, Dues]:
        """Append entries from ``first`` on."""
        listed = list(dues)
        self.due_ms.update(enumerate(listed, first))
        return np.arange(first, first + len(listed), dtype=np.uint32), np.array(listed, dtype=np.int64)


def pairs(taken: tuple[Ids, Dues]) -> list[tuple[int, int]]:
    """What was taken as (due_ms, entry_id)."""
    ids, dues = taken
    assert ids.dtype == np.uint32
    assert dues.dtype == np.int64
    return list(zip(dues.tolist(), ids.tolist(), strict=True))


def drain(index: DelayIndex, now_ms: int, limit: int) -> list[tuple[int, int]]:
    """Everything due by now, in the order taken."""
    every: list[tuple[int, int]] = []
    while more := pairs(index.take(now_ms, limit)):
        index._check()
        every += more
    return every


offsets = st.integers(0, 12) | st.integers(0, 300)  # many equal due times, and some spread


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

    @rule(offset=offsets, gap=st.integers(0, 2))
    def add_one(self, offset: int, gap: int) -> None:
        self.next_id += gap
        self.column.put(self.next_id, [self.start_ms + offset])
        self.index.add_one(self.next_id, self.start_ms + offset)
        self.waiting[self.next_id] = self.start_ms + offset
        self.next_id += 1

    @rule(batch=st.lists(offsets, max_size=25), order=st.randoms(use_true_random=False), dense=st.booleans())
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

    @rule(now=offsets | st.just(-1), limit=st.integers(0, 12) | st.just(1_000))
    def take(self, now: int, limit: int) -> None:
        found = pairs(self.index.take(self.start_ms + now, limit))
        self.note_unreadable()
        assert found == self.due_first(self.start_ms + now, limit)
        self.taken = found
        for _, entry_id in found:
            del self.waiting[entry_id]

    @rule(now=offsets, limit=st.integers(1, 40), good_calls=st.integers(0, 3))
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

    @rule(now=offsets)
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

    @rule(restore=st.sampled_from(["no", "unpacked", "packed", "packed"]), together=st.integers(1, 5))
    def save(self, restore: str, together: int) -> None:
        saved = buckets_of(self.index)
        bucket_ms = self.settings["bucket_ms"]
        assert [start for start, _ in saved] == sorted({due - due % bucket_ms for due in self.waiting.values()})
        for start, ids in saved:
            assert set(ids) == {i for i, due in self.waiting.items() if start <= due < start + bucket_ms}
        if restore == "unpacked":
            self.index = DelayIndex.from_buckets(saved, self.column, **self.settings)
        if restore == "packed":
            packed = as_packed(saved, self.next_id, together=together)
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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buckets, "_PACKED_AT_ONCE", at_once)
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


TestIndexAndDict = IndexAndDict.TestCase
TestIndexAndDict.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.fixture
def column() -> Column:
    """An empty due column."""
    return Column()


def test_equal_due_times_keep_append_order(column: Column) -> None:
    """Five hundred entries of one instant, added in several ways, come out by entry id."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=64)
    due_ms = START_MS + 90_000
    index.add(*column.put(100, [due_ms] * 300))
    index._load(due_ms)
    index.add(*column.put(400, [due_ms] * 150))
    for entry_id in range(550, 600):
        column.put(entry_id, [due_ms])
        index.add_one(entry_id, due_ms)
    assert drain(index, due_ms, 33) == [(due_ms, entry_id) for entry_id in range(100, 600)]


def test_an_earlier_add_after_the_window_is_loaded_comes_first(column: Column) -> None:
    """What is added before the window's first entry overtakes it, in its own bucket and in one before."""
    index = DelayIndex(column, start_ms=START_MS)
    index.add(*column.put(0, [START_MS + 200_000, START_MS + 210_000]))
    assert index.exact_next_due_ms() == START_MS + 200_000
    index.add(*column.put(2, [START_MS + 190_000, START_MS + 5]))
    index._check()
    assert index.next_due_ms() == START_MS + 5
    assert [entry_id for _, entry_id in drain(index, START_MS + 300_000, 1)] == [3, 2, 0, 1]


def test_an_entry_fires_on_its_very_tick_and_not_before(column: Column) -> None:
    """One ms before its due time an entry is not due, at its due time it is; loaded or not, whole buckets too."""
    index = DelayIndex(column, start_ms=START_MS)
    edges = [0, 1, MINUTE_MS - 1, MINUTE_MS, MINUTE_MS + 1, DAY_MS - 1]
    index.add(*column.put(0, [START_MS + edge for edge in edges]))
    for entry_id, edge in enumerate(edges):
        assert pairs(index.take(START_MS + edge - 1, 10)) == []
        assert index.next_due_ms() is not None
        assert pairs(index.take(START_MS + edge, 10)) == [(START_MS + edge, entry_id)]
    assert index.next_due_ms() is None


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


def test_a_window_grown_by_adds_gives_its_later_part_back(column: Column) -> None:
    """A limit far ahead does not draw a whole day into the window: past twice its size it spills."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=50)
    index.add(*column.put(0, [START_MS + DAY_MS - 1]))
    assert index.exact_next_due_ms() == START_MS + DAY_MS - 1
    dues = np.random.default_rng(9).integers(START_MS, START_MS + DAY_MS, 5_000)
    for begin in range(0, 5_000, 250):
        index.add(*column.put(1 + begin, dues[begin : begin + 250].tolist()))
        assert len(index._window) <= 100
    index._check()
    assert drain(index, START_MS + DAY_MS, 400) == sorted((due, i) for i, due in column.due_ms.items())


def test_many_single_adds_into_the_window_are_merged_and_keep_order(column: Column) -> None:
    """Thousands of adds one by one to a loaded window come out in order with what was there."""
    index = DelayIndex(column, start_ms=START_MS)
    dues = np.random.default_rng(10).integers(START_MS, START_MS + MINUTE_MS, 12_000).tolist()
    index.add(*column.put(0, dues[:2_000]))
    index._load(START_MS)
    column.put(2_000, dues[2_000:])
    for entry_id in range(2_000, 12_000):
        index.add_one(entry_id, dues[entry_id])
    index._check()
    assert drain(index, START_MS + MINUTE_MS, 700) == sorted(zip(dues, range(12_000), strict=True))


def test_what_is_put_back_comes_first_again_whatever_was_added_since(column: Column) -> None:
    """A take whose commit failed is undone, though later entries were added and the window had run empty."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=4)
    index.add(*column.put(0, range(START_MS, START_MS + 10)))
    ids, dues = index.take(START_MS + 9, 10)
    index.add(*column.put(10, range(START_MS + 5, START_MS + 25)))
    index._load(START_MS + 9)
    index.add(ids, dues)
    index._check()
    assert drain(index, START_MS + 99, 3) == sorted((due, i) for i, due in column.due_ms.items())


def test_the_last_entry_of_a_part_put_back_alone_comes_before_the_rest(column: Column) -> None:
    """The entry that the limit stands on belongs to the window when its own commit failed."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=1)
    index.add(*column.put(0, [START_MS + 10] * 3))
    for entry_id in range(3):
        taken = index.take(START_MS + 10, 1)
        index.add(*taken)
        index._check()
        assert pairs(index.take(START_MS + 10, 1)) == [(START_MS + 10, entry_id)]


def test_an_unreadable_entry_is_set_aside_and_the_rest_goes_on(column: Column) -> None:
    """Damage in the due column costs its own entries only, in a small bucket, a split one and a crowded instant."""
    dues = [START_MS + 10] * 40 + [START_MS + 70_000 + i for i in range(40)] + [START_MS + 130_000, START_MS + 130_001]
    column.damaged = {3, 20, 39, 55, 79, 81}
    index = DelayIndex(column, start_ms=START_MS, window_entries=8)
    index.add(*column.put(0, dues))
    expected = sorted((due, i) for i, due in enumerate(dues) if i not in column.damaged)
    assert drain(index, START_MS + 200_000, 5) == expected
    assert set(index.unreadable) == column.damaged
    assert len(index) == 0


@pytest.mark.parametrize("garbage", [-1, START_MS - 1, START_MS + OFFSET_LIMIT_MS])
def test_a_bucket_of_nothing_but_unreadable_entries_is_passed(column: Column, garbage: int) -> None:
    """A due time outside the partition counts as unreadable, and the next bucket's entry is found at once."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=2)
    index.add(*column.put(0, [START_MS + 5] * 9 + [START_MS + 100_000]))
    column.put(0, [garbage] * 9)
    assert index.exact_next_due_ms() == START_MS + 100_000
    assert list(index.unreadable) == list(range(9))
    assert len(index) == 1


@pytest.mark.parametrize("good_calls", range(6))
def test_a_column_that_fails_midway_loses_nothing(column: Column, good_calls: int) -> None:
    """Whichever read raises, the take raises the same and has removed nothing."""
    index = DelayIndex(column, start_ms=START_MS, window_entries=10)
    dues = [START_MS + 5, START_MS + 6] + [START_MS + 60_000 + i % 97 for i in range(300)]
    index.add(*column.put(0, dues))
    column.good_calls = good_calls
    with pytest.raises(OSError, match="cannot be read"):
        index.take(START_MS + 90_000, 1_000)
    column.good_calls = None
    index._check()
    assert len(index) == 302
    assert drain(index, START_MS + 90_000, 1_000) == sorted(zip(dues, range(302), strict=True))


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


def test_a_discarded_entry_never_comes_out(column: Column) -> None:
    """Entries are removed from the sorted window, from its recent adds and from buckets, and counted once."""
    index = DelayIndex(column, start_ms=START_MS)
    index.add(*column.put(0, [START_MS + i for i in range(20)]))
    index._load(START_MS)
    index.add(*column.put(20, [START_MS + 3, START_MS + 500_000, START_MS + 500_001]))
    assert index.discard(BitMap([1, 20, 21, 999])) == 3
    assert index.discard_one(2, START_MS + 2)
    assert index.discard_one(22, START_MS + 500_001)
    assert not index.discard_one(22, START_MS + 500_001)
    index._check()
    assert [i for _, i in drain(index, START_MS + DAY_MS, 6)] == [0, *range(3, 20)]


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


def test_a_saved_copy_shares_nothing_with_the_index(column: Column) -> None:
    """A snapshot taken before more is added, taken and discarded still holds what there was."""
    index = DelayIndex(column, start_ms=START_MS)
    index.add(*column.put(0, [START_MS + i * 40_000 for i in range(6)]))
    index._load(START_MS)
    saved = buckets_of(index)
    index.add(*column.put(6, [START_MS + 1, START_MS + 100_000]))
    index.take(START_MS + 90_000, 10)
    index.discard(BitMap([5]))
    assert [(start - START_MS, list(ids)) for start, ids in saved] == [
        (0, [0, 1]),
        (MINUTE_MS, [2]),
        (2 * MINUTE_MS, [3, 4]),
        (3 * MINUTE_MS, [5]),
    ]


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


def test_a_bucket_restored_in_overlapping_pieces_counts_each_entry_once(column: Column) -> None:
    """Pieces of one bucket are united, and the count is that of the union."""
    column.put(0, [START_MS + 9, START_MS + 8, START_MS + 7])
    pieces = [(START_MS, BitMap([0, 1])), (START_MS, BitMap()), (START_MS, BitMap([1, 2]))]
    index = DelayIndex.from_buckets(pieces, column, start_ms=START_MS)
    index._check()
    assert len(index) == 3


def test_buckets_of_another_grid_or_partition_are_refused(column: Column) -> None:
    """A restore with a different bucket span or start says so instead of firing at wrong times."""
    for start in (START_MS + 1, START_MS - MINUTE_MS, START_MS + MINUTE_MS * (OFFSET_LIMIT_MS // MINUTE_MS + 1)):
        with pytest.raises(InvalidArgument, match="bucket_start_ms"):
            DelayIndex.from_buckets([(start, BitMap([1]))], column, start_ms=START_MS)


@pytest.mark.parametrize("wrong", [{"start_ms": -1}, {"bucket_ms": 0}, {"bucket_ms": 1 << 33}, {"window_entries": 0}])
def test_settings_out_of_range_are_refused(column: Column, wrong: dict[str, int]) -> None:
    """An index cannot be made with a setting that its arithmetic does not cover."""
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        DelayIndex(column, **{"start_ms": 0, **wrong})


def test_a_column_that_gives_too_few_due_times_is_a_bug_and_loses_nothing(column: Column) -> None:
    """The callback's contract is checked before an entry moves."""
    index = DelayIndex(lambda ids: column(ids)[1:], start_ms=START_MS)
    index.add(*column.put(0, [START_MS, START_MS + 1]))
    with pytest.raises(BrokenInvariant, match="due_of gave 1 due times for 2"):
        index.take(START_MS + 5, 5)
    assert len(index) == 2


def test_an_unloaded_index_names_its_first_bucket_as_next_due_and_reads_nothing(column: Column) -> None:
    """Without a window the bound is the bucket's start, within the partition; a take makes it exact."""
    index = DelayIndex(column, start_ms=START_MS + 20_000)
    index.add(*column.put(0, [START_MS + 50_000, START_MS + 50_001]))
    assert index.next_due_ms() == START_MS + 20_000
    assert column.reads == 0
    assert pairs(index.take(START_MS + 20_000, 1)) == []
    assert index.next_due_ms() == START_MS + 50_000


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
