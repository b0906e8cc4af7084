"""trim: main-log entries removed a second once everybody has passed them, and how long that holds firing up.

Two logs: markers, and messages of 1 KiB that were sent without a delay. For the hold-up another topic has a message due
every 5 ms, and a consumer waits for them: the longest lateness without and with trimming beside it.
"""

import threading
import time
from pathlib import Path

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, SystemClock, Topic

from .harness import load
from .harness.compare import compare
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

RATE = Measure("trimmed", "entries/s", show=short)
QUIET = Measure("longest lateness, quiet", "ms", "less")
BESIDE = Measure("longest lateness, trimming", "ms", "less")
HELD_UP = Measure("held up", "ms", "less")

_EVERY_MS = 5
_TICKS = 400
_BATCH = 10_000


def rate(subject: str, n: int, markers: bool, directory: Path) -> dict[str, float]:
    """Trim a log of `n` entries in one tick."""
    clock = ManualClock(load.NOW_MS)
    with DelayedStore.open(directory / "store", StoreConfig(durability="none"), clock=clock) as store:
        last = _fill(store, clock, store.topic("log"), n, markers, load.START_MS)
    with DelayedStore.open(directory / "store", StoreConfig(), clock=clock) as store:
        store.tick()
        store.topic("log").subscribe("reader").ack_cumulative(last, durable=True)
        clock.advance(store.config.ack_flush_ms)
        started = time.perf_counter()
        store.tick()
        elapsed = time.perf_counter() - started
        left = store.topic("log").stats().entries
    return {RATE.name: (n - left) / elapsed}


def hold_up(subject: str, n: int, markers: bool, directory: Path) -> dict[str, float]:
    """Trim a log of `n` entries beside a topic that fires every few ms."""
    clock = ManualClock(SystemClock().now_ms() - 3 * load.DAY_MS)
    with DelayedStore.open(directory / "store", StoreConfig(durability="none"), clock=clock) as store:
        last = _fill(store, clock, store.topic("log"), n, markers, clock.now_ms() + load.DAY_MS)
    with DelayedStore.open(directory / "store", StoreConfig()) as store:
        store.tick()
        ticker = store.topic("ticker")
        _lateness(store, ticker)
        quiet = _lateness(store, ticker)
        reader = store.topic("log").subscribe("reader")
        threading.Timer(0.5, lambda: reader.ack_cumulative(last)).start()
        beside = _lateness(store, ticker)
        deadline = time.monotonic() + 60
        while store.topic("log").stats().entries >= n and time.monotonic() < deadline:
            time.sleep(0.05)
        if store.topic("log").stats().entries >= n:
            raise RuntimeError("the log was not trimmed")
    return {QUIET.name: quiet, BESIDE.name: beside, HELD_UP.name: max(beside - quiet, 0.0)}


def _fill(store: DelayedStore, clock: ManualClock, topic: Topic, n: int, markers: bool, due_ms: int) -> MessageId:
    """A main log of `n` entries; the position of the last."""
    reader = topic.subscribe("reader")
    payload = load.payloads(1, 20 if markers else load.PAYLOAD_BYTES)[0]
    for at in range(0, n, _BATCH):
        due = due_ms if markers else None
        topic.send_batch([Message(payload, deliver_at=due) for _ in range(min(_BATCH, n - at))])
    if markers:
        clock.set(due_ms + 1)
        store.tick()
    count = 0
    while batch := reader.receive(_BATCH):
        count += len(batch)
        position: MessageId = batch[-1].position
    if count != n:
        raise RuntimeError(f"{count} of {n} entries")
    reader.close()
    return position


def _lateness(store: DelayedStore, topic: Topic) -> float:
    """The longest lateness in ms of messages that are due every few ms for two seconds."""
    start_ms = store.clock.now_ms() + 200
    topic.send_batch([Message(b"tick", deliver_at=start_ms + number * _EVERY_MS) for number in range(_TICKS)])
    longest = 0.0
    left = _TICKS
    with topic.subscribe("reader") as reader:
        while left:
            batch = reader.receive(100, timeout=30.0)
            now = time.time() * 1_000
            if not batch:
                raise RuntimeError(f"{left} ticks are missing")
            longest = max(longest, now - batch[0].due_ms)
            reader.ack(batch)
            left -= len(batch)
    return longest


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "trim", __doc__, n=(500_000,), quick_n=(100_000,))
    results = Results("trim", options)
    for n in options.n:
        for name, markers in (("markers", True), ("messages of 1 KiB", False)):
            case = f"{n:,} {name}"
            arguments = {"n": n, "markers": markers}
            compare(results, case, "benchmarks.trim:rate", arguments, [RATE])
            compare(results, case, "benchmarks.trim:hold_up", arguments, [QUIET, BESIDE, HELD_UP])
            results.target(f"{case}, trimmed", results.median(case, "duelog", RATE.name), 500_000, "more", "/s")
            results.target(f"{case}, held up", results.median(case, "duelog", HELD_UP.name), 20.0, "less", "ms")
    results.show()
    return 0
