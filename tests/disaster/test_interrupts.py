"""Interrupts in a program that goes on: nothing is lost, doubled or hung, and the store opens (interrupted_child)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.disaster.running import module
from tests.proof import length

pytestmark = [pytest.mark.fault, pytest.mark.series]

INTERRUPTS = length("DUELOG_INTERRUPTS", 20, 60)


def test_a_program_that_goes_on_after_interrupts_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Beside three threads that send: the store stops or goes on, and opened again it has each message once."""
    command = module("tests.disaster.interrupted_child", str(tmp_path / "store"), str(INTERRUPTS), "1")
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout)
    print(told)
    assert told["wrong"] == []
    assert told["interrupts"] >= INTERRUPTS
