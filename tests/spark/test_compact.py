"""Compaction over Spark: one attempt of each partition is published, whatever happens to the others."""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.cleanup.compaction import Staged, hand_over
from duelog.cleanup.compaction_plan import CompactionPlan, plan_compaction
from duelog.tools.compaction import Failed, compact_store, run_here
from duelog.tools.sealed import identity_of, open_main_to_read, open_sealed, sealed_generations
from duelog.tools.spark import compact as module
from duelog.tools.spark.compact import compact_with_spark, copy_partition
from duelog.tools.spark.session import SparkFailed
from tests.tools.closed_days import Built, Sent, build

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def store(tmp_path: Path) -> Built:
    """A store of which half of each log is acknowledged."""
    built = build(tmp_path / "store", messages=600)
    clock = ManualClock(built.now_ms)
    with DelayedStore.open(built.path, StoreConfig(), clock=clock) as opened:
        for topic in {sent.topic for sent in built.sent}:
            with opened.topic(topic).subscribe("slow") as consumer:
                batch = consumer.receive(10_000)
                consumer.ack(batch[::2], durable=True)
    return built


def plans_of(store: Path) -> list[CompactionPlan]:
    """What compaction of each closed partition would drop."""
    store_id = identity_of(store).store_id
    plans = []
    generations = sealed_generations(store)
    with open_main_to_read(store) as (_, main):
        for sealed in generations:
            with open_sealed(sealed, store_id) as source:
                plans.append(plan_compaction(main, source))
    return plans


def left_to_receive(built: Built) -> list[Sent]:
    """What the subscriptions still get once the store is opened, which adopts what is ready."""
    found = []
    with DelayedStore.open(built.path, StoreConfig(), clock=ManualClock(built.now_ms)) as opened:
        opened.tick()
        for topic in sorted({sent.topic for sent in built.sent}):
            with opened.topic(topic).subscribe("slow") as consumer:
                found += [
                    Sent(m.topic, *m.message_id, m.due_ms, m.publish_ms, m.key, m.properties, m.payload)
                    for m in consumer.receive(10_000)
                ]
        assert list(opened.check()) == []
    return sorted(found, key=str)


def staging(store: Path) -> list[str]:
    """What lies in staging/, finished generations left out."""
    return sorted(path.name for path in (store / "staging").iterdir() if path.name != "ready")


def test_partitions_are_compacted_by_tasks_and_adopted_at_the_next_open(
    spark: SparkSession, store: Built, tmp_path: Path
) -> None:
    """Half of the bodies go; what is left to receive does not change."""
    untouched = store._replace(path=shutil.copytree(store.path, tmp_path / "untouched"))
    plans = plans_of(store.path)
    assert all(0.2 < plan.dead_ratio < 0.8 for plan in plans)
    finished = compact_with_spark(store.path, plans, spark=spark)
    assert [each.start_ms for each in finished] == [plan.start_ms for plan in plans]
    assert all(isinstance(each, Staged) and each.file_bytes < each.source_bytes for each in finished)
    assert staging(store.path) == []
    compacted = left_to_receive(store)
    assert [sealed.generation for sealed in sealed_generations(store.path)] == [2] * len(plans)
    assert compacted == left_to_receive(untouched)
    assert compacted


def test_a_task_whose_first_attempt_dies_publishes_once(
    spark: SparkSession, store: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when all is copied and verified; what it staged is gone when the job is done."""
    mark = str(tmp_path / "died")

    def dies_once(task: bytes) -> bytes:
        answer = copy_partition(task)
        try:
            open(mark, "x").close()
        except FileExistsError:
            return answer
        os._exit(9)

    monkeypatch.setattr(module, "copy_partition", dies_once)
    plans = plans_of(store.path)
    finished = compact_with_spark(store.path, plans, spark=spark)
    assert Path(mark).exists()
    assert len(finished) == len(plans)
    assert staging(store.path) == []
    assert len(list((store.path / "staging" / "ready").iterdir())) == len(plans)


def test_a_job_that_fails_publishes_nothing(spark: SparkSession, store: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """One partition cannot be copied: the others, copied and verified, are thrown away."""
    plans = plans_of(store.path)
    bad = plans[1].start_ms

    def fails_for_one(task: bytes) -> bytes:
        if pickle.loads(task)[1].start_ms == bad:
            raise OSError("the disk says no")
        return copy_partition(task)

    before = left_to_receive(store)
    monkeypatch.setattr(module, "copy_partition", fails_for_one)
    with pytest.raises(SparkFailed, match="the disk says no"):
        compact_with_spark(store.path, plans_of(store.path), spark=spark)
    assert staging(store.path) == []
    assert not (store.path / "staging" / "ready").exists()
    assert left_to_receive(store) == before


def test_one_that_is_damaged_is_reported_and_the_others_are_compacted(spark: SparkSession, store: Built) -> None:
    """What another attempt would not mend is no failure of the job: it is as without Spark."""
    plans = plans_of(store.path)
    with (sealed_generations(store.path)[1].path / "data.mdb").open("r+b") as file:
        file.truncate(8192)
    first, second, third = compact_with_spark(store.path, plans, spark=spark)
    assert isinstance(second, Failed)
    assert "8192 bytes" in second.reason
    assert isinstance(first, Staged)
    assert isinstance(third, Staged)
    assert staging(store.path) == []


def test_all_that_was_handed_over_at_once_is_reported_as_adopted(store: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that tells of its partitions when all are done, and adoption that begins with the first it hears of."""
    monkeypatch.setattr("duelog.tools.compaction._ADOPTED_AT_ONCE", 1)
    report = compact_store(store.path, run=lambda path, plans, progress: list(run_here(path, plans, progress)))
    assert [each.outcome for each in report.partitions] == ["adopted"] * 3


def test_of_two_attempts_of_one_partition_one_is_published(store: Built) -> None:
    """Speculation: both succeed, in directories of their own; the driver takes one, and opening removes the other."""
    (plan, *_) = plans_of(store.path)
    task = pickle.dumps((str(store.path), plan))
    first, second = (pickle.loads(copy_partition(task)) for _ in range(2))
    assert isinstance(first, Staged)
    assert first.directory != second.directory
    attempts = len(staging(store.path))
    hand_over(store.path, first)
    assert left_to_receive(store)
    assert not Path(second.directory).exists()
    assert sealed_generations(store.path)[0].generation == 2
    assert attempts == 2


def test_a_driver_that_dies_leaves_nothing_after_the_next_open(store: Built) -> None:
    """All tasks have staged, nobody has published: the store is as it was, and its staging/ empty."""
    for plan in plans_of(store.path):
        copy_partition(pickle.dumps((str(store.path), plan)))
    assert len(staging(store.path)) == 3
    with suppress(FileNotFoundError):
        assert list((store.path / "staging" / "ready").iterdir()) == []
    with DelayedStore.open(store.path, StoreConfig(), clock=ManualClock(store.now_ms)) as opened:
        assert staging(store.path) == []
        assert list(opened.check()) == []
    assert [sealed.generation for sealed in sealed_generations(store.path)] == [1, 1, 1]
