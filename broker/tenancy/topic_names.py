"""Lists of a namespace's topics over HTTP, within the limits of memory that lists over the wire have.

A heap permit is held while the list is made, a direct one until the answer has left or its connection is gone.
"""

from __future__ import annotations

import asyncio
import json
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
                    limits = self._listing.within_limits(namespace, TopicsMode.PERSISTENT, until_left, _size)
                    async with limits as listed:
                        body = await asyncio.to_thread(_json, listed.names)
            except PermitError as error:
                raise HttpError(429, str(error)) from error
            return Reply(body, "application/json", until_left=until_left.pop_all())


async def _size(listed: Listed) -> int:
    return listed.size


def _json(names: list[str]) -> bytes:
    return json.dumps(names, ensure_ascii=False).encode()
