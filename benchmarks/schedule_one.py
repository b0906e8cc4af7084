"""schedule_one: messages per second one by one, each durable before the next is sent; by one thread and by sixteen.

Three kinds: due within the hour, over seven days, and at once. Sixteen threads send five times as many messages, so
that the write-ahead log is applied several times. "One processor" is what `taskset -c 0` does: threads that wait for
each other are woken at once there. Peers that one connection serves in turn are measured with one thread only, and most
of them with one kind, since a due time more or less is all the same to them.
"""

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

_HOUR_MS = 3_600_000
KINDS = {
    "due within the hour": (load.NOW_MS + 1_000, load.NOW_MS + _HOUR_MS),
    "over 7 days": (load.START_MS, load.END_MS),
    "due at once": (load.NOW_MS, load.NOW_MS + 1),
}
"""The due times of each kind, [start, limit)."""

WEEK = "over 7 days"


def measure(
    subject: str, n: int, threads: int, kind: str, directory: Path, processors: int | None = None
) -> dict[str, float]:
    """Schedule `n` messages one by one, spread over the threads; `processors`: at most so many."""
    if processors is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processors])
    payload, dues = load.payloads(1)[0], load.dues(n + _WARM, *KINDS[kind]).tolist()
    peer = make(subject, background=True)
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
    function = "benchmarks.schedule_one:measure"
    own = subjects("duelog", "duelog:relaxed", "duelog:none")
    beside = subjects("sqlite-full", "raw-in-place")
    peers = [key for key in DURABLE_PEERS if key != "sqlite-full"]
    others = [key for key in ("sqlite-normal", "redis-everysec", "beanstalkd") if not options.quick]
    for n in options.n:
        for kind in KINDS:
            one, many = f"1 thread, {kind}", f"16 threads, {kind}"
            more = subjects("raw-lmdb", "raw-file", *peers, *others) if kind == WEEK else []
            arguments = {"n": n, "threads": 1, "kind": kind}
            compare(results, one, function, arguments, [RATE], [*own, *beside, *more])
            compare(results, many, function, {"n": 5 * n, "threads": 16, "kind": kind}, [RATE], own)
            ours, in_place = results.find(one, "duelog", RATE.name), results.find(one, "raw-in-place", RATE.name)
            best = results.best(one, RATE.name, DURABLE_PEERS)
            if ours is not None and in_place is not None:
                results.target(f"{one}, against {in_place.label}", results.ratio(ours, in_place), 0.8, "more", "x")
            if ours is not None and best is not None:
                text = f"{one}, against the best durable peer ({best.label})"
                results.target(text, results.ratio(ours, best), 1.0, "more", "x")
            results.target(many, results.median(many, "duelog", RATE.name), 20_000, "more", "messages/s")
        pinned = f"16 threads, {WEEK}, one processor"
        arguments = {"n": 5 * n, "threads": 16, "kind": WEEK, "processors": 1}
        compare(results, pinned, function, arguments, [RATE], subjects("duelog"))
    results.show()
    bars(results, RATE.name, "Scheduling one by one")
    return 0
