"""Questions of clients that another broker answers: LOOKUP by a proxy; metadata and schemas by a proxy or a broker.

What a proxy's client is told to connect to is a broker by the address that the proxy knows it by, through the proxy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..protocol.commands import (
    GetOrCreateSchema,
    GetSchema,
    Lookup,
    LookupKind,
    LookupResponse,
    PartitionedMetadata,
    ServerError,
)
from ..protocol.failures import Refused
from ..protocol.frames import framed
from ..protocol.peer import Peer
from .client_links import ClientLinks
from .known_brokers import KnownBrokers, namespace_of_topic
from .placement import Address

MAX_REDIRECTS = 20


class LookupGate:
    """How many questions may be under way at once. Of the event loop's thread."""

    def __init__(self, most: int) -> None:
        self.asked = self.failed = 0
        """Questions so far, and those that no broker has answered."""
        self._most = most
        self._now = 0

    def __enter__(self) -> None:
        """Refused: TooManyRequests."""
        self.asked += 1
        if self._now >= self._most:
            self.failed += 1
            raise Refused(ServerError.TOO_MANY_REQUESTS, f"{self._now} requests are under way")
        self._now += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._now -= 1
        self.failed += kind is not None


class Forwarding:
    """Of the event loop's thread."""

    def __init__(self, brokers: KnownBrokers, links: Callable[[Peer], ClientLinks], gate: LookupGate) -> None:
        """links: of a connection."""
        self._brokers = brokers
        self._links = links
        self._gate = gate

    async def lookup(self, peer: Peer, command: Lookup) -> None:
        """Answer with the broker that has the topic; from one broker to the next where one says so."""
        with self._gate:
            brokers = self._brokers.for_namespace(namespace_of_topic(command.topic))
            for _ in range(MAX_REDIRECTS):
                link, answer = await self._links(peer).ask(brokers, command, command.request_id)
                found = answer.decoded()
                if not isinstance(found, LookupResponse):
                    raise Refused(ServerError.SERVICE_NOT_READY, f"broker {link.address} has answered {answer.kind}")
                named = self._brokers.named(found.url, found.url_tls)
                if found.response == LookupKind.CONNECT:
                    peer.send(_through(found, named or link.address))
                    return
                if found.response != LookupKind.REDIRECT:
                    peer.send(found)
                    return
                if named is None:
                    text = f"broker {link.address} redirects to {found.url or found.url_tls}, which is not known here"
                    raise Refused(ServerError.SERVICE_NOT_READY, text)
                brokers, command = [named], replace(command, authoritative=found.authoritative)
            raise Refused(ServerError.SERVICE_NOT_READY, f"brokers redirect {command.topic} in a circle")

    async def answer(self, peer: Peer, command: PartitionedMetadata | GetSchema | GetOrCreateSchema) -> None:
        """Answer as the broker does."""
        with self._gate:
            brokers = self._brokers.for_namespace(namespace_of_topic(command.topic))
            _, answer = await self._links(peer).ask(brokers, command, command.request_id)
            peer.send_frames(framed(answer.encoded))


def _through(found: LookupResponse, address: Address) -> LookupResponse:
    """The client connects to the proxy, and names the broker."""
    url, url_tls = f"pulsar://{address.place}", f"pulsar+ssl://{address.place}"
    return replace(found, url=url, url_tls=url_tls, through_proxy=True)
