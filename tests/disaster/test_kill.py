"""A writing process is killed at every step and at random instants, over and over in one store: nothing is lost.

The rules are in told, the program that is killed in kill_child, and the wrong engines that this test must
find out in kill_mutants. SIGKILL loses nothing that was written, synced or not, so most series run in memory, where
an fsync costs nothing; the power cut is another test's.
"""

import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disaster.kill_series import Series, Server
from tests.disaster.running import memory as memory_directory
from tests.disaster.working import POINTS
from tests.proof import length, wrong_engines

pytestmark = [pytest.mark.kill, pytest.mark.series]

COUNTS = (1, 2, 1, 5, 3, 8)[: length("DUELOG_KILLS", 3, 6)]
"""The how-many-th time a point kills, round after round; 1 after 2 dies in the recovery of what 2 left."""

CHAINS = (
    ("delete.recorded", "delete.moved", "delete.removed", "commit.before"),
    ("trim.recorded", "trim.part", "commit.before", "commit.after"),
    ("directory.renamed", "directory.staged", "commit.before", "wal.part"),
    ("compact.published", "compact.copied", "compact.adopted", "commit.before"),
    ("wal.before", "wal.after", "wal.applied", "commit.before"),
    ("wal.part", "wal.ended", "wal.prepared", "wal.released", "commit.after"),
)
"""Killed at the first of a chain, then again and again while what it left is recovered."""
CHAIN_ROUNDS = length("DUELOG_KILL_CHAINS", 1, 2)

AMONG_NUMBERS_AT = "wal.after"
AMONG_NUMBERS = (4, 8, 1, 2, 5, 6, 7, 3, 4, 5)
"""The how-many-th group of numbered batches is the last, round after round."""

RANDOM_ROUNDS = length("DUELOG_RANDOM_KILLS", 4, 18)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The process that forks the children."""
    server = Server()
    yield server
    server.close()


AT_CLOSE = ("wal.removed", "wal.emptied")
"""Points that a process reaches once, when it closes the store."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory where there is such a thing, else on disk."""
    with tempfile.TemporaryDirectory(prefix="duelog-kill-", dir=memory_directory()) as directory:
        yield Path(directory)


def report(series: Series) -> str:
    """Seed, figures and first troubles of a failed test."""
    return "\n".join([series.facts, *series.troubles[:10]])


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_lost_or_doubled_when_killed_at(server: Server, memory: Path, point: str) -> None:
    """Killed at the first, second, ... time it reaches a point, the store recovers and keeps every guarantee."""
    series = Series(server, memory / "store", f"point {point}", steps=8 if point in AT_CLOSE else 40)
    if point in AT_CLOSE:
        killed = [series.round(point, close=True) for _ in COUNTS]
    else:
        killed = [series.round(point, count) for count in COUNTS]
    series.drain()
    assert not series.troubles, report(series)
    assert killed[0], f"the child never reached {point}"
    assert series.kills[point] > len(COUNTS) / 2, report(series)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain[0])
def test_a_recovery_that_is_killed_is_recovered(server: Server, memory: Path, chain: tuple[str, ...]) -> None:
    """A crash in the recovery of a crash, and in the recovery of that, leaves nothing that the next cannot finish."""
    series = Series(server, memory / "store", f"chain {chain[0]}", steps=40)
    series.round()
    for _ in range(CHAIN_ROUNDS):
        for point in chain:
            series.round(point)
    series.drain()
    assert not series.troubles, report(series)
    assert sum(series.kills.values()) >= 3 * CHAIN_ROUNDS, report(series)


@pytest.mark.parametrize("threads", [0, 3], ids=["alone", "threads"])
@pytest.mark.parametrize("durability", ["commit", "relaxed", "none"])
def test_nothing_is_lost_or_doubled_when_killed_at_random(
    server: Server, memory: Path, durability: str, threads: int
) -> None:
    """Killed at any instant, with producers beside the consumer or without, the store keeps every guarantee."""
    kill_random(server, memory, durability=durability, threads=threads)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"background": True, "threads": 2}, id="the scheduler fires, closes and deletes beside"),
        pytest.param({"more": True}, id="short delays, schedules, policies that change, seeks"),
    ],
)
def test_nothing_is_lost_or_doubled_when_killed_at_random_with(
    server: Server, memory: Path, options: dict[str, object]
) -> None:
    """The same with more going on."""
    kill_random(server, memory, **options)


def test_nothing_is_lost_or_doubled_when_killed_at_random_on_disk(server: Server, tmp_path: Path) -> None:
    """The same on a file system with real fsyncs."""
    kill_random(server, tmp_path)


def test_numbers_sent_again_in_other_batches_after_a_crash_are_delivered_once(server: Server, memory: Path) -> None:
    """Killed before a send has returned, what is not known to be stored is sent again, and comes once."""
    series = Series(server, memory / "store", "numbers", steps=40, among_numbers=True)
    counts = AMONG_NUMBERS[: length("DUELOG_KILLS", 4, 10)]
    for count in counts:
        series.round(AMONG_NUMBERS_AT, count)
    series.drain()
    assert not series.troubles, report(series)
    assert series.kills[AMONG_NUMBERS_AT] >= len(counts) - 1, report(series)


def kill_random(server: Server, path: Path, **options: object) -> None:
    """Rounds killed after a random number of facts, then a drain."""
    seed = f"random {options}"
    series, rng = Series(server, path / "store", seed, **options), random.Random(seed)
    for _ in range(RANDOM_ROUNDS):
        series.round(kill_after=rng.randrange(1, 30) if rng.random() < 0.3 else rng.randrange(30, 200))
    series.drain()
    assert not series.troubles, report(series)
    assert sum(series.kills.values()) >= max(1, RANDOM_ROUNDS - 4), report(series)


def test_every_point_is_reached(server: Server, memory: Path) -> None:
    """A point that the engine reaches and that this test does not kill at would be found here."""
    series = Series(server, memory / "store", "census", steps=40)
    series.round(close=True)
    assert set(series.hits) == set(POINTS), report(series)


MUTANTS = {
    "frontier_after_markers": ("fire.after", "doubled-marker"),
    "frontier_before_markers": ("fire.after", "never got"),
    "trash_before_record": ("delete.moved", "is registered in the catalog, and is missing"),
    "vacant_ones_forgotten": ("wal.released", "is registered in the catalog, and is missing"),
    "ack_before_disk": ("acks.before", "again after its durable acknowledgement"),
    "remove_before_record": ("compact.published", "is registered in the catalog, and is missing"),
    "drop_what_anybody_has_acknowledged": ("compact.adopted", "never got"),
    "no_sweep": ("delete.recorded", "is not registered after opening"),
    "released_before_applying": ("wal.released", "never got"),
    "no_replay": ("wal.after", "was given out for|is registered in the catalog, and is missing"),
    "replays_what_is_applied": ("wal.part", "entries were lost"),
    "group_in_parts": ("wal.ended", "never got"),
    "numbers_left_out": (AMONG_NUMBERS_AT, "and as"),
    "keys_left_out": ("wal.before", "was sent with the key"),
    "deletions_forgotten": ("delete.removed", "names a partition that is not in the catalog"),
    "bits_forgotten": ("acks.before", "taken back"),
}
"""Wrong engines of kill_mutants, where each is killed, and how the harness must complain (a regular expression)."""

MUTANT_COUNTS = (1, 2, 3, 1, 2, 3, 5, 8, 20, 50)
"""The how-many-th time the point of a wrong engine kills, round after round."""


@pytest.mark.parametrize(
    "mutant", wrong_engines(MUTANTS, "frontier_before_markers", "remove_before_record", "keys_left_out")
)
def test_the_harness_finds_out_a_wrong_engine(server: Server, memory: Path, mutant: str) -> None:
    """The rounds that the engine passes are failed by one whose steps are in the wrong order."""
    point, complaint = MUTANTS[mutant]
    among_numbers = point == AMONG_NUMBERS_AT
    series = Series(server, memory / "store", f"mutant {mutant}", steps=40, among_numbers=among_numbers)
    for count in AMONG_NUMBERS if among_numbers else MUTANT_COUNTS:
        series.round(point, count, mutant=mutant)
        if any(re.search(complaint, trouble) for trouble in series.troubles):
            return
    series.drain()
    assert any(re.search(complaint, trouble) for trouble in series.troubles), report(series)
