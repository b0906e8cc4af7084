"""short_delays: messages due within a second, through time partitions and inline (PIP-448), side by side.

What one message costs from send to acknowledgement, when batches of `--batch` are sent, fall due together and
are received by `--subscriptions` subscriptions. It is what the default of `inline_delay_ms` rests on.
"""

import argparse
import json
import statistics
import tempfile
import time

from rich.console import Console
from rich.table import Table

from duelog import DelayedStore, ManualClock, Message, StoreConfig

START_MS = 1_790_000_000_000


def measure(inline_ms: int, batches: int, batch: int, subscriptions: int) -> dict[str, float]:
    """Microseconds a message and commits a batch."""
    clock = ManualClock(START_MS)
    payload = bytes(1024)
    with (
        tempfile.TemporaryDirectory() as directory,
        DelayedStore.open(directory, StoreConfig(inline_delay_ms=inline_ms), clock=clock) as store,
    ):
        topic = store.topic("t")
        consumers = [topic.subscribe(f"s{number}", type="shared") for number in range(subscriptions)]
        started = time.perf_counter()
        commits = store.stats().commits
        for _ in range(batches):
            topic.send_batch([Message(payload, deliver_after=0.5) for _ in range(batch)])
            for consumer in consumers:
                consumer.receive(batch)
            clock.advance(500)
            for consumer in consumers:
                consumer.ack(consumer.receive(batch))
        seconds = time.perf_counter() - started
        return {
            "us_a_message": seconds / (batches * batch) * 1e6,
            "main_commits_a_batch": (store.stats().commits - commits) / batches,
        }


def main(argv: list[str]) -> int:
    """Run the workload."""
    parser = argparse.ArgumentParser(prog="benchmarks short_delays", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--quick", action="store_true")
    options, _ = parser.parse_known_args(argv)
    batches = 20 if options.quick else options.batches
    table = Table("batch", "subscriptions", "partitions, us", "inline, us", "ratio", title="short delays, a message")
    for batch, subscriptions in ((1, 1), (10, 1), (100, 1), (100, 10)):
        found: dict[int, list[float]] = {0: [], 1_000: []}
        for _ in range(options.runs):
            for inline_ms, times in found.items():
                times.append(measure(inline_ms, batches, batch, subscriptions)["us_a_message"])
        plain, inline = (statistics.median(times) for times in found.values())
        table.add_row(str(batch), str(subscriptions), f"{plain:,.1f}", f"{inline:,.1f}", f"{plain / inline:.2f}")
        figures = {"workload": "short_delays", "batch": batch, "subscriptions": subscriptions}
        print(json.dumps({**figures, "partitions_us": round(plain, 2), "inline_us": round(inline, 2)}))
    Console().print(table)
    return 0
