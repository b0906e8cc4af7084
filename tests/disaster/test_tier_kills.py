"""A process is killed as days go to an S3 server, come back and are adopted from there: nothing is lost or early.

`DUELOG_TIER_KILLS=300` has so many rounds instead of 14. Without SeaweedFS the copy is in a directory.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from duelog import DelayedStore, ManualClock
from duelog.replica.bucket import Bucket
from tests.disaster.kill_series import KILLED, Server
from tests.disaster.power_story import QUESTIONED
from tests.disaster.power_tiers import Told
from tests.disaster.tier_child import POINTS
from tests.disaster.working import CONFIG
from tests.duelog.replica.faulty import restored, shipping_of
from tests.duelog.replica.seaweed import KEYS, seaweed, weed
from tests.proof import length
from tests.tools.command_line import ok

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_TIER_KILLS", 14, 300)
A_STORE = 2 * len(POINTS)
"""Rounds of one store, one after the other: a kill at each of POINTS, and as many at random."""


@pytest.fixture(scope="module")
def buckets(places: Path) -> Iterator[str]:
    """The beginning of URLs."""
    with pytest.MonkeyPatch.context() as patch:
        if weed() is None:
            yield (places / "buckets").as_uri()
            return
        (places / "weed").mkdir()
        with seaweed(places / "weed") as address:
            for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
                patch.setenv(name, value)
            yield "s3://backups"


@pytest.fixture(scope="module")
def server(buckets: str) -> Iterator[Server]:
    """The process that forks the children, which find the bucket."""
    server = Server("tests.disaster.tier_child")
    yield server
    server.close()


@pytest.mark.parametrize("seed", range(-(-KILLS // A_STORE)))
def test_nothing_is_lost_or_early_when_killed_as_days_go_come_and_are_adopted(
    seed: int, server: Server, buckets: str, places: Path
) -> None:
    """Each message is delivered once, by the store and by its restored copy, unless it was taken back."""
    source, told, killed, hits = Random(seed), Told(), Counter[str](), Counter[str]()
    url, path = f"{buckets}/{os.getpid()}-{seed}", places / f"store {seed}"
    points = [*POINTS, *["at random"] * (len(POINTS) - 1)]
    points.sort(key=lambda point: source.random() + point.startswith("compact.") / 2)  # once days are over
    for number, point in enumerate(["at random", *points]):
        if adopts := point.startswith("compact."):
            ok("compact", url, "--min-dead-ratio", "0.01")  # by another process, for this round to adopt
        kill_after = source.randrange(2, 150) if point == "at random" else None
        request = {"path": str(path), "url": url, "now_ms": told.now_ms, "session": f"{seed}/{number}", "steps": 40}
        count = 1 if adopts else source.randrange(1, 4)
        for fact in server.run({**request, "point": point, "count": count}, kill_after):
            told.take(fact)
            match fact:
                case ["exit", status]:
                    assert os.waitstatus_to_exitcode(status) in (0, KILLED)
                    killed[point] += status != 0
                case ["hit", name]:
                    hits[name] += 1
                case ["trouble", text]:
                    raise AssertionError(f"{point}: {text}")
    with DelayedStore.open(
        path, replace(CONFIG, replica=url, max_local_bytes=1), clock=ManualClock(told.now_ms)
    ) as store:
        shipping_of(store).step()
    found = restored(Bucket(url), path.with_name(f"restored {seed}")).path
    settings = replace(QUESTIONED, **told.settings)
    for directory, config in ((found, settings), (path, replace(settings, replica=url, max_local_bytes=1))):
        clock = ManualClock(told.now_ms)
        with DelayedStore.open(directory, config, clock=clock) as store:
            assert [str(each) for each in store.check(deep=True)] == []
            assert told.look(store, clock, relaxed=False) == []
    print(f"\n{dict(killed)}; reached {dict(hits)}; {len(told.due)} messages")
    assert sum(killed.values()) > A_STORE / 2
    assert set(hits) == set(POINTS)
