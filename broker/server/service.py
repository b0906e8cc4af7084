"""A broker and a proxy as a process runs them: listeners, a web server, files looked at, signals, lines of a log."""

import asyncio
import gc
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable

from ..admin.application import Application, WebServer
from ..configuration import ServiceConfig
from ..lookup.topic_lookup import Urls
from ..protocol.loop_calls import keep_refreshing
from ..security.authentication import Certificate
from .listening import Listeners, open_sockets

_log = logging.getLogger("duelog.broker")

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
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
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
