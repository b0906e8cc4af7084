"""The program whose writes are recorded: two sessions on one store; one ends with a close, one with the process.

Its facts (see working) go to standard output and stand in the recording between the writes and syncs of the store: so
for every cut it is known what had been acknowledged before it.

Arguments: path of the store, and a JSON object with seed, durability, steps, mutant (see power_mutants).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from duelog import DelayedStore
from duelog.store.files import failpoints
from tests.conftest import LeadingClock
from tests.disaster import power_mutants
from tests.disaster.working import CONFIG, START_MS, Worker, say

LEAD_MS = 3_000
"""How early firing is in the second session."""


def main() -> None:
    """Work, and end without closing."""
    path, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    if options.get("mutant"):
        power_mutants.apply(options["mutant"])
    for point in failpoints.POINTS:
        if not point.startswith("commit."):
            failpoints.arm(point, functools.partial(say, "hit", point))
    clock, durability = LeadingClock(START_MS), options["durability"]
    for session in range(2):
        clock.lead_ms = LEAD_MS * session
        config = replace(CONFIG, durability=durability, max_open_partitions=3 + 5 * session)
        store = DelayedStore.open(path, config, clock=clock)
        # With other durabilities it must be known what the last commit of an environment was.
        together = durability == "commit"
        Worker(store, clock, f"{options['seed']}/{session}", say).run(options["steps"] // 2, together=together)
        if session == 0:
            store.close()
            say("close")
    os._exit(0)


if __name__ == "__main__":
    main()
