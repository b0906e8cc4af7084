"""A healthy store of many topics, partitions and subscriptions, some of it trimmed and compacted, for audits."""

import random
from pathlib import Path
from typing import Any

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.tools.audit.audit_tables import BEHIND_TIME
from duelog.tools.compact_store import compact_store

HOUR_MS = 3_600_000
START_MS = 1_790_000_000_000 // HOUR_MS * HOUR_MS
CLOSED = 16
"""Partitions that are closed and held at the end; three more are open."""
COMPACTED = 0.52
"""Partitions of which so much is needed no more are compacted: some of them."""
CONFIG = StoreConfig(
    partition_ms=HOUR_MS, ledger_max_entries=50, snapshot_every_entries=60, run_entries=8, background=False
)
SLOW = tuple(f"slow-{number}" for number in range(4))
"""Topics with a subscription that acknowledges nothing: nothing of theirs is trimmed."""
TRIMMED = ("trimmed-0", "trimmed-1")
"""Topics whose one subscription acknowledges everything."""


def full(topic: str) -> str:
    """The topic's full name."""
    return f"persistent://public/default/{topic}"


def build(path: Path, seed: int = 5) -> int:
    """Make the store; returns the time at its end."""
    source = random.Random(seed)
    clock = ManualClock(START_MS - 1)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        for name in SLOW:
            store.topic(name).subscribe("slow").close()
        fast = [store.topic(name).subscribe("fast") for name in (*SLOW, *TRIMMED)]
        for hour in range(CLOSED + 3):
            for name in (*SLOW, *TRIMMED, "unheard", "gone"):
                dues = [START_MS + hour * HOUR_MS + source.randrange(HOUR_MS) for _ in range(source.randint(20, 30))]
                messages = [Message(source.randbytes(source.choice((5, 80, 400))), deliver_at=due) for due in dues]
                ids = store.topic(name).send_batch(messages)
                if name != "gone":
                    assert store.topic(name).cancel(ids[3])
                    assert store.topic(name).reschedule(ids[5], deliver_at=dues[5] + HOUR_MS)
            store.topic("slow-0").send(b"at once")
        for _ in range(CLOSED * 4 + 2):
            clock.advance(HOUR_MS // 4)
            store.tick()
            for consumer in fast:
                while batch := consumer.receive(1000, timeout=0):
                    consumer.ack(batch)
            store.flush()
        store.topic("slow-1").send_batch([Message(b"late", deliver_at=clock.now_ms() + 60_000 * n) for n in range(70)])
        store.tick()
        store.delete_topic("gone")
        store.tick()
        assert list(store.check(deep=True)) == []
    outcomes = {each.outcome for each in compact_store(path, min_dead_ratio=COMPACTED).partitions}
    assert outcomes == {"adopted", "skipped"}
    return clock.now_ms()


def damage(findings: list[Any]) -> list[Any]:
    """Findings, as rows or as JSON, but for those of messages that come late, which hold of every store on a clock."""
    return [each for each in findings if (each["code"] if isinstance(each, dict) else each.code) not in BEHIND_TIME]
