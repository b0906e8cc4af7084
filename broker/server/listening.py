"""Listening sockets, and the connections that came by them: how many there may be, and how they end."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...store.errors import InvalidArgument
from ..configuration import ServiceConfig
from ..protocol.fields import Command
from ..protocol.states import Session
from .connection import Admission, Connection, Environment, Fail, Handler

_log = logging.getLogger("duelog.broker")

BACKLOG = 1_024


async def open_sockets(config: ServiceConfig, port_field: str) -> tuple[list[socket.socket], int]:
    """Sockets that listen at `bindAddress` and the port of a setting; and the port. Raises InvalidArgument."""
    host, port = config.bind_address, getattr(config, port_field)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise InvalidArgument("bindAddress", host, f"no address to listen at: {error.strerror}") from error
    asked = port
    opened: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            opened.append(_open(family, (address[0], port, *address[2:])))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or (not asked and opened):
                failure = failure or error  # no IPv6 here; or a free port that is free at one address alone
                continue
            for each in opened:
                each.close()
            raise InvalidArgument(config.in_file(port_field), port, _why(error, str(address[0]))) from error
        port = opened[-1].getsockname()[1]
    if not opened:
        reason = "there is no such address" if failure is None else _why(failure, host)
        raise InvalidArgument("bindAddress", host, reason)
    return opened, int(port)


def _open(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.create_server(address, family=family, backlog=BACKLOG)
    # asyncio sends at once, without Nagle's wait for what went before, where the protocol is named, as it is here.
    return socket.socket(fileno=listener.detach())


def _why(error: OSError, address: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"another program listens there, at {address}"
    if error.errno == errno.EACCES:
        return f"this user may not listen there, at {address}"
    return f"nothing can listen there, at {address}: {os.strerror(error.errno or 0)}"


_TLS_SHUTDOWN_S = 5.0


class Listeners:
    """Sockets that accept clients, and the clients. Of the event loop's thread."""

    def __init__(
        self,
        config: ServiceConfig,
        handlers: Mapping[type[Command], Handler],
        *,
        server_version: str,
        gone: Callable[[Connection], object],
        admission: Callable[[Connection, Session, Fail], Admission],
    ) -> None:
        """gone: called once for each connection that was let in, when it has ended. admission: lets one in."""
        self._config = config
        self._gone = gone
        self._environment = Environment(config, server_version, admission, handlers, self._admit, self._forget)
        self.refused = 0
        """Connections that were not let in, as there were too many."""
        self._servers: list[asyncio.Server] = []
        self._connections: dict[int, Connection] = {}
        self._of_host: Counter[str] = Counter()
        self._admitted = 0
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections.values()))

    async def listen(self, port_field: str, context: ssl.SSLContext | None = None) -> int:
        """Accept clients at the port of a setting; the port. Raises InvalidArgument if that cannot be."""
        found, port = await open_sockets(self._config, port_field)
        for each in found:
            server = await asyncio.get_running_loop().create_server(
                lambda: Connection(self._environment),
                sock=each,
                backlog=BACKLOG,
                ssl=context,
                ssl_handshake_timeout=self._config.handshake_timeout_seconds if context else None,
                ssl_shutdown_timeout=_TLS_SHUTDOWN_S if context else None,
            )
            self._servers.append(server)
        return port

    @property
    def counts(self) -> tuple[int, int, int]:
        """Connections admitted, refused and closed since the start."""
        return self._admitted, self.refused, self._admitted - len(self._connections)

    # -- connections -----------------------------------------------------------------------------

    def _admit(self, connection: Connection) -> str | None:
        host, count = connection.host, len(self._connections)
        refusal = None
        if count >= self._config.broker_max_connections:
            refusal = f"the broker has {count} connections"
        elif self._of_host[host] >= self._config.broker_max_connections_per_ip:
            refusal = f"your address has {self._of_host[host]} connections"
        if refusal is not None:
            _log.warning("connection of %s is refused: %s", connection.address, refusal)
            self.refused += 1
            return refusal
        self._admitted += 1
        self._connections[connection.number] = connection
        self._of_host[host] += 1
        self._all_gone.clear()
        return None

    def _forget(self, connection: Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return  # it was not let in
        self._of_host[connection.host] -= 1
        if not self._of_host[connection.host]:
            del self._of_host[connection.host]
        try:
            self._gone(connection)
        finally:
            if not self._connections:
                self._all_gone.set()

    # -- the end ---------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def close(self, within_s: float) -> None:
        """Close every connection once what is queued has left; those that take longer, all the same."""
        for connection in self:
            connection.close("the broker is shutting down")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_gone.wait(), within_s)
        for connection in self:
            connection.abort()
        await self._all_gone.wait()
