"""recover: opening a store that was killed with its largest write-ahead log, and sending again.

A process sends batches due over 7 or 365 days until the segments grow no more, and ends without closing the store when
one of them is nearly full. Nothing of it is applied. Then the store is opened, which reads the log into memory; a
message is sent; and the store is closed, which applies everything.
"""

import os
import time
from itertools import product
from pathlib import Path

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.store.env.memtable import LedgerRuns

from .harness import load
from .harness.compare import compare
from .harness.options import parse
from .harness.results import Measure, Results

OPENED = Measure("opened", "s", "less")
SENT = Measure("first send", "ms", "less")
CLOSED = Measure("applied and closed", "s", "less")
MESSAGES = Measure("in the log", "messages")
SEGMENT = Measure("segment", "MB")

_PAYLOADS = {"1 KiB": 1_024, "20 bytes": 20}
_DAYS = (7, 365)


def fill(path: Path, size: int, days: int, wal_bytes: int) -> None:
    """Send until a segment no larger than the one before is nearly full; no thread applies it meanwhile."""
    payloads = load.payloads(load.BATCH, size)
    dues = load.dues(1_000_000, load.START_MS, load.START_MS + days * load.DAY_MS)
    store = DelayedStore.open(path, StoreConfig(wal_bytes=wal_bytes), clock=ManualClock(load.NOW_MS))
    topic = store.topic("recover")
    assert store._engine.wal_writer is not None
    segments = store._engine.wal_writer.segments
    at = used = rows = size_before = segment = 0
    while True:
        topic.send_payloads(payloads, deliver_at=dues[at : at + load.BATCH])
        at = (at + load.BATCH) % len(dues)
        active = segments._wal.active
        assert active is not None
        if active.used < used:
            size_before = segment
        elif active.size == size_before and not segments.fits(2 * (active.used - used), 2 * (segments._rows - rows)):
            return  # the next may not fit
        used, rows, segment = active.used, segments._rows, active.size


def measure(subject: str, size: int, days: int, wal_bytes: int, directory: Path) -> dict[str, float]:
    """Fill a log in another process, and open the store in this one."""
    path = directory / "store"
    pid = os.fork()
    if not pid:
        status = 1
        try:
            fill(path, size, days, wal_bytes)
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the log was not filled")
    segment = max(file.stat().st_size for file in (path / "wal").iterdir())
    config = StoreConfig(wal_bytes=wal_bytes, background=True)
    started = time.perf_counter()
    store = DelayedStore.open(path, config, clock=ManualClock(load.NOW_MS))
    opened = time.perf_counter()
    unapplied = sum(
        run.limit - run.first
        for partition in store._engine.storage.partitions.unapplied()
        for ledger_id, rows in partition.memtable.view.runs.items()
        for run in LedgerRuns(ledger_id, rows)
    )
    sending = time.perf_counter()
    store.topic("recover").send(b"again", deliver_at=load.START_MS)
    sent = time.perf_counter()
    store.close()
    return {
        OPENED.name: opened - started,
        SENT.name: (sent - sending) * 1e3,
        CLOSED.name: time.perf_counter() - sent,
        MESSAGES.name: unapplied,
        SEGMENT.name: segment / 1e6,
    }


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "recover", __doc__)
    results = Results("recover", options)
    wal_bytes = 2**22 if options.quick else StoreConfig().wal_bytes
    for days, (name, size) in product(_DAYS, _PAYLOADS.items()):
        case = f"{name} over {days} days"
        arguments = {"size": size, "days": days, "wal_bytes": wal_bytes}
        compare(results, case, "benchmarks.recover:measure", arguments, [OPENED, SENT, CLOSED, MESSAGES, SEGMENT])
        results.target(case, results.median(case, "duelog", OPENED.name), 0.3, "less", "s")
    results.show()
    return 0
