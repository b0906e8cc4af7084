"""Many clients list one large namespace at once: all are served, and the memory of broker and proxy has a bound.

Raw frames against `duelog serve` and `duelog proxy` in processes of their own, their memory as the system sees it.
`make proof` has the full size: DUELOG_LISTED_TOPICS=8192 DUELOG_LISTING_CLIENTS=200; a namespace of 100,000 topics is
served too.
"""

import asyncio
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duelog import DelayedStore
from duelog.broker.listing.topic_listing import topics_hash
from duelog.broker.protocol import commands
from tests.broker.clients.conftest import ServedProxy, ServedStore
from tests.broker.pressure.served import Talker, resident_bytes
from tests.ports import free_port
from tests.proof import PROOF, length

pytestmark = pytest.mark.series

TOPICS = length("DUELOG_LISTED_TOPICS", 2048, 8192)
CLIENTS = length("DUELOG_LISTING_CLIENTS", 20, 200)
NAMES = [f"persistent://public/default/topic-number-{number:06}" for number in range(TOPICS)]
HASH = topics_hash(NAMES)

CONSTANT = 48 << 20
"""Bytes that a process may grow by beside the limits: lists of the moment, connections, what allocators keep."""


def limits(limit_mb: int) -> dict[str, int]:
    """Settings of both programs."""
    name = "maxTopicListInFlight{}MemSize{}".format
    return {name(kind, "MB"): limit_mb for kind in ("Heap", "Direct")} | {
        name(kind, "PermitsAcquireTimeoutMillis"): 300_000 for kind in ("Heap", "Direct")
    }


@contextmanager
def serving(folder: Path, limit_mb: int) -> Iterator[ServedStore]:
    """A broker with the topics; ends cleanly."""
    served = ServedStore(folder, **limits(limit_mb))
    with DelayedStore.open(folder / "store") as store:
        for start in range(0, TOPICS, 5_000):
            store.create_topics(NAMES[start : start + 5_000])
    with served.running():
        yield served


async def list_once(served: ServedStore) -> None:
    """A client that connects and lists."""
    client = await Talker.connected(served.port)
    client.say(commands.GetTopics(1, "public/default"))
    answer = await client.hear_a(commands.GetTopicsResponse)
    assert (len(answer.topics), answer.topics_hash) == (TOPICS, HASH)
    await client.close()


async def check_growth(served: ServedStore, limit_mb: int) -> None:
    """All clients are served at once, and the process grows by the limits and the constant at most."""
    before = 0
    while (resident := resident_bytes(served.pid)) > before + (1 << 20):  # what is loaded once is not counted
        before = resident
        await list_once(served)
    listing = asyncio.gather(*(list_once(served) for _ in range(CLIENTS)))
    most = 0
    while not listing.done():
        most = max(most, resident_bytes(served.pid))
        await asyncio.sleep(0.005)
    await listing
    print(f"{CLIENTS} clients, {TOPICS} topics, {limit_mb} MB: {(most - resident) / 2**20:.1f} MiB")
    assert most - resident <= 2 * (limit_mb << 20) + CONSTANT


@pytest.mark.parametrize("limit_mb", [100, 2] if PROOF else [2])
async def test_all_clients_are_served_and_memory_grows_by_the_limits_and_a_constant(
    tmp_path: Path, limit_mb: int
) -> None:
    """A list of a moment is shared; each listing waits for its share of the limit."""
    with serving(tmp_path, limit_mb) as served:
        await check_growth(served, limit_mb)


@pytest.mark.parametrize("limit_mb", [100, 2] if PROOF else [2])
async def test_all_clients_are_served_through_the_proxy_and_its_memory_grows_by_the_limits_and_a_constant(
    tmp_path: Path, limit_mb: int
) -> None:
    """Also while a client asks and never reads; afterwards nothing is held."""
    http, config = free_port(), tmp_path / "proxy.toml"
    lines = [f"{name} = {value}" for name, value in limits(limit_mb).items()]
    config.write_text("\n".join([*lines, "requestTimeoutSeconds = 300"]))

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=30) as answer:
            return str(answer.read(), "utf-8")

    with serving(tmp_path / "broker", limit_mb) as served:
        made = ServedProxy(tmp_path / "proxy", served.url, options=("--config", str(config), "--http", str(http)))
        with made.running() as proxy:
            deaf = await Talker.connected(proxy.port)
            deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
            deaf.say(commands.GetTopics(1, "public/default"))
            await check_growth(proxy, limit_mb)
            deaf.writer.transport.abort()
            while (text := await asyncio.to_thread(metrics)).count('used_bytes{cluster="standalone"} 0.0') < 2:
                await asyncio.sleep(0.02)
            assert 'pulsar_proxy_topic_list_heap_timeout_total{cluster="standalone"} 0.0' in text
