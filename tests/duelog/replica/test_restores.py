"""Restores at random groups of a busy store are what the store was then: each is drained against a twin of it.

`DUELOG_RESTORES=200` has so many made instead of 28. Half of all puts go wrong: their answers are lost or late, or they
are refused. A seed makes the story, so what fails can be repeated.
"""

from pathlib import Path
from random import Random

import pytest

from tests.duelog.busy_store import BusyStore, Twin, assert_is
from tests.duelog.replica.faulty import URL, FaultyBucket, random_faults, restored, ship, shipping_of
from tests.proof import length

RESTORES = length("DUELOG_RESTORES", 28, 200)
A_STORE = 4
"""Restores of one store."""


@pytest.mark.series
@pytest.mark.parametrize("seed", range(-(-RESTORES // A_STORE)))
def test_a_restore_at_any_group_is_what_the_store_had_then(
    seed: int, bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends, cancels, firings, closings, deletions, compactions and restarts between: none is early, late or lost."""
    random = Random(seed)
    monkeypatch.setattr("duelog.replica.shipping.MANIFEST_MS", random.choice((1_000, 7_200_000, 1 << 50)))
    durability = "commit" if seed % 2 else "none"
    busy = BusyStore(tmp_path / "store", seed, replica=URL, ship_bytes=1 << 16, durability=durability)
    ship(busy.store)
    bucket.faults = random_faults(seed)
    moments: list[tuple[int, Twin]] = []
    has_bodies = False
    for _ in range(60):
        busy.act(random.randrange(1, 4))
        if random.random() < 0.4:
            ship(busy.store)
        if random.random() < 0.1:
            busy.reopen()
        has_bodies |= any(busy.store.path.rglob("*.bodies"))
        moments.append((shipping_of(busy.store)._the_source().next_place() - 1, busy.twin()))
    ship(busy.store)
    assert has_bodies if seed == 1 else not has_bodies or durability == "commit"
    busy.store.close()
    for number, (place, twin) in enumerate([*random.sample(moments[10:], A_STORE - 1), moments[-1]]):
        path = tmp_path / f"restored-{number}"
        restored(bucket, path, group=place)
        assert_is(path, twin, busy.config.__class__(partition_ms=busy.config.partition_ms, max_clock_jump_ms=None))
