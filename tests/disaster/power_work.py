"""Power cuts amid the work of the kill test (see working): two sessions on one store, the first ends with a close.

Its facts stand in the recording between the writes and syncs of the store: so for every cut it is known what had been
acknowledged before it. The rules are those of the kill test (told).
"""

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from duelog import DelayedStore, ManualClock
from duelog.store.config import SendDurability
from duelog.store.files import failpoints
from tests.conftest import LeadingClock
from tests.disaster import power_mutants
from tests.disaster.power_story import QUESTIONED, Facts
from tests.disaster.power_trace import Operation, Sync, Write, is_group
from tests.disaster.told import Told, litter
from tests.disaster.working import CONFIG, POINTS, SPAN_MS, START_MS, Worker, say

STEPS = 60
LEAD_MS = 3_000
"""How early firing is in the second session."""


def work(path: Path, seed: int, durability: SendDurability) -> None:
    """Work, and end without closing; with durability "replicated" a store that ships."""
    for point in POINTS:
        if not point.startswith("commit."):
            failpoints.arm(point, functools.partial(say, "hit", point))
    clock = LeadingClock(START_MS)
    for session in range(2):
        clock.lead_ms = LEAD_MS * session
        replica = "memory:///" if durability == "replicated" else None
        config = replace(CONFIG, durability=durability, replica=replica, max_open_partitions=3 + 5 * session)
        store = DelayedStore.open(path, config, clock=clock)
        # With other durabilities it must be known what the last commit of an environment was.
        together = config.local_durability == "commit"
        Worker(store, clock, f"{seed}/{session}", say).run(STEPS // 2, together=together)
        if session == 0:
            store.close()
            say("close")
    os._exit(0)


class WorkFacts(Facts):
    """Facts of working, by the rules of told."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self._last_group: Write | None = None

    def take(self, fact: list[Any]) -> None:
        self.told.take(fact)

    def written(self, operation: Operation) -> None:
        if is_group(operation):
            self._last_group = operation
        elif self._last_group is not None and isinstance(operation, Sync) and operation.node is self._last_group.file:
            self.told.flushed()  # one thread sends

    def troubles_of(self, path: Path, *, relaxed: bool) -> list[str]:
        """Open what a cut left, send to all of it, receive everything, and return every rule that is broken."""
        told = self.told
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


MUTANTS = power_mutants.MUTANTS
TOLD = WorkFacts
