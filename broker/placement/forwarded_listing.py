"""GET_TOPICS_OF_NAMESPACE that another broker answers: what is kept of its answer is bounded.

A listing has a heap permit from before it is asked for. Before an answer over 64 KiB is read, that goes back, and the
listing waits for a direct permit of the answer's size, kept until the answer has left, and then for a heap permit,
kept until it is queued. One that is smaller is read first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from ..listing.admission import ListSizes
from ..listing.memory_limits import DualMemoryLimiter, PermitError
from ..protocol.commands import Error, GetTopics, ServerError
from ..protocol.failures import Refused
from ..protocol.frames import framed
from ..protocol.peer import Peer
from .client_links import ClientLinks
from .forwarding import LookupGate
from .known_brokers import KnownBrokers

_TOLD = frozenset({ServerError.AUTHENTICATION, ServerError.AUTHORIZATION, ServerError.TOO_MANY_REQUESTS})
"""Errors that clients are told as brokers tell them; all others are ServiceNotReady."""


class ForwardedListing:
    """Of the event loop's thread."""

    def __init__(
        self,
        brokers: KnownBrokers,
        links: Callable[[Peer], ClientLinks],
        gate: LookupGate,
        limiter: DualMemoryLimiter,
    ) -> None:
        self._brokers = brokers
        self._links = links
        self._gate = gate
        self._limiter = limiter
        self._sizes = ListSizes()

    async def topics(self, peer: Peer, command: GetTopics) -> None:
        """Answer as the broker does, within the limits."""
        try:
            with self._gate:
                async with self._limiter.turn(peer):
                    await self._answer(peer, command)
        except PermitError as error:
            peer.send(Error(command.request_id, ServerError.TOO_MANY_REQUESTS, str(error)))
        except Refused as error:
            number = error.error if error.error in _TOLD else ServerError.SERVICE_NOT_READY
            peer.send(Error(command.request_id, number, error.message))

    async def _answer(self, peer: Peer, command: GetTopics) -> None:
        def is_gone() -> bool:
            return peer.closed

        heap, direct = self._limiter.heap, self._limiter.direct
        async with (
            self._sizes.estimate((command.namespace, command.mode)) as estimate,
            AsyncExitStack() as until_left,
            AsyncExitStack() as until_sent,
        ):
            await until_sent.enter_async_context(heap.holding(estimate.size, is_gone))
            reserved = 0

            async def sized(size: int) -> None:
                nonlocal reserved
                await until_sent.aclose()
                await until_left.aclose()
                try:
                    await until_left.enter_async_context(direct.holding(size, is_gone))
                    await until_sent.enter_async_context(heap.holding(size, is_gone))
                except PermitError as error:
                    raise Refused(ServerError.TOO_MANY_REQUESTS, str(error)) from error
                reserved = size

            brokers = self._brokers.for_namespace(command.namespace)
            _, answer = await self._links(peer).ask(brokers, command, command.request_id, sized)
            failure = answer.decoded() if answer.kind is Error else None
            if isinstance(failure, Error):
                raise Refused(failure.error, failure.message)
            frame = framed(answer.encoded)
            whole = command.topics_hash is None and command.pattern is None
            estimate.report(len(frame) if whole else max(len(frame), estimate.size))
            if len(frame) > reserved:
                await sized(len(frame))
            del answer
            peer.send_frames(frame)
            del frame
            await until_sent.aclose()
            left = asyncio.Event()
            peer.on_left(left.set)
            await left.wait()
