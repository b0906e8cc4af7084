"""Lists of topics through the proxy under its limits: what waits, what fails, and that no permit is ever lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from duelog.broker.cluster.proxy import Proxy
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import ServerError
from tests.broker.cluster.proxied import proxy_to
from tests.broker.server.raw_client import RawClient, until

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
