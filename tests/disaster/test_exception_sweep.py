"""Exceptions at each line of each operation: nothing is lost, doubled or early, and closing ends (exception_sweep)."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.disaster.running import module
from tests.disaster.sweep_scenarios import SCENARIOS
from tests.proof import PROOF, wrong_engines

pytestmark = [pytest.mark.fault, pytest.mark.series]

_WANTED = os.environ.get("DUELOG_SWEEP_POINTS", "24" if PROOF else "6")
"""How many points of each operation: a number, or "all"."""


def swept(
    scenario: str, wanted: str, mutant: str | None = None, file: str | None = None, enough: int = 1_000
) -> list[str]:
    """Sweep and return what was wrong; a run that hangs ends its process, and another goes on after it."""
    wrong: list[str] = []
    begin = 0
    while True:
        command = module("tests.disaster.exception_sweep", scenario, "--begin", str(begin))
        command += [] if wanted == "all" else ["--points", wanted]
        command += [] if mutant is None else ["--mutant", mutant, "--patience", "5"]
        command += [] if file is None else ["--file", file]
        count, current = -1, ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            for line in child.stdout:
                said: list[Any] = json.loads(line)
                if said[0] == "points":
                    count = said[1]
                elif said[0] == "begins":
                    begin, current = said[1], said[2]
                else:
                    wrong.append(f"{said[2]}: {'; '.join(said[3])}")
                    if len(wrong) >= enough:
                        child.kill()
                        return wrong
            report = child.stderr.read()
        if child.returncode == 0:
            return wrong
        if "Timeout" not in report or count < 0:
            pytest.fail(f"{scenario}, {current}: {report}")
        wrong.append(f"{current}: hangs\n{report}")
        begin += 1
        if begin >= count or len(wrong) >= enough:
            return wrong


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_an_exception_at_any_line_loses_and_doubles_nothing(scenario: str) -> None:
    """The program goes on, or closes and opens the store: what was acknowledged comes once, and nothing hangs."""
    assert swept(scenario, _WANTED) == []


MUTANTS = [
    ("taken_is_not_given_back", "fire", "markers/firing/firing.py"),
    ("scheduler_dies", "serve", None),
    ("confirmed_by_the_caller", "fire", "store/env/commit_queue.py"),
    ("torn_logs_go_on", "fire", "markers/firing/pending_log.py"),
    ("torn_deliveries_go_on", "resolve", "delivery/dispatcher.py"),
    ("condition_entered", "send", "threading.py"),
]
"""Wrong engines: the operation and the file in which each is found out."""


@pytest.mark.parametrize(
    ("mutant", "scenario", "file"),
    wrong_engines(MUTANTS, MUTANTS[0]),
)
def test_the_sweep_finds_a_wrong_engine_out(mutant: str, scenario: str, file: str | None) -> None:
    """Faults that the engine had, planted again: a sweep that finds nothing anywhere proves nothing."""
    assert swept(scenario, "120", mutant, file, enough=1)
