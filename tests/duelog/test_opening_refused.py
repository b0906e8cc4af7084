"""Opening what is no store, or none of this format, or damaged: refused by name, and left as it was."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import DamagedStore, FormatMismatch
from duelog.store.codec import format as fmt
from duelog.store.env.transaction import LmdbTransaction
from tests.conftest import START_MS
from tests.duelog.store_state import CONFIG, HOUR_MS, files, fill, main_of, partition_directories, refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store of a test lies."""
    return tmp_path / "store"


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


def test_another_partition_span_is_refused_with_both_values(path: Path) -> None:
    """And the store opens with its own."""
    fill(path)
    error = refused(path, FormatMismatch, StoreConfig(partition_ms=86_400_000))
    assert (error.field, error.found, error.expected) == ("partition_ms", HOUR_MS, 86_400_000)
    assert "3600000" in str(error)
    assert "86400000" in str(error)
    DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)).close()


@pytest.mark.parametrize("version", [1, 3, 99, "2", None])
def test_a_store_of_another_format_is_refused_with_both_versions(path: Path, version: object) -> None:
    """Version 1 was never released; also where what else a later format says is not understood."""
    fill(path)
    write_store_file(path, format=version, invented_later={"a": 1})
    error = refused(path, FormatMismatch)
    assert (error.field, error.found, error.expected) == ("format", version, 2)
    (path / "STORE").write_text(json.dumps({"format": version, "crc": 0}))
    assert refused(path, FormatMismatch).found == version


DAMAGED: list[bytes] = [b"", b"\0" * 100, b"not json", b"[]", b"{}", b"5", b"\xff\xfe", b'{"format": 2, "crc": 0}']


def test_a_damaged_store_file_is_refused_by_name(path: Path) -> None:
    """The error has what was found."""
    fill(path)
    for content in DAMAGED:
        (path / "STORE").write_bytes(content)
        error = refused(path, DamagedStore)
        assert error.path == path / "STORE"


def test_the_main_environment_of_another_store_is_refused(tmp_path: Path, path: Path) -> None:
    """It is not opened as if it were this one's."""
    fill(path)
    fill(tmp_path / "other")
    shutil.rmtree(path / "main")
    shutil.copytree(tmp_path / "other" / "main", path / "main")
    error = refused(path, DamagedStore)
    assert error.path == path / "main"
    assert "another store" in error.reason


def test_a_main_environment_of_a_later_format_is_refused(path: Path) -> None:
    """Whatever STORE says."""
    fill(path)
    main = main_of(path)
    info = fmt.PartitionInfo.unpack(main.get(fmt.PARTITION_INFO_KEY) or b"")._replace(version=7)
    main.write(lambda transaction: transaction.put(fmt.PARTITION_INFO_KEY, info.pack()))
    main.close()
    error = refused(path, FormatMismatch)
    assert (error.field, error.found, error.expected) == ("format", 7, 1)


@pytest.mark.parametrize("table", [fmt.Table.PARTITION_INFO, fmt.Table.PARTITION, fmt.Table.FRONTIER])
def test_a_damaged_record_of_the_catalog_is_refused_at_opening(path: Path, table: fmt.Table) -> None:
    """One flipped bit in a record that opening needs."""
    clock = ManualClock(START_MS)
    fill(path)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        clock.advance(5)
        store.tick()
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


def remove(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def empty(path: Path) -> None:
    """Leave nothing in a file."""
    os.truncate(path, 0)


def cut_short(path: Path) -> None:
    """Leave the first half of a file."""
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def overwrite(path: Path) -> None:
    """Leave another kind of file."""
    path.write_bytes(b"SQLite format 3\0" + bytes(8176))


@pytest.mark.parametrize("damage", [remove, empty, cut_short, overwrite])
def test_a_damaged_main_environment_is_refused(path: Path, damage: Callable[[Path], None]) -> None:
    """And never replaced by an empty one."""
    fill(path)
    damage(path / "main" / "data.mdb")
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
    clock.advance(2 * HOUR_MS)
    (suspended,) = store.tick().suspended
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
        clock.advance(5_000)
        assert store.tick().fired == 4
    shutil.rmtree(first)
    (path.parent / "older").rename(first)
    error = refused(path, DamagedStore)
    assert error.path == first / "g000001"
    assert "entries were lost" in error.reason
