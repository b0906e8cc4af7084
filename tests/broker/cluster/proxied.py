"""Brokers and a proxy in the test's process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from duelog.broker.cluster.proxy import Proxy, ProxyConfig
from duelog.broker.protocol import commands
from tests.broker.server.raw_client import RawClient, end_clients


@asynccontextmanager
async def proxy_to(*urls: str, **settings: Any) -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy at a free port of this machine, and the port."""
    values: dict[str, Any] = {"broker_urls": urls, "bind_address": "127.0.0.1", "broker_service_port": 0}
    proxy = Proxy(ProxyConfig(**{**values, **settings}))
    await proxy.start()
    try:
        yield proxy, int(proxy.urls.plain.rpartition(":")[2])
        end_clients()
    finally:
        await proxy.stop()
        await proxy.stop()


async def through(port: int, place: str, **values: Any) -> tuple[RawClient, commands.Command | None]:
    """A client that names a broker, and what it hears first."""
    client = await RawClient.open(port)
    connect = commands.Connect("test", protocol_version=21, proxy_to_broker_url=place, **values)
    return client, await client.ask(connect)


async def ended(client: RawClient) -> None:
    """The connection ends."""
    while await asyncio.wait_for(client.hear(), 30) is not None:
        pass
    await client.close()
