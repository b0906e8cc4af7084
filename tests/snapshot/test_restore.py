"""Restoring: what has fired since is left out, and a snapshot that is not of this log's past is not used."""

from collections.abc import Callable

import pytest

from duelog.partitions.index.window import Dues, Ids
from duelog.snapshot.writer import write_snapshot
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.env.environment import Environment
from tests.partitions.packing_all import packed_in
from tests.snapshot.logs import BUCKET_MS, LEDGER, START_MS, Log, drained, scattered

PART_BYTES = 1_024


@pytest.mark.parametrize(
    ("dues", "fired"),
    [
        *((scattered(500), fired) for fired in (1, 7, 150, 399, 400)),
        (scattered(12_000), 700),  # each bucket is in several parts, by ranges of ids
        ([START_MS + 50] * 1_000, 600),  # within entries of one due time
    ],
    ids=lambda value: str(value if isinstance(value, int) else len(value)),
)
def test_what_fired_since_is_left_out(environment: Environment, dues: list[int], fired: int) -> None:
    """The index is what a replay by the frontier of now would leave, wherever that lies."""
    log = Log(dues)
    log.fire(100)
    parts = write_snapshot(environment, log.cut(), PART_BYTES, 1).parts
    assert len(dues) < 12_000 or parts > len({due_ms // BUCKET_MS for due_ms in dues})
    log.fire(fired)
    assert drained(log.restored(environment)) == log.pending()
    assert len(log.pending()) == len(dues) - 100 - fired


def test_due_times_are_read_of_the_frontiers_bucket_only_and_once(environment: Environment) -> None:
    """Buckets before it go whole, those after it come whole; it is the window already, taken without another read."""
    log = Log(scattered(5_000))
    write_snapshot(environment, log.cut(), 1 << 20, 1)
    log.fire(2_510)
    original = log.due_of
    read: list[int] = []

    def counting(ids: Ids) -> Dues:
        read.extend(ids.tolist())
        return original(ids)

    log.due_of = counting  # type: ignore[method-assign]
    restored = log.restored(environment)
    bucket_ms = log.frontier.due_ms - log.frontier.due_ms % BUCKET_MS
    assert {log.dues[entry_id] - log.dues[entry_id] % BUCKET_MS for entry_id in read} == {bucket_ms}
    assert len(read) == len(set(read))
    restored.pending._check()
    read.clear()
    expected = [key for key in log.pending() if key[0] < bucket_ms + BUCKET_MS]
    ids, _ = restored.pending.take(bucket_ms + BUCKET_MS - 1, 1 << 32)
    assert ids.tolist() == [entry_id for _, entry_id in expected] != []
    assert not read


def test_a_frontiers_bucket_too_large_for_the_window_is_left_to_be_read_in_parts(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its due times are not kept in memory; what has fired of it is left out all the same."""
    monkeypatch.setattr("duelog.snapshot.restore._READ_ENTRIES", 64)
    log = Log(scattered(500, span_ms=90))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(200)
    restored = log.restored(environment)
    assert not len(restored.pending._window)
    assert drained(restored) == log.pending()


def test_later_buckets_are_restored_packed(environment: Environment) -> None:
    """A snapshot in several parts with the frontier in it gives only the later buckets, and no bitmap is made."""
    log = Log(scattered(5_000))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(1_000)
    restored = log.restored(environment)
    bucket_ms = log.frontier.due_ms - log.frontier.due_ms % BUCKET_MS
    assert packed_in(restored.pending) == list(range(bucket_ms + BUCKET_MS, START_MS + 2_000, BUCKET_MS))
    assert drained(restored) == log.pending()


def frontier_gone_back(log: Log) -> None:
    """The main environment has gone back (a power cut without durability): entries would be lost."""
    log.frontier = FrontierRecord.start(LEDGER)


def log_gone_back(log: Log) -> None:
    """It has fewer entries, or the snapshot is of another copy of it."""
    del log.dues[90:]


def frontier_of_another_log(log: Log) -> None:
    """C moves only together with T; where it did not, which entries have fired cannot be told from the bitmaps."""
    log.fire(30)
    log.frontier = log.frontier._replace(absorbed_end=99)


@pytest.mark.parametrize(
    ("fired", "change", "bucket_ms", "reason"),
    [
        (30, frontier_gone_back, BUCKET_MS, "is ahead of"),
        (0, log_gone_back, BUCKET_MS, "covers 100 entries, the log has 90"),
        (0, frontier_of_another_log, BUCKET_MS, "absorbed only 99"),
        (0, lambda log: None, BUCKET_MS * 2, "bucket_ms"),
    ],
)
def test_a_snapshot_that_is_not_of_this_logs_past_is_not_used(
    environment: Environment, fired: int, change: Callable[[Log], None], bucket_ms: int, reason: str
) -> None:
    """Nor one whose buckets are of another size; the reason is told."""
    log = Log(scattered(100))
    if fired:
        log.fire(fired)
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    change(log)
    reasons: list[str] = []
    assert log.restore(environment, reasons, bucket_ms=bucket_ms) is None
    assert reason in reasons[0]


def test_an_entry_whose_due_time_cannot_be_read_is_kept_for_the_index_to_report(environment: Environment) -> None:
    """In the bucket of the frontier: it is not taken for fired, and comes up as unreadable."""
    log = Log([START_MS + 50] * 10)
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(5)
    log.dues[7] = -1
    restored = log.restored(environment)
    assert [entry_id for _, entry_id in drained(restored)] == [5, 6, 8, 9]
    assert list(restored.pending.unreadable) == [7]
