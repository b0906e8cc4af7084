"""The write-ahead log followed by another process: nothing between two groups is missing, nothing is seen twice."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from duelog.errors import ResourceShortage
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import counter_key, run_key
from duelog.store.codec.run import Run
from duelog.store.codec.run_lengths import ScatteredBatch
from duelog.store.env.memtable import LedgerRuns
from duelog.store.wal import segment as segments
from duelog.store.wal.followed_wal import FollowedWal
from duelog.store.wal.segment import MAIN, SEVERAL, Row, RowKind, Segment, numbers_in, place_of
from duelog.store.wal.wal_reader import DIRECTORY

STORE_ID = bytes(range(16))
SIZE = 16 << 10


def record(number: int, start_ms: int = MAIN) -> Row:
    """A small record that is told by its number."""
    return Row(RowKind.RECORD, start_ms, counter_key(str(number)), b"%d" % number)


def of(number: int, *keys: int) -> dict[bytes, bytes]:
    """The rows that are unapplied after those of `record`."""
    return {counter_key(str(each)): b"%d" % each for each in (number, *keys)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of segments."""
    (tmp_path / DIRECTORY).mkdir()
    return tmp_path / DIRECTORY


def test_rows_of_an_environment_are_those_after_its_last_applied_group(directory: Path) -> None:
    """By environment, and by the place that the reader's transaction finds."""
    followed = FollowedWal(directory.parent, STORE_ID)
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append([record(0), record(7, 3_600_000)], flush=True)
    segment.append([record(1)], flush=True)
    look = followed.of(MAIN)
    assert look()(-1).records == of(0, 1)
    assert look()(place_of(1, 0)).records == of(1)
    assert not look()(place_of(1, 1))
    assert followed.of(3_600_000)()(-1).records == of(7)
    before = look()
    segment.append([record(2)], flush=True)
    assert before(-1).records == of(0, 1)
    assert look()(-1).records == of(0, 1, 2)
    segment.close()


def test_a_batch_is_found_by_each_environment_that_it_has_messages_of(directory: Path) -> None:
    """With the messages of its own log alone, behind the rows before it."""
    dues, bodies = np.array([5, 3_600_005, 3_600_006]), Bodies([b"a", b"b", b"c"])
    batch = ScatteredBatch.pack(dues, bodies, [(0, 0, 1), (3_600_000, 1, 3)], [7, 8])
    batch.place([4, 9])
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append([record(0, 3_600_000)], flush=True)
    segment.append([Row(RowKind.BATCH, SEVERAL, b"", batch.value), record(1, 0)], flush=True)
    followed = FollowedWal(directory.parent, STORE_ID)
    earlier, later = followed.of(0)()(-1), followed.of(3_600_000)()(-1)
    assert (earlier.records, later.records) == (of(1), of(0))
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
    segment.append([record(0)], flush=True)
    following = Segment(directory, 2, STORE_ID, SIZE)
    follow = segments.SegmentFollower.follow
    begun: list[int] = []

    def slowly(follower: segments.SegmentFollower) -> None:
        follow(follower)
        if not begun:
            begun.append(1)
            segment.append([record(1)], flush=True)
            segment.append([], flush=True)
            following.append([record(2)], flush=True)

    monkeypatch.setattr(segments.SegmentFollower, "follow", slowly)
    assert FollowedWal(directory.parent, STORE_ID).of(MAIN)()(-1).records == of(0, 1, 2)
    segment.close()
    following.close()


def test_a_segment_that_was_renamed_is_forgotten(directory: Path) -> None:
    """Its rows are applied, and those of the one that it has become are read as they come."""
    look = FollowedWal(directory.parent, STORE_ID).of(MAIN)
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append([record(0)], flush=True)
    segment.append([], flush=True)
    segment.close()
    assert look()(-1).records == of(0)
    (directory / "000000000001.wal").rename(directory / "000000000002.wal")
    assert not look()(place_of(1, 0))
    segment = Segment(directory, 2, STORE_ID, SIZE)
    segment.append([record(1)], flush=True)
    assert look()(place_of(1, 0)).records == of(1)
    assert numbers_in(directory) == [2]
    segment.close()


def test_a_log_that_may_not_be_read_is_no_empty_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of the system is told as for the rest of the store."""
    segment = Segment(directory, 1, STORE_ID, SIZE)
    segment.append([record(0)], flush=True)
    segment.close()

    def refuse(path: Path, mode: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    look = FollowedWal(directory.parent, STORE_ID).of(MAIN)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(ResourceShortage):
            look()
    assert look()(-1).records == of(0)
