"""topics: 2,000 topics, each with a message on each of 10 days: time, memory, open files; sent, reopened, delivered."""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from duelog import DelayedStore, ManualClock, Message, StoreConfig

from .harness import load
from .harness.compare import compare
from .harness.machine import anonymous_bytes, disk_bytes, open_files, settle_memory
from .harness.options import parse
from .harness.results import Measure, Results

MEASURES = (
    Measure("sent", "messages/s"),
    Measure("reopened", "s", "less"),
    Measure("first tick", "s", "less"),
    Measure("delivered", "messages/s"),
    Measure("open files at most", "files", "less"),
    Measure("memory, all pending", "MB", "less"),
    Measure("memory, one day loaded", "MB", "less"),
    Measure("disk, all pending", "MB", "less"),
    Measure("disk, at the end", "MB", "less"),
)
_DAYS = 10
_MB = 1e6


def measure(subject: str, topics: int, directory: Path) -> dict[str, float]:
    """The life of `topics` topics."""
    clock = ManualClock(load.NOW_MS)
    path = directory / "store"
    payload = load.payloads(1)[0]
    settle_memory()
    memory, files = anonymous_bytes(), open_files()
    most_files = files
    answer: dict[str, float] = {}
    with DelayedStore.open(path, StoreConfig(background=True), clock=clock) as store:
        names = [f"topic-{number:05}" for number in range(topics)]
        for name in names:
            store.topic(name).subscribe("reader").close()

        def send(number: int) -> None:
            dues = [load.START_MS + day * load.DAY_MS + number * 1_000 for day in range(_DAYS)]
            store.topic(names[number]).send_batch([Message(payload, deliver_at=due_ms) for due_ms in dues])

        started = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            for _ in pool.map(send, range(topics)):
                pass
        answer["sent"] = topics * _DAYS / (time.perf_counter() - started)
        most_files = max(most_files, open_files())
        settle_memory()
        answer["memory, all pending"] = (anonymous_bytes() - memory) / _MB
        answer["disk, all pending"] = disk_bytes(path, logs=False) / _MB
    started = time.perf_counter()
    with DelayedStore.open(path, StoreConfig(), clock=clock) as store:
        answer["reopened"] = time.perf_counter() - started
        clock.set(load.START_MS)
        started = time.perf_counter()
        store.tick()
        answer["first tick"] = time.perf_counter() - started
        settle_memory()
        answer["memory, one day loaded"] = (anonymous_bytes() - memory) / _MB
        started = time.perf_counter()
        delivered = 0
        readers = [store.topic(name).subscribe("reader") for name in names]
        for day in range(1, _DAYS + 1):
            clock.set(load.START_MS + day * load.DAY_MS)
            store.tick()
            for reader in readers:
                batch = reader.receive(_DAYS)
                reader.ack(batch)
                delivered += len(batch)
            most_files = max(most_files, open_files())
        store.flush()
        answer["delivered"] = delivered / (time.perf_counter() - started)
        clock.advance(8 * 3_600_000)
        store.tick()
        clock.advance(1_000)
        store.tick()
        if delivered != topics * _DAYS or store.partitions():
            raise RuntimeError(f"{delivered} delivered, {len(store.partitions())} partitions left")
    answer["open files at most"] = most_files - files
    answer["disk, at the end"] = disk_bytes(path, logs=False) / _MB
    return answer


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topics", type=int, metavar="N", help="how many (2,000; quick: 100)")


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "topics", __doc__, more=_options)
    results = Results("topics", options)
    topics = options.extra.topics or (100 if options.quick else 2_000)
    compare(results, f"{topics:,} topics", "benchmarks.topics:measure", {"topics": topics}, MEASURES)
    results.show()
    return 0
