"""SIGKILL while a store ships, and while its copy is restored: nothing is lost or there twice, in either of the two.

`DUELOG_REPLICA_KILLS=200` has so many processes killed instead of 20.
"""

import subprocess
from pathlib import Path
from random import Random

import pytest

from duelog import DelayedStore, StoreConfig
from duelog.replica.bucket import Bucket
from tests.disaster.running import module
from tests.duelog.replica.faulty import restored, shipping_of
from tests.proof import length
from tests.tools.command_line import DUELOG, ok

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_REPLICA_KILLS", 20, 200)
A_STORE = 5
"""Kills of processes that have one store open, one after the other; a sixth is killed as it restores."""


def held(path: Path, url: str | None = None) -> dict[str, set[int]]:
    """The messages that wait and those that are to be delivered, by number, of a store that is sound.

    url: of its copy, which has all of them then, and can be restored.
    """
    with DelayedStore.open(path, StoreConfig(replica=url, partition_ms=3_600_000, background=False)) as store:
        assert list(store.check(deep=True)) == []
        topic = store.topic("a")
        waiting = [int(message.payload) for message in topic.scheduled()]
        with topic.subscribe("reader") as reader:
            due = [int(message.payload) for message in reader.receive(100_000, timeout=0)]
        assert len({*waiting, *due}) == len(waiting) + len(due)
        if url is not None:
            shipping = shipping_of(store)
            shipping.wait_for(shipping._the_source().next_place())  # a close breaks off the first manifest
        return {"waiting": set(waiting), "due": set(due)}


def killed(store: Path, url: str, begin: int, lines: int) -> list[str]:
    """Run a program that ships, kill it after it has printed so many lines; those that it printed."""
    command = module("tests.duelog.replica.shipping_child", str(store), url, str(begin))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        printed = [line.strip() for _, line in zip(range(lines), process.stdout, strict=False)]
        process.kill()
        printed += [line.strip() for line in process.stdout if line.endswith("\n")]
        said = process.stderr.read()
    assert len(printed) >= lines, said
    return printed


@pytest.mark.parametrize("seed", range(-(-KILLS // A_STORE)))
def test_a_process_that_is_killed_ships_on_from_where_it_was(seed: int, tmp_path: Path) -> None:
    """What it was told is stored is in the store, and after the next opening in the copy; no more than that."""
    random, url, store = Random(seed), (tmp_path / "copy").as_uri(), tmp_path / "store"
    stored: set[int] = set()
    acknowledging: set[int] = set()
    acknowledged: set[int] = set()
    begin = 0
    for _ in range(min(A_STORE, KILLS)):
        printed = killed(store, url, begin, random.randrange(20, 300))
        stored |= {int(line) for line in printed if line.isdecimal()}
        acknowledging |= {int(line.split()[1]) for line in printed if line.startswith("acknowledging")}
        acknowledged |= {int(line.split()[1]) for line in printed if line.startswith("acknowledged")}
        begin = max(stored) + 6  # a batch after it may be stored, and was not told
    found = held(store, url)
    numbers = found["waiting"] | found["due"]
    assert stored - acknowledging <= numbers
    assert not acknowledged & numbers
    path = tmp_path / "restored"
    restored(Bucket(url), path)
    assert held(path) == found


def test_a_restore_that_is_killed_is_given_again(tmp_path: Path) -> None:
    """Nothing is at its directory before it is whole."""
    url, store = (tmp_path / "copy").as_uri(), tmp_path / "store"
    killed(store, url, 1, 400)
    found = held(store, url)
    random, target = Random(5), tmp_path / "restored"
    for _ in range(max(KILLS // 4, 3)):
        command = [*DUELOG, "restore", url, str(target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                process.wait(random.uniform(0.3, 1.2))
            except subprocess.TimeoutExpired:
                process.kill()
        if target.exists():
            assert held(target) == found
            break
    else:
        ok("restore", url, target)
    assert held(target) == found
    assert not target.with_name("restored.restoring").exists()
