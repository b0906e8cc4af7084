"""The engine through its public face against the twin: same messages, same order, never early, none lost or double.

One process, one thread: what another thread would do in between is done at the engine's own failpoints, so that every
failure replays. `DUELOG_MODEL_EXAMPLES=5000` in the environment runs that many examples, new ones each time.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.proof import length

from .engine_machine import EngineMachine

NEW = "DUELOG_MODEL_EXAMPLES" in os.environ
SETTINGS = settings(
    max_examples=length("DUELOG_MODEL_EXAMPLES", 25, 100),
    stateful_step_count=60 if NEW else 40,
    derandomize=not NEW,
    database=None,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.generate] if os.environ.get("NOSHRINK") else [Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
EngineMachine.TestCase.settings = SETTINGS
TestEngine = pytest.mark.series(EngineMachine.TestCase)
