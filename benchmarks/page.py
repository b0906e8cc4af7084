"""page: what a page that is open costs the process that has the store: processor time with it and without.

N small messages of 10,000 topics wait on 400 days, with the system's clock. A page is what a browser's is: the overview
and the four timelines, watched in this process as a broker does it. At rest nothing happens; under load a thread sends
100 messages a second to topics by chance, due within the hour.
"""

import asyncio
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from duelog import DelayedStore, Message, StoreConfig
from duelog.broker.page.operation_resource import OperationResource, asking
from duelog.broker.security.permissions import Permissions

from .harness.isolated import run_isolated
from .harness.options import parse
from .harness.results import Measure, Results

FIRST = Measure("first answer", "s", "less")
WHOLE = Measure("all counted", "s", "less")
SPENT = Measure("counting all", "s of a processor", "less")
CLOSED = Measure("at rest, closed", "% of a core", "less")
OPEN = Measure("at rest, open", "% of a core", "less")
TOLD = Measure("told at rest", "bytes", "less")
BUSY = Measure("under load, closed", "% of a core", "less")
BUSY_OPEN = Measure("under load, open", "% of a core", "less")
MEASURES = (FIRST, WHOLE, SPENT, CLOSED, OPEN, TOLD, BUSY, BUSY_OPEN)

_MINUTE_MS, _DAY_MS = 60_000, 86_400_000
_BATCH = 10_000


def fill(path: str, n: int, topics: int, days: int, directory: Path) -> dict[str, int]:
    """A store with `n` messages of many topics on many days."""
    numbers = np.random.default_rng(1)
    now_ms = time.time_ns() // 1_000_000
    with DelayedStore.open(path, StoreConfig(durability="none")) as store:
        handles = [store.topic(f"topic-{number:05}") for number in range(topics)]
        for at in range(0, n, _BATCH):
            count = min(_BATCH, n - at)
            dues = (now_ms + _DAY_MS // 4 + numbers.integers(0, days * _DAY_MS, count)).tolist()
            chosen = numbers.integers(0, topics, count).tolist()
            pairs = [
                (handles[topic], Message(b"0123456789", deliver_at=due))
                for topic, due in zip(chosen, dues, strict=True)
            ]
            store.send_batch(pairs)
    return {"n": n}


def watch(path: str, seconds: float, directory: Path) -> dict[str, float]:
    """The costs, of a store that is opened for it."""
    with DelayedStore.open(path, StoreConfig(durability="none")) as store:
        time.sleep(min(seconds, 10))  # what an opening leaves to do
        return asyncio.run(_watch(store, seconds))


async def _watch(store: DelayedStore, seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    told = 0
    now_ms = time.time_ns() // 1_000_000
    asks: list[Any] = [["overview", {}]]
    for step_ms, bars in ((_MINUTE_MS, 60), (60 * _MINUTE_MS, 24), (_DAY_MS, 31), (7 * _DAY_MS, 53)):
        asks.append(["timeline", {"start_ms": now_ms - now_ms % step_ms, "step_ms": step_ms, "bars": bars}])
    operations = OperationResource(asking(store), Permissions())

    async def page(heard: Callable[[Any], object]) -> None:
        nonlocal told
        async for piece in operations.watched(asks):
            told += len(piece)
            if piece.startswith(b"data: "):
                heard(json.loads(piece[6:]))

    async def cost(measured: str) -> None:
        began, spent = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        found[measured] = 100 * (time.process_time() - spent) / (time.perf_counter() - began)

    await cost(CLOSED.name)
    began, spent = time.perf_counter(), time.process_time()
    whole = asyncio.Event()

    def heard(event: Any) -> None:
        found.setdefault(FIRST.name, time.perf_counter() - began)
        if event["at"] == 0 and event["result"]["complete"]:
            whole.set()

    async def counting() -> None:
        """Asks each second, as the page does until all is counted."""
        while not whole.is_set():
            await asyncio.to_thread(asking(store), "overview", {})
            await asyncio.sleep(1)

    open_page = asyncio.create_task(page(heard))
    await counting()
    found[WHOLE.name] = time.perf_counter() - began
    found[SPENT.name] = time.process_time() - spent
    await asyncio.sleep(min(seconds, 5))
    told = 0
    await cost(OPEN.name)
    found[TOLD.name] = told
    with _load(store):
        await asyncio.sleep(min(seconds, 5))
        await cost(BUSY_OPEN.name)
        open_page.cancel()
        await asyncio.sleep(1)
        await cost(BUSY.name)
    return found


@contextmanager
def _load(store: DelayedStore) -> Iterator[None]:
    """Send while the block runs."""
    ended, chance = threading.Event(), random.Random(2)

    def send() -> None:
        while not ended.wait(0.1):
            for _ in range(10):
                topic = store.topic(f"topic-{chance.randrange(500):05}")
                topic.send(b"x", deliver_after=chance.randrange(60, 3_600))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join()


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "page", __doc__, n=(1_000_000,), quick_n=(20_000,))
    results = Results("page", options)
    for n in options.n:
        topics, days, seconds = (500, 40, 3.0) if options.quick else (10_000, 400, 30.0)
        case = f"{n:,} pending, {topics:,} topics, {days} days"
        with tempfile.TemporaryDirectory(prefix="duelog-page-", dir=options.directory) as place:
            path = f"{place}/store"
            run_isolated("benchmarks.page:fill", {"path": path, "n": n, "topics": topics, "days": days})
            for _ in range(options.runs):
                found = run_isolated("benchmarks.page:watch", {"path": path, "seconds": seconds})
                for measure in MEASURES:
                    results.add(case, "duelog", "duelog", measure, found[measure.name])
        for name, closed, opened in (("at rest", CLOSED, OPEN), ("under load", BUSY, BUSY_OPEN)):
            before, after = (results.median(case, "duelog", each.name) for each in (closed, opened))
            if before is not None and after is not None:
                results.target(f"{case}, {name}: what the page costs", after - before, 2.0, "less", "% of a core")
    results.show()
    return 0
