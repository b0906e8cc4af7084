"""Memory limits of lists: the semaphore beside a twin and by name; sizes, quantiles, metrics, settings that change."""

import asyncio
import math
import random
from dataclasses import dataclass
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from duelog import DelayedStore
from duelog.broker.configuration import BrokerConfig
from duelog.broker.listing.memory_limits import (
    BROKER_PREFIX,
    FIRST_SIZE,
    AsyncSemaphore,
    DualMemoryLimiter,
    DynamicSettings,
    Limits,
    ListSizes,
    Permit,
    Permits,
    PermitTimeout,
    WaitTimes,
    list_bytes,
)
from duelog.store.errors import InvalidArgument
from tests.broker.peers import TestLoop, idle
from tests.proof import length


class Stand:
    """A semaphore whose time stands still until it is moved on."""

    def __init__(self, max_permits: int = 10, max_queue: int = 0, timeout_ms: int = 1_000) -> None:
        self.loop = TestLoop()
        self.semaphore = AsyncSemaphore(max_permits, max_queue, timeout_ms, self.loop)
        self.acquire = self.semaphore.acquire
        self.update = self.semaphore.update
        self.release = self.semaphore.release

    def now(self, permits: int) -> Permit:
        """A permit that is granted at once."""
        return self.acquire(permits).result()

    @property
    def waited(self) -> list[float]:
        """How long requests waited, in ms, in the order of their ends."""
        return [waited for _, waited in self.semaphore.waits._recent]

    def check(self, available: int, waiting: int) -> None:
        """Check the bytes left, and how many wait."""
        semaphore = self.semaphore
        assert (semaphore.available, semaphore.queue_size) == (available, waiting)
        assert semaphore.available + semaphore.acquired == semaphore.max_permits


@pytest.mark.parametrize("permits", [-1, 11])
async def test_fewer_than_none_and_more_than_the_limit_are_refused_at_once(permits: int) -> None:
    """The call raises, of acquire and of update; nothing changes."""
    stand = Stand()
    held = stand.now(4)
    with pytest.raises(InvalidArgument):
        stand.acquire(permits)
    with pytest.raises(InvalidArgument):
        stand.update(held, permits)
    stand.check(6, 0)
    assert held.size == 4


async def test_updates_that_wait_for_one_another_do_not_wait_for_ever() -> None:
    """All that is held is held by those that wait: the first of them gets what there is, and then the others."""
    stand = Stand()
    first, second = stand.now(4), stand.now(5)
    growing = stand.update(first, 9)
    assert not growing.done()
    also = stand.update(second, 10)
    assert growing.result().size == 5
    assert not also.done()
    stand.check(0, 1)
    stand.release(growing.result())
    assert also.result().size == 10
    stand.check(0, 0)


@dataclass(eq=False)
class Asked:
    """A request of the twin, and then its permit."""

    size: int
    old: "Asked | None"
    since: float
    gone: bool = False
    outcome: str = "waits"
    held: int = 0
    """Bytes of its permit."""
    counted: int = 0
    """Those that a limit counts."""
    live: bool = False


class Twin:
    """The semaphore as its description has it: who waits, in order, and who gets how much when."""

    def __init__(self, limit: int, queue: int) -> None:
        self.limit, self.queue, self.now, self.closed = limit, queue, 0.0, False
        self.asked: list[Asked] = []
        self.waiting: list[Asked] = []

    @property
    def in_use(self) -> int:
        """Bytes that the limit counts."""
        return sum(each.counted for each in self.asked)

    def ask(self, size: int, old: Asked | None) -> None:
        """Acquire, or update a permit."""
        made = Asked(size, old, self.now)
        self.asked.append(made)
        if self.closed:
            made.outcome = "PermitClosed"
        elif old is not None and size <= old.counted:
            self.grant(made, size)
        else:
            self.waiting.append(made)
        self.run()
        if made.outcome == "waits" and 0 < self.queue < len(self.waiting):
            self.end(made, "PermitQueueFull")

    def grant(self, made: Asked, size: int) -> None:
        """Give a permit, in place of the old one."""
        if made.old is not None:
            self.empty(made.old)
        made.held = min(size, self.limit) if self.limit else size
        made.counted = made.held if self.limit else 0
        made.live = True
        self.end(made, "granted")

    def empty(self, made: Asked) -> None:
        """Release, or forget."""
        made.held = made.counted = 0
        made.live = False

    def end(self, made: Asked, outcome: str) -> None:
        """Whoever waits behind it may be next."""
        made.outcome = outcome
        if made in self.waiting:
            self.waiting.remove(made)
        self.run()

    def run(self) -> None:
        """Serve the first that waits, or nobody: those that hold what is there and wait for more do not hold it up."""
        if not self.waiting:
            return
        head = self.waiting[0]
        old = head.old.counted if head.old else 0
        free = self.limit - self.in_use + old
        wanted = min(head.size, self.limit) if self.limit else head.size
        growing = {id(each.old) for each in self.waiting}
        if head.gone:
            self.end(head, "PermitCancelled")
        elif not self.limit or wanted <= free:
            self.grant(head, wanted)
        elif all(id(each) in growing for each in self.asked if each.live):
            self.grant(head, max(0, free))

    def close(self) -> None:
        """Nobody gets anything more."""
        self.closed = True
        for each in self.waiting:
            each.outcome = "PermitClosed"
        self.waiting.clear()

    def advance(self, seconds: float) -> None:
        """Requests that waited a second are not served any more."""
        self.now += seconds
        for each in [each for each in self.waiting if self.now - each.since >= 1]:
            if each in self.waiting:
                self.end(each, "PermitTimeout")


ACTIONS = ("acquire", "acquire", "acquire", "update", "update", "release", "cancel", "leave", "time", "limit", "close")


def outcome_of(future: Permits) -> str:
    """The twin's word for what became of a request."""
    if not future.done():
        return "waits"
    error = None if future.cancelled() else future.exception()
    return "taken back" if future.cancelled() else "granted" if error is None else type(error).__name__


@pytest.mark.series
async def test_no_permit_is_lost_or_made() -> None:
    """Random use, each outcome that of a twin; at the end everything comes back, in any order."""
    for seed in range(length("DUELOG_SEMAPHORE_EXAMPLES", 60, 600)):
        await use_at_random(random.Random(seed))


async def use_at_random(chance: random.Random) -> None:
    """Use a semaphore and a twin, and compare them after each step."""
    queue, limit = chance.choice([0, 0, 3]), chance.choice([0, 5, 10, 10])
    stand, twin = Stand(limit, queue), Twin(limit, queue)
    semaphore = stand.semaphore
    futures: list[Permits] = []

    def ask(size: int, old: Asked | None) -> None:
        number = len(futures)

        def request() -> Permits:
            def is_gone() -> bool:
                return number < len(twin.asked) and twin.asked[number].gone

            if old is None:
                return stand.acquire(size, is_gone)
            return stand.update(futures[twin.asked.index(old)].result(), size, is_gone)

        if 0 < semaphore.max_permits < size and (old is None or twin.closed or size > old.counted):
            with pytest.raises(InvalidArgument):
                request()
        else:
            futures.append(request())
            twin.ask(size, old)

    for _ in range(100):
        step, size = chance.choice(ACTIONS), chance.randrange(8)
        granted = [each for each in twin.asked if each.live or (each.outcome == "granted" and chance.random() < 0.1)]
        if step == "acquire" or (not granted and step in {"update", "release"}):
            ask(size, None)
        elif step == "update":
            ask(size, chance.choice(granted))
        elif step == "release":
            permit = chance.choice(granted)
            stand.release(futures[twin.asked.index(permit)].result())
            twin.empty(permit)
            twin.run()
        elif step == "cancel" and twin.waiting:
            request = chance.choice(twin.waiting)
            futures[twin.asked.index(request)].cancel()
            await idle()
            twin.end(request, "taken back")
        elif step == "leave" and twin.waiting:
            chance.choice(twin.waiting).gone = True
        elif step == "time":
            stand.loop.advance(size / 8)
            twin.advance(size / 8)
        elif step == "limit":
            twin.limit = chance.choice([0, 4, 7, 10, 10])
            semaphore.set_limits(twin.limit, queue, 1_000)
            twin.run()
        elif step == "close" and chance.random() < 0.1:
            semaphore.close()
            twin.close()
        assert [outcome_of(each) for each in futures] == [each.outcome for each in twin.asked]
        sizes = [each.result().size if outcome_of(each) == "granted" else 0 for each in futures]
        assert sizes == [each.held for each in twin.asked]
        assert (semaphore.acquired, semaphore.queue_size) == (twin.in_use, len(twin.waiting))
        assert semaphore.available + semaphore.acquired == semaphore.max_permits
        assert semaphore.timeouts == sum(each.outcome == "PermitTimeout" for each in twin.asked)
    for future in futures:
        future.cancel()
    await idle()
    for future in reversed(futures):
        if outcome_of(future) == "granted":
            stand.release(future.result())
    assert (semaphore.acquired, semaphore.queue_size) == (0, 0)


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


SERIES = {
    'memory_used_bytes{cluster="c"}': ("60.0", "0.0"),
    'memory_limit_bytes{cluster="c"}': ("100.0", "100.0"),
    'queue_size{cluster="c"}': ("1.0", "0.0"),
    'queue_max_size{cluster="c"}': ("2.0", "2.0"),
    'wait_time_ms{cluster="c",quantile="0.5"}': ("0.0", "NaN"),
    'wait_time_ms{cluster="c",quantile="0.95"}': ("1000.0", "NaN"),
    'wait_time_ms{cluster="c",quantile="0.99"}': ("1000.0", "NaN"),
    'wait_time_ms{cluster="c",quantile="1.0"}': ("1000.0", "NaN"),
    'wait_time_ms_count{cluster="c"}': ("2.0", "0.0"),
    'wait_time_ms_sum{cluster="c"}': ("1000.0", "0.0"),
    'wait_time_ms_created{cluster="c"}': ("5.0", "5.0"),
    'timeout_total{cluster="c"}': ("1.0", "0.0"),
    'timeout_created{cluster="c"}': ("5.0", "5.0"),
}
"""Values of heap and direct memory."""


class _Collector(Collector):
    def __init__(self, limiter: DualMemoryLimiter) -> None:
        self._limiter = limiter

    def collect(self) -> list[Metric]:
        return list(self._limiter.collect(BROKER_PREFIX, "c"))


async def test_twelve_metrics_are_26_series() -> None:
    """In the text that Prometheus reads."""
    loop = TestLoop()
    limiter = DualMemoryLimiter(LIMITS, LIMITS, loop)
    limiter.heap.created = limiter.direct.created = 5.0
    limiter.heap.acquire(60)
    late = limiter.heap.acquire(90)
    loop.advance(1)
    assert isinstance(late.exception(), PermitTimeout)
    waiting = limiter.heap.acquire(41)
    registry = CollectorRegistry()
    registry.register(_Collector(limiter))
    text = generate_latest(registry).decode()
    expected = [
        f"pulsar_broker_topic_list_{kind}_{name} {value}"
        for name, values in SERIES.items()
        for kind, value in zip(("heap", "direct"), values, strict=True)
    ]
    assert sorted(line for line in text.splitlines() if not line.startswith("#")) == sorted(expected)
    families = [each.name for each in limiter.collect(BROKER_PREFIX, "c")]
    assert len([name for name in families if not name.endswith("_created")]) == 12
    waiting.cancel()
    await idle()


HEAP = "maxTopicListInFlightHeapMemSizeMB"
TIMEOUT = "maxTopicListInFlightDirectMemSizePermitsAcquireTimeoutMillis"
QUEUE = "maxTopicListInFlightHeapMemSizePermitsAcquireQueueSize"


def settings_of(store: DelayedStore) -> DynamicSettings:
    """Those of a broker that has its defaults."""
    return DynamicSettings(store.documents, DEFAULTS, cast(DualMemoryLimiter, SIX))


class Heard:
    """A limiter that keeps what it is told."""

    def set_limits(self, heap: Limits, direct: Limits) -> None:
        self.limits = (heap, direct)


SIX = Heard()
DEFAULTS = BrokerConfig().list_limits()


async def test_what_is_set_is_in_force_at_once_and_after_a_restart(store: DelayedStore) -> None:
    """Over the configuration; deleted, the configuration's holds again."""
    first = settings_of(store)
    await first.load()
    assert (first.values(), SIX.limits) == ({}, (Limits(), Limits()))
    await first.set(HEAP, "7")
    assert SIX.limits == (Limits(7 << 20), Limits())
    await first.set(QUEUE, "0")
    await first.set(TIMEOUT, "9")
    assert first.values() == {HEAP: "7", QUEUE: "0", TIMEOUT: "9"}
    again = settings_of(store)
    await again.load()
    assert (again.values(), SIX.limits) == (first.values(), (Limits(7 << 20, max_queue=0), Limits(timeout_ms=9)))
    await again.delete(HEAP)
    await again.delete(HEAP)
    assert SIX.limits[0] == Limits(max_queue=0)


REFUSED = {HEAP: ["-1", "", "1.5", "x", "9" * 30, "²"], TIMEOUT: ["0"], "other": ["1"]}


async def test_what_cannot_be_set_is_told_by_name_and_value(store: DelayedStore) -> None:
    """And nothing changes."""
    settings = settings_of(store)
    await settings.load()
    for name, texts in REFUSED.items():
        for text in texts:
            with pytest.raises(InvalidArgument, match=name):
                await settings.set(name, text)
    assert settings.values() == {}
