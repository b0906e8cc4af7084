"""The protocol of replication against every interleaving, and against itself with a fault planted."""

import pytest

from tests.model.replica_protocol import BEGINNINGS, FAULTS, explore
from tests.proof import length, wrong_engines

STATES = length("DUELOG_REPLICA_STATES", 30_000, 10_000_000)
QUICKLY_FOUND = ("ids again", "own object is another's", "acknowledged before the put")


@pytest.mark.series
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_no_state_of_the_protocol_is_wrong(beginning: str) -> None:
    """Whatever arrives late, twice or never, a replicated entry is kept and an id names one message."""
    explored = explore(None, STATES, beginning)
    assert explored.wrong is None, explored.steps
    assert explored.whole or explored.states == STATES


@pytest.mark.parametrize("fault", wrong_engines(FAULTS, *QUICKLY_FOUND))
def test_a_protocol_with_a_fault_is_found_out(fault: str) -> None:
    """Each rule is needed: without it a state that is wrong is found."""
    assert any(explore(fault, 500_000, beginning).wrong for beginning in BEGINNINGS), FAULTS[fault]
