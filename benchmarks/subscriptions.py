"""subscriptions: memory of a topic with many pending messages and many subscriptions.

It should grow with messages plus subscriptions, not with their product: one delay index serves all.
"""

import argparse
import json
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

_CHILD = """
import gc, random, sys
from duelog import DelayedStore, ManualClock, Message, StoreConfig
directory, pending, subscriptions, inline = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
def anonymous():
    gc.collect()
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:")) * 1024
start = 1_790_035_200_000
clock = ManualClock(start)
chance = random.Random(1)
with DelayedStore.open(directory, StoreConfig(inline_delay_ms=inline), clock=clock) as store:
    topic = store.topic("t")
    span = inline or 40_000_000
    for _ in range(pending // 5_000):
        dues = [start + 1_000 + chance.randrange(span - 2_000) for _ in range(5_000)]
        topic.send_batch([Message(b"x" * 20, deliver_at=due) for due in dues])
with DelayedStore.open(directory, StoreConfig(inline_delay_ms=inline), clock=clock) as store:
    before = anonymous()
    consumers = [store.topic("t").subscribe(f"s{number}", type="shared") for number in range(subscriptions)]
    for consumer in consumers:
        assert consumer.receive(1) == []
    print(anonymous() - before)
"""


def measure(pending: int, subscriptions: int, inline_ms: int) -> int:
    """Anonymous bytes that the topic's index and its subscriptions take, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", _CHILD, directory, str(pending), str(subscriptions), str(inline_ms)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def main(argv: list[str]) -> int:
    """Run the workload."""
    parser = argparse.ArgumentParser(prog="benchmarks subscriptions", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options, _ = parser.parse_known_args(argv)
    most = 100_000 if options.quick else 1_000_000
    table = Table("waiting in", "pending", "subscriptions", "MB", title="memory of one topic")
    for where, inline_ms in (("partitions", 0), ("main log", 40_000_000)):
        for pending, subscriptions in ((0, 1), (0, 1_000), (most, 1), (most, 1_000)):
            taken = measure(pending, subscriptions, inline_ms)
            table.add_row(where, f"{pending:,}", f"{subscriptions:,}", f"{taken / 1e6:.1f}")
            figures = {"workload": "subscriptions", "where": where, "pending": pending}
            print(json.dumps({**figures, "subscriptions": subscriptions, "bytes": taken}))
    Console().print(table)
    return 0
