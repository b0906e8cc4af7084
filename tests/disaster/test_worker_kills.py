"""A worker is killed over and over in one store: each message is done at least once, none is given up early.

DUELOG_WORKER_KILLS says how often; twelve times unless it is set.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore
from tests.disaster.kill_series import KILLED, Server
from tests.disaster.worker_child import CONFIG, RETRIES
from tests.proof import length

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_WORKER_KILLS", 4, 12)
MOST_FACTS = 40
"""The most facts that a worker says before it is killed."""


def test_a_worker_that_is_killed_does_each_message_and_gives_none_up_early(places: Path) -> None:
    """Poisoned messages alone become dead letters, after as many failed deliveries as they may have."""
    server, chance = Server("tests.disaster.worker_child"), random.Random(KILLS)
    sent: set[str] = set()
    done: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    kills, rounds = 0, 0
    while kills < KILLS or rounds == kills:  # the last round is not killed
        kill_after = None if kills == KILLS else chance.randrange(1, MOST_FACTS)
        request: dict[str, Any] = {
            "path": str(places / "store"),
            "round": rounds,
            "send": 2 if kill_after is not None else 0,
            "kill_after": kill_after,
        }
        for fact in server.run(request, kill_after):
            match fact:
                case ["sent", names]:
                    sent.update(names)
                case ["start", name, failed]:
                    starts[name] += 1
                    assert failed <= kills + starts[name], fact
                case ["done", name]:
                    done[name] += 1
                case ["exit", status]:
                    assert os.waitstatus_to_exitcode(status) == (0 if kill_after is None else KILLED)
                case ["trouble", text]:
                    pytest.fail(text)
        rounds += 1
        kills += kill_after is not None
    server.close()
    with DelayedStore.open(places / "store", CONFIG) as store:
        assert list(store.check(deep=True)) == []
        letters = {letter.payload.decode(): letter for letter in store.dead_letters()}
    poisoned = {name for name in sent if name.startswith("poison")}
    assert poisoned <= letters.keys()
    assert sent - poisoned <= done.keys()
    assert all(name.startswith("poison") for name in letters)
    for name, letter in letters.items():
        assert letter.attempts > RETRIES, letter
        assert letter.attempts <= starts[name] + kills, letter
        assert letter.reason in (f"PoisonedError: {name}", "redeliveries"), letter
    again = sum(done.values()) - len(done)
    print(f"\n{kills} kills, {len(sent)} messages, {again} of them done more than once, {len(letters)} dead letters")
