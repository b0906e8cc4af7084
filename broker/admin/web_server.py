"""The web server: listening sockets, connections and their end, around one application."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from .application import Application


def _in_one_line(record: logging.LogRecord) -> bool:
    """Have a request that is no HTTP be a line of its own, without a traceback: anybody can send one."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg += ": %s"
        record.args = (*(record.args or ()), " ".join(str(error).split())[:200])
        record.exc_info = None
    return True


_log = logging.getLogger("duelog.broker.http")
_log.addFilter(_in_one_line)


class _Limited(web.Server):
    """Makes the protocol of each connection; of one too many, one that closes it."""

    max_connections = 0

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override]
        return super().__call__() if len(self.connections) < self.max_connections else _Refusing()


class _Refusing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class WebServer:
    """Serves an application at the sockets given to it."""

    def __init__(
        self, application: Application, *, max_connections: int = 2_048, shutdown_timeout_s: float = 5.0
    ) -> None:
        """max_connections: those over it are closed. shutdown_timeout_s: for requests under way at the end."""
        server = _Limited(application.handle, logger=_log)
        server.max_connections = max_connections
        self._runner = web.ServerRunner(server, access_log=None, shutdown_timeout=shutdown_timeout_s)

    async def serve(self, sockets: Iterable[socket.socket], context: ssl.SSLContext | None = None) -> None:
        """Accept clients at bound sockets, which are the server's then; context: by TLS."""
        if self._runner.server is None:
            await self._runner.setup()
        for each in sockets:
            await web.SockSite(self._runner, each, ssl_context=context).start()

    async def close(self) -> None:
        """Accept no more, let requests finish, and close all connections."""
        await self._runner.cleanup()
