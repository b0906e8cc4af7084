"""Errors of the system are told as errors of duelog, with their facts; a shortage is no damage: the next call works."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lmdb
import pytest

from duelog import DelayedStore, DuelogError, ManualClock, Message, StoreConfig, Topic
from duelog.errors import (
    DamagedStore,
    InvalidArgument,
    NoPermission,
    ResourceShortage,
    StoreFailed,
    StoreFull,
    StoreUnavailable,
)
from duelog.markers import reader
from duelog.markers.reader import MessageMaker
from duelog.metrics import instruments
from duelog.store.codec.run import Run
from duelog.store.env.environment import Environment
from duelog.store.files import directory, pages, system_errors
from duelog.store.files.directory import LOOK_NS, InPlace
from duelog.store.files.system_errors import explain, explained
from duelog.store.log.scan import RunFinder
from tests.conftest import HOUR_MS, START_MS, OpenStore, applied, raising
from tests.duelog.side_by_side import crashed

CONFIG = StoreConfig(partition_ms=HOUR_MS, preload_ms=0)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EMFILE, ResourceShortage),
        (errno.ENFILE, ResourceShortage),
        (errno.ENOMEM, ResourceShortage),
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EACCES, NoPermission),
        (errno.EROFS, NoPermission),
        (errno.ENOENT, DamagedStore),
        (errno.EIO, StoreUnavailable),
        (errno.ENOTDIR, StoreUnavailable),
    ],
)
def test_the_system_and_lmdb_are_told_alike(number: int, expected: type[DuelogError]) -> None:
    """By number or by text: the same error, with the number and the path."""
    path, other = Path("/store"), Path("/store/data.mdb")
    for error, where in (
        (OSError(number, os.strerror(number)), path),
        (OSError(number, os.strerror(number), str(other)), other),
        (lmdb.Error(f"/store: {os.strerror(number)}"), path),
    ):
        told: Any = explain(path, error)
        assert (type(told), told.path, told.__cause__) == (expected, where, error)
        if isinstance(told, StoreUnavailable):
            assert told.errno == number


def test_pages_that_lmdb_finds_wrong_are_damage() -> None:
    """And an error of duelog stays as it is."""
    assert type(explain(Path("/x"), lmdb.CorruptedError("mdb_get: MDB_CORRUPTED"))) is DamagedStore
    assert type(explain(Path("/x"), lmdb.PageNotFoundError("mdb_get: MDB_PAGE_NOTFOUND"))) is DamagedStore
    assert type(explain(Path("/x"), lmdb.ReadersFullError("MDB_READERS_FULL"))) is ResourceShortage
    told = DamagedStore(Path("/x"), "is short")
    assert explain(Path("/y"), told) is told
    with pytest.raises(DamagedStore) as caught, explained(Path("/y")):
        raise told
    assert caught.value is told


@pytest.mark.parametrize("unusable", ["a-file/store", "x" * 300, "loop/store"])
def test_opening_a_path_that_cannot_be_used_says_so(tmp_path: Path, unusable: str) -> None:
    """With the number of the system, and nothing is made."""
    (tmp_path / "a-file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    for read_only in (False, True):
        with pytest.raises(DuelogError):
            DelayedStore.open(tmp_path / unusable, read_only=read_only)
    assert {found.name for found in tmp_path.iterdir()} == {"a-file", "loop"}


class PathOfBytes:
    """What `os.PathLike` allows, and a path of a store does not."""

    def __fspath__(self) -> bytes:
        return b"a"


@pytest.mark.parametrize(("path", "reason"), [("a\0b", "NUL"), ("a\udcff", "UTF-8"), (PathOfBytes(), "a path")])
def test_a_path_that_is_none_or_that_lmdb_cannot_take_is_refused(
    store: DelayedStore, path: str | PathOfBytes, reason: str
) -> None:
    """Passed as an argument: it was UnicodeEncodeError, ValueError, or TypeError."""
    for given in (DelayedStore.open, store.backup):
        with pytest.raises(InvalidArgument, match=reason):
            given(path)  # type: ignore[arg-type]


def test_a_backup_to_a_place_that_cannot_be_used_says_so(store: DelayedStore, tmp_path: Path) -> None:
    """And the store goes on."""
    (tmp_path / "a-file").write_bytes(b"")
    with pytest.raises(StoreUnavailable) as caught:
        store.backup(tmp_path / "a-file" / "copy")
    assert (caught.value.path, caught.value.errno) == (tmp_path / "a-file", errno.EEXIST)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ENOSPC])
def test_a_partition_whose_directory_is_refused_stays_in_the_log_until_it_can_be_made(
    store: DelayedStore, topic: Topic, clock: ManualClock, number: int
) -> None:
    """What was sent is stored, read, cancelled, found after a crash; who applies the log is told why it cannot be."""
    ids = topic.send_payloads([b"later", b"never"], deliver_after=3_600).to_list()
    mkdir = Path.mkdir

    def refusing(path: Path, *arguments: Any, **options: Any) -> None:
        if "staging" in path.parts:
            raise OSError(number, os.strerror(number), str(path))
        mkdir(path, *arguments, **options)

    with patch.object(Path, "mkdir", refusing):
        for _ in range(2):
            with pytest.raises((StoreUnavailable, StoreFull)) as caught:
                applied(store)
            assert "staging" in str(caught.value)
        assert topic.cancel(ids[1])
        assert [bytes(message.payload) for message in topic.scheduled()] == [b"later"]
        assert (list(store.check(deep=True)), list((store.path / "staging").iterdir())) == ([], [])
        clock.advance(HOUR_MS)
        with topic.subscribe("s") as reader:
            with suppress(StoreFull):  # its other steps are done
                store.tick()
            assert [bytes(message.payload) for message in reader.receive(10)] == [b"later"]
        with DelayedStore.open(crashed(store, store.path.parent / "copy"), store.config, clock=clock) as copy:
            assert [each.start_ms for each in copy.partitions()] == [each.start_ms for each in store.partitions()]
    clock.advance(1_000)
    store.tick()  # tries again
    assert list(store.check(deep=True)) == []
    assert not any(partition.vacant for partition in store._engine.storage.partitions)


def removed(path: Path) -> None:
    """The directory and all in it."""
    shutil.rmtree(path)


def moved(path: Path) -> None:
    """The directory has another name."""
    path.rename(path.with_name("moved"))


def replaced(path: Path) -> None:
    """Another store lies where it was."""
    shutil.copytree(path, path.with_name("copy"))
    shutil.rmtree(path)
    path.with_name("copy").rename(path)


@pytest.mark.parametrize("gone", [removed, moved, replaced])
@pytest.mark.parametrize("what", ["a partition", "the main log", "several partitions"])
def test_a_store_whose_directory_was_removed_acknowledges_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: Callable[[Path], None], what: str, clock: ManualClock
) -> None:
    """The first send at which its file is looked for raises StoreFailed that says so, and so does every later call."""
    monkeypatch.setattr(directory, "LOOK_NS", 0)
    store = DelayedStore.open(tmp_path / "store", StoreConfig(partition_ms=HOUR_MS), clock=clock)
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        ways: dict[str, Callable[[], object]] = {
            "a partition": lambda: topic.send(b"x", deliver_after=60),
            "the main log": lambda: topic.send(b"x"),
            "several partitions": lambda: topic.send_batch(
                [Message(b"x", deliver_after=60 + 3600 * at) for at in (0, 1)]
            ),
        }
        for _ in range(3):
            ways[what]()
        gone(store.path)
        with pytest.raises(StoreFailed) as caught:
            ways[what]()
        assert "removed" in str(caught.value)
        for call in (ways[what], consumer.receive, store.tick):
            with pytest.raises(StoreFailed, match="removed"):
                call()
        assert [found.task for found in store.suspended()] == ["store"]
    store.close()


def test_a_file_that_was_removed_is_noticed_ten_milliseconds_after_the_last_look(tmp_path: Path) -> None:
    """The first commit looks; those that follow do not until the time has passed."""
    file = tmp_path / "file"
    file.touch()
    in_place = InPlace(file)
    in_place.verify(1_000)
    file.unlink()
    in_place.verify(1_000 + LOOK_NS - 1)
    with pytest.raises(FileNotFoundError, match="removed"):
        in_place.verify(1_000 + LOOK_NS)


SPAN_MS = 20_000


@pytest.fixture
def fired(open_store: OpenStore, clock: ManualClock) -> DelayedStore:
    """A store whose five messages have fired, each from a closed partition of its own, one of which is open."""
    store = open_store(config=StoreConfig(partition_ms=SPAN_MS, preload_ms=0, max_open_partitions=1))
    topic = store.topic("t")
    topic.subscribe("s").close()
    for number in range(5):
        topic.send(b"%d" % number, deliver_at=START_MS + SPAN_MS * number + 1_000)
    clock.advance(200_000)
    assert store.tick().closed == 5
    for partition in store._engine.storage.partitions:
        partition.walked = None  # as after a restart
    return store


def refuse(patch: pytest.MonkeyPatch, owner: object, name: str, path: Path, error: BaseException) -> None:
    """Have a function raise `error` for an environment at `path`; one that is called with no path raises always."""
    original = getattr(owner, name)

    def refusing(what: Any, *arguments: Any, **options: Any) -> Any:
        about = getattr(what, "path", what)
        if not isinstance(about, str | Path) or Path(about) in (path, path / "data.mdb"):
            raise error
        return original(what, *arguments, **options)

    patch.setattr(owner, name, refusing)


NO_DESCRIPTOR = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "data.mdb")
NO_READER_SLOT = system_errors.explain(Path("data.mdb"), lmdb.ReadersFullError("mdb_txn_begin: MDB_READERS_FULL"))


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (pages, "refuse_broken", NO_DESCRIPTOR),
        (os, "open", NO_DESCRIPTOR),  # the look at a file's pages before it is opened for the first time
        (lmdb, "open", lmdb.Error(f"/store: {os.strerror(errno.EMFILE)}")),
        (lmdb, "open", lmdb.MemoryError(f"/store: {os.strerror(errno.ENOMEM)}")),
        (Environment, "_begin_read", NO_READER_SLOT),
        (MessageMaker, "make", MemoryError()),
    ],
)
def test_a_shortage_while_messages_are_read_quarantines_none_of_them(
    fired: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception
) -> None:
    """The receiver is told, hands out nothing, and the next call gives all five; no record holds their partitions."""
    third = list(fired._engine.storage.partitions)[2]
    with fired.topic("t").subscribe("s") as consumer:
        with monkeypatch.context() as patch:
            refuse(patch, owner, name, third.path, error)
            with pytest.raises((ResourceShortage, MemoryError)):
                consumer.receive(10)
        assert fired.stats().set_aside == 0
        messages = consumer.receive(10)
        assert [message.payload for message in messages] == [b"0", b"1", b"2", b"3", b"4"]
        consumer.ack(messages, durable=True)
    clock.advance(5 * 3_600_000)
    fired.tick()
    assert (fired.stats().set_aside, fired.partitions()) == (0, [])


def test_a_damaged_page_quarantines_what_lies_on_it_and_nothing_else(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB refuses one of ten runs of a partition: nine messages come, and one is quarantined with its reason."""
    store = open_store(config=StoreConfig(partition_ms=3_600_000, run_entries=1))
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        ids = [topic.send(b"%d" % number, deliver_after=1) for number in range(10)]
        clock.advance(1_000)

        class Refusing(RunFinder):
            def find(self, ledger_id: int, entry_id: int) -> Run | None:
                if (ledger_id, entry_id) == ids[4]:
                    raise lmdb.CorruptedError("mdb_get: MDB_CORRUPTED: Located page was wrong type")
                return super().find(ledger_id, entry_id)

        monkeypatch.setattr(reader, "RunFinder", Refusing)
        assert [message.payload for message in consumer.receive(10)] == [b"%d" % at for at in range(10) if at != 4]
        assert store.stats().set_aside == 1
    store._engine.delivery.quarantine._known.clear()
    store._engine.delivery.quarantine._unwritten.clear()


@pytest.mark.parametrize(("number", "expected"), [(errno.EMFILE, ResourceShortage), (errno.EIO, DamagedStore)])
def test_pages_that_cannot_be_read_for_now_are_no_damage(
    fired: DelayedStore, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    """A sector that cannot be read is."""

    def refusing(directory: Path) -> object:
        raise OSError(number, os.strerror(number), str(directory))

    monkeypatch.setattr(pages, "open_file", refusing)
    with pytest.raises(expected):
        pages.find_problems(fired.path / "main")


def test_a_store_whose_thread_cannot_be_started_is_not_opened_and_holds_nothing(tmp_path: Path) -> None:
    """Raises ResourceShortage; no descriptor, lock or gauge is left, and the store is opened once there are threads."""
    config = StoreConfig(background=True)
    DelayedStore.open(tmp_path / "store", config).close()
    descriptors, reporting = len(os.listdir("/proc/self/fd")), set(instruments().stores)
    refused = pytest.raises(ResourceShortage, match="thread cannot be started")
    with patch.object(threading.Thread, "start", raising(RuntimeError("can't start new thread"))), refused as raised:
        DelayedStore.open(tmp_path / "store", config)
    assert raised.value.errno == errno.EAGAIN
    assert (len(os.listdir("/proc/self/fd")), set(instruments().stores)) == (descriptors, reporting)
    DelayedStore.open(tmp_path / "store", config).close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
def test_a_backup_says_what_it_is_short_of(open_store: OpenStore, tmp_path: Path, number: int) -> None:
    """A shortage of descriptors is not a full disk; either way nothing is left, and the next backup is made."""
    store, open_ = open_store(), Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "data.mdb" and path.is_relative_to(tmp_path / "copy"):
            raise OSError(number, os.strerror(number), str(path))
        return open_(path, *arguments, **options)

    with patch.object(Path, "open", refuse), pytest.raises(ResourceShortage if number == errno.EMFILE else StoreFull):
        store.backup(tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    store.backup(tmp_path / "copy")
