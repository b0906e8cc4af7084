"""Topics of a namespace over HTTP: deleted under clients that use them; their lists hold permits."""

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore
from duelog.broker.listing import topic_listing
from duelog.broker.listing.memory_limits import Limits
from duelog.broker.lookup.topic_facts import TopicFacts
from duelog.broker.protocol import commands
from duelog.broker.server.broker import Broker
from tests.broker.admin.rest import Rest, administered
from tests.broker.server.raw_client import RawClient, until
from tests.conftest import present
from tests.tools.command_line import process

TOPIC = "persistent://public/default/t"
PATH = "/admin/v2/persistent/public/default/t"


async def test_duelog_topics_delete_beside_a_running_broker_refuses_a_topic_with_producers(tmp_path: Path) -> None:
    """By the store's directory and by the server alike; `--force` closes them, and nothing is kept of the topic."""
    path = tmp_path / "s"

    async def deleted(*options: object) -> tuple[int, str]:
        done = await asyncio.to_thread(process, "topics", "delete", *options)
        return done.returncode, done.stderr

    async with administered(path, keep_alive_interval_seconds=600) as (broker, rest, store):
        client = await RawClient.connected(int(broker.urls.plain.rpartition(":")[2]))
        for kept in ("t", "p-partition-1"):
            if kept != "t":
                assert (await rest.ask("PUT", PATH[:-1] + "p/partitions", 2)).status == 204
            assert isinstance(await client.ask(commands.Producer(kept, len(kept), 1)), commands.ProducerSuccess)
        for place in ((path,), ("--server", broker.web_urls.plain)):
            status, said = await deleted(*place, "t")
            assert (status, "force" in said) == (2, True), said
        status, said = await deleted(path, "p")
        assert (status, "p-partition-1" in said) == (2, True), said
        assert len(list(store.topics())) == 3
        assert await deleted(path, "t", "--force") == (0, "")
        assert isinstance(await asyncio.wait_for(client.hear(), 120), commands.CloseProducer)
        assert await deleted(path, "p", "--force") == (0, "")
        assert (await rest.ask("GET", PATH[:-2] + "/partitioned")).value == []
        assert list(store.topics()) == []
        status, said = await deleted(path, "t")
        assert (status, "does not exist" in said) == (2, True), said


async def test_a_producer_that_comes_while_its_topic_is_deleted_is_closed_and_comes_again(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would send to a topic that is no more."""
    deleting, go_on = threading.Event(), threading.Event()
    delete = DelayedStore.delete_topic

    def slowly(store: DelayedStore, name: str) -> None:
        deleting.set()
        assert go_on.wait(20)
        delete(store, name)

    monkeypatch.setattr(DelayedStore, "delete_topic", slowly)
    rest.store.topic(TOPIC).create()
    client = await rest.client()
    deleted = asyncio.create_task(rest.ask("DELETE", PATH + "?force=true"))
    assert await asyncio.to_thread(deleting.wait, 20)
    assert isinstance(await client.ask(commands.Producer(TOPIC, 1, 1)), commands.ProducerSuccess)
    go_on.set()
    assert (await deleted).status == 204
    assert isinstance(await asyncio.wait_for(client.hear(), 120), commands.CloseProducer)
    assert isinstance(await client.ask(commands.Producer(TOPIC, 2, 2)), commands.ProducerSuccess)
    assert rest.store.topic(TOPIC).exists()


async def test_what_is_kept_of_a_topic_goes_before_the_topic_does(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that ends between both leaves a topic that is deleted again, and no schema of a topic of that name."""
    order: list[str] = []
    forget, delete = TopicFacts.forget, DelayedStore.delete_topic

    def forgotten(facts: TopicFacts, topic: str) -> None:
        order.append("facts")
        forget(facts, topic)

    def deleted(store: DelayedStore, name: str) -> None:
        order.append("topic")
        delete(store, name)

    monkeypatch.setattr(TopicFacts, "forget", forgotten)
    monkeypatch.setattr(DelayedStore, "delete_topic", deleted)
    rest.store.topic(TOPIC).create()
    schema: dict[str, Any] = {"type": "STRING", "schema": "", "properties": {}}
    schemas = "/admin/v2/schemas/public/default/t/schema"
    assert (await rest.ask("POST", schemas, schema)).status == 200
    assert (await rest.ask("DELETE", PATH)).status == 204
    assert order == ["facts", "topic"]
    assert (await rest.ask("GET", schemas)).status == 404


async def test_a_partitioned_topic_goes_with_its_partitions_and_what_is_set_for_it(rest: Rest) -> None:
    """Schemas, policies, settings."""
    parts = "/admin/v2/persistent/public/default/p"
    assert (await rest.ask("PUT", f"{parts}/partitions", 2)).status == 204
    assert (await rest.ask("POST", f"{parts}/delayedDelivery", {"fixedDeliveryDelayInMillis": 3})).status == 204
    assert (await rest.ask("POST", f"{parts}/deduplicationEnabled", True)).status == 204
    assert (await rest.ask("POST", f"{parts}/partitions", 3)).status == 204
    assert rest.store.effective_policies("p-partition-2").fixed_delivery_delay_ms == 3
    assert (await rest.ask("DELETE", f"{parts}/partitions?force=true")).status == 204
    assert rest.store.all_policies() == {}
    assert list(rest.store.topics()) == []
    assert list(rest.services.resources.deduplication.names()) == []
    assert (await rest.ask("PUT", f"{parts}/partitions", 2)).status == 204
    assert (await rest.ask("GET", f"{parts}/delayedDelivery")).status == 204


async def test_a_namespace_with_a_topic_of_two_underscores_is_listed_and_not_deleted(rest: Rest) -> None:
    """The broker makes no topics for itself: `__jobs` is a client's, with its subscription and pending messages."""
    namespace, topic = "/admin/v2/namespaces/public/x", "persistent://public/x/__jobs"
    assert (await rest.ask("PUT", namespace)).status == 204
    client = await rest.client()
    kind = commands.SubscriptionType.SHARED
    assert await client.ask(commands.Subscribe(topic, "s", kind, 1, 1)) == commands.Success(1)
    rest.store.topic(topic).send_payloads([b"m"] * 5, deliver_after=18_000)
    listed = await client.ask_for(commands.GetTopicsResponse, commands.GetTopics(2, "public/x"))
    assert list(listed.topics) == [topic]
    assert (await rest.ask("GET", "/admin/v2/persistent/public/x")).value == [topic]
    await client.close()
    answered = await rest.ask("DELETE", namespace)
    assert (answered.status, topic in answered.reason) == (409, True)
    assert rest.store.topic(topic).stats().pending == 5
    assert list(rest.store.topic(topic).subscriptions()) == ["s"]


PATHS = ("/admin/v2/namespaces/public/default/topics", "/admin/v2/persistent/public/default")
NAMES = [f"persistent://public/default/{number:04}-" + "\u00e9" * 100 for number in range(500)]


async def limited(broker: Broker, heap: Limits, direct: Limits) -> None:
    """Have the broker list within these limits."""
    present(broker._services).limiter.set_limits(heap, direct)


async def all_back(broker: Broker) -> None:
    """Wait until every permit is back."""
    limiter = present(broker._services).limiter
    async with asyncio.timeout(120):
        while (
            limiter.heap.available < limiter.heap.max_permits or limiter.direct.available < limiter.direct.max_permits
        ):
            await asyncio.sleep(0.01)


async def test_lists_wait_for_permits_and_give_them_back(rest: Rest) -> None:
    """Twenty at once under limits of little more than one; both addresses; all are answered, all permits come back."""
    rest.store.create_topics(NAMES)
    await limited(rest.broker, Limits(180_000, 1_000, 25_000), Limits(180_000, 1_000, 25_000))
    answers = await asyncio.gather(*(rest.ask("GET", PATHS[number % 2]) for number in range(20)))
    assert all(answered.value == NAMES for answered in answers)
    assert (await rest.ask("HEAD", PATHS[0])).value is None
    await all_back(rest.broker)


async def test_a_list_without_a_permit_in_time_is_429(rest: Rest) -> None:
    """And the next one is served."""
    rest.store.create_topics(NAMES[:5])
    await limited(rest.broker, Limits(100_000, 1_000, 30), Limits(100_000, 1_000, 30))
    held = await rest.services.limiter.direct.acquire(100_000)
    answered = await rest.ask("GET", PATHS[0])
    assert (answered.status, bool(answered.reason)) == (429, True)
    rest.services.limiter.direct.release(held)
    assert (await rest.ask("GET", PATHS[0])).value == NAMES[:5]
    await all_back(rest.broker)


async def test_a_list_that_gets_no_heap_after_it_waited_for_direct_memory_gives_that_back(rest: Rest) -> None:
    """Its heap permit goes back while it waits, and it may get none in time afterwards."""
    rest.store.create_topics(NAMES[:5])
    await limited(rest.broker, Limits(100_000, 1_000, 30), Limits(100_000, 1_000, 25_000))
    limiter = rest.services.limiter
    direct = await limiter.direct.acquire(100_000)
    asked = asyncio.create_task(rest.ask("GET", PATHS[0]))
    await until(lambda: limiter.direct.queue_size)
    heap = await limiter.heap.acquire(100_000)
    limiter.direct.release(direct)
    assert (await asked).status == 429
    limiter.heap.release(heap)
    await all_back(rest.broker)
    assert (await rest.ask("GET", PATHS[0])).value == NAMES[:5]


@pytest.mark.parametrize("reads", [0, 100_000])
async def test_a_client_that_goes_amid_its_list_leaves_no_permit_behind(rest: Rest, reads: int) -> None:
    """Before the answer, and in it."""
    rest.store.create_topics(NAMES)
    await limited(rest.broker, Limits(1 << 20, 1_000, 25_000), Limits(1 << 20, 1_000, 25_000))
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(rest.address.rpartition(":")[2]))
        writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % PATHS[0].encode())
        await writer.drain()
        if reads:
            await reader.readexactly(reads)
        writer.transport.abort()
    await all_back(rest.broker)
    assert (await rest.ask("GET", PATHS[0])).value == NAMES


async def test_a_client_that_takes_nothing_of_its_list_loses_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its permit goes to others."""
    monkeypatch.setattr("duelog.broker.admin.application._STALL_S", 0.3)

    async with administered(tmp_path / "s", max_message_size=64 << 20) as (broker, rest, _):
        names = [f"persistent://public/default/t{number:05}-{'x' * 350}" for number in range(11_000)]
        monkeypatch.setattr(topic_listing, "names_of", lambda *_: names)
        await limited(broker, Limits(50 << 20, 1_000, 25_000), Limits(50 << 20, 1_000, 25_000))
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)  # the list does not fit into the system's buffers
        narrow.connect(("127.0.0.1", int(rest.address.rpartition(":")[2])))
        _, writer = await asyncio.open_connection(sock=narrow, limit=1_000)
        writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % PATHS[0].encode())
        await writer.drain()
        direct = present(broker._services).limiter.direct
        async with asyncio.timeout(120):
            while direct.available == direct.max_permits:
                await asyncio.sleep(0.01)
        await all_back(broker)
        writer.transport.abort()
