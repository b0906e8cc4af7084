"""sizing: what a store takes of the machine by how many days ahead its messages are due, as rows of a table.

Messages of 1 KiB are spread evenly over the days. Descriptors, address space and memory are what the process has more
with the store open, after sending, than before; `reopened` is the memory after the store was closed and opened
again. Memory is anonymous: the page cache is the kernel's, which takes it back. Disk is of the closed store, and of
that the write-ahead log, which is used again.
"""

import json
from pathlib import Path

from duelog import DelayedStore, ManualClock, StoreConfig

from .harness import load
from .harness.isolated import run_isolated
from .harness.machine import anonymous_bytes, disk_bytes, open_files, settle_memory
from .harness.options import parse

DAYS = (1, 7, 64, 365)
MIB = 1 << 20

HEAD = """| days ahead | descriptors | address space, GiB | memory, MiB | reopened, MiB | disk, MiB | its log, MiB |
| --- | --- | --- | --- | --- | --- | --- |"""


def measure(n: int, days: int, directory: Path) -> dict[str, float]:
    """Schedule `n` messages over `days`, look at the process, close the store and look at its directory."""
    clock, config = ManualClock(load.START_MS - load.DAY_MS), StoreConfig()
    payloads = load.payloads(load.BATCH)
    step = days * load.DAY_MS // n
    dues = [load.START_MS + number * step for number in range(n)]
    load.dues(load.BATCH)  # what numpy takes at its first use is not the store's
    files, mapped, memory = _now()
    with DelayedStore.open(directory / "store", config, clock=clock) as store:
        topic = store.topic("t")
        for at in range(0, n, load.BATCH):
            batch = dues[at : at + load.BATCH]
            topic.send_payloads(payloads[: len(batch)], deliver_at=batch)
        clock.advance(10_000)
        store.tick()
        store.flush()
        files_open, mapped_open, memory_open = _now()
    with DelayedStore.open(directory / "store", config, clock=clock) as store:
        store.tick()
        memory_reopened = _now()[2]
    whole, data = disk_bytes(directory), disk_bytes(directory, logs=False)
    return {
        "descriptors": files_open - files,
        "address_space_gib": (mapped_open - mapped) / (1 << 30),
        "memory_mib": (memory_open - memory) / MIB,
        "reopened_mib": (memory_reopened - memory) / MIB,
        "disk_mib": whole / MIB,
        "log_mib": (whole - data) / MIB,
    }


def _now() -> tuple[int, int, int]:
    """Descriptors, bytes of address space and of anonymous memory of this process."""
    settle_memory()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmSize:"):
            mapped = int(line.split()[1]) * 1_024
    return open_files(), mapped, anonymous_bytes()


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "sizing", __doc__, n=(100_000,), quick_n=(10_000,))
    for n in options.n:
        print(f"{n:,} messages\n\n{HEAD}")
        for days in DAYS[:2] if options.quick else DAYS:
            found = run_isolated("benchmarks.sizing:measure", {"n": n, "days": days}, directory=options.directory)
            print(f"| {days} | " + " | ".join(f"{value:,.0f}" for value in found.values()) + " |", flush=True)
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"workload": "sizing", "n": n, "days": days, **found}) + "\n")
    return 0
