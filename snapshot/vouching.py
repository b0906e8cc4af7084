"""Telling by its bytes that a serialised bitmap is whole, without making a bitmap of it.

The portable format of roaring bitmaps, where it has no containers of runs:

    cookie:u32 (12,346) containers:u32 containers * (key:u16 entries-1:u16) containers * offset:u32 containers

A container of at most 4,096 entries is the lower 16 bits of each; a larger one is 8,192 bytes of bits. So a bitmap of
small containers only is whole if its length is that of as many entries as its head counts, and if keys ascend, and
entries within each container. All bitmaps of a part are looked at in a few array operations, a tenth of what making
them costs.

What is not vouched for may be as good: bitmaps with runs or large containers are mostly few bytes for many entries,
and are made and asked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_COOKIE = 12_346
_HEAD_BYTES = 8
_CONTAINER_BYTES = 8
_SMALL_ENTRIES = 4_096
_MOST_CONTAINERS = 1 << 16

_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


class _Bitmaps(NamedTuple):
    """Columns of bitmaps: where each begins and ends, how many entries and containers it has."""

    begins: _Int64s
    ends: _Int64s
    entries: _Int64s
    containers: _Int64s

    def only(self, some: npt.NDArray[Any]) -> _Bitmaps:
        return _Bitmaps(*(column[some] for column in self))


def vouched(whole: memoryview, begins: _Int64s, ends: _Int64s, entries: npt.NDArray[np.uint32], tail: int) -> _Bools:
    """Which of the bitmaps `whole[begin:end]` deserialize to as many `entries`, more than none, all below `tail`.

    True is sure, False is not. REQUIRES: begins and ends in `whole`. O(bytes): 0.3 ms a MiB.
    """
    sure = np.zeros(len(begins), dtype=np.bool_)
    likely = np.flatnonzero((ends - begins > _HEAD_BYTES + _CONTAINER_BYTES) & (entries > 0))
    if not len(likely):
        return sure
    words, halves = _at_every_byte(whole, "<u4"), _at_every_byte(whole, "<u2")
    containers = words[begins[likely] + 4].astype(np.int64)
    bitmaps = _Bitmaps(begins[likely], ends[likely], entries[likely].astype(np.int64), containers)
    length = _HEAD_BYTES + _CONTAINER_BYTES * containers + 2 * bitmaps.entries
    good = (words[bitmaps.begins] == _COOKIE) & (containers > 0) & (containers <= _MOST_CONTAINERS)
    good &= bitmaps.ends - bitmaps.begins == length
    likely, bitmaps = likely[good], bitmaps.only(good)
    if not len(likely):
        return sure
    containers_of = _Containers.of(bitmaps, halves)
    good = _heads(halves, bitmaps, containers_of, tail)
    for odd in (0, 1):
        some = good & (bitmaps.begins % 2 == odd)
        if some.all():
            sure[likely] = _ascending(whole, bitmaps, containers_of, odd)
        elif some.any():
            these = bitmaps.only(some)
            sure[likely[some]] = _ascending(whole, these, _Containers.of(these, halves), odd)
    return sure


class _Containers(NamedTuple):
    """All containers of several bitmaps, one after the other, and which is the first of each bitmap."""

    first: _Int64s
    places: _Int64s
    """Where keys lie, in bytes."""
    sizes: _Int64s
    """Entries, as the head says."""

    @classmethod
    def of(cls, bitmaps: _Bitmaps, halves: npt.NDArray[np.uint16]) -> _Containers:
        first = np.cumsum(bitmaps.containers) - bitmaps.containers
        places = np.repeat(bitmaps.begins + _HEAD_BYTES - 4 * first, bitmaps.containers)
        places += np.arange(0, 4 * len(places), 4)
        return cls(first, places, halves[places + 2].astype(np.int64) + 1)


def _heads(halves: npt.NDArray[np.uint16], bitmaps: _Bitmaps, containers: _Containers, tail: int) -> _Bools:
    """Which have small containers only, of as many entries as there are, with ascending keys, and end below `tail`.

    REQUIRES: each is as long as its entries and containers make it.
    """
    first, places, sizes = containers
    good: _Bools = np.add.reduceat(sizes, first) == bitmaps.entries
    good &= np.maximum.reduceat(sizes, first) <= _SMALL_ENTRIES
    keys = halves[places]
    falls = np.zeros(len(keys), dtype=np.bool_)
    np.less_equal(keys[1:], keys[:-1], out=falls[1:])
    falls[first] = False
    good &= ~np.logical_or.reduceat(falls, first)
    last_key = keys[first + bitmaps.containers - 1].astype(np.int64)
    good &= (last_key << 16 | halves[bitmaps.ends - 2]) < tail
    return good


def _ascending(whole: memoryview, bitmaps: _Bitmaps, containers: _Containers, odd: int) -> _Bools:
    """In which entries ascend within every container. REQUIRES: `_heads`; all begin at even bytes, or at `odd` ones."""
    values = np.frombuffer(whole, "<u2", (len(whole) - odd) // 2, odd)
    falls = np.empty(len(values) + 1, dtype=np.bool_)
    falls[0] = falls[-1] = False
    np.less_equal(values[1:], values[:-1], out=falls[1:-1])  # falls[i]: from i - 1 to i
    first, _, sizes = containers
    begins = (bitmaps.ends - odd) // 2 - bitmaps.entries  # of the entries, in halves
    before = np.cumsum(sizes) - sizes
    falls[before + np.repeat(begins - before[first], bitmaps.containers)] = False
    found: _Bools = ~np.logical_or.reduceat(falls, np.stack((begins, begins + bitmaps.entries), axis=1).ravel())[::2]
    return found


def _at_every_byte(whole: memoryview, number: str) -> npt.NDArray[Any]:
    """The number that begins at each byte, wherever that lies."""
    return np.ndarray((len(whole) - np.dtype(number).itemsize + 1,), number, whole, strides=(1,))
