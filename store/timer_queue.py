"""A queue of keys by time: one time for each key, the earliest first.

Knows neither clocks nor threads: callers say what time it is, and hold a lock of their own.
"""

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

from .errors import BrokenInvariant

K = TypeVar("K", bound=Hashable)

_SPARE = 64
"""Replaced entries that a heap may hold besides as many as there are keys."""


class TimerQueue(Generic[K]):
    """Keys by the time at which they come up (epoch ms); those of one time in the order in which they got it.

    A heap whose entries are skipped once their key has another. Not thread-safe. O(log n) amortised. After an interrupt
    within a call each key has its entry, or none.
    """

    __slots__ = ("_entries", "_heap", "_order")

    def __init__(self) -> None:
        self._entries: dict[K, tuple[int, int, K]] = {}
        self._heap: list[tuple[int, int, K]] = []  # (due_ms, order, key), those of _entries and replaced ones
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def due_ms(self, key: K) -> int | None:
        """Time at which a key comes up; None: it does not."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def replace(self, key: K, due_ms: int) -> None:
        entry = due_ms, next(self._order), key
        heapq.heappush(self._heap, entry)
        self._entries[key] = entry
        if len(self._heap) > 2 * len(self._entries) + _SPARE:
            self._heap = sorted(self._entries.values())

    def push(self, key: K, due_ms: int) -> bool:
        """Have `key` come up at `due_ms` at the latest; False: it does already."""
        known = self._entries.get(key)
        if known is not None and known[0] <= due_ms:
            return False
        self.replace(key, due_ms)
        return True

    def discard(self, key: K) -> None:
        self._entries.pop(key, None)

    def next(self) -> tuple[int, K] | None:
        """The earliest time and its key; None where there is no key."""
        heap = self._heap
        while heap:
            due_ms, _, key = heap[0]
            if self._entries.get(key) is heap[0]:
                return due_ms, key
            heapq.heappop(heap)
        return None

    def pop_due(self, now_ms: int) -> K | None:
        """Remove and return the key that comes up first, if that is by `now_ms`."""
        first = self.next()
        if first is None or first[0] > now_ms:
            return None
        del self._entries[first[1]]
        heapq.heappop(self._heap)
        return first[1]

    def clear(self) -> None:
        self._entries.clear()
        self._heap.clear()

    def _check(self) -> None:
        """Raise BrokenInvariant unless every key comes up at its time."""
        if not {id(entry) for entry in self._entries.values()} <= {id(entry) for entry in self._heap}:
            raise BrokenInvariant("a key has a time at which it does not come up")
