"""Which logs of a partition are known while its environment is opened and closed."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from duelog.partitions import partition as partition_module
from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.partition_set import OpenEnvironments
from tests.conftest import START_MS, OpenStore, applied, present
from tests.duelog.side_by_side import CONFIG, FIRST_MS, HOUR_MS, send


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
    partitions.end_append(first)
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
