"""network_lateness: from the due time to the hands of a client of `duelog serve`; 2,000 messages in ten seconds.

Four processes produce, one consumes. The messages are sent before the first is due, at random instants; nothing may
come early. Redis (a sorted set) is polled every 10 ms, beanstalkd waits in its own way, in whole seconds.
"""

import statistics
import time
from pathlib import Path

import numpy as np

from .harness.compare import compare
from .harness.load import SEED
from .harness.options import parse
from .harness.plots import bars
from .harness.results import Results
from .lateness import EARLIEST, MEDIAN, MOST, P99
from .network import SUBJECTS, subjects
from .peers import make
from .peers.client_process import ClientProcess, run_clients

_LEAD_MS = 2_000
"""Time to get all messages sent before the first is due."""

_IDLE_SECONDS = 3.0

_PRODUCERS = 4


def measure(subject: str, n: int, seconds: int, directory: Path) -> dict[str, float]:
    """Send `n` messages that are due within some seconds, and wait for them."""
    key = SUBJECTS.get(subject, subject)
    peer = make(key)
    peer.open(directory, time.time_ns() // 1_000_000)
    try:
        consumer = ClientProcess(key, peer.port, _PRODUCERS, "lateness", idle_seconds=_IDLE_SECONDS)
        offsets = np.random.default_rng(SEED).integers(0, seconds * 1_000, n).tolist()
        producers = [
            ClientProcess(key, peer.port, number, "schedule", offsets_ms=offsets[number::_PRODUCERS])
            for number in range(_PRODUCERS)
        ]
        found = run_clients([consumer, *producers], _LEAD_MS)
    finally:
        peer.close()
    late: list[float] = found[0]["late"]
    if len(late) != n:
        raise RuntimeError(f"{len(late)} of {n} messages have come")
    return {
        MEDIAN.name: statistics.median(late),
        P99.name: float(np.percentile(late, 99)),
        MOST.name: max(late),
        EARLIEST.name: min(late),
    }


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "network_lateness", __doc__, n=(2_000,), quick_n=(200,))
    results = Results("network_lateness", options)
    for n in options.n:
        seconds = 2 if options.quick else 10
        case = f"{n:,} messages in {seconds} s"
        chosen = [subject for subject in subjects() if subject.key != "duelog:batched"]
        arguments = {"n": n, "seconds": seconds}
        compare(results, case, "benchmarks.network_lateness:measure", arguments, [MEDIAN, P99, MOST, EARLIEST], chosen)
        results.target(f"{case}: median", results.median(case, "duelog", MEDIAN.name), 3.0, "less", "ms")
        results.target(f"{case}: 99th percentile", results.median(case, "duelog", P99.name), 10.0, "less", "ms")
        series = results.find(case, "duelog", EARLIEST.name)
        if series is not None:
            results.target(f"{case}: never early", min(series.values), 0.0, "more", "ms")
    results.show()
    bars(results, MEDIAN.name, "Lateness at a client, median", name="network-lateness", log=True)
    return 0
