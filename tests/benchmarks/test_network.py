"""The workloads of the network front run, with few messages, against a broker and clients in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.tree import ROOT

_SECONDS = 120


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run a workload of `python -m benchmarks` and return what it appends to its file."""
    pytest.importorskip("pulsar")
    pytest.importorskip("rich")
    answer = tmp_path / "answer.json"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-m", "benchmarks", *arguments, "--quick", "--only", "duelog", "--json", str(answer)]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def values(found: dict[str, Any]) -> dict[str, float]:
    """Figures by name; nothing has failed."""
    assert found["notes"] == []
    return {each["measure"]: each["median"] for each in found["results"]}


def test_messages_go_through_a_broker_by_clients_in_processes_of_their_own(tmp_path: Path) -> None:
    """All that is sent is received, or there are no figures."""
    rates = values(run(tmp_path, "network", "-n", "400", "--processes", "2"))
    assert all(rates[phase] > 0 for phase in ("produce", "consume and acknowledge", "both"))


@pytest.mark.proof  # it waits for delays of some seconds
def test_delayed_messages_of_several_clients_reach_another_one_and_none_is_early(tmp_path: Path) -> None:
    """All come."""
    late = values(run(tmp_path, "network_lateness", "-n", "100"))
    assert 0 <= late["earliest"] <= late["median"] <= late["longest"]
