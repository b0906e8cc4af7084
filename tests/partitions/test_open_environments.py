"""Which logs of a partition are known while its environment is opened and closed."""

import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import cast
from unittest.mock import patch

import pytest

from duelog import ManualClock, StoreConfig
from duelog.partitions import partition as partition_module
from duelog.partitions import partition_set
from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.partition_set import LedgerNumbers, OpenEnvironments, most_open
from duelog.store.codec.format import PartitionState
from duelog.store.env.environment import Environment
from tests.conftest import HOUR_MS, START_MS, OpenStore, applied, present, tick_after
from tests.duelog.side_by_side import CONFIG, FIRST_MS, held, send


def test_a_log_that_is_appended_to_is_not_forgotten_while_its_environment_is_closed(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that each know its end would give out the same ids."""
    monkeypatch.setattr(partition_module, "_MOST_LOGS", 0)
    store = open_store(config=replace(CONFIG, max_open_partitions=1))
    for hour in (0, 1):
        send(store, hour, hour)
    partitions, topic_id = store._engine.storage.partitions, store.topic("a")._existing().topic_id
    first, second = partitions.get(FIRST_MS), partitions.get(FIRST_MS + HOUR_MS)
    assert first is not None
    assert second is not None
    assert partitions.begin_append(FIRST_MS, START_MS, topic_id) is first
    first.log_to_append(topic_id, partitions.new_ledger)
    partitions.end_appends([first])
    with partitions.lease(first):
        pass
    begun: list[PartitionLog] = []
    close_idle = OpenEnvironments.close_idle

    def beside(self: OpenEnvironments, chosen: Sequence[Partition]) -> None:
        if first in chosen and not begun:
            leased = partitions.begin_append(FIRST_MS, START_MS, topic_id)
            assert leased is first
            begun.append(leased.log_to_append(topic_id, partitions.new_ledger))
        close_idle(self, chosen)

    with patch.object(OpenEnvironments, "close_idle", beside), partitions.lease(second):
        pass
    (log,) = begun
    assert partitions.begin_append(FIRST_MS, START_MS, topic_id) is first
    assert first.log_to_append(topic_id, partitions.new_ledger) is log
    partitions.end_appends([first, first])


def test_a_partition_that_this_process_made_is_not_read_for_logs_that_it_has_not(open_store: OpenStore) -> None:
    """They are all in memory; once the store was closed they are on disk."""
    store = open_store(config=CONFIG)
    send(store, 0)
    with patch.object(Partition, "_find_log", lambda *_: pytest.fail("it was read")):
        store.topic("b").send(b"1", deliver_at=FIRST_MS + 1)
        store.topic("c").send_payloads([b"2", b"3"], deliver_at=[FIRST_MS + 1, FIRST_MS + 2])
    store.close()
    again = open_store(config=CONFIG)
    assert send(again, 1).entry_id == 1
    ids = again.topic("c").send_payloads([b"4", b"5"], deliver_at=[FIRST_MS + 1, FIRST_MS + 2])
    assert [each.entry_id for each in ids] == [2, 3]
    assert list(again.check(deep=True)) == []


def test_a_checkpoint_of_more_partitions_than_may_be_open_leaves_open_those_that_are_in_use(
    open_store: OpenStore,
) -> None:
    """Each would close another before it is used again, and keep some MB until then."""
    store = open_store(config=replace(CONFIG, max_open_partitions=2))
    partitions = store._engine.storage.partitions
    for hours, left in ((2, 2), (3, 1)):
        for hour in range(hours):
            send(store, hour, hour)
        first = present(partitions.get(FIRST_MS))
        with partitions.lease(first):
            applied(store)
            assert (first.is_open, partitions.open_count()) == (True, left)


def test_of_the_partitions_that_stay_open_few_were_written_to(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB keeps pages for those; one that is only read costs descriptors."""
    monkeypatch.setattr(partition_set, "_MOST_WRITTEN", 2)
    store = open_store(config=CONFIG)
    for hour in range(5):
        send(store, hour, hour)
    applied(store)
    store.close()
    again = open_store(config=CONFIG)
    partitions = again._engine.storage.partitions
    assert len(held(again)) == 5
    assert partitions.open_count() == 5
    for hour in range(5):
        send(again, hour, hour)
        applied(again)
    last = [FIRST_MS + hour * HOUR_MS for hour in (3, 4)]
    assert [each.start_ms for each in partitions if each.takes_commits] == last
    assert partitions.open_count() == 2


def test_a_partition_with_unapplied_rows_is_opened_for_writing_at_once(open_store: OpenStore) -> None:
    """A checkpoint of many partitions would open each of them twice."""
    store = open_store(config=CONFIG)
    for hour in range(2):
        send(store, hour, hour)
        applied(store)
    store.close()
    again = open_store(config=replace(CONFIG, max_open_partitions=1))
    first = present(again._engine.storage.partitions.get(FIRST_MS))
    for hour in range(2):
        send(again, hour, hour)
    assert not first.is_open
    with again._engine.storage.partitions.lease(first):
        assert first.takes_commits


@pytest.mark.parametrize(
    ("descriptors", "config", "expected"),
    [
        (1_024, StoreConfig(), 64),
        (6_400, StoreConfig(), 400),
        (1_048_576, StoreConfig(), 1_024),
        (resource.RLIM_INFINITY, StoreConfig(), 1_024),
        (6_400, StoreConfig(map_bytes=1 << 40), 64),
        (6_400, StoreConfig(max_open_partitions=3), 3),
    ],
)
def test_as_many_partitions_stay_open_as_the_descriptors_and_addresses_of_the_process_allow(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, config: StoreConfig, expected: int
) -> None:
    """A sixteenth of the descriptors, and 64 at the least; what is configured counts alone."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (descriptors, descriptors))
    assert most_open(config) == expected


def test_a_partition_that_is_being_appended_to_does_not_close(open_store: OpenStore, clock: ManualClock) -> None:
    """Its end has passed, and nothing in it is left to fire: what is on its way would never."""
    store = open_store(config=CONFIG)
    send(store, 0)
    partitions, topic_id = store._engine.storage.partitions, store.topic("a")._existing().topic_id
    begun = present(partitions.begin_append(FIRST_MS, START_MS, topic_id))
    clock.set(FIRST_MS + HOUR_MS)
    assert tick_after(store, clock, 0).closed == 0
    assert begun.state is PartitionState.OPEN
    partitions.end_appends([begun])
    assert tick_after(store, clock, 1_000).closed == 1


def test_ids_of_ledgers_are_reserved_by_one_thread_at_a_time() -> None:
    """Two would take the last one together."""
    locked: list[bool] = []

    class Main:
        def write(self, _: object) -> int:
            locked.append(numbers._lock.locked())
            return 100 * len(locked)

    numbers = LedgerNumbers(cast(Environment, Main()))
    assert numbers.next() == 100
    numbers.reserve(64)
    assert (numbers.next(), locked) == (101, [True, True])
