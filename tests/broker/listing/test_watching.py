"""Watchers over real connections: what they know is what the store has, whatever comes, and under starvation.

DUELOG_TOPIC_LISTS=10 makes ten times as many topics, and clients.
"""

import asyncio
import os
import random

import pytest

from duelog import DelayedStore
from duelog.broker.listing import watchers
from duelog.broker.listing.memory_limits import Limits
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import ServerError
from tests.broker.listing.watching import NAMESPACE, PREFIX, WatchingClient, held_broker
from tests.conftest import OpenStore

SCALE = float(os.environ.get("DUELOG_TOPIC_LISTS", "1"))
TOPICS = int(200 * SCALE)

PATTERNS = {1: f"{PREFIX}.*", 2: f"{PREFIX}a-.*", 3: f"{PREFIX}.*[02468]", 4: f"{PREFIX}none"}


def make(store: DelayedStore, names: list[str]) -> None:
    """Create topics, some at a time."""
    for start in range(0, len(names), 37):
        store.create_topics([PREFIX + name for name in names[start : start + 37]])


def drop(store: DelayedStore, names: list[str]) -> None:
    """Delete topics."""
    for name in names:
        store.delete_topic(PREFIX + name)


def expected(names: set[str], watcher_id: int) -> set[str]:
    """The names that a watcher is to know."""
    local = {name.removeprefix(PREFIX) for name in names}
    kept = {
        1: local,
        2: {name for name in local if name.startswith("a-")},
        3: {name for name in local if name[-1] in "02468"},
        4: set[str](),
    }[watcher_id]
    return {PREFIX + name for name in kept}


async def bursts(store: DelayedStore, port: int, topics: int, rng: random.Random) -> None:
    """Topics come and go while clients watch; after each burst every one of them knows what there is."""
    watching = [await WatchingClient.watching(port) for _ in range(4)]
    there: set[str] = set()
    for burst in range(4):
        if burst < 2:  # some begin to watch amid the second burst
            for client in watching[burst::2]:
                for watcher_id, pattern in PATTERNS.items():
                    client.watch(watcher_id, pattern)
        new = [f"{'ab'[number % 2]}-{burst}-{number}" for number in range(topics)]
        old = rng.sample(sorted(there), len(there) * 2 // 3)
        work = [asyncio.to_thread(make, store, new), asyncio.to_thread(drop, store, old)]
        await asyncio.gather(*work)
        there = (there | set(new)) - set(old)
        names = {PREFIX + name for name in there}
        for number, client in enumerate(watching):
            if burst or not number % 2:
                for watcher_id in PATTERNS:
                    wanted, found = expected(names, watcher_id), client.watched[watcher_id]
                    await client.until(lambda found=found, wanted=wanted: found.answers and found.names == wanted)  # type: ignore[misc]
    for client in watching:
        for found in client.watched.values():
            assert (found.answers, found.errors) == (1, [])
        assert not client.watched[4].updates
        await client.end()


async def test_a_watcher_knows_what_the_store_has_after_each_burst(store: DelayedStore) -> None:
    """Its set and its hash; patterns each their part; watchers that begin amid a burst too."""
    async with held_broker(store) as held:
        await bursts(store, held.port, TOPICS, random.Random(7))


async def test_a_watcher_knows_it_under_starvation_too(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permits for one at a time, two may wait for 20 ms, and listings are in the way: it is tried again until it is."""
    monkeypatch.setattr(watchers, "LONGEST_BACKOFF_S", 0.2)

    store = open_store()
    async with held_broker(store, max_topic_list_watchers_mem_size_mb=0) as held:
        limiter = held.services.limiter
        limiter.set_limits(Limits(20_000, 2, 20), Limits(5_000, 2, 20))
        over = False
        refused = served = 0

        async def list_on() -> None:
            nonlocal refused, served
            client = await WatchingClient.watching(held.port)
            while not over:
                answer = await client.topics()
                if isinstance(answer, commands.Error):
                    assert answer.error == ServerError.TOO_MANY_REQUESTS
                    refused += 1
                    await asyncio.sleep(0.01)  # as clients do
                else:
                    served += 1
            await client.end()

        async def starve() -> None:
            async with limiter.heap.holding(20_000):
                while not limiter.heap.timeouts:
                    await asyncio.sleep(0.001)

        listing = [asyncio.create_task(work()) for work in (starve, *[list_on] * 5)]
        await bursts(store, held.port, TOPICS // 3, random.Random(8))
        over = True
        await asyncio.gather(*listing)
        assert refused
        assert served


async def test_watchers_leave_nothing_behind(store: DelayedStore) -> None:
    """Closed, refreshed, connections reset amid everything."""
    make(store, [f"t{number}" for number in range(100)])
    rng = random.Random(9)
    async with held_broker(store) as held:
        services = held.services
        services.limiter.set_limits(Limits(30_000, 5, 20), Limits(10_000, 5, 20))
        for round_ in range(int(20 * SCALE)):
            client = await WatchingClient.watching(held.port)
            for watcher_id in range(5):
                client.watch(watcher_id, f"{PREFIX}.*")
            client.say(commands.WatchTopicListClose(9_999_999, rng.randrange(5)))
            client.say(commands.GetTopics(9_999_998, NAMESPACE))
            await asyncio.to_thread(make, store, [f"more{round_}-{number}" for number in range(5)])
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            client.reset()
        other = await WatchingClient.watching(held.port)
        await other.until(lambda: not len(services.watchers))
        await other.until(lambda: not services.limiter.direct.acquired + services.limiter.heap.acquired)
        held.check_empty()
        assert (len(services.name_sets), services.name_sets.kept_bytes) == (0, 0)
        await other.end()
