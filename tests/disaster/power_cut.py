"""Power cuts: a run is recorded, disks that a cut could have left are rebuilt, and each is opened and questioned.

By hand, from the top of the repository, a thousand states of a story (power_work, power_letters, power_keys,
power_schedules):

    python -m tests.disaster.power_cut power_work --states 1000 --durability commit

Prints a JSON object: how many operations and states there were, what became of the states, and the first troubles.
A state is opened in a child process, since a damaged one may kill it. The same seed makes the same states of the
same recording.
"""

import argparse
import functools
import importlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from duelog.store.wal import write_batch
from tests.disaster.power_disk import MODES, Disk
from tests.disaster.power_story import Story
from tests.disaster.power_trace import Edit, Fact, Operation, Sync, Trace, Write, is_group, record
from tests.disaster.running import forked, memory, module
from tests.disaster.working import LARGE_BYTES


@dataclass
class Outcome:
    """The figures of a run."""

    operations: dict[str, int]
    facts: dict[str, int]
    points: dict[str, int]
    """Failpoints of the engine that the run came by: what it covers."""
    groups: int
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


def story_of(name: str) -> Story:
    """A module of this folder."""
    found: Any = importlib.import_module(f"tests.disaster.{name}")
    return found  # type: ignore[no-any-return]


def run(story: str, states: int, before: str | None, seed: int, durability: str, mutant: str | None) -> Outcome:
    """Record a story and question so many states, spread evenly over it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="duelog-power-", dir=memory()) as folder:
        base = Path(folder)
        recorded, log = base / "recorded", base / "strace.log"
        recorded.mkdir()
        asked = ["--seed", str(seed), "--durability", durability, *(["--mutant", mutant] if mutant else [])]
        record(log, module("tests.disaster.power_cut", story, "--store", str(recorded / "store"), *asked))
        trace = Trace(log, recorded)
        operations = list(trace.operations())
        log.unlink()
        facts = [operation.fact for operation in operations if isinstance(operation, Fact)]
        groups = [each.data for each in operations if is_group(each) and each.data is not None]
        outcome = Outcome(
            dict(Counter(_kind(operation) for operation in operations if not isinstance(operation, Fact))),
            dict(Counter(fact[0] for fact in facts)),
            dict(Counter(fact[1] for fact in facts if fact[0] == "hit")),
            sum(int.from_bytes(group[20:24], "little") > 1 for group in groups),
        )
        cuts = _cuts(operations, states, before)
        disk, told, rng = Disk(trace.root), story_of(story).TOLD(), random.Random(seed)
        target, kinds = base / "state", Counter[str]()
        for at, operation in enumerate(operations):
            disk.do(operation)
            if isinstance(operation, Fact):
                told.take(operation.fact)
            else:
                told.written(operation)
            for _ in range(cuts[at]):
                mode = MODES[outcome.states % len(MODES)]
                disk.leave(target, mode, rng)
                question = functools.partial(told.troubles_of, target / "store", relaxed=durability == "relaxed")
                troubles, died = forked(question, base / "report")
                troubles = [f"killed the process: {died}"] if died else troubles
                shutil.rmtree(target)
                outcome.states += 1
                outcome.bad += bool(troubles)
                outcome.deaths += bool(died)
                kinds.update({trouble.split(":")[0].split(" [")[0][:40] for trouble in troubles})
                outcome.troubles += [f"state {outcome.states}, operation {at}, {mode}: {each}" for each in troubles[:2]]
        outcome.differs = _differs(trace, disk, target)
    outcome.kinds, outcome.troubles = dict(kinds.most_common(8)), outcome.troubles[:20]
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


def main() -> None:
    """Be the recorded process, or record one and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("story", help="a module of this folder: power_work, power_letters, power_keys, power_schedules")
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--durability", choices=("commit", "replicated", "relaxed", "none"), default="commit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--before", help="cut only right before this failpoint is reached")
    parser.add_argument("--mutant", help="a wrong engine of the story")
    parser.add_argument("--store", type=Path, help="be the recorded process, on this store")
    options = parser.parse_args()
    write_batch.LARGE_BYTES = LARGE_BYTES
    if options.store is None:
        asked = (options.story, options.states, options.before, options.seed, options.durability, options.mutant)
        json.dump(asdict(run(*asked)), sys.stdout, indent=1)
        print()
        return
    story = story_of(options.story)
    if options.mutant:
        story.MUTANTS[options.mutant]()
    story.work(options.store, options.seed, options.durability)


if __name__ == "__main__":
    main()
