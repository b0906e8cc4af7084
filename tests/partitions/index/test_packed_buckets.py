"""Packed buckets: what leaves them so, what unpacks them, and that their memory goes with them.

That an index with such buckets is equal to one without in every operation is in test_delay_index_model.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from pyroaring import BitMap

from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.packed_buckets import PackedBucket, Slab
from duelog.partitions.index.window import Dues, Ids
from duelog.store.errors import BrokenInvariant
from tests.partitions.packing_all import as_packed, buckets_of, packed_in

START_MS = 20_000 * 86_400_000
MINUTE_MS = 60_000
MINUTES = 12
EACH = 5


def due_ms(entry_id: int) -> int:
    """Entries take turns among the minutes."""
    return START_MS + entry_id % MINUTES * MINUTE_MS + entry_id


def due_of(ids: Ids) -> Dues:
    """The due column."""
    return np.array([due_ms(entry_id) for entry_id in ids.tolist()], dtype=np.int64)


def packed_index(*, together: int = 4) -> DelayIndex:
    """MINUTES buckets of EACH entries, all packed."""
    index = DelayIndex(due_of, start_ms=START_MS)
    index.add(0, due_of(np.arange(MINUTES * EACH, dtype=np.uint32)))
    saved = as_packed(buckets_of(index), MINUTES * EACH, together=together)
    return DelayIndex.from_buckets(saved, due_of, start_ms=START_MS)


def slabs_of(index: DelayIndex) -> list[Slab]:
    """What is kept of the bytes restored."""
    kept = index._buckets._bitmaps.values()
    return list({id(each.slab): each.slab for each in kept if isinstance(each, PackedBucket)}.values())


def test_adding_counting_and_asking_leave_buckets_packed() -> None:
    """A tail replayed over all buckets, the count, the next due time and a look for an absent entry unpack none."""
    index = packed_index()
    more = np.arange(MINUTES * EACH, MINUTES * EACH * 2, dtype=np.uint32)
    index.add(int(more[0]), due_of(more))
    index.add_one(1_000, due_ms(1_000))
    assert len(index) == MINUTES * EACH * 2 + 1
    assert index.next_due_ms() == START_MS
    assert index.discard(BitMap([5_000])) == 0
    assert not index.discard_one(5_001, due_ms(5_001))
    assert index.memory_bytes() > 0
    assert len(buckets_of(index)) == MINUTES
    index._check()
    assert len(packed_in(index)) == MINUTES


def test_the_first_due_bucket_is_unpacked_alone() -> None:
    """A take reads one bucket and leaves the others as they were saved."""
    index = packed_index(together=MINUTES)
    ids, _ = index.take(START_MS + MINUTE_MS - 1, 100)
    assert ids.tolist() == [0, 12, 24, 36, 48]
    assert packed_in(index) == [START_MS + minute * MINUTE_MS for minute in range(1, MINUTES)]


def test_entries_added_after_the_snapshot_are_discarded_without_waking_a_bucket() -> None:
    """None of them can be among those saved; one older than they are is looked for, and unpacks the buckets hit."""
    index = packed_index(together=MINUTES)
    more = np.arange(60, 84, dtype=np.uint32)
    index.add(60, due_of(more))
    assert index.discard(BitMap([60, 72, 61, 500])) == 3
    index._check()
    assert len(packed_in(index)) == MINUTES
    assert len(index) == MINUTES * EACH + len(more) - 3
    assert index.discard(BitMap([13, 62, 500])) == 2
    index._check()
    assert len(packed_in(index)) == MINUTES - 2
    assert index.take(START_MS + MINUTE_MS - 1, 100)[0].tolist() == [0, 12, 24, 36, 48]


@pytest.mark.parametrize("seed", range(5))
def test_a_slab_is_given_back_when_less_than_half_of_it_is_needed(seed: int) -> None:
    """In whatever order buckets are unpacked, of the bytes kept at least half are of packed buckets."""
    index = packed_index(together=6)
    order = np.random.default_rng(seed).permutation(MINUTES).tolist()
    for minute in order:
        assert index.discard_one(minute, due_ms(minute))
        index._check()
        for slab in slabs_of(index):
            assert 2 * slab.needed >= len(slab.bytes)
    assert not slabs_of(index)
    assert len(index) == MINUTES * (EACH - 1)


@pytest.mark.parametrize("size", [0, 10, 131_071, 131_072, 1_000_000])
def test_a_slab_is_a_read_only_copy(size: int) -> None:
    """Small or in memory of its own, it holds what was there, and refuses to be written to."""
    source = bytearray(np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).tobytes())
    slab = Slab(memoryview(source))
    expected = bytes(source)
    source[:] = bytes(size)
    assert slab.bytes == expected
    assert slab.bytes.readonly
    half = slab.bytes[size // 2 :]
    del slab  # the view keeps the memory
    assert half == expected[size // 2 :]


def test_a_bucket_with_another_number_of_entries_than_it_says_is_a_bug() -> None:
    """It is told when it is unpacked, instead of counting wrong from there on."""
    slab = Slab(BitMap([1, 2]).serialize())
    with pytest.raises(BrokenInvariant, match="3 entries, of which 2"):
        PackedBucket(slab, slab.bytes, 3, 10).bitmap()
