"""Sockets to a server over TCP: `duelog://host:port`, encrypted as `duelog+ssl://host:port`."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duelog.store.errors import InvalidArgument

from .wire import Disconnected

_ADDRESS = re.compile(r"duelog(\+ssl)?://(\[[^\]]+\]|[^/:@?#\s]+):([0-9]{1,5})/?")
_WITHIN_S = 10.0

SILENT_S = 30
"""Seconds for which the other end of a connection over TCP may be out of reach; then the connection is dead."""


def is_address(place: str) -> bool:
    """Return True if a place is meant as an address.

    >>> is_address("duelog://localhost:6700/"), is_address("data")
    (True, False)
    """
    return place.startswith(("duelog://", "duelog+ssl://"))


def watch_peer(connection: socket.socket) -> None:
    """Have a connection over TCP send at once, and end when its peer has not answered for `SILENT_S`.

    Without data under way it is asked after a third of that; with data that is when none has been confirmed.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {
        "TCP_KEEPIDLE": max(SILENT_S // 3, 1),
        "TCP_KEEPINTVL": max(SILENT_S // 6, 1),
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": SILENT_S * 1_000,
    }
    for name, value in times.items():
        if (option := getattr(socket, name, None)) is not None:  # Linux has all, others some
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def connecting(place: str, trust: Path | None) -> Callable[[], Any]:
    """Return what connects to an address; None from it: nobody listens. Raises InvalidArgument, Disconnected.

    trust: certificates in PEM; None: those of this machine.
    """
    match = _ADDRESS.fullmatch(place)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise InvalidArgument("place", place, "expected duelog://host:port or duelog+ssl://host:port")
    encrypted, host, port = match[1] is not None, match[2].strip("[]"), int(match[3])
    context = None
    if encrypted:
        import ssl  # noqa: PLC0415 - much to import for those that do without

        from .wire_tls import EncryptedSocket  # noqa: PLC0415 - likewise

        try:
            context = ssl.create_default_context(cafile=trust)
        except OSError as error:
            raise InvalidArgument("tls_trust", str(trust), f"cannot be read: {error}") from error

    def connect() -> Any:
        try:
            connection = socket.create_connection((host, port), _WITHIN_S)
        except ConnectionRefusedError:
            return None
        except OSError as error:
            raise Disconnected(f"{place}: cannot be reached: {error}") from error
        watch_peer(connection)
        if context is None:
            return connection
        try:
            return EncryptedSocket(context.wrap_socket(connection, server_hostname=host))
        except OSError as error:
            connection.close()
            raise Disconnected(f"{place}: cannot be trusted: {error}") from error

    return connect
