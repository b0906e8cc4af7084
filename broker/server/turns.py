"""Serving a store by turns with other machines: a broker while this one leads, until then a way to the one that does.

A standby listens at the addresses that it is to have as the leader. Clients of Pulsar that come meanwhile go through to
the leader, as by a proxy, and so do those of `duelog.connect`; where no leader is known they are refused, and try
again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

from ... import DelayedStore
from ...replica.following import Standby, failure_of, serve_at
from ...replica.restoring import GapFound
from ...store.errors import (
    Deposed,
    InvalidArgument,
    NotLeader,
    NotReplicated,
    ReplicaDamaged,
    ReplicaUnreachable,
    StoreFailed,
    StoreFull,
)
from ...store.limited_log import LimitedLog
from ..cluster.proxy import Proxy, ProxyConfig
from ..configuration import BrokerConfig, ServiceConfig
from ..lookup.topic_lookup import Urls
from ..protocol.loop_calls import told_to_stop
from .broker import Broker

_log = logging.getLogger("duelog.broker")

_FULL_S = 10.0
"""Between two looks whether a disk that was full has space by now."""

T = TypeVar("T")


@dataclass(eq=False)
class Turns:
    """Follows, leads, and follows again, until the process is told to end. Runs on the event loop's thread.

    open_store: opens the store once it leads. announce: told where, of the leader that this process is. listen: where
    the broker serves `duelog.connect`.
    """

    _standby: Standby
    _config: BrokerConfig
    _open_store: Callable[[], DelayedStore]
    _broker: Callable[[DelayedStore], Broker]
    _announce: Callable[[Urls, Urls, str], object]
    _listen: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        self._poll_s = min(max(self._standby.lease_ms / 20_000, 0.05), 0.5)
        self._log = LimitedLog(_log)
        self._thread = ThreadPoolExecutor(1, "duelog-standby")
        self._beats = ThreadPoolExecutor(1, "duelog-lease")

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises what the copy refuses, and what a store or a broker raises."""
        self._ended = told_to_stop()
        while not self._ended.is_set():
            if await self._follow():
                try:
                    await self._lead()
                    await self._give_way()
                except (Deposed, StoreFailed) as error:  # another was first: this process follows it
                    if not isinstance(error, Deposed) and not isinstance(error.__cause__, Deposed):
                        raise
                    _log.warning("%s", error)
                except (NotLeader, NotReplicated, ReplicaUnreachable) as error:  # it leads, unless another does by now
                    _log.warning("%s", error)
                    await self._pause()

    async def _call(self, work: Callable[[], T]) -> T:
        """Do a work on the standby's thread, as `_renewing`."""
        return await self._renewing(asyncio.get_running_loop().run_in_executor(self._thread, work))

    async def _renewing(self, work: Awaitable[T]) -> T:
        """Wait for a work, and renew the lease meanwhile, where there is one to be renewed."""
        loop, working = asyncio.get_running_loop(), asyncio.ensure_future(work)
        while not (await asyncio.wait([working], timeout=self._poll_s))[0]:
            await loop.run_in_executor(self._beats, self._standby.beat)
        return await working

    async def _pause(self, seconds: float | None = None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), self._poll_s if seconds is None else seconds)

    async def _wait_for_space(self, error: StoreFull) -> None:
        _log.error("%s: this machine goes on once there is space", error)
        await self._pause(_FULL_S)

    # -- following ---------------------------------------------------------------------------------

    async def _follow(self) -> bool:
        """Follow until this process leads; False: it is to end."""
        way: _Way | None = None
        begun = False
        try:
            while not self._ended.is_set():
                try:
                    if not begun:
                        if await self._call(self._standby.begin):
                            return True
                        begun = True
                    if await self._call(self._standby.step):
                        return True
                except (ReplicaUnreachable, ReplicaDamaged, GapFound) as error:  # until it is mended
                    self._log.log(logging.WARNING, "this machine does not follow for now: %s", error)
                except StoreFull as error:
                    await self._wait_for_space(error)
                leader = self._standby.leader
                address = "" if leader is None else leader.address
                if way is None or way.address != address:
                    if way is not None:
                        await way.close()
                    way = _Way(address, self._config, self._listen)
                    await way.open()
                    _log.warning("this machine follows %s", address or "a leader whose address is not known yet")
                await self._pause()
            return False
        finally:
            if way is not None:
                await self._renewing(way.close())

    async def _give_way(self) -> None:
        """Where this machine was handed over, and has resigned: wait for another to lead, as long as the lease."""
        until = asyncio.get_running_loop().time() + self._standby.lease_ms / 1000
        with suppress(ReplicaUnreachable, ReplicaDamaged):
            at = None if self._ended.is_set() else await self._call(self._standby.resigned_at)
            while at is not None and not self._ended.is_set() and asyncio.get_running_loop().time() < until:
                if await self._call(partial(self._standby.is_followed, at)):
                    return
                await self._pause()

    # -- leading -----------------------------------------------------------------------------------

    async def _lead(self) -> None:
        try:
            store = await self._call(self._open_store)
        except StoreFull as error:
            return await self._wait_for_space(error)
        finally:
            self._standby.opened()
        try:
            broker = self._broker(store)
            await broker.start()
            try:
                addresses = (broker.urls.plain, broker.urls.tls, broker.address)
                serve_at(store, ",".join(filter(None, addresses)))
                self._announce(broker.urls, broker.web_urls, broker.address)
                while not self._ended.is_set():
                    failed = failure_of(store)
                    if isinstance(failed, Deposed):
                        break
                    if failed is not None:
                        raise failed
                    await self._pause()
            finally:
                await broker.stop()
        finally:
            await self._call(store.close)


class _Way:
    """Listens at the addresses of a standby, and has clients go through to the leader at an address."""

    def __init__(self, address: str, config: BrokerConfig, listen: tuple[str, int] | None) -> None:
        self.address = address
        urls = address.split(",")
        brokers = tuple(url for url in urls if url.startswith("pulsar"))
        self._proxy: Proxy | None = None
        if brokers:
            shared = {each.name: getattr(config, each.name) for each in fields(ServiceConfig)}
            del shared["placement_file"], shared["max_message_size"], shared["max_pending_requests"]
            elsewhere = f"this is a standby, and {address} leads: administration and the page are that machine's"
            self._proxy = Proxy(ProxyConfig(**shared, broker_urls=brokers[:1]), elsewhere)
        stores = [url.partition("://")[2] for url in urls if url.startswith("duelog")]
        self._target = stores[0].rpartition(":")[::2] if stores and listen else None
        self._listen = listen
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. Where an address is in use it is logged: following goes on."""
        try:
            if self._proxy is not None:
                await self._proxy.start()
            if self._target is not None and self._listen is not None:
                self._server = await asyncio.start_server(self._pass_on, *self._listen)
        except (OSError, InvalidArgument) as error:
            _log.warning("clients are not passed on to %s: %s", self.address, error)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Have the bytes of a client of `duelog.connect` go through, both ways."""
        host, port = self._target or ("", "0")
        try:
            to_reader, to_writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))

    async def close(self) -> None:
        """Listen no more, and end connections."""
        if self._server is not None:
            self._server.close()
        if self._proxy is not None:
            await self._proxy.stop()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
