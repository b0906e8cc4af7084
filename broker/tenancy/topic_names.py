"""Lists of a namespace's topics over HTTP, within the limits of memory that lists over the wire have.

A heap permit is held while the list is made, a direct one until the answer has left or its connection is gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from ..admin.http_request import HttpError, Reply
from ..listing.memory_limits import PermitError
from ..listing.topic_listing import Listed, TopicListing
from ..protocol.commands import TopicsMode


class TopicNames:
    """Of the event loop's thread."""

    def __init__(self, listing: TopicListing) -> None:
        self._listing = listing

    async def reply(self, namespace: str) -> Reply:
        """Full names in order, as a JSON list. HttpError 429 where there is no permit in time."""
        async with AsyncExitStack() as until_left:
            try:
                with self._listing.gate:
                    body = await self._listed(namespace, until_left)
            except PermitError as error:
                raise HttpError(429, str(error)) from error
            return Reply(body, "application/json", until_left=until_left.pop_all())

    async def _listed(self, namespace: str, until_left: AsyncExitStack) -> bytes:
        async def prepare(listed: Listed) -> tuple[int, Callable[[], Awaitable[bytes]]]:
            names = listed.names
            return listed.size, lambda: asyncio.to_thread(lambda: json.dumps(names, ensure_ascii=False).encode())

        return await self._listing.within_limits(namespace, TopicsMode.PERSISTENT, until_left, prepare)
