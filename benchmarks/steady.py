"""steady: 20,000 messages a second in and out at once for five minutes: disk, memory and lateness must stay flat.

Arrivals and delays are those of the demo's trace, compressed: each 50 ms get as many messages as the trace had in a
slice of its own time (scaled to the mean rate), with delays from the trace (scaled, the longest two minutes). The store
is on the system clock, with partitions of 20 seconds, so that they come, close and go all the time. Each slice is sent
as a batch, or, with `--threads`, singly by so many threads: each waits for the disk with every message, or, with
`--put`, once for its messages of the slice.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from duelog import DelayedStore, Message, StoreConfig, Subscription, Topic
from duelog.sending.outbox import PutOutcome
from duelog.tools.demo.demo_trace import DATA

from .harness import load
from .harness.compare import DUELOG
from .harness.isolated import MeasurementFailed, run_isolated
from .harness.machine import anonymous_bytes, disk_bytes, settle_memory
from .harness.options import parse
from .harness.plots import Line, lines
from .harness.results import Measure, Results

_SLICE_SECONDS = 0.05
_LONGEST_MS = 120_000
_SCALED_MEDIAN_MS = 5_000
_SAMPLE_SECONDS = 5.0

FIGURES = ("sent a second", "received a second", "disk, MB", "memory, MB", "median late, ms", "99 % late, ms")


class _Consumer(threading.Thread):
    """Receives and acknowledges until told to stop; collects lateness."""

    def __init__(self, reader: Subscription) -> None:
        super().__init__(name="consumer")
        self._reader = reader
        self.stopping = False
        self.late: list[npt.NDArray[np.float64]] = []
        self.received = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping:
                batch = self._reader.receive(1_000, timeout=0.5)
                now = time.time() * 1_000
                self._reader.ack(batch)
                self.received += len(batch)
                # What was sent without a delay, or due before it was written, is late from its writing on.
                self.late.append(now - np.array([max(m.due_ms, m.publish_ms) for m in batch], dtype=np.float64))
        except BaseException as error:
            self.error = error

    def take_late(self) -> npt.NDArray[np.float64]:
        """Lateness of what came since the last call."""
        taken, self.late = self.late, []
        return np.concatenate(taken) if taken else np.zeros(1)


def measure(subject: str, rate: int, seconds: int, threads: int, put: bool, directory: Path) -> dict[str, Any]:
    """Run for `seconds`; returns a list of samples for each figure, and the memory at the end in MB.

    threads: that send singly, or put; 0: batches. The memory is what is held: the allocator is told to give back what
    is free, which it does not by itself.
    """
    counts, delays = _shape(rate, seconds)
    payload = load.payloads(1)[0]
    config = StoreConfig(partition_ms=20_000, ledger_max_age_ms=20_000, preload_ms=2_000)
    samples: dict[str, list[float]] = {name: [] for name in ("seconds", *FIGURES)}
    with DelayedStore.open(directory / "store", config) as store:
        topic = store.topic("steady")
        consumer = _Consumer(topic.subscribe("reader"))
        consumer.start()
        try:
            with ThreadPoolExecutor(threads or 1) as pool:
                _produce(_sending(topic, payload, pool, threads, put), counts, delays, consumer, samples, directory)
        finally:
            consumer.stopping = True
            consumer.join()
        if consumer.error is not None:
            raise consumer.error
        settle_memory()
        held = anonymous_bytes() / 1e6
    return {"samples": samples, "held": held}


def _sending(
    topic: Topic, payload: bytes, pool: ThreadPoolExecutor, threads: int, put: bool
) -> Callable[[list[int]], None]:
    """Sends a message for each due time, and returns when all are durable."""

    def send_each(dues: list[int]) -> None:
        for due_ms in dues:
            topic.send(payload, deliver_at=due_ms)

    def put_each(dues: list[int]) -> None:
        heard: SimpleQueue[list[tuple[Any, PutOutcome]]] = SimpleQueue()
        for due_ms in dues:
            topic.put(payload, deliver_at=due_ms, done=heard.put)
        left = len(dues)
        while left:
            for _, outcome in heard.get():
                if isinstance(outcome, Exception):
                    raise outcome
                left -= 1

    def singly(dues: list[int]) -> None:
        for _ in pool.map(put_each if put else send_each, [dues[at::threads] for at in range(threads)]):
            pass

    def together(dues: list[int]) -> None:
        topic.send_batch([Message(payload, deliver_at=due_ms) for due_ms in dues])

    return singly if threads else together


def _produce(
    send: Callable[[list[int]], None],
    counts: list[int],
    delays: npt.NDArray[np.int64],
    consumer: _Consumer,
    samples: dict[str, list[float]],
    directory: Path,
) -> None:
    started = sampled = time.monotonic()
    sent = sent_before = received_before = 0
    for number, count in enumerate(counts):
        pause = started + number * _SLICE_SECONDS - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        now_ms = time.time_ns() // 1_000_000
        dues = (now_ms + delays[np.arange(sent, sent + count) % len(delays)]).tolist()
        send(dues)
        sent += count
        now = time.monotonic()
        if now - sampled >= _SAMPLE_SECONDS or number == len(counts) - 1:
            late = consumer.take_late()
            received = consumer.received
            values = (
                now - started,
                (sent - sent_before) / (now - sampled),
                (received - received_before) / (now - sampled),
                disk_bytes(directory) / 1e6,
                anonymous_bytes() / 1e6,
                float(np.median(late)),
                float(np.percentile(late, 99)),
            )
            for name, value in zip(samples, values, strict=True):
                samples[name].append(value)
            sampled, sent_before, received_before = now, sent, received


def _shape(rate: int, seconds: int) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Messages of each slice, and delays in ms in the order of arrival, both from the trace."""
    rows = np.loadtxt(DATA, dtype=np.int64, usecols=(0, 1))
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    slices = round(seconds / _SLICE_SECONDS)
    found, _ = np.histogram(rows[len(rows) // 2 :, 0], bins=slices)
    # Half of each slice is the mean, so that a burst of the trace is a burst and not a stop.
    mean = rate * _SLICE_SECONDS
    counts = np.maximum(1, (mean / 2 + mean / 2 * found / found.mean()).astype(np.int64))
    counts = np.minimum(counts, int(4 * mean))
    delays = np.maximum(rows[:, 1] - rows[:, 0], 0).astype(np.float64)
    delays *= _SCALED_MEDIAN_MS / max(float(np.median(delays)), 1.0)
    return counts.tolist(), np.minimum(delays, _LONGEST_MS).astype(np.int64)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=int, metavar="S", help="how long (300; quick: 10)")
    parser.add_argument("--rate", type=int, default=20_000, metavar="R", help="messages a second (20,000)")
    parser.add_argument("--threads", type=int, default=0, metavar="T", help="send singly by so many threads (a batch)")
    parser.add_argument("--put", action="store_true", help="those threads wait for the disk once a slice")


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "steady", __doc__, more=_options)
    results = Results("steady", options)
    seconds, rate = options.extra.seconds or (10 if options.quick else 300), options.extra.rate
    threads = options.extra.threads
    if options.extra.put and not threads:
        raise SystemExit("--put: needs --threads, how many threads put")
    arguments = {"subject": "duelog", "rate": rate, "seconds": seconds, "threads": threads, "put": options.extra.put}
    try:
        answer = run_isolated("benchmarks.steady:measure", arguments, directory=options.directory)
    except MeasurementFailed as error:
        results.failures.append(f"failed: {error}")
        results.show()
        return 1
    samples: dict[str, list[float]] = answer["samples"]
    # The store fills for as long as the longest delay; flat is what comes after it.
    begun = [at for at, second in enumerate(samples["seconds"]) if second > min(_LONGEST_MS / 1_000, seconds / 3)]
    parts = {"second third": begun[: len(begun) // 2], "last third": begun[len(begun) // 2 :]}
    minute = round(min(60, seconds / 3) / _SAMPLE_SECONDS) or 1
    every = list(range(len(samples["seconds"])))
    minutes = {"first minute": every[:minute], "last minute": every[-minute:]}
    for case, places in {**minutes, **parts}.items():
        for name in FIGURES:
            measure_ = Measure(name, "", "more" if name.endswith("second") else "less")
            value = statistics.median(samples[name][at] for at in places)
            results.add(case, DUELOG.key, DUELOG.label, measure_, value)
    held = Measure("memory held at the end, MB", "", "less")
    results.add("end", DUELOG.key, DUELOG.label, held, answer["held"])
    for name in FIGURES[2:]:
        before, after = (results.median(case, DUELOG.key, name) or 0.0 for case in parts)
        results.target(f"{name}: last third to second third", after / before if before else None, 1.1, "less", "x")
    last = results.median("last minute", DUELOG.key, FIGURES[0]) or 0.0
    counts, _ = _shape(rate, seconds)
    arrived = statistics.mean(counts[-round(min(60, seconds / 3) / _SLICE_SECONDS) :]) / _SLICE_SECONDS
    results.target(f"{FIGURES[0]}: last minute to what arrives then", last / arrived, 0.95, "more", "x")
    results.target(FIGURES[0], last, 0.95 * rate, "more")
    results.show()
    panels = [
        ("messages a second", [Line(name, samples["seconds"], samples[name]) for name in FIGURES[:2]]),
        ("disk, MB", [Line("disk", samples["seconds"], samples[FIGURES[2]])]),
        ("anonymous memory, MB", [Line("memory", samples["seconds"], samples[FIGURES[3]])]),
        ("lateness, ms", [Line(name, samples["seconds"], samples[name]) for name in FIGURES[4:]]),
    ]
    name, how = "steady", ""
    if threads:
        name, verb = ("steady-put", "put") if options.extra.put else ("steady-singly", "sent")
        how = f", {verb} singly by {threads} threads"
    lines(results, name, f"{rate:,} messages/s in and out{how}", panels, "seconds")
    return 0
