"""One connection to an open store: requests are cut out of what comes, and answers go out, both within bounds.

The server's thread reads. Answers are sent by whoever has them; what the socket does not take, the thread sends later.
A peer costs no more than its bounds: bytes of a frame, requests that are not answered, answers that it does not read.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from duelog.store.errors import InvalidArgument

from ..stats import ClientPart, ClientStats
from . import wire_values
from .operation import Right
from .wire import ERROR, MOST_GREETING_BYTES, RESULT, Frames, NotAllowed, framed
from .wire_calls import Guard, Service, WireCalls, closing
from .wire_values import pack, pack_error, unpack, unpack_plain

Admit: TypeAlias = Callable[[str, bytes], Guard]
"""Says what a client may do, by its method and credentials. In a thread that may wait. Raises NotAllowed."""

MOST_REQUESTS = 1_024
"""Requests of a connection that are not answered; further ones are not read."""

MOST_UNREAD_BYTES = 16 << 20
"""Bytes of answers that a peer has not read; its requests are not read meanwhile."""

STALLED_S = 30.0
"""How long a peer may leave its answers unread, or a frame without its end."""

_REQUEST = [int, str, list, list, dict]
"""Types of the parts of a request."""

_log = logging.getLogger("duelog.control")


class WirePeer:
    """One connection. The fields that the server's thread alone uses stand first."""

    def __init__(
        self,
        service: Service,
        connection: Any,
        admit: Admit | None,
        ended: Callable[[], object],
        address: str = "",
        since_ms: int = 0,
    ) -> None:
        """connection: a socket that does not wait. admit: None: its client need prove nothing.

        ended: called once nothing of it is left. address, since_ms: where its client is, and when it came.
        """
        self._address, self._since_ms = address, since_ms
        self._service = service
        self._socket = connection
        self._frames = Frames(service.most_bytes if admit is None else MOST_GREETING_BYTES)
        self._admit = admit
        self._ended = ended
        self._is_encrypted = type(connection) is not socket.socket
        self._events = 0
        """Events that the selector looks for; 0: it is not in the selector."""
        self._held = False
        """True while it is not read: something that it asked for has no capacity, or its credentials are checked."""
        self._corked: list[bytes] | None = None
        self._requests: deque[bytes | memoryview] = deque()
        """Those that have come, and wait because others are under way."""
        self._since = time.monotonic()
        """When it last was as it should be: its answers read, its frames whole."""
        self._came = self._since
        self.calls = WireCalls(service, self)
        self._begun = 0
        """Requests that have come."""
        self._lock = threading.Lock()
        """Held to change the fields below, and while something is sent."""
        self._answered = 0
        self._outbox: deque[bytes] = deque()
        self.unread = 0
        self.closed = False

    @property
    def under_way(self) -> int:
        """Requests that are not answered."""
        return self._begun - self._answered

    def stats(self) -> ClientStats:
        """Figures of its client. Of any thread."""
        calls, parts = self.calls, list(self.parts())
        consumers = [each for each in parts if each.subscription is not None]
        name, version = calls.introduced
        return ClientStats(
            f"duelog {version}".rstrip(),
            name,
            "worker" if calls.reports else "program",
            self._address,
            self._since_ms,
            len(parts) - len(consumers),
            len(consumers),
            sum(each.permits or 0 for each in consumers),
            sum(each.held or 0 for each in consumers),
            None,
            None,
            tuple(sorted({each.topic for each in parts})),
        )

    def parts(self) -> Iterator[ClientPart]:
        """Its producers, which are the topics that it sends to, and consumers. Of any thread."""
        for topic, _ in self.calls.producers():
            yield ClientPart(self._address, "", topic, None, None, None, None, None, None)
        for each in list(self.calls.consumers.values()):
            topic, name, held = each.subscription.topic, each.subscription.name, each.subscription.held
            permits = sum(most for _, most, _ in list(each.credits))
            yield ClientPart(self._address, "", topic, name, permits, held, None, None, None)

    # -- of the thread ---------------------------------------------------------------------------------

    def watch(self) -> None:
        """Have the selector look for what is wanted now."""
        if self.closed:
            return
        selector = self._service.loop.selector
        wanted = selectors.EVENT_WRITE if self._outbox and not getattr(self._socket, "stuck", False) else 0
        if not (self._held or self._requests) and self.under_way < MOST_REQUESTS and self.unread < MOST_UNREAD_BYTES:
            wanted |= selectors.EVENT_READ
        if wanted != self._events:
            if not self._events:
                selector.register(self._socket, wanted, self._on_events)
            elif not wanted:
                selector.unregister(self._socket)
            else:
                selector.modify(self._socket, wanted, self._on_events)
            self._events = wanted

    def _on_events(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush()
            if events & selectors.EVENT_READ:
                self._read()
        except Exception as error:
            self._service.log_error("a connection is ended", error)
            self.part()

    def _read(self) -> None:
        if self.closed:
            return
        is_amid = self._frames.begun
        try:
            if self._is_encrypted:
                with self._lock:  # it is read and written by one thread at a time
                    bodies = self._frames.receive(self._socket, self._service.buffer)
            else:
                bodies = self._frames.receive(self._socket, self._service.buffer)
        except BlockingIOError:
            self._flush()
            return
        except OSError:
            bodies = None
        except InvalidArgument as error:
            self._refuse(error)
            return
        if bodies is None:
            self.part()
            return
        if bodies or not is_amid:
            self._since = time.monotonic()
        if bodies:
            self._take(bodies)
        if self._is_encrypted and not self.closed and (self._socket.pending() or self._outbox):
            self._service.loop.later(self._read)  # which the selector does not tell

    def _take(self, bodies: Sequence[bytes | memoryview] = ()) -> None:
        """Take requests that have come; what is answered meanwhile is sent as one piece. Those too many wait."""
        self._corked = []
        broken: InvalidArgument | None = None
        waiting = self._requests
        try:
            waiting += bodies
            while waiting and not (self.closed or self._held) and self._begun - self._answered < MOST_REQUESTS:
                body = waiting.popleft()
                try:
                    request = unpack(body) if self._admit is None else unpack_plain(body)
                except InvalidArgument as error:
                    self._refuse_one(body, error)
                    continue
                self._request(request)
            if waiting:
                self._requests = deque(map(bytes, waiting))  # the buffer is used again
        except InvalidArgument as error:
            broken = error
        finally:
            corked, self._corked = self._corked, None
            if corked:
                self._send(corked)
        if broken is not None:
            self._refuse(broken)
        self.watch()

    def _request(self, request: Any) -> None:
        """Begin to do a request. Raises InvalidArgument for what is none."""
        if type(request) is not list or [*map(type, request)] != _REQUEST or not 0 < request[0] < 1 << 62:
            raise InvalidArgument("request", request, "expected [number, operation, target, arguments, named]")
        number, name, target, arguments, named = request
        self._begun += 1
        if self._service.closing:
            self.answer(number, ERROR, closing())
        elif self._admit is not None:
            self._held = True  # a password takes a thread of all connections 50 ms: one at a time
            self._service.loop.pool.submit(lambda: self._let_in(number, name, arguments))
        else:
            self.calls.begin(number, name, target, arguments, named)

    def _refuse_one(self, body: bytes | memoryview, error: InvalidArgument) -> None:
        """Answer a request whose arguments cannot be read. Raises InvalidArgument if it is none."""
        number = wire_values.number_of(body)
        if not number or body[0] != 0x95:
            raise error
        self._begun += 1
        self.answer(number, ERROR, error)

    def _refuse(self, error: InvalidArgument) -> None:
        """End a connection whose stream is of no use any more."""
        self.say(0, ERROR, error)
        self.part()

    def end_if_stalled(self, now: float) -> None:
        """End it where its peer does not go on."""
        if now - (self._since if self._admit is None else self._came) <= STALLED_S:
            return
        if self.unread or self._frames.begun or self._admit is not None:
            _log.info("%s: a connection ends: its peer does not go on", self._service.path)
            self.part()
        self._since = now

    def end_if_expired(self) -> None:
        """End it where its client's credentials have expired: what its consumers hold would never go to others."""
        try:
            if self.calls.guard is not None:
                self.calls.guard(Right.NONE, None)
        except NotAllowed as error:
            _log.info("%s: a connection ends: %s", self._service.path, error)
            self.say(0, ERROR, error)
            self.part()

    def part(self) -> None:
        """End it: what its consumers hold is handed to others."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if self._events:
                self._service.loop.selector.unregister(self._socket)
            self._socket.close()  # while no other thread sends: its number is the next connection's
        self.calls.leave(self._ended)

    def close_socket(self) -> None:
        """Close what is the parent's, in a child after fork."""
        self._socket.close()

    def hold(self, *, held: bool) -> None:
        """Read nothing more, or go on."""
        self._held = held
        if not held:
            self._take()

    # -- answers, from any thread ----------------------------------------------------------------------

    def _let_in(self, number: int, name: str, arguments: list[Any]) -> None:
        """Check its credentials, without which nothing else is done; what comes behind waits until then."""
        try:
            match name, arguments:
                case "hello", [str(method), bytes(credentials)] if self._admit is not None:
                    self.calls.guard = self._admit(method, credentials)
                case _:
                    raise NotAllowed("credentials are missing: the first request is hello")
            self._frames.most_bytes, self._admit = self._service.most_bytes, None
            self.answer(number, RESULT, None)
        except BaseException as error:
            self.calls.fail(number, "hello", error)
        finally:
            self._service.loop.later(lambda: self.hold(held=False))

    def answer(self, number: int, kind: int, value: object) -> None:
        try:
            body = pack_error(value) if isinstance(value, BaseException) else pack(value)
        except BaseException as error:
            kind, body = ERROR, pack_error(error)
        self.answered([wire_values.answer(number, kind, body)])

    def answered(self, frames: Sequence[bytes]) -> None:
        """Send the answers of as many requests."""
        self._send(frames, len(frames))

    def say(self, number: int, kind: int, error: BaseException) -> None:
        """Send what is no answer."""
        self._send([wire_values.answer(number, kind, pack_error(error))])

    def greet(self, greeting: list[object]) -> None:
        """Send the first frame, and read requests. Of the thread."""
        self._send([framed(pack(greeting))])
        self.watch()

    def _send(self, frames: Sequence[bytes], answered: int = 0) -> None:
        """Send frames, answers of some requests. What the socket does not take is sent as it does."""
        if self._corked is not None and self._service.loop.is_here:
            self._corked += frames
            frames = ()
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        with self._lock:
            self._answered += answered
            full = answered and self._begun - self._answered + answered >= MOST_REQUESTS  # or was until just now
            if data and not self.closed:
                rest = data if self._outbox else self._given(data)
                if rest:
                    self._outbox.append(rest)
                    self.unread += len(rest)
            stuck = bool(self._outbox)
        if full:
            self._service.loop.later(self._take)
        if stuck:
            self._service.loop.later(self.watch)

    def _given(self, data: bytes) -> bytes:
        """Send some data; the rest of it, which the socket does not take. REQUIRES: the lock."""
        try:
            taken = self._socket.send(data)
        except BlockingIOError:
            return data
        except OSError:  # it is gone, which reading tells
            return b""
        self._since = time.monotonic()
        return data[taken:]

    def _flush(self) -> None:
        with self._lock:
            while self._outbox:
                data = self._outbox.popleft()
                rest = self._given(data)
                self.unread -= len(data) - len(rest)
                if rest:
                    self._outbox.appendleft(rest)
                    break
        self._take()
