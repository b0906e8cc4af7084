"""Packing the buckets of a delay index that appends have filled, some at a time.

An entry appended lies in a bitmap whose containers have free space and 64 bytes of overhead for some 40 entries each;
packed (``packed_buckets.py``) a bucket takes half of that. The owner calls ``pack_next`` again and again, with its
lock in hand each time, until all buckets but the earliest have had their turn, and begins when ``is_worth_it``: by
then so much has come in that what all buckets cost is little for each entry of it.

Between two rounds up to half of an index is unpacked, and all of a small one. The allocator keeps what the bitmaps took
until entries use it again: a process does not become smaller, it grows later. Cancelling unpacks buckets and starts no
round, or a few hundred cancellations would cost a copy of the index each time.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyroaring import BitMap

from .buckets import Buckets
from .packed_buckets import PackedBucket, Slab

# What falls asleep at a time takes 1 to 2 ms and fills a sheet of its own memory.
_AT_ONCE_BYTES = 1 << 17
_AT_ONCE_BUCKETS = 128

_LARGE_ENTRIES = 1 << 18
"""A larger bucket stays awake: its containers are large, waste little, and would take too long at a time."""

_ENTRIES_A_BUCKET = 512
"""A bucket takes some 8 us beside 5 ns an entry: it is not worth it for fewer, on average."""

_SHARE = 2
"""It begins when an index is awake by one part in so many: n entries that come cost the copying of 2 n, not more."""


def is_worth_it(buckets: Buckets, entries: int, added: int) -> bool:
    """Whether to begin, with `entries` in all buckets and `added` since it last began. O(1)."""
    return min(added, entries - buckets.packed) > max(entries // _SHARE, _ENTRIES_A_BUCKET * len(buckets))


def pack_next(buckets: Buckets, after_ms: int | None) -> int | None:
    """Put the next buckets to sleep after the one that starts at `after_ms`; where to go on after, None: it is done.

    None for `after_ms` begins, after the earliest bucket. Those asleep to which nothing was added are passed over.
    """
    some: dict[int, BitMap] = {}
    last_ms: int | None = None
    size = 0
    for start_ms, entries, unpacked in buckets.unsettled_after(after_ms):
        if entries > _LARGE_ENTRIES:
            continue
        unpacked.run_optimize()
        some[start_ms] = buckets.entries_of(start_ms)
        size += 2 * entries
        if size >= _AT_ONCE_BYTES or len(some) == _AT_ONCE_BUCKETS:
            last_ms = start_ms
            break
    if some:
        buckets.replace(put_to_sleep(some))
    return last_ms


def put_to_sleep(buckets: Mapping[int, BitMap]) -> list[tuple[int, PackedBucket]]:
    """Buckets by their starts, asleep on a new sheet. REQUIRES: none is empty."""
    saved = [ids.serialize() for ids in buckets.values()]
    slab = Slab(b"".join(saved))
    packed: list[tuple[int, PackedBucket]] = []
    begin = 0
    for (start_ms, ids), contents in zip(buckets.items(), saved, strict=True):
        limit = begin + len(contents)
        packed.append((start_ms, PackedBucket(slab, slab.bytes[begin:limit], len(ids), ids.max() + 1)))
        begin = limit
    return packed
