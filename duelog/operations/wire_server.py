"""The server of an open store: it listens at the store's socket and at addresses, and keeps the connections.

Who is heard at the socket: this user, and root, by the socket's mode and by the peer's credentials. A store works
without a socket: where none can be made that is logged. One thread has all connections (wire_loop.py); what becomes of
one is in wire_peer.py, and the calls that it makes are in wire_calls.py.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

from ..sending.outbox import Outbox
from ..stats import ClientPart, ClientStats
from . import wire_values
from .face_table import FACE
from .operation import Ask
from .wire import ERROR, GREETED, SOCKET, VERSION, Disconnected, address_in
from .wire_address import watch_peer
from .wire_calls import FORGET_S, Service, Store, closing
from .wire_peer import MOST_REQUESTS, Admit, WirePeer
from .wire_values import pack_error

MOST_CLIENTS = 4_096
LAST_ANSWER_S = 2.0
"""How long a peer may leave its answers unread while the store is being closed."""

FRAME_BYTES = 1 << 20
"""Largest frame, besides a whole group of the write-ahead log."""

_PAUSE_S = 1.0
"""How often connections are looked at whose peers may not go on, and when a client is taken that could not be."""

_log = logging.getLogger("duelog.control")


class WireServer:
    """The sockets that listen, and their connections. `stop` and `join` end them."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        """Use `start`."""
        self._service = service
        self._loop = service.loop
        self._peers: set[WirePeer] = set()
        self._is_looking = False
        self._listeners: list[socket.socket] = []
        self._accept_at(listener, None, None)
        _of_process.add(self)

    # -- beginning and end -----------------------------------------------------------------------------

    @classmethod
    def start(cls, store: Store, path: Path, operations: Ask, group_bytes: int, outbox: Outbox) -> Self | None:
        """Listen in the store's directory, whose lock this process has. None: no socket can be made, which is logged.

        group_bytes: of the largest batch. outbox: of the store.
        """
        try:
            with ExitStack() as undo:
                service = Service(store, path, operations, FRAME_BYTES + group_bytes, outbox)
                undo.callback(service.loop.close)
                listener = undo.enter_context(socket.socket(socket.AF_UNIX))
                with address_in(path) as address:
                    with suppress(FileNotFoundError):
                        if not stat.S_ISSOCK(os.lstat(address).st_mode):
                            raise FileExistsError(f"{SOCKET} is no socket")
                        os.unlink(address)  # of a process that was killed
                    listener.bind(address)
                    os.chmod(address, 0o600)  # before it listens: no client has been let in
                listener.listen(128)
                server = cls(service, listener)
                service.loop.at(time.monotonic() + FORGET_S, lambda: service.loop.pool.submit(service.forget_left))
                service.loop.start()
                undo.pop_all()
                return server
        except (OSError, RuntimeError) as error:
            _log.warning("%s: takes no commands while it is open: %s", path, error)
            return None

    def listen(self, host: str, port: int, tls: Any, admit: Admit) -> int:
        """Take clients at an address too, whose credentials `admit` checks; the port. Raises OSError.

        tls: an SSLContext, None: nothing is encrypted.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), backlog=128, family=family)
        encrypt: Callable[[socket.socket], Any] | None = None
        if tls is not None:
            from .wire_tls import EncryptedPeer  # noqa: PLC0415 - ssl is much to import for stores that do without

            encrypt = partial(EncryptedPeer, tls)
        self._loop.later(lambda: self._accept_at(listener, encrypt, admit))
        bound: int = listener.getsockname()[1]
        return bound

    def stop(self) -> None:
        """Take no more clients and no more requests; those that wait come to an end. Of the process that started it."""
        if self._service.closing:
            return
        self._service.closing = True
        with suppress(OSError), address_in(self._service.path) as address:
            os.unlink(address)
        for peer in list(self._peers):
            peer.calls.stop_waiting()

    def join(self) -> None:
        """After `stop`: wait until the requests that were being done are answered."""
        deadline = time.monotonic() + LAST_ANSWER_S
        while (peers := list(self._peers)) and time.monotonic() < deadline:
            if not any(peer.under_way or peer.unread for peer in peers):
                break
            time.sleep(0.001)
        self._loop.end(self._part_all)
        self._close_sockets()

    def _part_all(self) -> None:
        for peer in list(self._peers):
            peer.say(0, ERROR, closing())
            peer.part()

    def forget(self) -> None:
        """In a child after fork: close what is the parent's, so that clients see when the parent ends."""
        for peer in self._peers:
            peer.close_socket()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._loop.close()

    # -- the thread ------------------------------------------------------------------------------------

    def _accept_at(
        self, listener: socket.socket, encrypt: Callable[[socket.socket], Any] | None, admit: Admit | None
    ) -> None:
        """Take clients of a socket that listens."""
        self._listeners.append(listener)
        listener.setblocking(False)
        self._wait_for_clients(listener, partial(self._accept, listener, encrypt, admit))

    def _wait_for_clients(self, listener: socket.socket, accept: Callable[[int], None]) -> None:
        self._loop.selector.register(listener, selectors.EVENT_READ, accept)

    def _accept(
        self, listener: socket.socket, encrypt: Callable[[socket.socket], Any] | None, admit: Admit | None, _: int
    ) -> None:
        try:
            connection, _address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor left
            self._service.log.log(logging.WARNING, "%s: a client cannot be taken: %s", self._service.path, error)
            accept = self._loop.selector.unregister(listener).data
            self._loop.at(time.monotonic() + _PAUSE_S, lambda: self._wait_for_clients(listener, accept))
            return
        connection.setblocking(False)
        if admit is not None:
            watch_peer(connection)
        refusal = None if _is_trusted(connection) else "this user may not"
        if refusal is None and len(self._peers) >= MOST_CLIENTS:
            refusal = f"{MOST_CLIENTS} clients are connected; try again"
        if refusal is not None:
            with connection, suppress(OSError):
                connection.send(wire_values.answer(0, ERROR, pack_error(Disconnected(refusal))))
            return
        address, now_ms = _who(connection), self._service.store.clock.now_ms()
        try:
            connection.getpeername()  # where its client has gone already
            made = connection if encrypt is None else encrypt(connection)
        except OSError:
            connection.close()
            return
        peer = WirePeer(self._service, made, admit, lambda: self._peers.discard(peer), address, now_ms)
        self._peers.add(peer)
        if not self._is_looking:
            self._look_at_peers()
        facts = {
            "server": version("duelog"),
            "pid": os.getpid(),
            "most_frame_bytes": self._service.most_bytes,
            "most_requests": MOST_REQUESTS,
            "most_message_bytes": self._service.store.config.max_message_bytes,
            "capabilities": sorted(FACE),
        }
        peer.greet([GREETED, VERSION, facts])

    def clients(self) -> list[ClientStats]:
        """Who is connected. Of any thread."""
        return [peer.stats() for peer in list(self._peers)]

    def client_parts(self) -> Iterator[ClientPart]:
        """Their producers and consumers. Of any thread."""
        return (part for peer in list(self._peers) for part in peer.parts())

    def _look_at_peers(self) -> None:
        """End connections whose peers do not go on, or may not any more, now and then while there are any."""
        now = time.monotonic()
        for peer in list(self._peers):
            peer.end_if_stalled(now)
            peer.end_if_expired()
        self._is_looking = bool(self._peers)
        if self._is_looking:
            self._loop.at(now + _PAUSE_S, self._look_at_peers)


def _who(connection: socket.socket) -> str:
    """Where a client is: its address, or its process on this machine; empty: it has gone."""
    if connection.family != socket.AF_UNIX:
        with suppress(OSError):
            host, port, *_ = connection.getpeername()
            return f"{host}:{port}"
        return ""
    process, _ = _peer_of(connection)
    return "this machine" if process is None else f"process {process}"


def _is_trusted(connection: socket.socket) -> bool:
    """Return True if a client is of this user, or root; also if the system cannot tell: then the mode must do."""
    _, user = _peer_of(connection)
    return user in (None, os.geteuid(), 0)


def _peer_of(connection: socket.socket) -> tuple[int | None, int | None]:
    """The process and the user at the other end of a Unix socket; None: the system cannot tell."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None or connection.family != socket.AF_UNIX:
        return None, None
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return process, user


_of_process: WeakSet[WireServer] = WeakSet()


def _forget_all() -> None:
    for each in list(_of_process):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
