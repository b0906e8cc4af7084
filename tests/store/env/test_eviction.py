"""Eviction: what is written to an environment leaves the page cache: how far, when, and when not."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from duelog.store.codec.format import run_key
from duelog.store.config import Durability
from duelog.store.env import page_cache
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import LmdbTransaction
from duelog.store.files import pages
from tests.store.page_cache_calls import DROP, FETCH, Calls, joined, record

PIECE, KEPT = 64 << 10, 256 << 10
VALUE_BYTES = 10_000
ROOTS = 2 * 4096

Open = Callable[..., Environment]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(page_cache, "KEPT_BYTES", KEPT)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls to the kernel."""
    return record(monkeypatch)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Make an environment, by default with eviction; it is closed at the end."""
    made: list[Environment] = []

    def make(name: str = "e", *, create: bool = True, evicts: bool = True, **settings: Any) -> Environment:
        made.append(Environment(tmp_path / name, name=name, create=create, evicts=evicts, **settings))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def fill(environment: Environment, commits: int, first: int = 0) -> None:
    """Commit so many values one by one."""
    for number in range(first, first + commits):

        def put(transaction: LmdbTransaction, number: int = number) -> None:
            transaction.raw.put(run_key(1, number), bytes(VALUE_BYTES))

        environment.commit(put)


def used_bytes(environment: Environment) -> int:
    """Bytes of the file that LMDB uses."""
    found = pages.inspect(environment.path)
    return (found.last_page + 1) * found.page_bytes


def data_file(environment: Environment) -> Path:
    """The file that LMDB writes to."""
    return environment.path / "data.mdb"


@pytest.mark.parametrize("durability", ["commit", "relaxed"])
def test_what_is_far_before_the_end_is_evicted_once_and_in_order(
    opened: Open, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """All of it but the root pages, in whole pieces, never nearer to the end than what is kept."""
    environment = opened(durability=durability)
    used: list[int] = []
    calls = record(monkeypatch, lambda asked: used.append(used_bytes(environment)))
    fill(environment, 400)
    assert {call.advice for call in calls} == {DROP}
    ranges = calls.ranges(data_file(environment), DROP)
    assert len(ranges) == len(calls) > 10
    begin, end = joined(ranges)
    assert begin == ROOTS
    assert all(
        end % PIECE == 0 and end <= at_that_time - KEPT for (_, end), at_that_time in zip(ranges, used, strict=True)
    )
    a_look = 16 * 16_384
    assert end > used_bytes(environment) - KEPT - PIECE - a_look


def test_little_is_not_dropped_and_what_follows_is_dropped_from_where_it_ended(opened: Open, calls: Calls) -> None:
    """Nothing before there is a piece more than is kept; commits that add nothing drop nothing."""
    environment = opened()
    fill(environment, 16)
    assert used_bytes(environment) < KEPT
    assert calls == []
    fill(environment, 80, 16)
    before = list(calls)
    assert before
    for _ in range(100):
        environment.commit(lambda transaction: transaction.raw.put(b"k", b"v"))
    assert len(calls) <= len(before) + 1
    fill(environment, 80, 96)
    assert len(calls) > len(before) + 1
    joined(calls.ranges(data_file(environment), DROP))


def test_nothing_is_dropped_once_pages_are_to_be_kept(opened: Open, calls: Calls) -> None:
    """It may be said more than once, also of one that has dropped nothing."""
    environment = opened()
    fill(environment, 200)
    count = len(calls)
    assert count
    environment.stop_evicting()
    environment.stop_evicting()
    fill(environment, 200, 200)
    assert len(calls) == count
    opened("other").stop_evicting()


@pytest.mark.parametrize("settings", [{"evicts": False}, {"durability": "none"}])
def test_nothing_is_dropped_where_it_was_not_asked_for_or_is_not_on_disk(
    opened: Open, calls: Calls, settings: dict[str, Any]
) -> None:
    """The main environment, and one whose commits leave their pages dirty."""
    environment = opened(**settings)
    fill(environment, 200)
    assert calls == []
    environment.stop_evicting()


def test_one_that_is_opened_again_drops_from_the_beginning(opened: Open, calls: Calls) -> None:
    """Pages kept at the end when it was closed would else stay for ever."""
    environment = opened()
    fill(environment, 100)
    environment.close()
    calls.clear()
    again = opened(create=False)
    fill(again, 16, 100)
    assert joined(calls.ranges(data_file(again), DROP))[0] == ROOTS


@pytest.mark.parametrize("where", ["open", "posix_fadvise", "no such call"])
def test_a_kernel_that_refuses_fails_no_commit(opened: Open, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It is a hint: what cannot be opened or asked for stays where it is; some systems have no such call."""
    environment = opened()
    refused = []
    original = os.open

    def refuse(what: Any, *rest: Any) -> int:
        if where == "open" and not str(what).endswith("data.mdb"):
            return original(what, *rest)
        refused.append(what)
        raise OSError("not today")

    with monkeypatch.context() as patch:
        if where == "no such call":
            patch.delattr(os, "posix_fadvise")
        else:
            patch.setattr(os, where, refuse)
        fill(environment, 200)
    assert len(refused) > 3 or where == "no such call"
    with environment.read() as raw:
        assert raw.raw.stat()["entries"] == 200


def test_eviction_waits_for_readers_and_loses_nothing_by_it(opened: Open, calls: Calls) -> None:
    """Pages that are mapped are not dropped, and the map cannot move while a thread reads."""
    environment = opened()
    with environment.read() as raw:
        writer = Thread(target=fill, args=(environment, 100))
        writer.start()
        writer.join()
        assert raw.raw.stat()["entries"] == 0
        assert calls == []
    fill(environment, 16, 100)
    assert len(calls) == 1
    assert joined(calls.ranges(data_file(environment), DROP))[0] == ROOTS


@pytest.mark.parametrize("physical", [1 << 30, 400_000])
def test_copying_a_file_has_the_kernel_read_it_first_as_far_as_a_quarter_of_memory(
    opened: Open, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, physical: int
) -> None:
    """Else each page of what was dropped would be waited for by itself."""
    monkeypatch.setattr(page_cache, "physical_bytes", lambda: physical)
    environment = opened()
    fill(environment, 64)
    file = environment.path / "data.mdb"
    size = file.stat().st_size
    (tmp_path / "copy").mkdir()
    held = environment.hold()
    environment.copy(tmp_path / "copy", held)
    held.release()
    assert joined(calls.ranges(file, FETCH)) == (0, min(size, physical // 4))
    assert size > 100_000
    with opened("copy", create=False).read() as raw, environment.read() as own:
        assert raw.raw.stat()["entries"] == own.raw.stat()["entries"]


@pytest.mark.parametrize("fault", ["missing file", "refused", "missing call"])
def test_a_file_that_cannot_be_prefetched_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It is a hint: prefetching ends without an error."""
    file = tmp_path / "data.mdb"
    refused = []

    def refuse(*arguments: int) -> None:
        refused.append(arguments)
        raise OSError("not today")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    if fault != "missing file":
        file.write_bytes(bytes(1 << 20))
    if fault == "missing call":
        monkeypatch.delattr(os, "posix_fadvise")
    assert len(list(page_cache.prefetch(file))) == len(refused) == (fault == "refused")


def test_a_step_of_prefetching_ends_when_its_time_is_over(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel is slow to take what it is asked for, a step is one call; the next goes on after it."""
    now = iter(range(1_000))
    monkeypatch.setattr("duelog.store.env.page_cache.time.perf_counter", lambda: next(now))
    file = tmp_path / "data.mdb"
    file.write_bytes(bytes(1_000_000))
    assert len(list(page_cache.prefetch(file))) == len(calls) == 8
    assert joined(calls.ranges(file, FETCH)) == (0, 1_000_000)
