"""Snapshots on disk: what is there after every step, what is left of those before, and what a restore makes of them."""

from collections.abc import Callable

import numpy as np
import pytest
from pyroaring import BitMap

from duelog.partitions.index.index_cut import Piece
from duelog.partitions.index.window import Dues, Ids
from duelog.snapshot import writer
from duelog.snapshot.snapshot_format import (
    Metadata,
    Part,
    PartRecord,
    SnapshotState,
    Unusable,
    inspect_snapshots,
    pack_parts,
    seal_part,
)
from duelog.snapshot.writer import SnapshotWritten, remove_snapshots, write_snapshot, write_snapshots
from duelog.store.codec.format import CRC_BYTES, seal, snapshot_meta_key, snapshot_part_key, unseal
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.env.environment import Environment
from duelog.store.files import failpoints
from tests.partitions.packing_all import packed_in
from tests.snapshot.logs import BUCKET_MS, LEDGER, START_MS, Log, drained, scattered

PART_BYTES = 1_024


def states(environment: Environment) -> list[tuple[int, int, str]]:
    """(ledger, snapshot id, state) of everything there is, parts read."""
    found = inspect_snapshots(environment, read_parts=True)
    return [(info.ledger_id, info.snapshot_id, info.state.value) for info in found]


def test_a_snapshot_says_what_was_written(environment: Environment) -> None:
    """Parts, bytes, entries and tail are those that can be read."""
    log = Log(scattered(1_000))
    log.fire(100)
    written = write_snapshot(environment, log.cut(), PART_BYTES, 77)
    (info,) = inspect_snapshots(environment, read_parts=True)
    assert info.metadata is not None
    assert (info.state, info.parts, info.metadata.created_ms) == (SnapshotState.COMPLETE, written.parts, 77)
    assert (written.entries, written.tail, written.stored_bytes) == (900, 1_000, info.metadata.stored_bytes)
    assert written.parts > 1


def test_metadata_comes_after_every_part_and_the_one_before_goes_last(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step whatever has metadata is complete, and there always is one once there was one."""
    monkeypatch.setattr(writer, "_REMOVED_KEYS", 1)
    log = Log(scattered(500))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(100)
    seen: list[list[tuple[int, int, str]]] = []
    for name in ("snapshot.part", "snapshot.meta", "commit.after"):
        failpoints.arm(name, lambda: seen.append(states(environment)))
    written = write_snapshot(environment, log.cut(), PART_BYTES, 1)
    assert len(seen) > written.parts
    for found in seen:
        assert all(state in ("complete", "torn") for _, _, state in found)
        assert any(state == "complete" for _, _, state in found)
    assert seen[0] == [(LEDGER, 1, "complete"), (LEDGER, 2, "torn")]
    assert [(LEDGER, 1, "complete"), (LEDGER, 2, "complete")] in seen
    assert states(environment) == [(LEDGER, 2, "complete")]


def test_hundreds_of_small_logs_share_a_few_commits(environment: Environment) -> None:
    """Snapshots of small logs are grouped up to the size of a part; each is restored for itself."""
    logs = [Log(scattered(20, seed=number), ledger_id=number) for number in range(1, 301)]
    before = environment.counts.commits
    steps = write_snapshots(environment, (log.cut() for log in logs), 1 << 20, 1)
    written = list(filter(None, steps))
    assert [done.ledger_id for done in written] == list(range(1, 301))
    assert environment.counts.commits - before <= 4
    assert all(log.restore(environment) is not None for log in logs)
    for _ in write_snapshots(environment, (log.cut() for log in logs), 1 << 20, 1):
        pass
    assert environment.counts.commits - before <= 12
    assert states(environment) == [(number, 2, "complete") for number in range(1, 301)]


def test_transactions_of_parts_are_bounded(environment: Environment) -> None:
    """No transaction holds more than one part's worth of bitmaps, whatever the group."""
    logs = [Log(scattered(count, seed=count, span_ms=200), ledger_id=count) for count in (300, 900, 10, 20, 700)]
    parts: list[int] = []

    def count_parts() -> None:
        parts.append(sum(info.stored_bytes for info in inspect_snapshots(environment)))

    failpoints.arm("snapshot.part", count_parts)
    for _ in write_snapshots(environment, [log.cut() for log in logs], PART_BYTES, 1):
        pass
    grown = [after - before for before, after in zip([0, *parts], parts, strict=False)]
    assert max(grown) <= PART_BYTES + 200  # metadata of the group before is in between


def test_removing_leaves_no_key(environment: Environment) -> None:
    """Every part, torn ones too, and all metadata go; a second time there is nothing to commit."""
    for number in (1, 2, 3):
        log = Log(scattered(300), ledger_id=number)
        write_snapshot(environment, log.cut(), PART_BYTES, 1)
        next(write_snapshots(environment, [log.cut()], PART_BYTES, 1))
    assert remove_snapshots(environment) > 6
    assert states(environment) == []
    before = environment.counts.commits
    assert remove_snapshots(environment) == 0
    assert environment.counts.commits == before


def test_an_empty_index_has_a_snapshot_without_parts(environment: Environment) -> None:
    """Everything has fired: metadata alone says so, and saves the replay."""
    log = Log(scattered(100))
    log.fire(100)
    written = write_snapshot(environment, log.cut(), PART_BYTES, 1)
    assert (written.parts, written.entries) == (0, 0)
    restored = log.restored(environment)
    assert (restored.tail, drained(restored)) == (100, [])


def piece(start_ms: int, ids: list[int]) -> Piece:
    """A piece of these entries."""
    bitmap = BitMap(ids)
    return Piece(start_ms, len(bitmap), bitmap.serialize())


def read_back(part: Part) -> list[tuple[int, list[int]]]:
    """(bucket start, entries) of a part."""
    return [(start_ms, list(saved.bitmap())) for start_ms, saved in part.buckets(1 << 32)]


@pytest.mark.parametrize("part_bytes", [1_024, 4_096])
def test_no_part_is_larger_than_allowed_even_for_one_large_bucket(part_bytes: int) -> None:
    """A bitmap that does not fit is split by ranges of ids, over as many parts as it takes."""
    ids = np.unique(np.random.default_rng(3).integers(0, 1 << 24, 20_000)).tolist()
    parts = list(pack_parts([piece(0, [5]), piece(100, ids), piece(200, [6])], part_bytes))
    found: dict[int, list[int]] = {}
    for number, packed in enumerate(parts):
        key = snapshot_part_key(LEDGER, 1, number)
        value, record = seal_part(key, packed)
        assert len(value) <= part_bytes
        for start_ms, some in read_back(Part(key, value, record)):
            found.setdefault(start_ms, []).extend(some)
    assert len(parts) > 10
    assert found == {0: [5], 100: ids, 200: [6]}


def keys_of(written: SnapshotWritten) -> list[bytes]:
    """Keys of a snapshot's parts, then of its metadata."""
    parts = [snapshot_part_key(written.ledger_id, written.snapshot_id, number) for number in range(written.parts)]
    return [*parts, snapshot_meta_key(written.ledger_id, written.snapshot_id)]


def value_at(environment: Environment, key: bytes) -> bytes:
    """The stored value, seal included."""
    with environment.read() as raw:
        return bytes(raw.get(key) or b"")


def store(environment: Environment, key: bytes, value: bytes) -> None:
    """Put a value as it is, unsealed."""
    environment.commit(lambda transaction: transaction.raw.put(key, value))


def small_snapshot(environment: Environment) -> tuple[Log, list[bytes]]:
    """A log with two snapshots' worth of history: the one that is there has two parts; keys of parts and metadata."""
    log = Log(scattered(120, span_ms=4_000))
    log.fire(20)
    keys = keys_of(write_snapshot(environment, log.cut(), PART_BYTES, 1))
    assert len(keys) == 3
    return log, keys


def assert_never_wrong(environment: Environment, log: Log) -> None:
    """If anything is restored, it is right."""
    restored = log.restore(environment)
    if restored is not None:
        assert restored.tail == log.tail
        assert drained(restored) == log.pending()


def test_every_flipped_bit_is_noticed(environment: Environment) -> None:
    """A bit of any byte of parts and metadata changed: the snapshot is passed over."""
    log, keys = small_snapshot(environment)
    for key in keys:
        whole = value_at(environment, key)
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            store(environment, key, bytes(damaged))
            assert log.restore(environment) is None
        store(environment, key, whole)
    restored = log.restored(environment)
    assert drained(restored) == log.pending()


def test_every_truncation_is_noticed_even_where_the_seal_is_made_anew(environment: Environment) -> None:
    """Cut at every length, as it is and sealed again: never used."""
    log, keys = small_snapshot(environment)
    for key in keys:
        whole = value_at(environment, key)
        fields = unseal(key, whole)
        for length in range(len(whole)):
            store(environment, key, whole[:length])
            assert log.restore(environment) is None
        for length in range(len(fields)):
            store(environment, key, seal(key, fields[:length]))
            assert log.restore(environment) is None
        store(environment, key, whole + b"\0")
        assert log.restore(environment) is None
        store(environment, key, whole)
    assert log.restore(environment) is not None


def test_an_unknown_version_is_passed_over_by_name(environment: Environment) -> None:
    """Parts and metadata of a later version, whole and sealed, are refused for their version."""
    log, (part_key, _, meta_key) = small_snapshot(environment)
    whole = value_at(environment, meta_key)
    store(environment, meta_key, seal(meta_key, b"\0\2" + unseal(meta_key, whole)[2:]))
    reasons: list[str] = []
    assert log.restore(environment, reasons) is None
    assert "metadata of version 2" in reasons[0]
    later = seal(part_key, b"\2\0" + unseal(part_key, value_at(environment, part_key))[2:])
    record = PartRecord(int.from_bytes(later[-CRC_BYTES:], "little"), len(later), 0)
    with pytest.raises(Unusable, match="version 2"):
        Part(part_key, later, record)


def test_metadata_that_contradicts_itself_is_refused() -> None:
    """Totals that are not the sums over the parts."""
    metadata = Metadata(BUCKET_MS, START_MS, 9, -1, -1, 0, 5, (PartRecord(1, 2, 3),))
    fields = bytearray(metadata.pack())
    fields[-1] ^= 1  # the last part's count
    with pytest.raises(Unusable, match="contradicts"):
        Metadata.unpack(bytes(fields))


def test_parts_swapped_between_two_snapshots_are_noticed(environment: Environment) -> None:
    """A part of another snapshot or number, as it is or sealed for its new place, is never taken for the right one."""
    log, keys = small_snapshot(environment)
    other = Log(scattered(120, seed=2, span_ms=4_000), ledger_id=LEDGER + 1)
    other.fire(20)
    other_keys = keys_of(write_snapshot(environment, other.cut(), PART_BYTES, 1))
    originals = {key: value_at(environment, key) for key in (*keys, *other_keys)}
    for key in keys:
        for other_key in (*keys, *other_keys):
            if other_key == key:
                continue
            for value in (originals[other_key], seal(key, unseal(other_key, originals[other_key]))):
                store(environment, key, value)
                assert_never_wrong(environment, log)
                assert key not in keys[:2] or log.restore(environment) is None
        store(environment, key, originals[key])
    assert log.restore(environment) is not None


def test_a_missing_part_is_noticed(environment: Environment) -> None:
    """Metadata whose part is gone stands for nothing."""
    log, (part_key, _, _) = small_snapshot(environment)
    environment.write(lambda transaction: transaction.delete(part_key))
    reasons: list[str] = []
    assert log.restore(environment, reasons) is None
    assert "part 0 of 2 is missing" in reasons[0]


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
