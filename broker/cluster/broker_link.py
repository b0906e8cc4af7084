"""Connections to brokers that ask what a client has asked, with the client's own credentials, and pass the answer on.

Answers are handed back as they came, undecoded: a list of topics may be large. A link ends with its first failure; what
waits then fails with ServiceNotReady. A client has one link to each broker that it has asked something of.

LOOKUP is passed on for a proxy; metadata, schemas and lists for a proxy or a broker. What a proxy's client is told to
connect to is a broker by the address that the proxy knows it by, through the proxy.

The memory of a forwarded list is bounded: it holds a heap permit from before the request. Before an answer over 64 KiB
is read, that goes back, and the listing waits for a direct permit of the answer's size, kept until the answer has left,
and then for a heap permit, kept until it is queued. A smaller answer is read first.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from ..listing.memory_limits import DualMemoryLimiter, LookupGate, all_left
from ..protocol import commands
from ..protocol.failures import Refused, ServerError
from ..protocol.fields import Command, ProtocolError
from ..protocol.frames import FrameCutter, framed, head
from ..protocol.peer import Peer
from ..security.authentication import UnusableSecurity
from .placement import Address, KnownBrokers, namespace_of_topic

_LARGE = 64 * 1024
"""Bytes of an answer from which on its receiver is asked before it is read."""

_MOST = (1 << 31) - 1
_CLOSE_S = 5.0

Challenged = Callable[["BrokerLink", commands.AuthChallenge], object]
"""Called when a broker asks for credentials; it has to call `BrokerLink.respond` or `close`."""

P = TypeVar("P", bound=asyncio.BaseProtocol)


class Unreachable(Refused):
    """A broker cannot be reached, or its connection has ended."""

    def __init__(self, address: Address, reason: str) -> None:
        super().__init__(ServerError.SERVICE_NOT_READY, f"broker {address}: {reason}")


class Answer(NamedTuple):
    """The answer of a broker, undecoded."""

    kind: type[Command]
    encoded: bytes

    def decoded(self) -> Command:
        """The command. Raises ProtocolError."""
        return commands.decode(self.encoded)


@dataclass(frozen=True, slots=True)
class Dialer:
    """Makes connections to brokers."""

    context: ssl.SSLContext | None = None
    """For pulsar+ssl; None: certificates that this machine trusts."""
    connect_s: float = 10.0
    request_s: float = 30.0

    async def dial(self, address: Address, make: Callable[[], P]) -> P:
        """Connect a protocol. Raises Unreachable."""
        context = None
        if address.tls:
            context = self.context or await asyncio.to_thread(ssl.create_default_context)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_s):
                _, protocol = await loop.create_connection(
                    make, address.host, address.port, ssl=context, ssl_shutdown_timeout=_CLOSE_S if context else None
                )
        except TimeoutError as error:
            raise Unreachable(address, f"not connected after {self.connect_s:g} s") from error
        except OSError as error:
            raise Unreachable(address, f"cannot be reached: {error.strerror or error}") from error
        return protocol

    async def link(self, address: Address, connect: commands.Connect, challenged: Challenged) -> "BrokerLink":
        """A link that a broker has let in. challenged: told when the broker asks for credentials.

        Raises Refused: Unreachable, or what the broker answered.
        """
        link = await self.dial(address, lambda: BrokerLink(address, connect, challenged, self.request_s))
        try:
            await link.ready()
        except BaseException:
            link.close()
            raise
        return link


class BrokerLink(asyncio.Protocol):
    """One connection to a broker. Of the event loop's thread."""

    def __init__(self, address: Address, connect: commands.Connect, challenged: Challenged, request_s: float) -> None:
        self.address = address
        self.connected: commands.Connected | None = None
        """The broker's CONNECTED."""
        self._connect = replace(connect, proxy_to_broker_url=None, original_principal=None)
        self._challenged = challenged
        self._request_s = request_s
        self._frames = FrameCutter(_MOST)
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._sized: Callable[[int], Awaitable[None]] | None = None
        self._admitting: asyncio.Task[None] | None = None
        self._admitted = _LARGE
        self._failure: Refused | None = None

    @property
    def closed(self) -> bool:
        return self._failure is not None

    async def ready(self) -> None:
        """Wait until the broker has let it in. Raises Refused."""
        try:
            async with asyncio.timeout(self._request_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self._fail(Unreachable(self.address, f"no answer to Connect after {self._request_s:g} s"))
            await self._ready

    async def ask(
        self, command: Command, request_id: int, sized: Callable[[int], Awaitable[None]] | None = None
    ) -> Answer:
        """Ask, and wait for the answer. Raises Refused where there is none.

        sized: awaited with the size of an answer over 64 KiB before it is read; one request at a time may have it. What
        it raises is raised; the link ends then, and what else waits for it fails with ServiceNotReady.
        """
        if self._failure is not None:
            raise self._failure
        if request_id in self._waiting:
            raise Refused(ServerError.NOT_ALLOWED, f"request_id {request_id} is in use")
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answered
        self._sized = sized or self._sized
        self._say(command)
        try:
            async with asyncio.timeout(self._request_s):
                return await answered
        except TimeoutError:
            failure = Unreachable(self.address, f"no answer after {self._request_s:g} s")
            self._fail(failure)
            raise failure from None
        finally:
            self._waiting.pop(request_id, None)
            if sized is not None:
                self._sized = None
                if self._admitting is not None and not self._admitting.done():
                    self._admitting.cancel()
                    self._fail(Unreachable(self.address, "an answer was not read"))

    def respond(self, response: commands.AuthResponse) -> None:
        self._say(response)

    def close(self) -> None:
        self._fail(Unreachable(self.address, "the connection is closed"))

    # -- as the event loop sees it ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._say(self._connect)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Unreachable(self.address, "the connection is gone"))

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        self._process()

    def _process(self) -> None:
        try:
            while self._failure is None and (frame := self._frames.cut()) is not None:
                self._admitted = _LARGE
                self._take(frame.command)
        except ProtocolError as error:
            self._fail(Unreachable(self.address, str(error)))
            return
        size, transport = self._frames.wanted, self._transport
        if size > self._admitted and self._sized is not None and transport is not None and self._failure is None:
            transport.pause_reading()
            self._admitting = asyncio.get_running_loop().create_task(self._admit(size, self._sized))

    async def _admit(self, size: int, sized: Callable[[int], Awaitable[None]]) -> None:
        """Read a large answer once its receiver can take it."""
        try:
            await sized(size)
        except Refused as error:
            self._fail(error)
        except Exception as error:
            self._fail(Unreachable(self.address, f"an answer of {size} bytes cannot be read: {error}"))
        else:
            self._admitted = size
            if self._failure is None and self._transport is not None:
                self._transport.resume_reading()

    def _take(self, encoded: bytes) -> None:
        kind, request_id = commands.request_of(encoded)
        waiting = None if request_id is None else self._waiting.get(request_id)
        if kind is commands.Ping:
            self._say(commands.Pong())
        elif kind is commands.AuthChallenge:
            self._challenged(self, cast(commands.AuthChallenge, commands.decode(encoded)))
        elif kind is commands.Connected:
            self.connected = cast(commands.Connected, commands.decode(encoded))
            if not self._ready.done():
                self._ready.set_result(None)
        elif waiting is not None:
            if not waiting.done():
                waiting.set_result(Answer(kind, encoded))
        elif kind is commands.Error:
            error = cast(commands.Error, commands.decode(encoded))
            self._fail(Refused(error.error, error.message))

    # -- helpers ---------------------------------------------------------------------------------

    def _say(self, command: Command) -> None:
        if self._transport is not None and self._failure is None:
            self._transport.write(head(command))

    def _fail(self, failure: Refused) -> None:
        """End it; everything that waits fails."""
        if self._failure is not None:
            return
        self._failure = failure
        if not self._ready.done():
            self._ready.set_exception(failure)
            self._ready.exception()  # it may be that no task waits for it
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(failure)
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(_CLOSE_S, self._transport.abort)


def broker_context(trusted: Path | None, *, check_names: bool = True) -> ssl.SSLContext:
    """For connections to brokers by TLS. Raises UnusableSecurity."""
    try:
        context = ssl.create_default_context(cafile=trusted)
    except (OSError, ssl.SSLError) as error:
        raise UnusableSecurity(f"{trusted} is no file of certificates in PEM: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = check_names
    return context


class ClientLinks:
    """Links of one client. Runs on the event loop's thread."""

    def __init__(
        self, dialer: Dialer, connect: Callable[[], commands.Connect], challenged: Challenged | None = None
    ) -> None:
        """connect: how the client introduces itself now. challenged: told when a broker asks for credentials.

        None: a link that is asked for them ends; the next has those that the client has given since.
        """
        self._connect = connect
        self._dialer = dialer
        self._challenged = challenged or (lambda link, _: link.close())
        self._links: dict[Address, asyncio.Task[BrokerLink]] = {}

    async def link(self, address: Address) -> BrokerLink:
        """The link to a broker, made where there is none. Raises Refused."""
        task = self._links.get(address)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().closed)):
            task = asyncio.create_task(self._dialer.link(address, self._connect(), self._challenged))
            self._links[address] = task
        return await asyncio.shield(task)

    async def first(self, addresses: Iterable[Address]) -> BrokerLink:
        """A link to the first of several brokers that can be reached. Raises Refused."""
        failure: Unreachable | None = None
        for address in addresses:
            try:
                return await self.link(address)
            except Unreachable as error:
                failure = failure or error
        raise failure or Refused(ServerError.SERVICE_NOT_READY, "there is no broker to be asked")

    def close(self) -> None:
        for task in self._links.values():
            task.add_done_callback(_close)
            task.cancel()


def _close(task: asyncio.Task[BrokerLink]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


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
                link = await self._links(peer).first(brokers)
                answer = await link.ask(command, command.request_id)
                found = answer.decoded()
                if not isinstance(found, commands.LookupResponse):
                    raise Refused(ServerError.SERVICE_NOT_READY, f"broker {link.address} has answered {answer.kind}")
                named = self._brokers.named(found.url, found.url_tls)
                if found.response == commands.LookupKind.CONNECT:
                    place = (named or link.address).place  # the client connects to the proxy, and names the broker
                    url, url_tls = f"pulsar://{place}", f"pulsar+ssl://{place}"
                    peer.send(replace(found, url=url, url_tls=url_tls, through_proxy=True))
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
            link = await self._links(peer).first(brokers)
            answer = await link.ask(command, command.request_id)
            peer.send_frames(framed(answer.encoded))

    async def topics(self, peer: Peer, command: commands.GetTopics) -> None:
        """Answer GET_TOPICS_OF_NAMESPACE as the broker does, within the limits of memory."""
        try:
            with self.gate:
                async with self._limiter.turn(peer):
                    await self._list(peer, command)
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
                await until_left.enter_async_context(direct.holding(size, is_gone))
                await until_sent.enter_async_context(heap.holding(size, is_gone))
                reserved = size

            brokers = self._brokers.for_namespace(command.namespace)
            link = await self._links(peer).first(brokers)
            answer = await link.ask(command, command.request_id, sized)
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
