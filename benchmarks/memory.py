"""memory: anonymous memory for a pending message of 1 KiB, as the growth from a tenth of the messages to all.

Two cases: due over seven days that have not begun, and all due on the day that has. Files in the page cache are not
counted: the kernel takes them back when it needs room. A server's memory is that of its processes. What duelog has not
applied yet is in memory as well, at most two segments of its write-ahead log, and is applied before the look.
"""

from pathlib import Path

from .harness import load
from .harness.compare import compare
from .harness.machine import anonymous_bytes, settle_memory
from .harness.options import parse
from .harness.plots import bars
from .harness.results import Measure, Results
from .peers import PEERS, at_most, make, subjects
from .peers.duelog_peer import DuelogPeer

BYTES = Measure("memory", "bytes a message", "less", lambda value: f"{value:,.1f}")


def measure(subject: str, n: int, current: bool, directory: Path) -> dict[str, float]:
    """Schedule `n` messages and look at the memory after a tenth of them and after all."""
    n = at_most(subject, n)
    payloads = load.payloads(load.BATCH)
    now_ms = load.START_MS if current else load.NOW_MS
    limit_ms = load.START_MS + load.DAY_MS if current else load.END_MS
    dues = load.dues(n, load.START_MS + 3_600_000, limit_ms).tolist()
    peer = make(subject)
    peer.open(directory, now_ms)
    tenth = n // 10 // load.BATCH * load.BATCH
    first = 0
    try:
        for at in range(0, n, load.BATCH):
            if at == tenth:
                first = _memory(peer.processes(), peer)
            batch = dues[at : at + load.BATCH]
            peer.schedule_batch(payloads[: len(batch)], batch)
        last = _memory(peer.processes(), peer)
    finally:
        peer.close()
    return {BYTES.name: (last - first) / (n - tenth)}


def _memory(pids: list[int], peer: object) -> int:
    if isinstance(peer, DuelogPeer):
        assert peer.clock is not None
        peer.clock.advance(10_000)  # when what was sent is applied
        peer.store.tick()  # loads the day that has begun
    settle_memory()
    return anonymous_bytes(pids)


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "memory", __doc__, n=(1_000_000,), quick_n=(50_000,))
    results = Results("memory", options)
    for n in options.n:
        days, day = f"{n:,} messages over seven days to come", f"{n:,} messages on the current day"
        arguments = {"n": n, "current": False}
        compare(results, days, "benchmarks.memory:measure", arguments, [BYTES], subjects("duelog", *PEERS), runs=1)
        arguments = {"n": n, "current": True}
        compare(results, day, "benchmarks.memory:measure", arguments, [BYTES], subjects("duelog"), runs=1)
        results.target(days, results.median(days, "duelog", BYTES.name), 0.1, "less", "B")
        results.target(day, results.median(day, "duelog", BYTES.name), 4.0, "less", "B")
    results.show()
    bars(results, BYTES.name, "Memory for a pending message")
    return 0
