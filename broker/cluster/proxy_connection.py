"""A client's connection to a proxy: how it gets in, and what becomes of it.

A broker decides whether a client gets in, by the client's own credentials. A client that names no broker asks
questions: a broker is connected to at once, so that what it says of the client's credentials is what the client hears.
A client that names one of the known brokers is spliced to it: bytes go both ways as they are, and each side is read
only while the other one takes what comes, so that what a proxy keeps of a connection is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from ..protocol import commands
from ..protocol.failures import Refused, ServerError
from ..protocol.frames import head
from ..protocol.states import Session
from ..server.connection import Connection, Fail
from .broker_link import BrokerLink, ClientLinks, Dialer
from .placement import KnownBrokers

_HIGH = 256 * 1024
"""Bytes that wait for a broker at which its client is not read."""

_LINGER_S = 5.0


@dataclass(slots=True)
class ProxyFigures:
    """Counts of a proxy."""

    new: int = 0
    """Connections that came."""
    spliced: int = 0
    """Connections that go through to a broker now."""
    pieces: int = 0
    bytes: int = 0
    """Passed on by spliced connections, both ways."""

    def passed(self, size: int) -> None:
        self.pieces += 1
        self.bytes += size


class Splice(asyncio.Protocol):
    """The broker's side. Of the event loop's thread."""

    def __init__(self, client: Connection, first: bytes, count: Callable[[int], object]) -> None:
        """first: what is sent to the broker before anything of the client. count: told of bytes that were passed on."""
        self._client = client
        self._first = first
        self._count = count
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH)
        self._transport.write(self._first)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._count(len(data))
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        client, transport = self._client, self._transport
        self._count(len(data))
        client.send_frames(data)
        if not client.writable and not client.closed and transport is not None:
            transport.pause_reading()
            client.on_writable(self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._client.pause_reading("broker")

    def resume_writing(self) -> None:
        self._client.resume_reading("broker")

    def connection_lost(self, exc: Exception | None) -> None:
        """The broker is gone: the client gets what came, and the end."""
        self._transport = None
        self._client.close("its broker has ended the connection")

    def close(self) -> None:
        """The client is gone: the broker gets what came, and the end."""
        if self._transport is not None:
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)
            self._transport.close()


class ProxyAdmission:
    """The admission of one connection. Of the event loop's thread."""

    role: str | None = None
    """Brokers know it; the proxy does not ask."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        fail: Fail,
        brokers: KnownBrokers,
        dialer: Dialer,
        figures: ProxyFigures,
        gone: Callable[[], object],
    ) -> None:
        """gone: called once the connection is no more."""
        self._connection = connection
        self._session = session
        self._fail = fail
        self._brokers = brokers
        self._dialer = dialer
        self._figures = figures
        self._gone = gone
        self.links = ClientLinks(dialer, lambda: session.connect, self._challenged)
        """To the brokers that the client has asked something of."""
        self._unanswered: set[BrokerLink] = set()
        """Links that wait for credentials."""
        self._splice: Splice | None = None
        self._closed = False

    async def connect(self, command: commands.Connect) -> None:
        """Ask a broker, or become a connection to one."""
        try:
            if command.proxy_to_broker_url:
                await self._become(command, command.proxy_to_broker_url)
            else:
                await self._enter()
        except Refused as error:
            self._fail(error.error, error.message)

    async def _enter(self) -> None:
        link = await self.links.first(self._brokers.for_namespace(None))
        said = link.connected or commands.Connected("")
        flags = replace(
            said.feature_flags or commands.FeatureFlags(),
            supports_topic_watchers=False,  # of a connection that is spliced only
            supports_topic_watcher_reconcile=False,
        )
        self._session.accept(replace(said, feature_flags=flags))

    async def _become(self, command: commands.Connect, place: str) -> None:
        address = self._brokers.at(place)
        if address is None:
            raise Refused(ServerError.SERVICE_NOT_READY, f"{place[:200]} is no broker that this proxy connects to")
        first = head(replace(command, proxy_to_broker_url=None, original_principal=None))
        connection, figures = self._connection, self._figures
        splice = await self._dialer.dial(address, lambda: Splice(connection, first, figures.passed))
        if self._closed or connection.closed:
            splice.close()
            return
        self._splice = splice
        figures.spliced += 1
        connection.splice(splice.write)

    def _challenged(self, link: BrokerLink, challenge: commands.AuthChallenge) -> None:
        """Ask the client, once for all brokers that ask."""
        if not self._unanswered:
            self._session.challenge(challenge.challenge or commands.AuthData())
        self._unanswered.add(link)

    async def respond(self, command: commands.AuthResponse) -> None:
        links, self._unanswered = self._unanswered, set()
        for link in links:
            link.respond(command)

    def close(self) -> None:
        self._closed = True
        self.links.close()
        if self._splice is not None:
            self._figures.spliced -= 1
            self._splice.close()
        asyncio.get_running_loop().call_soon(self._gone)
