"""Segments of the write-ahead log in an open store: when they are applied, used again, and what is without space."""

import errno
import functools
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId
from duelog.errors import StoreFailed, StoreFull
from duelog.sending import wal_segments
from duelog.sending.wal_segments import CHECKPOINT_MS, Checkpoint
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import LmdbTransaction
from duelog.store.files import failpoints
from duelog.store.names import TopicName
from duelog.store.wal import segment as segment_module
from duelog.store.wal.segment import EMPTY_BYTES
from duelog.store.wal.segment_file import SegmentFile, make_file
from duelog.store.wal.wal_reader import WalFollower
from tests.conftest import HOUR_MS, START_MS, OpenStore, Plant, tick_after
from tests.disaster.wal_faults import no_room
from tests.duelog.side_by_side import CONFIG, FIRST_MS, crashed, held, in_wal, send, unapplied
from tests.model.driver import armed
from tests.store.commits import until


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store whose topic "a" has a log in each of three partitions, with one message."""
    store = open_store(config=CONFIG)
    store.topic("a").send_payloads([b"first"] * 3, deliver_at=[FIRST_MS + hour * HOUR_MS for hour in range(3)])
    return store


def test_a_full_segment_is_applied_and_its_file_used_again(store: DelayedStore, tmp_path: Path) -> None:
    """The log does not grow; everything is there."""
    sent = {send(store, number, number % 3): b"%d" % number for number in range(150)}
    assert 0 < len(in_wal(store)) < 40
    files = list((store.path / "wal").iterdir())
    assert len(files) <= 3
    assert {file.stat().st_size for file in files} == {24 << 10}
    assert sent.items() <= held(store).items()


def test_a_small_segment_of_many_partitions_is_not_applied_before_the_next(
    tmp_path: Path, clock: ManualClock, open_store: OpenStore
) -> None:
    """A commit of a few KiB in each of them is not worth its cost; both are applied when the first is old."""
    store = open_store(tmp_path / "many", replace(CONFIG, wal_bytes=16 << 20))
    due = [clock.now_ms() + (1 + number % 40) * HOUR_MS for number in range(2_200)]
    ids = [*store.topic("a").send_payloads([bytes(1_000)] * 2_000, deliver_at=due[:2_000])]
    clock.advance(CHECKPOINT_MS - 1)
    ids += store.topic("a").send_payloads([bytes(1_000)] * 200, deliver_at=due[2_000:])
    assert [group.number for group in in_wal(store)] == [2, 3]
    tick_after(store, clock, 1)
    assert in_wal(store) == []
    assert not unapplied(store)
    assert held(store).keys() >= set(ids)


def test_what_is_sent_behind_an_interrupted_checkpoint_is_found_by_who_reads_beside(
    store: DelayedStore, clock: ManualClock, plant: Plant
) -> None:
    """A reader that saw the segment end looked for nothing more in it, and groups took the place of its end."""
    beside = WalFollower(store.path, store._engine.storage.store_id)
    clock.advance(CHECKPOINT_MS)
    plant(SegmentFile, "write_through", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        store.tick()
    known = len(beside.follow())
    send(store, 1, 1)
    assert len(beside.follow()) == known + 1


def test_the_segment_of_a_checkpoint_that_was_interrupted_as_it_began_is_left_at_closing(
    store: DelayedStore, clock: ManualClock, plant: Plant, open_store: OpenStore
) -> None:
    """Nothing says that it is to be applied, and the segment behind it is empty."""
    sent = send(store, 1, 1)
    clock.advance(CHECKPOINT_MS)
    plant(wal_segments, "Checkpoint", KeyboardInterrupt(), after=False)
    with pytest.raises(KeyboardInterrupt):
        store.tick()
    store.close()
    assert held(open_store(config=CONFIG))[sent] == b"1"


def made_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of segments that are made from now on."""
    sizes: list[int] = []

    def make(path: Path, head: bytes, size: int) -> None:
        sizes.append(size)
        make_file(path, head, size)

    monkeypatch.setattr(segment_module, "make_file", make)
    return sizes


def test_a_close_writes_no_segment_of_the_size_of_the_one_before(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is appended: what it begins has space for the group that ends it."""
    sizes = made_files(monkeypatch)
    store.close()
    assert sizes == [EMPTY_BYTES]
    assert [file.stat().st_size for file in (store.path / "wal").iterdir()] == [EMPTY_BYTES]


def test_a_segment_is_not_doubled_while_partitions_of_its_rows_are_vacant(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch for a new day fills it; the next ones go to the day's body file."""
    store = open_store(config=replace(CONFIG, wal_bytes=16 << 20))
    store.topic("a").subscribe("s").close()
    sizes = made_files(monkeypatch)
    for _ in range(6):
        store.topic("a").send_payloads([bytes(1_000)] * 1_000, deliver_at=FIRST_MS)
    assert [size >> 20 for size in sizes] == [2, 2]


def test_a_segment_with_a_row_for_each_kib_of_it_is_followed_by_another(store: DelayedStore) -> None:
    """However few bytes they have: what is unapplied of them is in memory. What is too much for any is one group."""
    most = CONFIG.wal_bytes // 1_024
    before = 1 + sum(group.row_count for group in in_wal(store))  # a batch of three logs is two rows
    for number in range(most - before):
        send(store, number, number % 3)
    assert {group.number for group in in_wal(store)} == {1}
    send(store, most)
    assert {group.number for group in in_wal(store)} == {2}
    store.send_batch([(f"t{number}", Message(b"", deliver_at=FIRST_MS)) for number in range(most + 1)])
    assert len({group.number for group in in_wal(store)}) == 1
    assert sorted(map(int, set(held(store).values()) - {b"first"})) == [*range(most - before), most]


def test_each_log_of_a_batch_is_half_a_row_of_a_segment(open_store: OpenStore) -> None:
    """However few bytes they have: reading them back takes time. Of a segment of 64 rows, four batches of 30 logs."""
    store = open_store(config=replace(CONFIG, wal_bytes=64 << 10))
    dues = [FIRST_MS + hour * HOUR_MS for hour in range(30)]
    numbers = []
    for _ in range(11):
        store.topic("a").send_payloads([b""] * 30, deliver_at=dues)
        numbers.append(in_wal(store)[-1].number)
    assert {numbers.count(each) for each in sorted(set(numbers))[1:-1]} == {4}  # the first has more records


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_is_ready_when_the_last_partition_was_tried(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The threads say so; what could not be applied is left to the end of the checkpoint."""
    engine, told = store._engine, list[bool]()
    checkpoint = Checkpoint(engine.storage.main, engine.storage.partitions, 0, lambda: told.append(checkpoint.is_ready))
    partitions = unapplied(store)
    assert len(partitions) == 3
    with engine.storage.partitions.lease(partitions[0]):
        room = no_room(partitions[0].environment, monkeypatch) if fails else None
    checkpoint.begin(2)
    until(lambda: told)
    assert all(told)
    assert checkpoint.is_ready
    assert unapplied(store) == (partitions[:1] if fails else [])
    if room is not None:
        with pytest.raises(StoreFull):
            checkpoint.finish()
        room()
    checkpoint.finish()
    assert not unapplied(store)


def test_a_full_log_holds_producers_back(
    tmp_path: Path, clock: ManualClock, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one segment is applied by threads of the store the next one is written, and no third."""
    store = open_store(tmp_path / "busy", replace(CONFIG, background=True))
    go, waits, applying = threading.Event(), threading.Event(), threading.Event()
    sent: list[MessageId] = []
    finish = Checkpoint.finish

    def hold() -> None:
        if isinstance(threading.current_thread(), threading._DummyThread):  # one of those that apply
            applying.set()
            assert go.wait(30)

    def finishing(self: Checkpoint) -> None:
        if threading.current_thread() is thread:
            assert applying.wait(30)  # else the producer would apply what no thread has begun with
            waits.set()
        finish(self)

    def produce() -> None:
        for number in range(200):
            sent.append(send(store, number))

    monkeypatch.setattr(Checkpoint, "finish", finishing)
    failpoints.arm("commit.before", hold)
    thread = threading.Thread(target=produce)
    try:
        thread.start()
        assert waits.wait(30)
        while sum(file.stat().st_size for file in (store.path / "wal").glob("*.wal")) < 2 * (24 << 10):
            assert thread.is_alive()
        assert len(sent) < 100
        assert len(held(store)) == len(sent)  # readers do not wait
    finally:
        go.set()
        failpoints.disarm()
        thread.join()
    assert len(held(store)) == len(sent) == 200


def test_partitions_are_applied_after_a_while(store: DelayedStore, clock: ManualClock) -> None:
    """A tick says when, and does it; what is sent after that is applied as much later."""
    send(store, 0, 0)
    send(store, 1, 2)
    assert store.tick().next_due_ms == START_MS + CHECKPOINT_MS
    tick_after(store, clock, CHECKPOINT_MS - 1)
    assert len(unapplied(store)) == 3
    assert tick_after(store, clock, 1).next_due_ms != clock.now_ms()
    assert not unapplied(store)
    assert in_wal(store) == []
    send(store, 2)
    assert store.tick().next_due_ms == clock.now_ms() + CHECKPOINT_MS


def test_partitions_are_applied_soon_after_the_clock_was_set_back(store: DelayedStore, clock: ManualClock) -> None:
    """Not when it has come to where it was."""
    send(store, 0)
    clock.set(START_MS - HOUR_MS)
    assert store.tick().next_due_ms == clock.now_ms() + CHECKPOINT_MS
    tick_after(store, clock, CHECKPOINT_MS)
    assert not unapplied(store)


def no_segment(patch: pytest.MonkeyPatch) -> None:
    """No segment can be made, nor an old one be used again."""

    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))

    patch.setattr(segment_module, "_make", refuse)
    patch.setattr("duelog.store.wal.write_ahead_log.move", refuse)


def no_commit(name: str, patch: pytest.MonkeyPatch) -> None:
    """No commit of an environment finds space."""
    commit = Environment.commit

    def refuse(self: Environment, work: Callable[[LmdbTransaction], object]) -> object:
        if self.name.startswith(name):
            raise StoreFull(self.path, "no space")
        return commit(self, work)

    patch.setattr(Environment, "commit", refuse)


def no_directory(patch: pytest.MonkeyPatch) -> None:
    """No partition's directory finds space."""
    mkdir = Path.mkdir

    def refuse(path: Path, *, parents: bool = False, exist_ok: bool = False) -> None:
        if path.parent.name == "staging":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
        mkdir(path, parents=parents, exist_ok=exist_ok)

    patch.setattr(Path, "mkdir", refuse)


@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    "fails",
    [no_segment, no_directory, functools.partial(no_commit, "main"), functools.partial(no_commit, "partition")],
    ids=["segment", "directory", "main", "partition"],
)
def test_without_space_nothing_is_half_done_and_nothing_lost(
    open_store: OpenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[pytest.MonkeyPatch], None],
    begun: bool,
) -> None:
    """A send is stored or refused with StoreFull; once there is space sending goes on, and crashes find the same."""
    store = open_store(config=CONFIG)
    store._engine.topics.get_or_create(TopicName.parse("a"), START_MS)
    sent: dict[MessageId, bytes] = {}
    refused = 0
    for number in range(20 if begun else 0):
        sent[send(store, number, number % 3)] = b"%d" % number
    with monkeypatch.context() as patch:
        fails(patch)
        for number in range(100, 190):
            try:
                sent[send(store, number, number % 4)] = b"%d" % number
            except StoreFull:
                refused += 1
        assert held(store) == sent
    assert refused
    full = open_store(crashed(store, tmp_path / "full"), CONFIG)
    assert held(full) == sent
    for number in range(200, 290):
        sent[send(store, number, number % 3)] = b"%d" % number
    assert held(store) == sent
    assert held(open_store(crashed(store, tmp_path / "copy"), CONFIG)) == sent
    store.close()
    assert held(open_store(config=CONFIG)) == sent


def test_without_space_for_a_segment_what_makes_space_goes_on_in_the_reserve(
    store: DelayedStore, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send is refused before the segment is full; a cancellation and an acknowledgement are not."""
    store.topic("a").subscribe("s").close()
    sent = {send(store, number): b"%d" % number for number in range(3)}
    now = store.topic("a").send(b"now")

    def send_until_refused() -> None:
        for number in range(100, 300):
            sent[send(store, number)] = b"%d" % number

    with monkeypatch.context() as patch, store.topic("a").subscribe("s") as reader:
        no_segment(patch)
        with pytest.raises(StoreFull):
            send_until_refused()
        for number in range(50):  # what a send makes before it is refused does not use the reserve up
            with pytest.raises(StoreFull):
                store.topic(f"new{number}").create()
        (message,) = reader.receive(1)
        first = next(iter(sent))
        assert (store.topic("a").cancel(first), message.message_id) == (True, now)
        reader.ack(message, durable=True)
        with pytest.raises(StoreFull):
            send(store, 300)
        copy = open_store(crashed(store, tmp_path / "copy"), CONFIG)
    del sent[first]
    assert sent.items() <= held(copy).items()
    assert first not in held(copy)
    assert copy.topic("a").subscription("s").stats().backlog == 0


def log_files(path: Path) -> list[Path]:
    """The segments of a store."""
    return sorted((path / "wal").iterdir())


def fill(store: DelayedStore, numbers: range) -> dict[MessageId, bytes]:
    """Sends that take several segments, by id."""
    return {send(store, number, number % 3): b"%d" % number for number in numbers}


def test_a_clean_close_leaves_an_empty_log(store: DelayedStore, open_store: OpenStore) -> None:
    """One file of some KiB; the next opening has everything, sends, and leaves as little."""
    sent: dict[MessageId, bytes] = {}
    for turn in range(3):
        sent |= fill(store, range(turn * 150, turn * 150 + 150))
        assert sum(file.stat().st_size for file in log_files(store.path)) > 24 << 10
        store.close()
        (file,) = log_files(store.path)
        assert file.stat().st_size <= 8 << 10
        store = open_store(config=CONFIG)
        assert sent.items() <= held(store).items()
    store.close()
    assert len(log_files(store.path)) == 1
    store = open_store(config=CONFIG)
    assert sent.items() <= held(store).items()
    assert list(store.check(deep=True)) == []


def test_a_power_cut_that_brings_removed_segments_back_changes_nothing(
    store: DelayedStore, open_store: OpenStore, tmp_path: Path
) -> None:
    """Removing them may not reach the disk: they lie before the recorded one, and are not read."""
    sent = fill(store, range(150))
    before: list[Path] = []
    with armed("wal.released", lambda: before.append(crashed(store, tmp_path / f"before{len(before)}"))):
        store.close()
    (left,) = log_files(store.path)
    back = [file for file in log_files(before[-1]) if file.name != left.name]
    assert back
    for file in back:
        shutil.copy(file, store.path / "wal" / file.name)
    store = open_store(config=CONFIG)
    assert sent.items() <= held(store).items()
    assert list(store.check(deep=True)) == []


def test_a_follower_of_the_log_goes_on_over_a_clean_close(store: DelayedStore, open_store: OpenStore) -> None:
    """It finds nothing in what is left, and the groups of who opens the store next."""
    follower = WalFollower(store.path, store._engine.storage.store_id)
    fill(store, range(10))
    assert follower.follow()
    store.close()
    assert follower.follow() == []
    store = open_store(config=CONFIG)
    sent = fill(store, range(500, 510))
    assert len(follower.follow()) == len(sent)


def test_a_backup_of_a_store_that_was_closed_has_everything(
    store: DelayedStore, open_store: OpenStore, tmp_path: Path
) -> None:
    """Its log begins with the empty segment."""
    sent = fill(store, range(50))
    store.close()
    store = open_store(config=CONFIG)
    store.backup(tmp_path / "first")
    sent_later = fill(store, range(100, 110))
    store.backup(tmp_path / "second")
    for name, wanted in (("first", sent), ("second", sent | sent_later)):
        with DelayedStore.open(tmp_path / name, CONFIG, clock=ManualClock(START_MS)) as copy:
            assert wanted.items() <= held(copy).items()


def test_the_close_of_a_store_that_failed_leaves_its_log(store: DelayedStore) -> None:
    """Groups in doubt are left to the next opening."""
    sent = fill(store, range(5))
    log = {file.name: file.stat().st_size for file in log_files(store.path)}

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with patch.object(SegmentFile, "write_through", fail), pytest.raises(StoreFailed):
        send(store, 99)
    store.close()
    assert {file.name: file.stat().st_size for file in log_files(store.path)} == log
    with DelayedStore.open(store.path, CONFIG, clock=ManualClock(START_MS)) as again:
        assert sent.items() <= held(again).items()
