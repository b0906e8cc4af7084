"""The bytes of snapshots: what is written is read, and nothing that was changed is."""

from __future__ import annotations

import numpy as np
import pytest
from pyroaring import BitMap

from duelog.partitions.index.index_cut import Piece
from duelog.snapshot.snapshot_format import Metadata, Part, PartRecord, Unusable, pack_parts, seal_part
from duelog.snapshot.writer import SnapshotWritten, write_snapshot
from duelog.store.codec.format import CRC_BYTES, seal, snapshot_meta_key, snapshot_part_key, unseal
from duelog.store.env.environment import Environment
from tests.snapshot.logs import BUCKET_MS, LEDGER, START_MS, Log, drained, scattered

PART_BYTES = 1_024


def piece(start_ms: int, ids: list[int]) -> Piece:
    """A piece of these entries."""
    bitmap = BitMap(ids)
    return Piece(start_ms, len(bitmap), bitmap.serialize())


def read_back(part: Part) -> list[tuple[int, list[int]]]:
    """(bucket start, entries) of a part."""
    return [(start_ms, list(saved.bitmap())) for start_ms, saved in part.buckets(1 << 32)]


def test_a_part_gives_back_its_pieces() -> None:
    """Bucket starts and entries survive packing, sealing and reading."""
    pieces = [piece(0, [1, 2, 3]), piece(100, list(range(0, 10_000, 7)))]
    (packed,) = pack_parts(pieces, 1 << 20)
    key = snapshot_part_key(LEDGER, 1, 0)
    value, record = seal_part(key, packed)
    assert record.entries == 3 + 1429
    assert len(value) == record.stored_bytes == packed.stored_bytes
    assert read_back(Part(key, value, record)) == [(0, [1, 2, 3]), (100, list(range(0, 10_000, 7)))]


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


def test_metadata_gives_back_its_fields() -> None:
    """Every field survives, also before anything has fired."""
    metadata = Metadata(BUCKET_MS, START_MS, 9, -1, -1, 0, 5, (PartRecord(1, 2, 3), PartRecord(4, 5, 6)))
    assert Metadata.unpack(metadata.pack()) == metadata
    assert (metadata.entries, metadata.stored_bytes) == (9, 7)


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
