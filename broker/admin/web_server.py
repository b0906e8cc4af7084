"""The web server: listening sockets, connections and their end, around one application."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable

from aiohttp import web

from .application import Application


class WebServer:
    """Serves an application at the sockets given to it."""

    def __init__(self, application: Application, shutdown_timeout_s: float = 5.0) -> None:
        """shutdown_timeout_s: what requests under way have to finish in at the end."""
        server = web.Server(application.handle)
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
