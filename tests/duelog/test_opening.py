"""Opening: what is made, what a crash left and is finished, and the lock."""

import errno
import fcntl
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, aio, opening
from duelog.errors import AlreadyOpen, DamagedStore, FormatMismatch, StoreLocked
from duelog.store.codec import format as fmt
from duelog.store.codec.format import FORMAT_VERSION, PARTITION_INFO_KEY, PartitionInfo
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import LmdbTransaction
from tests.conftest import HOUR_MS, START_MS, OpenStore, in_threads, present, raising, tick_after
from tests.duelog.store_state import CONFIG, files, fill, main_of, partition_directories, refused


def test_a_new_store_is_made_with_its_parents(tmp_path: Path, open_store: OpenStore) -> None:
    """In a directory that does not exist, in one that is empty, and by a path given as text."""
    for place in ("new/deep/store", "empty"):
        path = tmp_path / place
        if place == "empty":
            path.mkdir()
        open_store(path, CONFIG).close()
        assert {child.name for child in path.iterdir()} == {"LOCK", "STORE", "main", "partitions", "staging", "trash"}
        assert not partition_directories(path)
    DelayedStore.open(str(tmp_path / "text"), CONFIG).close()
    assert (tmp_path / "text" / "STORE").is_file()


def test_a_relative_path_stays_the_same_store_when_the_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_store: OpenStore
) -> None:
    """A store opened by a relative path goes on in the same place."""
    monkeypatch.chdir(tmp_path)
    store = open_store(Path("store"), CONFIG)
    monkeypatch.chdir("/")
    store.topic("a").send(b"x", deliver_after=60)
    assert store.path == tmp_path / "store"
    store.close()
    assert len(partition_directories(tmp_path / "store")) == 1


def test_opening_and_closing_changes_no_record(path: Path, open_store: OpenStore) -> None:
    """The content is read; nothing is due."""
    fill(path)
    before = files(path)
    with open_store(path, CONFIG) as store:
        assert list(store.check()) == []
    assert files(path) == before


@pytest.mark.parametrize("left", ["staging/main", "main", "main and STORE.tmp"])
def test_a_creation_that_a_crash_cut_short_is_done_again(tmp_path: Path, path: Path, left: str) -> None:
    """A directory without STORE holds nothing that was acknowledged."""
    DelayedStore.open(tmp_path / "other", CONFIG).close()
    (path / "staging").mkdir(parents=True)
    (path / "LOCK").touch()
    shutil.copytree(tmp_path / "other" / "main", path / ("staging/main" if left == "staging/main" else "main"))
    if "STORE.tmp" in left:
        (path / "STORE.tmp").write_bytes(b'{"form')
    fill(path)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        assert list(store.check()) == []
        assert store.stats().pending == 3


def empty_partition(directory: Path) -> None:
    """A partition's directory as it is before it is registered."""
    environment = Environment(directory, name="empty", map_bytes=1 << 20, create=True)
    info = PartitionInfo(FORMAT_VERSION, bytes(16), 0, 1, 1)
    environment.write(lambda transaction: transaction.put(PARTITION_INFO_KEY, info.pack()))
    environment.close()


def test_a_partition_with_messages_that_the_catalog_has_lost_is_not_swept_away(path: Path) -> None:
    """It is registered before it is used: what holds messages and is not registered is damage, not litter."""
    fill(path)
    lost = path / "partitions" / "20300101T000000Z"
    shutil.copytree(partition_directories(path)[0], lost)
    with pytest.raises(DamagedStore, match="not in the catalog"):
        DelayedStore.open(path, CONFIG)
    assert (lost / "g000001" / "data.mdb").is_file()


def test_leftovers_of_a_crash_are_removed(path: Path, open_store: OpenStore) -> None:
    """All that lies in staging/ and trash/, and directories of partitions and generations that are not registered."""
    fill(path)
    first = partition_directories(path)[0]
    shutil.copytree(first, path / "staging" / "half-built")
    shutil.copytree(first, path / "trash" / "half-removed")
    (path / "trash" / "file").touch()
    empty_partition(path / "partitions" / "20300101T000000Z" / "g000001")
    shutil.copytree(first / "g000001", first / "g000002")
    with open_store(path, CONFIG) as store:
        assert list(store.check()) == []
        assert store.stats().pending == 3
    assert [directory.name for directory in partition_directories(path)].count("20300101T000000Z") == 0
    assert [generation.name for generation in first.iterdir()] == ["g000001"]
    assert not any((path / "staging").iterdir())
    assert not any((path / "trash").iterdir())


def test_missing_working_directories_are_made_again(path: Path, open_store: OpenStore) -> None:
    """staging/ and trash/ hold nothing of worth; without partitions nor does partitions/."""
    DelayedStore.open(path, CONFIG).close()
    for name in ("staging", "trash", "partitions"):
        (path / name).rmdir()
    with open_store(path, CONFIG) as store:
        store.topic("a").send(b"x", deliver_after=60)


HOLD = """
import sys
from duelog import DelayedStore, StoreConfig
with DelayedStore.open(sys.argv[1], StoreConfig(partition_ms=3_600_000, background=False)) as store:
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_a_second_writing_process_is_refused(path: Path) -> None:
    """Until the first has closed; it changes nothing, and a reader is let in meanwhile."""
    fill(path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert present(holder.stdout).readline() == "open\n"
    for _ in range(2):
        with pytest.raises(StoreLocked, match="another process") as caught:
            DelayedStore.open(path, CONFIG)
        assert caught.value.path == path
        assert str(path) in str(caught.value)
        assert (caught.value.pid, caught.value.host) == (holder.pid, socket.gethostname())
        assert f"for writing: process {holder.pid} ({sys.executable} -c" in str(caught.value)
    with DelayedStore.open(path, CONFIG, read_only=True) as reader:
        assert reader.stats().pending == 3
    holder.communicate("\n", timeout=30)
    assert holder.returncode == 0
    DelayedStore.open(path, CONFIG).close()


@pytest.mark.parametrize(
    ("said", "shown", "pid"),
    [
        ({"pid": 7, "began": 1, "parent": 1, "host": "web-1"}, ": process 7 on host web-1", 7),
        ({"pid": os.getpid(), "began": 1, "parent": 1, "host": socket.gethostname()}, "", None),
        ({"pid": 2**22 + 1, "began": 1, "parent": 1, "host": socket.gethostname()}, "", None),
        ({"pid": 7}, "", None),
        ("", "", None),
    ],
    ids=["of another container", "its number given out again", "gone", "half", "of an earlier version"],
)
def test_a_lock_names_no_process_but_the_one_that_has_it(
    path: Path, said: object, shown: str, pid: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a killed process names nobody; a process of another container is named with its host."""
    monkeypatch.setattr(opening, "_NAMED_WITHIN_S", 0)
    fill(path)
    with (path / "LOCK").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps(said) if said else "")
        lock.flush()
        with pytest.raises(StoreLocked, match="another process") as caught:
            DelayedStore.open(path, CONFIG)
    assert str(caught.value) == f"{path}: another process has this store open for writing{shown}"
    assert caught.value.pid == pid


def test_a_process_that_has_just_taken_the_lock_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes its name behind that. Before, of four workers that began together the first to end named none."""
    fill(path)
    with (path / "LOCK").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def named(seconds: float) -> None:
            lock.write(json.dumps({"pid": 7, "began": 1, "parent": 1, "host": "web-1"}))
            lock.flush()

        monkeypatch.setattr("duelog.opening.time.sleep", named)
        with pytest.raises(StoreLocked, match="process 7 on host web-1"):
            DelayedStore.open(path, CONFIG)


def test_a_store_opens_where_its_lock_cannot_be_written(path: Path) -> None:
    """A full disk keeps who has it from being told, and nothing else."""
    fill(path)
    with patch("duelog.opening.os.write", raising(OSError(errno.ENOSPC, "planted"))):
        store = DelayedStore.open(path, CONFIG)
    store.close()


@pytest.mark.parametrize("call", ["fcntl.flock", "os.write", "os.ftruncate"])
def test_an_opening_that_is_interrupted_as_it_takes_the_lock_keeps_no_later_one_out(path: Path, call: str) -> None:
    """The program goes on, and opens the store: it was told for ever that it had it open."""
    fill(path)
    real = getattr({"os": os, "fcntl": fcntl}[call.partition(".")[0]], call.partition(".")[2])

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with patch(f"duelog.opening.{call}", interrupted), pytest.raises(KeyboardInterrupt):
        DelayedStore.open(path, CONFIG)
    DelayedStore.open(path, CONFIG).close()


def test_a_close_that_is_interrupted_as_it_gives_the_lock_back_gives_it_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a close is tried again."""
    store = DelayedStore.open(path, CONFIG)
    real = opening._Held.lock

    class Interrupted:
        """The lock, the first time it is taken."""

        def __enter__(self) -> None:
            monkeypatch.setattr(opening._Held, "lock", real)
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            """Never come to."""

    monkeypatch.setattr(opening._Held, "lock", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        store.close()
    DelayedStore.open(path, CONFIG).close()


def test_a_store_made_by_its_class_says_how_it_is_opened(path: Path) -> None:
    """With the path as it was given, whatever else was; the asyncio face, too."""
    bad: Any = DelayedStore
    for arguments in ((str(path),), (str(path), CONFIG)):
        with pytest.raises(TypeError, match=re.escape(f"DelayedStore.open({str(path)!r})")):
            bad(*arguments, read_only=True)
    with pytest.raises(TypeError, match=re.escape("DelayedStore.open(path)")):
        bad(path=path)
    bad = aio.DelayedStore
    with pytest.raises(TypeError, match=re.escape(f"async with DelayedStore.open({str(path)!r})")):
        bad(str(path))
    assert not path.exists()


def test_an_opening_that_is_refused_holds_nothing(path: Path, open_store: OpenStore) -> None:
    """Neither the lock nor an environment: as soon as the reason is gone, the same process opens it."""
    fill(path)
    victim = partition_directories(path)[0]
    victim.rename(path.parent / "kept")
    descriptors = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(DamagedStore):
            DelayedStore.open(path, CONFIG)
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    (path.parent / "kept").rename(victim)
    assert open_store(path, CONFIG).stats().pending == 3


@pytest.mark.parametrize("second", [False, True], ids=["to write", "to read"])
@pytest.mark.parametrize("first", [False, True], ids=["written", "read"])
def test_a_second_opening_in_one_process_says_so(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, second: bool
) -> None:
    """By the same path, a relative one, one with dots or a symbolic link; for writing and for reading."""
    fill(path)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    others = (path, Path("store"), path / ".." / "store", tmp_path / "link")
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS), read_only=first) as store:
        descriptors = set(os.listdir("/proc/self/fd"))
        for other in others:
            with pytest.raises(AlreadyOpen, match="this process has this store open already") as caught:
                DelayedStore.open(other, CONFIG, read_only=second)
            assert caught.value.path == other.absolute()
            assert isinstance(caught.value, StoreLocked)
            assert set(os.listdir("/proc/self/fd")) <= descriptors
        assert store.stats().pending == 3
    for other in others:
        DelayedStore.open(other, CONFIG, read_only=second).close()


def test_of_threads_that_open_one_store_at_once_one_gets_it_and_others_hear_why(path: Path) -> None:
    """None takes another thread of its own process for another process."""
    fill(path)
    start, errors, stores = threading.Barrier(8), list[Exception](), list[DelayedStore]()

    def open_it() -> None:
        start.wait()
        try:
            stores.append(DelayedStore.open(path, CONFIG))
        except StoreLocked as error:
            errors.append(error)

    in_threads(open_it for _ in range(8))
    assert len(stores) == 1
    assert [type(error) for error in errors] == [AlreadyOpen] * 7
    stores[0].close()


def test_a_child_of_a_process_that_has_the_store_open_hears_of_another_process(path: Path) -> None:
    """A child cannot share what its parent holds."""
    fill(path)
    with DelayedStore.open(path, CONFIG):
        child = os.fork()
        if not child:
            try:
                DelayedStore.open(path, CONFIG)
            except StoreLocked as error:
                os._exit(0 if type(error) is StoreLocked else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_of_a_process_that_reads_the_store_hears_what_it_may_do(path: Path) -> None:
    """It was told to share what a child may not use."""
    fill(path)
    reading, writing = os.pipe()
    with DelayedStore.open(path, CONFIG, read_only=True):
        child = os.fork()
        if not child:
            try:
                DelayedStore.open(path, CONFIG, read_only=True)
            except AlreadyOpen as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(AlreadyOpen) as caught:
            DelayedStore.open(path, CONFIG, read_only=True)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert "or the one that it was forked from has: then fork before that opens it" in said.read()
    assert "forked" not in str(caught.value)


def test_a_store_that_a_program_forgets_to_close_keeps_its_lock(tmp_path: Path) -> None:
    """Nothing is given back by the collection of garbage: its environments may be open still."""
    lock = opening.StoreLock(tmp_path)
    lock.take()
    file = lock._file
    del lock
    gc.collect()
    with pytest.raises(AlreadyOpen):
        opening.StoreLock(tmp_path).take()
    opening._Held.files.pop(file).close()
    opening.StoreLock(tmp_path).release()


def test_a_file_is_refused(path: Path) -> None:
    """It stays a file."""
    path.write_bytes(b"precious")
    error = refused(path, FormatMismatch)
    assert (error.field, error.found, error.expected) == ("path", "a file", "a directory")


@pytest.mark.parametrize("stranger", ["notes.txt", "partitions/20300101T000000Z/g000001/data.mdb", ".hidden"])
def test_a_directory_that_is_no_store_is_refused(path: Path, stranger: str) -> None:
    """Not even a lock is left in it."""
    (path / stranger).parent.mkdir(parents=True)
    (path / stranger).write_bytes(b"precious")
    error = refused(path, FormatMismatch)
    assert (error.path, error.field, error.found) == (path, "STORE", None)
    assert not (path / "LOCK").exists()


def test_a_store_that_has_lost_its_store_file_is_refused_and_kept(path: Path) -> None:
    """Its messages are not taken for what a creation left: also where no partition is there to tell."""
    with DelayedStore.open(path, CONFIG) as store:
        store.topic("a").send(b"precious")
    (path / "STORE").unlink()
    error = refused(path, FormatMismatch)
    assert (error.field, error.found) == ("STORE", None)
    shutil.rmtree(path)
    fill(path)
    (path / "STORE").unlink()
    refused(path, FormatMismatch)


def write_store_file(path: Path, **changes: object) -> None:
    """Change fields of STORE, with the checksum that goes with them."""
    fields = json.loads((path / "STORE").read_bytes())
    del fields["crc"]
    fields.update(changes)
    fields["crc"] = crc32(json.dumps(fields, sort_keys=True).encode())
    (path / "STORE").write_text(json.dumps(fields))


def test_another_span_or_format_is_refused_with_both_values(path: Path) -> None:
    """It opens with its own; version 1 was never released; of a later one nothing else may be understood."""
    fill(path)
    error = refused(path, FormatMismatch, StoreConfig(partition_ms=86_400_000))
    assert (error.field, error.found, error.expected) == ("partition_ms", HOUR_MS, 86_400_000)
    assert "3600000" in str(error)
    assert "86400000" in str(error)
    DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)).close()
    store_file = (path / "STORE").read_bytes()
    for version in (1, 3, 99, "2", None):
        write_store_file(path, format=version, invented_later={"a": 1})
        error = refused(path, FormatMismatch)
        assert (error.field, error.found, error.expected) == ("format", version, 2)
        (path / "STORE").write_text(json.dumps({"format": version, "crc": 0}))
        assert refused(path, FormatMismatch).found == version
    (path / "STORE").write_bytes(store_file)
    main = main_of(path)
    info = fmt.PartitionInfo.unpack(main.get(fmt.PARTITION_INFO_KEY) or b"")._replace(version=7)
    main.write(lambda transaction: transaction.put(fmt.PARTITION_INFO_KEY, info.pack()))
    main.close()
    error = refused(path, FormatMismatch)
    assert (error.field, error.found, error.expected) == ("format", 7, 1)


DAMAGED: list[bytes] = [b"", b"\0" * 100, b"not json", b"[]", b"{}", b"5", b"\xff\xfe", b'{"format": 2, "crc": 0}']


def test_a_damaged_store_file_and_another_stores_main_environment_are_refused(tmp_path: Path, path: Path) -> None:
    """It is not opened as if it were this one's; the error has what was found."""
    fill(path)
    fill(tmp_path / "other")
    shutil.rmtree(path / "main")
    shutil.copytree(tmp_path / "other" / "main", path / "main")
    error = refused(path, DamagedStore)
    assert error.path == path / "main"
    assert "another store" in error.reason
    for content in DAMAGED:
        (path / "STORE").write_bytes(content)
        assert refused(path, DamagedStore).path == path / "STORE"


@pytest.mark.parametrize("table", [fmt.Table.PARTITION_INFO, fmt.Table.PARTITION, fmt.Table.FRONTIER])
def test_a_damaged_record_of_the_catalog_is_refused_at_opening(path: Path, table: fmt.Table) -> None:
    """One flipped bit in a record that opening needs."""
    clock = ManualClock(START_MS)
    fill(path)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        tick_after(store, clock, 5)
    main = main_of(path)

    def flip(transaction: LmdbTransaction) -> None:
        cursor = transaction.raw.cursor()
        assert cursor.set_range(fmt.prefix(table))
        value = bytearray(cursor.value())
        value[0] ^= 1
        transaction.raw.put(bytes(cursor.key()), bytes(value))

    main.commit(flip)
    main.close()
    error = refused(path, DamagedStore)
    assert error.path == path / "main"
    assert "checksum" in error.reason


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2 // 4096 * 4096),
    "of another kind": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(8176)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_main_environment_is_refused(path: Path, damage: str) -> None:
    """And never replaced by an empty one."""
    fill(path)
    DAMAGES[damage](path / "main" / "data.mdb")
    assert refused(path, DamagedStore).path.parts[len(path.parts)] == "main"


@pytest.mark.parametrize("missing", ["the file", "the generation", "the directory", "all of them", "the name"])
def test_a_missing_partition_directory_is_refused(path: Path, missing: str) -> None:
    """It is named, nothing else is touched, and once it is back, or has its name again, the store opens in full."""
    fill(path)
    victim = partition_directories(path)[1]
    gone = {
        "the file": victim / "g000001" / "data.mdb",
        "the generation": victim / "g000001",
        "all of them": path / "partitions",
    }.get(missing, victim)
    kept = victim.with_name("20991231T230000Z") if missing == "the name" else path.parent / "kept"
    gone.rename(kept)
    (path / "staging" / "something").mkdir()
    error = refused(path, DamagedStore)
    assert "is missing" in error.reason
    if missing != "all of them":
        assert error.path == victim / "g000001"
    kept.rename(gone)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        assert list(store.check(deep=True)) == []
        assert store.stats().pending == 3


def swap(path: Path) -> tuple[Path, Path]:
    """Exchange the directories of the last two partitions."""
    one, other = partition_directories(path)[-2:]
    one.rename(path / "staging" / "held")
    other.rename(one)
    (path / "staging" / "held").rename(other)
    return one, other


def use_send(store: DelayedStore) -> object:
    """Append to the third partition."""
    return store.topic("a").send(b"x", deliver_after=2 * 3600 + 5)


def use_scheduled(store: DelayedStore) -> object:
    """Read ahead through all partitions."""
    return list(store.topic("a").scheduled())


def use_receive(store: DelayedStore) -> object:
    """Have the clock reach the second partition, which is not fired from; what was due before is received."""
    clock = store._engine.clock.wrapped
    assert isinstance(clock, ManualClock)
    (suspended,) = tick_after(store, clock, 2 * HOUR_MS).suspended
    assert suspended.task == "load"
    assert len(store.topic("a").subscribe("reader").receive(10, timeout=0)) == 4
    raise suspended.error


@pytest.mark.parametrize("use", [use_send, use_scheduled, use_receive])
def test_swapped_partition_directories_are_refused_where_they_are_used(
    path: Path, use: Callable[[DelayedStore], object]
) -> None:
    """Each says of itself which partition it is; nothing is written into the wrong one or delivered from it."""
    fill(path, 4)
    one, other = swap(path)
    before = files(one), files(other)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        with pytest.raises(DamagedStore) as caught:
            use(store)
        assert str(path / "partitions") in str(caught.value)
        assert "the catalog says" in str(caught.value)
        assert {finding.code for finding in store.check()} >= {"partition"}
    assert (files(one), files(other)) == before


def test_a_partition_of_another_store_is_refused_where_it_is_used(tmp_path: Path, path: Path) -> None:
    """Though it is of the same time."""
    fill(path)
    fill(tmp_path / "other")
    victim = partition_directories(path)[-1]
    shutil.rmtree(victim)
    shutil.copytree(partition_directories(tmp_path / "other")[-1], victim)
    before = files(victim)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        with pytest.raises(DamagedStore) as caught:
            list(store.topic("a").scheduled())
        assert victim in caught.value.path.parents
    assert files(victim) == before


def test_a_partition_that_lost_what_had_fired_is_refused(path: Path) -> None:
    """An older copy of its directory ends before its frontier: ids would be given out twice."""
    fill(path)
    first = partition_directories(path)[0]
    shutil.copytree(first, path.parent / "older")
    clock = ManualClock(START_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        store.topic("a").send_batch([Message(b"more", deliver_after=2)] * 3)
        assert tick_after(store, clock, 5_000).fired == 4
    shutil.rmtree(first)
    (path.parent / "older").rename(first)
    error = refused(path, DamagedStore)
    assert error.path == first / "g000001"
    assert "entries were lost" in error.reason


@pytest.mark.parametrize("address", ["duelog://localhost:6700", "duelog+ssl://host:1", "s3://bucket/prefix"])
def test_an_address_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Opening made a store in a directory `duelog:`; who meant `duelog.connect` sent to it."""
    monkeypatch.chdir(tmp_path)
    for read_only in (False, True):
        with pytest.raises(FormatMismatch, match=r"is 'an address', expected 'a directory; duelog\.connect"):
            DelayedStore.open(address, read_only=read_only)
    assert list(tmp_path.iterdir()) == []
