"""Disks that a power cut could have left at any moment of a run are opened: nothing that was acknowledged is lost.

The run is recorded by strace (power_trace), the disks are rebuilt by power_disk, the rules are in told,
and the wrong engines that this must find out in power_mutants. `DUELOG_POWER_CUTS=1000` in the
environment makes more states (150 are the default, shared by the two durabilities that guarantee something);
`python -m tests.disaster.power_cut` is for looking at one case.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from duelog.store.files import failpoints
from tests.disaster.power_disk import MODES
from tests.disaster.running import module
from tests.proof import length, wrong_engines

STATES = length("DUELOG_POWER_CUTS", 40, 150)
PASSED = [point for point in failpoints.POINTS if not point.startswith("commit.")]
"""Failpoints that a recorded run must pass; commits are everywhere."""


def _why_not() -> str | None:
    """Why nothing can be recorded here; None if it can."""
    if shutil.which("strace") is None:
        return "there is no strace"
    done = subprocess.run(["strace", "-f", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace does not work here: {done.stderr.strip()[:200]}"


WHY_NOT = _why_not()
pytestmark = [pytest.mark.fault, pytest.mark.series, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


def cut(states: int, durability: str, *more: str) -> dict[str, Any]:
    """The outcome of a recording and so many states, in a process without threads: it forks for each state."""
    command = module("tests.disaster.power_cut", "--states", str(states), "--durability", durability)
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


@pytest.mark.parametrize(("durability", "share"), [("commit", 0.7), ("relaxed", 0.3)])
def test_a_power_cut_breaks_no_guarantee_with_durability(durability: str, share: float) -> None:
    """Each state opens, checks clean, has what was acknowledged, doubles nothing; "relaxed" may lose the last sends."""
    outcome = cut(round(STATES * share), durability)
    assert not outcome["bad"], json.dumps(outcome, indent=1)
    assert outcome["states"] >= len(MODES)
    assert set(outcome["points"]) == set(PASSED), outcome["points"]
    assert not outcome["differs"], "the recording is not what was done"
    assert outcome["points"]["wal.released"] > 3, "several segments are to be applied"
    assert outcome["groups"], "some groups of the write-ahead log are to hold several rows"
    assert {"listen", "sent", "got", "acked", "cancelled", "moved", "numbered", "close"} <= set(outcome["facts"])


def test_durability_none_loses_to_a_power_cut() -> None:
    """A harness that finds nothing anywhere proves nothing: without syncs it must find much."""
    outcome = cut(max(16, STATES // 5), "none")
    assert outcome["bad"] > outcome["states"] / 4, json.dumps(outcome, indent=1)


MUTANTS = {
    "partition_not_synced": ("commit", None, 16, 4),
    "main_not_synced": ("commit", None, 16, 4),
    "no_directory_sync": ("commit", None, 16, 3),
    "trash_before_record": ("commit", "delete.recorded", 16, 3),
    "metadata_before_parts": ("commit", "snapshot.meta", 24, 3),
    "wal_not_flushed": ("commit", None, 24, 3),
    "released_before_applying": ("commit", "wal.part", 48, 3),
    "released_before_sync": ("relaxed", "wal.applied", 48, 1),
    "group_in_parts": ("commit", "wal.ended", 48, 1),
    "fires_before_sync": ("relaxed", "fire.before", 48, 1),
}
"""Wrong engines: durability, before which step the power goes, how many states, how many must be found bad at least."""


@pytest.mark.parametrize("mutant", wrong_engines(MUTANTS, "main_not_synced"))
def test_power_cuts_find_out_a_wrong_engine(mutant: str) -> None:
    """The states that the engine passes are failed by one that syncs too little, or in the wrong order."""
    durability, before, states, bad = MUTANTS[mutant]
    outcome = cut(states, durability, "--mutant", mutant, *(["--before", before] if before else []))
    assert outcome["bad"] >= bad, json.dumps(outcome, indent=1)
