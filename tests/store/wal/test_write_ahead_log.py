"""The log of a store open for writing: one segment after the other, and files that are used again."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from duelog.store.errors import BrokenInvariant
from duelog.store.wal.segment import MAIN, GroupContent, Row, RowKind, capacity_of, file_name
from duelog.store.wal.wal_reader import DIRECTORY, flush_wal, read_wal
from duelog.store.wal.write_ahead_log import WriteAheadLog
from tests.store.wal.segments import SIZE, STORE_ID, make_segment, numbers, row


def opened(path: Path, oldest: int | None) -> WriteAheadLog:
    """The log as an opening finds it, where the record names a segment."""
    found = read_wal(path, STORE_ID, oldest)
    flush_wal(path, found)
    return WriteAheadLog(path, STORE_ID, found)


def begin(log: WriteAheadLog, size: int = SIZE, group: int = 0) -> int | None:
    """Go on in the next segment."""
    return log.begin_segment(log.prepare_segment(size, group))


def files(path: Path) -> list[str]:
    """Names of the segments that are there."""
    return sorted(file.name for file in (path / DIRECTORY).iterdir())


def test_nothing_is_appended_before_a_segment_is_begun(tmp_path: Path) -> None:
    """And nothing is made."""
    with closing(opened(tmp_path, None)) as log:
        assert not log.fits(1)
        with pytest.raises(BrokenInvariant, match="no segment has been begun"):
            log.append(GroupContent.of([row(1)]), flush=True)
        log.flush()
        assert not list(tmp_path.iterdir())


def test_a_segment_is_made_for_a_group_that_is_larger_than_it(tmp_path: Path) -> None:
    """One message may be larger than segments are."""
    large = Row(RowKind.RUN, MAIN, b"key", bytes(10 * SIZE))
    with closing(opened(tmp_path, None)) as log:
        begin(log, SIZE, GroupContent.of([large]).size)
        assert log.fits(GroupContent.of([large]).size)
        log.append(GroupContent.of([large]), flush=True)
        begin(log)
        assert log.fits(capacity_of(SIZE))
        assert not log.fits(capacity_of(SIZE) + 1)
    assert [list(group.rows()) for group in read_wal(tmp_path, STORE_ID, 1).groups] == [[large]]


def test_files_of_segments_that_are_applied_are_used_again(tmp_path: Path) -> None:
    """By any that are not much larger or smaller; others go."""
    with closing(opened(tmp_path, None)) as log:
        begin(log)
        inode = (tmp_path / DIRECTORY / file_name(1)).stat().st_ino
        begin(log)
        log.release(1)
        begin(log)
        assert files(tmp_path) == [file_name(2), file_name(3)]
        assert (tmp_path / DIRECTORY / file_name(3)).stat().st_ino == inode
        log.release(2)
        begin(log, 4 * SIZE)
        assert files(tmp_path) == [file_name(3), file_name(4)]
        log.release(3)
        begin(log, 4 * SIZE)
        log.release(4)
        begin(log, SIZE)  # four times as large
        assert files(tmp_path) == [file_name(5), file_name(6)]
        assert log.active is not None
        assert log.active.size == SIZE
        log.append(GroupContent.of([row(9)]), flush=True)
    assert numbers(read_wal(tmp_path, STORE_ID, 6).groups) == [[9]]


def test_segments_are_released_with_those_before_them(tmp_path: Path) -> None:
    """One checkpoint may cover several; those that recovery found count too."""
    with closing(opened(tmp_path, None)) as log:
        for _ in range(3):
            begin(log)
            log.append(GroupContent.of([row(1)]), flush=True)
    with closing(opened(tmp_path, 1)) as log:
        assert begin(log) == 3
        log.release(2)
        begin(log)
        begin(log)
        assert files(tmp_path) == [file_name(number) for number in (3, 4, 5, 6)]


def test_files_before_the_oldest_segment_are_used_again_after_an_opening(tmp_path: Path) -> None:
    """One that the record names stays, though there is no group in it."""
    for number in (2, 3):
        make_segment(tmp_path / DIRECTORY, number, [[number]], ended=True)
    make_segment(tmp_path / DIRECTORY, 4, [], ended=True)
    make_segment(tmp_path / DIRECTORY, 5, [[5]])
    with closing(opened(tmp_path, 4)) as log:
        for _ in range(3):
            begin(log)
            assert numbers(read_wal(tmp_path, STORE_ID, 4).groups) == [[5]]
    assert files(tmp_path) == [file_name(number) for number in (4, 5, 6, 7, 8)]


def test_a_segment_that_was_prepared_and_is_too_small_is_made_anew(tmp_path: Path) -> None:
    """The process that prepared it was killed before it was begun."""
    with closing(opened(tmp_path, None)) as log:
        begin(log)
        log.append(GroupContent.of([row(1)]), flush=True)
        log.prepare_segment(SIZE, 0).close()
    with closing(opened(tmp_path, 1)) as log:
        begin(log, 4 * SIZE)
        assert log.active is not None
        assert log.active.size == 4 * SIZE
        log.append(GroupContent.of([row(2)]), flush=True)
    assert numbers(read_wal(tmp_path, STORE_ID, 1).groups) == [[1], [2]]


def test_without_space_for_a_segment_the_log_goes_on_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ended, and another attempt succeeds."""
    with closing(opened(tmp_path, None)) as log:
        begin(log)
        log.append(GroupContent.of([row(1)]), flush=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda descriptor, content: 0)
            with pytest.raises(OSError, match="No space left"):
                log.prepare_segment(SIZE, 0)
        log.append(GroupContent.of([row(2)]), flush=True)
        assert begin(log) == 1
        log.append(GroupContent.of([row(3)]), flush=True)
    assert numbers(read_wal(tmp_path, STORE_ID, 1).groups) == [[1], [2], [3]]
