"""Reading the write-ahead log: all of it, or on and on; what is missing is an error."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from duelog.errors import DamagedStore
from duelog.store.wal.segment import Segment, file_name, read_segment
from duelog.store.wal.wal_reader import DIRECTORY, WalFollower, read_wal, write_wal
from tests.store.wal.segments import GROUPS_AT, SECTOR, SIZE, STORE_ID, flip, make_segment, numbers, row, write_at


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The directory of a log of three segments, the last with one group."""
    directory = tmp_path / DIRECTORY
    make_segment(directory, 3, [[1], [2, 3]], ended=True)
    make_segment(directory, 4, [[4]], ended=True)
    make_segment(directory, 5, [[5]])
    return directory


def test_a_log_is_read_from_the_segment_that_the_record_names(log: Path, tmp_path: Path) -> None:
    """In order, to the last segment; those before it are not looked at."""
    found = read_wal(tmp_path, STORE_ID, 3)
    assert numbers(found.groups) == [[1], [2, 3], [4], [5]]
    assert (found.oldest, found.last) == (3, 5)
    assert found.tail == read_segment(log, 5, STORE_ID)
    (log / file_name(3)).unlink()
    assert numbers(read_wal(tmp_path, STORE_ID, 4).groups) == [[4], [5]]


def test_groups_that_no_record_leads_to_are_an_error(log: Path, tmp_path: Path) -> None:
    """The log is begun by the record: it has been lost."""
    with pytest.raises(DamagedStore, match="does not say that the log was begun"):
        read_wal(tmp_path, STORE_ID, None)


def test_a_log_that_was_not_begun_is_empty(log: Path, tmp_path: Path) -> None:
    """Segments that no record names were never appended to; numbers go on behind theirs."""
    for segment in log.iterdir():
        segment.write_bytes(segment.read_bytes()[:4096].ljust(segment.stat().st_size, b"\0"))
    found = read_wal(tmp_path, STORE_ID, None)
    assert (found.groups, found.last, found.tail, found.oldest) == ([], 5, None, 6)
    assert read_wal(tmp_path / "nowhere", STORE_ID, None).last == 0
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("number", [3, 4, 5])
def test_a_missing_segment_is_an_error(log: Path, tmp_path: Path, number: int) -> None:
    """At the beginning, in the middle and where the last one says that the log goes on."""
    (log / file_name(number)).unlink()
    with pytest.raises(DamagedStore, match="is missing: what it holds was acknowledged") as caught:
        read_wal(tmp_path, STORE_ID, 3)
    assert caught.value.path == log / file_name(number)


def test_a_damaged_end_before_a_segment_with_groups_is_an_error(log: Path, tmp_path: Path) -> None:
    """The groups that follow it would be lost silently."""
    flip(log / file_name(4), GROUPS_AT + SECTOR + 20)
    with pytest.raises(DamagedStore, match="its end, from byte 4608 on, cannot be read, and 5 follows") as caught:
        read_wal(tmp_path, STORE_ID, 3)
    assert caught.value.path == log / file_name(4)


def test_a_damaged_end_before_a_segment_that_has_ended_is_an_error(log: Path, tmp_path: Path) -> None:
    """The next one holds nothing, but the one after it may."""
    (log / file_name(4)).unlink()
    make_segment(log, 4, [], ended=True)
    assert numbers(read_wal(tmp_path, STORE_ID, 3).groups) == [[1], [2, 3], [5]]
    flip(log / file_name(3), GROUPS_AT + 2 * SECTOR + 20)
    with pytest.raises(DamagedStore, match="and 4 follows"):
        read_wal(tmp_path, STORE_ID, 3)


def test_a_segment_that_was_prepared_and_not_begun_is_not_read(log: Path, tmp_path: Path) -> None:
    """It is there before the end of the one before is written."""
    make_segment(log, 6, [])
    found = read_wal(tmp_path, STORE_ID, 3)
    assert (numbers(found.groups)[-1], found.last) == ([5], 5)


def test_a_copy_of_a_log_is_read_like_the_log(log: Path, tmp_path: Path) -> None:
    """From its oldest segment on, also where that has no group, and where the log is empty."""
    groups = read_wal(tmp_path, STORE_ID, 3).groups
    for kept, oldest in ((groups, 3), (groups[2:], 4), (groups[2:], 2), ([], 9)):
        copy = tmp_path / f"copy{oldest}"
        copy.mkdir()
        files = write_wal(copy, STORE_ID, kept, oldest)
        assert files == sorted((copy / DIRECTORY).iterdir())
        found = read_wal(copy, STORE_ID, oldest)
        assert numbers(found.groups) == numbers(kept)
        assert [group.number for group in found.groups] == [group.number for group in kept]


# -- following -------------------------------------------------------------------------------------


def test_a_follower_reads_on_where_it_stopped(tmp_path: Path) -> None:
    """Over segments, and into one that is made meanwhile; it gives all that is there each time."""
    follower = WalFollower(tmp_path, STORE_ID)
    assert follower.follow() == []
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    with closing(Segment(directory, 1, STORE_ID, SIZE)) as first:
        assert follower.follow() == []
        first.append([row(1, bytes(600)), row(2)], flush=True)
        first.append([row(3)], flush=False)
        assert numbers(follower.follow()) == [[1, 2], [3]]
        first.append([row(4)], flush=True)
        first.append([], flush=True)
    with closing(Segment(directory, 2, STORE_ID, SIZE)) as second:
        assert numbers(follower.follow()) == [[1, 2], [3], [4]]
        second.append([row(5)], flush=True)
        assert numbers(follower.follow()) == [[1, 2], [3], [4], [5]]
    assert numbers(follower.follow()) == numbers(read_wal(tmp_path, STORE_ID, 1).groups)


def test_a_follower_forgets_a_segment_that_is_applied(log: Path, tmp_path: Path) -> None:
    """Its file was renamed: what it held is not taken for what it holds."""
    follower = WalFollower(tmp_path, STORE_ID)
    assert numbers(follower.follow()) == [[1], [2, 3], [4], [5]]
    (log / file_name(3)).rename(log / file_name(6))
    assert numbers(follower.follow()) == [[4], [5]]
    make_segment(log, 6, [[6]])
    assert numbers(follower.follow()) == [[4], [5], [6]]


def test_a_follower_does_not_read_a_group_that_is_written_in_part(tmp_path: Path) -> None:
    """It is read once it is whole, with what comes behind it."""
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    with closing(Segment(directory, 1, STORE_ID, SIZE)) as segment:
        segment.append([row(1)], flush=True)
        segment.append([row(2, b"x" * 2_000)], flush=True)
        segment.append([row(3)], flush=True)
    file = directory / file_name(1)
    whole = file.read_bytes()
    follower = WalFollower(tmp_path, STORE_ID)
    write_at(file, GROUPS_AT + SECTOR + 1_000, bytes(500))
    assert numbers(follower.follow()) == [[1]]
    assert numbers(follower.follow()) == [[1]]
    file.write_bytes(whole)
    assert numbers(follower.follow()) == [[1], [2], [3]]
