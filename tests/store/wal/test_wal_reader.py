"""Reading the write-ahead log: all of it, or on and on, also by another process; what is missing is an error."""

import errno
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from duelog.errors import DamagedStore, ResourceShortage
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import counter_key, run_key
from duelog.store.codec.run import Run
from duelog.store.codec.run_lengths import ScatteredBatch
from duelog.store.env.memtable import LedgerRuns
from duelog.store.wal import segment as segments
from duelog.store.wal.followed_wal import FollowedWal
from duelog.store.wal.segment import (
    MAIN,
    SEVERAL,
    GroupContent,
    Row,
    RowKind,
    Segment,
    file_name,
    numbers_in,
    place_of,
    read_segment,
)
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


def test_a_follower_reads_on_where_it_stopped(tmp_path: Path) -> None:
    """Over segments, and into one that is made meanwhile; it gives all that is there each time."""
    follower = WalFollower(tmp_path, STORE_ID)
    assert follower.follow() == []
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    with closing(Segment(directory, 1, STORE_ID, SIZE)) as first:
        assert follower.follow() == []
        first.append(GroupContent.of([row(1, bytes(600)), row(2)]), flush=True)
        first.append(GroupContent.of([row(3)]), flush=False)
        assert numbers(follower.follow()) == [[1, 2], [3]]
        first.append(GroupContent.of([row(4)]), flush=True)
        first.end(flush=True)
    with closing(Segment(directory, 2, STORE_ID, SIZE)) as second:
        assert numbers(follower.follow()) == [[1, 2], [3], [4]]
        second.append(GroupContent.of([row(5)]), flush=True)
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
        segment.append(GroupContent.of([row(1)]), flush=True)
        segment.append(GroupContent.of([row(2, b"x" * 2_000)]), flush=True)
        segment.append(GroupContent.of([row(3)]), flush=True)
    file = directory / file_name(1)
    whole = file.read_bytes()
    follower = WalFollower(tmp_path, STORE_ID)
    write_at(file, GROUPS_AT + SECTOR + 1_000, bytes(500))
    assert numbers(follower.follow()) == [[1]]
    assert numbers(follower.follow()) == [[1]]
    file.write_bytes(whole)
    assert numbers(follower.follow()) == [[1], [2], [3]]


def record(number: int, start_ms: int = MAIN) -> Row:
    """A small record that is told by its number."""
    return Row(RowKind.RECORD, start_ms, counter_key(str(number)), b"%d" % number)


def of(number: int, *keys: int) -> list[tuple[bytes, bytes]]:
    """The rows that are unapplied after those of `record`."""
    return [(counter_key(str(each)), b"%d" % each) for each in (number, *keys)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of segments."""
    (tmp_path / DIRECTORY).mkdir()
    return tmp_path / DIRECTORY


def test_rows_of_an_environment_are_those_after_its_last_applied_group(directory: Path) -> None:
    """By environment, and by the place that the reader's transaction finds."""
    followed = FollowedWal(directory.parent, STORE_ID)
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append(GroupContent.of([record(0), record(7, 3_600_000)]), flush=True)
    segment.append(GroupContent.of([record(1)]), flush=True)
    look = followed.of(MAIN)
    assert look()(-1).records.items() == of(0, 1)
    assert look()(place_of(1, 0)).records.items() == of(1)
    assert not look()(place_of(1, 1))
    assert followed.of(3_600_000)()(-1).records.items() == of(7)
    before = look()
    segment.append(GroupContent.of([record(2)]), flush=True)
    assert before(-1).records.items() == of(0, 1)
    assert look()(-1).records.items() == of(0, 1, 2)
    segment.close()


def test_a_batch_is_found_by_each_environment_that_it_has_messages_of(directory: Path) -> None:
    """With the messages of its own log alone, behind the rows before it."""
    dues, bodies = np.array([5, 3_600_005, 3_600_006]), Bodies([b"a", b"b", b"c"])
    batch = ScatteredBatch.pack(dues, bodies, [(0, 0, 1), (3_600_000, 1, 3)], [7, 8])
    batch.place([4, 9])
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append(GroupContent.of([record(0, 3_600_000)]), flush=True)
    segment.append(GroupContent.of([Row(RowKind.BATCH, SEVERAL, b"", batch.value), record(1, 0)]), flush=True)
    followed = FollowedWal(directory.parent, STORE_ID)
    earlier, later = followed.of(0)()(-1), followed.of(3_600_000)()(-1)
    assert (earlier.records.items(), later.records.items()) == (of(1), of(0))
    for unapplied, ledger_id, ids, payloads in ((earlier, 7, (4, 5), [b"a"]), (later, 8, (9, 11), [b"b", b"c"])):
        assert list(unapplied.runs) == [ledger_id]
        (run,) = LedgerRuns(ledger_id, unapplied.runs[ledger_id])
        assert (run.first, run.limit) == ids
        found = Run("e", run_key(ledger_id, run.first), memoryview(run.value))
        assert [body for _, body in found.bodies()] == payloads
    assert not followed.of(0)()(place_of(1, 1))
    segment.close()


def test_a_segment_that_ends_after_it_was_read_is_read_to_its_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the groups of the next one would be seen without those before them."""
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append(GroupContent.of([record(0)]), flush=True)
    following = Segment(directory, 2, STORE_ID, SIZE)
    follow = segments.SegmentFollower.follow
    begun: list[int] = []

    def slowly(follower: segments.SegmentFollower) -> None:
        follow(follower)
        if not begun:
            begun.append(1)
            segment.append(GroupContent.of([record(1)]), flush=True)
            segment.end(flush=True)
            following.append(GroupContent.of([record(2)]), flush=True)

    monkeypatch.setattr(segments.SegmentFollower, "follow", slowly)
    assert FollowedWal(directory.parent, STORE_ID).of(MAIN)()(-1).records.items() == of(0, 1, 2)
    segment.close()
    following.close()


def test_a_segment_that_was_renamed_is_forgotten(directory: Path) -> None:
    """Its rows are applied, and those of the one that it has become are read as they come."""
    look = FollowedWal(directory.parent, STORE_ID).of(MAIN)
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append(GroupContent.of([record(0)]), flush=True)
    segment.end(flush=True)
    segment.close()
    assert look()(-1).records.items() == of(0)
    (directory / "000000000001.wal").rename(directory / "000000000002.wal")
    assert not look()(place_of(1, 0))
    segment = Segment(directory, 2, STORE_ID, SIZE)
    segment.append(GroupContent.of([record(1)]), flush=True)
    assert look()(place_of(1, 0)).records.items() == of(1)
    assert numbers_in(directory) == [2]
    segment.close()


def test_a_log_that_may_not_be_read_is_no_empty_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of the system is told as for the rest of the store."""
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append(GroupContent.of([record(0)]), flush=True)
    segment.close()

    def refuse(path: Path, mode: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    look = FollowedWal(directory.parent, STORE_ID).of(MAIN)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(ResourceShortage):
            look()
    assert look()(-1).records.items() == of(0)
