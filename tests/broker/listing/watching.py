"""A client that watches for topics, and a broker in this process for it."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Self

from duelog import DelayedStore
from duelog.broker.configuration import BrokerConfig
from duelog.broker.listing.topic_listing import topics_hash
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import Command
from duelog.broker.server.broker import Broker, Services
from tests.broker.server.raw_client import WITHIN_S, RawClient, end_clients

NAMESPACE = "public/default"
PREFIX = f"persistent://{NAMESPACE}/"

_requests = count(1)


class Watched:
    """The names that a client knows by one watcher."""

    def __init__(self, watcher_id: int, pattern: str) -> None:
        self.watcher_id = watcher_id
        self.pattern = pattern
        self.request_id = 0
        self.names: set[str] = set()
        self.hash: str | None = None
        self.updates: list[commands.WatchTopicUpdate] = []
        self.errors: list[commands.Error] = []
        self.answers = 0

    def check(self) -> None:
        """The names are those that the broker's hash is of."""
        assert topics_hash(self.names) == self.hash


class WatchingClient(RawClient):
    """A connection that keeps what its watchers are told, and checks the hash each time."""

    watched: dict[int, Watched]
    others: asyncio.Queue[Command]
    _hearing: asyncio.Task[None]

    @classmethod
    async def watching(cls, port: int) -> Self:
        """Connect, and hear."""
        client = await cls.connected(port)
        client.watched = {}
        client.others = asyncio.Queue()
        client._hearing = asyncio.create_task(client._hear_all())
        return client

    def watch(self, watcher_id: int, pattern: str, namespace: str = NAMESPACE) -> Watched:
        """Ask; with the hash of what is known."""
        found = self.watched.setdefault(watcher_id, Watched(watcher_id, pattern))
        found.pattern = pattern
        found.request_id = next(_requests)
        self.say(commands.WatchTopicList(found.request_id, watcher_id, namespace, pattern, found.hash))
        return found

    async def _hear_all(self) -> None:
        while (heard := await self.hear()) is not None:
            if isinstance(heard, commands.Ping):
                self.say(commands.Pong())
            elif isinstance(heard, commands.WatchTopicListSuccess):
                found = self.watched[heard.watcher_id]
                assert heard.request_id == found.request_id
                if heard.topics_hash != found.hash:
                    found.names = set(heard.topics)
                    assert len(found.names) == len(heard.topics)
                found.hash = heard.topics_hash
                found.answers += 1
                found.check()
            elif isinstance(heard, commands.WatchTopicUpdate):
                found = self.watched[heard.watcher_id]
                assert found.answers
                new, deleted = set(heard.new_topics), set(heard.deleted_topics)
                assert not new & found.names
                assert deleted <= found.names
                found.names = (found.names | new) - deleted
                found.hash = heard.topics_hash
                found.updates.append(heard)
                found.check()
            else:
                self.others.put_nowait(heard)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Hear until a condition holds."""

        async def look() -> None:
            while not condition():
                if self._hearing.done():
                    await self._hearing
                    raise AssertionError("the connection has ended")
                await asyncio.sleep(0.002)

        await asyncio.wait_for(look(), WITHIN_S)

    async def topics(self, namespace: str = NAMESPACE, **values: Any) -> Command:
        """List."""
        self.say(commands.GetTopics(next(_requests), namespace, **values))
        return await asyncio.wait_for(self.others.get(), WITHIN_S)

    async def end(self) -> None:
        """End the connection; what went wrong is raised."""
        if self._hearing.done():
            self._hearing.result()
        self._hearing.cancel()
        await self.close()

    def reset(self) -> None:
        """End the connection as a client that is killed."""
        self._hearing.cancel()
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(1, 13, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Held:
    """A broker of this process."""

    def __init__(self, store: DelayedStore, broker: Broker, port: int) -> None:
        self.store = store
        self.port = port
        services = broker._services
        assert services is not None
        self.services: Services = services

    def names(self, namespace: str = NAMESPACE) -> set[str]:
        """The topics of the store."""
        return {topic.name for topic in self.store.topics(namespace)}

    def check_empty(self) -> None:
        """Nothing is held, and nothing waits."""
        limiter = self.services.limiter
        for each in (limiter.heap, limiter.direct):
            assert (each.acquired, each.queue_size) == (0, 0)
            assert each.available == each.max_permits


@asynccontextmanager
async def held_broker(store: DelayedStore, **settings: Any) -> AsyncIterator[Held]:
    """Serve a store at a free port; at the end nothing is held."""
    config = BrokerConfig(bind_address="127.0.0.1", broker_service_port=0, **settings)
    broker = Broker(store, config)
    await broker.start()
    made = Held(store, broker, int(broker.urls.plain.rpartition(":")[2]))
    try:
        yield made
        end_clients()
    finally:
        await broker.stop()
    made.check_empty()
    assert len(made.services.watchers) == len(made.services.name_sets) == 0
