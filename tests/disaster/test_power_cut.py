"""Disks that a power cut could have left at any moment of a story are opened: nothing that was acknowledged is lost.

A story is recorded by strace (power_trace), the disks are rebuilt by power_disk. The story power_work has the rules of
told and the wrong engines of power_mutants, the others their own. `DUELOG_POWER_CUTS=1000` in the environment makes
more states, `DUELOG_POWER_SEED` other recordings; `python -m tests.disaster.power_cut` is for looking at one case.
"""

import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from tests.disaster.power_disk import MODES
from tests.disaster.running import module
from tests.disaster.working import POINTS
from tests.proof import length, wrong_engines

STATES = length("DUELOG_POWER_CUTS", 40, 150)
SEED = os.environ.get("DUELOG_POWER_SEED", "1")
PASSED = [point for point in POINTS if not point.startswith("commit.")]
"""Failpoints that a recorded run must pass; commits are everywhere."""


def _why_not() -> str | None:
    """Why nothing can be recorded here; None if it can."""
    if shutil.which("strace") is None:
        return "there is no strace"
    done = subprocess.run(["strace", "-f", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace does not work here: {done.stderr.strip()[:200]}"


WHY_NOT = _why_not()
pytestmark = [pytest.mark.fault, pytest.mark.series, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


def cut(story: str, states: float, durability: str = "commit", *more: str) -> dict[str, Any]:
    """The outcome of a recording and so many states, in a process without threads: it forks for each state."""
    command = module("tests.disaster.power_cut", story, "--states", str(round(states)), "--durability", durability)
    done = subprocess.run([*command, "--seed", SEED, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


@pytest.mark.parametrize(("durability", "share"), [("commit", 0.5), ("replicated", 0.2), ("relaxed", 0.3)])
def test_a_power_cut_breaks_no_guarantee_with_durability(durability: str, share: float) -> None:
    """Each state opens, checks clean, has what was acknowledged, doubles nothing; "relaxed" may lose the last sends."""
    outcome = cut("power_work", STATES * share, durability)
    assert not outcome["bad"], json.dumps(outcome, indent=1)
    assert outcome["states"] >= len(MODES)
    assert set(outcome["points"]) == set(PASSED), outcome["points"]
    assert not outcome["differs"], "the recording is not what was done"
    assert outcome["points"]["wal.released"] > 3, "several segments are to be applied"
    assert outcome["groups"], "some groups of the write-ahead log are to hold several rows"
    told = {"listen", "sent", "got", "acked", "cancelled", "moved", "numbered", "transacting", "close"}
    assert told <= set(outcome["facts"])


@pytest.mark.proof
def test_durability_none_loses_to_a_power_cut() -> None:
    """A harness that finds nothing anywhere proves nothing: without syncs it must find much."""
    outcome = cut("power_work", max(30, STATES // 5), "none")
    assert outcome["bad"] > outcome["states"] / 10, json.dumps(outcome, indent=1)


@pytest.mark.parametrize(
    ("story", "durability", "share", "facts"),
    [
        ("power_letters", "commit", 0.33, {"sent", "taken", "failed", "requeued", "clock"}),
        ("power_keys", "commit", 0.25, {"try", "done", "not", "clock"}),
        ("power_tiers", "commit", 0.25, {"sent", "cancelled", "acknowledged", "clock", "hit"}),
        pytest.param("power_keys", "relaxed", 0.1, {"try", "done", "not", "clock"}, marks=pytest.mark.proof),
        ("power_schedules", "commit", 0.2, {"try", "done", "clock"}),
        pytest.param("power_schedules", "relaxed", 0.1, {"try", "done", "clock"}, marks=pytest.mark.proof),
    ],
)
def test_a_power_cut_leaves_a_change_whole_or_not_there(
    story: str, durability: str, share: float, facts: set[str]
) -> None:
    """A message in one place with its count; days given back; keys, quotas, policies, schedules as a twin has them."""
    outcome = cut(story, STATES * share, durability)
    assert not outcome["bad"], json.dumps(outcome, indent=1)
    assert facts <= set(outcome["facts"])


MUTANTS = {
    "partition_not_synced": ("power_work", 16, "commit", None, 4),
    "main_not_synced": ("power_work", 16, "commit", None, 4),
    "no_directory_sync": ("power_work", 16, "commit", None, 3),
    "trash_before_record": ("power_work", 16, "commit", "delete.moved", 3),
    "metadata_before_parts": ("power_work", 24, "commit", "snapshot.meta", 3),
    "wal_not_flushed": ("power_work", 24, "commit", None, 3),
    "released_before_applying": ("power_work", 48, "commit", "wal.part", 3),
    "released_before_sync": ("power_work", 48, "relaxed", "wal.applied", 1),
    "bodies_not_flushed": ("power_work", 48, "relaxed", "wal.after", 3),
    "body_file_without_a_name": ("power_work", 48, "commit", "wal.after", 1),
    "group_in_parts": ("power_work", 48, "commit", "wal.ended", 1),
    "transaction_in_parts": ("power_work", 200, "commit", "wal.after", 1),
    "fires_before_sync": ("power_work", 48, "relaxed", "fire.before", 1),
    "applies_before_the_log": ("power_work", 240, "relaxed", None, 1),
    "letter_apart": ("power_letters", 64, "commit", None, 1),
    "attempts_not_written": ("power_letters", 16, "commit", None, 1),
    "gone_before_the_rest": ("power_tiers", 40, "commit", "away.gone", 1),
    "replaced_in_two_steps": ("power_keys", 24, "commit", None, 1),
    "records_before_it_sends": ("power_schedules", 16, "commit", None, 1),
    "takes_back_before_it_records": ("power_schedules", 12, "commit", None, 1),
}
"""Wrong engines: story, states, durability, before which step the power goes, how many states must at least be bad."""


@pytest.mark.parametrize("mutant", wrong_engines(MUTANTS, "main_not_synced", "letter_apart"))
def test_power_cuts_find_out_a_wrong_engine(mutant: str) -> None:
    """The states that the engine passes are failed by one that syncs too little, in wrong order, or in two steps."""
    story, states, durability, before, bad = MUTANTS[mutant]
    outcome = cut(story, states, durability, "--mutant", mutant, *(["--before", before] if before else []))
    assert outcome["bad"] >= bad, json.dumps(outcome, indent=1)
