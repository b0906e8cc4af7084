"""What listings and watchers go through alike: settings, how many are under way, sizes, and the way to the client.

How large the list of a namespace was the last time is kept, so that memory is asked for before there is a list. The
first asker for a namespace learns it for all: it goes on with a guess, the others wait for what it finds.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from ..protocol.failures import Refused, ServerError
from ..protocol.frames import FRAME_ROOM, MAX_MESSAGE_SIZE
from ..protocol.loop_calls import Loop
from ..protocol.peer import Peer
from .memory_limits import DualMemoryLimiter

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 25.0
_JITTER = 0.1

FIRST_SIZE = 10 << 10
"""Bytes that a list is taken to have of which nothing is known."""

MAX_KNOWN = 10_000
"""Namespaces of which something is known; the one not asked for longest is forgotten."""

NAME_BYTES = 64
"""What a name takes beside its UTF-8."""

_NAME_FRAME_BYTES = 3
"""What a name takes in a frame beside its UTF-8."""

_FRAME_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingSettings:
    """Of listings and watchers."""

    evaluates_patterns: bool = True
    """Whether the broker filters; else clients do, and there are no watchers."""
    max_pattern: int = 50
    """Characters; clients filter by a longer one themselves."""
    max_lookups: int = 50_000
    """Listings under way."""
    max_frame: int = MAX_MESSAGE_SIZE + FRAME_ROOM
    """Bytes of a frame that clients take."""
    max_watchers: int = 1_000
    """Of a connection."""
    max_kept_bytes: int = 100 << 20
    """Names that watchers keep; 0: no limit."""


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


class Admission:
    """Of the event loop's thread."""

    def __init__(self, limiter: DualMemoryLimiter, settings: ListingSettings) -> None:
        self.limiter = limiter
        self.settings = settings
        self.sizes = ListSizes()
        self.lookups = 0
        """Listings under way, and watchers being opened."""

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Count a listing. Raises Refused: TooManyRequests."""
        if self.lookups >= self.settings.max_lookups:
            raise Refused(ServerError.TOO_MANY_REQUESTS, f"{self.lookups} listings are under way")
        self.lookups += 1
        try:
            yield
        finally:
            self.lookups -= 1

    def check_frame(self, size: int) -> None:
        """Raise Refused for a frame at which clients would end their connection."""
        if size > self.settings.max_frame:
            reason = f"the list takes {size} bytes; {self.settings.max_frame} go into a frame (maxMessageSize)"
            raise Refused(ServerError.NOT_ALLOWED, reason)


async def send_and_wait(peer: Peer, frames: bytes, names: bytes | None = None) -> None:
    """Send a frame, and wait until it has left the process, or the connection is gone.

    names: fields that stand at its end; connections may share them.
    """
    peer.send_frames(frames, names or None)
    left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    peer.on_left(lambda: None if left.done() else left.set_result(None))
    await left


class Backoff:
    """Pauses that double."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._next_s = FIRST_BACKOFF_S

    async def pause(self) -> None:
        """100 ms, doubled each time up to 25 s, less up to a tenth at random."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        delay = self._next_s * (1 - random.random() * _JITTER)
        self._next_s = min(2 * self._next_s, LONGEST_BACKOFF_S)
        timer = self._loop.call_later(delay, lambda: None if over.done() else over.set_result(None))
        try:
            await over
        finally:
            timer.cancel()
