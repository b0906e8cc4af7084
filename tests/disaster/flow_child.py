"""The program that the test of killed pauses and quotas kills: it says what it tries, and what has returned.

Started once, as a fork server: each line on its standard input is one round.
"""

from __future__ import annotations

import os
import random
from typing import Any

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import QuotaExceeded
from tests.disaster.fork_server import serve
from tests.disaster.working import say

CONFIG = StoreConfig(
    map_bytes=1 << 22, wal_bytes=16 << 10, partition_ms=60_000, max_clock_jump_ms=None, background=False
)
SUBSCRIPTIONS = ("a", "b")
START_MS = 1_790_000_000_000


def run(request: dict[str, Any]) -> None:
    """Pause and resume, send, cancel, and let time pass, until it is killed."""
    say("pid", os.getpid())
    chance, clock = random.Random(request["seed"]), ManualClock(request["now_ms"])
    with DelayedStore.open(request["path"], CONFIG, clock=clock) as store:
        topic = store.topic("t")
        for _ in range(request["steps"]):
            step = chance.random()
            if step < 0.4:
                name, ms = chance.choice(SUBSCRIPTIONS), chance.choice((None, 0, 1_000, 10_000_000))
                until_ms = ms and clock.now_ms() + ms
                say("try", "pause", name, until_ms)
                admin = topic.subscription(name)
                admin.resume() if ms == 0 else admin.pause(until_ms)
                say("done")
            elif step < 0.8:
                count = chance.randrange(1, 6)
                say("try", "send", count)
                try:
                    topic.send_batch([Message(b"x", deliver_after=chance.randrange(1, 300)) for _ in range(count)])
                    say("done")
                except QuotaExceeded:
                    say("refused")
            elif step < 0.9:
                say("try", "cancel", 1)
                found = next(iter(topic.scheduled(limit=1)), None)
                say("done" if found is not None and topic.cancel(found.message_id) else "refused")
            else:
                clock.advance(chance.randrange(20_000))
                say("time", clock.now_ms())
                store.tick()


if __name__ == "__main__":
    serve(run)
