"""Why a time partition is still there, as the store that has it open says."""

from __future__ import annotations

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.store.errors import InvalidArgument

HOUR_MS = 3_600_000
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
        clock.advance(config.ledger_max_age_ms)
        store.tick()
        assert [each.reason for each in store.kept_by(START_MS)] == ["retention"]
        store.update_policies(topic=topic.name, retention_ms=0)
        clock.advance(48 * HOUR_MS)
        store.tick()
        with pytest.raises(InvalidArgument, match="no time partition begins there"):
            store.kept_by(START_MS)
