"""Adoption: a finished generation takes over or is thrown away; threads, and processes beside, read on meanwhile."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, MessageId, Policies, StoreConfig
from duelog.cleanup import adoption
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.partitions.partition import Partition
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead
from duelog.store.errors import StoreFull
from tests.cleanup.compacting import close_day, finish, partition_of, plan_compaction, send_day
from tests.conftest import DAY_MS, HOUR_MS, OpenStore, present, raising, tick_after
from tests.duelog.store_state import payloads, received
from tests.duelog.writing_process import START_MS, WritingProcess
from tests.model.driver import armed

pytestmark = pytest.mark.usefixtures("disarmed")

SMALL = StoreConfig(run_entries=4, ledger_max_entries=8, ledger_max_age_ms=100 * DAY_MS, partition_ms=DAY_MS)


@pytest.fixture
def store(open_store: OpenStore, clock: ManualClock) -> DelayedStore:
    """A closed day of 20 messages; of `one` 3, 5 and 7 to 11 are acknowledged, and it has a consumer no more."""
    store = open_store(config=SMALL)
    with store.topic("a").subscribe("one") as subscription:
        send_day(store, "a", 20)
        close_day(store, clock)
        messages = subscription.receive(20)
        subscription.ack([messages[at] for at in (3, 5, 7, 8, 9, 10, 11)], durable=True)
    return store


LEFT = [b"%d" % at for at in range(20) if at not in (3, 5, 7, 8, 9, 10, 11)]


def generations(store: DelayedStore, day: int = 0) -> list[str]:
    """Directories of a day's partition."""
    return sorted(child.name for child in partition_of(store, day).path.parent.iterdir())


def leftovers(path: Path) -> list[str]:
    """List the entries of staging/ and trash/."""
    return sorted(child.name for folder in ("staging", "trash") for child in (path / folder).iterdir())


def adopts(store: DelayedStore) -> bool:
    """Tick: whether a finished generation was adopted; refused ones are gone either way."""
    adopted = store.tick().adopted
    assert leftovers(store.path) == []
    assert generations(store) == (["g000002"] if adopted else ["g000001"])
    return bool(adopted)


def test_a_running_store_adopts_at_its_next_tick(store: DelayedStore, open_store: OpenStore) -> None:
    """The catalog, memory and the directory agree; what was not acknowledged is delivered, and nothing else."""
    finish(store)
    assert adopts(store)
    assert partition_of(store).generation == 2
    assert [(row.generation, row.state) for row in store.partitions()] == [(2, "closed")]
    assert list(store.check(deep=True)) == []
    with store.topic("a").subscribe("one") as subscription:
        assert received(subscription) == LEFT
    store.close()
    with open_store(config=SMALL).topic("a").subscribe("one") as subscription:
        assert received(subscription) == LEFT


def test_opening_a_store_adopts_what_is_ready_and_removes_the_rest(store: DelayedStore, open_store: OpenStore) -> None:
    """An attempt that died in staging/ is litter; one that was finished is not."""
    finish(store)
    attempt = store.path / "staging" / "compact-20260922T000000Z-dead"
    attempt.mkdir()
    (attempt / "data.mdb").write_bytes(b"half")
    store.close()
    again = open_store(config=SMALL)
    assert partition_of(again).generation == 2
    assert (leftovers(again.path), generations(again)) == ([], ["g000002"])
    assert list(again.check(deep=True)) == []


def test_a_seek_forward_forgets_single_acknowledgements_after_it(store: DelayedStore) -> None:
    """Mark-delete moved on, and yet entries that were acknowledged are not any more."""
    with store.topic("a").subscribe("one") as subscription:
        messages = subscription.receive(20)
        finish(store)
        subscription.seek(messages[3].position)  # entry 4
        assert not adopts(store)
        assert received(subscription) == [b"%d" % at for at in range(4, 20)]


@pytest.mark.parametrize(("position", "adopted"), [("earliest", False), ("latest", True)])
def test_a_subscription_that_came_since_gets_what_it_is_for(store: DelayedStore, position: str, adopted: bool) -> None:
    """From the earliest: all there is, so the generation is thrown away; from the latest: nothing of it."""
    finish(store)
    with store.topic("a").subscribe("two", initial_position=position) as two:
        assert adopts(store) is adopted
        assert received(two) == ([] if adopted else [b"%d" % at for at in range(20)])


@pytest.mark.parametrize("retention", [{"retention_ms": 300 * DAY_MS}, {"retention_bytes": 1 << 30}])
def test_what_retention_keeps_for_seeking_back_is_not_trimmed(
    store: DelayedStore, open_store: OpenStore, retention: dict[str, Any]
) -> None:
    """It may be set after compaction was planned: what adopts asks the store, which has it by then."""
    finish(store)
    store.set_policies(Policies(**retention), topic="a")
    store.close()
    kept = open_store(config=SMALL)
    assert generations(kept) == ["g000001"]
    assert leftovers(kept.path) == []
    adopting = kept._engine.upkeep.maintenance.tasks.adopting
    assert "by the retention of persistent://public/default/a" in adopting.refused[0]
    with kept.topic("a").subscribe("one") as subscription:
        subscription.seek("earliest")
        assert received(subscription) == [b"%d" % at for at in range(20)]


def test_a_deleted_topic_does_not_hold_adoption_up(store: DelayedStore, clock: ManualClock) -> None:
    """Its acknowledgements are asked for no more; here another topic holds the partition."""
    store.topic("b").subscribe("slow").close()
    send_day(store, "a", 3, 1)
    send_day(store, "b", 3, 1)
    close_day(store, clock, 1)
    with store.topic("a").subscribe("one") as subscription:
        subscription.ack_cumulative(subscription.receive(99)[-1], durable=True)
    finish(store, 1)
    store.delete_topic("a")
    assert store.tick().adopted == 1
    assert generations(store, 1) == ["g000002"]


def test_a_partition_that_was_deleted_meanwhile_stays_deleted(store: DelayedStore, clock: ManualClock) -> None:
    """The finished generation goes too."""
    finish(store)
    store.delete_topic("a")
    assert store.tick().adopted == 0
    assert leftovers(store.path) == []
    assert list((store.path / "partitions").iterdir()) == []


def test_a_lease_reads_on_and_the_next_one_reads_the_new_generation(store: DelayedStore) -> None:
    """No thread waits for another; the old environment is closed when the last lease on it is given back."""
    finish(store)
    partitions, partition = store._engine.storage.partitions, partition_of(store)
    with partitions.lease(partition):
        old = partition.environment
        assert adopts(store)
        assert partition.environment is old
        with old.read() as raw:
            assert raw.raw.stat()["entries"]
        with partitions.lease(partition):
            assert partition.environment.path.name == "g000002"
            with old.read() as raw:  # both are open
                assert raw.raw.stat()["entries"]
        assert not old._closed
    assert old._closed
    assert partition.environment.path.name == "g000002"


def test_a_backup_holds_adoption_back(store: DelayedStore, tmp_path: Path) -> None:
    """The copied cursors are older than the generation: it may lack what they have not acknowledged."""
    finish(store)
    with store._engine.upkeep.maintenance.deletions_held():
        assert store.tick().adopted == 0
        store.backup(tmp_path / "copy")
    assert adopts(store)


@pytest.mark.parametrize("content", [None, b"x" * 10_000, "cut"])
def test_what_is_no_generation_is_thrown_away(store: DelayedStore, content: bytes | str | None) -> None:
    """No file, some file, one that was cut: never opened as if it were one."""
    file = Path(finish(store).directory) / "data.mdb"
    if content == "cut":
        os.truncate(file, 5_000)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.unlink()
    assert not adopts(store)


def test_a_generation_of_another_store_is_thrown_away(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """It names the store that it was made for."""
    other = open_store(tmp_path / "other", config=SMALL)
    other.topic("a").subscribe("one").close()
    for each in (store, other):
        send_day(each, "a", 5, 1)
    for each in (store, other):
        close_day(each, clock, 1)
    stranger_directory = Path(finish(other, 1).directory)
    ready = Path(finish(store, 1).directory)
    shutil.rmtree(ready)
    shutil.move(stranger_directory, ready)
    assert store.tick().adopted == 0
    assert (generations(store, 1), leftovers(store.path)) == (["g000001"], [])


@pytest.mark.parametrize(
    ("owner", "name", "error", "told"),
    [("main", "write", StoreFull(Path(), "no space"), True), (adoption, "move", PermissionError(13, "no"), False)],
)
def test_a_generation_that_cannot_take_over_now_waits(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception, told: bool
) -> None:
    """Without space for its record the tick says so; one that may not be moved (of another user, say) is left alone."""
    finish(store)
    monkeypatch.setattr(store._engine.storage.main if owner == "main" else owner, name, raising(error))
    if told:
        with pytest.raises(StoreFull):
            store.tick()
    else:
        assert store.tick().adopted == 0
    assert generations(store) == ["g000001"]
    monkeypatch.undo()
    assert adopts(store)


@pytest.mark.parametrize(("at", "generation"), [("compact.published", 1), ("compact.adopted", 2)])
def test_an_adoption_that_broke_off_is_as_its_record_says(store: DelayedStore, at: str, generation: int) -> None:
    """Memory went by the generation before where the record had the next; what it left kept a later one out."""
    finish(store)
    with armed(at, raising(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        store.tick()
    assert (partition_of(store).generation, generations(store)) == (generation, ["g000001", "g000002"])
    with store.topic("a").subscribe("one") as subscription:
        assert received(subscription) == LEFT
    assert list(store.check(deep=True)) == []
    finish(store)
    assert store.tick().adopted == 1
    assert partition_of(store).generation == generation + 1


def test_what_was_dropped_is_acknowledged_for_a_subscription_that_meets_it(
    store: DelayedStore, clock: ManualClock
) -> None:
    """A subscription from the earliest, made after, gets the rest; its mark-delete passes, and the day is deleted."""
    finish(store)
    assert adopts(store)
    one = store.topic("a").subscribe("one")
    two = store.topic("a").subscribe("two")
    assert (received(one), received(two)) == (LEFT, LEFT)
    assert store.stats().set_aside == 0
    for subscription in (one, two):
        subscription.seek("earliest")
        payloads(subscription)
    tick_after(store, clock, 1_000)
    clock.advance(101 * DAY_MS)  # the last ledger is rolled over for its age
    store.tick()
    assert tick_after(store, clock, 1_000).deleted or not store.partitions()
    assert list(store.check()) == []


def test_everything_gone_is_passed_at_once(store: DelayedStore) -> None:
    """A subscription that meets nothing but gaps is at the end of the log, with nothing received."""
    with store.topic("a").subscribe("one") as one:
        one.ack_cumulative(one.receive(20)[-1], durable=True)
        store.topic("a").send(b"now")
        finish(store)
        assert adopts(store)
        assert store._engine.topics.loaded()[0].log.first_ledger  # the last ledger is kept
        two = store.topic("a").subscribe("two")
        (only,) = two.receive(10)
        assert only.payload == b"now"
        two.ack(only)
        assert two.stats().backlog == 0


def test_of_two_finished_generations_one_is_adopted(store: DelayedStore) -> None:
    """The other was made from a generation that is no longer there; while a backup is made it is nothing to do now."""
    finish(store)
    finish(store)
    adopting = present(store._engine.upkeep.maintenance.tasks.adopting)
    assert store._engine.upkeep.maintenance.slice()[1]  # one of the two is left
    assert adopting.more
    with store._engine.upkeep.maintenance.deletions_held():
        assert not store._engine.upkeep.maintenance.slice()[1]
    assert store.tick().adopted == 0
    assert (leftovers(store.path), generations(store)) == ([], ["g000002"])
    (reason,) = adopting.refused
    assert "made from generation 1" in reason


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
            before = raw.raw.stat()["entries"]
        beside.read_all()
        assert partition.environment.path.name == "g000002"
        with old.read() as raw:
            assert raw.raw.stat()["entries"] == before
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
