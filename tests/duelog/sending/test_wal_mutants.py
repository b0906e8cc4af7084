"""Wrong ways of writing, applying and replaying the write-ahead log are found out by what crashes leave."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from duelog import DelayedStore, ManualClock, Message, opening
from duelog.errors import DuelogError
from duelog.store.files import failpoints
from duelog.store.parallel_jobs import Jobs
from duelog.store.wal.segment import GroupContent, RawGroup, Segment
from duelog.store.wal.write_ahead_log import WriteAheadLog
from duelog.store.wal.write_batch import single_rows
from tests.conftest import START_MS
from tests.duelog.side_by_side import CONFIG, HOUR_MS
from tests.store.wal.segments import Disk

Mutant = Callable[[pytest.MonkeyPatch], None]


class Unlucky(random.Random):
    """A power cut leaves nothing that is not flushed."""

    def choice(self, seq: Any) -> Any:
        """The first."""
        return seq[0]


class Crash(NamedTuple):
    """A copy as a power cut left it; what was acknowledged by then, and the batch that was under way."""

    path: Path
    sent: frozenset[bytes]
    under_way: frozenset[bytes]


@contextmanager
def crashing(path: Path, crashes: list[Crash], known: Callable[[], tuple[set[bytes], set[bytes]]]) -> Iterator[None]:
    """Inside, copies are made at every third write, flush, commit and checkpoint of the store in `path`."""
    passed = 0

    def crash() -> None:
        nonlocal passed
        passed += 1
        if passed % 3 == 0 and len(crashes) < 25:
            copy = path.parent / f"copy{len(crashes)}"
            shutil.copytree(path, copy, ignore=shutil.ignore_patterns("lock.mdb", "wal"))
            disk.cut(copy)
            sent, under_way = known()
            crashes.append(Crash(copy, frozenset(sent), frozenset(under_way)))

    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(path, patch, Unlucky())
        disk.event = crash
        for point in ("commit.after", "wal.after", "wal.applied"):
            failpoints.arm(point, crash)
        try:
            yield
        finally:
            failpoints.disarm()


def story(path: Path) -> None:
    """Send batches over the main log and two partitions, crash now and then, and look at what is left."""
    clock, crashes = ManualClock(START_MS), list[Crash]()
    sent, under_way = set[bytes](), set[bytes]()
    with DelayedStore.open(path / "store", CONFIG, clock=clock) as store:
        topic = store.topic("a")
        topic.send(b"begun")
        sent.add(b"begun")
        with crashing(store.path, crashes, lambda: (sent, under_way)):
            for number in range(12):
                payloads = [b"%d/%d" % (number, at) for at in range(3)]
                under_way.update(payloads)
                topic.send_batch(
                    [
                        Message(each.ljust(1_500), deliver_at=START_MS + at * 2 * HOUR_MS)
                        for at, each in enumerate(payloads)
                    ]
                )
                sent |= under_way
                under_way.clear()
                if number % 4 == 1:
                    store._engine.storage.main.apply()
    assert len(crashes) > 10, "few crashes"
    for crash in crashes:
        left = delivered(crash.path)
        assert max(left.values(), default=1) == 1, "stored twice"
        assert crash.sent <= left.keys(), "lost"
        assert left.keys() - crash.sent in (set(), crash.under_way), "in part"


def delivered(path: Path) -> Counter[bytes]:
    """Return the messages of a copy once all of it is due."""
    clock = ManualClock(START_MS)
    found: Counter[bytes] = Counter()
    with DelayedStore.open(path, CONFIG, clock=clock) as store, store.topic("a").subscribe("all") as consumer:
        clock.advance(100 * HOUR_MS)
        store.tick()
        while messages := consumer.receive(1_000):
            found.update(bytes(message.payload).rstrip() for message in messages)
            consumer.ack(messages)
    return found


def not_flushed(patch: pytest.MonkeyPatch) -> None:
    """Senders are told before their group is on disk."""
    append = Segment.append
    patch.setattr(Segment, "append", lambda self, rows, *, flush: append(self, rows, flush=False))


def recorded_before_applied(patch: pytest.MonkeyPatch) -> None:
    """A segment is used again though what it held is in memory alone."""
    patch.setattr(Jobs, "finish", lambda self: None)


def replayed_twice(patch: pytest.MonkeyPatch) -> None:
    """Applied rows are not told from unapplied ones."""
    patch.setattr(opening, "applied_position", lambda raw: -1)


def replay_skipped(patch: pytest.MonkeyPatch) -> None:
    """The rows of the log are left there."""
    patch.setattr(opening.Replay, "fill_main", lambda *arguments: None)
    patch.setattr(opening.Replay, "fill_partitions", lambda *arguments: None)


def not_atomic(patch: pytest.MonkeyPatch) -> None:
    """Each row is a group of its own, and what a batch has for each log."""
    append = WriteAheadLog.append

    def each(self: WriteAheadLog, rows: GroupContent, *, flush: bool) -> RawGroup:
        return [append(self, GroupContent.of([row]), flush=flush) for row in single_rows(rows.rows())][-1]

    patch.setattr(WriteAheadLog, "append", each)


def test_what_a_crash_leaves_is_every_batch_that_was_acknowledged(tmp_path: Path) -> None:
    """Once, and of the batch under way all or nothing."""
    story(tmp_path)


@pytest.mark.parametrize("mutant", [not_flushed, recorded_before_applied, replayed_twice, replay_skipped, not_atomic])
def test_a_wrong_way_is_found_out(tmp_path: Path, mutant: Mutant) -> None:
    """By the same story: something is lost, there twice or in part, or the store is refused."""
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises((AssertionError, DuelogError)) as caught:
            story(tmp_path)
    assert "few crashes" not in str(caught.value)
