"""Reading a snapshot part by part: what is whole, and up to when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.packed_buckets import Asleep
from duelog.snapshot import writer
from duelog.snapshot.parts import Parts, SavedBucket
from duelog.snapshot.restore import Restored, _last, restore_steps
from duelog.snapshot.snapshot_format import Metadata, Unusable, read_metadata
from duelog.snapshot.writer import write_snapshot
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.env.environment import Environment
from tests.snapshot.logs import BUCKET_MS, LEDGER, START_MS, Log, new_environment, scattered

PART_BYTES = 1_024


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An empty partition environment."""
    opened = new_environment(tmp_path / "partition")
    yield opened
    opened.close()


def metadata_of(environment: Environment, snapshot_id: int = 1) -> Metadata:
    """What the snapshot says of itself."""
    with environment.read() as raw:
        return read_metadata(raw, LEDGER, snapshot_id)


def parts_of(environment: Environment, frontier: FrontierRecord) -> Parts:
    """The first snapshot, to be read."""
    return Parts(environment, LEDGER, 1, metadata_of(environment), frontier)


def keys(log: Log, buckets: list[SavedBucket]) -> list[tuple[int, int]]:
    """(due time, entry id) of entries read, in firing order."""
    found = [ids.bitmap() if isinstance(ids, Asleep) else ids for _, ids in buckets]
    return sorted((log.dues[entry_id], entry_id) for ids in found for entry_id in ids)


def started(log: Log, environment: Environment) -> Restored:
    """The index as soon as something of it may fire."""
    steps = restore_steps(environment, log.frontier, log.tail, log.due_of, start_ms=START_MS, bucket_ms=BUCKET_MS)
    restored = _last(steps)
    assert restored is not None
    return restored


def test_pieces_stand_in_order_of_time_though_the_nearest_are_cut_last(environment: Environment) -> None:
    """What the index has in its window comes last in a copy of it, and first in the snapshot."""
    log = Log(scattered(2_000))
    index = DelayIndex(log.due_of, start_ms=START_MS, bucket_ms=BUCKET_MS, window_entries=700)
    index.add(0, np.array(log.dues, dtype=np.int64))
    index.exact_next_due_ms()
    cutting = index.cut(log.tail)
    cutting.arrange()
    pieces = cutting.more(1 << 32)
    assert [piece.start_ms for piece in pieces] != sorted(piece.start_ms for piece in pieces)
    write_snapshot(environment, log.cut()._replace(pieces=pieces), PART_BYTES, 1)
    assert metadata_of(environment).ordered
    parts = parts_of(environment, log.frontier)
    while parts.left:
        parts.read()  # raises where they are not


@pytest.mark.parametrize("fired", [0, 700])
def test_at_every_part_all_that_is_due_before_the_limit_has_been_given(environment: Environment, fired: int) -> None:
    """Nothing before it comes later, nothing from it on comes earlier; a bucket in two parts comes whole."""
    log = Log(scattered(12_000))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    if fired:
        log.fire(fired)
    c_bucket_ms = log.frontier.due_ms - log.frontier.due_ms % BUCKET_MS
    parts = parts_of(environment, log.frontier)
    given: list[SavedBucket] = []
    limits = []
    while parts.left:
        given += parts.read()
        if parts.left:
            limits.append(parts.limit_ms)
            after_c = [key for key in log.pending() if not fired or key[0] >= c_bucket_ms + BUCKET_MS]
            assert keys(log, given) == [key for key in after_c if key[0] < parts.limit_ms]
    assert limits == sorted(limits)
    assert len(set(limits)) > 5
    assert len(set(limits)) < len(limits)  # a bucket takes more than a part
    assert keys(log, given) == after_c


@pytest.mark.parametrize("fired", [0, 700])
def test_an_index_may_fire_as_soon_as_the_frontiers_bucket_is_whole(environment: Environment, fired: int) -> None:
    """It holds all that is left to fire before the limit, in order, with most parts not read."""
    log = Log(scattered(5_000))
    parts = write_snapshot(environment, log.cut(), PART_BYTES, 1).parts
    if fired:
        log.fire(fired)
    restored = started(log, environment)
    assert restored.rest.left > parts // 2
    assert restored.rest.limit_ms > log.frontier.due_ms
    ids, dues = restored.pending.take(restored.rest.limit_ms - 1, 1 << 32)
    expected = [key for key in log.pending() if key[0] < restored.rest.limit_ms]
    assert list(zip(dues.tolist(), ids.tolist(), strict=True)) == expected != []
    assert len(restored.pending) == 0
    while restored.rest.left:
        restored.pending.restore_buckets(restored.rest.read())
    ids, dues = restored.pending.take(START_MS + (1 << 32), 1 << 32)
    assert list(zip(dues.tolist(), ids.tolist(), strict=True)) == log.pending()[len(expected) :]


def test_a_snapshot_that_does_not_say_that_it_is_in_order_is_read_whole(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one written before snapshots said so: nothing is given before the last part."""
    log = Log(scattered(2_000))

    def unordered(*fields: object, ordered: bool) -> Metadata:
        return Metadata(*fields)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "Metadata", unordered)
    cut = log.cut()
    write_snapshot(environment, cut._replace(pieces=cut.pieces[::-1]), PART_BYTES, 1)
    monkeypatch.undo()
    assert not metadata_of(environment).ordered
    restored = started(log, environment)
    assert restored.rest.left == 0
    ids, _ = restored.pending.take(START_MS + (1 << 32), 1 << 32)
    assert ids.tolist() == [entry_id for _, entry_id in log.pending()]


def test_parts_that_break_the_promised_order_are_refused(environment: Environment) -> None:
    """Whoever sealed them: what is due before the limit must not come after it has fired."""
    log = Log(scattered(2_000))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    metadata = metadata_of(environment)
    parts = Parts(environment, LEDGER, 1, metadata, log.frontier)
    while parts.left > 1:
        parts.read()
    parts.limit_ms += 10 * BUCKET_MS
    with pytest.raises(Unusable, match="not in the order"):
        parts.read()
