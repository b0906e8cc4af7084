"""Encrypted connections of both ends: what OpenSSL asks for beyond a plain socket."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Callable


class EncryptedSocket:
    """An encrypted connection that one thread reads while others write, each for a moment alone, as OpenSSL demands."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """connection: shaken hands with."""
        connection.setblocking(False)
        self._connection = connection
        self._lock = threading.Lock()
        self._timeout_s: float | None = None
        self.shutdown, self.close, self.fileno = connection.shutdown, connection.close, connection.fileno

    def settimeout(self, seconds: float | None) -> None:
        """Have a call end with TimeoutError where it waits for longer."""
        self._timeout_s = seconds

    def pending(self) -> int:
        """Bytes that have come and are not received, which no poll tells of."""
        with self._lock:
            return self._connection.pending()

    def recv_into(self, room: memoryview) -> int:
        """Receive some bytes; how many, 0: the other end has closed."""
        return self._done(lambda: self._connection.recv_into(room))

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._done(lambda: self._connection.send(view)) :]  # noqa: B023 - it is called here

    def _done(self, call: Callable[[], int]) -> int:
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            waiting = select.poll()
            waiting.register(self._connection, event)
            if not waiting.poll(None if self._timeout_s is None else self._timeout_s * 1_000):
                raise TimeoutError("the other end does not answer")


class EncryptedPeer:
    """The server's end: a socket that does not wait. REQUIRES: one thread at a time."""

    def __init__(self, context: ssl.SSLContext, connection: socket.socket) -> None:
        """Hands are shaken with the first bytes."""
        self._connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        self.fileno, self.close, self.pending = (
            self._connection.fileno,
            self._connection.close,
            self._connection.pending,
        )
        self.stuck = False
        """True while it has to be read before it is written."""

    def recv_into(self, room: memoryview) -> int:
        """Receive some bytes. Raises BlockingIOError where there are none."""
        self.stuck = False
        try:
            return self._connection.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes) -> int:
        """Send some bytes; how many. Raises BlockingIOError where none can be."""
        try:
            return self._connection.send(data)
        except ssl.SSLWantReadError:
            self.stuck = True
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
