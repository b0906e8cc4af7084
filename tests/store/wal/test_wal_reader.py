"""Reading the write-ahead log: all of it, or on and on, also by another process; what is missing is an error."""

import errno
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.errors import DamagedStore, ResourceShortage
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import counter_key, run_key, split_run_key
from duelog.store.codec.run import HEADER, Run, fields_of_message, seal_run
from duelog.store.codec.run_lengths import ScatteredBatch
from duelog.store.env.memtable import LedgerRuns
from duelog.store.errors import BrokenInvariant
from duelog.store.wal import segment as segments
from duelog.store.wal.environment_rows import rows_by_environment
from duelog.store.wal.followed_wal import FollowedWal
from duelog.store.wal.segment import (
    MAIN,
    SEVERAL,
    Group,
    GroupContent,
    Row,
    RowKind,
    Segment,
    capacity_of,
    file_name,
    numbers_in,
    place_of,
    read_segment,
)
from duelog.store.wal.wal_reader import DIRECTORY, WalFollower, flush_wal, read_wal, write_wal
from duelog.store.wal.write_ahead_log import WriteAheadLog
from duelog.store.wal.write_batch import single_rows
from tests.conftest import present
from tests.proof import length
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


def test_a_damaged_end_before_a_segment_that_has_groups_or_has_ended_is_an_error(log: Path, tmp_path: Path) -> None:
    """The groups that follow it would be lost silently; behind one that holds nothing there may be some."""
    flip(log / file_name(4), GROUPS_AT + SECTOR + 20)
    with pytest.raises(DamagedStore, match="its end, from byte 4608 on, cannot be read, and 5 follows") as caught:
        read_wal(tmp_path, STORE_ID, 3)
    assert caught.value.path == log / file_name(4)
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


def test_a_log_that_may_not_be_read_is_no_empty_one(directory: Path) -> None:
    """The refusal of the system is told as for the rest of the store."""
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append(GroupContent.of([record(0)]), flush=True)
    segment.close()

    def refuse(path: Path, mode: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    look = FollowedWal(directory.parent, STORE_ID).of(MAIN)
    with patch.object(Path, "open", refuse), pytest.raises(ResourceShortage):
        look()
    assert look()(-1).records.items() == of(0)


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
        assert present(log.active).size == SIZE
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
        assert present(log.active).size == 4 * SIZE
        log.append(GroupContent.of([row(2)]), flush=True)
    assert numbers(read_wal(tmp_path, STORE_ID, 1).groups) == [[1], [2]]


def test_a_segment_that_was_prepared_and_cut_short_since_is_made_anew(tmp_path: Path) -> None:
    """Its head says how long it is, and what is read back is refused where it is shorter."""
    with closing(opened(tmp_path, None)) as log:
        begin(log)
        log.append(GroupContent.of([row(1)]), flush=True)
        log.prepare_segment(4 * SIZE, 0).close()
        os.truncate(tmp_path / "wal" / file_name(2), 2 * SIZE)
        begin(log)
        log.append(GroupContent.of([row(2)]), flush=True)
    assert numbers(read_wal(tmp_path, STORE_ID, 1).groups) == [[1], [2]]


def test_without_space_for_a_segment_the_log_goes_on_as_it_was(tmp_path: Path) -> None:
    """Nothing is ended, and another attempt succeeds."""
    with closing(opened(tmp_path, None)) as log:
        begin(log)
        log.append(GroupContent.of([row(1)]), flush=True)
        with patch.object(os, "write", lambda descriptor, content: 0), pytest.raises(OSError, match="No space left"):
            log.prepare_segment(SIZE, 0)
        log.append(GroupContent.of([row(2)]), flush=True)
        assert begin(log) == 1
        log.append(GroupContent.of([row(3)]), flush=True)
    assert numbers(read_wal(tmp_path, STORE_ID, 1).groups) == [[1], [2], [3]]


Found = dict[int, tuple[list[tuple[int, Row]], dict[int, list[tuple[int, bytes]]]]]
"""By environment: rows that are no runs, and by ledger (first entry, value) of its runs."""

ENVIRONMENTS = (MAIN, 0, 1_000, 2_000)


def run(start_ms: int, ledger_id: int, first: int) -> Row:
    """Make a row of one message."""
    key = run_key(ledger_id, first)
    body, base_ms = b"%d" % first, max(start_ms, 0)
    return Row(RowKind.RUN, start_ms, key, seal_run(key, fields_of_message(base_ms, base_ms + 5, body), [body]))


def batch(firsts: dict[int, int], count: int) -> Row:
    """So many messages for a ledger, 100 + number, of each partition by number."""
    logs = len(firsts)
    starts = [1_000 * number for number in firsts]
    groups = [(start_ms, at * count, (at + 1) * count) for at, start_ms in enumerate(starts)]
    dues = np.repeat(np.array(starts, dtype=np.int64), count) + 7
    made = ScatteredBatch.pack(
        dues, Bodies([b"%d" % at for at in range(logs * count)]), groups, [100 + n for n in firsts]
    )
    made.place(list(firsts.values()))
    return Row(RowKind.BATCH, SEVERAL, b"", made.value)


def written(groups: Sequence[Sequence[Row]]) -> list[Group]:
    """Groups, written and read back."""
    with tempfile.TemporaryDirectory() as path:
        segment = Segment(Path(path), 1, STORE_ID, 1 << 18)
        for rows in groups:
            segment.append(GroupContent.of(rows), flush=False)
        segment.close()
        return read_segment(Path(path), 1, STORE_ID).groups


def one_by_one(groups: Sequence[Group], applied: int) -> Found:
    """The rows that are not applied, one by one."""
    found: Found = {}
    for group in groups:
        for entry in single_rows(group.rows()) if group.position > applied else ():
            others, runs = found.setdefault(entry.start_ms, ([], {}))
            if entry.kind == RowKind.RUN:
                ledger_id, first = split_run_key(entry.key)
                runs.setdefault(ledger_id, []).append((first, bytes(entry.value)))
            else:
                others.append((group.position, entry))
    return found


def by_columns(groups: Sequence[Group], applied: int) -> Found:
    """The same from columns."""
    found: Found = {}
    for start_ms, rows in rows_by_environment(groups).items():
        left = rows.after(applied)
        if left:
            runs = {
                each.ledger_id: [
                    (int(first), bytes(run.value))
                    for first, run in zip(each.firsts, LedgerRuns(each.ledger_id, each.rows), strict=True)
                ]
                for each in left.ledgers()
            }
            found[start_ms] = left.others, runs
            assert left.last == max(group.position for group in groups if has(group, start_ms))
    return found


def has(group: Group, start_ms: int) -> bool:
    """True where a group has a row of an environment."""
    return any(row.start_ms == start_ms for row in single_rows(group.rows()))


ROWS = st.one_of(
    st.tuples(st.just("run"), st.sampled_from(ENVIRONMENTS), st.integers(100, 102)),
    st.tuples(st.just("record"), st.sampled_from(ENVIRONMENTS), st.integers(0, 3)),
    st.tuples(st.just("batch"), st.sets(st.integers(0, 2), min_size=1), st.integers(1, 3)),
)


@pytest.mark.series
@settings(max_examples=length("DUELOG_ROWS", 50, 200), deadline=None)
@given(plan=st.lists(st.lists(ROWS, min_size=1, max_size=4), max_size=6), applied=st.integers(-1, 6))
def test_rows_of_each_environment_are_found_in_order(plan: list[list[tuple[str, object, int]]], applied: int) -> None:
    """Runs by ledger, those of batches among them, and all other rows; of the groups after a place alone."""
    firsts: dict[int, int] = {}
    groups: list[list[Row]] = []
    for rows in plan:
        groups.append([])
        for kind, what, number in rows:
            if kind == "batch":
                assert isinstance(what, set)
                groups[-1].append(batch({each: firsts.get(100 + each, 0) for each in sorted(what)}, number))
                firsts.update({100 + each: firsts.get(100 + each, 0) + number for each in what})
            elif kind == "run":
                assert isinstance(what, int)
                groups[-1].append(run(what, number, firsts.get(number, 0)))
                firsts[number] = firsts.get(number, 0) + 1
            else:
                assert isinstance(what, int)
                groups[-1].append(Row(RowKind.RECORD, what, counter_key(str(number)), b"%d" % number))
    found = written(groups)
    place = -1 if applied < 0 else place_of(1, applied)
    assert by_columns(found, place) == one_by_one(found, place)


@pytest.mark.parametrize(
    ("tail", "firsts", "gap"),
    [(0, [0, 1, 2], None), (4, [4, 5], None), (3, [4, 5], (4, 3)), (4, [4, 6], (6, 5)), (4, [4, 4], (4, 5))],
    ids=["from the beginning", "behind what is applied", "before it", "between", "twice"],
)
def test_a_gap_is_where_a_run_does_not_begin_at_the_end_before_it(
    tail: int, firsts: list[int], gap: tuple[int, int] | None
) -> None:
    """The entry, and the end before it."""
    rows = rows_by_environment(written([[run(0, 100, first)] for first in firsts]))[0]
    (ledger,) = rows.ledgers()
    assert ledger.gap(tail) == gap
    assert HEADER.unpack_from(LedgerRuns(100, ledger.rows)[0].value)[4] == 1
