"""A client that says what a test tells it to, and listeners to say it to."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from duelog.broker.configuration import BrokerConfig
from duelog.broker.protocol import commands
from duelog.broker.protocol.entry import MessageMetadata
from duelog.broker.protocol.fields import ENCODERS, Command
from duelog.broker.protocol.frames import Frame, FrameCutter, head
from duelog.broker.protocol.states import Session
from duelog.broker.security.authentication import Authentication
from duelog.broker.server.connection import Connection, Fail, Handler, Login
from duelog.broker.server.service import Listeners
from tests.broker.protocol.blobs import join_blob

C = TypeVar("C", bound=Command)

WITHIN_S = 60
"""Longest wait of a test for something that is bound to happen."""


def blob_of(payload: bytes, number: int = 0, **values: Any) -> bytes:
    """A message of a client."""
    return join_blob(ENCODERS[MessageMetadata](MessageMetadata("p", number, 1_000, **values)), payload)


class RawClient:
    """One connection."""

    open_ones: ClassVar["list[RawClient]"] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.open_ones.append(self)
        self._frames = FrameCutter(64 << 20)

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> Self:
        """Connect, and say nothing."""
        return cls(*await asyncio.open_connection(host, port, ssl=context))

    @classmethod
    async def connected(cls, port: int, **kwargs: Any) -> Self:
        """Connect, and say CONNECT."""
        client = await cls.open(port)
        client.say(commands.Connect("test", protocol_version=21, **kwargs))
        assert isinstance(await client.hear(), commands.Connected)
        return client

    def say(self, *said: Command, blob: bytes = b"") -> None:
        """Send commands; the blob with each of them."""
        self.writer.write(b"".join(head(each, len(blob)) + blob for each in said))

    async def ask_for(self, kind: type[C], command: Command) -> C:
        """Ask, and take an answer of one kind."""
        self.say(command)
        return await self.hear_a(kind)

    async def hear_a(self, kind: type[C]) -> C:
        """The next command, of one kind."""
        heard = await self.hear()
        assert isinstance(heard, kind), heard
        return heard

    async def hear(self) -> Command | None:
        """The next command; None: the connection has ended."""
        found = await self.hear_blob()
        return None if found is None else found[0]

    async def hear_blob(self) -> tuple[Command, bytes] | None:
        """The next command and its blob."""
        frame = await self._next_frame()
        return None if frame is None else (commands.decode(frame.command), bytes(frame.blob))

    async def hear_frame(self) -> bytes:
        """The next command as it came; none: the connection has ended."""
        frame = await self._next_frame()
        return b"" if frame is None else frame.command

    async def _next_frame(self) -> Frame | None:
        while (frame := self._frames.cut()) is None:
            try:
                data = await asyncio.wait_for(self.reader.read(1 << 16), WITHIN_S)
            except ConnectionError:
                return None
            if not data:
                return None
            self._frames.feed(data)
        return frame

    async def ask(self, said: Command) -> Command | None:
        """Send a command; what comes next."""
        self.say(said)
        return await self.hear()

    async def close(self) -> None:
        """End the connection."""
        self.writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


def end_clients() -> None:
    """End every connection that a test has left open, before what it goes to ends."""
    for client in RawClient.open_ones:
        client.writer.transport.abort()
    RawClient.open_ones.clear()


_CHECK_S = 3_600
"""Seconds between two looks at credentials: a test looks at them itself (`Serving.look_at_credentials`)."""


class Serving:
    """Listeners with the handlers of a test."""

    def __init__(
        self, handlers: Mapping[Any, Handler], authentication: Authentication | None = None, **settings: Any
    ) -> None:
        values: dict[str, Any] = {"bind_address": "127.0.0.1", "broker_service_port": 0, "broker_service_port_tls": 0}
        self.config = BrokerConfig(**{**values, **settings})
        self.gone: list[Connection] = []
        self.seen: list[Connection] = []
        self.logins: list[Login] = []
        self.now_ms = 0
        self.port = 0
        self.listeners = Listeners(
            self.config,
            {**handlers, commands.Flow: self._flow},
            server_version="duelog-test",
            gone=self.gone.append,
            admission=partial(self._login, authentication or Authentication({})),
        )

    def _login(self, authentication: Authentication, connection: Connection, session: Session, fail: Fail) -> Login:
        self.logins.append(Login(authentication, session, lambda: self.now_ms, _CHECK_S, fail))
        return self.logins[-1]

    def look_at_credentials(self) -> None:
        """Look whether those of any connection have expired."""
        for login in self.logins:
            login._check()

    async def has_answers(self) -> None:
        """Wait until every connection that was asked for new credentials has given some that will do."""
        while any(login._challenged for login in self.logins):
            await asyncio.sleep(0)

    def _flow(self, connection: Connection, command: commands.Flow, blob: memoryview) -> None:
        """FLOW shows the connection to the test."""
        self.seen.append(connection)
        connection.send(commands.Success(command.permits))

    async def meet(self, client: RawClient) -> Connection:
        """The broker's side of a client's connection."""
        assert await client.ask(commands.Flow(1, 77)) == commands.Success(77)
        return self.seen[-1]


@asynccontextmanager
async def serving(
    handlers: Mapping[Any, Handler] | None = None, authentication: Authentication | None = None, **settings: Any
) -> AsyncIterator[Serving]:
    """Listen at a free port of this machine."""
    made = Serving(handlers or {}, authentication, **settings)
    made.port = await made.listeners.listen("broker_service_port")
    try:
        yield made
        end_clients()
    finally:
        made.listeners.stop_accepting()
        await made.listeners.close(1)


@asynccontextmanager
async def served_client(
    handlers: Mapping[Any, Handler] | None = None, **settings: Any
) -> AsyncIterator[tuple[Serving, RawClient]]:
    """Listen, with one client that has said CONNECT."""
    async with serving(handlers, **settings) as server:
        client = await RawClient.connected(server.port)
        yield server, client


async def until(condition: Any) -> None:
    """Let the event loop go on until a condition holds."""

    async def look() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), WITHIN_S)
