"""A process that reads a store beside the one that writes it, while a partition goes over to its next generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, MessageId, StoreConfig
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.partitions.partition import Partition
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead
from tests.cleanup.compacting import plan_compaction
from tests.duelog.writing_process import HOUR_MS, START_MS, WritingProcess


class Beside:
    """A reader of a store with one closed hour, in which topic `a` is acknowledged and `b` is not."""

    def __init__(self, path: Path, writer: WritingProcess) -> None:
        self.path = path
        self.writer = writer
        for topic in "ab":
            writer.do("subscribe", topic, "one")
        delays = range(HOUR_MS, HOUR_MS + 8)
        self.ids = {topic: [MessageId.parse(text) for text in writer.send(topic, topic, *delays)] for topic in "ab"}
        writer.do("advance", 3 * HOUR_MS)
        writer.do("drain", "a", "one")
        config = StoreConfig(partition_ms=HOUR_MS)
        self.store = DelayedStore.open(path, config, clock=ManualClock(START_MS + 3 * HOUR_MS), read_only=True)

    @property
    def partition(self) -> Partition:
        """The one that was compacted, as the reader has it now."""
        (partition,) = self.store._engine.storage.partitions
        return partition

    def finish(self) -> None:
        """Compact the partition; it is not adopted yet."""
        engine = self.store._engine
        with engine.storage.partitions.lease(self.partition) as partition:
            plan = plan_compaction(engine.storage.main, partition)
            assert plan.dead_entries
            hand_over(self.path, stage_generation(self.path, partition.environment, plan))

    def adopt(self) -> None:
        """Have the writing process adopt it."""
        self.writer.do("advance", 0)
        assert not (self.path / "staging" / "ready").exists()

    def read_all(self) -> None:
        """The questions of a reader, and the answers."""
        found = [self.store.topic("b").get(each) for each in self.ids["b"]]
        assert [message.payload for message in found if message is not None] == [b"b"] * 8
        assert [row.messages for row in self.store.partitions()] == [16]
        assert [self.store.topic("b").state(each) for each in self.ids["b"]] == ["fired"] * 8
        assert list(self.store.check(deep=True)) == []


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    """The reader, and the process that writes."""
    with WritingProcess(tmp_path / "store") as writer:
        found = Beside(tmp_path / "store", writer)
        yield found
        assert list(found.store.check(deep=True)) == []
        found.store.close()


def test_a_generation_that_was_open_is_reopened(beside: Beside) -> None:
    """The reader had read from it before; what was dropped is no longer there."""
    beside.read_all()
    assert beside.store.topic("a").get(beside.ids["a"][0]) is not None
    beside.finish()
    beside.adopt()
    beside.read_all()
    assert beside.store.topic("a").get(beside.ids["a"][0]) is None
    assert beside.partition.generation == 2


def test_a_generation_that_was_only_known_is_opened_by_its_new_name(beside: Beside) -> None:
    """The reader has its name from the catalog, and finds its directory gone."""
    engine = beside.store._engine
    beside.finish()
    partition = beside.partition
    engine.storage.partitions._open.close(partition)
    beside.adopt()
    with engine.storage.partitions.lease(partition):  # the catalog was not read since
        assert partition.environment.path.name == "g000002"


def test_a_lease_reads_on(beside: Beside) -> None:
    """And others meanwhile read the new one; the old one is closed at the end."""
    beside.finish()
    partition = beside.partition
    with beside.store._engine.storage.partitions.lease(partition):
        old = partition.environment
        beside.adopt()
        with old.read() as raw:
            before = raw.stat()["entries"]
        beside.read_all()
        assert partition.environment.path.name == "g000002"
        with old.read() as raw:
            assert raw.stat()["entries"] == before
    assert old._closed


def test_check_looks_again_where_the_file_went_from_under_it(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that is replaced while it is looked at is no finding."""
    beside.finish()
    find_problems = Environment.find_problems
    adopted = once(beside.adopt)

    def find(environment: Environment) -> list[str]:
        if environment.name != "main":
            adopted()
        return find_problems(environment)

    monkeypatch.setattr(Environment, "find_problems", find)
    assert list(beside.store.check(deep=True)) == []
    assert beside.partition.generation == 2


def test_a_backup_does_not_put_older_cursors_and_a_newer_generation_together(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It copies the one that it held at its instant, whatever is adopted meanwhile."""
    beside.finish()
    copy_environment = Environment.copy
    adopted = once(beside.adopt)

    def copy(environment: Environment, path: Path, held: HeldRead) -> None:
        copy_environment(environment, path, held)
        adopted()

    monkeypatch.setattr(Environment, "copy", copy)
    beside.store.backup(tmp_path / "copy")
    with opened(tmp_path / "copy") as store:
        assert [row.generation for row in store.partitions()] == [1]
        assert list(store.check(deep=True)) == []
        with store.topic("b").subscribe("one") as subscription:
            assert len(subscription.receive(20)) == 8


def once(action: Callable[[], None]) -> Callable[[], None]:
    """The action, the first time."""
    left = [action]
    return lambda: left.pop()() if left else None


@contextmanager
def opened(path: Path) -> Iterator[DelayedStore]:
    """A store open for writing."""
    clock = ManualClock(START_MS + 3 * HOUR_MS)
    with DelayedStore.open(path, StoreConfig(partition_ms=HOUR_MS), clock=clock) as store:
        yield store
