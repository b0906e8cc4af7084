"""A port at which nothing listens."""

import pytest

from tests.broker.clients.conftest import free_port


@pytest.fixture
def unused_port() -> int:
    """A free port of this machine."""
    return free_port()
