"""Why a time partition is still there, as the store that has it open says."""

from pathlib import Path
from random import Random

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.partitions.partition import Partition
from duelog.partitions.timespan import directory_name
from duelog.sending.wal_segments import Checkpoint
from duelog.store.errors import InvalidArgument
from duelog.tools.audit import audit_store
from tests.conftest import HOUR_MS, tick_after

START_MS = 1_800_000_000_000 // HOUR_MS * HOUR_MS


def test_each_reason_in_the_life_of_a_partition(tmp_path: Path) -> None:
    """Not over; then a subscription that is behind; then a ledger that is still written to; retention; gone."""
    clock = ManualClock(START_MS)
    config = StoreConfig(partition_ms=HOUR_MS, background=False)
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as store:
        topic = store.topic("t")
        topic.send_payloads([b"a", b"b", b"c"], deliver_at=START_MS + 1_000)
        subscription = topic.subscribe("slow")
        assert [each.reason for each in store.kept_by(START_MS)] == ["not over", "pending"]
        clock.advance(2 * HOUR_MS)
        assert [(each.reason, each.topic, each.behind) for each in store.kept_by(START_MS)] == [
            ("pending", topic.name, 3)
        ]
        store.tick()
        assert [(each.reason, each.subscription, each.behind) for each in store.kept_by(START_MS)] == [
            ("subscription", "slow", 3)
        ]
        messages = subscription.receive(10)
        subscription.ack(messages[:1])
        assert [each.behind for each in store.kept_by(START_MS)] == [2]
        subscription.ack(messages)
        assert [(each.reason, each.topic) for each in store.kept_by(START_MS)] == [("open ledger", topic.name)]
        store.update_policies(topic=topic.name, retention_ms=24 * HOUR_MS)
        tick_after(store, clock, config.ledger_max_age_ms)
        assert [each.reason for each in store.kept_by(START_MS)] == ["retention"]
        store.update_policies(topic=topic.name, retention_ms=0)
        tick_after(store, clock, 48 * HOUR_MS)
        with pytest.raises(InvalidArgument, match="no time partition begins there"):
            store.kept_by(START_MS)


@pytest.mark.parametrize("seed", range(4))
def test_an_audit_of_the_closed_store_says_the_same(tmp_path: Path, seed: int) -> None:
    """Partition by partition, whatever was sent, cancelled, received and acknowledged."""
    random = Random(seed)
    clock = ManualClock(START_MS)
    config = StoreConfig(partition_ms=HOUR_MS, ledger_max_entries=20, background=False)
    kept: set[tuple[str, str, str, str, int]] = set()
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as store:
        topics = [store.topic(name) for name in "abc"]
        for topic in topics:
            for name in "xy"[: random.randint(1, 2)]:
                topic.subscribe(name).close()
            dues = [START_MS + random.randrange(4 * HOUR_MS) for _ in range(60)]
            ids = topic.send_payloads([b"x"] * 60, deliver_at=dues)
            topic.cancel_batch([each for each in ids if random.random() < 0.2])
        for _ in range(8):
            tick_after(store, clock, random.randrange(2 * HOUR_MS))
            for topic in topics:
                for name in topic.subscriptions():
                    with topic.subscribe(name) as subscription:
                        messages = subscription.receive(random.randint(1, 10), timeout=0)
                        subscription.ack([each for each in messages if random.random() < 0.9])
        store.tick()
        for each in store.partitions():
            if each.end_ms <= clock.now_ms():
                name = directory_name(each.start_ms)
                kept |= {(name, *keeper[:4]) for keeper in store.kept_by(each.start_ms)}
    audit = audit_store(tmp_path / "store", as_of_ms=clock.now_ms())
    assert {finding.code for finding in audit.findings} <= {"late", "overdue"}
    held = {(row.partition, row.reason, row.topic, row.subscription, row.behind) for row in audit.held}
    assert {each for each in kept if each[1] != "next tick"} == held
    assert {each[1] for each in held} >= {"subscription"}


def test_a_partition_that_is_deleted_while_it_is_asked_about_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be damaged."""
    clock = ManualClock(START_MS)
    config = StoreConfig(partition_ms=HOUR_MS, ledger_max_entries=1, background=False)
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as store:
        store.topic("t").send(b"a", deliver_at=START_MS + 1_000)
        subscription, partitions = store.topic("t").subscribe("s"), store._engine.storage.partitions
        find = partitions.get

        def find_and_delete(start_ms: int) -> Partition | None:
            partition = find(start_ms)
            monkeypatch.undo()
            clock.advance(2 * HOUR_MS)
            subscription.ack(subscription.receive(), durable=True)
            for _ in range(3):
                tick_after(store, clock, 1_000)
            assert store.partitions() == []
            return partition

        monkeypatch.setattr(partitions, "get", find_and_delete)
        with pytest.raises(InvalidArgument, match="no time partition"):
            store.snapshots(START_MS)


def test_a_checkpoint_passes_over_a_partition_that_is_deleted_after_it_has_begun(tmp_path: Path) -> None:
    """It failed at each try: nothing could be written any more before the store was opened again."""
    clock = ManualClock(START_MS)
    config = StoreConfig(partition_ms=HOUR_MS, ledger_max_entries=1, background=False)
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as store:
        store.topic("t").send(b"a", deliver_at=START_MS + 1_000)
        subscription, storage = store.topic("t").subscribe("s"), store._engine.storage
        checkpoint = Checkpoint(storage.main, storage.partitions, 0, lambda: None)
        clock.advance(2 * HOUR_MS)
        subscription.ack(subscription.receive(), durable=True)
        for _ in range(3):
            tick_after(store, clock, 1_000)
        assert store.partitions() == []
        checkpoint._jobs.finish()
        assert checkpoint.is_ready
