"""A packed bucket of a delay index: the bytes of its bitmap, and the entries added since. buckets.py packs.

Of the buckets that a start restores, or that a day of appends has filled, only the first is needed soon. To make a
bitmap of bytes costs about 25 us a bucket at ten million entries over a day, and half as much memory again as the
bytes take; so the bytes are kept, and unpacked when the bucket is the earliest, or when an entry in it is removed. They
are a copy, not a view into the file: the snapshot may be replaced, or its pages go bad.

Bytes lie in slabs, a part of a snapshot or some buckets that were packed together: one piece of memory, given back
when no bucket needs it any more. Buckets that are unpacked in any order would keep it for the last one's sake, so the
map of buckets unpacks what is left of a slab when less than half of it is needed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

from pyroaring import BitMap

from ...store.errors import BrokenInvariant

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
_MAPPED_BYTES = 1 << 17
"""From this many on, memory of its own that goes back at once, and whose pages come in one call: a third quicker."""

# Resident bytes beside the values, fitted to the resident memory of 1,440 buckets of ten million entries.
_PACKED_BYTES = 300
_BITMAP_BYTES = 400
_CONTAINER_BYTES = 64


class Slab:
    """A read-only copy of bytes, and how many of them are of packed buckets."""

    __slots__ = ("bytes", "needed", "starts_ms")

    def __init__(self, contents: bytes | memoryview) -> None:
        if len(contents) < _MAPPED_BYTES:
            self.bytes = memoryview(bytes(contents))
        else:
            # The view keeps the mapping; it goes with the last view of it.
            mapped = mmap.mmap(-1, len(contents), flags=_FLAGS)
            mapped[:] = contents
            self.bytes = memoryview(mapped).toreadonly()
        self.needed = 0
        self.starts_ms: list[int] = []
        """Buckets that were or are packed in it."""


class PackedBucket:
    """One bucket: a serialised BitMap, and the entries added since."""

    __slots__ = ("added", "entries", "limit_id", "saved", "slab")

    def __init__(self, slab: Slab, saved: memoryview, entries: int, limit_id: int) -> None:
        """REQUIRES: `saved`, a part of `slab`, is a bitmap of `entries` > 0 ids, all below `limit_id`."""
        self.slab = slab
        self.saved = saved
        self.entries = entries
        """Number of entries saved."""
        self.limit_id = limit_id
        """No entry saved is at or after it."""
        self.added: BitMap | None = None
        """Entries that are not among those saved."""

    def __len__(self) -> int:
        return self.entries if self.added is None else self.entries + len(self.added)

    def bitmap(self) -> BitMap:
        """Its entries; the bucket is as it was. Raises BrokenInvariant where they are not as many as it says."""
        ids = BitMap.deserialize(self.saved)  # type: ignore[arg-type]  # any buffer
        if self.added is not None:
            ids |= self.added
        if len(ids) != len(self):
            raise BrokenInvariant(f"bucket: {len(self)} entries, of which {len(ids)} are found")
        return ids

    def discard_added(self, ids: BitMap) -> int:
        """Remove ``ids`` from what was added; how many there were."""
        if self.added is None:
            return 0
        hits = self.added.intersection_cardinality(ids)
        if hits:
            self.added.difference_update(ids)
            self.added = self.added or None
        return hits

    def saved_below(self, limit_id: int) -> bytes | None:
        """The bytes of its bitmap, if it is known to be what was saved and to hold nothing from `limit_id` on."""
        return bytes(self.saved) if self.added is None and self.limit_id <= limit_id else None

    def memory_bytes(self) -> int:
        """Resident bytes with its part of what no bucket needs of the slab. REQUIRES: the map of buckets has it."""
        added = 0 if self.added is None else bitmap_bytes(self.added)
        return len(self.saved) * len(self.slab.bytes) // self.slab.needed + _PACKED_BYTES + added


def pack_together(buckets: Sequence[tuple[int, BitMap]]) -> list[tuple[int, PackedBucket]]:
    """Buckets by their starts, packed in a new slab. REQUIRES: none is empty."""
    saved = [ids.serialize() for _, ids in buckets]
    slab = Slab(b"".join(saved))
    packed: list[tuple[int, PackedBucket]] = []
    begin = 0
    for (start_ms, ids), contents in zip(buckets, saved, strict=True):
        limit = begin + len(contents)
        packed.append((start_ms, PackedBucket(slab, slab.bytes[begin:limit], len(ids), ids.max() + 1)))
        begin = limit
    return packed


def check_slabs(buckets: Iterable[PackedBucket]) -> int:
    """Raise BrokenInvariant unless all packed buckets are as they say, and their slabs; how many entries are packed."""
    needed: dict[Slab, int] = {}
    entries = 0
    for each in buckets:
        ids = BitMap.deserialize(each.saved)  # type: ignore[arg-type]  # any buffer
        if not ids or ids.max() >= each.limit_id:
            raise BrokenInvariant(f"bucket: {len(ids)} entries saved, not all below {each.limit_id}")
        needed[each.slab] = needed.get(each.slab, 0) + len(each.saved)
        entries += len(ids)
    for slab, count in needed.items():
        if slab.needed != count:
            raise BrokenInvariant(f"buckets: {count} bytes packed, their slab counts {slab.needed}")
    return entries


def bitmap_bytes(ids: BitMap) -> int:
    """Resident bytes of a bitmap, estimated from the sizes of its containers. O(containers)."""
    sizes = ids.get_statistics()
    values = sizes["n_bytes_array_containers"] + sizes["n_bytes_run_containers"] + sizes["n_bytes_bitset_containers"]
    return values + _BITMAP_BYTES + _CONTAINER_BYTES * sizes["n_containers"]


def united(buckets: Iterable[tuple[int, BitMap | PackedBucket]]) -> dict[int, BitMap | PackedBucket]:
    """Buckets by their starts, without empty ones; one that comes more than once is unpacked, and the union."""
    whole: dict[int, BitMap | PackedBucket] = {}
    for start_ms, ids in buckets:
        present = whole.get(start_ms)
        if present is None:
            if ids:
                whole[start_ms] = ids
            continue
        if isinstance(present, PackedBucket):
            present = whole[start_ms] = present.bitmap()
        present |= ids.bitmap() if isinstance(ids, PackedBucket) else ids
    return whole
