"""Telling by its bytes that a serialised bitmap is whole, without making a bitmap of it.

The portable format of roaring bitmaps, where it has no containers of runs:

    cookie:u32 (12,346) containers:u32 containers * (key:u16 entries-1:u16) containers * offset:u32 containers

A container of at most 4,096 entries is the lower 16 bits of each; a larger one is 8,192 bytes of bits. So a bitmap of
small containers only is whole if its length is that of as many entries as its head counts, and if keys ascend, and
entries within each container. All bitmaps of a part are looked at in a few array operations, about a quarter of what
making them costs.

What is not vouched for may be as good: bitmaps with runs or large containers are mostly few bytes for many entries,
and are made and asked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_COOKIE = 12_346
_HEAD = 4
_CONTAINER = 4
"""Sizes in 16-bit numbers, of which everything in a bitmap consists."""
_SMALL_ENTRIES = 4_096
_MOST_CONTAINERS = 1 << 16

_Int64s = npt.NDArray[np.int64]
_UInt16s = npt.NDArray[np.uint16]
_Bools = npt.NDArray[np.bool_]


def vouched(whole: memoryview, begins: _Int64s, ends: _Int64s, entries: npt.NDArray[np.uint32], tail: int) -> _Bools:
    """Which of the bitmaps `whole[begin:end]` deserialize to as many `entries`, more than none, all below `tail`.

    True is sure, False is not. REQUIRES: begins and ends in `whole`, no two bitmaps overlap. O(bytes): 0.4 ms a MiB.
    """
    sure = np.zeros(len(begins), dtype=np.bool_)
    likely = (ends - begins > 2 * (_HEAD + _CONTAINER)) & ((ends - begins) % 2 == 0) & (entries > 0)
    for odd in (0, 1):  # a bitmap of an odd number of bytes, which is one with runs, shifts those after it
        some = np.flatnonzero(likely & (begins % 2 == odd))
        if len(some):
            numbers = np.frombuffer(whole, "<u2", (len(whole) - odd) // 2, odd)
            columns = begins[some] // 2, (ends[some] - odd) // 2, entries[some].astype(np.int64)
            sure[some] = _vouched(numbers, *columns, tail)
    return sure


def _vouched(numbers: _UInt16s, begins: _Int64s, ends: _Int64s, entries: _Int64s, tail: int) -> _Bools:
    """The same with places counted in 16-bit numbers. REQUIRES: bitmaps are longer than a head and a container."""
    containers = numbers[begins + 2] | numbers[begins + 3].astype(np.int64) << 16
    good = (numbers[begins] == _COOKIE) & (numbers[begins + 1] == 0) & (containers > 0)
    good &= (containers <= _MOST_CONTAINERS) & (ends - begins == _HEAD + _CONTAINER * containers + entries)
    if not good.all():
        return _of_these(good, numbers, begins, ends, entries, tail)
    # All containers of all bitmaps: where their keys lie in the heads, then the numbers of their entries.
    first = np.cumsum(containers) - containers
    places = np.repeat(begins + _HEAD - 2 * first, containers)
    places += np.arange(0, 2 * len(places), 2)
    keys, sizes = numbers[places], numbers[places + 1].astype(np.int64) + 1
    good = (np.add.reduceat(sizes, first) == entries) & (np.maximum.reduceat(sizes, first) <= _SMALL_ENTRIES)
    last_key = keys[first + containers - 1].astype(np.int64)
    good &= (last_key << 16 | numbers[ends - 1]) < tail
    falls = _falls(keys)[:-1]
    falls[first] = False
    good &= ~np.logical_or.reduceat(falls, first)
    if not good.all():
        return _of_these(good, numbers, begins, ends, entries, tail)
    # Entries lie at the end of a bitmap, container after container.
    falls = _falls(numbers)
    values = ends - entries
    before = np.cumsum(sizes) - sizes
    falls[before + np.repeat(values - before[first], containers)] = False
    good = ~np.logical_or.reduceat(falls, np.stack((values, ends), axis=1).ravel())[::2]
    return good


def _of_these(good: _Bools, numbers: _UInt16s, begins: _Int64s, ends: _Int64s, entries: _Int64s, tail: int) -> _Bools:
    """Once more for those that are `good` so far; at most twice, since what has been asked is so of all of them."""
    sure = np.zeros(len(good), dtype=np.bool_)
    if good.any():
        sure[good] = _vouched(numbers, begins[good], ends[good], entries[good], tail)
    return sure


def _falls(numbers: _UInt16s) -> _Bools:
    """Where a number is not more than the one before it; one item more than there are numbers, never true."""
    falls = np.empty(len(numbers) + 1, dtype=np.bool_)
    falls[0] = falls[-1] = False
    np.less_equal(numbers[1:], numbers[:-1], out=falls[1:-1])
    return falls
