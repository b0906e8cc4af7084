"""A process that forks a child for each round that a test asks for; the children are what the test kills.

It has imported everything and opened no store. Each line on its standard input is a round as JSON; the child runs it,
and the server waits for it and says how it ended: ["exit", what waitpid(2) said].
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from duelog.store.wal import write_batch
from tests.disaster.working import LARGE_BYTES, say


def serve(run: Callable[[dict[str, Any]], None]) -> None:
    """Until standard input ends. What a round raises is said as trouble."""
    write_batch.LARGE_BYTES = LARGE_BYTES
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if not child:
            try:
                run(json.loads(line))
            except BaseException:
                say("trouble", traceback.format_exc())
            os._exit(0)
        say("exit", os.waitpid(child, 0)[1])
