"""What the command line prints does not depend on the terminal that the tests are run in."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a pipe, whatever the environment says of a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
