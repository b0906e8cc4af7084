"""sizes: bytes on disk of one entry of 100 B, 1 KiB, 4 KiB and 1 MiB: applied alone, applied together, in batches.

Growth of a partition's data file over many messages due the same day, so that what LMDB's copy-on-write leaves free and
uses again is in it once. What is applied together, ten seconds of it, is made few runs. docs/format.md has the figures.
"""

from pathlib import Path

from .harness import load
from .harness.compare import compare
from .harness.machine import disk_bytes
from .harness.options import parse
from .harness.results import Measure, Results
from .peers.duelog_peer import DuelogPeer

BYTES = Measure("disk", "bytes an entry", "less", lambda value: f"{value:,.0f}")
_SIZES = {"100 B": 100, "1 KiB": 1_024, "4 KiB": 4_096, "1 MiB": 1 << 20}
_APPLIED_MS = 10_000
"""After so long what was sent is applied."""


def measure(
    subject: str, size: int, batch: int, batches: int, warm: int, apart: bool, directory: Path
) -> dict[str, float]:
    """Growth over `batches` calls that send `batch` messages, after `warm` of them; `apart`: each is applied alone."""
    payloads = load.payloads(batch, size)
    peer = DuelogPeer()
    before = now_ms = 0
    for first, limit in ((0, warm), (warm, warm + batches)):
        peer.open(directory, load.NOW_MS + now_ms)
        assert peer.clock is not None
        for number in range(first, limit):
            peer.schedule_batch(payloads, [load.END_MS + number] * batch)
            if apart:
                now_ms += _APPLIED_MS
                peer.clock.advance(_APPLIED_MS)
                peer.store.tick()
        peer.close()
        after = disk_bytes(directory, logs=False)
        before = before or after
    return {BYTES.name: (after - before) / (batches * batch)}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "sizes", __doc__)
    results = Results("sizes", options)
    for name, size in _SIZES.items():
        large = size >= 1 << 20
        few, count = (20 if options.quick else 1), (50 if large else 1_000)
        alone = {"batch": 1, "batches": (100 if large else 1_000) // few, "warm": 20, "apart": True}
        together = {"batch": 1, "batches": (100 if large else 5_000) // few, "warm": 20, "apart": False}
        in_batch = {"batch": count, "batches": 2 if options.quick or large else 20, "warm": 2, "apart": False}
        cases = {"alone": alone, "singly, applied together": together, f"in a batch of {count:,}": in_batch}
        for case, counts in cases.items():
            compare(results, f"{name}, {case}", "benchmarks.sizes:measure", {"size": size, **counts}, [BYTES], runs=1)
    results.show()
    return 0
