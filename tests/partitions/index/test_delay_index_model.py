"""The delay index against a plain dictionary: every operation, in any order."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyroaring import BitMap

from duelog.partitions.index import buckets, window
from duelog.partitions.index.buckets import PackedBucket
from duelog.partitions.index.delay_index import DelayIndex
from tests.partitions.packing_all import Column, as_packed, buckets_of, packed_in, pairs
from tests.proof import length

START_MS = 20_000 * 86_400_000
FRESH_ENTRIES = window._FRESH_ENTRIES

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
