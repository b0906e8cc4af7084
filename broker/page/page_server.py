"""The page of one store, for those who have the token: what `duelog ui` serves.

Each start has a token of its own, in the address that it prints: other users of the machine reach its ports too. The
browser keeps it in the tab, and shows it as a Bearer token with every question.

Its files are what `make page` has built, or a line that says that nothing was. Every answer forbids the browser all but
what comes from here: no script, style or frame of others, none that stands in the page itself, and no form that is
sent.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from importlib.resources.abc import Traversable

from ...operations.operation import Ask
from ..admin.application import Application, WebServer
from ..admin.http_request import HttpError, Reply, Request
from ..admin.routing import Need, Route
from ..protocol.loop_calls import told_to_stop
from ..security.authentication import Authentication, InvalidCredentials, Proven
from ..security.permissions import Action, Permissions
from .operation_resource import OperationResource

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_OF_REPORTS = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""For the frame of a page that the store has made, which brings its style and no script."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
NOT_BUILT = (
    "<!doctype html><html lang=en><title>duelog</title><p>The page is not in this installation: "
    "<code>make page</code> in duelog's sources builds it, then install them again."
)


class PageFiles:
    """Serves the built files."""

    def __init__(self, directory: Traversable | None = None) -> None:
        """directory: None: those that were installed."""
        place = directory or files(__package__) / "assets"
        self._files = {each.name: each.read_bytes() for each in place.iterdir()} if place.is_dir() else {}

    def routes(self) -> list[Route]:
        nothing = Need.NOTHING
        return [
            Route("GET", "/", self.index, "The page", nothing, here=True),
            Route("GET", "/page/{file}", self.file, "A file of the page", nothing, here=True),
        ]

    async def index(self, request: Request) -> Reply:
        """404: it was not built."""
        if "index.html" not in self._files:
            return Reply(NOT_BUILT.encode(), _TYPES["html"], 404, _HEADERS)
        return self._reply("index.html")

    async def file(self, request: Request) -> Reply:
        """404: there is none."""
        if request.path["file"] not in self._files:
            raise HttpError(404, f"{request.path['file']!r:.200} is no file of the page")
        return self._reply(request.path["file"])

    def _reply(self, name: str) -> Reply:
        headers = {**_HEADERS, "Content-Security-Policy": _OF_REPORTS} if name == "report.html" else _HEADERS
        return Reply(self._files[name], _TYPES.get(name.rpartition(".")[2], "application/octet-stream"), 200, headers)


_THREADS = 4
_ROLES = ("administrator", "viewer")


class _NoGrants:
    """Namespaces grant nothing."""

    def administrators(self, tenant: str) -> Collection[str]:
        return ()

    def granted(self, namespace: str) -> Mapping[str, Collection[Action]]:
        return {}


async def serve_page(
    ask: Ask,
    announce: Callable[[str], object],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    only_look: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT. announce: told the address once it is reached. only_look: nothing can be changed.

    Raises OSError.
    """
    ended = told_to_stop()
    administrator, viewer = _ROLES
    token = secrets.token_urlsafe(24)
    role = viewer if only_look else administrator

    def prove(data: bytes) -> Proven:
        if not hmac.compare_digest(data, token.encode()):
            raise InvalidCredentials("the token is of another start of duelog ui: take the address that it printed")
        return Proven(role, "token")

    permissions = Permissions(_NoGrants(), (administrator,), (viewer,))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "duelog-page"))
    operations = OperationResource(ask, permissions)
    routes = [*operations.routes(), *PageFiles().routes()]
    server = WebServer(Application(routes, Authentication({"token": prove}), permissions))
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        await server.serve([listening])
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listening.getsockname()[1]}/#token={token}")
        await ended.wait()
    finally:
        operations.watching.close()
        await server.close()
