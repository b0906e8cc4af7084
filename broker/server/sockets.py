"""Sockets that listen, at every address that a name has."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

from ...store.errors import InvalidArgument
from .configuration import BrokerConfig, in_file

BACKLOG = 1_024


async def open_sockets(config: BrokerConfig, port_field: str) -> tuple[list[socket.socket], int]:
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
            raise InvalidArgument(in_file(port_field), port, _why(error, str(address[0]))) from error
        port = opened[-1].getsockname()[1]
    if not opened:
        reason = "there is no such address" if failure is None else _why(failure, host)
        raise InvalidArgument("bindAddress", host, reason)
    return opened, int(port)


def _open(family: int, address: tuple[Any, ...]) -> socket.socket:
    # asyncio sends at once, without Nagle's wait for what went before, where the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _why(error: OSError, address: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"another program listens there, at {address}"
    if error.errno == errno.EACCES:
        return f"this user may not listen there, at {address}"
    return f"nothing can listen there, at {address}: {error.strerror}"
