"""Listeners and connections over sockets: who is let in, what is dispatched, when it is not read, how it ends."""

import asyncio
import logging
import socket
from typing import Any, cast

import pytest

from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import NO_REQUEST
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.protocol.fields import CLASSES
from duelog.broker.security.authentication import Authentication, InvalidCredentials, Proven
from duelog.broker.server.connection import Connection
from duelog.store.errors import InvalidArgument, UnknownTopic
from tests.broker.protocol.blobs import join_blob
from tests.broker.server.raw_client import RawClient, Serving, served_client, serving, until
from tests.conftest import present, raising

BLOB = join_blob(b"", b"payload")


async def test_a_client_is_let_in_and_told_what_the_broker_can_do() -> None:
    """CONNECT, CONNECTED, PING, PONG."""
    async with serving(max_message_size=1 << 20) as server:
        client = await RawClient.open(server.port)
        client.say(commands.Connect("Pulsar-CPP-v3.5", protocol_version=20))
        connected = await client.hear_a(commands.Connected)
        assert (connected.server_version, connected.protocol_version) == ("duelog-test", 20)
        assert connected.max_message_size == 1 << 20
        assert await client.ask(commands.Ping()) == commands.Pong()
        connection = await server.meet(client)
        assert (connection.client_version, connection.role, connection.writable) == ("Pulsar-CPP-v3.5", None, True)
        await client.close()
        await until(lambda: server.gone)
        assert server.gone == [connection]
        assert connection.closed
        connection.send(commands.Ping())


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x05\0\0\0\x01\x08", b"\0\0\0\x08\0\0\0\x04\x08\x12\x92\x01"]
)
async def test_what_is_no_handshake_closes_the_connection(said: bytes) -> None:
    """Another protocol, a malformed command, a PING before CONNECT."""
    async with serving() as server:
        client = await RawClient.open(server.port)
        client.writer.write(said)
        assert await client.hear() is None


async def test_commands_reach_their_service_with_their_blob_in_order() -> None:
    """Sends before and behind others, in one piece."""
    came: list[tuple[object, bytes]] = []

    def handler(connection: Connection, command: Any, blob: memoryview) -> None:
        came.append((command, bytes(blob)))

    async with served_client({commands.Send: handler, commands.Ack: handler}) as (_, client):
        acks = commands.Ack(1, commands.AckType.INDIVIDUAL, [commands.MessageIdData(1, 2)])
        client.say(commands.Send(1, 0), commands.Send(1, 1), blob=BLOB)
        client.say(acks)
        await until(lambda: len(came) == 3)
        assert came == [(commands.Send(1, 0), BLOB), (commands.Send(1, 1), BLOB), (acks, b"")]


async def _refusing(connection: Connection, command: Any, blob: memoryview) -> None:
    raise Refused(ServerError.AUTHORIZATION, "no")


async def _unknown(connection: Connection, command: Any, blob: memoryview) -> None:
    raise UnknownTopic("t")


async def _failing(connection: Connection, command: Any, blob: memoryview) -> None:
    raise RuntimeError("secret of the inside")


async def test_a_request_that_no_service_answered_is_refused_in_its_own_form(caplog: pytest.LogCaptureFixture) -> None:
    """By what was raised; an error of the broker's own says nothing of the inside, but to the log."""
    handlers = {commands.Lookup: _refusing, commands.Seek: _unknown, commands.Unsubscribe: _failing}

    async with served_client(handlers) as (_, client):
        lookup = await client.ask_for(commands.LookupResponse, commands.Lookup("t", 1))
        assert (lookup.response, lookup.error) == (commands.LookupKind.FAILED, ServerError.AUTHORIZATION)
        seek = await client.ask(commands.Seek(1, 2))
        assert seek == commands.Error(2, ServerError.TOPIC_NOT_FOUND, "topic 't' does not exist")
        with caplog.at_level(logging.ERROR):
            failed = await client.ask_for(commands.Error, commands.Unsubscribe(1, 3))
        assert (failed.request_id, failed.error) == (3, ServerError.UNKNOWN)
        assert "secret" not in failed.message
        assert "secret" in caplog.text
        assert await client.ask(commands.Ping()) == commands.Pong()


async def test_transactions_are_refused_in_their_own_form() -> None:
    """NotAllowedError, with the ids that were asked about."""
    async with served_client() as (_, client):
        asks: list[tuple[Any, type]] = [
            (commands.NewTxn(1), commands.NewTxnResponse),
            *((cast(Any, CLASSES[each])(2, 3, 4), CLASSES[each + 1]) for each in (52, 54, 56)),
            (commands.TcClientConnect(5), commands.TcClientConnectResponse),
            (commands.WatchTopicList(6, 1, "n", "p"), commands.Error),
        ]
        for asked, answer in asks:
            found: Any = await client.ask(asked)
            assert type(found).__name__ == answer.__name__
            assert (found.request_id, found.error) == (asked.request_id, ServerError.NOT_ALLOWED)
            if isinstance(found, commands.TxnRefusal) and found.request_id == 2:
                assert (found.txn_least, found.txn_most) == (3, 4)


async def test_a_service_that_breaks_beside_any_request_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """An error with the request id of none, then the end; other connections go on."""
    async with serving({commands.Send: raising(RuntimeError("broken"))}) as server:
        other, client = await RawClient.connected(server.port), await RawClient.connected(server.port)
        client.say(commands.Send(1, 1), blob=BLOB)
        error = await client.hear_a(commands.Error)
        assert (error.request_id, error.error) == (NO_REQUEST, ServerError.UNKNOWN)
        assert await client.hear() is None
        assert await other.ask(commands.Ping()) == commands.Pong()
    assert "broken" in caplog.text


async def test_a_connection_that_is_paused_serves_nothing_until_every_reason_is_gone() -> None:
    """Not what was read already either; then all of it, in order."""
    came: list[int] = []

    def handler(connection: Connection, command: Any, blob: memoryview) -> None:
        came.append(command.sequence_id)
        if command.sequence_id == 2:
            connection.pause_reading("a")
            connection.pause_reading("b")

    async with served_client({commands.Send: handler}) as (server, client):
        connection = await server.meet(client)
        client.say(*(commands.Send(1, number) for number in range(5)), blob=BLOB)
        await until(lambda: len(came) == 3)
        assert await connection.ping(0.001)
        connection.resume_reading("a")
        connection.resume_reading("no such reason")
        for _ in range(20):
            await asyncio.sleep(0)
        assert came == [0, 1, 2]
        client.say(commands.Send(1, 5), blob=BLOB)
        connection.resume_reading("b")
        await until(lambda: len(came) == 6)
        assert came == [0, 1, 2, 3, 4, 5]


async def test_requests_under_way_are_bounded() -> None:
    """A connection with as many is not read; when half are answered it is."""
    waiting: list[asyncio.Future[None]] = []

    async def handler(connection: Connection, command: Any, blob: memoryview) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting.append(future)
        await future
        connection.send(commands.Success(command.request_id))

    async with served_client({commands.Seek: handler}, max_pending_requests=4) as (_, client):
        client.say(*(commands.Seek(1, number) for number in range(6)))
        await until(lambda: len(waiting) == 4)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(waiting) == 4
        waiting[0].set_result(None)
        waiting[1].set_result(None)
        await until(lambda: len(waiting) == 6)
        for future in waiting[2:]:
            future.set_result(None)
        assert [await client.hear() for _ in range(6)] == [commands.Success(number) for number in range(6)]


async def test_a_client_that_does_not_read_gets_no_more_messages_and_is_not_read() -> None:
    """Its queue stays near the mark; once it reads, all of it comes and the connection is writable again."""
    blob = join_blob(b"", bytes(100_000))

    async with served_client(write_high_mark=1 << 20, write_low_mark=1 << 18) as (server, client):
        connection = await server.meet(client)
        sent, turns = 0, 0
        while connection.writable or turns < 50:  # what the kernel takes is not in the queue
            if connection.writable:
                connection.send(commands.Message(1, commands.MessageIdData(1, sent)), blob)
                sent += 1
                turns = 0
            turns += 1
            await asyncio.sleep(0)
        assert present(connection._queue).size < (1 << 20) + 200_000
        assert "output" in connection._paused
        again: list[bool] = []
        connection.on_writable(lambda: again.append(connection.writable))
        for number in range(sent):
            assert (await client.hear_blob()) == (commands.Message(1, commands.MessageIdData(1, number)), blob)
        await until(lambda: again)
        assert again == [True]
        assert await client.ask(commands.Ping()) == commands.Pong()


class HandMovedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test moves on."""

    moved = 0.0

    def time(self) -> float:
        return super().time() + self.moved

    async def move(self, seconds: float) -> None:
        """Let time pass, and what is due then happen."""
        self.moved += seconds
        for _ in range(10):
            await asyncio.sleep(0)


def test_a_client_that_reads_nothing_for_two_minutes_is_closed() -> None:
    """It holds messages that others could have. One that takes some now and then is waited for, however slow it is."""

    async def main(loop: HandMovedLoop) -> None:
        async with serving() as server:
            stuck, slow = await RawClient.connected(server.port), await RawClient.connected(server.port)
            connections = [await server.meet(stuck), await server.meet(slow)]
            for connection in connections:
                connection.send(commands.Message(1, commands.MessageIdData(1, 1)), bytes(64 << 20))
                assert not connection.writable
            for _ in range(4):  # from the first look on, after half a minute
                await loop.move(30)
                await slow.reader.readexactly(8 << 20)
                assert [each.closed for each in connections] == [False, False]
            await loop.move(30)
            await until(lambda: connections[0].closed)
            await loop.move(1)
            assert server.gone == []  # it may still take what is queued, for five seconds
            await loop.move(4.1)
            await until(lambda: server.gone)
            assert server.gone == connections[:1]
            for _ in range(4):
                await loop.move(30)
                await slow.reader.readexactly(8 << 20)
            assert not connections[1].closed

    loop = HandMovedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))


async def test_a_connection_ends_when_what_was_queued_has_left() -> None:
    """Also a message that is larger than every buffer."""
    blob = bytes(8 << 20)

    async with served_client() as (server, client):
        connection = await server.meet(client)
        connection.send(commands.Message(1, commands.MessageIdData(1, 1)), blob)
        connection.close("test")
        connection.close("again")
        connection.send(commands.Ping())
        assert connection.closed
        assert await client.hear_blob() == (commands.Message(1, commands.MessageIdData(1, 1)), blob)
        assert await client.hear() is None
        await client.close()
        await until(lambda: server.gone)


async def test_answers_arrive_though_the_client_goes_on_sending_to_a_connection_that_is_closed() -> None:
    """Bytes that nobody reads would reset the connection, and take with them what was sent to the client."""
    blob = join_blob(b"", bytes(1 << 20))

    def handler(connection: Connection, command: Any, blob: memoryview) -> None:
        connection.send(commands.Message(1, commands.MessageIdData(1, 1)), bytes(4 << 20))
        connection.close("test")

    async with served_client({commands.Send: handler}) as (_, client):
        client.say(*(commands.Send(1, number) for number in range(10)), blob=blob)
        assert len(present(await client.hear_blob())[1]) == 4 << 20
        assert await client.hear() is None


async def test_a_silent_client_gets_a_ping_and_is_then_closed() -> None:
    """Keep-alive on a real clock."""
    async with served_client(keep_alive_interval_seconds=0.05) as (_, client):
        assert await client.hear() == commands.Ping()
        assert await client.hear() is None


async def test_a_client_that_does_not_finish_its_handshake_is_closed() -> None:
    """Though it sends a byte now and then."""
    async with serving(handshake_timeout_seconds=0.05) as server:
        client = await RawClient.open(server.port)
        client.writer.write(b"\0")
        assert await client.hear() is None


async def test_a_ping_tells_whether_the_client_is_there() -> None:
    """Its PONG in time, none in time, and a connection that is gone."""
    async with serving() as server:
        client = await RawClient.connected(server.port)
        connection = await server.meet(client)
        asked = asyncio.ensure_future(connection.ping(20))
        assert await client.hear() == commands.Ping()
        client.say(commands.Pong())
        assert await asked
        assert not await connection.ping(0.01)
        asked = asyncio.ensure_future(connection.ping(20))
        await client.close()
        assert not await asked
        assert not await connection.ping(20)


@pytest.mark.parametrize("limit", ["broker_max_connections", "broker_max_connections_per_ip"])
async def test_a_connection_too_many_is_told_so_and_closed(limit: str) -> None:
    """NotAllowedError; when another has gone there is a place again."""
    settings: dict[str, Any] = {limit: 2}
    async with serving(**settings) as server:
        first, _ = await RawClient.connected(server.port), await RawClient.connected(server.port)
        third = await RawClient.open(server.port)
        error = await third.hear_a(commands.Error)
        assert (error.request_id, error.error) == (NO_REQUEST, ServerError.NOT_ALLOWED)
        assert await third.hear() is None
        await first.close()
        await until(lambda: len(server.gone) == 1)
        await RawClient.connected(server.port)


class Words:
    """Credentials are `role:seconds`."""

    def prove(self, data: bytes) -> Proven:
        role, colon, expires = data.decode().partition(":")
        if not colon:
            raise InvalidCredentials("no")
        return Proven(role, "token", int(expires) or None)


async def test_a_client_without_good_credentials_is_told_so_and_closed() -> None:
    """AuthenticationError, then the end; and a role for one that has them."""
    async with serving(authentication=Authentication({"token": Words().prove})) as server:
        for data in (None, b"nobody"):
            client = await RawClient.open(server.port)
            client.say(commands.Connect("test", auth_method_name="token", auth_data=data))
            error = await client.hear_a(commands.Error)
            assert (error.request_id, error.error) == (NO_REQUEST, ServerError.AUTHENTICATION)
            assert await client.hear() is None
            await client.close()
        client = await RawClient.connected(server.port, auth_method_name="token", auth_data=b"me:0")
        assert (await server.meet(client)).role == "me"


@pytest.mark.parametrize(
    ("fresh", "goes_on"), [(b"me:5000", True), (b"other:5000", False), (b"bad", False), (None, False)]
)
async def test_credentials_that_expire_are_asked_for_again(fresh: bytes | None, goes_on: bool) -> None:
    """The same role anew goes on; another, bad ones, or none before the next check end the connection."""
    flags = commands.FeatureFlags(supports_auth_refresh=True)

    authentication = Authentication({"token": Words().prove})
    async with serving(authentication=authentication) as server:
        client = await RawClient.connected(
            server.port, auth_method_name="token", auth_data=b"me:1000", feature_flags=flags
        )
        server.now_ms = 1_000
        server.look_at_credentials()
        challenge = await client.hear_a(commands.AuthChallenge)
        assert challenge.challenge == commands.AuthData("token", b"PulsarAuthRefresh")
        if fresh is not None:
            client.say(commands.AuthResponse("test", commands.AuthData("token", fresh)))
        else:
            server.look_at_credentials()
        if goes_on:
            await server.has_answers()
            assert (await server.meet(client)).role == "me"
            server.now_ms = 5_000
            server.look_at_credentials()
            assert isinstance(await client.hear(), commands.AuthChallenge)
        else:
            error = await client.hear_a(commands.Error)
            assert (error.request_id, error.error) == (NO_REQUEST, ServerError.AUTHENTICATION)
            assert await client.hear() is None


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
        found = present(connection._transport).get_extra_info("socket")
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
