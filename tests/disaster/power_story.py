"""Power cuts amid a story: a program whose work is told, and what is asked of each disk that a cut could leave.

A story is a module with `work`, which is recorded and says facts, and `TOLD`, which takes them and questions a disk.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from duelog.store.config import Durability
from tests.disaster.power_cut import _cuts
from tests.disaster.power_disk import MODES, Disk
from tests.disaster.power_trace import Fact, Trace, record
from tests.disaster.running import forked, memory, module


class Questions(Protocol):
    """Facts before a cut."""

    def take(self, fact: list[Any]) -> None:
        """Note a fact."""

    def troubles_of(self, path: Path, *, relaxed: bool) -> list[str]:
        """Question a store that a cut left, and return what is wrong. relaxed: what was done last may be lost."""


class Story(Protocol):
    """The names that a story's module has."""

    MUTANTS: Mapping[str, Callable[[], None]]
    """Wrong engines, which the cuts must find out."""
    TOLD: Callable[[], Questions]

    @staticmethod
    def work(path: Path, seed: int, durability: Durability) -> None:
        """Work on a store, and say what is done."""


def cut(name: str, states: int, seed: int, durability: str, mutant: str | None) -> dict[str, Any]:
    """Record the story of a module and question so many states, spread evenly over it."""
    outcome: dict[str, Any] = {"states": 0, "bad": 0, "troubles": []}
    with tempfile.TemporaryDirectory(prefix="duelog-story-", dir=memory()) as folder:
        base = Path(folder)
        recorded = base / "recorded"
        recorded.mkdir()
        asked = ["--seed", str(seed), "--durability", durability, *(["--mutant", mutant] if mutant else [])]
        store = str(recorded / "store")
        record(base / "strace.log", module("tests.disaster.power_story", name, "--store", store, *asked))
        trace = Trace(base / "strace.log", recorded)
        operations = list(trace.operations())
        outcome["operations"] = len(operations)
        outcome["facts"] = Counter(each.fact[0] for each in operations if isinstance(each, Fact))
        cuts, disk, rng = _cuts(operations, states, None), Disk(trace.root), random.Random(seed)
        told, relaxed = story(name).TOLD(), durability == "relaxed"
        for operation, count in zip(operations, cuts, strict=True):
            disk.do(operation)
            if isinstance(operation, Fact):
                told.take(operation.fact)
            for _ in range(count):
                mode = MODES[outcome["states"] % len(MODES)]
                disk.leave(base / "state", mode, rng)
                question = lambda: told.troubles_of(base / "state" / "store", relaxed=relaxed)  # noqa: E731
                troubles, died = forked(question, base / "report")
                shutil.rmtree(base / "state")
                troubles = [f"killed the process: {died}"] if died else troubles
                outcome["states"] += 1
                outcome["bad"] += bool(troubles)
                more = [f"state {outcome['states']}, {mode}: {each}" for each in troubles]
                outcome["troubles"] = [*outcome["troubles"], *more][:20]
    return outcome


def story(name: str) -> Story:
    """A module of this folder."""
    found: Any = importlib.import_module(f"tests.disaster.{name}")
    return found  # type: ignore[no-any-return]


def main() -> None:
    """Be the recorded process, or record one and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("story", help="a module of this folder: power_letters, power_keys, power_schedules")
    parser.add_argument("--states", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--durability", choices=("commit", "relaxed"), default="commit")
    parser.add_argument("--mutant", help="a wrong engine of the story")
    parser.add_argument("--store", type=Path, help="be the recorded process, on this store")
    options = parser.parse_args()
    if options.store is None:
        outcome = cut(options.story, options.states, options.seed, options.durability, options.mutant)
        json.dump(outcome, sys.stdout, indent=1)
        print()
        return
    if options.mutant:
        story(options.story).MUTANTS[options.mutant]()
    story(options.story).work(options.store, options.seed, options.durability)


if __name__ == "__main__":
    main()
