"""A story: a program whose work is recorded and says facts, and the questions that a disk is asked after a cut."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from duelog import DelayedStore, ManualClock
from duelog.store.config import SendDurability
from tests.disaster.power_trace import Operation
from tests.disaster.working import CONFIG, START_MS

QUESTIONED = replace(CONFIG, durability="none", max_open_partitions=64, fire_batch=5_000, map_bytes=1 << 24)
"""Nothing that happens after the cut has to outlive another one, and it need not be done in small pieces."""


class Facts:
    """Facts before a cut, and the questions that follow from them."""

    settings: Mapping[str, Any] = {}
    """The configuration of a questioned store, beside QUESTIONED."""

    def __init__(self) -> None:
        self.now_ms = START_MS

    def take(self, fact: list[Any]) -> None:
        """Note a fact."""

    def written(self, operation: Operation) -> None:
        """Note what was done to the disk."""

    def look(self, store: DelayedStore, clock: ManualClock, *, relaxed: bool) -> list[str]:
        """Question an opened store and return what is wrong. relaxed: what was done last may be lost."""
        raise NotImplementedError

    def troubles_of(self, path: Path, *, relaxed: bool) -> list[str]:
        """Open what a cut left, check it, question it, and return what is wrong."""
        found, clock = list[str](), ManualClock(self.now_ms)
        try:
            with DelayedStore.open(path, replace(QUESTIONED, **self.settings), clock=clock) as store:
                found += [f"check: {each.message}" for each in store.check(deep=True)]
                found += self.look(store, clock, relaxed=relaxed)
        except Exception as error:  # whatever it is, it is a finding
            found.append(f"{type(error).__name__}: {error}")
        return found


class Story(Protocol):
    """The names that a story's module has."""

    MUTANTS: Mapping[str, Callable[[], None]]
    """Wrong engines, which the cuts must find out."""
    TOLD: Callable[[], Facts]

    @staticmethod
    def work(path: Path, seed: int, durability: SendDurability) -> None:
        """Work on a store, say what is done, and end without closing."""
