"""The process that has a store open, its clients and its workers are killed over and over, each while the others run.

DUELOG_CONNECTED_KILLS says how often. The programs that are killed are in connected_parts.
"""

import random
from pathlib import Path

import pytest

from tests.disaster.connected_twin import Part, Twin, judged, subscribe
from tests.proof import length

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_CONNECTED_KILLS", 10, 300)
MOST_FACTS = 80
"""The most facts that all parts tell between two kills."""
PARTS = {"server": "server", "c1": "client", "c2": "client", "r1": "receiver", "r2": "receiver"}


def test_nothing_is_lost_doubled_early_or_brought_back_though_each_part_is_killed(places: Path) -> None:
    """Sends by number and key, batches, transactions, tasks, a schedule, cancels: at any kill of server or client.

    What is stored is stored once and comes, or was cancelled and never does; an acknowledgement that its server has
    answered is final; each time that a message comes again its attempts are one more.
    """
    path, chance, twin = places / "store", random.Random(KILLS), Twin()
    subscribe(path)
    with twin:
        for name, part in PARTS.items():
            Part(name, twin, part=part, place=str(path))
        kills = 0
        while kills < KILLS and not twin.troubles:
            assert twin.wait_for_facts(chance.randrange(1, MOST_FACTS))
            kills += chance.choice([twin.parts[0], *twin.parts]).kill()
    print(f"\n{kills} kills, {judged(path, twin)}")
