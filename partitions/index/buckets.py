"""The coarse end of a delay index: bitmaps of entry ids by interval of due time.

A bucket is a half-open interval of due time and the BitMap of the entries due in it; an empty one is not kept.
Intervals begin at the multiples of ``bucket_ms`` and at the cuts made since: ``split`` divides one bucket that
holds too much, and the cuts go when what is before them has gone. So adding needs no exact due time kept and no
search among buckets, and a bucket with ten million entries at one instant can still be read a part at a time.

A bucket may be packed (``PackedBucket``): one that was restored from a snapshot, or that ``pack`` has packed.
Containers filled by appends have spare capacity and 64 bytes of overhead for some 40 entries; packed, a million entries
of one day take 3.1 bytes each in place of 4.5. It is unpacked when it is the earliest and asked for, or when an entry
of it is removed; adding, counting, copying, and looking for an absent entry leave it packed.

Between two rounds of ``pack`` up to half of an index is unpacked, and all of a small one. Removing unpacks buckets and
begins no round, or a few hundred cancellations would cost a copy of the index each time.

Which entries are where follows from the due times handed in; this module never reads one. Not thread-safe.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap
from sortedcontainers import SortedDict

from ...store.errors import BrokenInvariant
from .window import Dues, Ids, Keys

# Resident bytes beside the values, fitted to the resident memory of 1,440 buckets of ten million entries.
_PACKED_BYTES = 900
_BITMAP_BYTES = 400
_CONTAINER_BYTES = 64


class PackedBucket:
    """One bucket: a serialised BitMap, and the entries added since.

    Of the buckets that a start restores, or that a day of appends has filled, only the first is needed soon. To make a
    bitmap of bytes costs about 25 us a bucket at ten million entries over a day, and half as much memory again as the
    bytes take; so the bytes are kept. They are a copy, not a view into the file: the snapshot may be replaced, or its
    pages go bad.
    """

    __slots__ = ("added", "entries", "limit_id", "saved")

    def __init__(self, saved: bytes, entries: int, limit_id: int) -> None:
        """REQUIRES: `saved` is a bitmap of `entries` > 0 ids, all below `limit_id`."""
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
        ids = BitMap.deserialize(self.saved)
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
        return self.saved if self.added is None and self.limit_id <= limit_id else None

    def memory_bytes(self) -> int:
        return len(self.saved) + _PACKED_BYTES + (0 if self.added is None else bitmap_bytes(self.added))


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


_GROUP_ENTRIES = 1 << 20  # entries grouped at a time: bounds the temporary arrays to about 40 MB
_SPARSE_ENTRIES = 16  # entries a bucket, on average, below which adding them one by one is quicker
_SHIFT = np.uint64(32)

_PACKED_AT_ONCE_BYTES, _PACKED_AT_ONCE = 1 << 17, 128  # 1 to 2 ms
_LARGE_ENTRIES = 1 << 18  # a larger bucket stays unpacked: its containers waste little
_PACKED_ENTRIES = 512  # a bucket, on average, for which it is worth it: packing takes 8 us a bucket and 5 ns an entry
_PACKED_SHARE = 2  # of which one part is unpacked: n entries that come cost the copying of 2 n, not more


class Bucket(NamedTuple):
    """The entries due in ``[start_ms, limit_ms)``."""

    start_ms: int
    limit_ms: int
    ids: BitMap


class Span(NamedTuple):
    """A bucket without its entries: how many there are."""

    start_ms: int
    limit_ms: int
    entries: int


class Buckets:
    """A map from intervals of due time to bitmaps of entry ids."""

    def __init__(self, bucket_ms: int) -> None:
        self._bucket_ms = bucket_ms
        self._bitmaps: SortedDict[int, BitMap | PackedBucket] = SortedDict()
        self._cuts: list[int] = []  # ascending; starts of buckets besides the multiples of bucket_ms
        self.packed = 0
        """Entries in the bytes of packed buckets; those added to them since are not counted."""

    def __len__(self) -> int:
        """Number of buckets, not of entries."""
        return len(self._bitmaps)

    def __iter__(self) -> Iterator[Bucket]:
        """Buckets by due time, to look at: none is unpacked. Nothing may be added or removed meanwhile."""
        for start_ms, ids in self._bitmaps.items():
            yield Bucket(start_ms, self._limit_of(start_ms), ids.bitmap() if isinstance(ids, PackedBucket) else ids)

    def spans(self) -> Iterator[Span]:
        """Buckets by due time, none unpacked; nothing may be added or removed meanwhile."""
        for start_ms, ids in self._bitmaps.items():
            yield Span(start_ms, self._limit_of(start_ms), len(ids))

    def starts_after(self, start_ms: int) -> Iterator[int]:
        """Starts of the buckets after ``start_ms``, ascending; nothing may be added or removed meanwhile."""
        yield from self._bitmaps.irange(start_ms, inclusive=(False, True))

    def saved_below(self, start_ms: int, limit_id: int) -> tuple[int, bytes] | None:
        """Entries and serialised bitmap of a packed bucket with nothing added, all below ``limit_id``; else None."""
        ids = self._bitmaps[start_ms]
        saved = ids.saved_below(limit_id) if isinstance(ids, PackedBucket) else None
        return None if saved is None else (len(ids), saved)

    def entries_of(self, start_ms: int) -> BitMap:
        """The entries of the bucket that starts at ``start_ms``, which is not unpacked; not to be changed."""
        kept = self._bitmaps[start_ms]
        return kept.bitmap() if isinstance(kept, PackedBucket) else kept

    def first_span(self) -> Span:
        """The earliest bucket, not unpacked; REQUIRES that there is one. O(1)."""
        start_ms, ids = self._bitmaps.peekitem(0)
        return Span(start_ms, self._limit_of(start_ms), len(ids))

    def first(self) -> Bucket:
        """The earliest bucket, unpacked; REQUIRES that there is one."""
        start_ms = self._bitmaps.peekitem(0)[0]
        return Bucket(start_ms, self._limit_of(start_ms), self._unpacked(start_ms))

    def add_one(self, entry_id: int, due_ms: int) -> None:
        """Add one entry. O(1), O(log buckets) for the first of its bucket."""
        start_ms = self._start_of(due_ms)
        ids = self._taking(start_ms)
        if ids is None:
            self._put(start_ms, BitMap((entry_id,)))
        else:
            ids.add(entry_id)

    def add(self, ids: Ids, dues: Dues) -> None:
        """Add entries in any order; ids are distinct, dues span less than 2**32 ms.

        One bucket: O(n). Several: one sort of ``bucket << 32 | id`` brings each bucket's ids together,
        ascending, which is also the order in which a bitmap takes them fastest.
        """
        for begin in range(0, len(ids), _GROUP_ENTRIES):
            some = slice(begin, begin + _GROUP_ENTRIES)
            self._add_group(ids[some], dues[some])

    def add_bitmap(self, start_ms: int, ids: BitMap) -> None:
        """Add a whole bucket; takes ``ids`` over. REQUIRES that a bucket may start at ``start_ms``."""
        if not ids:
            return
        present = self._taking(start_ms)
        if present is None:
            self._put(start_ms, ids)
        else:
            present |= ids

    def restore(self, saved: Iterable[tuple[int, BitMap | PackedBucket]]) -> int:
        """Take whole buckets over; how many entries that makes. REQUIRES: it is empty, and buckets may start there.

        A start may come more than once: then its bucket is unpacked, and the union.
        """
        self._bitmaps.update(united(saved))
        self.packed += sum(ids.entries for ids in self._bitmaps.values() if isinstance(ids, PackedBucket))
        return sum(map(len, self._bitmaps.values()))

    def is_worth_packing(self, entries: int, added: int) -> bool:
        """True where ``pack`` should begin, with ``entries`` in all buckets and ``added`` since it last began. O(1)."""
        return min(added, entries - self.packed) > max(entries // _PACKED_SHARE, _PACKED_ENTRIES * len(self))

    def pack(self, after_ms: int | None) -> int | None:
        """Pack the next buckets after the one that starts at ``after_ms``, 1 to 2 ms of work; where to go on after.

        None begins, after the earliest bucket, and is the answer when all had their turn. Packed ones to which nothing
        was added are passed over, and large ones.
        """
        if not self._bitmaps:
            return None
        count = size = 0
        for start_ms in self.starts_after(self._bitmaps.peekitem(0)[0] if after_ms is None else after_ms):
            kept = self._bitmaps[start_ms]
            unpacked = kept.added if isinstance(kept, PackedBucket) else kept
            if unpacked is None or len(kept) > _LARGE_ENTRIES:
                continue
            unpacked.run_optimize()
            ids = self._unpacked(start_ms)
            self._bitmaps[start_ms] = PackedBucket(ids.serialize(), len(ids), ids.max() + 1)
            self.packed += len(ids)
            count, size = count + 1, size + 2 * len(ids)
            if size >= _PACKED_AT_ONCE_BYTES or count == _PACKED_AT_ONCE:
                return start_ms
        return None

    def remove_first(self, ids: BitMap | None = None) -> None:
        """Remove the earliest bucket, with the cuts that it was the last to need; or only ``ids`` of it."""
        start_ms, kept = self._bitmaps.peekitem(0)
        if ids is not None and len(ids) < len(kept):
            self._unpacked(start_ms).difference_update(ids)
            return
        limit_ms = self._limit_of(start_ms)
        self._bitmaps.popitem(0)
        if isinstance(kept, PackedBucket):
            self.packed -= kept.entries
        if ids is None:
            del self._cuts[: bisect_left(self._cuts, limit_ms)]

    def split_first(self, cuts: list[int]) -> Bucket:
        """Remove the earliest bucket and divide its interval at ``cuts``, ascending and inside it.

        The caller adds the entries again, each to its part.
        """
        bucket = self.first()
        self._bitmaps.popitem(0)
        place = bisect_right(self._cuts, bucket.start_ms)
        self._cuts[place:place] = cuts
        return bucket

    def rejoin(self, bucket: Bucket) -> None:
        """Undo a ``split_first`` half done: one bucket again, of its parts and what ``bucket.ids`` still holds."""
        ids = bucket.ids
        for start_ms in list(self._bitmaps.irange(bucket.start_ms, bucket.limit_ms, inclusive=(True, False))):
            ids |= self._unpacked(start_ms)
            del self._bitmaps[start_ms]
        del self._cuts[bisect_right(self._cuts, bucket.start_ms) : bisect_left(self._cuts, bucket.limit_ms)]
        self.add_bitmap(bucket.start_ms, ids)

    def discard_one(self, entry_id: int, due_ms: int) -> bool:
        """Remove one entry from the bucket of ``due_ms``; False if it is not there. O(1), unless that is packed."""
        start_ms = self._start_of(due_ms)
        kept = self._bitmaps.get(start_ms)
        if kept is None:
            return False
        ids = kept.bitmap() if isinstance(kept, PackedBucket) else kept
        if entry_id not in ids:
            return False
        if isinstance(kept, PackedBucket):
            self._unpack(start_ms, kept, ids)
        ids.discard(entry_id)
        if not ids:
            del self._bitmaps[start_ms]
        return True

    def discard(self, ids: BitMap) -> int:
        """Remove ``ids`` wherever they are; how many there were. Looks into every bucket until all are found.

        A packed bucket stays so if none of them is in its bytes, and is not looked into if none can be.
        """
        removed = 0
        lowest = ids.min() if ids else 0
        emptied: list[int] = []
        for start_ms, kept in self._bitmaps.items():
            if removed == len(ids):
                break
            if isinstance(kept, PackedBucket) and kept.limit_id <= lowest:
                removed += kept.discard_added(ids)
                continue
            present = kept.bitmap() if isinstance(kept, PackedBucket) else kept
            hits = present.intersection_cardinality(ids)
            if hits:
                removed += hits
                if isinstance(kept, PackedBucket):
                    self._unpack(start_ms, kept, present)
                present.difference_update(ids)
                if not present:
                    emptied.append(start_ms)
        for start_ms in emptied:
            del self._bitmaps[start_ms]
        return removed

    def memory_bytes(self) -> int:
        """Resident bytes, estimated from the sizes of the bitmaps' containers. O(containers)."""
        kept = self._bitmaps.values()
        return 8 * len(self._cuts) + sum(
            ids.memory_bytes() if isinstance(ids, PackedBucket) else bitmap_bytes(ids) for ids in kept
        )

    def check(self) -> None:
        """Raise BrokenInvariant unless buckets start where they may, are not empty and share no entry."""
        if self._cuts != sorted(set(self._cuts)) or any(cut % self._bucket_ms == 0 for cut in self._cuts):
            raise BrokenInvariant("buckets: cuts out of order")
        every = BitMap()
        total = 0
        for start_ms, ids in self._bitmaps.items():
            if not ids or self._start_of(start_ms) != start_ms:
                raise BrokenInvariant(f"buckets: {len(ids)} entries at {start_ms}, which is no bucket's start")
            every |= ids.bitmap() if isinstance(ids, PackedBucket) else ids
            total += len(ids)
        packed = 0
        for kept in self._bitmaps.values():
            if isinstance(kept, PackedBucket):
                saved = BitMap.deserialize(kept.saved)
                packed += len(saved)
                if not saved or saved.max() >= kept.limit_id:
                    raise BrokenInvariant(f"bucket: {len(saved)} entries saved, not all below {kept.limit_id}")
        if packed != self.packed:
            raise BrokenInvariant(f"buckets: {packed} entries packed, counted {self.packed}")
        if total != len(every):
            raise BrokenInvariant("buckets: an entry is in two buckets")

    def _start_of(self, due_ms: int) -> int:
        start_ms = due_ms - due_ms % self._bucket_ms
        if self._cuts:
            place = bisect_right(self._cuts, due_ms)
            if place:
                return max(start_ms, self._cuts[place - 1])
        return start_ms

    def _starts_of(self, dues: Dues) -> Dues:
        starts: Dues = dues - dues % self._bucket_ms
        if self._cuts:
            floors = np.array([0, *self._cuts], dtype=np.int64)
            np.maximum(starts, floors[np.searchsorted(floors[1:], dues, side="right")], out=starts)
        return starts

    def _limit_of(self, start_ms: int) -> int:
        limit_ms = start_ms - start_ms % self._bucket_ms + self._bucket_ms
        if self._cuts:
            place = bisect_right(self._cuts, start_ms)
            if place < len(self._cuts):
                return min(limit_ms, self._cuts[place])
        return limit_ms

    def _add_group(self, ids: Ids, dues: Dues) -> None:
        earliest = int(dues.min())
        start_ms = self._start_of(earliest)
        if int(dues.max()) < self._limit_of(start_ms):
            self._add_sorted(start_ms, np.sort(ids))
            return
        # A bucket that starts before the earliest due time counts from there, so that 32 bits always do.
        tagged: Keys = np.maximum(self._starts_of(dues) - earliest, 0).astype(np.uint64)
        tagged <<= _SHIFT
        tagged |= ids
        tagged.sort()
        tags = tagged >> _SHIFT
        ordered = tagged.astype(np.uint32)
        heads = np.concatenate(([0], np.flatnonzero(tags[1:] != tags[:-1]) + 1))
        starts = self._starts_of(tags[heads].astype(np.int64) + earliest).tolist()
        begins = heads.tolist()
        limits = [*begins[1:], len(ordered)]
        if len(ordered) < _SPARSE_ENTRIES * len(begins):
            values = ordered.tolist()
            for start_ms, begin, limit in zip(starts, begins, limits, strict=True):
                self._add_few(start_ms, values[begin:limit])
        else:
            for start_ms, begin, limit in zip(starts, begins, limits, strict=True):
                self._add_sorted(start_ms, ordered[begin:limit])

    def _add_few(self, start_ms: int, ids: list[int]) -> None:
        present = self._taking(start_ms)
        if present is None:
            self._put(start_ms, BitMap(ids))
        else:
            for entry_id in ids:
                present.add(entry_id)

    def _add_sorted(self, start_ms: int, ids: Ids) -> None:
        """Add distinct ascending ``ids`` to the bucket that starts at ``start_ms``."""
        first, last = int(ids[0]), int(ids[-1])
        if last - first + 1 == len(ids):
            present = self._taking(start_ms)
            if present is None:
                present = BitMap()
                self._put(start_ms, present)
            present.add_range(first, last + 1)
            return
        # BitMap takes an array.array by its buffer, a numpy array item by item; and containers that come by union
        # have no spare capacity, while those grown by update() take a sixth more memory.
        self.add_bitmap(start_ms, BitMap(array("I", ids.tobytes())))

    # -- packed and unpacked -------------------------------------------------------------------

    def _taking(self, start_ms: int) -> BitMap | None:
        """The bitmap that takes what is added to a bucket; None: ``_put`` the first entries. Unpacks nothing."""
        kept = self._bitmaps.get(start_ms)
        return kept.added if isinstance(kept, PackedBucket) else kept

    def _put(self, start_ms: int, ids: BitMap) -> None:
        """The first entries of a bucket, or those added to a packed one; takes ``ids`` over."""
        kept = self._bitmaps.get(start_ms)
        if isinstance(kept, PackedBucket):
            kept.added = ids
        else:
            self._bitmaps[start_ms] = ids

    def _unpacked(self, start_ms: int) -> BitMap:
        kept = self._bitmaps[start_ms]
        if not isinstance(kept, PackedBucket):
            return kept
        ids = kept.bitmap()
        self._unpack(start_ms, kept, ids)
        return ids

    def _unpack(self, start_ms: int, packed: PackedBucket, ids: BitMap) -> None:
        """Have ``ids``, its entries, in place of a packed bucket."""
        self._bitmaps[start_ms] = ids
        self.packed -= packed.entries
