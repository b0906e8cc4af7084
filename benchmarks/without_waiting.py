"""without_waiting: messages per second by `put`, with and without numbers, and by `send_async`; from one thread.

Durable, 1 KiB, due at once or within the hour, to one topic or to fifty in turn. The clock stops when all have been
heard of. Beside the rate stands the processor time of a message, which the work of others changes less.
"""

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from duelog import DelayedStore, MessageId

from .harness import load
from .harness.compare import Subject, compare
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

RATE = Measure("rate", "messages/s", show=short)
PROCESSOR = Measure("processor", "us a message", "less")
SUBJECTS = (Subject("put", "put"), Subject("numbers", "put, with numbers"), Subject("send_async", "send_async"))
CASES = {"at once, one topic": (1, 0), "within the hour, one topic": (1, 3_600), "at once, fifty topics": (50, 0)}
"""Topics, and the longest delay in seconds."""


def measure(subject: str, n: int, topics: int, delay_s: int, directory: Path) -> dict[str, float]:
    """Send `n` messages and wait until all are durable."""
    payload, left, all_there = load.payloads(1)[0], n, threading.Event()

    def heard(count: int) -> None:
        nonlocal left  # by the one thread that writes
        left -= count
        if not left:
            all_there.set()

    def done(results: list[tuple[Any, Any]]) -> None:
        if not all(isinstance(outcome, MessageId) for _, outcome in results):
            raise RuntimeError(f"not stored: {results[:3]}")
        heard(len(results))

    def resolved(future: Future[MessageId]) -> None:
        future.result()
        heard(1)

    with DelayedStore.open(directory / "store") as store:
        faces = [store.topic(f"t{number}") for number in range(topics)]
        for face in faces:
            face.send(payload, deliver_after=delay_s)
        started, before_s = time.perf_counter(), time.process_time()
        for number in range(n):
            face, after = faces[number % topics], number % delay_s if delay_s else None
            if subject == "send_async":
                face.send_async(payload, deliver_after=after).add_done_callback(resolved)
            else:
                numbers = ("p", number, number) if subject == "numbers" else None
                face.put(payload, deliver_after=after, numbers=numbers, token=number, done=done)
        if not all_there.wait(600):
            raise RuntimeError(f"{left} messages were not heard of")
        elapsed_s, used_s = time.perf_counter() - started, time.process_time() - before_s
    return {RATE.name: n / elapsed_s, PROCESSOR.name: 1e6 * used_s / n}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "without_waiting", __doc__, n=(100_000,), quick_n=(2_000,))
    results = Results("without_waiting", options)
    for n in options.n:
        for case, (topics, delay_s) in CASES.items():
            arguments = {"n": n, "topics": topics, "delay_s": delay_s}
            compare(results, case, "benchmarks.without_waiting:measure", arguments, [RATE, PROCESSOR], SUBJECTS)
    results.show()
    return 0
