"""Packed buckets: which are packed, when and in what pieces, what unpacks them, and what that takes and saves.

That an index whose buckets are packed is equal to one without in every operation is in test_delay_index.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pyroaring import BitMap

from duelog.partitions.index import buckets
from duelog.partitions.index.buckets import PackedBucket
from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.window import Dues, Ids
from duelog.store.errors import BrokenInvariant
from tests.partitions.packing_all import as_packed, buckets_of, pack_all, packed_in

START_MS = 20_000 * 86_400_000
MINUTE_MS = 60_000


class Growing:
    """An index of entries at random instants of some minutes, added batch by batch."""

    def __init__(self, minutes: int, seed: int = 3) -> None:
        self._source = np.random.default_rng(seed)
        self._minutes = minutes
        self.dues: Dues = np.empty(0, dtype=np.int64)
        self.index = DelayIndex(self.due_of, start_ms=START_MS)

    def due_of(self, ids: Ids) -> Dues:
        """The due column."""
        return self.dues[ids]

    def add(self, count: int) -> None:
        """Append so many entries."""
        more = self._source.integers(START_MS, START_MS + self._minutes * MINUTE_MS, count)
        self.index.add(len(self.dues), more)
        self.dues = np.concatenate((self.dues, more))


def test_a_slice_is_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes or so many buckets at a time, whichever comes first, each bucket once."""
    growing = Growing(50)
    growing.add(20_000)  # 800 bytes a bucket
    monkeypatch.setattr(buckets, "_PACKED_AT_ONCE_BYTES", 8_000)
    assert pack_all(growing.index) == 5
    growing.add(20_000)
    monkeypatch.setattr(buckets, "_PACKED_AT_ONCE_BYTES", 1 << 20)
    monkeypatch.setattr(buckets, "_PACKED_AT_ONCE", 7)
    assert pack_all(growing.index) == 8
    assert pack_all(growing.index) == 1  # nothing was added: nothing is copied again
    growing.index._check()


def test_a_bucket_too_large_to_copy_at_once_stays_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, and those after it have their turn."""
    monkeypatch.setattr(buckets, "_LARGE_ENTRIES", 100)
    growing = Growing(4)
    growing.add(200)
    growing.index.add(200, np.full(101, START_MS + MINUTE_MS))
    pack_all(growing.index)
    assert packed_in(growing.index) == [START_MS + 2 * MINUTE_MS, START_MS + 3 * MINUTE_MS]


def test_it_is_worth_it_only_when_much_has_come_in() -> None:
    """Not for few entries a bucket, and not while less than half of the index is unpacked and came since."""
    growing = Growing(10)
    growing.add(5_120)
    assert not growing.index.is_worth_packing(5_120)
    growing.add(1)
    assert growing.index.is_worth_packing(5_121)
    assert not growing.index.is_worth_packing(5_120)
    pack_all(growing.index)
    unpacked = len(growing.index) - growing.index._buckets.packed
    assert unpacked < 600
    growing.add(10_000)
    pack_all(growing.index)
    unpacked = len(growing.index) - growing.index._buckets.packed
    growing.add(6_000)
    assert growing.index._buckets.packed + unpacked + 6_000 == len(growing.index)
    assert not growing.index.is_worth_packing(10_000)  # a third of the index
    growing.add(12_000)
    assert growing.index.is_worth_packing(18_000)
    assert not growing.index.is_worth_packing(10_000)


def test_cancelling_which_unpacks_buckets_is_no_reason_to_begin() -> None:
    """A few cancelled entries unpack all; they are packed again when as much has been added as for the first time."""
    growing = Growing(10)
    growing.add(10_000)
    pack_all(growing.index)
    for entry_id in range(100):
        growing.index.discard_one(entry_id, int(growing.dues[entry_id]))
    growing.index._check()
    assert growing.index._buckets.packed == 0
    assert not growing.index.is_worth_packing(0)
    growing.add(11_000)
    assert growing.index.is_worth_packing(11_000)


def test_entries_in_the_window_are_not_waiting_to_be_packed() -> None:
    """A loaded window is no reason to begin, however large."""
    growing = Growing(1)
    growing.add(5_000)
    assert growing.index.is_worth_packing(5_000)
    growing.index.exact_next_due_ms()
    assert not growing.index.is_worth_packing(5_000)


MINUTES = 12
EACH = 5


def due_ms(entry_id: int) -> int:
    """Entries take turns among the minutes."""
    return START_MS + entry_id % MINUTES * MINUTE_MS + entry_id


def due_of(ids: Ids) -> Dues:
    """The due column."""
    return np.array([due_ms(entry_id) for entry_id in ids.tolist()], dtype=np.int64)


def packed_index() -> DelayIndex:
    """MINUTES buckets of EACH entries, all packed."""
    index = DelayIndex(due_of, start_ms=START_MS)
    index.add(0, due_of(np.arange(MINUTES * EACH, dtype=np.uint32)))
    saved = as_packed(buckets_of(index), MINUTES * EACH)
    return DelayIndex.from_buckets(saved, due_of, start_ms=START_MS)


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


def test_entries_added_after_the_snapshot_are_discarded_without_waking_a_bucket() -> None:
    """None of them can be among those saved; one older than they are is looked for, and unpacks the buckets hit."""
    index = packed_index()
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


def test_a_bucket_with_another_number_of_entries_than_it_says_is_a_bug() -> None:
    """It is told when it is unpacked, instead of counting wrong from there on."""
    with pytest.raises(BrokenInvariant, match="3 entries, of which 2"):
        PackedBucket(BitMap([1, 2]).serialize(), 3, 10).bitmap()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="resident memory is told by Linux alone")
def test_estimated_memory_is_what_is_resident_packed_and_with_entries_added() -> None:
    """In a process of its own, three million entries over a day: packed, a third more, packed again."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    for what, (estimated, resident) in json.loads(done.stdout).items():
        assert 0.8 < estimated / resident < 1.15, (what, estimated, resident)


_MEASURE = """
import ctypes, gc, json
import numpy as np
from pathlib import Path
from duelog.partitions.index.delay_index import DelayIndex

def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1_024 for line in lines if line.startswith(("Pss_Anon:", "SwapPss:")))

source = np.random.default_rng(1)
index = DelayIndex(None, start_ms=0)
warm = DelayIndex(None, start_ms=0)
warm.add(0, source.integers(0, 86_400_000, 1_000_000))
warm.pack()
del warm
before = anonymous()

def grow(first, count):
    for at in range(first, first + count, 5_000):
        index.add(at, source.integers(0, 86_400_000, 5_000))

def pack():
    after_ms = index.pack()
    while after_ms is not None:
        after_ms = index.pack(after_ms)

found = {}
def note(what):
    found[what] = index.memory_bytes(), anonymous() - before
grow(0, 3_000_000)
note("unpacked")
pack()
note("packed")
grow(3_000_000, 1_000_000)
note("a third added")
pack()
note("packed again")
print(json.dumps(found))
"""
