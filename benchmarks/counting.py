"""counting: what /metrics costs: a SEND and a dispatched message with and without it, and a scrape of many topics.

Processor time of the event loop's thread, for a message of 1 KiB through the broker's own code, its socket apart; with
and without in turns, the least of the rounds. The scrape is of topics that each have a producer, a subscription with a
consumer and a delayed message; the loop's lag is that of a timer of 1 ms meanwhile.
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from duelog import DelayedStore, Message, StoreConfig
from duelog.broker.configuration import BrokerConfig
from duelog.broker.metrics.exposition import Exposition
from duelog.broker.protocol import commands, entry, fields
from duelog.broker.protocol.entry import MessageMetadata
from duelog.broker.protocol.loop_calls import Workers
from duelog.broker.server.broker import Services
from duelog.broker.server.service import GC_THRESHOLDS
from tests.broker.protocol.blobs import join_blob

from .harness.compare import compare
from .harness.options import parse
from .harness.results import Measure, Results


def _us(value: float) -> str:
    return f"{value:,.2f}"


MEASURES = (
    *(
        Measure(f"{path}, {how}", "us a message", "less", _us)
        for path in ("SEND", "dispatch")
        for how in ("not counted", "counted")
    ),
    Measure("scrape", "s", "less"),
    Measure("page", "MB", "less"),
    Measure("loop's lag, no scrape", "ms", "less", _us),
    Measure("loop's lag, scrape", "ms", "less", _us),
)
_ROUNDS = 40
_POLL = 500


class _Peer:
    """A connection whose socket takes everything."""

    client_version = "Pulsar-Java"
    protocol_version = 21
    role = None
    closed = False
    writable = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = f"10.0.0.1:{number}"

    def send(self, command: Any, blob: Any = None) -> None: ...

    def send_frames(self, frames: bytes, blob: Any = None) -> None: ...

    def close(self, reason: str) -> None:
        raise RuntimeError(reason)

    def on_writable(self, call: Callable[[], object]) -> None: ...

    def pause_reading(self, reason: str) -> None: ...

    def resume_reading(self, reason: str) -> None: ...


def _blob() -> memoryview:
    metadata = MessageMetadata("p", 1, 1_000)
    return memoryview(join_blob(fields.ENCODERS[MessageMetadata](metadata), bytes(1_024)))


async def _send(services: Services, n: int) -> float:
    """Microseconds of the loop's thread for a SEND and its receipt."""
    producers, blob = services.producers, _blob()
    (producer,) = producers.of_topic(_topic(0))
    began = time.thread_time()
    for number in range(n):
        producers.send(producer.connection.peer, commands.Send(1, number), blob)
        if number % 500 == 499:
            await producers.answered()
    await producers.answered()
    return (time.thread_time() - began) / n * 1e6


def _dispatch(services: Services, messages: Any, n: int) -> float:
    """Likewise for a message that was polled."""
    group = next(each for each in services.consumers.groups if each.topic.name == _topic(0))
    (consumer,) = group.consumers
    deliver = group._deliver
    group.dispatched = services.consumers.dispatched
    began = time.thread_time()
    for _ in range(n // _POLL):
        consumer.permits = _POLL
        deliver((consumer, consumer.generation, messages))  # type: ignore[arg-type]
        consumer.held.clear()
        consumer.unacked = group.unacked = 0
    return (time.thread_time() - began) / n * 1e6


def _topic(number: int) -> str:
    return f"persistent://public/default/topic-{number:05}"


async def _longest_lag(until: asyncio.Future[Any]) -> float:
    longest = 0.0
    while not until.done():
        began = time.monotonic()
        await asyncio.sleep(0.001)
        longest = max(longest, time.monotonic() - began - 0.001)
    return longest


async def _main(store: DelayedStore, topics: int, n: int) -> dict[str, float]:
    executor = ThreadPoolExecutor(16)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(executor)
    config = BrokerConfig(
        max_topics_in_prometheus=0, max_producers_per_connection=topics + 1, max_consumers_per_connection=topics + 1
    )
    services = Services(store, config, Workers(executor))
    await services.resources.load()
    exposition = services.exposition
    exposition.start()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    peer: Any = _Peer(1)
    kind, at_earliest = commands.SubscriptionType.SHARED, commands.InitialPosition.EARLIEST
    for number in range(topics):
        await services.producers.open(peer, commands.Producer(_topic(number), number + 1, 1))
        subscribe = commands.Subscribe(_topic(number), "s", kind, number + 1, 1, initial_position=at_earliest)
        await services.consumers.open(peer, subscribe)
    header = entry.Header(0, 0, 1, 1)
    messages = store.topic("polled")
    with messages.subscribe("s", initial_position="earliest") as reader:
        messages.send_batch([Message(entry.pack(header, bytes(_blob())))] * _POLL)
        polled, _ = reader.poll_columns(_POLL)
        counted = exposition._received, exposition._sent
        found: dict[str, list[float]] = {measure.name: [] for measure in MEASURES}
        for number in range(_ROUNDS):
            on = number % 2 == 1
            services.producers.sends.received = counted[0] if on else None
            services.consumers.dispatched = counted[1] if on else None
            how = "counted" if on else "not counted"
            found[f"SEND, {how}"].append(await _send(services, n))
            found[f"dispatch, {how}"].append(_dispatch(services, polled, n))
    delayed = Message(b"", deliver_after=3_600)
    for start in range(0, topics, 1_000):
        store.send_batch([(_topic(number), delayed) for number in range(start, min(start + 1_000, topics))])
    await _scrape(exposition)
    idle = loop.create_task(asyncio.sleep(1.0))
    found["loop's lag, no scrape"].append(await _longest_lag(idle) * 1e3)
    began = time.monotonic()
    scrape = loop.create_task(_scrape(exposition))
    found["loop's lag, scrape"].append(await _longest_lag(scrape) * 1e3)
    found["scrape"].append(time.monotonic() - began)
    found["page"].append(len(await scrape) / 1e6)
    exposition.stop()
    await services.consumers.close_all()
    return {name: min(values) for name, values in found.items()}


async def _scrape(exposition: Exposition) -> bytes:
    async with exposition.page() as page:
        return page


def measure(subject: str, topics: int, n: int, directory: Path) -> dict[str, float]:
    """All of it, on one store."""
    with DelayedStore.open(directory / "store", StoreConfig(background=True)) as store:
        return asyncio.run(_main(store, topics, n))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topics", type=int, metavar="N", help="how many (10,000; quick: 100)")


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "counting", __doc__, n=(4_000,), quick_n=(1_000,), more=_options)
    results = Results("counting", options)
    topics = options.extra.topics or (100 if options.quick else 10_000)
    arguments = {"topics": topics, "n": options.n[0]}
    compare(results, f"{topics:,} topics", "benchmarks.counting:measure", arguments, MEASURES)
    results.show()
    return 0
