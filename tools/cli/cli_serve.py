"""The commands that run until they are told to stop: serve, proxy, worker, ui; and several processes of a worker."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.errors import DuelogError, InvalidArgument
from ..output import write_line
from ..values import alone, extra, open_to_read, require_store, settings_of
from .options import NOTHING, Given, Group, Store, allow_every_descriptor, argument, option

if TYPE_CHECKING:
    from ... import DelayedStore, Worker
    from ...operations.operation import Ask

_log = logging.getLogger("duelog.worker")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""Before another child takes the place of one that has ended: doubled where one ends sooner than the longest."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_AS_TOLD = (0, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a child that was told to stop: by the signal itself, where it came before the child heard signals."""


class Processes:
    """Children of this process, which has one thread. SIGTERM and SIGINT are passed on to them; its end is SIGTERM."""

    def __init__(self, work: Callable[[], object], count: int) -> None:
        """work: what each does, until it is told to stop by a signal."""
        self._work = work
        self._count = count
        self._children: set[int] = set()

    def run(self) -> None:
        """Keep them running until this process is told to stop; then wait until all have ended.

        Signals come through a pipe: one that came as this thread fell asleep in `wait` would not end that. Raises
        DuelogError where a child has ended by an error after this process was told to stop.
        """
        pipe, end = os.pipe()
        os.set_blocking(end, False)
        wakeup = signal.set_wakeup_fd(end)
        before = {number: signal.signal(number, _go_on) for number in _SIGNALS}
        stopping, failed, pause_s = False, 0, 0.0
        try:
            begun_s = self._begin_missing(pipe, end)
            while self._children or not stopping:
                is_whole = len(self._children) == self._count
                if not select.select([pipe], (), (), None if stopping or is_whole else pause_s)[0]:
                    begun_s = self._begin_missing(pipe, end)
                    continue
                (number,) = os.read(pipe, 1)
                if number == signal.SIGCHLD:
                    codes = self._ended()
                    failed += stopping and sum(code not in _AS_TOLD for code in codes.values())
                    if codes and is_whole:
                        is_early = time.monotonic() - begun_s < _LONGEST_PAUSE_S
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if is_early and pause_s else _FIRST_PAUSE_S
                    for child, code in () if stopping else codes.items():
                        text = "process %d has ended with status %d: another takes its place in %g s"
                        _log.error(text, child, code, pause_s)
                else:
                    stopping = True
                    for child in self._children:
                        os.kill(child, number)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(pipe)
            os.close(end)
        if failed:
            raise DuelogError(f"{failed} of {self._count} processes ended with an error")

    def _ended(self) -> dict[int, int]:
        """The children that have ended since the last call, and the exit codes."""
        ended = {
            child: status for child in self._children for child, status in [os.waitpid(child, os.WNOHANG)] if child
        }
        self._children -= ended.keys()
        return {child: os.waitstatus_to_exitcode(status) for child, status in ended.items()}

    def _begin_missing(self, pipe: int, end: int) -> float:
        """Begin the children that are not there; when that was."""
        while len(self._children) < self._count:
            self._begin(pipe, end)
        return time.monotonic()

    def _begin(self, pipe: int, end: int) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the pipe would have a signal of the child
        child = os.fork()
        if child:
            self._children.add(child)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return
        status = 1
        try:
            os.setpgid(0, 0)  # a Ctrl-C of the terminal comes once, by way of the parent
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(end)  # the parent alone has it then
            threading.Thread(target=_end_with_parent, args=[pipe], daemon=True).start()
            self._work()
            status = 0
        except DuelogError as error:
            _log.error("%s", error)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def _end_with_parent(pipe: int) -> None:
    """Stop this process once nobody has the other end of the parent's pipe any more: it was killed."""
    hanging_up = select.poll()
    hanging_up.register(pipe, 0)
    hanging_up.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _go_on(number: int, frame: FrameType | None) -> None:
    """Take a signal whose number is in the pipe."""


app = typer.Typer()

_EVERYWHERE = "Address to listen at; localhost. 0.0.0.0: every one of this machine."
_OF_SERVICE: dict[str, tuple[type, Any]] = {
    "broker_service_port": (int, option("--port", "Port of the binary protocol; 6650. 0: one that is free.")),
    "bind_address": (str, option("--host", _EVERYWHERE)),
    "tls_certificate_file_path": (
        Path, option("--tls-cert", "FILE", "Certificate chain in PEM: TLS at port 6651 as well.")
    ),
    "tls_key_file_path": (Path, option("--tls-key", "FILE", "Its key in PEM, not encrypted.")),
    "placement_file": (Path, option("--placement", "FILE", "Which broker serves which namespace: TOML or JSON.")),
}  # fmt: skip
Service = Annotated[Given, Group({name: Annotated[kind | None, how] for name, (kind, how) in _OF_SERVICE.items()})]
"""Settings that a broker and a proxy have, by their names."""
Config = Annotated[Path | None, option("FILE", "Settings in TOML; options count more.")]
Log = Annotated[str, option("LEVEL", "What is logged to standard error.")]

_EXAMPLE = """
client = pulsar.Client({url!r})
client.create_producer("reminders").send(b"pay the bill", deliver_after=timedelta(seconds=10))
print(client.subscribe("reminders", "mailer", pulsar.ConsumerType.Shared).receive().data())
"""

_LEVELS = ("debug", "info", "warning", "error")


@app.command()
def serve(
    store: Store,
    service: Service = NOTHING,
    http: Annotated[
        int | None, option("Port of administration over HTTP, for pulsar-admin and others; none. 0: as --port.")
    ] = None,
    config: Config = None,
    name: Annotated[str | None, option("Which broker of --placement this one is.")] = None,
    listen: Annotated[
        str | None, option("HOST:PORT", "Serve duelog.connect over TCP, encrypted with --tls-cert.")
    ] = None,
    replica: Annotated[str | None, option("URL", "Where the store's copy is: s3://bucket/prefix and the like.")] = None,
    standby: Annotated[
        bool, option("--standby", "With --replica: lead, or follow the machine that does and take over from it.")
    ] = False,
    log: Log = "warning",
) -> None:
    """Serve a store to Apache Pulsar clients, until SIGTERM or Ctrl-C. Makes the store where there is none.

    Needs `pip install 'duelog[broker]'`. At the end clients are told, what they sent is answered, and what they
    acknowledged is stored; they connect again by themselves.

    With --standby the same command runs on two machines or more, each with a directory of its own. One of them leads;
    the others have clients go through to it, and one of these takes over once it has not renewed its lease (`lease_ms`,
    10 s).

    $ duelog serve data
    $ duelog serve data --replica s3://backups/orders --standby
    """
    from ... import DelayedStore
    from ...opening import stored_span_ms

    with extra("serve", "broker"):
        from ...broker.configuration import BrokerConfig, read_settings
        from ...broker.server.broker import Broker, store_config
        from ...broker.server.service import run_service
    log_to_stderr(log)
    chosen = read_settings(BrokerConfig, config, **service, web_service_port=http, placement_broker=name)
    if replica is not None:
        chosen = dataclasses.replace(chosen, store={**chosen.store, "replica": replica})
    if standby:
        chosen = dataclasses.replace(chosen, store={"lease_ms": 10_000, **chosen.store})
    allow_every_descriptor()
    listen_at = _address("--listen", listen)

    def opened() -> DelayedStore:
        with alone("a broker has its store for itself: end that process first"):
            return DelayedStore.open(store, store_config(chosen, stored_span_ms(store)))

    if not standby:
        with opened() as own:
            broker = Broker(own, chosen, listen_at)
            asyncio.run(run_service(broker, lambda urls, web: _announce(store, (*urls, broker.address), web)))
        return
    from ...broker.server.turns import Turns
    from ...replica.bucket import Bucket
    from ...replica.following import Standby

    settings = store_config(chosen)
    if settings.replica is None:
        raise InvalidArgument("--standby", True, "needs --replica, the copy that it follows")

    async def by_turns() -> None:
        bucket = Bucket(settings.replica or "").for_lease(settings.lease_ms)
        following = Standby(store.absolute(), bucket, lease_ms=settings.lease_ms or 0)
        await Turns(
            following,
            chosen,
            opened,
            lambda own: Broker(own, chosen, listen_at),
            lambda urls, web, address: _announce(store, (*urls, address), web),
            listen_at,
        ).run()

    asyncio.run(by_turns())


def _address(option: str, text: str | None) -> tuple[str, int] | None:
    """HOST:PORT, the host of IPv6 in brackets. Raises InvalidArgument."""
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InvalidArgument(option, text, "expected HOST:PORT")
    return host.strip("[]"), int(port)


def log_to_stderr(level: str) -> None:
    """Write what is logged from this level on to standard error, as `key=value`. Raises InvalidArgument."""
    from ...broker.server.service import KeyValues

    if level not in _LEVELS:
        raise InvalidArgument("--log", level, f"expected one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(KeyValues())
    logging.getLogger("duelog").addHandler(handler)
    logging.getLogger("duelog").setLevel(level.upper())


def _announce(store: Path, urls: tuple[str, ...], web: tuple[str, ...]) -> None:
    write_line(f"{store} is served at {' and '.join(filter(None, urls))}")
    if any(web):
        write_line(f"administration is at {' and '.join(filter(None, web))}")
    write_line(_EXAMPLE.format(url=next(filter(None, urls))))
    sys.stdout.flush()


@app.command()
def proxy(
    broker: Annotated[
        list[str] | None, option("URL", "A broker: pulsar://host:port or pulsar+ssl://. Repeatable.")
    ] = None,
    service: Service = NOTHING,
    http: Annotated[int | None, option("Port of /metrics and /health; none if left out. 0: as --port.")] = None,
    config: Config = None,
    tls_trust: Annotated[Path | None, option("FILE", "Certificates that those of brokers are checked by.")] = None,
    log: Log = "warning",
) -> None:
    """Give several brokers one address, until SIGTERM or Ctrl-C.

    Needs `pip install 'duelog[broker]'`. Lookups and lists of topics are answered by asking a broker, within limits of
    memory; other connections go through to the broker that the client names, one of those given here. Credentials are
    passed on: brokers check them.

    $ duelog proxy --broker pulsar://localhost:6650 --port 6660
    """
    with extra("proxy", "broker"):
        from ...broker.cluster.proxy import Proxy, ProxyConfig
        from ...broker.configuration import read_settings
        from ...broker.server.service import run_service
    log_to_stderr(log)
    chosen = read_settings(
        ProxyConfig,
        config,
        **service,
        broker_urls=tuple(broker) if broker else None,
        web_service_port=http,
        broker_client_trust_certs_file_path=tls_trust,
    )
    allow_every_descriptor()
    asyncio.run(run_service(Proxy(chosen), _announce_proxy))


def _announce_proxy(urls: tuple[str, ...], web: tuple[str, ...]) -> None:
    write_line(f"brokers are reached at {' and '.join(filter(None, urls))}")
    if any(web):
        write_line(f"figures are at {web[0]}/metrics")
    sys.stdout.flush()


@app.command()
def worker(
    target: Annotated[
        str,
        argument(
            "MODULE:WORKER",
            "A module, from the current directory or installed, and the name in it of a duelog.Worker.",
            show_default=False,
        ),
    ],
    connect: Annotated[
        Path | None, option("--connect", "STORE", "Connect to the process that has this store open.")
    ] = None,
    processes: Annotated[int, option("With --connect: how many processes run the tasks.", min=1)] = 1,
    log: Log = "info",
) -> None:
    """Run the tasks of a worker until SIGTERM or Ctrl-C; then what is running may end, and the rest is given back.

    How long it may take is the worker's `drain`; a second signal ends the waiting. Start and end are logged, each
    failure of a task as a warning, each message that is given up as an error, with the id that it had at first.
    Of several processes, one that ends by itself is begun again after a second; where they end at once, as without a
    process that serves the store, after 2 s, 4 s, up to 30 s.

    $ duelog worker shop.tasks:worker
    $ duelog worker shop.tasks:worker --connect data --processes 4
    """
    if log.upper() not in logging.getLevelNamesMapping():
        raise InvalidArgument("--log", log, "expected debug, info, warning or error")
    found = _worker_of(target)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=log.upper(), format=form)  # unless the program has seen to it
    allow_every_descriptor()
    if connect is not None:
        found.connect_to(connect)
    elif processes > 1:
        raise InvalidArgument("--processes", processes, "goes with --connect: one process has a store open")
    if processes > 1:
        Processes(found.run, processes).run()
        return
    with alone("a worker opens the store itself: end it first, run the tasks in that program, or --connect to it"):
        found.run()


def _worker_of(target: str) -> Worker:
    from ... import Worker

    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise InvalidArgument("MODULE:WORKER", target, "expected the form module:name")
    sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it was found, and imports one that is not there
        raise InvalidArgument("MODULE:WORKER", target, f"there is no module {error.name!r}") from None
    found = getattr(imported, name, None)
    if not isinstance(found, Worker):
        raise InvalidArgument("MODULE:WORKER", target, f"expected a duelog.Worker, it is {found!r}")
    return found


_RECONNECT_S = 300.0


@app.command()
def ui(
    store: Store,
    port: Annotated[int, option("Port to listen at. 0: one that is free.")] = 0,
    host: Annotated[str, option("Address to listen at.")] = "127.0.0.1",
    only_look: Annotated[bool, option("--only-look", "Let nothing be changed from the page.")] = False,
) -> None:
    """Show a store in a browser, until SIGTERM or Ctrl-C.

    Needs `pip install 'duelog[broker]'`. It asks the process that has the store open, where there is one; else it opens
    the store itself, and fires what falls due. The address that it prints has a token: who has it may do everything.

    $ duelog ui data
    """
    with extra("ui", "broker"):
        from ...broker.page.page_server import serve_page
    require_store(store)
    allow_every_descriptor()

    def announce(address: str) -> None:
        write_line(f"{store} is shown at {address}")
        sys.stdout.flush()

    with _asked(store, only_look) as ask:
        asyncio.run(serve_page(ask, announce, host=host, port=port, only_look=only_look))


@contextmanager
def _asked(path: Path, only_look: bool) -> Iterator[Ask]:
    """Ask the process that has the store open, for as long as one comes again; else this one, which opens it."""
    from ... import DelayedStore
    from ...broker.page.operation_resource import asking
    from ...operations.wire_client import Connection

    first = Connection.to(path, _RECONNECT_S)
    if first is not None:
        first.introduce("duelog ui")
        with first:
            yield first.ask
        return
    with alone("it takes no commands: end it first, or --only-look"):
        opened = open_to_read(path) if only_look else DelayedStore.open(path, settings_of(path))
    with opened:
        yield asking(opened)
