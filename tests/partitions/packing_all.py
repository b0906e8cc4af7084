"""What a delay index holds, and its buckets in the form in which a start restores them."""

from __future__ import annotations

from collections.abc import Iterable

from pyroaring import BitMap

from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.packed_buckets import PackedBucket, Slab


def buckets_of(index: DelayIndex) -> list[tuple[int, BitMap]]:
    """All entries by bucket of the grid, those of the window included; the index is as it was."""
    cutting = index.cut(1 << 32)
    cutting.arrange()
    whole: dict[int, BitMap] = {}
    for piece in cutting.more(1 << 40):
        whole[piece.start_ms] = whole.get(piece.start_ms, BitMap()) | BitMap.deserialize(piece.bitmap)
    return sorted(whole.items())


def as_packed(
    buckets: Iterable[tuple[int, BitMap]], limit_id: int, *, together: int = 4
) -> list[tuple[int, BitMap | PackedBucket]]:
    """The same buckets packed, so many of them in one slab, as in the parts of a snapshot."""
    whole = list(buckets)
    found: list[tuple[int, BitMap | PackedBucket]] = []
    for at in range(0, len(whole), together):
        some = whole[at : at + together]
        saved = [ids.serialize() for _, ids in some]
        slab = Slab(b"head" + b"".join(saved))
        begin = len(b"head")
        for (start_ms, ids), contents in zip(some, saved, strict=True):
            limit = begin + len(contents)
            found.append((start_ms, PackedBucket(slab, slab.bytes[begin:limit], len(ids), limit_id)))
            begin = limit
    return found


def pack_all(index: DelayIndex) -> int:
    """Have every bucket but the earliest packed; how many slices that took."""
    slices, after_ms = 1, index.pack()
    while after_ms is not None:
        slices, after_ms = slices + 1, index.pack(after_ms)
    return slices


def packed_in(index: DelayIndex) -> list[int]:
    """Where the buckets of an index start that are packed."""
    return [start_ms for start_ms, kept in index._buckets._bitmaps.items() if isinstance(kept, PackedBucket)]
