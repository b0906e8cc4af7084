"""One connection: a socket's bytes to commands, answers to the socket, its login, and when it is not read.

All of it belongs to the event loop's thread. It is the `Peer` that services see. What it does not know is what any
command but CONNECT, AUTH_RESPONSE, PING and PONG means.

Its write queue is handed to the transport in pieces of at most 64 KiB. The transport keeps at most one piece, so that
the bytes that have left the process are known, and those that a client does not read are bounded here. Everything that
is queued in one turn of the event loop leaves together.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from ...store.errors import DuelogError
from ..configuration import ServiceConfig
from ..protocol import commands
from ..protocol.commands import NO_REQUEST
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.fields import Command, ProtocolError
from ..protocol.frames import head
from ..protocol.states import Session
from ..security.authentication import Authentication, Proven

PIECE = 64 * 1024
"""Bytes handed to a transport at once."""


@dataclass(slots=True, eq=False)
class WriteQueue:
    """Bytes queued for one transport. Runs on the event loop's thread.

    high, low: bytes; `on_low` is called once for every time that the queue was over `high`.
    """

    _transport: asyncio.WriteTransport | None
    _call_soon: Callable[[Callable[[], None]], object]
    _: KW_ONLY
    high: int
    low: int
    on_low: Callable[[], None]
    _chunks: deque[bytes | memoryview] = field(default_factory=deque, init=False)
    _marks: deque[tuple[int, Callable[[], object]]] = field(default_factory=deque, init=False)
    """Values that `left` has to reach, each with the call to make then."""
    is_over: bool = field(default=False, init=False)
    """True from reaching the high mark until falling to the low one."""
    _paused: bool = field(default=False, init=False)
    _scheduled: bool = field(default=False, init=False)
    size: int = field(default=0, init=False)
    """Bytes that were not handed to the transport yet."""
    left: int = field(default=0, init=False)
    """Bytes that have left, to tell whether the client takes any."""
    _stall: tuple[int, float] = field(default=(0, 0.0), init=False)
    """The last seen `left`, and the time since which it has not grown."""

    def __post_init__(self) -> None:
        if self._transport is not None:  # over TLS 0 bytes are as many as 0, and an empty one is full
            self._transport.set_write_buffer_limits(high=1, low=0)

    @property
    def is_empty(self) -> bool:
        return not self.size and not self._paused

    def stalled_s(self, now: float) -> float:
        """For how long the client has taken nothing of what waits, as far as calls of this have seen."""
        if self.is_empty or self.left != self._stall[0]:
            self._stall = (self.left, now)
        return now - self._stall[1]

    def put(self, head: bytes, blob: bytes | memoryview | None = None) -> None:
        if self._transport is None:
            return
        self._chunks.append(head)
        self.size += len(head)
        if blob is not None:
            self._chunks.append(blob)
            self.size += len(blob)
        if self.size >= self.high:
            self.is_over = True
        if not self._scheduled and not self._paused:
            self._scheduled = True
            self._call_soon(self._flush)

    def on_left(self, call: Callable[[], object]) -> None:
        """Call once, when all that is queued now has left the process, or the connection is gone."""
        if self._transport is None or self.is_empty:
            call()
        else:
            self._marks.append((self.left + self.size, call))

    def pause(self) -> None:
        """The transport could not write all of a piece."""
        self._paused = True

    def resume(self) -> None:
        """The transport has written its piece."""
        self._paused = False
        self._flush()

    def drop(self) -> None:
        self._transport = None
        self._chunks.clear()
        self.size = 0
        self._paused = False
        self._tell()

    def _tell(self) -> None:
        """Make the calls whose mark is reached; all of them where the connection is gone."""
        while self._marks and (self._transport is None or self._marks[0][0] <= self.left):
            self._marks.popleft()[1]()

    def _flush(self) -> None:
        self._scheduled = False
        if self._marks and not self._paused:
            self._tell()
        while self.size and not self._paused and self._transport is not None:
            piece = self._take()
            self.left += len(piece)
            self._transport.write(piece)
            if self._marks and not self._paused:
                self._tell()
        if self.is_over and self.size <= self.low and self._transport is not None:
            self.is_over = False
            self.on_low()

    def _take(self) -> bytes | memoryview:
        chunks, taken, size = self._chunks, [], 0
        while chunks and size + len(chunks[0]) <= PIECE:
            chunk = chunks.popleft()
            taken.append(chunk)
            size += len(chunk)
        if not size:
            view = memoryview(chunks.popleft())
            taken.append(view[:PIECE])
            chunks.appendleft(view[PIECE:])
            size = PIECE
        self.size -= size
        return taken[0] if len(taken) == 1 else b"".join(taken)


_log = logging.getLogger("duelog.broker.connection")

_LINGER_S = 5.0
"""Seconds in which a closing connection may write its queue."""

Handler = Callable[["Connection", Any, memoryview], Awaitable[None] | None]
"""A function that serves a command; an awaitable that it returns is awaited in a task of its own."""

_numbers = itertools.count(1)

Fail = Callable[[ServerError, str], object]
"""Ends a connection with an error."""


class Admission(Protocol):
    """Lets a connection in: a broker's Login, or the proxy's way."""

    @property
    def role(self) -> str | None:
        """None: it has shown no credentials, or the broker asks for none."""

    async def connect(self, command: commands.Connect) -> None:
        """Have the session accept the client, or end the connection."""

    async def respond(self, command: commands.AuthResponse) -> None: ...

    def close(self) -> None: ...


_REFRESH = b"PulsarAuthRefresh"
"""Text of an AUTH_CHALLENGE at which clients fetch new credentials."""


@dataclass(eq=False)
class Login:
    """Credentials of one connection: at CONNECT, and again when they expire. Runs on the event loop's thread.

    clock: ms since 1970. check_s: between two looks at credentials. fail: ends the connection with an error.
    """

    _authentication: Authentication
    _session: Session
    _clock: Callable[[], int]
    _check_s: float
    _fail: Fail
    _proven: Proven | None = None
    _challenged: bool = False
    _timer: asyncio.TimerHandle | None = None
    _closed: bool = False

    @property
    def role(self) -> str | None:
        return None if self._proven is None else self._proven.role

    async def connect(self, command: commands.Connect) -> None:
        """Look at the credentials of CONNECT. Those that expire are looked at again."""
        try:
            self._proven = await self._authentication.begin(command)
        except Refused as error:
            self._fail(error.error, error.message)
            return
        if self._proven.expires_ms is not None:
            self._check_later()
        self._session.accept()

    async def respond(self, command: commands.AuthResponse) -> None:
        """Take new credentials, of the same role."""
        if self._proven is None:
            return
        try:
            self._proven = await self._authentication.respond(self._proven, command)
            self._challenged = False
        except Refused as error:
            self._fail(error.error, error.message)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        if not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._check_s, self._check)

    def _check(self) -> None:
        """Ask for new credentials once they have expired; end the connection where none came by the next check."""
        proven = self._proven
        if proven is not None and proven.expires_ms is not None and self._clock() >= proven.expires_ms:
            if self._challenged or not self._session.flags.supports_auth_refresh:
                self._fail(ServerError.AUTHENTICATION, "the credentials have expired")
                return
            self._challenged = True
            self._session.challenge(commands.AuthData(proven.method, _REFRESH))
        self._check_later()


@dataclass(slots=True)
class Environment:
    """Values that all connections of a broker share."""

    config: ServiceConfig
    server_version: str
    admission: "Callable[[Connection, Session, Fail], Admission]"
    handlers: Mapping[type[Command], Handler]
    admit: "Callable[[Connection], str | None]"
    """Count a connection; why it is not let in, None: it is."""
    gone: "Callable[[Connection], None]"
    """Called when a connection has ended, once, never from inside one of its calls."""


class Connection(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, environment: Environment) -> None:
        self.number = next(_numbers)
        self.since_ms = time.time_ns() // 1_000_000
        self.address = self.host = ""
        self.role: str | None = None
        self._environment = environment
        self._loop = asyncio.get_running_loop()
        config = environment.config
        self._session = Session(
            self.send,
            self._loop.time(),
            server_version=environment.server_version,
            max_message_size=config.max_message_size,
            keep_alive_s=config.keep_alive_interval_seconds,
            handshake_s=config.handshake_timeout_seconds,
        )
        self._transport: asyncio.Transport | None = None
        self._queue: WriteQueue | None = None
        self._closing = self._ended = False
        self._paused: set[str] = set()
        self._reading = False
        """True while `_process` is on the stack."""
        self._requests: set[asyncio.Task[None]] = set()
        self._pongs: list[asyncio.Future[bool]] = []
        self._on_writable: list[Callable[[], object]] = []
        self._login = environment.admission(self, self._session, self._fail)
        self._sink: Callable[[bytes], object] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    # -- as services see it ----------------------------------------------------------------------

    @property
    def client_version(self) -> str:
        return self._session.client_version

    @property
    def connect(self) -> commands.Connect:
        return self._session.connect

    @property
    def protocol_version(self) -> int:
        return self._session.protocol_version

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def writable(self) -> bool:
        return not self._closing and self._queue is not None and not self._queue.is_over

    def send(self, command: Command, blob: bytes | memoryview | None = None) -> None:
        self.send_frames(head(command, 0 if blob is None else len(blob)), blob)

    def send_frames(self, frames: bytes, blob: bytes | memoryview | None = None) -> None:
        queue = self._queue
        if self._closing or queue is None:
            return
        queue.put(frames, blob)
        if queue.is_over:
            self.pause_reading("output")

    def close(self, reason: str) -> None:
        if self._closing or self._transport is None:
            return
        _log.info("connection %d of %s is closed: %s", self.number, self.address, reason)
        self._closing = True
        self._session.close()
        self._stop_reading()
        self._loop.call_soon(self._end)
        self._timers.append(self._loop.call_later(_LINGER_S, self.abort))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def on_writable(self, call: Callable[[], object]) -> None:
        if self.writable:
            self._loop.call_soon(call)
        else:
            self._on_writable.append(call)

    def on_left(self, call: Callable[[], object]) -> None:
        if self._queue is None:
            call()
        else:
            self._queue.on_left(call)

    def pause_reading(self, reason: str) -> None:
        self._paused.add(reason)
        self._stop_reading()

    def resume_reading(self, reason: str) -> None:
        if reason in self._paused:
            self._paused.discard(reason)
            if not self._paused and not self._closing:
                self._loop.call_soon(self._process)

    def splice(self, sink: Callable[[bytes], object]) -> None:
        """Hand on what came and was not read, and what comes from now on, as it is; `send_frames` takes what goes back.

        The connection asks the client nothing more, not even whether it is there.
        """
        self._sink = sink
        rest = self._session.surrender()
        if rest:
            sink(rest)

    async def ping(self, within_s: float) -> bool:
        if self._closing:
            return False
        if self._paused:
            return True
        pong = self._loop.create_future()
        self._pongs.append(pong)
        self.send(commands.Ping())
        timer = self._loop.call_later(within_s, partial(_resolve, pong, answered=False))
        try:
            return bool(await pong)
        finally:
            timer.cancel()
            self._pongs = [each for each in self._pongs if each is not pong]

    @property
    def figures(self) -> tuple[int, int, Collection[str]]:
        """Bytes queued, requests under way, and why the connection is not read."""
        return 0 if self._queue is None else self._queue.size, len(self._requests), self._paused

    # -- as the event loop sees it ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        if peer:
            self.host, self.address = peer[0], f"{peer[0]}:{peer[1]}"
        config = self._environment.config
        self._queue = WriteQueue(
            transport,
            self._loop.call_soon,
            high=config.write_high_mark,
            low=config.write_low_mark,
            on_low=self._below_low_mark,
        )
        refusal = self._environment.admit(self)
        if refusal is not None:
            self._fail(ServerError.NOT_ALLOWED, refusal)
            return
        self._check_later(min(config.handshake_timeout_seconds, config.keep_alive_interval_seconds))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closing:
            _log.info("connection %d of %s is gone%s", self.number, self.address, f": {exc}" if exc else "")
        self._closing = True
        self._session.close()
        self._login.close()
        for timer in self._timers:
            timer.cancel()
        for pong in self._pongs:
            _resolve(pong, answered=False)
        self._on_writable.clear()
        if self._queue is not None:
            self._queue.drop()
        self._loop.call_soon(self._environment.gone, self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._sink is not None:
            self._sink(data)
            return
        self._session.feed(data, self._loop.time())
        self._process()

    def pause_writing(self) -> None:
        if self._queue is not None:
            self._queue.pause()

    def resume_writing(self) -> None:
        if self._queue is not None:
            self._queue.resume()
            if self._closing:
                self._end()

    # -- commands --------------------------------------------------------------------------------

    def _process(self) -> None:
        """Serve what was read, until something asks for a pause."""
        if self._reading:
            return
        self._reading = True
        handlers, session, paused = self._environment.handlers, self._session, self._paused
        try:
            while not paused and not self._closing and (received := session.next()) is not None:
                command, blob = received
                handler = handlers.get(type(command))
                if handler is None:
                    self._own(command)
                    continue
                try:
                    waiting = handler(self, command, blob)
                except (Refused, DuelogError) as error:
                    self._refuse(command, error)
                else:
                    if waiting is not None:
                        self._start(self._await_answer(command, waiting))
        except ProtocolError as error:
            self.close(str(error))
        except Exception:
            _log.exception("connection %d of %s is closed", self.number, self.address)
            self._fail(ServerError.UNKNOWN, "the broker has failed to serve a command")
        finally:
            self._reading = False
        if not paused and not self._closing and self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    def _own(self, command: Command) -> None:
        """Serve a command that is the connection's own affair."""
        if isinstance(command, commands.Connect):
            self._start(self._connect(command))
        elif isinstance(command, commands.AuthResponse):
            self._start(self._login.respond(command))
        elif isinstance(command, commands.Pong):
            for pong in self._pongs:
                _resolve(pong, answered=True)
        else:
            self._refuse(command, Refused(ServerError.NOT_ALLOWED, f"{type(command).__name__} is not offered"))

    async def _connect(self, command: commands.Connect) -> None:
        await self._login.connect(command)
        self.role = self._login.role

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        requests = self._requests
        requests.add(task)
        task.add_done_callback(self._finished)
        if len(requests) >= self._environment.config.max_pending_requests:
            self.pause_reading("requests")

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if len(self._requests) <= self._environment.config.max_pending_requests // 2:
            self.resume_reading("requests")

    async def _await_answer(self, command: Command, waiting: Awaitable[None]) -> None:
        try:
            await waiting
        except (Refused, DuelogError) as error:
            self._refuse(command, error)
        except ProtocolError as error:
            self.close(str(error))
        except Exception as error:
            _log.exception("%s of connection %d of %s failed", type(command).__name__, self.number, self.address)
            self._refuse(command, error)

    def _refuse(self, command: Command, error: Exception) -> None:
        """Answer a command that no service has answered; one without an answer ends the connection."""
        number = server_error(error)
        told = isinstance(error, (Refused, DuelogError))
        text = str(error) if told else "the broker has failed to serve the request"
        answer = commands.refusal(command, number, text)
        if answer is None:
            self._fail(number, text)
        else:
            self.send(answer)

    def _fail(self, error: ServerError, text: str) -> None:
        """An error beside any request ends the connection."""
        self.send(commands.Error(NO_REQUEST, error, text))
        self.close(text)

    # -- time ------------------------------------------------------------------------------------

    def _check_later(self, delay: float) -> None:
        self._timers = [each for each in self._timers if not each.cancelled() and each.when() > self._loop.time()]
        self._timers.append(self._loop.call_later(delay, self._check))

    def _check(self) -> None:
        if self._closing:
            return
        now = self._loop.time()
        try:
            following = now + self._environment.config.keep_alive_interval_seconds
            if self._sink is None:
                following = self._session.check(now, reading=not self._paused)
        except ProtocolError as error:
            self.close(str(error))
            return
        queue, limit = self._queue, self._environment.config.write_stall_seconds
        if queue is not None and queue.stalled_s(now) >= limit:
            self.close(f"the client has read nothing for {limit:g} s")
            return
        self._check_later(max(0.01, following - now))

    # -- helpers ---------------------------------------------------------------------------------

    def _below_low_mark(self) -> None:
        self.resume_reading("output")
        calls, self._on_writable = self._on_writable, []
        for call in calls:
            self._loop.call_soon(call)

    def _stop_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def _end(self) -> None:
        """Say that nothing more comes, once all has left, and let the client end the connection.

        Closed at once, with bytes in it that were not read, the connection would be reset, and what the client has not
        read yet be lost.
        """
        if self._transport is None or self._queue is None or not self._queue.is_empty or self._ended:
            return
        self._ended = True
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()
                self._transport.resume_reading()
                return
        except OSError:
            pass  # the client was quicker
        self._transport.close()


def _resolve(pong: asyncio.Future[bool], *, answered: bool) -> None:
    if not pong.done():
        pong.set_result(answered)
