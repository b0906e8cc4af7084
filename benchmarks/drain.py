"""drain: messages per second from a store to `duelog serve` on the same machine, by `duelog drain`.

Pending messages of 300 bytes in ten topics and three days; the other broker deduplicates. First they are copied, to its
store and to the broker, then a second run finds them at the broker and cancels them here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from duelog import DelayedStore, Message, StoreConfig

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


def main(argv: list[str]) -> int:
    """Run the workload."""
    parser = argparse.ArgumentParser(prog="benchmarks drain", description=__doc__)
    parser.add_argument("-n", type=int, default=50_000)
    parser.add_argument("--quick", action="store_true")
    options, _ = parser.parse_known_args(argv)
    table = Table("run", "messages", "messages/s", title="drain, start of the command included")
    with tempfile.TemporaryDirectory() as directory:
        source, settings = Path(directory) / "source", Path(directory) / "broker.toml"
        n = fill(source, 1_000 if options.quick else options.n)
        settings.write_text("brokerDeduplicationEnabled = true\n")
        command = [*DUELOG, "serve", str(Path(directory) / "other"), "--port", "0", "--config", str(settings)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
            assert broker.stdout is not None
            url = broker.stdout.readline().split()[-1]
            runs = (
                ("copied to its store", command[4], True),
                ("copied", url, True),
                ("found there, cancelled", url, False),
            )
            for run, place, keep in runs:
                seconds = drained(source, place, *["--keep"] * keep)
                table.add_row(run, f"{n:,}", f"{n / seconds:,.0f}")
                print(json.dumps({"workload": "drain", "run": run, "messages": n, "per_s": round(n / seconds)}))
            broker.terminate()
    Console().print(table)
    return 0
