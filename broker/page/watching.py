"""Answers to questions that are asked again and again, told as server-sent events when they change.

All pages together take a hundredth of a core: after a look that took `t` seconds of a processor the next one waits
100 t for each page that is open, at least a second and at most ten; ten times as long as the look lasted, too. While
nothing changes a comment is sent now and then, so that a connection that has gone is noticed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from ...store.errors import ClosedError, DuelogError
from ..admin.http_request import HttpError

MOST_PAGES = 64
Look: TypeAlias = Callable[[], Awaitable[tuple[bytes, float]]]
"""Gives an answer as JSON, and the seconds of a processor that it took."""

_LEAST_S, _MOST_S = 1.0, 10.0
_SHARE = 0.01
_SILENCE_S = 15.0


class Watching:
    """The pages that are open. For the event loop's thread alone."""

    def __init__(self) -> None:
        self.pages = 0
        self._ended = asyncio.Event()

    def close(self) -> None:
        """End all of them: their clients ask again."""
        self._ended.set()

    async def events(self, looks: Sequence[Look]) -> AsyncGenerator[bytes, None]:
        """Yield an event for each answer, then for each that has changed, until `close`. Raises HttpError 429."""
        if self.pages >= MOST_PAGES:
            raise HttpError(429, f"{self.pages} pages are open: close one")
        self.pages += 1
        told = [b""] * len(looks)
        spoke_s = time.monotonic()
        try:
            yield b"retry: 2000\n\n"
            while not self._ended.is_set():
                began_s, spent_s = time.monotonic(), 0.0
                for at, look in enumerate(looks):
                    try:
                        result, took_s = await look()
                        answer, spent_s = b'"result": ' + result, spent_s + took_s
                    except (ClosedError, RuntimeError):
                        return
                    except (DuelogError, HttpError) as error:
                        answer = b'"reason": ' + json.dumps(str(error)).encode()
                    if answer != told[at]:
                        told[at], spoke_s = answer, time.monotonic()
                        yield b'data: {"at": %d, %b}\n\n' % (at, answer)
                now_s = time.monotonic()
                if now_s - spoke_s > _SILENCE_S:
                    spoke_s = now_s
                    yield b":\n\n"
                pause_s = max(spent_s * self.pages / _SHARE, 10 * (now_s - began_s))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), min(max(pause_s, _LEAST_S), _MOST_S))
        finally:
            self.pages -= 1
