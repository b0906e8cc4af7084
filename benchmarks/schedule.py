"""schedule: messages per second into the store, in batches of 1,000 due over seven days, each batch durable.

Batches that are due at once stand beside PostgreSQL's.
The limits write the same bytes with nothing around them: raw LMDB a value for each message, a commit for each day that
a batch touches, side by side; a file that grows, and one that is written over, with one fdatasync for each batch.
Bytes written are those of the whole device until the subject is closed, for each byte of payload: other work counts.
"""

import time
from pathlib import Path

from .harness import load
from .harness.compare import compare
from .harness.machine import cpu_seconds, written_bytes
from .harness.options import parse
from .harness.plots import bars, short
from .harness.results import Measure, Results
from .peers import DURABLE_PEERS, LIMITS, PEERS, at_most, make, subjects

RATE = Measure("rate", "messages/s", show=short)
CPU = Measure("processor time", "us a message", "less")
LAST = Measure("rate of the last tenth", "messages/s", show=short)
WRITTEN = Measure("bytes written", "a byte of payload", "less", lambda value: f"{value:.2f}")


def measure(subject: str, n: int, directory: Path, *, at_once: bool = False) -> dict[str, float]:
    """Schedule `n` messages; payloads and due times are made before."""
    n = at_most(subject, n)
    payloads, dues = load.payloads(load.BATCH), [load.NOW_MS] * n if at_once else load.dues(n).tolist()
    peer = make(subject, background=True)
    peer.open(directory, load.NOW_MS)
    try:
        peer.schedule_batch(payloads, dues[: load.BATCH])  # every day comes into being
        written = written_bytes(directory)
        used = cpu_seconds(peer.processes())
        started = time.perf_counter()
        tenth = started
        for at in range(0, n, load.BATCH):
            if at == n // 10 * 9:
                tenth = time.perf_counter()
            batch = dues[at : at + load.BATCH]
            peer.schedule_batch(payloads[: len(batch)], batch)
        ended = time.perf_counter()
        used = cpu_seconds(peer.processes()) - used
    finally:
        peer.close()
    found = {RATE.name: n / (ended - started), LAST.name: (n - n // 10 * 9) / (ended - tenth), CPU.name: used / n * 1e6}
    if written is not None:
        found[WRITTEN.name] = ((written_bytes(directory) or 0) - written) / (n * load.PAYLOAD_BYTES)
    return found


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "schedule", __doc__, n=(100_000, 1_000_000), quick_n=(10_000,))
    results = Results("schedule", options)
    chosen = subjects("duelog", "duelog:messages", "duelog:relaxed", *LIMITS, *PEERS)
    few = None
    for n in options.n:
        case = f"{n:,} messages"
        compare(results, case, "benchmarks.schedule:measure", {"n": n}, [RATE, CPU, LAST, WRITTEN], chosen)
        ours = results.find(case, "duelog", RATE.name)
        if ours is None:
            continue
        if few is None:
            few = ours
        elif n > options.n[0]:
            ratio = results.ratio(ours, few)
            results.target(f"{case}, against {options.n[0]:,} messages", ratio, 0.9, "more", "x")
        best = results.best(case, RATE.name, DURABLE_PEERS)
        if best is not None:
            ratio = results.ratio(ours, best)
            results.target(f"{case}, against the best durable peer ({best.label})", ratio, 3.0, "more", "x")
        for limit, least in (("raw-lmdb", 0.8), ("raw-file", 0.4)):
            other = results.find(case, limit, RATE.name)
            if other is not None:
                results.target(f"{case}, against {other.label}", results.ratio(ours, other), least, "more", "x")
    case = f"{options.n[0]:,} messages due at once"
    chosen, arguments = subjects("duelog", "postgres"), {"n": options.n[0], "at_once": True}
    compare(results, case, "benchmarks.schedule:measure", arguments, [RATE, CPU, LAST, WRITTEN], chosen)
    for each in (f"{options.n[0]:,} messages", case):
        ours, other = (results.find(each, key, RATE.name) for key in ("duelog", "postgres"))
        if ours is not None and other is not None:
            results.target(f"{each}, against {other.label}", results.ratio(ours, other), 2.5, "more", "x")
    results.show()
    bars(results, RATE.name, "Scheduling, batches of 1,000")
    return 0
