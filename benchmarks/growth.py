"""growth: time and memory against messages, topics, days ahead and subscriptions; what grows is to be flat or linear.

Each axis is measured with the others small: 1 KiB payloads, one topic, seven days, one subscription.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from duelog import DelayedStore, ManualClock, Message, StoreConfig

from .harness import load
from .harness.compare import compare
from .harness.machine import anonymous_bytes, disk_bytes, open_files, settle_memory
from .harness.options import parse
from .harness.plots import Line, lines, short
from .harness.results import REFERENCE, Measure, Results

SENT = Measure("sent", "messages/s", show=short)
OPENED = Measure("opened", "ms", "less")
TICK = Measure("first tick", "ms", "less")
RECEIVED = Measure("received", "messages/s", show=short)
MEMORY = Measure("memory", "MB", "less")
DISK = Measure("disk", "bytes a message", "less", lambda value: f"{value:,.0f}")
FILES = Measure("open files", "files", "less")
MEASURES = (SENT, OPENED, TICK, RECEIVED, MEMORY, DISK, FILES)

_RECEIVED_MOST = 100_000
"""Messages received at most: enough for a rate."""


class Axis(NamedTuple):
    """One thing that grows, and the steps it is measured at."""

    name: str
    steps: Sequence[int]
    quick: Sequence[int]


AXES = {
    "n": Axis("messages", (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000), (5_000, 10_000)),
    "topics": Axis("topics", (1, 10, 100, 500, 2_000), (1, 20)),
    "days": Axis("days ahead", (1, 7, 30, 90, 365), (1, 7)),
    "subscriptions": Axis("subscriptions", (1, 10, 100, 1_000), (1, 10)),
}
_USUAL = {"n": 100_000, "topics": 1, "days": 7, "subscriptions": 1}
_SMALL = {"n": 5_000, "topics": 1, "days": 7, "subscriptions": 1}


def measure(subject: str, n: int, topics: int, days: int, subscriptions: int, directory: Path) -> dict[str, float]:
    """The life of a store with these numbers: send, close, open, fire, receive for a while."""
    path = directory / "store"
    clock = ManualClock(load.NOW_MS)
    payloads = load.payloads(load.BATCH)
    limit_ms = load.START_MS + days * load.DAY_MS
    dues = load.dues(n, load.START_MS, limit_ms)
    settle_memory()
    memory, files = anonymous_bytes(), open_files()
    answer: dict[str, float] = {}
    names = [f"topic-{number:05}" for number in range(topics)]
    batch = max(1, min(load.BATCH, n // topics))
    with DelayedStore.open(path, StoreConfig(background=True), clock=clock) as store:
        for name in names:
            for number in range(subscriptions):
                store.topic(name).subscribe(f"reader-{number}").close()
        faces = [store.topic(name) for name in names]
        started = time.perf_counter()
        for number, at in enumerate(range(0, n, batch)):
            some = dues[at : at + batch].tolist()
            messages = [Message(p, deliver_at=d) for p, d in zip(payloads, some, strict=False)]
            faces[number % topics].send_batch(messages)
        answer[SENT.name] = n / (time.perf_counter() - started)
        answer[FILES.name] = open_files() - files
    answer[DISK.name] = disk_bytes(path, logs=False) / n
    started = time.perf_counter()
    with DelayedStore.open(path, StoreConfig(), clock=clock) as store:
        answer[OPENED.name] = (time.perf_counter() - started) * 1_000
        clock.set(load.START_MS + load.DAY_MS // 2)
        started = time.perf_counter()
        store.tick()
        answer[TICK.name] = (time.perf_counter() - started) * 1_000
        received = 0
        started = time.perf_counter()
        for name in names:
            for number in range(subscriptions):
                with store.topic(name).subscribe(f"reader-{number}") as reader:
                    while received < _RECEIVED_MOST and (found := reader.receive(load.BATCH)):
                        reader.ack(found)
                        received += len(found)
        store.flush()
        answer[RECEIVED.name] = received / (time.perf_counter() - started)
        settle_memory()
        answer[MEMORY.name] = (anonymous_bytes() - memory) / 1e6
    return answer


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--axis", choices=AXES, action="append", help="measure this axis only; repeatable")
    parser.add_argument("--most", type=int, metavar="N", help="leave out steps over N")


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "growth", __doc__, more=_options)
    results = Results("growth", options)
    for key in options.extra.axis or AXES:
        axis = AXES[key]
        steps = axis.quick if options.quick else axis.steps
        steps = [step for step in steps if options.extra.most is None or step <= options.extra.most]
        for step in steps:
            arguments = {**(_SMALL if options.quick else _USUAL), key: step}
            case = f"{step:,} {axis.name}"
            compare(results, case, "benchmarks.growth:measure", arguments, MEASURES, runs=1)
        _plot(results, key, axis, steps)
    if options.extra.axis is None or "n" in options.extra.axis:
        most, least = f"{10_000_000:,} messages", f"{100_000:,} messages"
        ours, few = results.find(most, REFERENCE, SENT.name), results.find(least, REFERENCE, SENT.name)
        if ours is not None and few is not None:
            results.target("sent, 10 M to 100 k messages", results.ratio(ours, few), 0.9, "more", "x")
    results.show()
    return 0


def _plot(results: Results, key: str, axis: Axis, steps: Sequence[int]) -> None:
    panels = []
    for measured in MEASURES:
        points = [(step, results.median(f"{step:,} {axis.name}", REFERENCE, measured.name)) for step in steps]
        known = [(float(step), value) for step, value in points if value is not None]
        if known:
            x, y = zip(*known, strict=True)
            panels.append((f"{measured.name}, {measured.unit}", [Line("duelog", x, y)]))
    lines(results, f"growth-{key}", f"Growth with {axis.name}", panels, axis.name, log_x=True)
