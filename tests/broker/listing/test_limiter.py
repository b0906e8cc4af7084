"""The limiter's helpers, sizes of lists, quantiles, and the metrics made of them."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from duelog.broker.listing.memory_limits import (
    BROKER_PREFIX,
    FIRST_SIZE,
    DualMemoryLimiter,
    Limits,
    ListSizes,
    PermitError,
    PermitTimeout,
    WaitTimes,
    list_bytes,
)
from tests.broker.peers import TestLoop, idle, run
from tests.proof import length

LIMITS = Limits(100, 2, 1_000)


async def test_a_permit_is_held_while_the_body_runs_and_released_however_it_ends() -> None:
    """Well, badly, and cancelled."""
    limiter = DualMemoryLimiter(LIMITS, LIMITS, TestLoop())
    async with limiter.heap.holding(60):
        assert limiter.heap.acquired == 60

    async def fail() -> None:
        async with limiter.heap.holding(60) as permit, limiter.heap.updating(permit, 90):
            assert limiter.heap.acquired == 90
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert limiter.heap.acquired == 0

    async def wait() -> None:
        async with limiter.direct.holding(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await idle()
    assert limiter.direct.acquired == 60
    task.cancel()
    await idle()
    assert (limiter.direct.acquired, task.cancelled()) == (0, True)


async def test_a_permit_granted_to_a_task_that_is_being_cancelled_is_not_lost() -> None:
    """The grant and the cancellation come in one turn of the loop."""
    limiter = DualMemoryLimiter(LIMITS, LIMITS, TestLoop())
    held = limiter.heap.acquire(100).result()

    async def wait() -> None:
        async with limiter.heap.holding(50):
            raise AssertionError("the body runs")

    task = asyncio.create_task(wait())
    await idle()
    limiter.heap.release(held)
    task.cancel()
    await idle()
    assert task.cancelled()
    assert (limiter.heap.acquired, limiter.heap.queue_size) == (0, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 150), st.integers(0, 150), st.integers(0, 150), st.integers(0, 3), st.booleans()),
        max_size=25,
    ),
    st.lists(st.tuples(st.sampled_from(["time", "limit", "cancel", "idle"]), st.integers(0, 120)), max_size=30),
)
@pytest.mark.series
@settings(max_examples=length("DUELOG_SEMAPHORE_EXAMPLES", 40, 300), deadline=None)
def test_both_limiters_are_empty_when_all_who_used_them_have_ended(
    users: list[tuple[int, int, int, int, bool]], steps: list[tuple[str, int]]
) -> None:
    """Listings as they are: a guess, the real size, a frame; amid timeouts, changed limits and cancelled tasks."""

    async def test() -> None:
        loop = TestLoop()
        limiter = DualMemoryLimiter(LIMITS._replace(max_queue=0), LIMITS._replace(max_queue=0), loop)

        async def use(guess: int, real: int, frame: int, turns: int, fails: bool) -> None:
            async with (
                limiter.heap.holding(guess) as permit,
                limiter.heap.updating(permit, real),
                limiter.direct.holding(frame),
            ):
                for _ in range(turns):
                    await asyncio.sleep(0)
                if fails:
                    raise KeyError

        tasks = [asyncio.create_task(use(*each)) for each in users]
        for step, number in steps:
            if step == "time":
                loop.advance(number / 100)
            elif step == "limit":
                limiter.set_limits(Limits(number, 0, 1_000), Limits(120 - number, 0, 1_000))
            elif step == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            await asyncio.sleep(0)
            for each in (limiter.heap, limiter.direct):
                assert each.available + each.acquired == each.max_permits
        while not all(task.done() for task in tasks):
            await idle()
            loop.advance(1)
        for task in tasks:
            assert task.cancelled() or isinstance(task.exception(), (PermitError, KeyError, type(None)))
        for each in (limiter.heap, limiter.direct):
            assert (each.acquired, each.queue_size) == (0, 0)

    run(test())


async def test_the_first_asker_gets_a_guess_at_once_and_the_others_what_it_reports() -> None:
    """And who comes later the last size; other keys are others."""
    sizes = ListSizes()
    async with sizes.estimate(("ns", 0)) as (size, report):
        assert size == FIRST_SIZE == 10 << 10
        waiting = [asyncio.create_task(asked(sizes)) for _ in range(3)]
        await idle()
        assert not any(each.done() for each in waiting)
        async with sizes.estimate(("ns", 2)) as (other_size, _):
            assert other_size == FIRST_SIZE
        report(77)
        await idle()
        assert [each.result() for each in waiting] == [77] * 3
    assert await asked(sizes) == 77
    async with sizes.estimate(("ns", 0)) as (_, report):
        report(88)
    assert await asked(sizes) == 88


async def asked(sizes: ListSizes) -> int:
    """The estimate of an asker that reports nothing."""
    async with sizes.estimate(("ns", 0)) as (size, _):
        return size


@pytest.mark.parametrize("way", ["failed", "cancelled"])
async def test_after_a_failure_of_the_first_the_waiting_go_on_and_the_next_is_first(way: str) -> None:
    """Failed or cancelled: with the guess, each of them."""
    sizes = ListSizes()
    never = asyncio.Event()

    async def fail() -> None:
        async with sizes.estimate(("ns", 0)):
            await never.wait()
            raise KeyError

    first = asyncio.create_task(fail())
    await idle()
    waiting = [asyncio.create_task(asked(sizes)) for _ in range(3)]
    gone = asyncio.create_task(asked(sizes))
    await idle()
    gone.cancel()
    first.cancel() if way == "cancelled" else never.set()
    await idle()
    assert first.cancelled() or isinstance(first.exception(), KeyError)
    assert [each.result() for each in waiting] == [FIRST_SIZE] * 3
    assert len(sizes) == 0
    async with sizes.estimate(("ns", 0)) as (_, report):
        behind = asyncio.create_task(asked(sizes))
        await idle()
        assert not behind.done()
        report(5)
    assert await behind == 5


async def test_so_many_sizes_are_known_at_most() -> None:
    """The one not asked for longest is forgotten, also while its first asker is at it."""
    sizes = ListSizes(2)
    async with sizes.estimate(("ns", 0)) as (_, report):
        waiting = asyncio.create_task(asked(sizes))
        await idle()
        for number in (1, 2):
            async with sizes.estimate(("ns", number)) as (_, report_other):
                report_other(number)
        assert len(sizes) == 2
        report(9)
    assert await waiting == 9
    assert len(sizes) == 2


def test_a_name_takes_its_utf8_and_64_bytes() -> None:
    """By which lists are counted."""
    assert list_bytes(["abc", "ä"]) == 3 + 2 + 2 * 64


def test_quantiles_are_of_the_last_minutes() -> None:
    """By nearest rank; NaN where nothing was waited for; sum and count are of all."""
    now = 0.0
    waits = WaitTimes(lambda: now)
    assert all(math.isnan(each) for each in waits.quantiles().values())
    for number in range(1, 101):
        waits.add(number)
    assert waits.quantiles() == {0.5: 50, 0.95: 95, 0.99: 99, 1.0: 100}
    now = 601
    waits.add(7)
    assert waits.quantiles() == dict.fromkeys((0.5, 0.95, 0.99, 1.0), 7)
    assert (waits.count, waits.sum_ms) == (101, 5_057)


SERIES = """
pulsar_broker_topic_list_heap_memory_used_bytes{cluster="c"} 60.0
pulsar_broker_topic_list_heap_memory_limit_bytes{cluster="c"} 100.0
pulsar_broker_topic_list_heap_queue_size{cluster="c"} 1.0
pulsar_broker_topic_list_heap_queue_max_size{cluster="c"} 2.0
pulsar_broker_topic_list_heap_wait_time_ms{cluster="c",quantile="0.5"} 0.0
pulsar_broker_topic_list_heap_wait_time_ms{cluster="c",quantile="0.95"} 1000.0
pulsar_broker_topic_list_heap_wait_time_ms{cluster="c",quantile="0.99"} 1000.0
pulsar_broker_topic_list_heap_wait_time_ms{cluster="c",quantile="1.0"} 1000.0
pulsar_broker_topic_list_heap_wait_time_ms_count{cluster="c"} 2.0
pulsar_broker_topic_list_heap_wait_time_ms_sum{cluster="c"} 1000.0
pulsar_broker_topic_list_heap_wait_time_ms_created{cluster="c"} 5.0
pulsar_broker_topic_list_heap_timeout_total{cluster="c"} 1.0
pulsar_broker_topic_list_heap_timeout_created{cluster="c"} 5.0
pulsar_broker_topic_list_direct_memory_used_bytes{cluster="c"} 0.0
pulsar_broker_topic_list_direct_memory_limit_bytes{cluster="c"} 100.0
pulsar_broker_topic_list_direct_queue_size{cluster="c"} 0.0
pulsar_broker_topic_list_direct_queue_max_size{cluster="c"} 2.0
pulsar_broker_topic_list_direct_wait_time_ms{cluster="c",quantile="0.5"} NaN
pulsar_broker_topic_list_direct_wait_time_ms{cluster="c",quantile="0.95"} NaN
pulsar_broker_topic_list_direct_wait_time_ms{cluster="c",quantile="0.99"} NaN
pulsar_broker_topic_list_direct_wait_time_ms{cluster="c",quantile="1.0"} NaN
pulsar_broker_topic_list_direct_wait_time_ms_count{cluster="c"} 0.0
pulsar_broker_topic_list_direct_wait_time_ms_sum{cluster="c"} 0.0
pulsar_broker_topic_list_direct_wait_time_ms_created{cluster="c"} 5.0
pulsar_broker_topic_list_direct_timeout_total{cluster="c"} 0.0
pulsar_broker_topic_list_direct_timeout_created{cluster="c"} 5.0
"""


class _Collector(Collector):
    def __init__(self, limiter: DualMemoryLimiter) -> None:
        self._limiter = limiter

    def collect(self) -> list[Metric]:
        return list(self._limiter.collect(BROKER_PREFIX, "c"))


async def test_twelve_metrics_are_26_series() -> None:
    """In the text that Prometheus reads."""
    loop = TestLoop()
    limiter = DualMemoryLimiter(LIMITS, LIMITS, loop)
    limiter.created = 5.0
    limiter.heap.acquire(60)
    late = limiter.heap.acquire(90)
    loop.advance(1)
    assert isinstance(late.exception(), PermitTimeout)
    waiting = limiter.heap.acquire(41)
    registry = CollectorRegistry()
    registry.register(_Collector(limiter))
    text = generate_latest(registry).decode()
    assert sorted(line for line in text.splitlines() if not line.startswith("#")) == sorted(SERIES.split("\n")[1:-1])
    families = [each.name for each in limiter.collect(BROKER_PREFIX, "c")]
    assert len([name for name in families if not name.endswith("_created")]) == 12
    waiting.cancel()
    await idle()
