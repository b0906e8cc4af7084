"""The delay index: which entries of one partition log have not fired, by due time.

Far entries lie in coarse buckets (``buckets.py``: a bitmap of entry ids per minute by default), the nearest in a
small exact window (``window.py``). A bucket does not hold due times: when the window runs empty, the earliest
bucket's are read from the due column through the ``due_of`` callback, and its entries become the window.

Invariant: there is a limit ``L``, a ``(due_ms, entry_id)``, such that the window holds exactly the indexed
entries at or before L, and the buckets the rest. So the window's first is the index's first, an entry added
later is put on the right side by one comparison, and ``take`` is in order and never early.

Memory is bounded apart from the bitmaps: a bucket too large for the window is split by due time, down to 1 ms
if need be (where entry id order is firing order), before a part of it is loaded; a window that adds have brought
past twice ``window_entries`` gives its later part back to the buckets, and L moves back.

Roads not taken, per message for ten million uniform over a day: a heap or list of ``(due, id)`` 12 to 24 bytes
packed and over 100 as Python objects; 1 s buckets, which would need the window less, 60 to 85 bytes, since a
bitmap pays for every group of 65,536 ids that it touches; 60 s buckets about 4. A tree on disk in due order
turns each append into a random write.

An entry that ``due_of`` cannot read is quarantined in ``unreadable`` and does not hold up the rest. One that a
restored bitmap has in the wrong bucket goes where its due time says: late perhaps, never early.

Not thread-safe: the owner holds one lock around every call. Does not know what has fired, been cancelled or
been saved; keeps nothing on disk.
"""

from collections.abc import Callable, Iterable
from typing import Self

import numpy as np
from pyroaring import BitMap

from ...store.codec.frontier import UNREADABLE_DUE
from ...store.errors import BrokenInvariant, InvalidArgument
from .buckets import Bucket, Buckets, PackedBucket, Span
from .index_cut import IndexCut
from .window import ID_BITS, MAX_ID, OFFSET_LIMIT_MS, Dues, Ids, Window, pack, unpack

DueOf = Callable[[Ids], Dues]
"""Due times of ascending entry ids, UNREADABLE_DUE where one cannot be read. Its errors pass through the index."""

_READ_ENTRIES = 1 << 18  # due times read at a time while a large bucket is split
_SAMPLE_ENTRIES = 4_096  # whose due times say where a bucket is divided
_MAX_PARTS = 256
_MAX_KEY = (1 << 64) - 1
_ALL_IDS = MAX_ID


class DelayIndex:
    """Not yet fired entries of one partition log. ``len()`` counts them, in O(1).

    REQUIRES of the owner: an id is added once, and again only after it was taken or discarded.
    Due times are absolute and lie in ``[start_ms, start_ms + 2**32)``.
    """

    def __init__(self, due_of: DueOf, *, start_ms: int, bucket_ms: int = 60_000, window_entries: int = 262_144) -> None:
        """An empty index of the partition that starts at ``start_ms``.

        ``bucket_ms``: larger takes less memory and reads more of the due column at a time. ``window_entries``:
        how many entries one load takes at most; 8 bytes each.
        """
        if start_ms < 0:
            raise InvalidArgument("start_ms", start_ms, "negative")
        if not 0 < bucket_ms <= OFFSET_LIMIT_MS:
            raise InvalidArgument("bucket_ms", bucket_ms, f"not in 1 .. {OFFSET_LIMIT_MS}")
        if window_entries < 1:
            raise InvalidArgument("window_entries", window_entries, "not positive")
        self.unreadable = BitMap()  # dropped from the index; the owner reports them
        self.due_of = due_of
        self._start_ms = start_ms
        self.bucket_ms = bucket_ms
        self._window_entries = window_entries
        self._buckets = Buckets(bucket_ms)
        self._window = Window()
        self._reading = False
        self._limit = -1  # L as a key; before every key until the first load
        self._count = 0

    @classmethod
    def from_buckets(
        cls,
        buckets: Iterable[tuple[int, BitMap | PackedBucket]],
        due_of: DueOf,
        *,
        start_ms: int,
        bucket_ms: int = 60_000,
        window_entries: int = 262_144,
    ) -> Self:
        """An index of what ``buckets()`` gave, with the same ``start_ms`` and ``bucket_ms``; takes the bitmaps over.

        A start may come more than once: its bitmaps are united. Buckets that come packed stay so until they are
        needed. Reads no due time. Raises InvalidArgument for a bucket off the grid or outside the partition.
        """
        index = cls(due_of, start_ms=start_ms, bucket_ms=bucket_ms, window_entries=window_entries)
        whole = list(buckets)
        for bucket_start_ms, _ in whole:
            in_partition = start_ms - bucket_ms < bucket_start_ms < start_ms + OFFSET_LIMIT_MS
            if bucket_start_ms % bucket_ms or not in_partition:
                raise InvalidArgument("bucket_start_ms", bucket_start_ms, f"no bucket of the partition at {start_ms}")
        index._count = index._buckets.restore(whole)
        return index

    def __len__(self) -> int:
        return self._count

    def restore_window(self, ids: Ids, dues: Dues, limit_ms: int) -> None:
        """Add what the earliest bucket, which ends at ``limit_ms``, holds, with due times as ``due_of`` gave them.

        So they need not be read again. REQUIRES: a new index, with no bucket that starts before ``limit_ms``.
        """
        if len(ids):
            self._count += len(ids)
            self._fill(*self._intact(ids, dues), limit_ms, _ALL_IDS)

    # -- adding --------------------------------------------------------------------------------

    def add_one(self, entry_id: int, due_ms: int) -> None:
        """Add one entry. O(1) amortised; InvalidArgument for a due time outside the partition's 2**32 ms."""
        offset_ms = due_ms - self._start_ms
        if not 0 <= offset_ms < OFFSET_LIMIT_MS:
            raise self._outside(due_ms)
        key = offset_ms << ID_BITS | entry_id
        if key <= self._limit:
            self._window.add_one(key)
            self._bound_window()
        else:
            self._buckets.add_one(entry_id, due_ms)
        self._count += 1

    def add(self, ids: Ids | int, dues: Dues) -> None:
        """Add a batch in any order of id or due time; an int for ``ids`` is the first of consecutive ids.

        O(n log n) with numpy's constants. InvalidArgument as ``add_one``, with nothing added.
        """
        if len(dues) == 1:
            self.add_one(ids if isinstance(ids, int) else int(ids[0]), int(dues[0]))
            return
        if not len(dues):
            return
        for due_ms in (int(dues.min()), int(dues.max())):
            if not 0 <= due_ms - self._start_ms < OFFSET_LIMIT_MS:
                raise self._outside(due_ms)
        if isinstance(ids, int):
            ids = np.arange(ids, ids + len(dues), dtype=np.uint32)
        self._place(ids, dues)
        self._count += len(dues)

    # -- firing --------------------------------------------------------------------------------

    def take(self, now_ms: int, limit: int) -> tuple[Ids, Dues]:
        """Remove and return at most ``limit`` entries with ``due_ms <= now_ms``, in ``(due_ms, entry_id)`` order.

        Fewer than ``limit`` means that no more are due. If ``due_of`` raises, nothing has been removed.
        """
        taken = np.empty(0, dtype=np.uint64)
        if now_ms < self._start_ms or limit < 1:
            return unpack(taken, self._start_ms)
        bound = min((now_ms - self._start_ms) << ID_BITS | MAX_ID, _MAX_KEY)
        try:
            while len(taken) < limit and self._load(now_ms):
                more = self._window.take(bound, limit - len(taken))
                if not len(more):
                    break
                taken = np.concatenate((taken, more)) if len(taken) else more
        except BaseException:
            self._place(*unpack(taken, self._start_ms))
            raise
        self._count -= len(taken)
        return unpack(taken, self._start_ms)

    def next_due_ms(self) -> int | None:
        """A time before which nothing is due, or None if the index is empty. Reads no due time; O(1).

        Exact while the window has entries. Else the start of the earliest bucket, or what is left of it, so it
        may lie in the past with nothing due yet; a ``take`` at that time loads the window and so makes it exact.
        """
        first = self._window.first()
        if first is not None:
            return self._start_ms + (first >> ID_BITS)
        if not len(self._buckets):
            return None
        return max(self._buckets.first_span().start_ms, self._start_ms + (self._limit + 1 >> ID_BITS))

    def exact_next_due_ms(self) -> int | None:
        """The earliest due time, or None if the index is empty. Loads the window if it is empty."""
        self._load(None)
        return self.next_due_ms()

    def could_not_read(self) -> bool:
        """True once where the last exception came from ``due_of``: then nothing has been removed."""
        failed, self._reading = self._reading, False
        return failed

    # -- cancelling ----------------------------------------------------------------------------

    def discard_one(self, entry_id: int, due_ms: int) -> bool:
        """Remove one entry; False if it is not indexed. Quick where ``due_ms`` is the due column's, right always."""
        key = (due_ms - self._start_ms) << ID_BITS | entry_id
        if 0 <= key <= self._limit:
            found = self._window.discard_one(key)
        else:
            found = self._buckets.discard_one(entry_id, due_ms)
        if not found:
            return self.discard(BitMap((entry_id,))) == 1
        self._count -= 1
        return True

    def discard(self, ids: BitMap) -> int:
        """Remove ``ids`` wherever they are; how many were indexed. O(buckets) and more: hand in many at once."""
        removed = self._window.discard(ids)
        if removed < len(ids):
            removed += self._buckets.discard(ids)
        self._count -= removed
        return removed

    # -- saving and measuring ------------------------------------------------------------------

    def cut(self, limit_id: int) -> IndexCut:
        """A copy of the entries below ``limit_id``, to be taken in slices while others are added; see IndexCut."""
        return IndexCut(self._buckets, self._window.keys(), self._start_ms, self.bucket_ms, limit_id)

    def is_worth_packing(self, added: int) -> bool:
        """True where ``pack`` should begin, ``added`` entries after it last did. O(1)."""
        return self._buckets.is_worth_packing(self._count - len(self._window), added)

    def pack(self, after_ms: int | None = None) -> int | None:
        """Pack the next buckets, 1 to 2 ms of work; None: all had their turn. See ``Buckets.pack``."""
        return self._buckets.pack(after_ms)

    def counts(self) -> tuple[Dues, Dues]:
        """Due times and how many entries each stands for: exact for the window, a bucket's start for a bucket.

        O(buckets + window); reads no due time.
        """
        spans = [(span.start_ms, span.entries) for span in self._buckets.spans()]
        _, dues = unpack(self._window.keys(), self._start_ms)
        starts, counts = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        return np.concatenate((dues, starts)), np.concatenate((np.ones_like(dues), counts))

    def memory_bytes(self) -> int:
        """Resident bytes, estimated: sizes of containers plus a measured overhead, and the window. O(containers)."""
        return self._buckets.memory_bytes() + self._window.memory_bytes() + len(self.unreadable.serialize())

    # -- the two sides of the limit ------------------------------------------------------------

    def _place(self, ids: Ids, dues: Dues) -> None:
        """Put entries, in range, on their side of the limit; counts nothing."""
        if self._limit >= 0:
            keys = pack(ids, dues, self._start_ms)
            near = keys <= np.uint64(self._limit)
            if near.any():
                self._window.add(keys[near])
                self._bound_window()
                ids, dues = ids[~near], dues[~near]
        if len(ids):
            self._buckets.add(ids, dues)

    def _bound_window(self) -> None:
        if len(self._window) > 2 * self._window_entries:
            rest = self._window.spill(self._window_entries)
            self._limit = int(self._window.keys()[-1])
            self._buckets.add(*unpack(rest, self._start_ms))

    def _load(self, until_ms: int | None) -> bool:
        """Make the window non-empty from the earliest buckets that begin by ``until_ms``; whether it is."""
        while not len(self._window):
            if not len(self._buckets):
                return False
            first = self._buckets.first_span()
            if until_ms is not None and first.start_ms > until_ms:
                return False
            if first.entries <= self._window_entries:
                self._load_buckets(until_ms)
            elif first.limit_ms - first.start_ms > 1:
                self._split_bucket()
            else:
                self._load_instant(self._buckets.first())
        return True

    def _load_buckets(self, until_ms: int | None) -> None:
        """Load the earliest bucket, and those after it that begin by ``until_ms`` as far as the window takes them.

        So a backlog of many buckets is read in few sweeps of the due column, not in one for each minute.
        """
        taken: list[Span] = []
        size = 0
        for span in self._buckets.spans():
            size += span.entries
            if taken and (until_ms is None or span.start_ms > until_ms or size > self._window_entries):
                break
            taken.append(span)
        bitmaps = [self._buckets.entries_of(span.start_ms) for span in taken]
        ids, dues = self._read(bitmaps[0] if len(bitmaps) == 1 else BitMap.union(*bitmaps))
        for _ in taken:
            self._buckets.remove_first()
        self._fill(ids, dues, taken[-1].limit_ms, _ALL_IDS)

    def _load_instant(self, bucket: Bucket) -> None:
        """Load what fits of a bucket of one due time, by entry id; the rest stays."""
        some = bucket.ids[: self._window_entries]
        ids, dues = self._read(some)
        self._buckets.remove_first(some)
        self._fill(ids, dues, bucket.limit_ms, some.max())

    def _fill(self, ids: Ids, dues: Dues, limit_ms: int, last_id: int) -> None:
        """Move the limit to ``last_id`` at the last ms before ``limit_ms``, then place what was read below it."""
        last_offset_ms = min(limit_ms - self._start_ms, OFFSET_LIMIT_MS) - 1
        self._limit = last_offset_ms << ID_BITS | last_id
        self._place(ids, dues)

    def _split_bucket(self) -> None:
        """Divide the earliest bucket so that its parts fit the window; reads each due time once."""
        self._reading = True
        cuts = _cuts_of(self._buckets.first(), self.due_of, self._window_entries)
        self._reading = False
        source = self._buckets.split_first(cuts)
        try:
            while source.ids:
                some = source.ids[:_READ_ENTRIES]
                ids, dues = self._read(some)
                source.ids.difference_update(some)
                self._place(ids, dues)
        except BaseException:
            self._buckets.rejoin(source)
            raise

    def _read(self, bitmap: BitMap) -> tuple[Ids, Dues]:
        """Due times of ``bitmap``'s entries; those without one go to ``unreadable``. The caller removes ``bitmap``."""
        ids: Ids = np.frombuffer(bitmap.to_array(), dtype=np.uint32)
        self._reading = True
        dues = self.due_of(ids)
        self._reading = False
        if len(dues) != len(ids):
            raise BrokenInvariant(f"due_of gave {len(dues)} due times for {len(ids)} entries")
        return self._intact(ids, dues)

    def _intact(self, ids: Ids, dues: Dues) -> tuple[Ids, Dues]:
        """Return the entries with a due time; the rest go to ``unreadable`` and are not counted any more."""
        intact = (dues >= self._start_ms) & (dues < self._start_ms + OFFSET_LIMIT_MS)
        if intact.all():
            return ids, dues
        lost = ids[~intact]
        self.unreadable.update(lost.tolist())
        self._count -= len(lost)
        return ids[intact], dues[intact]

    def _outside(self, due_ms: int) -> InvalidArgument:
        return InvalidArgument("due_ms", due_ms, f"outside the partition at {self._start_ms}")

    # -- for tests -----------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise BrokenInvariant unless all that the class relies on holds. Reads every due time."""
        self._window.check()
        self._buckets.check()
        keys = self._window.keys()
        if len(keys) > 2 * self._window_entries:
            raise BrokenInvariant(f"index: {len(keys)} entries in a window of {self._window_entries}")
        if len(keys) and int(keys[-1]) > self._limit:
            raise BrokenInvariant("index: an entry of the window is past the limit")
        near = BitMap(keys.astype(np.uint32).tolist())
        total = len(keys)
        for bucket in self._buckets:
            total += len(bucket.ids)
            ids: Ids = np.frombuffer(bucket.ids.to_array(), dtype=np.uint32)
            dues = self.due_of(ids)
            intact = dues != UNREADABLE_DUE
            ids, dues = ids[intact], dues[intact]
            if ((dues < bucket.start_ms) | (dues >= bucket.limit_ms)).any():
                raise BrokenInvariant(f"index: an entry of bucket {bucket.start_ms} is not due in it")
            if self._limit >= 0 and (pack(ids, dues, self._start_ms) <= np.uint64(self._limit)).any():
                raise BrokenInvariant(f"index: an entry of bucket {bucket.start_ms} is at or before the limit")
            if not bucket.ids.isdisjoint(near) or not bucket.ids.isdisjoint(self.unreadable):
                raise BrokenInvariant(f"index: an entry of bucket {bucket.start_ms} is elsewhere too")
        if total != self._count:
            raise BrokenInvariant(f"index: {total} entries, counted {self._count}")


def _cuts_of(bucket: Bucket, due_of: DueOf, window_entries: int) -> list[int]:
    """Choose the cuts of ``bucket``, longer than 1 ms: quantiles of a sample, about half a window apart.

    A due time that takes several quantiles is cut off on both sides, so that one crowded instant among
    others is alone in its part at once. At least one cut, inside the bucket.
    """
    size = len(bucket.ids)
    sample = np.array([bucket.ids[at] for at in range(0, size, -(-size // _SAMPLE_ENTRIES))], dtype=np.uint32)
    dues = np.sort(due_of(sample))
    dues = dues[(dues >= bucket.start_ms) & (dues < bucket.limit_ms)]
    if not len(dues):  # all misplaced or unreadable
        return [(bucket.start_ms + bucket.limit_ms) // 2]
    parts = min(-(-2 * size // window_entries), _MAX_PARTS)
    marks = dues[np.linspace(0, len(dues) - 1, parts + 1).astype(np.intp)]
    crowded = marks[1:][marks[1:] == marks[:-1]]
    cuts = np.unique(np.concatenate((marks, crowded + 1)))
    inside: list[int] = cuts[(cuts > bucket.start_ms) & (cuts < bucket.limit_ms)].tolist()
    return inside
