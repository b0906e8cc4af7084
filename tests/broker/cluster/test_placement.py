"""The placement table, a file that changes, and two brokers that go by it: redirects, questions passed on, refusals."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duelog import DelayedStore
from duelog.broker.cluster.placement import (
    Address,
    Placement,
    PlacementFile,
    parse_placement,
    place_namespace,
    read_placement,
)
from duelog.broker.configuration import BrokerConfig
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import ServerError
from duelog.broker.server.broker import Broker, store_config
from duelog.store.errors import InvalidArgument
from tests.broker.cluster.test_proxy import proxy_to, through
from tests.broker.lookup.stage import Stage
from tests.broker.server.raw_client import RawClient, end_clients
from tests.conftest import present
from tests.ports import free_port

TABLE = """# where things are
default = "a"

[brokers.a]
url = "pulsar://localhost:6650"
tls_url = "pulsar+ssl://localhost:6651"
http_url = "http://localhost:8080/"
store = "stores/a"

[brokers.b]   # the second one
url = "pulsar+ssl://B.example.org:6651"

[tenants]
acme = "b"

[namespaces]
"acme/orders" = "a"  # the large one
"""


def test_a_namespace_counts_more_than_its_tenant_and_a_tenant_more_than_the_default(tmp_path: Path) -> None:
    """In both forms of the file."""
    (tmp_path / "p.toml").write_text(TABLE)
    table = read_placement(tmp_path / "p.toml")
    found = {each: table.owner(each) for each in ("acme/orders", "acme/other", "public/default")}
    assert {each: owner and owner.name for each, owner in found.items()} == {
        "acme/orders": "a", "acme/other": "b", "public/default": "a"
    }  # fmt: skip
    assert [table.brokers[name].store for name in "ab"] == [tmp_path / "stores/a", None]
    assert (table.brokers["a"].http_url, table.brokers["b"].http_url) == ("http://localhost:8080", None)
    assert table.brokers["b"].address == Address("b.example.org", 6651, tls=True)
    assert str(table.brokers["b"].address) == "pulsar+ssl://b.example.org:6651"
    same = {
        "default": "a",
        "brokers": {"a": {"url": "pulsar://localhost:6650", "tls_url": "pulsar+ssl://localhost:6651",
                          "http_url": "http://localhost:8080", "store": "stores/a"},
                    "b": {"url": "pulsar+ssl://B.example.org:6651"}},
        "tenants": {"acme": "b"}, "namespaces": {"acme/orders": "a"},
    }  # fmt: skip
    assert parse_placement(json.dumps(same), tmp_path / "p.json") == table


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("default = 1", "brokers"),
        ("=", "placement"),
        ('brokers = "a"', "brokers"),
        ("[brokers.a]\n", "brokers.a.url"),
        ("[brokers]\na = 1", "brokers.a"),
        ('[brokers.a]\nurl = "http://h:1"', "brokers.a.url"),
        ('[brokers.a]\nurl = "pulsar://h:99999"', "brokers.a.url"),
        ('[brokers.a]\nurl = "pulsar://h:1"\ntls_url = "pulsar://h:2"', "brokers.a.tls_url"),
        ('[brokers.a]\nurl = "pulsar://h:1"\nhttp_url = "h"', "brokers.a.http_url"),
        ('[brokers.a]\nurl = "pulsar://h:1"\nhost = "h"', "brokers.a.host"),
        ('[brokers.a]\nurl = "pulsar://h:1"\n[brokers.b]\nurl = "pulsar://h:1"', "brokers.b.url"),
        ('default = "b"\n[brokers.a]\nurl = "pulsar://h:1"', "default"),
        ('[brokers.a]\nurl = "pulsar://h:1"\n[tenants]\nt = "b"', "tenants.t"),
        ('[brokers.a]\nurl = "pulsar://h:1"\n[namespaces]\n"t/n" = 3', "namespaces.t/n"),
        ('[brokers.a]\nurl = "pulsar://h:1"\n[namespaces]\n"t" = "a"', "namespace"),
        ('[broker.a]\nurl = "pulsar://h:1"', "broker"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(text: str, named: str) -> None:
    """Each mistake has an error of its own, with the field."""
    with pytest.raises(InvalidArgument, match=f"^{named}="):
        parse_placement(text, Path("p.toml"))


def test_a_table_is_taken_anew_when_its_file_changes_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be read is logged once, and the last table stays."""
    path = tmp_path / "p.toml"
    path.write_text(TABLE)
    file = PlacementFile(path)
    first = file.table
    assert not file.refresh()
    path.write_text("[")
    with caplog.at_level(logging.ERROR):
        assert not file.refresh()
        assert not file.refresh()
    assert len(caplog.records) == 1
    assert file.table is first
    path.write_text(TABLE.replace('acme = "b"', 'acme = "a"'))
    os.utime(path, ns=(1, 1))
    assert file.refresh()
    assert file.table.tenants == {"acme": "a"}


def _owner(table: Placement, namespace: str) -> str | None:
    owner = table.owner(namespace)
    return None if owner is None else owner.name


@pytest.mark.parametrize("namespace", ["acme/orders", "acme/mail"])
def test_placing_a_namespace_changes_one_line(tmp_path: Path, namespace: str) -> None:
    """Comments and all other lines stay; twice is once."""
    path = tmp_path / "p.toml"
    path.write_text(TABLE)
    assert _owner(place_namespace(path, namespace, "b"), namespace) == "b"
    once = path.read_text()
    assert set(TABLE.splitlines()) - set(once.splitlines()) <= {'"acme/orders" = "a"  # the large one'}
    place_namespace(path, namespace, "b")
    assert path.read_text() == once
    assert _owner(read_placement(path), namespace) == "b"
    with pytest.raises(InvalidArgument, match="expected a broker"):
        place_namespace(path, namespace, "c")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.toml", '[brokers.a]\nurl = "pulsar://h:1"'),
        ("p.json", '{"brokers": {"a": {"url": "pulsar://h:1"}}}'),
        ("p.toml", '[namespaces]\n\n[brokers.a]\nurl = "pulsar://h:1"\n'),
    ],
)
def test_a_namespace_is_placed_where_none_was(tmp_path: Path, name: str, text: str) -> None:
    """The part of the table comes into being."""
    path = tmp_path / name
    path.write_text(text)
    place_namespace(path, "t/n", "a")
    assert read_placement(path).namespaces == {"t/n": "a"}


def test_a_file_of_another_shape_is_left_to_its_author(tmp_path: Path) -> None:
    """An inline table is not edited: the error says what to write."""
    path = tmp_path / "p.toml"
    path.write_text(
        'namespaces = {"t/n" = "a"}\n[brokers.a]\nurl = "pulsar://h:1"\n[brokers.b]\nurl = "pulsar://h:2"\n'
    )
    before = path.read_text()
    with pytest.raises(InvalidArgument):
        place_namespace(path, "t/n", "b")
    assert path.read_text() == before


def test_two_who_place_namespaces_at_one_moment_keep_each_others_lines(tmp_path: Path) -> None:
    """Each reads the table and writes it whole: without a lock the later one writes what was there before the other."""
    path = tmp_path / "p.toml"
    path.write_text(TABLE)
    names = [f"t/n{number}" for number in range(24)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: place_namespace(path, name, "b"), names))
    assert {name for name in names if _owner(read_placement(path), name) == "b"} == set(names)
    assert os.listdir(tmp_path) == ["p.toml"]


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
            present(present(broker._services).ownership).file.refresh()
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
