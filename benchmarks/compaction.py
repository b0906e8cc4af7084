"""compaction: bytes that compaction gives back after half of the real trace, with one slow subscription.

The trace of tools/demo/demo_trace.py is replayed up to its middle. One subscription acknowledges everything; the other
one leaves every hundredth message, and so holds every ledger of the main log and every partition. Then the closed
partitions are compacted on one core, and the store is opened again and checked.
"""

import time
from pathlib import Path

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.tools.compact_store import compact_store
from duelog.tools.demo.demo_run import CONFIG, DAY_MS
from duelog.tools.demo.demo_trace import load_trace

from .harness.compare import compare
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

BEFORE = Measure("files before", "KiB", "less", show=short)
AFTER = Measure("files after", "KiB", "less", show=short)
GIVEN_BACK = Measure("given back", "%")
NEEDED = Measure("needed bodies", "KiB", "less", show=short)
RATE = Measure("compacted", "messages/s", show=short)

_RECEIVE = 1_000
_LEFT_OUT = 100


def give_back(subject: str, n: int, days: int, payload_bytes: int, directory: Path) -> dict[str, float]:
    """Replay `n` messages of the trace in partitions of so many days, and compact."""
    path = directory / "store"
    config = StoreConfig(
        partition_ms=days * DAY_MS,
        ack_flush_ms=CONFIG.ack_flush_ms,
        ledger_max_age_ms=CONFIG.ledger_max_age_ms,
        durability="none",
    )
    _replay(path, config, n, payload_bytes)
    began = time.perf_counter()
    report = compact_store(path, min_dead_ratio=0.0)
    seconds = time.perf_counter() - began
    done = [each for each in report.partitions if each.outcome == "adopted"]
    if report.failed or not done:
        raise RuntimeError(f"{len(done)} adopted, {len(report.failed)} failed")
    with DelayedStore.open(path, config, clock=ManualClock(0)) as store:
        findings = list(store.check(deep=True))
    if findings:
        raise RuntimeError(str(findings[0]))
    return {
        BEFORE.name: report.bytes_before / 1024,
        AFTER.name: report.bytes_after / 1024,
        GIVEN_BACK.name: 100 * (1 - report.bytes_after / report.bytes_before),
        NEEDED.name: sum(each.body_bytes - each.dead_bytes for each in done) / 1024,
        RATE.name: sum(each.messages for each in done) / seconds,
    }


def _replay(path: Path, config: StoreConfig, n: int, payload_bytes: int) -> None:
    trace = load_trace()[:n]
    clock = ManualClock(int(trace.written_ms[0]))
    with DelayedStore.open(path, config, clock=clock) as store:
        topic = store.topic("git")
        fast, slow = (topic.subscribe(name, type="shared") for name in ("fast", "slow"))
        seen = 0
        for step in trace.steps():
            if step.last_ms > int(trace.written_ms[-1]):
                break
            clock.set(step.last_ms)
            if step.writes:
                rows = trace[step.start : step.limit]
                topic.send_batch(
                    Message(name.encode() * (1 + payload_bytes // len(name)), deliver_at=due_ms)
                    for name, due_ms in zip(rows.ids, rows.due_ms.tolist(), strict=True)
                )
            store.tick()
            while batch := fast.receive(_RECEIVE):
                fast.ack(batch)
            while batch := slow.receive(_RECEIVE):
                slow.ack([message for at, message in enumerate(batch, seen) if at % _LEFT_OUT])
                seen += len(batch)


def main(argv: list[str]) -> int:
    """Run the workload."""
    half = len(load_trace()) // 2
    options = parse(argv, "compaction", __doc__, n=(half,), quick_n=(half // 10,))
    results = Results("compaction", options)
    measures = [BEFORE, AFTER, GIVEN_BACK, NEEDED, RATE]
    for n in options.n:
        for days, payload_bytes in ((30, 40), (30, 1_000), (1, 1_000)):
            case = f"{n:,} messages of {payload_bytes:,} B, {days} d a partition"
            arguments = {"n": n, "days": days, "payload_bytes": payload_bytes}
            compare(results, case, "benchmarks.compaction:give_back", arguments, measures, runs=1)
            if days > 1 and payload_bytes >= 1_000:  # else files are little more than the pages that each has anyway
                back = results.median(case, "duelog", GIVEN_BACK.name)
                results.target(f"{case}, given back", back, 75.0, "more", "%")
    results.show()
    return 0
