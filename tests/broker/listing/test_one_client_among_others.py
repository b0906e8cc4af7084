"""A client that asks for many lists and reads none of them, and what others get meanwhile: real sockets, one broker."""

import asyncio
import socket
from typing import Any

import pytest

from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import Command
from tests.broker.listing.watching import held_broker
from tests.broker.server.raw_client import RawClient, until
from tests.conftest import OpenStore

LARGE, SMALL = "public/default", "public/small"
NAMES = [f"persistent://{LARGE}/{'x' * 180}-{number:04}" for number in range(2_000)]
"""Some 400 kB in a frame."""

LISTS = 1_000

LIMITS = {
    f"max_topic_list_in_flight_{kind}_mem_size_{name}": value
    for kind in ("heap", "direct")
    for name, value in (("mb", 2), ("permits_acquire_timeout_millis", 500))
}


async def deaf_client(port: int) -> RawClient:
    """A client with a small receive buffer that reads nothing once it is connected."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    client = RawClient(*await asyncio.open_connection(sock=connection, limit=1_024))
    assert isinstance(await client.ask(commands.Connect("deaf", protocol_version=21)), commands.Connected)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    return client


def lists() -> list[Command]:
    """The same question, many times."""
    return [commands.GetTopics(number, LARGE) for number in range(LISTS)]


def watches() -> list[Command]:
    """Watchers of everything; each answer has all names."""
    return [commands.WatchTopicList(number, number, LARGE, f"{LARGE}/.*") for number in range(LISTS - 1)]


@pytest.mark.parametrize("said", [lists, watches])
async def test_a_client_that_asks_for_a_thousand_lists_and_reads_none_holds_up_nobody(
    open_store: OpenStore, said: Any
) -> None:
    """One list of it is on its way at a time; other clients' lists, large and small, are answered."""
    store = open_store()
    store.create_topics([*NAMES, *(f"persistent://{SMALL}/t{number}" for number in range(5))])

    async with held_broker(store, **LIMITS) as broker:
        limiter, port = broker.services.limiter, broker.port
        deaf = await deaf_client(port)
        deaf.say(*said())
        await until(lambda: limiter.direct.acquired)
        other = await RawClient.connected(port)
        for request_id, (namespace, count) in enumerate([(LARGE, 2_000), (SMALL, 5)] * 3):
            answer = await other.ask_for(commands.GetTopicsResponse, commands.GetTopics(request_id, namespace))
            assert len(answer.topics) == count
        await until(lambda: limiter.direct.acquired and not limiter.heap.acquired)
        assert limiter.direct.acquired < 500_000
        assert limiter.heap.timeouts + limiter.direct.timeouts == 0
        deaf.writer.transport.abort()
        await until(lambda: not limiter.direct.acquired)
