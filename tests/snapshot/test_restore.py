"""Restoring: what has fired since is left out, and a snapshot that is not of this log's past is not used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog.partitions.index.window import Dues, Ids
from duelog.snapshot.writer import write_snapshot
from duelog.store.codec.format import snapshot_meta_key
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from tests.partitions.packing_all import packed_in
from tests.snapshot.logs import BUCKET_MS, LEDGER, START_MS, Log, drained, new_environment, scattered

PART_BYTES = 1_024


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An empty partition environment."""
    opened = new_environment(tmp_path / "partition")
    yield opened
    opened.close()


@pytest.mark.parametrize("fired", [1, 7, 150, 399, 400])
def test_what_fired_since_is_left_out(environment: Environment, fired: int) -> None:
    """The index is what a replay by the frontier of now would leave, wherever that lies."""
    log = Log(scattered(500))
    log.fire(100)
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(fired)
    restored = log.restore(environment)
    assert restored is not None
    assert drained(restored) == log.pending()
    assert len(log.pending()) == 400 - fired


def test_due_times_are_read_for_one_bucket_only(environment: Environment) -> None:
    """Buckets before the frontier go whole, those after it come whole."""
    log = Log(scattered(5_000))
    write_snapshot(environment, log.cut(), 1 << 20, 1)
    log.fire(2_500)
    read: list[int] = []
    original = log.due_of

    def counting(ids: Ids) -> Dues:
        read.append(len(ids))
        return original(ids)

    log.due_of = counting  # type: ignore[method-assign]
    assert log.restore(environment) is not None
    assert 0 < sum(read) < 400


def test_due_times_of_the_frontiers_bucket_are_read_once(environment: Environment) -> None:
    """They are the window already: what is due of that bucket is taken without reading them again."""
    log = Log(scattered(5_000))
    write_snapshot(environment, log.cut(), 1 << 20, 1)
    log.fire(2_510)
    original = log.due_of
    read: list[int] = []

    def counting(ids: Ids) -> Dues:
        read.extend(ids.tolist())
        return original(ids)

    log.due_of = counting  # type: ignore[method-assign]
    restored = log.restore(environment)
    assert restored is not None
    restored.pending._check()
    read_before = len(read)
    read.clear()
    bucket_ms = log.frontier.due_ms - log.frontier.due_ms % BUCKET_MS
    expected = [key for key in log.pending() if key[0] < bucket_ms + BUCKET_MS]
    ids, _ = restored.pending.take(bucket_ms + BUCKET_MS - 1, 1 << 32)
    assert ids.tolist() == [entry_id for _, entry_id in expected]
    assert 0 < len(expected) <= read_before
    assert not read


def test_a_frontiers_bucket_too_large_for_the_window_is_left_to_be_read_in_parts(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its due times are not kept in memory; what has fired of it is left out all the same."""
    monkeypatch.setattr("duelog.snapshot.restore._READ_ENTRIES", 64)
    log = Log(scattered(500, span_ms=90))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(200)
    restored = log.restore(environment)
    assert restored is not None
    assert not len(restored.pending._window)
    assert drained(restored) == log.pending()


def test_later_buckets_are_restored_packed(environment: Environment) -> None:
    """Of a snapshot in several parts, with the frontier in it, only the buckets after that one, and no bitmap made."""
    log = Log(scattered(5_000))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(1_000)
    restored = log.restore(environment)
    assert restored is not None
    bucket_ms = log.frontier.due_ms - log.frontier.due_ms % BUCKET_MS
    assert packed_in(restored.pending) == list(range(bucket_ms + BUCKET_MS, START_MS + 2_000, BUCKET_MS))
    assert drained(restored) == log.pending()


def test_a_bucket_in_several_parts_is_restored_whole(environment: Environment) -> None:
    """Each of the large buckets is split by ranges of ids."""
    log = Log(scattered(12_000))
    parts = write_snapshot(environment, log.cut(), PART_BYTES, 1).parts
    assert parts > len({due_ms // BUCKET_MS for due_ms in log.dues})
    log.fire(700)
    restored = log.restore(environment)
    assert restored is not None
    assert drained(restored) == log.pending()


def test_many_entries_at_one_instant_are_cut_at_the_entry(environment: Environment) -> None:
    """The frontier lies within entries of equal due time: the earlier ids have fired, the later not."""
    log = Log([START_MS + 50] * 1_000)
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(600)
    restored = log.restore(environment)
    assert restored is not None
    assert [entry_id for _, entry_id in drained(restored)] == list(range(600, 1_000))


def test_entries_after_the_tail_are_left_to_the_replay(environment: Environment) -> None:
    """What was appended since is not in the index, and the tail says where to go on."""
    log = Log(scattered(100))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.dues += scattered(50, seed=2)
    restored = log.restore(environment)
    assert restored is not None
    assert restored.tail == 100
    assert max(entry_id for _, entry_id in drained(restored)) < 100


def test_the_snapshot_before_is_used_when_the_newest_is_damaged(environment: Environment) -> None:
    """Passed over with its reason, for the older one, which covers less."""
    log = Log(scattered(100))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    with environment.read() as raw:
        kept = {bytes(key): bytes(value) for key, value in raw.cursor()}
    log.fire(30)
    log.dues += scattered(100, seed=2)
    write_snapshot(environment, log.cut(), PART_BYTES, 1)

    def put_back(transaction: Transaction) -> None:
        for key, value in kept.items():
            transaction.raw.put(key, value)
        transaction.raw.put(snapshot_meta_key(LEDGER, 2), b"damaged")

    environment.write(put_back)
    reasons: list[str] = []
    restored = log.restore(environment, reasons)
    assert restored is not None
    assert (restored.snapshot_id, restored.tail) == (1, 100)
    assert [reason.split(":")[0] for reason in reasons] == ["2"]
    assert drained(restored) == [key for key in log.pending() if key[1] < 100]


def test_a_snapshot_ahead_of_the_frontier_is_not_used(environment: Environment) -> None:
    """The main environment has gone back (a power cut without durability): entries would be lost."""
    log = Log(scattered(100))
    before = log.frontier
    log.fire(30)
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.frontier = before
    reasons: list[str] = []
    assert log.restore(environment, reasons) is None
    assert "ahead of" in reasons[0]


def test_a_snapshot_of_more_entries_than_there_are_is_not_used(environment: Environment) -> None:
    """The log has gone back, or the snapshot is of another copy of it."""
    log = Log(scattered(100))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    del log.dues[90:]
    reasons: list[str] = []
    assert log.restore(environment, reasons) is None
    assert "covers 100 entries, the log has 90" in reasons[0]


def test_a_frontier_that_moved_without_seeing_the_covered_entries_is_not_of_this_log(environment: Environment) -> None:
    """C moves only together with T; where it did not, which entries have fired cannot be told from the bitmaps."""
    log = Log(scattered(100))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(30)
    log.frontier = log.frontier._replace(absorbed_end=99)
    reasons: list[str] = []
    assert log.restore(environment, reasons) is None
    assert "absorbed only 99" in reasons[0]


def test_another_bucket_size_means_a_replay(environment: Environment) -> None:
    """The configuration was changed: the bitmaps do not fit its grid."""
    log = Log(scattered(100))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    reasons: list[str] = []
    assert log.restore(environment, reasons, bucket_ms=BUCKET_MS * 2) is None
    assert "bucket_ms" in reasons[0]


def test_an_entry_whose_due_time_cannot_be_read_is_kept_for_the_index_to_report(environment: Environment) -> None:
    """In the bucket of the frontier: it is not taken for fired, and comes up as unreadable."""
    log = Log([START_MS + 50] * 10)
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(5)
    log.dues[7] = -1
    restored = log.restore(environment)
    assert restored is not None
    assert [entry_id for _, entry_id in drained(restored)] == [5, 6, 8, 9]
    assert list(restored.pending.unreadable) == [7]
