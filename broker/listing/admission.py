"""What listings and watchers go through alike: settings, how many are under way, permits, and the way to the client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..protocol.failures import Refused, ServerError
from ..protocol.frames import FRAME_ROOM, MAX_MESSAGE_SIZE
from ..protocol.loop_calls import Loop
from ..protocol.peer import Peer
from .limiter import DualMemoryLimiter
from .list_sizes import ListSizes

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 25.0
_JITTER = 0.1


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
