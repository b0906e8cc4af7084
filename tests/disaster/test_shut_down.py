"""The power goes for a real file system: one on a loop device is shut down in the middle of a run, then mounted.

What the page cache holds and the file system's log has not is gone then; a simulated power cut (test_power_cut) is
harsher, and this shows that it asks for nothing that a kernel would not do. Needs root and a loop device.
`DUELOG_SHUT_DOWNS=100` in the environment makes more rounds than the default.
"""

import json
import random
import subprocess
from collections.abc import Iterator

import pytest

from tests.disaster.loop_disk import FILE_SYSTEMS, Disk, loop_disk
from tests.disaster.power_work import WorkFacts
from tests.disaster.running import module
from tests.proof import length

CUTS = length("DUELOG_SHUT_DOWNS", 1, 3)
DISK_BYTES = 320 << 20
FACTS = 2_400
"""A run tells about so many before it ends; the power goes after some of them."""


@pytest.fixture(params=FILE_SYSTEMS)
def disk(request: pytest.FixtureRequest) -> Iterator[Disk]:
    """An empty disk."""
    with loop_disk(request.param, DISK_BYTES) as disk:
        yield disk


@pytest.mark.fault
@pytest.mark.series
@pytest.mark.parametrize("durability", ["commit", "relaxed"])
@pytest.mark.parametrize("cut", range(CUTS))
def test_what_was_acknowledged_outlives_a_file_system_that_is_shut_down(disk: Disk, cut: int, durability: str) -> None:
    """The store opens on what the file system has after it, and the rules of the kill test hold."""
    facts_told = WorkFacts()
    told = facts_told.told
    wait_for = random.Random(cut).randrange(20, FACTS)
    asked = ["--store", str(disk.root / "store"), "--seed", str(cut), "--durability", durability]
    command = module("tests.disaster.power_cut", "power_work", *asked)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        facts = []
        for line in child.stdout:
            if not line.endswith(b"\n"):  # it was killed in the middle of it
                break
            facts.append(json.loads(line))
            if len(facts) == wait_for:
                disk.shut_down()
                child.kill()
    for number, fact in enumerate(facts):
        if number < wait_for or fact[0] != "trouble":  # a disk that is gone is one to a program
            told.take(fact)
    assert told.listeners
    assert len(facts) >= wait_for, f"{len(facts)} facts, {wait_for} were waited for"
    disk.mount_again()
    assert not facts_told.troubles_of(disk.root / "store", relaxed=durability == "relaxed")
