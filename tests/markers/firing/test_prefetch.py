"""Files of partitions that have begun are read ahead: all of them, in time, in bounds, and in nobody's way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.markers.firing import loaded
from duelog.markers.firing import prefetch as warming
from duelog.markers.firing.loading import Loading
from duelog.markers.firing.prefetch import Warming
from duelog.store.env import eviction as behind
from duelog.store.env import page_cache, upkeep
from tests.conftest import START_MS, OpenStore
from tests.store.page_cache_calls import (
    DROP,
    FETCH,
    Calls,
    cached,
    joined,
    record,
    skip_unless_dropped_pages_go,
)
from tests.store.shared_commits import until

PIECE = 64 << 10
HOUR_MS = 3_600_000
CONFIG = StoreConfig(partition_ms=HOUR_MS, preload_ms=60_000)
NEXT_MS = START_MS - START_MS % HOUR_MS + HOUR_MS
"""Start of the first partition that has not begun."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(behind, "KEPT_BYTES", PIECE)
    monkeypatch.setattr(upkeep, "COMMITS_A_LOOK", 1)
    monkeypatch.setattr(warming, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(page_cache, "_READ_BYTES", PIECE // 4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the kernel is asked for."""
    return record(monkeypatch)


def directory(tmp_path: Path, name: str, pieces: int) -> Path:
    """A partition's directory whose file has so many pieces."""
    made = tmp_path / name
    made.mkdir()
    with (made / "data.mdb").open("wb") as file:
        file.truncate(pieces * PIECE)
    return made


def load(warm: Warming, start_ms: int, where: Path, dropped: int = 0) -> int:
    """Load a partition; in how many steps."""
    return len(list(warm.begun(start_ms, where, dropped, iter([]))))


def steps(warm: Warming) -> int:
    """Go on until nothing is left; in how many steps."""
    count = 0
    while warm.is_due():
        warm.step()
        count += 1
        assert count < 1_000
    return count


# -- which bytes, in which order ------------------------------------------------------------------


def test_a_file_is_asked_for_from_beginning_to_end_in_pieces(tmp_path: Path, calls: Calls) -> None:
    """Each byte once, in calls that a kernel with little read-ahead serves in full."""
    where = directory(tmp_path, "a", 5)
    os.truncate(where / "data.mdb", 5 * PIECE + 100)
    warm = Warming()
    assert load(warm, 1, where) == 0
    assert calls == []
    assert steps(warm) == 6
    ranges = calls.ranges(where / "data.mdb", FETCH)
    assert len(ranges) == len(calls) == 21
    assert joined(ranges) == (0, 5 * PIECE + 100)
    assert max(end - begin for begin, end in ranges) == PIECE // 4
    warm.step()
    assert len(calls) == 21


def test_what_was_dropped_is_asked_for_before_the_partition_is_loaded(tmp_path: Path, calls: Calls) -> None:
    """Loading waits for it alone; what is left comes later."""
    where = directory(tmp_path, "a", 5)
    warm = Warming()
    asked_by_then: list[int] = []

    def loading() -> Iterator[bool]:
        asked_by_then.append(joined(calls.ranges(where / "data.mdb", FETCH))[1])
        yield True

    assert list(warm.begun(1, where, 2 * PIECE, loading())) == [False, False, True]
    assert asked_by_then == [2 * PIECE]
    assert steps(warm) == 3
    assert joined(calls.ranges(where / "data.mdb", FETCH)) == (0, 5 * PIECE)


def test_a_step_ends_when_its_time_is_over_and_the_next_goes_on(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel is slow to take what it is asked for, a step is one call."""
    now = iter(range(1_000))
    monkeypatch.setattr("duelog.store.env.page_cache.time.perf_counter", lambda: next(now))
    where = directory(tmp_path, "a", 2)
    warm = Warming()
    load(warm, 1, where)
    assert steps(warm) == len(calls) == 8
    assert joined(calls.ranges(where / "data.mdb", FETCH)) == (0, 2 * PIECE)


# -- bounds ---------------------------------------------------------------------------------------


def test_all_files_together_stay_within_the_limit_until_one_is_deleted(tmp_path: Path, calls: Calls) -> None:
    """A backlog of days that have closed is read in order, as far as there is room; deleting makes some."""
    warm = Warming(6 * PIECE)
    where = [directory(tmp_path, str(number), 4) for number in range(3)]
    for number in range(3):
        load(warm, number, where[number])
        warm.closed(number)
    assert steps(warm) == 6
    asked = [sum(end - begin for begin, end in calls.ranges(each / "data.mdb", FETCH)) // PIECE for each in where]
    assert asked == [4, 2, 0]
    warm.forget(0)
    assert steps(warm) == 4
    warm.forget(1)
    assert steps(warm) == 2
    warm.forget(2)
    assert not warm.is_due()
    assert warm._counted == 0


def test_what_was_dropped_is_not_asked_for_past_the_limit_either(tmp_path: Path, calls: Calls) -> None:
    """Loading then reads the rest as it comes to it."""
    warm = Warming(3 * PIECE)
    assert load(warm, 1, directory(tmp_path, "a", 5), dropped=4 * PIECE) == 3
    assert not warm.is_due()
    assert len(calls) == 12


def test_one_that_has_not_closed_gets_the_room_of_those_that_have(tmp_path: Path, calls: Calls) -> None:
    """Somebody who is slow to read days that are over does not keep today's from being read ahead."""
    warm = Warming(4 * PIECE)
    for number in range(2):
        load(warm, number, directory(tmp_path, str(number), 3))
        steps(warm)
        warm.closed(number)
    assert not warm.is_due()
    today = directory(tmp_path, "today", 3)
    load(warm, 2, today)
    assert steps(warm) == 3
    assert joined(calls.ranges(today / "data.mdb", FETCH)) == (0, 3 * PIECE)
    assert warm._counted <= 4 * PIECE
    tomorrow = directory(tmp_path, "tomorrow", 3)
    load(warm, 3, tomorrow)
    steps(warm)
    assert joined(calls.ranges(tomorrow / "data.mdb", FETCH)) == (0, PIECE)  # today has not closed


def test_a_quarter_of_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine does not say how much it has, nothing is read ahead."""
    pages = {"SC_PHYS_PAGES": 4_000, "SC_PAGE_SIZE": 4_096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert Warming()._limit == 4_000 * 4_096 // 4

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    assert Warming()._limit == 0


@pytest.mark.parametrize("fault", ["gone", "refused", "missing call"])
def test_a_file_that_cannot_be_asked_for_is_done_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It ends as if it had been: the messages are read when somebody wants them."""
    where = directory(tmp_path, "a", 3)
    warm = Warming()
    load(warm, 1, where)
    if fault == "gone":
        (where / "data.mdb").unlink()
    elif fault == "refused":

        def refuse(*arguments: int) -> None:
            raise OSError("not today")

        monkeypatch.setattr(os, "posix_fadvise", refuse)
    else:
        monkeypatch.delattr(os, "posix_fadvise")
    assert steps(warm) == 3
    assert load(warm, 2, tmp_path / "nowhere", PIECE) == 0
    assert not warm.is_due()


# -- in a store -----------------------------------------------------------------------------------


def send(store: DelayedStore, due_ms: int, batches: int = 30) -> list[bytes]:
    """Batches of messages of 1 KiB due from an instant on; their payloads, in the order in which they are due."""
    payloads = [b"%015d" % number + bytes(1_009) for number in range(20 * batches)]
    for at in range(0, len(payloads), 20):
        some = payloads[at : at + 20]
        store.topic("t").send_payloads(some, deliver_at=[due_ms + at + place for place in range(len(some))])
    return payloads


def data_file(store: DelayedStore, start_ms: int) -> Path:
    """The file of a partition."""
    partition = store._engine.partitions.get(start_ms)
    assert partition is not None
    return partition.path / "data.mdb"


def receive_all(store: DelayedStore) -> list[bytes]:
    """All that is due, by one subscription."""
    found = []
    with store.topic("t").subscribe("reader") as reader:
        while batch := reader.receive(100, timeout=0):
            found += [message.payload for message in batch]
            reader.ack(batch)
    return found


def test_a_day_to_come_is_dropped_and_read_ahead_when_it_begins(
    open_store: OpenStore, clock: ManualClock, calls: Calls
) -> None:
    """Its file alone, up to where it is kept; from the minute before it begins on nothing of it is dropped."""
    store = open_store(config=CONFIG)
    with store.topic("t").subscribe("reader"):
        pass
    for number in range(20):
        store.topic("t").send(b"due" * 10_000 + b"%d" % number)  # into the main log
    today = send(store, NEXT_MS - 1_000)
    tomorrow = send(store, NEXT_MS)
    store.tick()
    file = data_file(store, NEXT_MS)
    dropped = calls.ranges(file, DROP)
    assert [call for call in calls if call.advice == DROP and call.inode != file.stat().st_ino] == []
    (_, end) = joined(dropped)
    assert end > file.stat().st_size / 2
    assert calls.ranges(file, FETCH) == []
    clock.set(NEXT_MS - CONFIG.preload_ms)
    store.tick()
    assert joined(calls.ranges(file, FETCH)) == (0, file.stat().st_size)
    tomorrow += send(store, NEXT_MS + 10_000)
    assert calls.ranges(file, DROP) == dropped
    clock.set(NEXT_MS + HOUR_MS)
    found = receive_all(store)
    assert [payload for payload in found if not payload.startswith(b"due")] == today + tomorrow
    assert len(found) == 20 + len(today + tomorrow)


def test_a_day_that_has_begun_is_not_dropped_though_it_is_not_loaded(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn comes when an earlier one closes; and a store just opened loads nothing before its first tick."""
    monkeypatch.setattr(loaded, "LOADED_AT_ONCE", 0)
    store = open_store(config=CONFIG)
    clock.set(NEXT_MS - CONFIG.preload_ms)
    send(store, NEXT_MS)
    assert store._engine.firing.loaded_starts() == []
    assert calls == []
    send(store, NEXT_MS + HOUR_MS)
    assert calls.ranges(data_file(store, NEXT_MS + HOUR_MS), DROP)


def test_what_was_dropped_before_its_environment_was_closed_is_asked_for_first(
    open_store: OpenStore, clock: ManualClock, calls: Calls
) -> None:
    """Environments come and go where there are many partitions."""
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS, max_open_partitions=1))
    send(store, NEXT_MS)
    file = data_file(store, NEXT_MS)
    (_, end) = joined(calls.ranges(file, DROP))
    partition = store._engine.partitions.get(NEXT_MS)
    assert partition is not None
    send(store, NEXT_MS + HOUR_MS, 1)
    store.tick()
    assert not partition.is_open
    with store._engine.partitions.lease(partition):
        assert partition.keep_pages() == end


def test_an_environment_that_is_opened_again_is_told_again_to_keep(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that has begun and waits for its turn may be closed and opened in between."""
    monkeypatch.setattr(loaded, "LOADED_AT_ONCE", 0)
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS, max_open_partitions=1))
    clock.set(NEXT_MS)
    send(store, NEXT_MS + 1_000)
    partition = store._engine.partitions.get(NEXT_MS)
    assert partition is not None
    send(store, NEXT_MS + HOUR_MS, 1)
    store.tick()
    assert not partition.is_open
    send(store, NEXT_MS + 1_000)
    assert calls == []


@pytest.mark.parametrize("snapshot", [True, False], ids=["snapshot", "no snapshot"])
def test_a_partition_is_loaded_when_what_was_dropped_of_it_has_been_asked_for(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    """And all of it where there is no snapshot: loading would wait for the disk at each run."""
    original = Loading.steps
    asked: list[tuple[int, int]] = []

    def listen(loading: Loading) -> Iterator[bool]:
        yield False
        asked.append(joined(calls.ranges(loading.partition.path / "data.mdb", FETCH)))
        yield from original(loading)

    monkeypatch.setattr(Loading, "steps", listen)
    if snapshot:
        monkeypatch.setattr(Loading, "reads_all", lambda _: False)
    store = open_store(config=CONFIG)
    send(store, NEXT_MS)
    (_, end) = joined(calls.ranges(data_file(store, NEXT_MS), DROP))
    size = data_file(store, NEXT_MS).stat().st_size
    assert end < size
    clock.set(NEXT_MS - CONFIG.preload_ms)
    store.tick()
    assert asked == [(0, end if snapshot else size)]


def test_a_day_that_an_earlier_process_wrote_is_asked_for_before_it_is_loaded(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process may have dropped it. With a snapshot its first part is all that is waited for."""
    original = Loading.reads_all
    found: list[bool] = []

    def listen(loading: Loading) -> bool:
        found.append(original(loading))
        return found[-1]

    monkeypatch.setattr(Loading, "reads_all", listen)
    config = StoreConfig(partition_ms=HOUR_MS, preload_ms=60_000, snapshot_every_entries=50)
    store = open_store(config=config)
    send(store, NEXT_MS)
    store.close()
    again = open_store(config=config)
    clock.set(NEXT_MS)
    again._engine.slice()
    assert joined(calls.ranges(data_file(again, NEXT_MS), FETCH))[0] == 0
    again.tick()
    again.close()
    open_store(config=config).tick()
    assert found == [True, False]


def test_a_partition_that_closed_counts_and_makes_room(open_store: OpenStore, clock: ManualClock, calls: Calls) -> None:
    """Its messages wait in the main log for a subscription that does not read them."""
    store = open_store(config=CONFIG)
    with store.topic("t").subscribe("reader"):
        pass
    send(store, NEXT_MS - 50_000, 3)
    store.tick()
    warm = store._engine.firing.warming
    assert warm._open == {NEXT_MS - HOUR_MS}
    clock.advance(3 * HOUR_MS)
    store.tick()
    assert len(store._engine.partitions) == 1
    assert warm._open == set()
    assert warm._counted > 0


def test_what_is_due_is_fired_between_two_steps(
    open_store: OpenStore, clock: ManualClock, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that takes many slices makes nothing late, and its turn comes when there is nothing else to do."""
    monkeypatch.setattr(warming, "PIECE_BYTES", 4_096)
    monkeypatch.setattr(Loading, "reads_all", lambda _: False)
    store = open_store(config=CONFIG)
    send(store, NEXT_MS - 50_000)
    while store._engine.firing.loaded_starts() == [] or store._engine.firing.settling.is_due():
        store._engine.slice()
    counts = []
    for passed_ms in (150, 300, 450):
        clock.set(NEXT_MS - 50_000 + passed_ms)
        before = len(calls)
        result, more = store._engine.slice()
        assert more
        assert len(calls) <= before + 1
        counts.append(result.fired)
    assert counts == [151, 150, 150]
    assert store._engine.firing.warming.is_due()
    store.tick()
    assert not store._engine.firing.warming.is_due()
    assert joined(calls.ranges(data_file(store, NEXT_MS - HOUR_MS), FETCH))[0] == 0


def test_a_partition_that_is_deleted_no_longer_counts(open_store: OpenStore, clock: ManualClock, calls: Calls) -> None:
    """Its pages have gone with its file."""
    store = open_store(config=CONFIG)
    with store.topic("t").subscribe("reader"):
        pass
    send(store, NEXT_MS - 50_000, 3)
    store.tick()
    warm = store._engine.firing.warming
    assert warm._counted > 0
    clock.advance(3 * HOUR_MS)
    receive_all(store)
    for _ in range(5):
        clock.advance(48 * HOUR_MS)
        store.tick()
    assert len(store._engine.partitions) == 0
    assert (warm._counted, warm._files, warm._left, warm._open) == (0, {}, {}, set())


def test_the_kernel_has_it_again_when_the_day_begins(open_store: OpenStore, clock: ManualClock, tmp_path: Path) -> None:
    """It reads while nobody waits for it; all of it is there soon."""
    skip_unless_dropped_pages_go(tmp_path)
    store = open_store(config=CONFIG)
    send(store, NEXT_MS)
    store.tick()
    file = data_file(store, NEXT_MS)
    limit = file.stat().st_size // 4_096 * 4_096
    assert cached(file, 0, limit) < 0.5
    clock.set(NEXT_MS - CONFIG.preload_ms)
    store.tick()
    until(lambda: cached(file, 0, limit) == 1.0)
