"""`check` and the write-ahead log: what keeps a store from opening is a finding, what is as it should be is none."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from duelog import DelayedStore, Finding, ManualClock, StoreConfig
from duelog.check import check_store as checked
from duelog.errors import DamagedStore, FormatMismatch
from duelog.partitions.partition import Partition, PartitionLog
from duelog.store.wal import segment
from duelog.store.wal.wal_reader import WalContent, read_beside
from duelog.tools.store_check import check_store
from tests.conftest import HOUR_MS, START_MS, OpenStore, in_threads
from tests.duelog.writing_process import WritingProcess
from tests.model.driver import copy_store
from tests.store.wal.segments import write_at

CONFIG = StoreConfig(partition_ms=HOUR_MS, background=False)
DUES = (START_MS + 3 * HOUR_MS, START_MS + 9 * HOUR_MS)
SEGMENT = Path("wal", "000000000001.wal")
FIRST_GROUP, SECOND_GROUP = 4096, 4096 + 512


def send(store: DelayedStore, count: int) -> None:
    """Messages for the two partitions in turn, each a group."""
    for number in range(count):
        store.topic("t").send(b"%d" % number, deliver_at=DUES[number % 2] + number)


def apply(store: DelayedStore) -> None:
    """Have a checkpoint done."""
    store._engine.writer().apply_all()


@pytest.fixture
def crashed(open_store: OpenStore, tmp_path: Path) -> Path:
    """A copy of an open store whose write-ahead log has ten messages that no partition has."""
    send(open_store(config=CONFIG), 10)
    copy_store(tmp_path / "store", tmp_path / "crashed")
    return tmp_path / "crashed"


def opened(path: Path) -> list[Finding]:
    """The findings of the store opened read-only."""
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS), read_only=True) as store:
        return list(store.check())


def put_back(crashed: Path, before: Path) -> str:
    """Give the second partition the file that it had `before`; the name of its directory."""
    file, older = (sorted(store.glob("partitions/*/g*/data.mdb"))[1] for store in (crashed, before))
    file.write_bytes(older.read_bytes())
    return file.parts[-3]


def test_what_a_crash_left_in_the_log_is_no_finding_and_is_there_when_the_store_is_opened(crashed: Path) -> None:
    """Looked at twice: nothing is changed."""
    content = (crashed / SEGMENT).read_bytes()
    assert opened(crashed) == check_store(crashed, deep=True) == check_store(crashed) == []
    assert (crashed / SEGMENT).read_bytes() == content
    with DelayedStore.open(crashed, CONFIG, clock=ManualClock(START_MS)) as store:
        assert sum(partition.pending for partition in store.partitions()) == 10
        assert list(store.check(deep=True)) == []


def test_a_store_to_which_nothing_was_sent_has_no_log_and_no_finding(store: DelayedStore) -> None:
    """The log is begun by the first send."""
    store.close()
    assert not (store.path / "wal").exists()
    assert opened(store.path) == check_store(store.path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: write_at(file, SECOND_GROUP + 40, b"\xff\xff"),
        lambda file: write_at(file, FIRST_GROUP, bytes(28)),
        lambda file: write_at(file, 0, bytes(64)),
        lambda file: os.truncate(file, 0),
        lambda file: os.truncate(file, file.stat().st_size - 1),
        Path.unlink,
    ],
    ids=["group", "first group", "header", "empty", "cut", "missing"],
)
def test_a_damaged_log_is_an_error_with_its_path(crashed: Path, damage: Callable[[Path], None]) -> None:
    """It is told before a writer is refused."""
    file = crashed / SEGMENT
    damage(file)
    for findings in (opened(crashed), check_store(crashed), check_store(crashed, deep=True)):
        assert [(found.severity, found.code, found.address) for found in findings] == [("error", "wal", str(file))]
        assert "duelog repair" in findings[0].advice
    with pytest.raises(DamagedStore, match=SEGMENT.name):
        DelayedStore.open(crashed, CONFIG, clock=ManualClock(START_MS))


def test_a_partition_that_ends_before_the_log_goes_on_is_an_error(
    store: DelayedStore, clock: ManualClock, tmp_path: Path
) -> None:
    """The file of a partition of before: its last commits are gone, and the log does not begin where it ends."""
    send(store, 2)
    apply(store)
    copy_store(store.path, tmp_path / "before")
    send(store, 4)
    apply(store)
    send(store, 4)
    copy_store(store.path, tmp_path / "crashed")
    name = put_back(tmp_path / "crashed", tmp_path / "before")
    for findings in (opened(tmp_path / "crashed"), check_store(tmp_path / "crashed", deep=True)):
        found = next(found for found in findings if found.code == "wal")
        assert found.severity == "error"
        assert found.address == str(tmp_path / "crashed" / "wal")
        assert name in found.message
        assert "ends at entry 1: entries were lost" in found.message
    with pytest.raises(DamagedStore, match="entries were lost"):
        DelayedStore.open(tmp_path / "crashed", CONFIG, clock=clock)


def test_a_log_of_a_later_version_is_not_taken_for_damage(crashed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairing it would throw away what the version that wrote it can read."""
    monkeypatch.setattr(segment, "READ_VERSIONS", (0,))
    (found,) = check_store(crashed)
    assert (found.code, "version is 4" in found.message, "repair" in found.advice) == ("wal", True, False)
    with pytest.raises(FormatMismatch):
        DelayedStore.open(crashed, CONFIG, clock=ManualClock(START_MS))


def test_nothing_is_found_beside_a_writer_whenever_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after the log was read, and before each partition is: appended, applied, used again, fired, deleted."""
    listed = Partition.logs
    steps = 0
    with WritingProcess(tmp_path / "store", wal_bytes=16 << 10) as writer:
        writer.do("send_singly", "t", [3 * HOUR_MS, 9 * HOUR_MS] * 3)

        def go_on() -> None:
            nonlocal steps
            steps += 1
            delays_ms = [(3 + number % 2 * 6) * HOUR_MS + number for number in range((1, 4, 40)[steps % 3])]
            writer.do("send_singly", "t", delays_ms)
            if steps % 2:
                writer.send("t", "batch", *delays_ms[:4])
            if steps % 7 == 0:
                writer.do("advance", HOUR_MS)
            writer.do("send_singly", "t", delays_ms[:3])

        def read_and_go_on(path: Path, store_id: bytes, oldest: Callable[[], int | None]) -> WalContent:
            found = read_beside(path, store_id, oldest)
            go_on()
            return found

        def go_on_and_list(partition: Partition) -> list[PartitionLog]:
            go_on()
            return listed(partition)

        with DelayedStore.open(tmp_path / "store", CONFIG, clock=ManualClock(START_MS), read_only=True) as beside:
            monkeypatch.setattr(Partition, "logs", go_on_and_list)
            monkeypatch.setattr(checked, "read_beside", read_and_go_on)
            for _ in range(8):
                assert list(beside.check()) == []
    assert steps >= 24


def test_what_the_process_itself_writes_meanwhile_is_no_finding(store: DelayedStore) -> None:
    """A message that is moved after its log was read: the records that admit and cancel it are those of before."""
    topic = store.topic("a")
    message_id = topic.send(b"moved", deliver_after=3600)
    topic.send(b"of the next partition", deliver_after=7200)

    def move(number: int, count: int) -> None:
        if number == count - 1:
            in_threads([lambda: topic.reschedule(message_id, deliver_after=3601)])

    assert list(store.check(deep=True, progress=move)) == []
    assert list(store.check(deep=True)) == []


def test_the_process_that_writes_the_store_does_not_look_at_its_own_log(store: DelayedStore) -> None:
    """It has in memory what is not applied, and applies that when it closes."""
    send(store, 6)
    write_at(store.path / SEGMENT, FIRST_GROUP, bytes(512))
    assert list(store.check()) == []
    store.close()
    assert opened(store.path) == []


@pytest.mark.parametrize("which", ["main", "partition"])
def test_a_store_whose_log_lost_what_lmdb_has_is_a_finding_and_is_not_opened(
    store: DelayedStore, tmp_path: Path, which: str
) -> None:
    """The lost group may have had rows of other environments, which are nowhere then."""
    send(store, 3)
    storage = store._engine.storage
    partition = next(iter(storage.partitions))
    with storage.partitions.lease(partition):
        environment = storage.main if which == "main" else partition.environment
        if which == "main":
            store.documents.put("a", b"")
        environment.apply()
        copy_store(tmp_path / "store", tmp_path / "crashed")
    assert opened(tmp_path / "crashed") == []
    content = (tmp_path / "crashed" / SEGMENT).read_bytes()
    last = max(at for at in range(FIRST_GROUP, len(content), 512) if any(content[at : at + 512]))
    write_at(tmp_path / "crashed" / SEGMENT, last, bytes(512))
    (finding,) = opened(tmp_path / "crashed")
    assert (finding.code, finding.address) == ("wal", environment.name)
    assert "of the write-ahead log, which ends at group" in finding.message
    with pytest.raises(DamagedStore, match="which ends at group"):
        DelayedStore.open(tmp_path / "crashed", CONFIG, clock=ManualClock(START_MS))
