"""The write-ahead log as files: a power cut at any write or flush leaves a prefix that has all that was flushed."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.files.directory import flush_file
from duelog.store.wal import wal_reader
from duelog.store.wal.segment import Group, GroupContent, Segment
from duelog.store.wal.wal_reader import WalContent, flush_wal, read_wal
from duelog.store.wal.write_ahead_log import WriteAheadLog
from tests.proof import length
from tests.store.wal.segments import SIZE, STORE_ID, Disk, row, through_page_cache

STEPS = ("append", "append", "append", "append unflushed", "append unflushed", "flush", "next", "next and release",
         "refused", "killed", "killed in append", "power cut")  # fmt: skip


class Killed(BaseException):
    """The process has died."""


class Machine:
    """A log, what was appended to it, and the disk that it lies on."""

    def __init__(self, path: Path, cut: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.path, self._cut = path, cut
        self.rng = random.Random(seed)
        self.disk = Disk(path, patch, self.rng)
        self.appended: list[int] = []
        """Groups of the segments that are needed, as the writer knows them."""
        self.flushed = 0
        """How many of them are known to be on disk."""
        self.attempts: list[int] = []
        """Groups that may be there behind those or not."""
        self.oldest: int | None = None
        self._segments: dict[int, int] = {}
        self._last = 0
        self.log = WriteAheadLog(path, STORE_ID, read_wal(path, STORE_ID, None))
        self.begin()
        self.oldest = 1
        self.disk.event = self.look

    def look(self) -> None:
        """The log after a power cut now is a prefix, and has all that was flushed."""
        for _ in range(2):
            self.disk.cut(self._cut)
            found = told(read_wal(self._cut, STORE_ID, self.oldest).groups)
            rest = found[len(self.appended) :]
            assert found[: len(self.appended)] == self.appended[: len(found)], "no prefix"
            assert len(rest) <= 1
            assert set(rest) <= set(self.attempts), "a group that was never written"
            assert len(found) >= self.flushed, "a group that was flushed is lost"

    def append(self, *, flush: bool) -> None:
        number = self._last = self._last + 1
        rows = [row(number, self.rng.randbytes(self.rng.choice((0, 10, 600, 2_500))))]
        if not self.log.fits(GroupContent.of(rows).size):
            self.begin()
        self.attempts.append(number)
        position = self.log.append(GroupContent.of(rows), flush=flush).position
        self.attempts = []
        self.appended.append(number)
        self._segments[number] = position >> 32
        if flush:
            self.flushed = len(self.appended)

    def begin(self) -> int | None:
        ended = self.log.begin_segment(self.log.prepare_segment(SIZE, 4_000))
        self.flushed = len(self.appended)
        self.attempts = []
        return ended

    def release(self, number: int) -> None:
        """All is applied up to a segment: its file is used again."""
        self.oldest = number + 1
        kept = [each for each in self.appended if self._segments[each] > number]
        self.flushed -= len(self.appended) - len(kept)
        self.appended = kept
        self.log.release(number)

    def refused(self) -> None:
        """The disk refuses a group for once; the store is closed, and opened by the same process."""
        with pytest.MonkeyPatch.context() as patch:
            through_page_cache(patch)
            self.disk.refuses = True
            with suppress(OSError):
                self.append(flush=True)
        self.disk.refuses = False
        self.kill()

    def killed_in_append(self) -> None:
        """An append ends before it is flushed, whatever of it was written."""

        def end(_: int) -> None:
            self.look()
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            through_page_cache(patch)
            patch.setattr(os, "fdatasync", end)
            with suppress(Killed):
                self.append(flush=True)
        self.kill()

    def open(self) -> None:
        """The log is what is found now."""
        found = read_wal(self.path, STORE_ID, self.oldest)
        groups = told(found.groups)
        assert groups[: len(self.appended)] == self.appended[: len(groups)]
        assert len(groups) >= self.flushed
        for group in found.groups:
            self._segments[int(next(group.rows()).key)] = group.number
        flush_wal(self.path, found)
        self.appended, self.flushed, self.attempts = groups, len(groups), []
        self.log = WriteAheadLog(self.path, STORE_ID, found)

    def kill(self) -> None:
        """The process dies, and what it has written stays in the page cache."""
        self.log.close()
        self.open()

    def power_cut(self) -> None:
        self.log.close()
        self.disk.cut(self._cut)
        for file in (self._cut / wal_reader.DIRECTORY).iterdir():
            target = self.path / wal_reader.DIRECTORY / file.name
            content = file.read_bytes()
            target.unlink(missing_ok=True)
            target.write_bytes(content)
        self.disk.forget()
        self.open()

    def step(self, what: str) -> None:
        steps: dict[str, Callable[[], object]] = {
            "append": lambda: self.append(flush=True),
            "append unflushed": lambda: self.append(flush=False),
            "flush": self.flush,
            "next": self.begin,
            "next and release": self.next_and_release,
            "refused": self.refused,
            "killed": self.kill,
            "killed in append": self.killed_in_append,
            "power cut": self.power_cut,
        }
        steps[what]()
        self.look()

    def flush(self) -> None:
        self.log.flush()
        self.flushed = len(self.appended)

    def next_and_release(self) -> None:
        ended = self.begin()
        if ended is not None:
            self.release(ended)


def told(groups: list[Group]) -> list[int]:
    """The numbers of groups of one row."""
    return [int(each.key) for group in groups for each in group.rows()]


def run(tmp_path_factory: pytest.TempPathFactory, steps: list[str], seed: int) -> None:
    """Do steps, with a power cut tried at every write and flush."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(tmp_path_factory.mktemp("log"), tmp_path_factory.mktemp("cut"), seed, patch)
        try:
            for step in steps:
                machine.step(step)
        finally:
            machine.log.close()


@pytest.mark.series
@settings(max_examples=length("DUELOG_LOG_CUTS", 30, 150), deadline=None)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=25), seed=st.integers(0, 1 << 30))
def test_a_power_cut_leaves_a_prefix_with_every_group_that_was_flushed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], seed: int
) -> None:
    """Also where a process was killed, or power cut, before; with segments used again, and groups not flushed."""
    run(tmp_path_factory, steps, seed)


HISTORIES = {
    "killed": ["append", "killed in append", "next", "append"] * 4,
    "refused": ["append", "refused", "append"] * 3,
    "unflushed": ["append", "append unflushed", "append unflushed", "append unflushed", "append", "next"] * 3,
}


def not_flushed_at_all(patch: pytest.MonkeyPatch) -> None:
    """Mutant: a flush does nothing."""
    append = Segment.append

    def unflushed(self: Segment, rows: GroupContent, *, flush: bool) -> None:
        append(self, rows, flush=False)
        if flush:
            self._flushed = self._sequence

    patch.setattr(Segment, "append", unflushed)


def not_flushed_after_a_kill(patch: pytest.MonkeyPatch) -> None:
    """Mutant: what a killed process wrote is taken to be on disk."""
    patch.setattr("tests.store.wal.test_power_cuts.flush_wal", lambda path, content: None)


def not_written_again(patch: pytest.MonkeyPatch) -> None:
    """Mutant: what replay read is flushed, though the page cache may take it for clean while the disk lacks it."""

    def flushed(path: Path, content: WalContent) -> None:
        for file in (path / wal_reader.DIRECTORY).iterdir():
            flush_file(file)

    patch.setattr("tests.store.wal.test_power_cuts.flush_wal", flushed)


def flushed_is_claimed_too_early(patch: pytest.MonkeyPatch) -> None:
    """Mutant: a group says of those before it that they were flushed, and they were only written."""
    append = Segment.append

    def claiming(self: Segment, rows: GroupContent, *, flush: bool) -> None:
        append(self, rows, flush=flush)
        self._flushed = self._sequence

    patch.setattr(Segment, "append", claiming)


def an_end_that_is_not_flushed(patch: pytest.MonkeyPatch) -> None:
    """Mutant: the next segment is used before the end of this one is on disk."""
    end = Segment.end
    patch.setattr(Segment, "end", lambda self, *, flush: end(self, flush=False))


@pytest.mark.parametrize(
    ("mutant", "history"),
    [
        (not_flushed_at_all, "killed"),
        (not_flushed_after_a_kill, "killed"),
        (not_written_again, "refused"),
        (flushed_is_claimed_too_early, "unflushed"),
        (an_end_that_is_not_flushed, "unflushed"),
    ],
)
def test_a_log_that_flushes_too_little_is_found_out(
    tmp_path_factory: pytest.TempPathFactory, mutant: Callable[[pytest.MonkeyPatch], None], history: str
) -> None:
    """By a short history; the same history harms the true log nothing."""
    for seed in range(3):
        run(tmp_path_factory, HISTORIES[history], seed)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        for seed in range(20):
            try:
                run(tmp_path_factory, HISTORIES[history], seed)
            except Exception:
                return
    raise AssertionError("not found out")
