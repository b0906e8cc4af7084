"""drain: messages per second from a store to `duelog serve` on the same machine, by `duelog drain`, its start included.

Pending messages of 300 bytes in ten topics and three days; the other broker deduplicates. First they are copied to its
store, by `duelog.connect`, and to the broker, as to any of Pulsar; then a second run finds them at the broker and
cancels them here.
"""

import subprocess
import sys
import time
from pathlib import Path

from duelog import DelayedStore, Message, StoreConfig

from .harness.compare import compare
from .harness.options import parse
from .harness.results import Measure, Results

TO_STORE = Measure("to a store", "messages/s")
TO_BROKER = Measure("to a broker", "messages/s")
CANCELLED = Measure("found there, cancelled", "messages/s")

DUELOG = [sys.executable, "-m", "duelog.tools.cli.main"]
DAY_MS = 86_400_000
FIRST_MS = 4_102_444_800_000
"""2100-01-01T00:00:00Z."""


def fill(path: Path, n: int) -> int:
    """So many messages, in groups of a thousand at most; how many there are."""
    topics, sent = 10, 0
    with DelayedStore.open(path, StoreConfig(background=False)) as store:
        for number in range(topics):
            payload, count = bytes(300), n // topics
            batch = [Message(payload, deliver_at=FIRST_MS + at * 37 % (3 * DAY_MS)) for at in range(count)]
            for at in range(0, count, 1_000):
                sent += len(store.topic(f"t{number}").send_batch(batch[at : at + 1_000]))
    return sent


def drained(source: Path, url: str, *options: str) -> float:
    """Seconds that the command took."""
    started = time.perf_counter()
    subprocess.run([*DUELOG, "drain", str(source), "--to", url, "--json", *options], check=True, capture_output=True)
    return time.perf_counter() - started


def measure(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Drain `n` messages in each way."""
    source, settings = directory / "source", directory / "broker.toml"
    sent = fill(source, n)
    settings.write_text("brokerDeduplicationEnabled = true\n")
    command = [*DUELOG, "serve", str(directory / "other"), "--port", "0", "--listen", "localhost:0"]
    with subprocess.Popen([*command, "--config", str(settings)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        broker, _, store = server.stdout.readline().split()[-3:]
        try:
            return {
                TO_STORE.name: sent / drained(source, store, "--keep"),
                TO_BROKER.name: sent / drained(source, broker, "--keep"),
                CANCELLED.name: sent / drained(source, broker),
            }
        finally:
            server.terminate()


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "drain", __doc__, n=(50_000,), quick_n=(1_000,))
    results = Results("drain", options)
    for n in options.n:
        case = f"{n:,}"
        compare(results, case, "benchmarks.drain:measure", {"n": n}, (TO_STORE, TO_BROKER, CANCELLED))
        results.target(
            f"{case}, to a store", results.median(case, "duelog", TO_STORE.name), 20_000, "more", "messages/s"
        )
    results.show()
    return 0
