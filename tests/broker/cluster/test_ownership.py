"""Two brokers and a placement table: redirects, questions that are passed on, refusals, a table that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duelog import DelayedStore
from duelog.broker.configuration import BrokerConfig
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import ServerError
from duelog.broker.server.broker import Broker, store_config
from duelog.store.errors import InvalidArgument
from tests.broker.clients.conftest import free_port
from tests.broker.cluster.proxied import proxy_to, through
from tests.broker.lookup.stage import Stage
from tests.broker.server.raw_client import RawClient, end_clients

ONE, TWO = "persistent://one/x/t", "persistent://two/x/t"


class Pair:
    """Brokers a and b; `two/x` is b's, all else a's."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.ports = {name: free_port() for name in "ab"}
        self.http = {name: free_port() for name in "ab"}
        self.path = folder / "placement.toml"
        self.other = folder / "other.toml"
        """A table that says that `two/x` is a's."""
        self.place("b")
        self.place("a", self.other)
        self.stores = {name: folder / name for name in "ab"}
        self.settings = settings
        self.running: dict[str, tuple[DelayedStore, Broker]] = {}

    def place(self, owner: str, path: Path | None = None) -> None:
        """Have a broker serve `two/x`."""
        lines = ['default = "a"', f'namespaces = {{"two/x" = "{owner}"}}']
        for name in "ab":
            lines += [f"[brokers.{name}]", f'url = "pulsar://127.0.0.1:{self.ports[name]}"',
                      f'http_url = "http://127.0.0.1:{self.http[name]}"']  # fmt: skip
        (path or self.path).write_text("\n".join(lines))

    async def start(self, name: str, path: Path | None = None) -> None:
        """Start a broker; both have both namespaces."""
        values: dict[str, Any] = {"bind_address": "127.0.0.1", "worker_threads": 4, "placement_refresh_seconds": 0.02}
        config = BrokerConfig(
            **{**values, **self.settings},
            broker_service_port=self.ports[name],
            web_service_port=self.http[name],
            placement_file=path or self.path,
            placement_broker=name,
        )
        store = DelayedStore.open(self.stores[name], store_config(config))

        def prepare() -> None:
            stage = Stage(store)
            for namespace in ("one/x", "two/x"):
                stage.set(namespace)

        await asyncio.to_thread(prepare)
        broker = Broker(store, config)
        self.running[name] = store, broker
        await broker.start()

    async def stop(self) -> None:
        """End them."""
        for store, broker in self.running.values():
            await broker.stop()
            store.close()


@asynccontextmanager
async def pair_at(folder: Path, *, agreed: bool = True, **settings: Any) -> AsyncIterator[Pair]:
    """Two brokers."""
    pair = Pair(folder, **settings)
    try:
        await pair.start("a")
        await pair.start("b", None if agreed else pair.other)
        yield pair
        end_clients()
    finally:
        await pair.stop()


async def test_any_broker_answers_questions_and_only_the_owner_takes_producers_and_consumers(tmp_path: Path) -> None:
    """Partitions, schemas and lists come from the owner; lookups are redirected to it; the other store gets nothing."""
    async with pair_at(tmp_path, default_num_partitions=3) as pair:
        a, b = [await RawClient.connected(pair.ports[name]) for name in "ab"]
        url = f"pulsar://127.0.0.1:{pair.ports['b']}"
        found = await a.ask(commands.Lookup(TWO, 1))
        assert found == commands.LookupResponse(1, url=url, url_tls="", response=commands.LookupKind.REDIRECT)
        connect = await b.ask_for(commands.LookupResponse, commands.Lookup(TWO, 2))
        assert (connect.response, connect.url) == (commands.LookupKind.CONNECT, url)
        metadata = await a.ask_for(commands.PartitionedMetadataResponse, commands.PartitionedMetadata(TWO, 1))
        assert (metadata.request_id, metadata.partitions) == (1, 3)
        schema = commands.Schema("s", b'"string"', 1)
        made = await a.ask(commands.GetOrCreateSchema(2, TWO, schema))
        assert made == commands.GetOrCreateSchemaResponse(2, schema_version=bytes(8))
        got = await a.ask_for(commands.GetSchemaResponse, commands.GetSchema(3, TWO))
        assert (got.request_id, got.schema) == (3, schema)
        listed = await a.ask_for(commands.GetTopicsResponse, commands.GetTopics(4, "two/x"))
        assert listed.topics == [f"{TWO}-partition-{number}" for number in range(3)]
        kind = commands.SubscriptionType.SHARED
        for asked in (commands.Producer(f"{TWO}-partition-0", 1, 5), commands.Subscribe(TWO, "s", kind, 1, 6)):
            refused = await a.ask_for(commands.Error, asked)
            assert (refused.request_id, refused.error) == (asked.request_id, ServerError.SERVICE_NOT_READY)
        watch = await a.ask_for(commands.Error, commands.WatchTopicList(7, 1, "two/x", ".*"))
        assert watch.error is ServerError.NOT_ALLOWED
        assert not list(pair.running["a"][0].topics())
        assert len(list(pair.running["b"][0].topics())) == 3
        await a.ask_for(commands.ProducerSuccess, commands.Producer(f"{ONE}-partition-0", 1, 8))


async def test_a_redirected_put_of_a_namespace_takes_its_tenant_from_the_broker_that_knows_it(tmp_path: Path) -> None:
    """307, with its administrators; a tenant that none knows is 404, as is one that cannot be asked for."""
    async with pair_at(tmp_path) as pair, aiohttp.ClientSession() as session:
        urls = {name: f"http://127.0.0.1:{pair.http[name]}/admin/v2" for name in "ab"}
        pair.path.write_text(
            pair.path.read_text().replace("namespaces = {", 'namespaces = {"new/n" = "b", "no/n" = "b", ')
        )
        for _, broker in pair.running.values():
            assert broker._services is not None
            assert broker._services.ownership is not None
            broker._services.ownership.file.refresh()
        roles = {"adminRoles": ["ann"], "allowedClusters": ["standalone"]}
        assert (await session.put(f"{urls['a']}/tenants/new", json=roles)).status == 204
        assert (await session.get(f"{urls['b']}/tenants/new")).status == 404
        assert (await session.put(f"{urls['a']}/namespaces/no/n")).status == 404
        async with session.put(f"{urls['a']}/namespaces/new/n", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (307, f"{urls['b']}/namespaces/new/n")
        async with session.put(f"{urls['a']}/namespaces/new/n") as answer:
            assert (answer.status, answer.url.port) == (204, pair.http["b"])
        async with session.get(f"{urls['b']}/tenants/new") as answer:
            assert await answer.json() == roles
        await pair.running["a"][1].stop()
        assert (await session.put(f"{urls['b']}/namespaces/no/n")).status == 404


async def test_a_table_that_changes_sends_clients_to_the_new_owner(tmp_path: Path) -> None:
    """Producers and consumers of what moved away are closed, what watches it ends; what stays is left alone."""
    async with pair_at(tmp_path) as pair:
        b = await RawClient.connected(pair.ports["b"])
        kind = commands.SubscriptionType.SHARED
        assert isinstance(await b.ask(commands.Producer(TWO, 1, 1)), commands.ProducerSuccess)
        assert await b.ask(commands.Subscribe(TWO, "s", kind, 2, 2)) == commands.Success(2)
        a = await RawClient.connected(pair.ports["a"])
        assert isinstance(await a.ask(commands.Producer(ONE, 1, 1)), commands.ProducerSuccess)
        watching = await RawClient.connected(pair.ports["b"])
        await watching.ask_for(commands.WatchTopicListSuccess, commands.WatchTopicList(1, 1, "two/x", ".*"))
        pair.place("a")
        assert await watching.hear() is None
        closed = [await b.hear(), await b.hear()]
        assert {type(each) for each in closed} == {commands.CloseProducer, commands.CloseConsumer}
        found = await b.ask_for(commands.LookupResponse, commands.Lookup(TWO, 3))
        assert (found.response, found.url) == (
            commands.LookupKind.REDIRECT, f"pulsar://127.0.0.1:{pair.ports['a']}"
        )  # fmt: skip
        while True:  # until a has looked at the table, too; nothing else comes: its producer is there
            found = await a.ask_for(commands.LookupResponse, commands.Lookup(TWO, 3))
            if found.response == commands.LookupKind.CONNECT:
                break


async def test_brokers_that_do_not_agree_do_not_ask_each_other_for_ever(tmp_path: Path) -> None:
    """A question that was passed on is not passed on again."""
    async with pair_at(tmp_path, agreed=False) as pair:
        client = await RawClient.connected(pair.ports["a"])
        metadata = await client.ask_for(commands.PartitionedMetadataResponse, commands.PartitionedMetadata(TWO, 1))
        assert metadata.error is ServerError.SERVICE_NOT_READY


@pytest.mark.parametrize("placed", [True, False])
async def test_a_proxy_asks_the_owner_with_and_without_a_table(placed: bool, tmp_path: Path) -> None:
    """By its table, or by redirects, clients are sent to the owner through the proxy."""
    async with pair_at(tmp_path) as pair:
        urls = [f"pulsar://127.0.0.1:{pair.ports[name]}" for name in "ab"]
        settings: dict[str, Any] = {"placement_file": pair.path} if placed else {}
        async with proxy_to(*([] if placed else urls), **settings) as (_, own):
            clients = [await RawClient.connected(own) for _ in range(2)]
            for number, client in enumerate(clients):
                for topic, name in ((ONE, "a"), (TWO, "b")):
                    found = await client.ask_for(commands.LookupResponse, commands.Lookup(topic, number))
                    assert found.url == f"pulsar://127.0.0.1:{pair.ports[name]}"
                    assert (found.response, found.through_proxy) == (commands.LookupKind.CONNECT, True)
                await client.ask_for(commands.GetTopicsResponse, commands.GetTopics(9, "two/x"))
                await client.close()
            side, heard = await through(own, f"127.0.0.1:{pair.ports['b']}")
            assert isinstance(heard, commands.Connected)
            assert isinstance(await side.ask(commands.Producer(TWO, 1, 1)), commands.ProducerSuccess)


async def test_a_namespace_that_no_broker_serves_is_not_found(tmp_path: Path) -> None:
    """Without a default in the table."""
    async with pair_at(tmp_path) as pair:
        pair.path.write_text(pair.path.read_text().replace('default = "a"', ""))
        async with proxy_to(placement_file=pair.path) as (_, own):
            client = await RawClient.connected(own)
            found = await client.ask_for(commands.LookupResponse, commands.Lookup(ONE, 1))
            assert found.error is ServerError.TOPIC_NOT_FOUND


async def test_a_broker_has_to_be_in_its_table(tmp_path: Path) -> None:
    """By the name that it was given."""
    pair = Pair(tmp_path)

    config = BrokerConfig(broker_service_port=0, placement_file=pair.path, placement_broker="c")
    with DelayedStore.open(tmp_path / "s", store_config(config)) as store, pytest.raises(InvalidArgument) as error:
        await Broker(store, config).start()
    assert error.value.field == "placementBroker"
