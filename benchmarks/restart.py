"""restart: from opening a store until the first due message is received, with a snapshot and by full replay; memory.

N small messages are pending in the current partition, due at uniform times over the rest of its day. The files are in
the page cache. Also: when all of the delay index is loaded, its memory then, and how long a single send takes at most
while snapshots of the whole index are written, against sends without.
"""

import re
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.snapshot.snapshot_format import inspect_snapshots
from duelog.snapshot.writer import remove_snapshots
from duelog.store.env.environment import Environment

from .harness import load
from .harness.compare import Subject
from .harness.isolated import run_isolated
from .harness.machine import anonymous_bytes, settle_memory
from .harness.options import parse
from .harness.results import Measure, Results

FIRST = Measure("first message", "s", "less")
OPENED = Measure("opened", "s", "less")
LOADED = Measure("all loaded", "s", "less")
RESIDENT = Measure("index, resident", "bytes a message", "less")
ANONYMOUS = Measure("index, anonymous", "bytes a message", "less")
LONGEST = Measure("longest send", "ms", "less")
RARE = Measure("99.9 % of sends within", "ms", "less")
TYPICAL = Measure("median send", "ms", "less")
SENT = Measure("sent", "messages/s")
WRITTEN = Measure("snapshots", "written")

_PAYLOAD = b"twenty bytes of that"
_FILLED_MS = load.START_MS + 3_600_000
_FIRST_DUE_MS = _FILLED_MS + 600_000
_REOPENINGS = 100
"""Messages due a second apart at the beginning, one for each reopening of a store; the rest are due later."""
_NEVER = 2**32 - 1
_TAIL = 50_000
"""Entries after the snapshot: what a store that was not closed has to replay."""

WAYS = (
    Subject("snapshot", "snapshot"),
    Subject("snapshot+tail", f"snapshot, tail of {_TAIL:,}"),
    Subject("replay", "full replay"),
)
SENDERS = (Subject("quiet", "no snapshot"), Subject("saving", "snapshots being written"))


def fill(path: str, n: int, directory: Path) -> dict[str, int]:
    """A store with `n` pending messages in one partition, closed."""
    dues = _dues(n)
    dues[:_REOPENINGS] = _FIRST_DUE_MS + 1_000 * np.arange(_REOPENINGS)
    config = StoreConfig(durability="none")
    with DelayedStore.open(path, config, clock=ManualClock(_FILLED_MS)) as store:
        topic = store.topic("restart")
        topic.subscribe("reader").close()
        for at in range(0, n, 20_000):
            topic.send_batch([Message(_PAYLOAD, deliver_at=due_ms) for due_ms in dues[at : at + 20_000].tolist()])
        store.tick()
    return {"n": n}


def prepare(path: str, subject: str, directory: Path) -> dict[str, int]:
    """Leave the store with the snapshot that a subject needs: none, one of all, or one and entries after it."""
    environment = _environment(path)
    if subject == "replay":
        remove_snapshots(environment)
    environment.close()
    if subject == "replay":
        return {}
    config = StoreConfig(durability="none", snapshot_every_entries=1_000)
    with DelayedStore.open(path, config, clock=ManualClock(_FILLED_MS)) as store:
        store.tick()
    if subject == "snapshot+tail":
        config = StoreConfig(durability="none", snapshot_every_entries=_NEVER)
        dues = _dues(_TAIL).tolist()
        with DelayedStore.open(path, config, clock=ManualClock(_FILLED_MS)) as store:
            store.topic("restart").send_batch([Message(_PAYLOAD, deliver_at=due_ms) for due_ms in dues])
    return {}


def reopen(path: str, n: int, time_number: int, directory: Path) -> dict[str, float]:
    """Reopen the store for the so many-th time and receive the first message; then the memory that took."""
    config = StoreConfig(snapshot_every_entries=_NEVER)
    clock = ManualClock(_FIRST_DUE_MS + 1_000 * time_number)
    with DelayedStore.open(directory / "empty", config, clock=clock) as store:
        topic = store.topic("restart")
        topic.send(_PAYLOAD, deliver_after=60)
        with topic.subscribe("reader") as reader:
            reader.receive(1)
        settle_memory()
        resident, anonymous = resident_bytes(), anonymous_bytes()
    started = time.perf_counter()
    with DelayedStore.open(path, config, clock=clock) as store:
        opened = time.perf_counter()
        with store.topic("restart").subscribe("reader") as reader:
            received = reader.receive(1)
            first = time.perf_counter()
            reader.ack(received)
        if [message.due_ms for message in received] != [clock.now_ms()]:
            raise RuntimeError(f"received {received}")
        store.tick()  # until all of it is loaded
        loaded = time.perf_counter()
        settle_memory()
        return {
            OPENED.name: opened - started,
            FIRST.name: first - started,
            LOADED.name: loaded - started,
            RESIDENT.name: (resident_bytes() - resident) / n,
            ANONYMOUS.name: (anonymous_bytes() - anonymous) / n,
        }


def send(subject: str, path: str, seconds: float, directory: Path) -> dict[str, float]:
    """Send messages one by one, while the store writes snapshots of all that is pending again and again, or none."""
    config = StoreConfig(snapshot_every_entries=200 if subject == "saving" else _NEVER, background=True)
    before = _newest(path)
    took: list[float] = []
    with DelayedStore.open(path, config, clock=ManualClock(_FILLED_MS)) as store:
        store.tick()  # until it is loaded
        topic = store.topic("restart")
        dues = _dues(1_000_000).tolist()
        until = time.perf_counter() + seconds
        while (started := time.perf_counter()) < until:
            topic.send(_PAYLOAD, deliver_at=dues[len(took)])
            took.append(time.perf_counter() - started)
    written = _newest(path) - before
    if (written > 1) is not (subject == "saving"):
        raise RuntimeError(f"{written} snapshots written")
    return {
        LONGEST.name: max(took) * 1e3,
        RARE.name: float(np.quantile(took, 0.999)) * 1e3,
        TYPICAL.name: float(np.median(took)) * 1e3,
        WRITTEN.name: written,
        SENT.name: len(took) / seconds,
    }


def resident_bytes() -> int:
    """Resident memory of this process, pages of mapped files included."""
    found = re.search(r"^VmRSS:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1_024


def _dues(number: int) -> npt.NDArray[np.int64]:
    return load.dues(number, _FIRST_DUE_MS + 1_000 * _REOPENINGS, load.START_MS + load.DAY_MS)


def _environment(path: str) -> Environment:
    (directory,) = (Path(path) / "partitions").glob("*/g000001")
    return Environment(directory, name="restart")


def _newest(path: str) -> int:
    environment = _environment(path)
    try:
        return max((found.snapshot_id for found in inspect_snapshots(environment)), default=0)
    finally:
        environment.close()


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "restart", __doc__, n=(1_000_000, 3_000_000, 10_000_000), quick_n=(100_000,))
    results = Results("restart", options)
    for n in options.n:
        case = f"{n:,} pending"
        with tempfile.TemporaryDirectory(prefix="duelog-restart-", dir=options.directory) as place:
            path = f"{place}/store"
            run_isolated("benchmarks.restart:fill", {"path": path, "n": n})
            times = count()
            for _ in range(options.runs):
                for way in WAYS:
                    run_isolated("benchmarks.restart:prepare", {"path": path, "subject": way.key})
                    arguments: dict[str, Any] = {"path": path, "n": n, "time_number": next(times)}
                    found = run_isolated("benchmarks.restart:reopen", arguments)
                    for measure in (FIRST, OPENED, LOADED, RESIDENT, ANONYMOUS):
                        results.add(case, way.key, way.label, measure, found[measure.name])
                for sender in SENDERS:
                    seconds = 1.0 if options.quick else 10.0
                    arguments = {"subject": sender.key, "path": path, "seconds": seconds}
                    found = run_isolated("benchmarks.restart:send", arguments)
                    for measure in (LONGEST, RARE, TYPICAL, SENT, WRITTEN):
                        results.add(case, sender.key, sender.label, measure, found[measure.name])
        results.target(f"{case}, with a snapshot", results.median(case, "snapshot", FIRST.name), 1.0, "less", "s")
        results.target(f"{case}, full replay", results.median(case, "replay", FIRST.name), 5.0, "less", "s")
        if not options.quick:
            memory = results.median(case, "snapshot", RESIDENT.name)
            results.target(f"{case}, index in memory", memory, 4.0, "less", "bytes a message")
        quiet, saving = (results.median(case, sender.key, LONGEST.name) for sender in SENDERS)
        if quiet is not None and saving is not None:
            results.target(f"{case}, a send held up by snapshots", saving - quiet, 50.0, "less", "ms")
    results.show()
    return 0
