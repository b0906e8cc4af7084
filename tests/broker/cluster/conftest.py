"""A port at which nothing listens."""

import pytest

from tests.ports import free_port


@pytest.fixture
def unused_port() -> int:
    """A free port of this machine."""
    return free_port()
