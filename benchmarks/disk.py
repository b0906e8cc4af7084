"""disk: bytes on disk of a pending message with a payload of 1 KiB, the store closed, less those of an empty store.

duelog's write-ahead log has nothing in it then, is used again, and is not counted.
"""

from pathlib import Path

from .harness import load
from .harness.compare import compare
from .harness.machine import disk_bytes
from .harness.options import parse
from .harness.plots import bars
from .harness.results import Measure, Results
from .peers import PEERS, at_most, make, subjects

BYTES = Measure("disk", "bytes a message", "less", lambda value: f"{value:,.0f}")


def measure(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Schedule `n` messages in batches of 1,000 and look at the directory before and after."""
    n = at_most(subject, n)
    payloads, dues = load.payloads(load.BATCH), load.dues(n).tolist()
    peer = make(subject)
    peer.open(directory, load.NOW_MS)
    peer.close()
    empty = disk_bytes(directory, logs=False)
    peer.open(directory, load.NOW_MS)
    try:
        for at in range(0, n, load.BATCH):
            batch = dues[at : at + load.BATCH]
            peer.schedule_batch(payloads[: len(batch)], batch)
    finally:
        peer.close()
    return {BYTES.name: (disk_bytes(directory, logs=False) - empty) / n}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "disk", __doc__, n=(100_000,), quick_n=(10_000,))
    results = Results("disk", options)
    for n in options.n:
        case = f"{n:,} messages"
        chosen = subjects("duelog", "raw-lmdb", *PEERS)
        compare(results, case, "benchmarks.disk:measure", {"n": n}, [BYTES], chosen, runs=1)
        results.target(f"{case}, duelog", results.median(case, "duelog", BYTES.name), 1_100, "less", "B")
    results.show()
    bars(results, BYTES.name, "Disk for a pending message of 1 KiB")
    return 0
