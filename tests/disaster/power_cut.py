"""Power cuts: a run is recorded, disks that a cut could have left are rebuilt, and each is opened and questioned.

By hand, from the top of the repository, a thousand states:

    python -m tests.disaster.power_cut --states 1000 --durability commit

Prints a JSON object: how many operations and states there were, what became of the states, and the first troubles.
A state is opened in a child process, since a damaged one may kill it. The same seed makes the same states of the
same recording.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

from duelog import DelayedStore, ManualClock
from tests.disaster.power_disk import MODES, Disk
from tests.disaster.power_trace import Edit, Fact, Operation, Sync, Trace, Write, record
from tests.disaster.running import forked, memory, module
from tests.disaster.told import Told, litter
from tests.disaster.working import CONFIG, SPAN_MS, Worker

_SEGMENT = re.compile(r"\d{12}\.(wal|tmp)")
"""The name under which a segment of the write-ahead log was made."""

QUESTIONED = replace(CONFIG, durability="none", max_open_partitions=64, fire_batch=5_000, map_bytes=1 << 24)
"""Nothing that happens after the cut has to outlive another one, and it need not be done in small pieces."""


@dataclass
class Outcome:
    """The figures of a run."""

    operations: dict[str, int]
    facts: dict[str, int]
    points: dict[str, int]
    """Failpoints of the engine that the run came by: what it covers."""
    groups: int = 0
    """Writes to the write-ahead log that hold several rows."""
    differs: list[str] = field(default_factory=list)
    """Files that are not on the disk what the recording, done to its end, says: it was not followed."""
    states: int = 0
    bad: int = 0
    """States that broke a guarantee, did not open, or killed the process."""
    deaths: int = 0
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)


def run(states: int, before: str | None, options: dict[str, object]) -> Outcome:
    """Record a run with `options` (see power_child) and question so many states, spread evenly over it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="duelog-power-", dir=memory()) as folder:
        base = Path(folder)
        recorded = base / "recorded"
        recorded.mkdir()
        log = base / "strace.log"
        record(log, module("tests.disaster.power_child", str(recorded / "store"), json.dumps(options)))
        trace = Trace(log, recorded)
        operations = list(trace.operations())
        log.unlink()
        outcome = Outcome(
            dict(Counter(_kind(operation) for operation in operations if not isinstance(operation, Fact))),
            dict(Counter(operation.fact[0] for operation in operations if isinstance(operation, Fact))),
            dict(Counter(op.fact[1] for op in operations if isinstance(op, Fact) and op.fact[0] == "hit")),
        )
        outcome.groups = _groups(operations)
        _question(trace, operations, base / "state", states, before, options, outcome)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def _kind(operation: Operation) -> str:
    if isinstance(operation, Edit):
        return "directory change"
    if isinstance(operation, Sync):
        return "sync"
    return "synchronous write" if isinstance(operation, Write) and operation.synced else "write"


def _cuts(operations: list[Operation], states: int, before: str | None) -> list[int]:
    """How many states are to be rebuilt after each operation, spread evenly.

    A cut comes right before an operation on the disk, so that all that was said before it has been acknowledged.
    `before` is a failpoint: cuts then come between its hits and what was said last before each.
    """
    choice: list[int] = []
    since: list[int] = []
    for at, following in enumerate([*operations[1:], None]):
        if not isinstance(following, Fact):
            since.append(at)
        elif before is None or following.fact == ["hit", before]:
            choice += [*since, at] if before else since
            since = []
        else:
            since = []
    if before is None:
        choice += since
    cuts = [0] * len(operations)
    for number in range(states):
        cuts[choice[number * len(choice) // states]] += 1
    return cuts


def _question(
    trace: Trace,
    operations: list[Operation],
    target: Path,
    states: int,
    before: str | None,
    options: dict[str, object],
    outcome: Outcome,
) -> None:
    cuts = _cuts(operations, states, before)
    disk, told = Disk(trace.root), Told()
    rng = random.Random(str(options["seed"]))
    kinds: Counter[str] = Counter()
    last_group: Write | None = None
    for at, operation in enumerate(operations):
        disk.do(operation)
        if isinstance(operation, Fact):
            told.take(operation.fact)
        elif _is_group(operation):
            last_group = operation
        elif last_group is not None and isinstance(operation, Sync) and operation.node is last_group.file:
            told.flushed()  # one thread sends
        for _ in range(cuts[at]):
            mode = MODES[outcome.states % len(MODES)]
            disk.leave(target, mode, rng)
            work = functools.partial(troubles_of, told, target / "store", relaxed=options["durability"] == "relaxed")
            troubles, died = forked(work, target.with_name("report"))
            troubles = [f"killed the process: {died}"] if died else troubles
            shutil.rmtree(target)
            outcome.states += 1
            outcome.bad += bool(troubles)
            outcome.deaths += bool(died)
            kinds.update({trouble.split(":")[0].split(" [")[0][:40] for trouble in troubles})
            outcome.troubles += [
                f"state {outcome.states}, operation {at}, {mode}: {trouble}" for trouble in troubles[:2]
            ]
    outcome.differs = _differs(trace, disk, target)
    outcome.kinds = dict(kinds.most_common(8))
    outcome.troubles = outcome.troubles[:20]


def _differs(trace: Trace, disk: Disk, target: Path) -> list[str]:
    """Files whose content after all operations is not what the recorded process has left.

    Without the delivery log: it is mapped, so its writes are not seen, and a power cut may leave anything of it.
    """
    disk.leave(target, ("all", "all"), random.Random(0))
    recorded = Path(trace.base)
    names = {path.relative_to(base) for base in (recorded, target) for path in base.rglob("*") if path.is_file()}
    pairs = [(str(name), recorded / name, target / name) for name in sorted(names)]
    pairs = [pair for pair in pairs if pair[1].name != "lock.mdb" and pair[1].parent.name != "attempts"]
    found = [name for name, ours, theirs in pairs if not (ours.is_file() and theirs.is_file())]
    found += [name for name, ours, theirs in pairs if name not in found and ours.read_bytes() != theirs.read_bytes()]
    shutil.rmtree(target)
    return found


def _is_group(operation: Operation) -> TypeGuard[Write]:
    """True if it writes a group to a segment of the write-ahead log: a file that may have been renamed since."""
    return isinstance(operation, Write) and operation.offset > 0 and _SEGMENT.fullmatch(operation.file.name) is not None


def _groups(operations: list[Operation]) -> int:
    """Writes of groups of several rows to the write-ahead log."""
    groups = [each.data for each in operations if _is_group(each) and each.data is not None]
    return sum(int.from_bytes(group[20:24], "little") > 1 for group in groups)


def troubles_of(told: Told, path: Path, *, relaxed: bool) -> list[str]:
    """Open what a cut left, send to all of it, receive everything, and say every rule that is broken."""
    told.power_goes(relaxed=relaxed)
    told.begin(draining=True)
    listeners = set(told.listeners)
    clock = ManualClock(told.now_ms)
    try:
        store = DelayedStore.open(path, QUESTIONED, clock=clock)
        told.troubles += litter(store)
        for topic, name in listeners:
            if not store.topic(topic).exists() or name not in store.topic(topic).subscriptions():
                told.troubles.append(f"subscription {name} of {topic} is gone")
        worker = Worker(store, clock, "after the cut", lambda *fact: told.take(fact))
        worker.send_everywhere()
        worker.send_again(told.unanswered())
        clock.advance(5 * SPAN_MS)
        worker.drain()
        store.close()
    except Exception as error:  # whatever it is, it is a finding
        told.troubles.append(f"{type(error).__name__}: {error}")
    told.look_for_missing(listeners)
    return told.troubles


def main() -> None:
    """Run once, print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--durability", choices=("commit", "relaxed", "none"), default="commit")
    parser.add_argument("--steps", type=int, default=60, help="steps of the recorded process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--before", help="cut only right before this failpoint is reached")
    parser.add_argument("--mutant", help="a wrong engine of power_mutants")
    options = vars(parser.parse_args())
    json.dump(asdict(run(options.pop("states"), options.pop("before"), options)), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
