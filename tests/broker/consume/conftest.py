"""Consumers of an empty store."""

import pytest

from duelog import ManualClock
from tests.broker.consume.consuming import Consuming
from tests.broker.peers import OnLoop
from tests.conftest import OpenStore


@pytest.fixture
def here(open_store: OpenStore, clock: ManualClock) -> OnLoop[Consuming]:
    """Consumers of a topic."""
    return OnLoop(lambda: Consuming(open_store(), clock))
