"""Listeners: addresses that cannot be listened at, and the end."""

from __future__ import annotations

import socket

import pytest

from duelog.broker.protocol import commands
from duelog.store.errors import InvalidArgument
from tests.broker.server.raw_client import RawClient, Serving, served_client, serving, until


async def test_a_port_in_use_is_said_to_be() -> None:
    """With the setting's name, so that one line says what to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Serving({}, broker_service_port=port)
        with pytest.raises(InvalidArgument, match=f"brokerServicePort={port}: another program listens there"):
            await server.listeners.listen("broker_service_port")


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_an_address_that_is_not_this_machines_is_said_to_be_none(host: str) -> None:
    """Addresses of another machine, and names that nothing has."""
    server = Serving({}, bind_address=host)
    with pytest.raises(InvalidArgument, match="bindAddress"):
        await server.listeners.listen("broker_service_port")


async def test_localhost_is_one_port_at_every_address_of_it() -> None:
    """IPv4 and, where the machine has it, IPv6."""
    async with serving(bind_address="localhost") as server:
        found = socket.getaddrinfo("localhost", server.port, type=socket.SOCK_STREAM)
        reached = 0
        for host in {address[4][0] for address in found}:
            try:
                client = await RawClient.open(server.port, str(host))
            except OSError:
                continue
            client.say(commands.Connect("test"))
            assert isinstance(await client.hear(), commands.Connected)
            await client.close()
            reached += 1
        assert reached


async def test_what_is_sent_to_a_client_does_not_wait_for_its_word_that_it_has_what_went_before() -> None:
    """Nagle's algorithm held a message back for up to 40 ms, until the client acknowledged the segment before."""
    async with served_client() as (server, client):
        connection = await server.meet(client)
        assert connection._transport is not None
        found = connection._transport.get_extra_info("socket")
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_the_end_closes_every_connection_once_its_answers_have_left() -> None:
    """A client that does not read is closed all the same, and nobody can come anew."""
    async with serving() as server:
        clients = [await RawClient.connected(server.port) for _ in range(3)]
        connections = [await server.meet(client) for client in clients]
        connections[0].send(commands.Success(7))
        connections[2].send(commands.Message(1, commands.MessageIdData(1, 1)), bytes(32 << 20))
        server.listeners.stop_accepting()
        with pytest.raises(ConnectionRefusedError):
            await RawClient.open(server.port)
        await server.listeners.close(0.2)
        assert await clients[0].hear() == commands.Success(7)
        assert await clients[0].hear() is None
        assert await clients[1].hear() is None
        await until(lambda: len(server.gone) == 3)
        assert len(server.listeners) == 0
