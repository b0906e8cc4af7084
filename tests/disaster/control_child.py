"""The program that the test of the control socket kills: it has a store open, and answers by the control socket.

Started once, as a fork server: each line on its standard input is one round.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

from duelog import DelayedStore, ManualClock
from tests.disaster.fork_server import serve
from tests.disaster.working import CONFIG, START_MS, say

HOLDING = replace(CONFIG, control=True)


def run(request: dict[str, Any]) -> None:
    """Hold the store open until killed."""
    say("pid", os.getpid())
    with DelayedStore.open(request["path"], HOLDING, clock=ManualClock(START_MS)):
        say("opened")
        threading.Event().wait()


if __name__ == "__main__":
    serve(run)
