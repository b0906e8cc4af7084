"""A power cut amid failing deliveries, keys, pauses, policies or schedules leaves what was done, and nothing by half.

`DUELOG_POWER_CUTS` scales it as test_power_cut, `DUELOG_POWER_SEED` makes other recordings;
`python -m tests.disaster.power_story power_keys` is for looking at one case.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.disaster.running import module
from tests.disaster.test_power_cut import WHY_NOT
from tests.proof import length, wrong_engines

STATES = length("DUELOG_POWER_CUTS", 40, 150)
SEED = os.environ.get("DUELOG_POWER_SEED", "1")
pytestmark = [pytest.mark.fault, pytest.mark.series, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


def cut(story: str, states: int, *more: str) -> dict[str, Any]:
    """Question so many states of a recording, in a process without threads: it forks for each state."""
    command = module("tests.disaster.power_story", story, "--states", str(states), *more)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def assert_whole(outcome: dict[str, Any], facts: set[str]) -> None:
    """No state is bad, of a recording that says so."""
    assert not outcome["bad"], json.dumps(outcome, indent=1)
    assert facts <= set(outcome["facts"])


def test_a_power_cut_leaves_a_failing_message_in_one_place_with_its_count() -> None:
    """In the backlog, pending, or among the letters; whatever was requeued, for later too, or purged at the cut."""
    facts = {"sent", "taken", "failed", "requeued", "clock"}
    assert_whole(cut("power_letters", STATES // 3, "--seed", SEED), facts)


@pytest.mark.parametrize(("durability", "share"), [("commit", 0.25), ("relaxed", 0.1)])
def test_a_power_cut_leaves_keys_pauses_quotas_and_policies_as_before_a_change_or_after_it(
    durability: str, share: float
) -> None:
    """A key finds its message, which is one; what replaces another is there without it; what was set holds."""
    outcome = cut("power_keys", round(STATES * share), "--durability", durability, "--seed", SEED)
    assert_whole(outcome, {"try", "done", "not", "clock"})


@pytest.mark.parametrize(("durability", "share"), [("commit", 0.2), ("relaxed", 0.1)])
def test_a_power_cut_leaves_schedules_with_their_options_and_no_occurrence_twice(durability: str, share: float) -> None:
    """Each goes on as its twin, that has seen no cut: what was missed comes as it was asked to, the rest in time."""
    outcome = cut("power_schedules", round(STATES * share), "--durability", durability, "--seed", SEED)
    assert_whole(outcome, {"try", "done", "clock"})


MUTANTS = {
    "letter_apart": ("power_letters", 16),
    "attempts_not_written": ("power_letters", 16),
    "replaced_in_two_steps": ("power_keys", 24),
    "records_before_it_sends": ("power_schedules", 16),
    "takes_back_before_it_records": ("power_schedules", 12),
}
"""Wrong engines: the story that finds each out, and in how many states."""


@pytest.mark.parametrize("mutant", wrong_engines(MUTANTS, "letter_apart"))
def test_power_cuts_find_out_an_engine_that_writes_in_two_steps_or_counts_in_memory(mutant: str) -> None:
    """Some states are bad where the engine is wrong."""
    story, states = MUTANTS[mutant]
    assert cut(story, states, "--mutant", mutant)["bad"]
