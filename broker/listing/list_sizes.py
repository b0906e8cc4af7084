"""How large the list of a namespace was the last time, so that memory is asked for before there is a list.

The first asker for a namespace learns it for all: it goes on with a guess, the others wait for what it finds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Hashable
from contextlib import asynccontextmanager

FIRST_SIZE = 10 << 10
"""Bytes that a list is taken to have of which nothing is known."""

MAX_KNOWN = 10_000
"""Namespaces of which something is known; the one not asked for longest is forgotten."""

NAME_BYTES = 64
"""What a name takes beside its UTF-8."""

_NAME_FRAME_BYTES = 3
"""What a name takes in a frame beside its UTF-8."""

_FRAME_BYTES = 64


def list_bytes(names: Collection[str]) -> int:
    """Memory of a list of names."""
    return sum(map(name_bytes, names))


def frame_bytes(size: int, names: int) -> int:
    """What so many names of `size` bytes by `list_bytes` take in a frame, or a little more."""
    return size - (NAME_BYTES - _NAME_FRAME_BYTES) * names + _FRAME_BYTES


def name_bytes(name: str) -> int:
    """Memory of a name in a list."""
    return NAME_BYTES + (len(name) if name.isascii() else len(name.encode()))


class Estimate:
    """What one asker is told, and tells."""

    def __init__(self, sizes: ListSizes, key: Hashable, size: int) -> None:
        self._sizes = sizes
        self._key = key
        self.size = size
        """Bytes."""

    def report(self, size: int) -> None:
        """The list has so many bytes."""
        self._sizes._known_now(self._key, size)


class ListSizes:
    """Of the event loop's thread."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._known: OrderedDict[Hashable, int | asyncio.Future[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    @asynccontextmanager
    async def estimate(self, key: Hashable) -> AsyncIterator[Estimate]:
        """The size of the list of `key`, a namespace and a mode; to be reported in the body once it is known.

        Where the first asker ends without a report those that wait go on with FIRST_SIZE, and the next is the first.
        """
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            size = found if isinstance(found, int) else await asyncio.shield(found)
            yield Estimate(self, key, size)
            return
        first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._put(key, first)
        try:
            yield Estimate(self, key, FIRST_SIZE)
        finally:
            if self._known.get(key) is first:
                del self._known[key]
            if not first.done():
                known = self._known.get(key, FIRST_SIZE)
                first.set_result(known if isinstance(known, int) else FIRST_SIZE)

    def _known_now(self, key: Hashable, size: int) -> None:
        before = self._known.get(key)
        self._put(key, size)
        if isinstance(before, asyncio.Future) and not before.done():
            before.set_result(size)

    def _put(self, key: Hashable, found: int | asyncio.Future[int]) -> None:
        self._known[key] = found
        self._known.move_to_end(key)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
