"""From an HTTP request to its handler and back: credentials, route, owner, rights, body, errors as `{"reason": ...}`.

The order: who asks (401), what for (404, 405), which broker's it is (307), whether the role may (403), and only then
what exists, so that a refusal tells nothing. A web server has the listening sockets of one application, and ends its
connections.
"""

import asyncio
import base64
import binascii
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from ipaddress import ip_address
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ...store import errors
from ..protocol.failures import Refused, ServerError
from ..security.authentication import Authentication, InvalidCredentials, Proven
from ..security.permissions import Permissions
from .http_request import HttpError, Reply, Request, Stream
from .routing import Need, Route, Router, instead_of

_log = logging.getLogger("duelog.broker.admin")

MAX_BODY_BYTES = 6 << 20
"""Longest body: a message may be one."""

COMPRESSED_BYTES = 1 << 20
"""Answers of this size are compressed by a worker for clients that take them so: writing them holds up the loop."""

_BODY_S = 30.0
"""Seconds that a client has to send a body in."""

_STALL_S = 120.0
"""A client has to take a piece of a long answer in this."""

_PIECE = 64 * 1024

_METHODS = {"bearer": "token", "basic": "basic"}
"""By the scheme of a request, the method of the binary protocol."""

_CHALLENGES = {"token": "Bearer", "basic": 'Basic realm="duelog"'}

OwnerOf = Callable[[str], str | None]
"""By `tenant/namespace`, the address of the broker that has it, `http://host:port`; None: this one."""


@dataclass(eq=False)
class Application:
    """Answers requests by its routes. Of the event loop's thread.

    is_local: it listens at this machine's own addresses alone, and is asked by these or as localhost. elsewhere: says
    which process offers what this one does not; a request for that gets it, with 503.
    """

    routes: InitVar[Iterable[Route]]
    _authentication: Authentication
    _permissions: Permissions
    _owner_of: OwnerOf = lambda namespace: None
    _: KW_ONLY
    is_local: bool = False
    elsewhere: str = ""

    def __post_init__(self, routes: Iterable[Route]) -> None:
        self.router = Router(routes)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; raises nothing but the end of its task."""
        try:
            answer = await self._answer(request)
            if isinstance(answer, Stream):
                return await _stream(request, answer)
            if isinstance(answer, Reply) and answer.until_left is not None:
                async with answer.until_left:
                    return await _write(request, answer)
            return _guarded(_response(answer))
        except Exception as error:
            failure = as_http_error(error)
            if failure is None:
                _log.exception("%s %s failed", request.method, request.path)
                failure = HttpError(500, f"the broker failed: {type(error).__name__}; its log says more")
            body = json.dumps({"reason": failure.reason}).encode()
            return _guarded(
                web.Response(body=body, status=failure.status, headers=failure.headers, content_type="application/json")
            )

    async def _answer(self, request: web.BaseRequest) -> Any:
        method = "GET" if request.method == "HEAD" else request.method
        if method != "GET":
            _refuse_other_sites(request)
        raw_path = request.rel_url.raw_path
        found = self.router.find(method, raw_path)
        is_open = not isinstance(found, list) and found.route.need is Need.NOTHING
        if self.is_local and not (is_open or self._authentication.methods):
            _refuse_other_names(request)
        proven = Proven(None) if is_open else await self._prove(request)
        role = proven.role
        if isinstance(found, list):
            if self.elsewhere and not found:
                raise HttpError(503, self.elsewhere)
            raise instead_of(method, raw_path, found)
        route, parameters = found
        if "namespace" in parameters and not route.here:
            owner = self._owner_of(f"{parameters['tenant']}/{parameters['namespace']}")
            if owner is not None:
                address = f"{owner}{request.rel_url.raw_path_qs}"
                raise HttpError(307, f"another broker has this namespace: {owner}", {"Location": address})
        self._check(route.need, role, parameters)
        query = {name: request.query[name] for name in route.query if name in request.query}
        authorization = request.headers.get("Authorization", "")
        answer = await route.handler(Request(parameters, query, await _body(request), role, authorization))
        return replace(answer, until_ms=proven.expires_ms) if isinstance(answer, Stream) else answer

    async def _prove(self, request: web.BaseRequest) -> Proven:
        """Who asks. Raises HttpError 401."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        method = _METHODS.get(scheme.lower(), scheme)
        try:
            data = given.strip().encode()
            if method == "basic" and method in self._authentication.methods:
                data = base64.b64decode(data, validate=True)
            return await self._authentication.prove(method, data)
        except (InvalidCredentials, binascii.Error, UnicodeEncodeError) as error:
            challenges = [_CHALLENGES[name] for name in self._authentication.methods if name in _CHALLENGES]
            raise HttpError(401, str(error), {"WWW-Authenticate": ", ".join(challenges)}) from error

    def _check(self, need: Need, role: str | None, parameters: dict[str, str]) -> None:
        permissions = self._permissions
        if need.actions:
            namespace = f"{parameters['tenant']}/{parameters['namespace']}"
            permissions.require(role, namespace, *need.actions)
        elif need is Need.SUPERUSER and not permissions.is_superuser(role):
            raise HttpError(403, f"role {role!r} is no superuser")
        elif need is Need.TENANT and not permissions.administers(role, parameters["tenant"]):
            raise HttpError(403, f"role {role!r} does not administer tenant {parameters['tenant']}")


_BY_NUMBER = {
    ServerError.METADATA: 412,
    ServerError.AUTHENTICATION: 401,
    ServerError.AUTHORIZATION: 403,
    ServerError.TOPIC_NOT_FOUND: 404,
    ServerError.SUBSCRIPTION_NOT_FOUND: 404,
    ServerError.CONSUMER_NOT_FOUND: 404,
    ServerError.INVALID_TOPIC_NAME: 412,
    ServerError.NOT_ALLOWED: 412,
    ServerError.CONSUMER_BUSY: 412,
    ServerError.INCOMPATIBLE_SCHEMA: 409,
    ServerError.TOO_MANY_REQUESTS: 429,
    ServerError.SERVICE_NOT_READY: 503,
}

_BY_CLASS: dict[type[BaseException], int] = {
    errors.UnknownTopic: 404,
    errors.UnknownSubscription: 404,
    errors.PoliciesChanged: 409,
    errors.DocumentChanged: 409,
    errors.TransactionConflict: 409,
    errors.ConsumerBusy: 412,
    errors.InvalidArgument: 412,
    errors.ClosedError: 503,
    errors.StoreFailed: 503,
    errors.NotLeader: 503,
    errors.NotReplicated: 503,
    errors.StoreUnavailable: 503,
    errors.StoreBusy: 503,
    errors.StoreFull: 507,
}


def as_http_error(error: BaseException) -> HttpError | None:
    """The answer to an error; None: it is a fault of the broker's."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, Refused):
        return HttpError(_BY_NUMBER.get(error.error, 500), error.message)
    for cls in type(error).__mro__:
        if cls in _BY_CLASS:
            return HttpError(_BY_CLASS[cls], str(error))
    return None


def _refuse_other_sites(request: web.BaseRequest) -> None:
    """Raise HttpError 403 for what a page of another site has a browser send: it needs no credentials of its own."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise HttpError(403, f"a page of {origin[:200]} may change nothing here")
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none"):
        raise HttpError(403, f"a page of another site ({site[:40]}) may change nothing here")


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches, or a name of it that no other machine can take."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _refuse_other_names(request: web.BaseRequest) -> None:
    """Raise HttpError 403 for a name that a page of another site has had lead to this machine (DNS rebinding)."""
    host = (request.url.host or "").lower()
    if not is_loopback(host):
        raise HttpError(403, f"{host[:200]!r}: without credentials this is asked as localhost, or by address")


def _guarded(response: web.Response) -> web.Response:
    """Have no browser take an answer for something else than it says it is."""
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


async def _body(request: web.BaseRequest) -> bytes:
    """Raises HttpError 408, 413."""
    if not request.can_read_body:
        return b""
    found = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.content.iter_any():
                found += part
                if len(found) > MAX_BODY_BYTES:
                    raise HttpError(413, f"the body is over {MAX_BODY_BYTES} bytes", {"Connection": "close"})
    except TimeoutError as error:
        raise HttpError(408, f"the body did not come within {_BODY_S:.0f} s", {"Connection": "close"}) from error
    return bytes(found)


async def _write(request: web.BaseRequest, answer: Reply) -> web.StreamResponse:
    """Write an answer piece by piece as the client takes it; one that takes nothing for long loses its connection."""
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_type = answer.content_type
    response.content_length = len(answer.body)
    if len(answer.body) >= COMPRESSED_BYTES:
        response.enable_compression()
    try:
        async with asyncio.timeout(answer.within_s):
            await response.prepare(request)
            for start in range(0, 0 if request.method == "HEAD" else len(answer.body), _PIECE):
                async with asyncio.timeout(_STALL_S):
                    await response.write(answer.body[start : start + _PIECE])
            await response.write_eof()
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    return response


async def _stream(request: web.BaseRequest, answer: Stream) -> web.StreamResponse:
    """Write events as they come; a client that takes nothing for long loses its connection."""
    response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
    response.content_type = "text/event-stream"
    async with aclosing(answer.pieces) as pieces:
        first = await anext(pieces)  # it may refuse
        try:
            await response.prepare(request)
            await response.write(first)
            async for piece in pieces:
                if answer.until_ms is not None and time.time() * 1_000 >= answer.until_ms:
                    break
                async with asyncio.timeout(_STALL_S):
                    await response.write(piece)
            await response.write_eof()
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
    return response


def _response(answer: Any) -> web.Response:
    if answer is None:
        return web.Response(status=204)
    if isinstance(answer, Reply):
        content = {"Content-Type": answer.content_type} if answer.body else {}
        headers = {**content, **answer.headers}
        response = web.Response(
            body=answer.body, status=answer.status, headers=headers, zlib_executor_size=COMPRESSED_BYTES
        )
        if len(answer.body) >= COMPRESSED_BYTES:
            response.enable_compression()
        return response
    return web.Response(body=json.dumps(answer).encode(), content_type="application/json")


def _in_one_line(record: logging.LogRecord) -> bool:
    """Have a request that is no HTTP be a line of its own, without a traceback: anybody can send one."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg += ": %s"
        record.args = (*(record.args or ()), " ".join(str(error).split())[:200])
        record.exc_info = None
    return True


_http_log = logging.getLogger("duelog.broker.http")
_http_log.addFilter(_in_one_line)


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
        server = _Limited(application.handle, logger=_http_log)
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
