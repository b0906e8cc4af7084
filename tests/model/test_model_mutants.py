"""The model test finds out wrong engines: one that passes everything would prove nothing."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from duelog.errors import DuelogError
from tests.proof import wrong_engines

from .engine_machine import EngineMachine
from .mutants import KINDS, MUTANTS
from .test_engine_model import SETTINGS


@pytest.mark.parametrize(
    "mutant", wrong_engines(MUTANTS, "fires_what_was_cancelled", "never_takes_back", "delivers_early_inline")
)
def test_the_model_finds_out_a_wrong_engine(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rule of delivery broken, the rules that the engine passes fail; the first failure is enough."""
    break_it, theme = MUTANTS[mutant]
    break_it(monkeypatch)
    machine = type("OfOneTheme", (EngineMachine,), {"themes": (theme,), "kind": KINDS.get(mutant)})
    briefly = settings(SETTINGS, max_examples=1_000, stateful_step_count=6, derandomize=True, phases=[Phase.generate])
    with pytest.raises((AssertionError, DuelogError)):
        run_state_machine_as_test(machine, settings=briefly)
