"""Helpers of the compaction tests: days that are sent and closed, a partition that is compacted by hand."""

from collections.abc import Iterator
from contextlib import contextmanager

from duelog import DelayedStore, ManualClock, MessageId
from duelog.cleanup.compaction import Staged, hand_over, stage_generation
from duelog.cleanup.compaction_plan import CompactionPlan, partition_logs, plan_generation
from duelog.cleanup.log_claims import claims_of_logs, read_claims
from duelog.partitions.partition import Partition
from duelog.store.env.environment import Environment
from tests.conftest import DAY_MS, present

DAY = 1_790_035_200_000
"""2026-09-22T00:00:00Z, the day after the test clock begins."""


def send_day(store: DelayedStore, topic: str, count: int, day: int = 0) -> list[MessageId]:
    """Messages that are due one by one on a day."""
    return [store.topic(topic).send(b"%d" % at, deliver_at=DAY + day * DAY_MS + at * 1000) for at in range(count)]


def close_day(store: DelayedStore, clock: ManualClock, day: int = 0) -> None:
    """Let a day pass, and everything in it fire."""
    clock.set(max(clock.now_ms(), DAY + (day + 1) * DAY_MS))
    store.tick()


def partition_of(store: DelayedStore, day: int = 0) -> Partition:
    """A day's partition."""
    partition = present(store._engine.storage.partitions.get(DAY + day * DAY_MS))
    return partition


@contextmanager
def source_of(store: DelayedStore, day: int = 0) -> Iterator[Environment]:
    """The environment of a day's partition, as an open store has it."""
    with store._engine.storage.partitions.lease(partition_of(store, day)) as partition:
        yield partition.environment


def plan_compaction(main: Environment, partition: Partition) -> CompactionPlan:
    """Plan what can be dropped from a closed partition, by the claims as of now. REQUIRES: a lease."""
    with partition.environment.read() as raw:
        logs = partition_logs(raw)
    with main.read() as raw:
        known = read_claims(raw, main.name, [partition.start_ms])[partition.start_ms]
        claims = claims_of_logs(raw, known, logs)
    return plan_generation(partition.environment, claims)


def plan_of(store: DelayedStore, day: int = 0) -> CompactionPlan:
    """Plan the compaction of a day."""
    with source_of(store, day):
        return plan_compaction(store._engine.storage.main, partition_of(store, day))


def finish(store: DelayedStore, day: int = 0, plan: CompactionPlan | None = None) -> Staged:
    """The next generation of a day, handed over and not adopted."""
    plan = plan or plan_of(store, day)
    with source_of(store, day) as source:
        return hand_over(store.path, stage_generation(store.path, source, plan))
