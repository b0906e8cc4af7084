"""Many clients list one large namespace at once: all are served, and the broker's memory has a bound.

Raw frames against `duelog serve` in a process of its own, its memory as the system sees it.
DUELOG_LISTED_TOPICS=8192 DUELOG_LISTING_CLIENTS=200 is the full size; a namespace of 100,000 topics is served too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duelog import DelayedStore
from duelog.broker.listing.topic_filter import topics_hash
from duelog.broker.protocol import commands
from tests.broker.clients.conftest import ServedStore
from tests.broker.pressure.served import Talker, resident_bytes

TOPICS = int(os.environ.get("DUELOG_LISTED_TOPICS", "2048"))
CLIENTS = int(os.environ.get("DUELOG_LISTING_CLIENTS", "50"))
NAMES = [f"persistent://public/default/topic-number-{number:06}" for number in range(TOPICS)]

CONSTANT = 48 << 20
"""Bytes that the broker may grow by beside the limits: lists of the moment, connections, what allocators keep."""


@contextmanager
def serving(folder: Path, **settings: int) -> Iterator[ServedStore]:
    """A broker with the topics; ends cleanly."""
    served = ServedStore(folder, **settings)
    with DelayedStore.open(folder / "store") as store:
        for start in range(0, TOPICS, 5_000):
            store.create_topics(NAMES[start : start + 5_000])
    served.start()
    try:
        yield served
        assert served.stop() == 0, served.log()
    finally:
        served.kill()


async def peak(served: ServedStore, ended: asyncio.Event) -> int:
    """The most memory that the broker had until the event, looked at every few milliseconds."""
    most = 0
    while not ended.is_set():
        most = max(most, resident_bytes(served.pid))
        await asyncio.sleep(0.005)
    return most


async def list_once(served: ServedStore, wanted: str) -> None:
    """A client that connects and lists."""
    client = await Talker.connected(served.port)
    client.say(commands.GetTopics(1, "public/default"))
    answer = await client.hear()
    assert isinstance(answer, commands.GetTopicsResponse), answer
    assert (len(answer.topics), answer.topics_hash) == (TOPICS, wanted)
    await client.close()


async def at_rest(served: ServedStore, wanted: str) -> int:
    """The broker's memory once it has what it loads once: the engine takes the topics of a store into memory."""
    before = 0
    while (found := resident_bytes(served.pid)) > before + (1 << 20):
        before = found
        await list_once(served, wanted)
    return found


@pytest.mark.parametrize("limit_mb", [100, 2])
def test_all_clients_are_served_and_memory_grows_by_the_limits_and_a_constant(tmp_path: Path, limit_mb: int) -> None:
    """A list of a moment is shared; each listing waits for its share of the limit."""

    async def main(served: ServedStore) -> None:
        wanted = topics_hash(NAMES)
        before = await at_rest(served, wanted)
        ended = asyncio.Event()
        watching = asyncio.create_task(peak(served, ended))
        await asyncio.gather(*(list_once(served, wanted) for _ in range(CLIENTS)))
        ended.set()
        grown = await watching - before
        print(f"{CLIENTS} clients, {TOPICS} topics, {limit_mb} MB: {grown / 2**20:.1f} MiB")
        assert grown <= 2 * (limit_mb << 20) + CONSTANT

    limits = {f"maxTopicListInFlight{kind}MemSizeMB": limit_mb for kind in ("Heap", "Direct")}
    timeouts = {f"maxTopicListInFlight{kind}MemSizePermitsAcquireTimeoutMillis": 300_000 for kind in ("Heap", "Direct")}
    with serving(tmp_path, **limits, **timeouts) as served:
        asyncio.run(main(served))
