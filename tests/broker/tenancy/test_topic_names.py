"""Lists of topics over HTTP hold permits as lists over the wire do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from duelog.broker.listing.memory_limits import Limits
from duelog.broker.server.broker import Broker
from tests.broker.admin.rest import Rest, administered
from tests.broker.server.raw_client import until

PATHS = ("/admin/v2/namespaces/public/default/topics", "/admin/v2/persistent/public/default")
NAMES = [f"persistent://public/default/{number:04}-" + "\u00e9" * 100 for number in range(500)]


async def limited(broker: Broker, heap: Limits, direct: Limits) -> None:
    """Have the broker list within these limits."""
    assert broker._services is not None
    broker._services.limiter.set_limits(heap, direct)


async def all_back(broker: Broker) -> None:
    """Wait until every permit is back."""
    assert broker._services is not None
    limiter = broker._services.limiter
    async with asyncio.timeout(20):
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
        writer.write(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % PATHS[0].encode())
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

    async with administered(tmp_path / "s", max_message_size=64 << 20) as (broker, rest, store):
        store.create_topics([f"t{number:05}-{'x' * 300}" for number in range(20_000)])
        await limited(broker, Limits(50 << 20, 1_000, 25_000), Limits(50 << 20, 1_000, 25_000))
        _, writer = await asyncio.open_connection("127.0.0.1", int(rest.address.rpartition(":")[2]), limit=1_000)
        writer.write(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % PATHS[0].encode())
        await writer.drain()
        assert broker._services is not None
        direct = broker._services.limiter.direct
        async with asyncio.timeout(20):
            while direct.available == direct.max_permits:
                await asyncio.sleep(0.01)
        await all_back(broker)
        writer.transport.abort()
