"""schedule_one: messages per second one by one, each durable before the next is sent; by one thread and by sixteen.

Sixteen threads share commits and the journal, or with journal_from=1 one thread goes by the journal too; they send
five times as many messages, so that the journal is written over several times. "One processor" is what `taskset -c 0`
does: threads that wait for each other are woken at once there. Peers that one connection serves in turn are measured
with one thread only.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from .harness import load
from .harness.compare import compare
from .harness.options import parse
from .harness.plots import bars, short
from .harness.results import Measure, Results
from .peers import DURABLE_PEERS, make, subjects

RATE = Measure("rate", "messages/s", show=short)
_WARM = 50


def measure(subject: str, n: int, threads: int, directory: Path, processors: int | None = None) -> dict[str, float]:
    """Schedule `n` messages one by one, spread over the threads; `processors`: at most so many."""
    if processors is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processors])
    payload, dues = load.payloads(1)[0], load.dues(n + _WARM).tolist()
    peer = make(subject)
    peer.open(directory, load.NOW_MS)
    failures: list[BaseException] = []

    def send(mine: list[int]) -> None:
        try:
            for due_ms in mine:
                peer.schedule_one(payload, due_ms)
        except BaseException as error:
            failures.append(error)

    try:
        send(dues[:_WARM])
        dues = dues[_WARM:]
        workers = [threading.Thread(target=send, args=(dues[at::threads],)) for at in range(threads)]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        elapsed = time.perf_counter() - started
    finally:
        peer.close()
    if failures:
        raise failures[0]
    return {RATE.name: n / elapsed}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "schedule_one", __doc__, n=(10_000,), quick_n=(500,))
    results = Results("schedule_one", options)
    for n in options.n:
        one, many = f"1 thread, {n:,} messages", f"16 threads, {5 * n:,} messages"
        pinned = "16 threads, one processor"
        function = "benchmarks.schedule_one:measure"
        others = [key for key in ("sqlite-normal", "redis-everysec", "beanstalkd") if not options.quick]
        own = subjects("duelog", "duelog:journal", "duelog:relaxed", "duelog:none")
        chosen = [*own, *subjects("raw-lmdb", "raw-file", *DURABLE_PEERS, *others)]
        compare(results, one, function, {"n": n, "threads": 1}, [RATE], chosen)
        compare(results, many, function, {"n": 5 * n, "threads": 16}, [RATE], own)
        compare(results, pinned, function, {"n": 5 * n, "threads": 16, "processors": 1}, [RATE], subjects("duelog"))
        ours, shared = results.find(one, "duelog", RATE.name), results.find(many, "duelog", RATE.name)
        raw = results.find(one, "raw-lmdb", RATE.name)
        best = results.best(one, RATE.name, DURABLE_PEERS)
        if ours is not None and raw is not None:
            results.target("1 thread, against raw LMDB", results.ratio(ours, raw), 0.9, "more", "x")
        if ours is not None and best is not None:
            text = f"1 thread, against the best durable peer ({best.label})"
            results.target(text, results.ratio(ours, best), 1.0, "more", "x")
        if ours is not None and shared is not None:
            results.target("16 threads, against 1 thread", results.ratio(shared, ours), 5.0, "more", "x")
        on_one = results.find(pinned, "duelog", RATE.name)
        if ours is not None and on_one is not None:
            text = "16 threads on one processor, against 1 thread that has all"
            results.target(text, results.ratio(on_one, ours), 5.0, "more", "x")
    results.show()
    bars(results, RATE.name, "Scheduling one by one")
    return 0
