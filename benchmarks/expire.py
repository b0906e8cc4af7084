"""expire: one day of seven is over and nobody wants it: remove its messages and give the disk back.

duelog, "delivered": the day was fired and acknowledged, what is measured is trimming its markers and deleting its
directory. duelog, "unread": a topic without subscriptions, firing and closing the day included. Peers delete the day's
rows and give the space back in their own way (VACUUM, a rewrite of the log).
"""

import time
from pathlib import Path

from duelog import DelayedStore, ManualClock, Message, StoreConfig

from .harness import load
from .harness.compare import Subject, compare
from .harness.machine import disk_bytes
from .harness.options import parse
from .harness.plots import bars
from .harness.results import Measure, Results
from .peers import make, subjects

REMOVED = Measure("removed", "s", "less")
GIVEN_BACK = Measure("removed and given back", "s", "less")
SHARE = Measure("given back", "% of the day's bytes")

_DAY_LIMIT_MS = load.START_MS + load.DAY_MS
_PEERS = ("sqlite-full", "redis-everysec", "postgres")


def measure(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Schedule `n` messages over seven days, then take the first away."""
    if subject.startswith("duelog"):
        return _duelog(n, subject == "duelog", directory)
    payloads, dues = load.payloads(load.BATCH), load.dues(n).tolist()
    peer = make(subject)
    peer.open(directory, load.NOW_MS)
    try:
        for at in range(0, n, load.BATCH):
            batch = dues[at : at + load.BATCH]
            peer.schedule_batch(payloads[: len(batch)], batch)
        before = disk_bytes(directory, logs=False)
        started = time.perf_counter()
        peer.remove_due_before(_DAY_LIMIT_MS)
        removed = time.perf_counter() - started
        peer.give_back()
        elapsed = time.perf_counter() - started
        after = disk_bytes(directory, logs=False)
    finally:
        peer.close()
    return {REMOVED.name: removed, GIVEN_BACK.name: elapsed, SHARE.name: 100 * (before - after) / (before / 7)}


def _duelog(n: int, delivered: bool, directory: Path) -> dict[str, float]:
    clock = ManualClock(load.NOW_MS)
    payloads, dues = load.payloads(load.BATCH), load.dues(n).tolist()
    # The open ledger is rolled a millisecond later, before messages of the next day come into it.
    config = StoreConfig(ack_flush_ms=0, ledger_max_age_ms=1)
    with DelayedStore.open(directory / "store", config, clock=clock) as store:
        topic = store.topic("benchmark")
        if delivered:
            topic.subscribe("reader").close()
        for at in range(0, n, load.BATCH):
            batch = dues[at : at + load.BATCH]
            topic.send_batch([Message(p, deliver_at=d) for p, d in zip(payloads, batch, strict=False)])
        clock.advance(10_000)
        store.tick()  # what was sent is applied
        first = directory / "store" / "partitions"
        day_bytes = disk_bytes(min(first.iterdir()))
        before = disk_bytes(directory, logs=False)
        clock.set(_DAY_LIMIT_MS)
        if delivered:
            with topic.subscribe("reader") as reader:
                while batch := reader.receive(5_000):
                    last = batch
                clock.advance(store.config.ledger_max_age_ms)
                started = time.perf_counter()
                reader.ack_cumulative(last[-1])
                store.tick()
        else:
            started = time.perf_counter()
            store.tick()
            clock.advance(store.config.ledger_max_age_ms)
            store.tick()
        elapsed = time.perf_counter() - started
        if len(store.partitions()) != 6:
            raise RuntimeError(f"{len(store.partitions())} partitions are left, expected 6")
        after = disk_bytes(directory, logs=False)
    return {GIVEN_BACK.name: elapsed, SHARE.name: 100 * (before - after) / day_bytes}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "expire", __doc__, n=(100_000, 1_000_000), quick_n=(20_000,))
    results = Results("expire", options)
    chosen = [Subject("duelog", "duelog, delivered"), Subject("duelog:unread", "duelog, unread"), *subjects(*_PEERS)]
    for n in options.n:
        case = f"a seventh of {n:,} messages"
        compare(results, case, "benchmarks.expire:measure", {"n": n}, [REMOVED, GIVEN_BACK, SHARE], chosen)
        results.target(case, results.median(case, "duelog", GIVEN_BACK.name), 0.5, "less", "s")
        results.target(f"{case}, bytes", results.median(case, "duelog", SHARE.name), 97.0, "more", "%")
    results.show()
    bars(results, GIVEN_BACK.name, "A day removed, its disk given back")
    return 0
