"""deliver: messages per second when all are due: fired, received in order, acknowledged, in batches of 1,000.

duelog writes the markers of seven days, hands out, persists each batch's acknowledgements, closes, trims and deletes.
The limits read in append order. beanstalkd counts real seconds: its messages are due when the measuring begins.
"""

import time
from pathlib import Path

from .harness import load
from .harness.compare import compare
from .harness.machine import cpu_seconds
from .harness.options import parse
from .harness.plots import bars, short
from .harness.results import Measure, Results
from .peers import PEERS, at_most, make, subjects
from .peers.beanstalkd_peer import BeanstalkdPeer

RATE = Measure("rate", "messages/s", show=short)
CPU = Measure("processor time", "us a message", "less")


def measure(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Deliver `n` messages scheduled before. Raises RuntimeError when one is missing."""
    n = at_most(subject, n)
    payloads, dues = load.payloads(load.BATCH), load.dues(n).tolist()
    peer = make(subject)
    peer.open(directory, load.NOW_MS)
    if peer.own_clock:
        dues = [load.NOW_MS + 1_000] * n
    try:
        for at in range(0, n, load.BATCH):
            batch = dues[at : at + load.BATCH]
            peer.schedule_batch(payloads[: len(batch)], batch)
        if isinstance(peer, BeanstalkdPeer):
            peer.wait_until_due()
        used = cpu_seconds(peer.processes())
        started = time.perf_counter()
        left = n
        while left:
            found = peer.fetch_and_ack(load.AFTER_MS, load.BATCH)
            if not found:
                raise RuntimeError(f"{left} of {n} messages are missing")
            left -= len(found)
        elapsed = time.perf_counter() - started
        used = cpu_seconds(peer.processes()) - used
    finally:
        peer.close()
    return {RATE.name: n / elapsed, CPU.name: used / n * 1e6}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "deliver", __doc__, n=(100_000, 1_000_000), quick_n=(10_000,))
    results = Results("deliver", options)
    for n in options.n:
        case = f"{n:,} messages"
        chosen = subjects("duelog", "duelog:flush", "raw-lmdb", "raw-file", *PEERS)
        compare(results, case, "benchmarks.deliver:measure", {"n": n}, [RATE, CPU], chosen)
        ours, best = results.find(case, "duelog", RATE.name), results.best(case, RATE.name, PEERS)
        if ours is not None and best is not None:
            results.target(f"{case}, against the best peer ({best.label})", results.ratio(ours, best), 1.0, "more", "x")
    results.show()
    bars(results, RATE.name, "Delivering what is due")
    return 0
