"""The program that test_tier_kills kills: it does the work of power_tiers on a store whose copy is in a bucket.

Started once, as a fork server: each line on its standard input is one round.
"""

import functools
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from duelog import DelayedStore, ManualClock
from duelog.store.files import failpoints
from tests.disaster import power_tiers
from tests.disaster.fork_server import serve
from tests.disaster.working import CONFIG, say

POINTS = [*power_tiers.POINTS, "compact.published", "compact.adopted"]


def run(request: dict[str, Any]) -> None:
    """One round: open, work, close, unless it is killed at the `count`-th time that it reaches `point`, or before."""
    say("pid", os.getpid())
    left = request["count"]

    def hit(name: str) -> None:
        nonlocal left
        say("hit", name)
        if name == request["point"]:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    for name in POINTS:
        failpoints.arm(name, functools.partial(hit, name))
    power_tiers.give_back_all()
    clock, source = ManualClock(request["now_ms"]), random.Random(request["session"])
    config = replace(CONFIG, replica=request["url"], max_local_bytes=1)
    with DelayedStore.open(Path(request["path"]), config, clock=clock) as store:
        say("opened")
        power_tiers.go_on(store, clock, source, request["session"], request["steps"])
    say("done")


if __name__ == "__main__":
    serve(run)
