"""A process is killed over and over while it pauses subscriptions and fills a topic to its quota.

A pause that has returned holds, until when it was said to; and of pending messages there are never more than may be,
nor is a send refused for which there is place. DUELOG_FLOW_KILLS says how often; ten times unless it is set.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, Policies
from duelog.errors import QuotaExceeded
from tests.disaster.flow_child import CONFIG, START_MS, SUBSCRIPTIONS
from tests.disaster.kill_series import Server
from tests.proof import length

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_FLOW_KILLS", 3, 10)
LIMIT = 20

Pauses = dict[str, int | None]
"""Until when each subscription is paused; 0: it is not, None: for ever."""


def paused(store: DelayedStore) -> Pauses:
    """Pauses of each subscription as the store has them."""
    found = {name: store.topic("t").subscription(name).stats() for name in SUBSCRIPTIONS}
    return {name: stats.paused_until_ms if stats.paused else 0 for name, stats in found.items()}


def test_a_process_that_is_killed_keeps_pauses_and_quotas(places: Path) -> None:
    """A call that the kill interrupted was done as a whole, or not at all."""
    server, chance, path = Server("tests.disaster.flow_child"), random.Random(KILLS), places / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        store.set_policies(Policies(max_pending=LIMIT), topic="t")
        for name in SUBSCRIPTIONS:
            store.topic("t").subscribe(name).close()
    pauses: Pauses = dict.fromkeys(SUBSCRIPTIONS, 0)
    now_ms, refused = START_MS, 0
    for kill in range(KILLS):
        tried: list[object] = []
        request = {"path": str(path), "seed": kill, "now_ms": now_ms, "steps": 500}
        for fact in server.run(request, chance.randrange(2, 200)):
            match fact:
                case ["try", *tried]:
                    pass
                case ["done"]:
                    if tried[0] == "pause":
                        pauses[str(tried[1])] = tried[2]  # type: ignore[assignment]
                    tried = []
                case ["refused"]:
                    tried, refused = [], refused + 1
                case ["time", moved_ms]:
                    now_ms = moved_ms
                case ["trouble", text]:
                    pytest.fail(text)
        with DelayedStore.open(path, CONFIG, clock=ManualClock(now_ms)) as store:
            found, now_ms = paused(store), store.clock.now_ms()
            expected = {name: 0 if until_ms and until_ms <= now_ms else until_ms for name, until_ms in pauses.items()}
            if tried[:1] == ["pause"] and found != expected:
                expected[str(tried[1])] = tried[2]  # type: ignore[assignment]
            assert found == expected
            pauses = found
            while store.tick().fired:
                pass
            topic = store.topic("t")
            pending = topic.stats().pending
            assert pending == len(list(topic.scheduled())) <= LIMIT
            with pytest.raises(QuotaExceeded, match=f"{pending} messages are pending"):
                topic.send_batch([Message(b"x", deliver_after=30)] * (LIMIT - pending + 1))
            ids = topic.send_batch([Message(b"x", deliver_after=30)] * (LIMIT - pending))
            topic.cancel_batch(ids)
            assert list(store.check(deep=True)) == []
    server.close()
    print(f"\n{KILLS} kills, {refused} sends refused")
