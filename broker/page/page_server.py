"""The page of one store, for those who have the token: what `duelog ui` serves.

Each start has a token of its own, in the address that it prints: other users of the machine reach its ports too. The
browser keeps it in the tab, and shows it as a Bearer token with every question.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from ...operations.operations import Ask
from ..admin.application import Application
from ..admin.web_server import WebServer
from ..protocol.loop_calls import Workers
from ..security.authentication import Authentication, InvalidCredentials, Proven
from ..security.permissions import Action, Permissions
from .operation_resource import OperationResource
from .page_files import PageFiles

_THREADS = 4
_ROLES = ("administrator", "viewer")


class _OneToken:
    """Takes one token. Thread-safe."""

    def __init__(self, token: str, role: str) -> None:
        self._token, self._role = token.encode(), role

    def prove(self, data: bytes) -> Proven:
        if not hmac.compare_digest(data, self._token):
            raise InvalidCredentials("the token is of another start of duelog ui: take the address that it printed")
        return Proven(self._role, "token")


class _NoGrants:
    """Namespaces grant nothing."""

    def administrators(self, tenant: str) -> Collection[str]:
        return ()

    def granted(self, namespace: str) -> Mapping[str, Collection[Action]]:
        return {}


async def serve_page(
    ask: Ask,
    announce: Callable[[str], object],
    ended: asyncio.Event,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    only_look: bool = False,
) -> None:
    """Serve until `ended` is set. announce: told the address once it is reached. only_look: nothing can be changed.

    Raises OSError.
    """
    administrator, viewer = _ROLES
    token = secrets.token_urlsafe(24)
    role = viewer if only_look else administrator
    permissions = Permissions(_NoGrants(), (administrator,), (viewer,))
    with ThreadPoolExecutor(_THREADS, "duelog-page") as threads:
        operations = OperationResource(ask, permissions, Workers(threads))
        routes = [*operations.routes(), *PageFiles().routes()]
        server = WebServer(Application(routes, Authentication({"token": _OneToken(token, role)}), permissions))
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            await server.serve([listening])
            shown = f"[{host}]" if ":" in host else host
            announce(f"http://{shown}:{listening.getsockname()[1]}/#token={token}")
            await ended.wait()
        finally:
            operations.watching.close()
            await server.close()
