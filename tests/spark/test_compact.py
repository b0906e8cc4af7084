"""Compaction over Spark: it reports what one core would, and one attempt of each partition is published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import raising

pytest.importorskip("pyspark")

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.cleanup.compaction import Staged
from duelog.tools.columns.sealed import sealed_generations
from duelog.tools.compact_store import (
    CompactionReport,
    CompactionTask,
    PartitionAnswer,
    PartitionCompaction,
    Runner,
    _tasks,
    compact_partition,
    compact_store,
    run_here,
)
from duelog.tools.spark import spark_jobs as module
from duelog.tools.spark.session import SparkFailed
from duelog.tools.spark.spark_jobs import compact_in_task, compact_with_spark
from duelog.tools.spark.tasks import run_tasks
from tests.tools.closed_days import Built, Sent, build_half_acknowledged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def store(tmp_path: Path) -> Built:
    """A store of which half of each log is acknowledged."""
    return build_half_acknowledged(tmp_path / "store", 600)


def on(spark: SparkSession, before: Callable[[], object] = lambda: None) -> Runner:
    """The runner of a session; something may be done before its tasks begin."""

    def run(tasks: Sequence[CompactionTask], progress: Callable[[int], object]) -> list[PartitionAnswer]:
        before()
        return compact_with_spark(tasks, spark=spark)

    return run


def tasks_of(store: Path) -> list[CompactionTask]:
    """The task of each closed partition."""
    return _tasks(store, 0.0, dry_run=False)[0]


def outcomes(report: CompactionReport) -> list[str]:
    """The outcomes of the partitions, by start."""
    return [each.outcome for each in report.partitions]


def left_to_receive(built: Built) -> list[Sent]:
    """The messages left once the store is opened, which adopts what is ready."""
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
    """The contents of staging/, finished generations left out."""
    return sorted(path.name for path in (store / "staging").iterdir() if path.name != "ready")


def test_tasks_plan_copy_and_verify_in_one_job_and_the_report_is_that_of_one_core(
    spark: SparkSession, store: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the bodies go; what is left to receive does not change; some are worth it and others not."""
    here = Path(shutil.copytree(store.path, tmp_path / "here"))
    untouched = store._replace(path=shutil.copytree(store.path, tmp_path / "untouched"))
    jobs = []

    def counted(*arguments: Any) -> list[PartitionAnswer]:
        jobs.append(arguments)
        return run_tasks(*arguments)

    monkeypatch.setattr("duelog.tools.spark.tasks.run_tasks", counted)
    planned = compact_store(store.path, dry_run=True, min_dead_ratio=0.0, run=on(spark))
    assert planned == compact_store(here, dry_run=True, min_dead_ratio=0.0)
    assert outcomes(planned) == ["planned"] * 3
    assert staging(store.path) == []
    middle = sorted(each.dead_ratio for each in planned.partitions)[1]
    report = compact_store(store.path, min_dead_ratio=middle, run=on(spark))
    assert report == compact_store(here, min_dead_ratio=middle)
    assert sorted(outcomes(report)) == ["adopted", "adopted", "skipped"]
    assert len(jobs) == 2
    assert staging(store.path) == []
    compacted = left_to_receive(store)
    assert sorted(sealed.generation for sealed in sealed_generations(store.path)) == [1, 2, 2]
    assert compacted == left_to_receive(untouched)
    assert compacted


def test_a_task_whose_first_attempt_dies_publishes_once(
    spark: SparkSession, store: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when all is copied and verified; what it staged is gone when the job is done."""
    mark = str(tmp_path / "died")

    def dies_once(task: CompactionTask) -> PartitionAnswer:
        answer = compact_in_task(task)
        try:
            open(mark, "x").close()
        except FileExistsError:
            return answer
        os._exit(9)

    monkeypatch.setattr(module, "compact_in_task", dies_once)
    answers = compact_with_spark(tasks_of(store.path), spark=spark)
    assert Path(mark).exists()
    assert [type(each.result) for each in answers] == [Staged] * 3
    assert staging(store.path) == []
    assert len(list((store.path / "staging" / "ready").iterdir())) == 3


def test_a_job_that_fails_publishes_nothing(spark: SparkSession, store: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """One partition cannot be copied: the others, copied and verified, are thrown away."""
    bad = tasks_of(store.path)[1].sealed

    def fails_for_one(task: CompactionTask) -> PartitionAnswer:
        if task.sealed == bad:
            raise OSError("the disk says no")
        return compact_in_task(task)

    before = left_to_receive(store)
    monkeypatch.setattr(module, "compact_in_task", fails_for_one)
    with pytest.raises(SparkFailed, match="the disk says no"):
        compact_store(store.path, run=on(spark))
    assert staging(store.path) == []
    assert not (store.path / "staging" / "ready").exists()
    assert left_to_receive(store) == before


def spoil(path: Path) -> None:
    """Another process compacts the first partition, and the second is damaged."""

    def first_alone(tasks: Sequence[CompactionTask], progress: Callable[[int], object]) -> Iterable[PartitionAnswer]:
        yield from run_here(tasks[:1], progress)
        yield from (PartitionAnswer(task.sealed.start_ms, PartitionCompaction.of(task.sealed)) for task in tasks[1:])

    compact_store(path, run=first_alone)
    with (sealed_generations(path)[1].path / "data.mdb").open("r+b") as file:
        file.truncate(8192)


def test_what_is_damaged_or_has_gone_is_told_as_on_one_core(spark: SparkSession, store: Built, tmp_path: Path) -> None:
    """One that is damaged when its task opens it has failed; one that another has compacted is left out."""
    copy = Path(shutil.copytree(store.path, tmp_path / "copy"))

    def here(tasks: Sequence[CompactionTask], progress: Callable[[int], object]) -> Iterable[PartitionAnswer]:
        spoil(copy)
        return run_here(tasks, progress)

    report = compact_store(store.path, run=on(spark, lambda: spoil(store.path)))
    assert outcomes(report) == ["failed", "adopted"]
    assert "8192 bytes" in report.failed[0].reason
    assert staging(store.path) == []
    rows = [replace(each, reason=each.reason.replace(str(store.path), "")) for each in report.partitions]
    others = compact_store(copy, run=here).partitions
    assert rows == [replace(each, reason=each.reason.replace(str(copy), "")) for each in others]


def test_a_driver_that_dies_leaves_nothing_after_the_next_open(store: Built) -> None:
    """All tasks have staged, one twice (speculation), each in a directory of its own, and none has been published."""
    tasks = tasks_of(store.path)
    for task in (*tasks, tasks[0]):
        compact_in_task(task)
    assert len(staging(store.path)) == 4
    assert not (store.path / "staging" / "ready").exists()
    with DelayedStore.open(store.path, StoreConfig(), clock=ManualClock(store.now_ms)) as opened:
        assert staging(store.path) == []
        assert list(opened.check()) == []
    assert [sealed.generation for sealed in sealed_generations(store.path)] == [1, 1, 1]


def test_the_largest_partition_is_begun_first(store: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that cores end together; and nothing is sent where there is nothing to do."""
    sent: list[CompactionTask] = []

    def run_here_instead(
        spark: object, function: Callable[[CompactionTask], PartitionAnswer], tasks: list[CompactionTask]
    ) -> list[PartitionAnswer]:
        sent.extend(tasks)
        return [function(task) for task in tasks]

    monkeypatch.setattr("duelog.tools.spark.tasks.run_tasks", run_here_instead)
    tasks = tasks_of(store.path)
    sized = [
        task._replace(sealed=task.sealed._replace(file_bytes=size))
        for task, size in zip(tasks, (4096, 40960, 8192), strict=True)
    ]
    answers = compact_with_spark(sized, spark=object())  # type: ignore[arg-type]
    assert [task.sealed.file_bytes for task in sent] == [40960, 8192, 4096]
    assert {each.start_ms for each in answers} == {task.sealed.start_ms for task in tasks}
    assert all(each.outcome.outcome == "failed" for each in answers)  # none of them is of that size
    assert compact_with_spark([], spark=object()) == []  # type: ignore[arg-type]


def test_what_another_attempt_might_mend_is_no_answer(store: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError fails a Spark task, so that it is begun again; one core has no other to do that."""
    monkeypatch.setattr("duelog.tools.compact_store.stage_generation", raising(OSError(5, "Input/output error")))
    task = tasks_of(store.path)[0]
    with pytest.raises(OSError, match="Input/output"):
        compact_in_task(task)
    answer = compact_partition(task)
    assert answer.outcome.reason == "[Errno 5] Input/output error"
    assert answer.outcome.outcome == "failed"
    assert answer.outcome.dead_messages > 0
