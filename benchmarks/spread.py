"""spread: batches that put little into each log: over up to 3,650 days, and over 2,000 topics.

Batches of 1,000 due over 7, 365 and 3,650 days, beside PostgreSQL, by the time from the first message of all to the end
of closing, when all is in its partition, and by duelog's processor time for that; with what is on disk then (the
write-ahead log, which has nothing in it, apart) and the memory before closing. 2,000 topics with 50 messages each over
seven days: twenty topics in a call of `DelayedStore.send_batch`, and a call for each topic by four threads. 20,000
messages in batches over 365 days that were never used before, beside as many over one such day.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from duelog import DelayedStore, ManualClock, Message, StoreConfig

from .harness import load
from .harness.compare import Subject, compare
from .harness.machine import anonymous_bytes, cpu_seconds, disk_bytes, settle_memory
from .harness.options import parse
from .harness.plots import bars, short
from .harness.results import Measure, Results
from .peers import make, subjects

RATE = Measure("rate", "messages/s", show=short)
PROCESSOR = Measure("processor time", "us a message", "less", lambda value: f"{value:,.1f}")
DISK = Measure("disk", "bytes a message", "less", lambda value: f"{value:,.0f}")
MEMORY = Measure("memory", "MB", "less")

_LEAST = {7: None, 365: 60_000, 3_650: 30_000}
"""Messages a second to be reached, by days."""

WAYS = (Subject("together", "store.send_batch"), Subject("each", "topic by topic, 4 threads"))
_EACH = 50

NEW_DAYS = (Subject("1", "one new day"), Subject("365", "365 new days"))
_NEW = 20_000
_TOPICS_A_CALL = load.BATCH // _EACH


def measure(subject: str, n: int, days: int, directory: Path) -> dict[str, float]:
    """Schedule a message for each day, and `n` in batches; close. All of it counts, whenever days are made."""
    payloads = load.payloads(load.BATCH)
    dues = load.dues(n, load.START_MS, load.START_MS + days * load.DAY_MS).tolist()
    firsts = load.payloads(days), [load.START_MS + day * load.DAY_MS for day in range(days)]
    settle_memory()
    before = anonymous_bytes()
    peer = make(subject, background=True)
    peer.open(directory, load.NOW_MS)
    try:
        processes = peer.processes()
        used_s, started = cpu_seconds(), time.perf_counter()
        peer.schedule_batch(*firsts)
        for at in range(0, n, load.BATCH):
            batch = dues[at : at + load.BATCH]
            peer.schedule_batch(payloads[: len(batch)], batch)
        used_s, elapsed = cpu_seconds() - used_s, time.perf_counter() - started
        settle_memory()
        memory = anonymous_bytes(processes) - (before if os.getpid() in processes else 0)
    finally:
        closing_s, started = cpu_seconds(), time.perf_counter()
        peer.close()
        elapsed += time.perf_counter() - started
        used_s += cpu_seconds() - closing_s
    used = {PROCESSOR.name: 1e6 * used_s / (n + days)} if os.getpid() in processes else {}
    return used | {
        RATE.name: (n + days) / elapsed,
        DISK.name: disk_bytes(directory, logs=False) / (n + days),
        MEMORY.name: memory / 1e6,
    }


def measure_new(subject: str, directory: Path) -> dict[str, float]:
    """Schedule messages in batches over as many new days as the subject says."""
    payloads = load.payloads(load.BATCH)
    dues = load.dues(_NEW, load.START_MS, load.START_MS + int(subject) * load.DAY_MS).tolist()
    with DelayedStore.open(directory / "store", StoreConfig(background=True), clock=ManualClock(load.NOW_MS)) as store:
        topic = store.topic("new")
        topic.send(payloads[0])
        started = time.perf_counter()
        for at in range(0, _NEW, load.BATCH):
            topic.send_payloads(payloads, deliver_at=dues[at : at + load.BATCH])
        elapsed = time.perf_counter() - started
    return {RATE.name: _NEW / elapsed, DISK.name: disk_bytes(directory, logs=False) / _NEW}


def measure_topics(subject: str, topics: int, directory: Path) -> dict[str, float]:
    """Send to every topic, in one of two ways, after a message to each that makes it."""
    payload = load.payloads(1)[0]
    dues = load.dues(topics * _EACH).tolist()
    names = [f"topic-{number:05}" for number in range(topics)]
    config = StoreConfig(background=True)
    with DelayedStore.open(directory / "store", config, clock=ManualClock(load.NOW_MS)) as store:
        faces = [store.topic(name) for name in names]
        for face in faces:
            face.send(payload, deliver_at=load.START_MS)
        batches = [
            [Message(payload, deliver_at=due_ms) for due_ms in dues[at : at + _EACH]]
            for at in range(0, topics * _EACH, _EACH)
        ]

        def together(first: int) -> None:
            numbers = range(first, min(first + _TOPICS_A_CALL, topics))
            store.send_batch([(faces[number], message) for number in numbers for message in batches[number]])

        def each(number: int) -> None:
            faces[number].send_batch(batches[number])

        call: Callable[[int], None] = together if subject == "together" else each
        step, threads = (_TOPICS_A_CALL, 1) if subject == "together" else (1, 4)
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            for _ in pool.map(call, range(0, topics, step)):
                pass
            elapsed = time.perf_counter() - started
    disk = disk_bytes(directory, logs=False) / (topics * (_EACH + 1))
    return {RATE.name: topics * _EACH / elapsed, DISK.name: disk}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "spread", __doc__, n=(1_000_000,), quick_n=(5_000,))
    results = Results("spread", options)
    for n in options.n:
        for days, least in list(_LEAST.items())[: 2 if options.quick else None]:
            case = f"{n:,} messages over {days:,} days"
            arguments = {"n": n, "days": days}
            chosen = subjects("duelog", "postgres")
            compare(results, case, "benchmarks.spread:measure", arguments, [RATE, PROCESSOR, DISK, MEMORY], chosen)
            ours, other = results.find(case, "duelog", RATE.name), results.find(case, "postgres", RATE.name)
            if ours is not None and other is not None:
                results.target(f"{case}, against {other.label}", results.ratio(ours, other), 1.0, "more", "x")
            if least is not None and ours is not None:
                results.target(case, ours.median, least, "more", "messages/s")
            if days < max(_LEAST):  # else a partition's first pages are much of it
                results.target(f"{case}, disk", results.median(case, "duelog", DISK.name), 1_150, "less", "B")
    topics = 100 if options.quick else 2_000
    case = f"{topics:,} topics, {_EACH} messages each over 7 days"
    compare(results, case, "benchmarks.spread:measure_topics", {"topics": topics}, [RATE, DISK], WAYS)
    for way, least in zip(WAYS, (60_000, 40_000), strict=True):
        results.target(f"{case}, {way.label}", results.median(case, way.key, RATE.name), least, "more", "messages/s")
    case = f"{_NEW:,} messages over days never used before"
    compare(results, case, "benchmarks.spread:measure_new", {}, [RATE, DISK], NEW_DAYS)
    results.target(f"{case}, 365", results.median(case, "365", RATE.name), 60_000, "more", "messages/s")
    results.show()
    bars(results, RATE.name, "Batches that are scattered", name="spread")
    return 0
