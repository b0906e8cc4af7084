"""sizes: bytes on disk of one entry of 100 B, 1 KiB, 4 KiB and 1 MiB, each alone in its commit and in a batch.

Measured as the growth of a partition's data file over many messages due the same day, so that what LMDB's
copy-on-write leaves free and uses again is in it once. docs/format.md shows this table.
"""

from __future__ import annotations

from pathlib import Path

from .harness import load
from .harness.compare import compare
from .harness.machine import disk_bytes
from .harness.options import parse
from .harness.results import Measure, Results
from .peers import make

BYTES = Measure("disk", "bytes an entry", "less", lambda value: f"{value:,.0f}")
_SIZES = {"100 B": 100, "1 KiB": 1_024, "4 KiB": 4_096, "1 MiB": 1 << 20}


def measure(subject: str, size: int, batch: int, batches: int, warm: int, directory: Path) -> dict[str, float]:
    """Growth on disk over `batches` commits of `batch` messages, after `warm` of them."""
    payloads = load.payloads(batch, size)
    peer = make(subject)
    peer.open(directory, load.NOW_MS)
    before = 0
    try:
        for number in range(warm + batches):
            if number == warm:
                before = disk_bytes(directory)
            peer.schedule_batch(payloads, [load.START_MS + number] * batch)
        after = disk_bytes(directory)
    finally:
        peer.close()
    return {BYTES.name: (after - before) / (batches * batch)}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "sizes", __doc__)
    results = Results("sizes", options)
    for name, size in _SIZES.items():
        large = size >= 1 << 20
        alone = {"batch": 1, "batches": (100 if large else 5_000) // (20 if options.quick else 1), "warm": 20}
        in_batch = {"batch": 50 if large else 1_000, "batches": 2 if options.quick or large else 20, "warm": 2}
        for case, counts in ((f"{name}, alone", alone), (f"{name}, in a batch of {in_batch['batch']:,}", in_batch)):
            compare(results, case, "benchmarks.sizes:measure", {"size": size, **counts}, [BYTES], runs=1)
    results.show()
    return 0
