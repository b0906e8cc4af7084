"""Preallocated space of a file that grows little by little: there, bounded, and never in the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from duelog.store.codec.format import run_key
from duelog.store.config import Durability
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.files import datafile

Open = Callable[[Durability], Environment]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Make an environment of a durability; it is closed at the end."""
    made: list[Environment] = []

    def make(durability: Durability) -> Environment:
        made.append(Environment(tmp_path / durability, name="e", durability=durability, create=True))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def fill(environment: Environment, commits: int, size: int, first: int = 0) -> list[int]:
    """Commit values of a size one by one; after each, the bytes of the file that LMDB does not use."""
    early = []
    for number in range(first, first + commits):

        def put(transaction: Transaction, number: int = number) -> None:
            transaction.raw.put(run_key(1, number), bytes(size))

        environment.write(put)
        found = datafile.inspect(environment.path)
        early.append(found.file_bytes - (found.last_page + 1) * found.page_bytes)
    return early


@pytest.mark.parametrize("durability", ["commit", "relaxed"])
def test_small_commits_find_the_file_longer_than_they_need(opened: Open, durability: Durability) -> None:
    """After the first few, nearly every commit overwrites; the space is bounded, and the data is the data."""
    environment = opened(durability)
    early = fill(environment, 400, 1_000)
    assert sum(space > 0 for space in early[32:]) > 350
    assert max(early) <= max(64 << 10, (environment.path / "data.mdb").stat().st_size // 8)
    assert environment.find_problems() == []
    environment.close()
    again = Environment(environment.path, name="e")
    with again.read() as raw:
        assert [bytes(raw.get(run_key(1, number)) or b"") for number in (0, 399)] == [bytes(1_000)] * 2
    again.close()


@pytest.mark.parametrize(("durability", "size"), [("commit", 100_000), ("none", 1_000)])
def test_nothing_is_preallocated_where_it_saves_nothing(opened: Open, durability: Durability, size: int) -> None:
    """Large commits would write everything twice; without syncing no writer waits."""
    assert max(fill(opened(durability), 100, size)) == 0


def test_a_disk_that_is_nearly_full_is_left_to_the_data(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that turns out to be full, or a file that may not grow, does not fail a commit."""
    environment = opened("commit")
    space = os.statvfs("/")
    with monkeypatch.context() as patch:
        patch.setattr(
            "duelog.store.env.upkeep.os.fstatvfs",
            lambda descriptor: os.statvfs_result((*space[:4], 100, *space[5:])),
        )
        assert max(fill(environment, 100, 1_000)) == 0

    def refuse(descriptor: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("duelog.store.env.upkeep.os.pwrite", refuse)
        assert max(fill(environment, 100, 1_000, 100)) == 0
    assert max(fill(environment, 100, 1_000, 200)) > 0


def test_an_idle_environment_is_not_made_longer(opened: Open) -> None:
    """Commits that reuse pages need no preallocated space."""
    environment = opened("commit")
    fill(environment, 10, 100)
    size = (environment.path / "data.mdb").stat().st_size
    for _ in range(100):
        environment.write(lambda transaction: transaction.raw.put(b"k", b"v"))
    found = datafile.inspect(environment.path)
    assert found.file_bytes - size <= 16 * found.page_bytes
