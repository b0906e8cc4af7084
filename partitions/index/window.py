"""The exact end of a delay index: a small set of entries in firing order.

An entry is one 64-bit key, ``(due_ms - start_ms) << 32 | entry_id`` with ``start_ms`` the partition's start, so
that key order is ``(due_ms, entry_id)`` order and sorting, cutting and merging are plain numpy. Keys of one
window are distinct. Most lie in a sorted array with a moving head; those added since the last merge in a short
sorted list, so that one add costs a microsecond and not a copy of the array.

Knows nothing of buckets, of the due column or of a bound on its size: ``DelayIndex`` keeps those.
Not thread-safe.
"""

from bisect import bisect_left, bisect_right, insort

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ...store.errors import BrokenInvariant

Ids = npt.NDArray[np.uint32]
Dues = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

ID_BITS = 32
MAX_ID = (1 << ID_BITS) - 1
OFFSET_LIMIT_MS = 1 << 32
"""Due times of one partition lie less than this after its start."""

_SHIFT = np.uint64(ID_BITS)
_NO_KEYS: Keys = np.empty(0, dtype=np.uint64)
_FRESH_ENTRIES = 4_096
_FRESH_ENTRY_BYTES = 44  # a Python int of this size and the list's pointer to it


def pack(ids: Ids, dues: Dues, start_ms: int) -> Keys:
    """Keys of entries; REQUIRES ``start_ms <= due < start_ms + OFFSET_LIMIT_MS``."""
    keys = (dues - start_ms).astype(np.uint64)
    keys <<= _SHIFT
    keys |= ids
    return keys


def unpack(keys: Keys, start_ms: int) -> tuple[Ids, Dues]:
    """Entry ids and due times of ``keys``, in their order."""
    return keys.astype(np.uint32), (keys >> _SHIFT).astype(np.int64) + start_ms


class Window:
    """A mutable ordered set of keys."""

    def __init__(self) -> None:
        self._sorted: Keys = _NO_KEYS
        self._head = 0  # keys of _sorted before it are gone
        self._fresh: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted) - self._head + len(self._fresh)

    def first(self) -> int | None:
        """The smallest key, or None. O(1)."""
        oldest = int(self._sorted[self._head]) if self._head < len(self._sorted) else None
        if self._fresh and (oldest is None or self._fresh[0] < oldest):
            return self._fresh[0]
        return oldest

    def keys(self) -> Keys:
        """All keys, ascending; not to be written to. O(n) when some were added since the last merge, else O(1)."""
        return self._merged(_NO_KEYS)

    def add_one(self, key: int) -> None:
        insort(self._fresh, key)
        if len(self._fresh) > _FRESH_ENTRIES:
            self._replace(self.keys())

    def add(self, keys: Keys) -> None:
        if not len(self) or len(keys) + len(self._fresh) > _FRESH_ENTRIES:
            self._replace(self._merged(np.sort(keys)))
        else:
            self._fresh.extend(keys.tolist())
            self._fresh.sort()

    def take(self, bound: int, limit: int) -> Keys:
        """Remove and return the smallest keys ``<= bound``, at most ``limit`` (> 0), ascending.

        O(taken + log n), with the short list of recent adds on top where it holds some of them.
        """
        rest = self._sorted[self._head :]
        taken = rest[: min(limit, int(np.searchsorted(rest, np.uint64(bound), side="right")))]
        recent = 0
        if self._fresh:
            full = len(taken) == limit
            recent = min(limit, bisect_right(self._fresh, min(bound, int(taken[-1])) if full else bound))
        if recent:
            both = np.concatenate((taken, np.array(self._fresh[:recent], dtype=np.uint64)))
            taken = np.sort(both, kind="stable")[:limit]
            recent = bisect_right(self._fresh, int(taken[-1]))
            del self._fresh[:recent]
        self._head += len(taken) - recent
        return taken

    def spill(self, size: int) -> Keys:
        """Remove and return all but the ``size`` smallest keys, ascending."""
        keys = self.keys()
        self._replace(keys[:size].copy())  # a copy, so that the memory of the rest is given back
        return keys[size:]

    def discard_one(self, key: int) -> bool:
        """Remove ``key``; False if it is not here."""
        place = bisect_left(self._fresh, key)
        if place < len(self._fresh) and self._fresh[place] == key:
            del self._fresh[place]
            return True
        rest = self._sorted[self._head :]
        place = int(np.searchsorted(rest, np.uint64(key)))
        if place == len(rest) or int(rest[place]) != key:
            return False
        self._sorted = np.delete(rest, place)
        self._head = 0
        return True

    def discard(self, ids: BitMap) -> int:
        """Remove the keys of ``ids``; how many there were."""
        keys = self.keys()
        own = keys.astype(np.uint32)
        hits = ids if len(ids) < len(own) else BitMap(own) & ids
        if not hits:
            return 0
        keep = keys[np.isin(own, np.frombuffer(hits.to_array(), dtype=np.uint32), invert=True)]
        if len(keep) < len(keys):
            self._replace(keep)
        return len(keys) - len(keep)

    def memory_bytes(self) -> int:
        return self._sorted.nbytes + len(self._fresh) * _FRESH_ENTRY_BYTES

    def check(self) -> None:
        """Raise BrokenInvariant unless both halves ascend and no key is here twice."""
        if self._fresh != sorted(self._fresh) or len(self._fresh) > _FRESH_ENTRIES:
            raise BrokenInvariant("window: the list of recent adds is out of order or too long")
        rest = self._sorted[self._head :]
        every = np.sort(np.concatenate((rest, np.array(self._fresh, dtype=np.uint64))))
        if (rest[1:] <= rest[:-1]).any() or (every[1:] == every[:-1]).any():
            raise BrokenInvariant("window: keys out of order or doubled")

    def _merged(self, ascending: Keys) -> Keys:
        """All keys and ``ascending``; timsort merges the runs in O(n)."""
        rest = self._sorted[self._head :]
        if not self._fresh and not len(ascending):
            return rest
        runs = (rest, np.array(self._fresh, dtype=np.uint64), ascending)
        return np.sort(np.concatenate(runs), kind="stable")

    def _replace(self, keys: Keys) -> None:
        self._sorted = keys
        self._head = 0
        self._fresh.clear()
