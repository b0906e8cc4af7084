"""The program that the kill test kills: it works on a store (see working), and says what was acknowledged.

Started once, as a fork server: each line on its standard input is one round.

Time is an argument: a round is given the time at which its clock begins, and how early firing is.
"""

import functools
import os
import signal
from dataclasses import replace
from typing import Any

from duelog import DelayedStore, StoreConfig
from duelog.store.files import failpoints
from tests.conftest import LeadingClock
from tests.disaster import kill_mutants
from tests.disaster.fork_server import serve
from tests.disaster.told import litter
from tests.disaster.working import CONFIG, POINTS, Worker, say

INLINE_MS = 3_000
"""Where more than the plainest is asked for, shorter delays than this wait in the main log."""


def config(request: dict[str, Any]) -> StoreConfig:
    """The configuration that a round asks for."""
    return replace(
        CONFIG,
        durability=request.get("durability", "commit"),
        background=request.get("background", False),
        max_open_partitions=3 + request["round"] % 2 * 5,  # few; or so many that most sends can have an id reserved
        inline_delay_ms=INLINE_MS if request.get("more") else 0,
    )


def arm(point: str | None, count: int, among_numbers: bool) -> None:
    """Have every failpoint say that it was hit, and `point` kill this process the `count`-th time.

    among_numbers: only hits while a numbered producer sends are counted.
    """
    left = [count]

    def hit(name: str) -> None:
        say("hit", name)
        if name == point and (Worker.numbering or not among_numbers):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    for name in POINTS:
        failpoints.arm(name, functools.partial(hit, name))


def look_for_litter(store: DelayedStore) -> None:
    """Say what an opened store must not have."""
    for found in litter(store):
        say("trouble", found)


def run(request: dict[str, Any]) -> None:
    """One round: open, look, work, and close or just end."""
    say("pid", os.getpid())
    clock = LeadingClock(request["now_ms"], request["lead_ms"])
    if request.get("mutant"):
        kill_mutants.apply(request["mutant"])
    arm(request["point"], request["count"], request.get("among_numbers", False))
    store = DelayedStore.open(request["path"], config(request), clock=clock)
    look_for_litter(store)
    say("opened")
    worker = Worker(store, clock, f"{request['seed']}/{request['round']}", say, more=bool(request.get("more")))
    worker.send_again(request["unanswered"])
    if request.get("drain"):
        worker.drain()
        look_for_litter(store)
    else:
        worker.run(request["steps"], request.get("threads", 0))
    if request["close"]:
        store.close()
        say("close")
    say("done")


if __name__ == "__main__":
    serve(run)
