"""Producers of an empty store."""

import pytest

from tests.broker.peers import OnLoop
from tests.broker.produce.producing import Producing
from tests.conftest import OpenStore


@pytest.fixture
def here(open_store: OpenStore) -> OnLoop[Producing]:
    """Producers of a topic."""
    return OnLoop(lambda: Producing(open_store()))
