"""A broker and a proxy as a process runs them: listeners, a web server, files looked at, signals, lines of a log."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...store.errors import InvalidArgument
from ..admin.application import Application, WebServer
from ..configuration import ServiceConfig
from ..lookup.topic_lookup import Urls
from ..protocol.fields import Command
from ..protocol.loop_calls import keep_refreshing, told_to_stop
from ..protocol.states import Session
from ..security.authentication import Certificate
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
        raise InvalidArgument("bindAddress", host, why_not(error, host)) from error
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
            raise InvalidArgument(config.in_file(port_field), port, why_not(error, str(address[0]))) from error
        port = opened[-1].getsockname()[1]
    if not opened:
        reason = "there is no such address" if failure is None else why_not(failure, host)
        raise InvalidArgument("bindAddress", host, reason)
    return opened, int(port)


def _open(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.create_server(address, family=family, backlog=BACKLOG)
    # asyncio sends at once, without Nagle's wait for what went before, where the protocol is named, as it is here.
    return socket.socket(fileno=listener.detach())


def why_not(error: OSError, address: str) -> str:
    """Say why nothing can listen at an address."""
    if (error.errno or 0) < 0:  # a name of no address
        return f"no address to listen at: {(error.strerror or '').partition(' (while')[0]}"
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


GC_THRESHOLDS = (10_000, 20, 100)
"""Objects of messages come and go without cycles: looking for those so rarely saves a tenth of the processor's time."""


class Service(ABC):
    """Starts and stops what listens. Runs on the event loop's thread."""

    def __init__(self, config: ServiceConfig) -> None:
        self._settings = config
        self._certificate: Certificate | None = None
        self._listeners: Listeners | None = None
        self._web: WebServer | None = None
        self._refreshing: list[asyncio.Task[None]] = []
        self.urls = self.web_urls = Urls("")
        """Addresses that clients connect to, and those of HTTP, once it has started."""

    async def start(self) -> None:
        """Listen. Raises UnusableSecurity, InvalidArgument, what a store raises; it is stopped then."""
        try:
            if self._settings.tls_certificate_file_path is not None and self._settings.tls_key_file_path is not None:
                self._certificate = Certificate(
                    self._settings.tls_certificate_file_path, self._settings.tls_key_file_path
                )
                self._refresh(self._certificate.refresh, self._settings.tls_cert_refresh_check_duration_sec)
            await self._start()
        except BaseException:
            await self.stop()
            raise

    @abstractmethod
    async def _start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None:
        """Accept nothing more, and let connections end. A second call is nothing."""

    def _refresh(self, look: Callable[[], bool], every_s: float, changed: Callable[[], object] = lambda: None) -> None:
        self._refreshing.append(asyncio.create_task(keep_refreshing(look, every_s, changed)))

    async def _listen(self, listeners: Listeners) -> Urls:
        config, certificate, plain, tls = self._settings, self._certificate, "", ""
        self._listeners = listeners
        host = config.reachable_address
        if config.broker_service_port is not None:
            plain = f"pulsar://{host}:{await listeners.listen('broker_service_port')}"
        if certificate is not None and config.broker_service_port_tls is not None:
            tls = f"pulsar+ssl://{host}:{await listeners.listen('broker_service_port_tls', certificate.context)}"
        self.urls = Urls(plain, tls)
        return self.urls

    async def _listen_http(self, application: Application, max_connections: int = 2_048) -> Urls:
        """Accept requests; a proxy has no port for those over TLS."""
        config, certificate = self._settings, self._certificate
        self._web = WebServer(application, max_connections=max_connections)
        found = {"http": "", "https": ""}
        for scheme, name in (("http", "web_service_port"), ("https", "web_service_port_tls")):
            if getattr(config, name, None) is not None:
                sockets, port = await open_sockets(config, name)
                context = None if certificate is None or scheme == "http" else certificate.context
                await self._web.serve(sockets, context)
                found[scheme] = f"{scheme}://{config.reachable_address}:{port}"
        self.web_urls = Urls(found["http"], found["https"])
        return self.web_urls

    async def _stop_http(self) -> None:
        """Answer no requests, and look at no files any more."""
        for task in self._refreshing:
            task.cancel()
        self._refreshing.clear()
        web, self._web = self._web, None
        if web is not None:
            await web.close()


async def run_service(service: Service, announce: Callable[[Urls, Urls], object]) -> None:
    """Serve until the process gets SIGTERM or SIGINT. announce: told where, once clients can connect.

    Its second argument is where administration is, empty if nowhere.
    """
    ended = told_to_stop()
    await service.start()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        announce(service.urls, service.web_urls)
        await ended.wait()
        _log.info("the end was asked for")
    finally:
        await service.stop()


class KeyValues(logging.Formatter):
    """One line a record, as `key=value`: time, level, logger, message, and what was raised."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["error"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


def _quoted(text: str) -> str:
    if text and text.isprintable() and not set(text) & {" ", '"', "="}:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else repr(each)[1:-1] for each in escaped) + '"'
