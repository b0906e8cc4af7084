"""pulsar-flex, a client for Node that shares no code with the others."""

import subprocess
from pathlib import Path

import pytest

from tests.broker.clients.conftest import SCENARIO_S, ServedStore, token


def run_flex(folder: Path, *arguments: str) -> None:
    """Run a scenario of flex.js."""
    done = subprocess.run(
        ["node", "flex.js", *arguments], cwd=folder, capture_output=True, text=True, timeout=SCENARIO_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"


@pytest.mark.parametrize("scenario", ["produceAndConsume", "sharedWithNack"])
def test_a_program_of_pulsar_flex_works_as_with_pulsar(scenario: str, broker: ServedStore, flex: Path) -> None:
    """The scenario says what is shown."""
    run_flex(flex, scenario, f"127.0.0.1:{broker.port}")


def test_pulsar_flex_is_let_in_with_a_token(secured_broker: ServedStore, flex: Path) -> None:
    """The same token opens the broker to every client."""
    run_flex(flex, "token", f"127.0.0.1:{secured_broker.port}", token("root"))
