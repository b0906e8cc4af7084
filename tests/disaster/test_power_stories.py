"""A power cut leaves each message that fails in one place, counts and dead letters as they were on disk.

`DUELOG_POWER_CUTS` scales it as test_power_cut; `python -m tests.disaster.power_letters` is for looking at one case.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.disaster.power_letters import MUTANTS
from tests.disaster.running import module
from tests.disaster.test_power_cut import WHY_NOT

STATES = int(os.environ.get("DUELOG_POWER_CUTS", "150")) // 3
pytestmark = [pytest.mark.fault, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


def cut(states: int, *more: str) -> dict[str, Any]:
    """What came of so many states, in a process without threads: it forks for each state."""
    command = module("tests.disaster.power_letters", "--states", str(states), *more)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def test_a_power_cut_leaves_a_failing_message_in_one_place_with_its_count() -> None:
    """In the backlog, pending, or among the letters; whatever was requeued, for later too, or purged at the cut."""
    outcome = cut(STATES)
    assert not outcome["bad"], json.dumps(outcome, indent=1)
    assert outcome["states"] == STATES
    assert {"sent", "taken", "failed", "requeued", "clock"} <= set(outcome["facts"])


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_power_cuts_find_out_an_engine_that_moves_letters_in_two_steps_or_counts_in_memory(mutant: str) -> None:
    """Some states are bad where the engine is wrong."""
    assert cut(16, "--mutant", mutant)["bad"]
