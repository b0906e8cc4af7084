"""The command line prints the same whatever terminal the tests are run in."""

import pytest


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a pipe, whatever the environment says of a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
