"""The proxy in the test's process: questions, connections that go through, refusals, its end; lists within limits."""

import asyncio
import logging
import random
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from duelog.broker.cluster.proxy import Proxy, ProxyConfig
from duelog.broker.listing.topic_listing import topics_hash
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import ServerError
from duelog.store.errors import InvalidArgument
from tests.broker.server.raw_client import RawClient, end_clients, until
from tests.broker.server.test_broker import TOPIC, Noise, blob_of, broker_at


@asynccontextmanager
async def proxy_to(*urls: str, **settings: Any) -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy at a free port of this machine, and the port."""
    values: dict[str, Any] = {"broker_urls": urls, "bind_address": "127.0.0.1", "broker_service_port": 0,
                              "broker_proxy_connect_timeout_ms": 60_000}  # fmt: skip
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


class SilentBroker:
    """Says what a test tells it to; else it takes what comes while `reading`."""

    def __init__(self) -> None:
        self.port = 0
        self.clients: list[RawClient] = []

    @property
    def place(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def silent_broker() -> AsyncIterator[SilentBroker]:
    """A broker that does nothing by itself."""
    made = SilentBroker()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.clients.append(RawClient(reader, writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0, limit=1 << 10)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for client in made.clients:
            with suppress(ConnectionError):
                await client.close()


async def let_in(own: int, broker: SilentBroker) -> tuple[RawClient, RawClient]:
    """A client that a broker has let in through the proxy, and the broker's side of it."""
    client = await RawClient.open(own)
    client.say(commands.Connect("test", protocol_version=21))
    await until(lambda: broker.clients)
    side = broker.clients[0]
    assert isinstance(await side.hear(), commands.Connect)
    side.say(commands.Connected("s", 19))
    assert await client.hear() == commands.Connected("s", 19, feature_flags=commands.FeatureFlags())
    return client, side


async def test_questions_are_answered_by_the_broker_and_lookup_names_the_proxy(tmp_path: Path) -> None:
    """The client connects to the proxy, and tells it which broker it means."""
    async with broker_at(tmp_path / "s") as (broker, port), proxy_to(broker.urls.plain) as (proxy, own):
        client = await RawClient.connected(own)
        found = await client.ask(commands.Lookup(TOPIC, 7))
        assert found == commands.LookupResponse(
            7,
            url=f"pulsar://127.0.0.1:{port}",
            url_tls=f"pulsar+ssl://127.0.0.1:{port}",
            response=commands.LookupKind.CONNECT,
            authoritative=True,
            through_proxy=True,
        )
        metadata = await client.ask(commands.PartitionedMetadata(TOPIC, 8))
        assert metadata == commands.PartitionedMetadataResponse(
            8, partitions=0, response=commands.MetadataResult.SUCCESS
        )
        schema = await client.ask_for(commands.GetSchemaResponse, commands.GetSchema(9, TOPIC))
        assert (schema.request_id, schema.error) == (9, ServerError.TOPIC_NOT_FOUND)
        unknown = await client.ask_for(commands.LookupResponse, commands.Lookup("persistent://no/where/t", 10))
        assert (unknown.response, unknown.error) == (commands.LookupKind.FAILED, ServerError.TOPIC_NOT_FOUND)
        watch = await client.ask_for(commands.Error, commands.WatchTopicList(11, 1, "public/default", ".*"))
        assert watch.error is ServerError.NOT_ALLOWED
        assert proxy.gate.asked == 4


async def test_a_connection_goes_through_with_all_that_is_said(tmp_path: Path) -> None:
    """Producer, consumer, messages and watches, both ways; the broker knows the client as what it is."""
    async with broker_at(tmp_path / "s") as (broker, port), proxy_to(broker.urls.plain) as (proxy, own):
        client, connected = await through(own, f"127.0.0.1:{port}")
        assert isinstance(connected, commands.Connected)
        assert connected.feature_flags is not None
        assert connected.feature_flags.supports_topic_watchers
        heard = await client.ask(commands.WatchTopicList(1, 1, "public/default", "public/default/.*"))
        assert heard == commands.WatchTopicListSuccess(1, 1, "00000000")
        came = [await client.ask(commands.Producer(TOPIC, 1, 2)), await client.hear()]
        (update,) = [each for each in came if isinstance(each, commands.WatchTopicUpdate)]
        assert (update.watcher_id, update.new_topics, update.topics_hash) == (1, [TOPIC], topics_hash([TOPIC]))
        kind = commands.SubscriptionType.SHARED
        assert await client.ask(commands.Subscribe(TOPIC, "s", kind, 1, 2)) == commands.Success(2)
        client.say(commands.Flow(1, 100))
        for number in range(100):
            client.say(commands.Send(1, number), blob=blob_of(number))
        messages = [await client.hear_blob() for _ in range(200)]
        blobs = [each[1] for each in messages if each is not None and isinstance(each[0], commands.Message)]
        assert blobs == [blob_of(number) for number in range(100)]
        assert proxy.figures.spliced == 1
        await client.close()
        await until(lambda: not proxy.figures.spliced)


async def test_only_brokers_that_are_known_are_connected_to(tmp_path: Path) -> None:
    """Any other place is refused, and nothing is connected to it."""
    async with broker_at(tmp_path / "s") as (broker, _), proxy_to(broker.urls.plain) as (_, own):
        for place in ("127.0.0.1:1", "localhost:22", "example.org:6650", "x", "pulsar://"):
            client, heard = await through(own, place)
            assert isinstance(heard, commands.Error), place
            assert (heard.request_id, heard.error) == (commands.NO_REQUEST, ServerError.SERVICE_NOT_READY), place
            await ended(client)


async def test_no_broker_there_is_service_not_ready(unused_port: int) -> None:
    """Clients try again."""
    async with proxy_to(f"pulsar://127.0.0.1:{unused_port}") as (_, own):
        client = await RawClient.open(own)
        refused = await client.ask_for(commands.Error, commands.Connect("test", protocol_version=21))
        assert refused.error is ServerError.SERVICE_NOT_READY
        await ended(client)
        client, heard = await through(own, f"127.0.0.1:{unused_port}")
        assert isinstance(heard, commands.Error)
        assert heard.error is ServerError.SERVICE_NOT_READY
        await ended(client)


async def test_a_broker_that_goes_while_it_is_asked_is_service_not_ready_and_the_next_question_finds_it_again() -> None:
    """In the answer's own form; the client's connection stays."""
    async with silent_broker() as broker, proxy_to(f"pulsar://{broker.place}") as (_, own):
        client, side = await let_in(own, broker)
        client.say(commands.Lookup(TOPIC, 1), commands.GetTopics(2, "public/default"))
        assert isinstance(await side.hear(), commands.Lookup)
        await side.close()
        answers = [await client.hear(), await client.hear()]
        for answer in answers:
            assert isinstance(answer, commands.LookupResponse | commands.Error)
            assert answer.error is ServerError.SERVICE_NOT_READY
        client.say(commands.PartitionedMetadata(TOPIC, 3))
        await until(lambda: len(broker.clients) == 2)
        assert isinstance(await broker.clients[1].hear(), commands.Connect)
        broker.clients[1].say(commands.Connected("s", 19))
        asked = await broker.clients[1].hear()
        assert asked == commands.PartitionedMetadata(TOPIC, 3)
        broker.clients[1].say(commands.PartitionedMetadataResponse(3, partitions=4))
        assert await client.hear() == commands.PartitionedMetadataResponse(3, partitions=4)


async def test_a_listing_fails_as_the_broker_said_or_is_service_not_ready() -> None:
    """Errors of credentials, rights and load are told as they are; nothing of the limits is held afterwards."""
    told = {ServerError.AUTHORIZATION, ServerError.AUTHENTICATION, ServerError.TOO_MANY_REQUESTS}
    async with silent_broker() as broker, proxy_to(f"pulsar://{broker.place}") as (proxy, own):
        client, side = await let_in(own, broker)
        for error in ServerError:
            client.say(commands.GetTopics(5, "public/default"))
            await side.hear()
            assert proxy.limiter.heap.acquired > 0
            side.say(commands.Error(5, error, "no"))
            assert await client.hear() == commands.Error(
                5, error if error in told else ServerError.SERVICE_NOT_READY, "no"
            )
            assert (proxy.limiter.heap.acquired, proxy.limiter.direct.acquired) == (0, 0)


async def test_credentials_are_the_clients_own_and_a_brokers_refusal_is_what_the_client_hears() -> None:
    """Method and data of CONNECT, the answers to challenges too; no client says that it speaks for another."""
    async with silent_broker() as broker, proxy_to(f"pulsar://{broker.place}") as (_, own):
        given = commands.Connect(
            "Pulsar-CPP-v3", b"secret", 19, "token", original_principal="root",
            feature_flags=commands.FeatureFlags(supports_auth_refresh=True),
        )  # fmt: skip
        for place in (None, broker.place):
            client = await RawClient.open(own)
            given.proxy_to_broker_url = place
            client.say(given)
            before = len(broker.clients)
            await until(lambda before=before: len(broker.clients) > before)
            side = broker.clients[-1]
            said = await side.hear()
            assert said == commands.Connect("Pulsar-CPP-v3", b"secret", 19, "token", None, None, given.feature_flags)
            challenge = commands.AuthData("token", b"again?")
            side.say(commands.AuthChallenge("s", challenge, 19))
            asked = await client.hear_a(commands.AuthChallenge)
            assert asked.challenge == challenge
            answer = commands.AuthResponse("Pulsar-CPP-v3", commands.AuthData("token", b"better"), 19)
            client.say(answer)
            assert await side.hear() == answer
            side.say(commands.Error(commands.NO_REQUEST, ServerError.AUTHENTICATION, "who are you"))
            await side.close()
            heard = await client.hear()
            assert heard == commands.Error(commands.NO_REQUEST, ServerError.AUTHENTICATION, "who are you")
            await ended(client)


async def test_what_is_kept_of_a_connection_is_bounded_both_ways() -> None:
    """A side that does not read holds up the other one, and no more than the marks are kept."""
    settings = {"write_high_mark": 1 << 16, "write_low_mark": 1 << 14}
    async with silent_broker() as broker, proxy_to(f"pulsar://{broker.place}", **settings) as (proxy, own):
        client = await RawClient.open(own)
        client.say(commands.Connect("test", protocol_version=21, proxy_to_broker_url=broker.place))
        await until(lambda: broker.clients)
        side = broker.clients[0]
        await side.hear()
        piece, sent = bytes(1 << 20), 0
        for writer, reader in ((client.writer, side.reader), (side.writer, client.reader)):
            sent = 0
            before = proxy.figures.bytes
            writer.transport.set_write_buffer_limits(0)
            with suppress(TimeoutError):
                while sent < 200 << 20:
                    writer.write(piece)
                    sent += len(piece)
                    await asyncio.wait_for(writer.drain(), 0.5)
            assert sent < 200 << 20  # it was held up
            read = 0
            while read < sent:
                data = await asyncio.wait_for(reader.read(1 << 20), 30)
                assert not any(data)
                read += len(data)
            assert proxy.figures.bytes - before == sent


async def test_connections_are_limited_and_counted(tmp_path: Path) -> None:
    """One too many is told so, and closed."""
    limits = {"broker_max_connections": 2, "web_service_port": 0}
    async with broker_at(tmp_path / "s") as (broker, port), proxy_to(broker.urls.plain, **limits) as (proxy, own):
        await RawClient.connected(own)
        await through(own, f"127.0.0.1:{port}")
        heard = await (await RawClient.open(own)).hear()
        assert isinstance(heard, commands.Error)
        assert heard.error is ServerError.NOT_ALLOWED
        text = await asyncio.to_thread(_read, f"{proxy.web_urls.plain}/metrics")
        assert 'pulsar_proxy_active_connections{cluster="standalone"} 2.0' in text
        assert 'pulsar_proxy_new_connections_total{cluster="standalone"} 3.0' in text
        assert 'pulsar_proxy_rejected_connections_total{cluster="standalone"} 1.0' in text
        assert len([line for line in text.splitlines() if line.startswith("pulsar_proxy_topic_list_")]) == 26
        assert await asyncio.to_thread(_read, f"{proxy.web_urls.plain}/health") == "ok"


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read(), "utf-8")


async def test_the_end_closes_both_sides_after_what_was_said(tmp_path: Path) -> None:
    """Clients see the end of their connections, and the broker has none left."""
    async with broker_at(tmp_path / "s") as (broker, port), proxy_to(broker.urls.plain) as (proxy, own):
        first = await RawClient.connected(own)
        second, _ = await through(own, f"127.0.0.1:{port}")
        second.say(commands.Ping())
        assert isinstance(await second.hear(), commands.Pong)
        stopping = asyncio.ensure_future(proxy.stop())
        await ended(first)
        await ended(second)
        await stopping
        assert proxy.figures.spliced == 0


async def test_nothing_that_clients_say_breaks_the_proxy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Commands of every kind, to the proxy and through it, placed and not: it answers, or ends that connection."""
    caplog.set_level(logging.WARNING)
    table = tmp_path / "placement.toml"

    async def talk(noise: Noise, own: int, place: str | None) -> None:
        client: RawClient | None = None
        reading: asyncio.Task[None] | None = None
        for _ in range(100):
            if client is None or reading is None or reading.done():
                if client is not None:
                    await client.close()
                client = await RawClient.open(own)
                client.say(commands.Connect("test", protocol_version=21, proxy_to_broker_url=place))
                assert isinstance(await client.hear(), commands.Connected)
                reading = asyncio.ensure_future(_read_all(client))
                noise.producers.clear()
            command = noise.command()
            client.say(command, blob=noise.blob() if isinstance(command, commands.Send) else b"")
            await asyncio.sleep(0.001)
        if client is not None and reading is not None:
            reading.cancel()
            await client.close()

    async with broker_at(tmp_path / "s") as (broker, port):
        table.write_text(f'[brokers.a]\nurl = "{broker.urls.plain}"\n[tenants]\npublic = "a"\n')
        async with proxy_to(placement_file=table) as (proxy, own):
            place = f"127.0.0.1:{port}"
            await asyncio.gather(*(talk(Noise(900 + each), own, [None, place][each % 2]) for each in range(4)))
            client = await RawClient.connected(own)
            assert (await client.ask_for(commands.LookupResponse, commands.Lookup(TOPIC, 7))).through_proxy
            await client.close()
            await until(lambda: not proxy.figures.spliced)
            assert (proxy.limiter.heap.acquired, proxy.limiter.direct.acquired) == (0, 0)
    assert [each.getMessage() for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR] == []


async def _read_all(client: RawClient) -> None:
    while await client.hear() is not None:
        pass


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "brokerUrls"),
        ({"broker_urls": ("http://h:1",)}, "brokerUrls"),
        ({"broker_urls": ("pulsar://h:1",), "broker_service_port": 70_000}, "servicePort"),
        ({"broker_urls": ("pulsar://h:1",), "broker_max_connections": 0}, "maxConcurrentInboundConnections"),
        ({"broker_urls": ("pulsar://h:1",), "request_timeout_seconds": 0}, "requestTimeoutSeconds"),
        ({"broker_urls": ("pulsar://h:1",), "broker_service_port": None}, "servicePort"),
    ],
)
def test_a_setting_that_cannot_be_is_named_as_in_the_file(settings: dict[str, object], named: str) -> None:
    """By the proxy's names."""
    with pytest.raises(InvalidArgument, match=f"^{named}="):
        ProxyConfig(**settings)  # type: ignore[arg-type]


NAMES = [f"persistent://public/default/{'x' * 180}-{number}" for number in range(60_000)]
"""Some 12 MB: more than sockets keep."""

MB = 1 << 20


class ListingBroker:
    """Answers every list with the same names, `pause_s` later; some it refuses, or ends the connection."""

    def __init__(self, names: list[str], seed: int | None = None) -> None:
        self._names = names
        self._random = None if seed is None else random.Random(seed)
        self.port = 0
        self.serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def end(self) -> None:
        """End every connection."""
        for writer in self.serving.values():
            writer.transport.abort()
        await asyncio.gather(*self.serving)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self.serving[cast("asyncio.Task[None]", asyncio.current_task())] = writer
        client = RawClient(reader, writer)
        with suppress(ConnectionError):
            while (heard := await client.hear()) is not None:
                if isinstance(heard, commands.Connect):
                    client.say(commands.Connected("s", 21))
                elif isinstance(heard, commands.GetTopics):
                    if self._random is not None:
                        await asyncio.sleep(self._random.random() / 50)
                        if self._random.random() < 0.1:
                            break
                        if self._random.random() < 0.1:
                            client.say(commands.Error(heard.request_id, ServerError.METADATA, "no"))
                            continue
                    client.say(commands.GetTopicsResponse(heard.request_id, self._names))
                    await writer.drain()
        await client.close()


@asynccontextmanager
async def listing(names: list[str], seed: int | None = None, **settings: Any) -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy to such a broker."""
    broker = ListingBroker(names, seed)
    server = await asyncio.start_server(broker.take, "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    try:
        async with proxy_to(f"pulsar://127.0.0.1:{broker.port}", **settings) as found:
            yield found
    finally:
        server.close()
        await broker.end()


def limits(limit_mb: int, timeout_ms: int, queue: int = 1_000) -> dict[str, Any]:
    """Settings of both kinds of memory."""
    found: dict[str, Any] = {}
    for kind in ("heap", "direct"):
        prefix = f"max_topic_list_in_flight_{kind}_mem_size"
        found |= {f"{prefix}_mb": limit_mb, f"{prefix}_permits_acquire_timeout_millis": timeout_ms,
                  f"{prefix}_permits_acquire_queue_size": queue}  # fmt: skip
    return found


async def test_a_list_over_the_limit_is_served_alone_and_holds_it_until_it_has_left() -> None:
    """Another one is TooManyRequests meanwhile, on a connection that stays; afterwards it is served."""
    async with listing(NAMES, **limits(1, 300)) as (proxy, own):
        deaf, other = [await RawClient.connected(own) for _ in range(2)]
        deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
        deaf.say(commands.GetTopics(1, "public/default"))
        await until(lambda: proxy.limiter.direct.acquired)
        assert proxy.limiter.direct.acquired == 1 * MB
        refused = await other.ask_for(commands.Error, commands.GetTopics(1, "public/default"))
        assert refused.error is ServerError.TOO_MANY_REQUESTS
        deaf.reader._transport.resume_reading()  # type: ignore[attr-defined]
        answer = await deaf.hear_a(commands.GetTopicsResponse)
        assert answer.topics == NAMES
        await until(lambda: not proxy.limiter.direct.acquired)
        answer = await other.ask_for(commands.GetTopicsResponse, commands.GetTopics(2, "public/default"))
        assert len(answer.topics) == len(NAMES)
        await until(lambda: not proxy.limiter.direct.acquired)
        assert proxy.limiter.heap.acquired == 0


async def test_a_listing_that_waits_for_permits_leaves_the_queue_when_its_client_goes() -> None:
    """At once, and not when it would have timed out; it holds no heap while it waits."""
    async with listing(NAMES, **limits(1, 25_000)) as (proxy, own):
        deaf, other = [await RawClient.connected(own) for _ in range(2)]
        deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
        deaf.say(commands.GetTopics(1, "public/default"))
        await until(lambda: proxy.limiter.direct.acquired and not proxy.limiter.heap.acquired)
        other.say(commands.GetTopics(1, "public/default"))
        await until(lambda: proxy.limiter.direct.queue_size)
        assert proxy.limiter.heap.acquired == 0
        other.writer.transport.abort()
        await until(lambda: not proxy.limiter.direct.queue_size)
        assert (proxy.limiter.direct.timeouts, proxy.limiter.direct.acquired) == (0, 1 * MB)
        deaf.writer.transport.abort()
        await until(lambda: not proxy.limiter.direct.acquired)


async def test_a_hundred_lists_over_one_connection_that_are_larger_than_the_limit_are_all_served() -> None:
    """One after the other; the time that they wait for each other is not the time that they may wait for memory."""
    async with listing(NAMES[:5_500], **limits(1, 50), request_timeout_seconds=300) as (proxy, own):
        client = await RawClient.connected(own)
        client.say(*(commands.GetTopics(number, "public/default") for number in range(100)))
        for number in range(100):
            frame = await client.hear_frame()
            assert len(frame) > MB
            assert commands.request_of(frame) == (commands.GetTopicsResponse, number)
        await client.close()
        assert proxy.limiter.heap.timeouts + proxy.limiter.direct.timeouts == 0


async def test_no_permit_is_lost_whatever_clients_and_brokers_do() -> None:
    """Clients leave while their list waits, is read or is written; brokers refuse, end connections, answer slowly."""
    chance = random.Random(11)

    async def client(own: int, answers: list[type]) -> None:
        made = await RawClient.connected(own)
        for request in range(3):
            made.say(commands.GetTopics(request, chance.choice(["public/default", "a/b"])))
            try:
                async with asyncio.timeout(chance.choice([0.005, 0.05, 5])):
                    heard = await made.hear()
            except TimeoutError:
                break
            if heard is None:
                break
            answers.append(type(heard))
        made.writer.transport.abort()

    answers: list[type] = []
    async with listing(NAMES[:2_000], 7, **limits(1, 100, 10)) as (proxy, own):
        for _ in range(4):
            await asyncio.gather(*(client(own, answers) for _ in range(15)))
        limiter = proxy.limiter
        await until(lambda: not limiter.heap.acquired and not limiter.direct.acquired)
        assert (limiter.heap.queue_size, limiter.direct.queue_size) == (0, 0)
        assert (limiter.heap.available, limiter.direct.available) == (MB, MB)
    assert set(answers) == {commands.GetTopicsResponse, commands.Error}
