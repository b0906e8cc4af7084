"""shipping: what a copy in object storage costs sends: the same sends with and without `replica`, in turns.

Durable, 1 KiB, due over five days; one thread, 16 threads, batches of 1,000. Measured is what duelog does: it reads the
log back and packs it, in a thread beside those that send. Of each object the bucket, in memory, gets the head alone:
the client hands groups on as they are, and what a network and its encryption take is another matter. Processor time is
that of the whole process, threads included; its least is compared, as other programs on the machine add to it and never
take from it. "replicated" waits for a copy on a server of SeaweedFS beside it, where that is installed, else for one in
a directory: what calls that wait for one put together reach.
"""

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from duelog import DelayedStore, StoreConfig
from duelog.replica import shipping
from duelog.replica.bucket import Bucket, Content

from .harness.compare import Subject, compare
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

RATE = Measure("rate", "messages/s", show=short)
CPU = Measure("processor", "us a message", "less", lambda value: f"{value:,.2f}")
WAIT = Measure("wait", "ms a call, half of them", "less", lambda value: f"{value:,.2f}")
SUBJECTS = (Subject("plain", "no copy"), Subject("replica", "replica"), Subject("replicated", "replicated"))
CASES = {"one thread": 1, "16 threads": 16, "batches of 1,000": 1_000}
_DAY_S = 86_400
_PAYLOAD = b"x" * 1_024
_MOST_PERCENT = 5
"""What shipping may cost, of sends in batches and by 16 threads."""
_REACH = {"one thread": (WAIT, 4, "ms"), "16 threads": (RATE, 4_000, "/s"), "batches of 1,000": (RATE, 50_000, "/s")}
"""Replicated sends on SeaweedFS."""


class Forgetful(Bucket):
    """A copy whose groups go nowhere."""

    def append(self, seq: int, content: Content) -> None:
        """Store the head of a log object."""
        super().append(seq, content[:1])


def send(subject: str, case: str, n: int, directory: Path) -> dict[str, float]:
    """Send `n` messages once the first manifest is made; the close, which ships the rest, is in the processor time."""
    vars(shipping)["Bucket"] = Bucket if subject == "replicated" else Forgetful
    on_server = "AWS_ENDPOINT_URL" in os.environ
    copy = f"s3://backups/{uuid.uuid4().hex}" if on_server else (directory / "copy").as_uri()
    url = {"replica": "memory:///", "replicated": copy}.get(subject)
    waits: list[float] = []
    config = StoreConfig(replica=url, durability="replicated" if subject == "replicated" else "commit")
    with DelayedStore.open(directory / "store", config) as store:
        topic = store.topic("t")
        for day in range(5):
            topic.send(_PAYLOAD, deliver_after=_DAY_S * (day + 1))
        while config.replica is not None and store.stats().replica_manifest_age_ms is None:
            time.sleep(0.01)
        begun, begun_cpu = time.perf_counter(), time.process_time()
        if case == "batches of 1,000":
            for at in range(0, n, 1_000):
                called = time.perf_counter()
                topic.send_payloads([_PAYLOAD] * 1_000, deliver_after=_DAY_S * (1 + at // 1_000 % 5))
                waits.append(time.perf_counter() - called)
        else:
            threads = CASES[case]

            def some(thread: int) -> None:
                for at in range(thread, n, threads):
                    called = time.perf_counter()
                    topic.send(_PAYLOAD, deliver_after=_DAY_S * (1 + at % 5))
                    waits.append(time.perf_counter() - called)

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(some, range(threads)))
        elapsed = time.perf_counter() - begun
    processor = (time.process_time() - begun_cpu) * 1e6 / n
    return {"rate": n / elapsed, "processor": processor, "wait": 1_000 * median(waits)}


def main(argv: list[str]) -> int:
    """Measure each case with and without a copy, and say what it costs."""
    from tests.duelog.replica.seaweed import KEYS, seaweed, weed  # noqa: PLC0415 - where the tests' needs are installed

    options = parse(argv, "shipping", __doc__, n=(20_000,), quick_n=(2_000,))
    results = Results("shipping", options)
    with ExitStack() as stack:
        if weed() is not None:
            address = stack.enter_context(seaweed(Path(stack.enter_context(TemporaryDirectory()))))
            os.environ.update({**KEYS, "AWS_ENDPOINT_URL": address})
        measure(results, options.n[0])
    results.show()
    return 0


def measure(results: Results, n: int) -> None:
    """Measure each case, and note what is to be reached."""
    for case in CASES:
        messages = 10 * n if case.startswith("batches") else n
        compare(results, case, "benchmarks.shipping:send", {"case": case, "n": messages}, (RATE, CPU, WAIT), SUBJECTS)
        found = [results.find(case, subject.key, CPU.name) for subject in SUBJECTS[:2]]
        least = [min(series.values) for series in found if series is not None]
        cost = 100 * (least[1] / least[0] - 1) if len(least) == len(found) else None
        if case != "one thread":
            results.target(f"{case}, shipping", cost, _MOST_PERCENT, "less", "% of the processor time of sends")
        reach, limit, unit = _REACH[case]
        replicated = results.find(case, "replicated", reach.name)
        if replicated is not None and "AWS_ENDPOINT_URL" in os.environ:
            results.target(f"{case}, replicated", median(replicated.values), limit, reach.better, unit)
