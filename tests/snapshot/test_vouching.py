"""Bitmaps told by their bytes: what is vouched for is what making a bitmap of it gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from duelog.snapshot.validation import vouched


def look(saved: list[bytes], entries: list[int], tail: int) -> list[bool]:
    """Ask for bitmaps that lie one after the other, something before and after them."""
    ends = 3 + np.cumsum([len(each) for each in saved])
    begins = np.concatenate(([3], ends[:-1]))
    whole = memoryview(b"abc" + b"".join(saved) + b"z")
    found: list[bool] = vouched(whole, begins, ends, np.array(entries, dtype=np.uint32), tail).tolist()
    return found


def is_true(saved: bytes, entries: int, tail: int) -> bool:
    """The same by making a bitmap."""
    try:
        ids = BitMap.deserialize(saved)
    except (ValueError, IndexError):
        return False
    return len(ids) == entries > 0 and ids.max() < tail


near = st.integers(0, 300) | st.integers(65_500, 65_600) | st.integers(0, 1 << 20) | st.integers(0, (1 << 32) - 1)
scattered = st.sets(near, max_size=40).map(BitMap)
ranges = st.tuples(near, st.integers(1, 9_000)).map(lambda ends: BitMap(range(ends[0], min(sum(ends), 1 << 32))))
large = st.integers(0, 3).map(lambda seed: BitMap(np.random.default_rng(seed).integers(0, 80_000, 9_000).tolist()))


def optimized(ids: BitMap) -> BitMap:
    """With containers of runs, where those are smaller."""
    ids.run_optimize()
    return ids


bitmaps = scattered | ranges | ranges.map(optimized) | large | st.builds(lambda a, b: a | b, scattered, ranges)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), several=st.lists(bitmaps, min_size=1, max_size=6))
def test_whatever_is_vouched_for_is_so(data: st.DataObject, several: list[BitMap]) -> None:
    """True for no bitmap of another number of entries, or that reaches the tail."""
    saved = [ids.serialize() for ids in several]
    entries = [len(ids) + data.draw(st.sampled_from([0, 0, 0, 1])) for ids in several]
    last = max((ids.max() for ids in several if ids), default=0)
    tail = data.draw(st.sampled_from([last + 1, last, last - 60, 1 << 32]))
    for sure, each, count in zip(look(saved, entries, tail), saved, entries, strict=True):
        assert is_true(each, count, tail) or not sure


@settings(max_examples=100, deadline=None)
@given(several=st.lists(scattered.filter(bool), min_size=1, max_size=6))
def test_scattered_entries_are_vouched_for_exactly(several: list[BitMap]) -> None:
    """Bitmaps of small containers only, which are those that cost the most to make, are told right both ways."""
    saved = [ids.serialize() for ids in several]
    entries = [len(ids) for ids in several]
    for tail in {1, 1 << 32, *(ids.max() for ids in several), *(ids.max() + 1 for ids in several)}:
        expected = [is_true(each, count, tail) for each, count in zip(saved, entries, strict=True)]
        assert look(saved, entries, tail) == expected


@settings(max_examples=300, deadline=None)
@given(data=st.data(), ids=scattered | ranges)
def test_changed_bytes_are_vouched_for_only_where_they_are_a_bitmap(data: st.DataObject, ids: BitMap) -> None:
    """Some bytes changed, some cut off or put on: a bitmap of that many entries can still be made of what passes."""
    saved = bytearray(ids.serialize())
    for _ in range(data.draw(st.integers(0, 3))):
        saved[data.draw(st.integers(0, len(saved) - 1))] = data.draw(st.integers(0, 255))
    changed = bytes(saved[: data.draw(st.integers(0, len(saved)) | st.just(len(saved)))])
    changed += data.draw(st.binary(max_size=2))
    for tail in (1 << 32, 70_000):
        (sure,) = look([changed], [len(ids)], tail)
        assert is_true(changed, len(ids), tail) or not sure


@pytest.mark.parametrize("saved", [b"", b"\x3a\x30\0\0", b"\x3a\x30\0\0\0\0\0\0", b"\x3a\x30\0\0" + b"\xff" * 30])
def test_too_few_bytes_are_not_vouched_for(saved: bytes) -> None:
    """Nothing is read past the end of a bitmap."""
    assert look([saved], [0], 10) == [False]
    assert look([saved], [1], 10) == [False]
    nothing = np.empty(0, np.int64)
    assert not len(vouched(memoryview(b""), nothing, nothing, np.empty(0, np.uint32), 1))


def test_entries_out_of_order_are_not_vouched_for() -> None:
    """Two entries of a container swapped, or equal, among bitmaps that are whole."""
    good = BitMap([5, 9, 70_000, 70_001]).serialize()
    swapped, equal = bytearray(good), bytearray(good)
    swapped[-4:] = good[-2:] + good[-4:-2]
    equal[-4:] = good[-4:-2] * 2
    assert look([good, bytes(swapped), good, bytes(equal), good], [4] * 5, 1 << 32) == [True, False, True, False, True]
    assert not is_true(bytes(swapped), 4, 1 << 32)
    assert look([b"x", good, bytes(swapped), good], [1, 4, 4, 4], 1 << 32) == [False, True, False, True]
