"""Lists of a namespace's topics over HTTP, within the limits of memory that lists over the wire have.

A heap permit is held while the list is made, a direct one until the answer has left or its connection is gone.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

from ..admin.http_request import HttpError, Reply
from ..listing.admission import Admission
from ..listing.list_sizes import list_bytes
from ..listing.semaphore import PermitError
from ..listing.topic_listing import TopicListing
from ..protocol.commands import TopicsMode


class TopicNames:
    """Of the event loop's thread."""

    def __init__(self, listing: TopicListing, admission: Admission) -> None:
        self._listing = listing
        self._admission = admission

    async def reply(self, namespace: str) -> Reply:
        """Full names in order, as a JSON list. HttpError 429 where there is no permit in time."""
        until_left = AsyncExitStack()
        try:
            with self._admission.lookup():
                body = await self._listed(namespace, until_left)
        except PermitError as error:
            raise HttpError(429, str(error)) from error
        except BaseException:
            await until_left.aclose()
            raise
        return Reply(body, "application/json", until_left=until_left)

    async def _listed(self, namespace: str, until_left: AsyncExitStack) -> bytes:
        limiter, sizes = self._admission.limiter, self._admission.sizes
        async with (
            sizes.estimate((namespace, TopicsMode.PERSISTENT)) as estimate,
            limiter.heap.holding(estimate.size) as permit,
        ):
            names = await self._listing.names(namespace)
            size = list_bytes(names)
            estimate.report(size)
            async with limiter.heap.updating(permit, size):
                await until_left.enter_async_context(limiter.direct.holding(size))
                return await asyncio.to_thread(lambda: json.dumps(names, ensure_ascii=False).encode())
