"""shipping: what a copy in object storage costs sends: the same sends with and without `replica`, in turns.

Durable, 1 KiB, due over five days; one thread, 16 threads, batches of 1,000. Measured is what duelog does: it packs the
log as it is written, in a thread beside those that send. Of each object the bucket, in memory, gets the head alone: the
client hands groups on as they are, and what a network and its encryption take is another matter. Processor time is that
of the whole process, threads included.

The cost is that of two stores of one process, one with a copy, that take turns: what the machine does besides meets
both alike. `cost` is the time that sends take. `all threads` is the processor time, that of the thread which ships
included; `thread` is what that one takes.

"replicated" waits for a copy on a server of SeaweedFS beside it, where that is installed, else for one in a directory:
what calls that wait for one put together reach. Two figures come from a copy itself: the bytes that acknowledgements,
cancellations, the catalog and trimming add to a log of messages and markers, and what an idle store with a lease puts.
"""

import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from duelog import DelayedStore, ManualClock, StoreConfig, Topic
from duelog.replica import shipping
from duelog.replica.bucket import Bucket, Content, log_name
from duelog.replica.log_object import HEARTBEAT, read_object, unpack
from duelog.store.wal.segment import RowKind

from .harness.compare import Subject, compare
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

RATE = Measure("rate", "messages/s", show=short)
CPU = Measure("processor", "us a message", "less", lambda value: f"{value:,.2f}")
COST = Measure("cost", "times the time of sends without a copy", "less", lambda value: f"{value:,.3f}")
ALL = Measure("all threads", "times the processor time without a copy", "less", lambda value: f"{value:,.3f}")
THREAD = Measure("thread", "us a message of the thread that ships", "less", lambda value: f"{value:,.3f}")
WAIT = Measure("wait", "ms a call, half of them", "less", lambda value: f"{value:,.2f}")
SUBJECTS = (Subject("plain", "no copy"), Subject("replica", "replica"), Subject("replicated", "replicated"))
BOTH = Subject("both", "by turns")
CASES = {"one thread": 1, "16 threads": 16, "batches of 1,000": 1_000}
_DAY_S = 86_400
_PAYLOAD = b"x" * 1_024
_MOST = 1.05
"""How much longer sends with a copy may take, in batches and by 16 threads."""
_TURNS = 20
_IDLE_S = 12
"""Longer than a checkpoint waits."""
_REACH = {"one thread": (WAIT, 4, "ms"), "16 threads": (RATE, 4_000, "/s"), "batches of 1,000": (RATE, 50_000, "/s")}
"""Replicated sends on SeaweedFS."""


class Forgetful(Bucket):
    """A copy whose groups go nowhere."""

    def append(self, seq: int, content: Content, tries: int = 0) -> None:
        """Store the head of a log object."""
        super().append(seq, content[:1], tries)


def opened(directory: Path, config: StoreConfig) -> DelayedStore:
    """Open a store that has five days, and its first manifest where it has a copy."""
    store = DelayedStore.open(directory, config)
    for day in range(5):
        store.topic("t").send(_PAYLOAD, deliver_after=_DAY_S * (day + 1))
    while config.replica is not None and store.stats().replica_manifest_age_ms is None:
        time.sleep(0.01)
    return store


def send_all(topic: Topic, case: str, n: int, pool: ThreadPoolExecutor) -> list[float]:
    """Send `n` messages as a case says, and return the seconds of each call."""
    waits: list[float] = []
    if case == "batches of 1,000":
        for at in range(0, n, 1_000):
            called = time.perf_counter()
            topic.send_payloads([_PAYLOAD] * 1_000, deliver_after=_DAY_S * (1 + at // 1_000 % 5))
            waits.append(time.perf_counter() - called)
        return waits
    threads = CASES[case]

    def some(thread: int) -> None:
        for at in range(thread, n, threads):
            called = time.perf_counter()
            topic.send(_PAYLOAD, deliver_after=_DAY_S * (1 + at % 5))
            waits.append(time.perf_counter() - called)

    list(pool.map(some, range(threads)))
    return waits


def send(subject: str, case: str, n: int, directory: Path) -> dict[str, float]:
    """Send `n` messages once the first manifest is made; the close, which ships the rest, is in the processor time."""
    vars(shipping)["Bucket"] = Bucket if subject == "replicated" else Forgetful
    on_server = "AWS_ENDPOINT_URL" in os.environ
    copy = f"s3://backups/{uuid.uuid4().hex}" if on_server else (directory / "copy").as_uri()
    url = {"replica": "memory:///", "replicated": copy}.get(subject)
    config = StoreConfig(replica=url, durability="replicated" if subject == "replicated" else "commit")
    with ThreadPoolExecutor(16) as pool, opened(directory / "store", config) as store:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        waits = send_all(store.topic("t"), case, n, pool)
        elapsed = time.perf_counter() - begun
    processor = (time.process_time() - begun_cpu) * 1e6 / n
    return {"rate": n / elapsed, "processor": processor, "wait": 1_000 * median(waits)}


def cost(subject: str, case: str, n: int, directory: Path) -> dict[str, float]:
    """Send `n` messages to a store without a copy and to one with, by turns.

    The processor time of the thread is no turn's: it is all that it takes until everything is shipped.
    """
    vars(shipping)["Bucket"] = Forgetful
    took: tuple[list[float], list[float]] = [], []
    processor: tuple[list[float], list[float]] = [], []
    with (
        ThreadPoolExecutor(16) as pool,
        opened(directory / "plain", StoreConfig()) as plain,
        opened(directory / "replica", StoreConfig(replica="memory:///")) as replica,
    ):
        topics, begun_thread_s = (plain.topic("t"), replica.topic("t")), _thread_s()
        for turn in range(2 * _TURNS):
            chosen = (turn + turn // 2) % 2  # each is first in every other pair
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time() - _thread_s()
            send_all(topics[chosen], case, n // _TURNS, pool)
            took[chosen].append(time.perf_counter() - begun_s)
            processor[chosen].append(time.process_time() - _thread_s() - begun_cpu_s)
        while replica.stats().replica_lag_groups:
            time.sleep(0.01)
        thread_s = _thread_s() - begun_thread_s
    return {
        "cost": _by_turn(took),
        "all threads": _by_turn(processor) + thread_s / sum(processor[0]),
        "thread": thread_s * 1e6 / n,
    }


def _by_turn(took: tuple[list[float], list[float]]) -> float:
    """How many times more a turn with a copy took than the one without beside it, half of them."""
    return median(with_copy / without for without, with_copy in zip(*took, strict=True))


def _thread_s() -> float:
    """Processor time of the thread that ships."""
    (ident,) = (thread.ident for thread in threading.enumerate() if thread.name == "duelog-replica")
    return time.clock_gettime(time.pthread_getcpuclockid(ident or 0))


def added(directory: Path, n: int) -> float:
    """Percent that other rows add to a log of messages and markers.

    `n` messages of 200 bytes are sent in batches of 100; one in ten is cancelled, the others are received and
    acknowledged durably, and their day is deleted.
    """
    url, clock = (directory / "copy").as_uri(), ManualClock(0)
    with DelayedStore.open(directory / "store", StoreConfig(replica=url), clock=clock) as store:
        topic = store.topic("t")
        with topic.subscribe("s") as consumer:
            for _ in range(0, n, 100):
                topic.cancel_batch(topic.send_payloads([b"x" * 200] * 100, deliver_after=_DAY_S)[::10])
            clock.advance(1_000 * _DAY_S)
            store.tick()
            while messages := consumer.receive(100, timeout=0):
                consumer.ack(messages, durable=True)
        clock.advance(1_000 * _DAY_S)
        store.tick()
    runs = others = 0
    bucket = Bucket(url)
    for seq in bucket.numbers():
        for group in unpack(url, log_name(seq), bucket.read(seq) or b"")[1]:
            for row in group.rows():
                size = len(row.key) + len(row.value)
                if row.kind in (RowKind.RUN, RowKind.BATCH):
                    runs += size
                else:
                    others += size
    return 100 * others / runs


def idle(directory: Path, seconds: float) -> tuple[int, int]:
    """How many heartbeats, and other objects of the log, a store with a lease puts that nobody asks for anything."""
    url = (directory / "copy").as_uri()
    with opened(directory / "store", StoreConfig(replica=url, lease_ms=1_000)):
        time.sleep(2)  # what was sent is shipped
        bucket = Bucket(url)
        first = bucket.numbers()[-1] + 1
        time.sleep(seconds)
        kinds = [read_object(bucket, seq).kind for seq in bucket.numbers(first)]
    return kinds.count(HEARTBEAT), len(kinds) - kinds.count(HEARTBEAT)


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
        messages = 20 * n if case.startswith("batches") else n
        arguments = {"case": case, "n": messages}
        compare(results, case, "benchmarks.shipping:send", arguments, (RATE, CPU, WAIT), SUBJECTS)
        compare(results, case, "benchmarks.shipping:cost", arguments, (COST, ALL, THREAD), (BOTH,))
        if case != "one thread":
            text = f"{case}, time with a copy to without"
            results.target(text, results.median(case, BOTH.key, COST.name), _MOST, "less", "times")
        reach, limit, unit = _REACH[case]
        replicated = results.find(case, "replicated", reach.name)
        if replicated is not None and "AWS_ENDPOINT_URL" in os.environ:
            results.target(f"{case}, replicated", median(replicated.values), limit, reach.better, unit)
    with TemporaryDirectory(dir=results.options.directory) as directory:
        percent = added(Path(directory, "added"), n)
        beats, others = idle(Path(directory, "idle"), 2 if results.options.quick else _IDLE_S)
    results.target("rows of a log that are neither messages nor markers", percent, 1, "less", "% of its bytes")
    results.target(f"an idle store, beside {beats} heartbeats", others, 0, "less", "log objects")
