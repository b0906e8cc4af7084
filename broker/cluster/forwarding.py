"""Requests that another broker answers: LOOKUP for a proxy; metadata, schemas and lists for a proxy or a broker.

What a proxy's client is told to connect to is a broker by the address that the proxy knows it by, through the proxy.

The memory of a forwarded list is bounded: it holds a heap permit from before the request. Before an answer over 64 KiB
is read, that goes back, and the listing waits for a direct permit of the answer's size, kept until the answer has left,
and then for a heap permit, kept until it is queued. A smaller answer is read first.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from ..listing.memory_limits import DualMemoryLimiter, LookupGate, PermitError, all_left
from ..protocol import commands
from ..protocol.failures import Refused, ServerError
from ..protocol.frames import framed
from ..protocol.peer import Peer
from .broker_link import ClientLinks
from .placement import Address, KnownBrokers, namespace_of_topic

MAX_REDIRECTS = 20


_TOLD = frozenset({ServerError.AUTHENTICATION, ServerError.AUTHORIZATION, ServerError.TOO_MANY_REQUESTS})
"""Errors of a broker that lists topics which clients get unchanged; all others become ServiceNotReady."""


class Forwarding:
    """Passes requests on to the broker that answers them. Runs on the event loop's thread."""

    def __init__(
        self, brokers: KnownBrokers, links: Callable[[Peer], ClientLinks], max_lookups: int, limiter: DualMemoryLimiter
    ) -> None:
        """links: of a connection. max_lookups: requests under way at once."""
        self._brokers = brokers
        self._links = links
        self._limiter = limiter
        self.gate = LookupGate(max_lookups)

    async def lookup(self, peer: Peer, command: commands.Lookup) -> None:
        """Answer with the broker that has the topic; from one broker to the next where one says so."""
        with self.gate:
            brokers = self._brokers.for_namespace(namespace_of_topic(command.topic))
            for _ in range(MAX_REDIRECTS):
                link, answer = await self._links(peer).ask(brokers, command, command.request_id)
                found = answer.decoded()
                if not isinstance(found, commands.LookupResponse):
                    raise Refused(ServerError.SERVICE_NOT_READY, f"broker {link.address} has answered {answer.kind}")
                named = self._brokers.named(found.url, found.url_tls)
                if found.response == commands.LookupKind.CONNECT:
                    peer.send(_through(found, named or link.address))
                    return
                if found.response != commands.LookupKind.REDIRECT:
                    peer.send(found)
                    return
                if named is None:
                    text = f"broker {link.address} redirects to {found.url or found.url_tls}, which is not known here"
                    raise Refused(ServerError.SERVICE_NOT_READY, text)
                brokers, command = [named], replace(command, authoritative=found.authoritative)
            raise Refused(ServerError.SERVICE_NOT_READY, f"brokers redirect {command.topic} in a circle")

    async def answer(
        self, peer: Peer, command: commands.PartitionedMetadata | commands.GetSchema | commands.GetOrCreateSchema
    ) -> None:
        with self.gate:
            brokers = self._brokers.for_namespace(namespace_of_topic(command.topic))
            _, answer = await self._links(peer).ask(brokers, command, command.request_id)
            peer.send_frames(framed(answer.encoded))

    async def topics(self, peer: Peer, command: commands.GetTopics) -> None:
        """Answer GET_TOPICS_OF_NAMESPACE as the broker does, within the limits of memory."""
        try:
            with self.gate:
                async with self._limiter.turn(peer):
                    await self._list(peer, command)
        except PermitError as error:
            peer.send(commands.Error(command.request_id, ServerError.TOO_MANY_REQUESTS, str(error)))
        except Refused as error:
            number = error.error if error.error in _TOLD else ServerError.SERVICE_NOT_READY
            peer.send(commands.Error(command.request_id, number, error.message))

    async def _list(self, peer: Peer, command: commands.GetTopics) -> None:
        def is_gone() -> bool:
            return peer.closed

        heap, direct = self._limiter.heap, self._limiter.direct
        async with (
            self._limiter.sizes.estimate((command.namespace, command.mode)) as (guess, report),
            AsyncExitStack() as until_left,
            AsyncExitStack() as until_sent,
        ):
            await until_sent.enter_async_context(heap.holding(guess, is_gone))
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
            failure = answer.decoded() if answer.kind is commands.Error else None
            if isinstance(failure, commands.Error):
                raise Refused(failure.error, failure.message)
            frame = framed(answer.encoded)
            whole = command.topics_hash is None and command.pattern is None
            report(len(frame) if whole else max(len(frame), guess))
            if len(frame) > reserved:
                await sized(len(frame))
            del answer
            peer.send_frames(frame)
            del frame
            await until_sent.aclose()
            await all_left(peer)


def _through(found: commands.LookupResponse, address: Address) -> commands.LookupResponse:
    """The client connects to the proxy, and names the broker."""
    url, url_tls = f"pulsar://{address.place}", f"pulsar+ssl://{address.place}"
    return replace(found, url=url, url_tls=url_tls, through_proxy=True)
