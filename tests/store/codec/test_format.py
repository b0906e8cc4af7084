"""Keys, records, checksums: byte order is key order, all comes back as it was; the rule of which entries have fired."""

import importlib.util
import sys
import zlib
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.store.codec import checksum
from duelog.store.codec import format as fmt
from duelog.store.codec.format import Table
from duelog.store.codec.frontier import HELD, UNREADABLE_DUE, Entries, FrontierRecord
from duelog.store.errors import CorruptRecord
from duelog.store.names import MAX_SUBSCRIPTION_BYTES, MAX_TOPIC_BYTES
from tests.conftest import present

U8 = st.integers(0, 2**8 - 1)
U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
TIME = st.integers(0, 2**63 - 1)

RECORDS = st.one_of(
    st.builds(fmt.TopicRecord, U32, TIME),
    st.builds(fmt.PartitionRecord, TIME, U32, st.sampled_from(fmt.PartitionState), U32, TIME),
    st.builds(fmt.PartitionInfo, U16, st.binary(min_size=16, max_size=16), TIME, TIME, U32),
    st.builds(FrontierRecord, U64, I64, st.integers(-1, 2**32 - 2), U32, U64, U64, U32, st.sampled_from([0, 1])),
    st.builds(fmt.LedgerRecord, TIME, TIME, U32, U64, st.sampled_from(fmt.LedgerState)),
    st.builds(fmt.CursorRecord, U32, TIME, U64, U32, U8),
)


@given(RECORDS, st.integers(-8, 8).filter(bool))
def test_a_record_comes_back_as_it_was_and_one_of_another_length_is_refused(record: FrontierRecord, more: int) -> None:
    """For every kind of record; cut short or with something after it, it is corrupt, whatever it says."""
    packed = record.pack()
    again = type(record).unpack(packed)
    assert again == record
    assert type(again) is type(record)
    with pytest.raises(CorruptRecord):
        type(record).unpack(packed + bytes(more) if more > 0 else packed[:more])


@given(st.binary(min_size=1, max_size=40), st.binary(max_size=200), st.data())
def test_a_sealed_value_opens_under_its_key_and_with_no_bit_flipped(
    key: bytes, fields: bytes, data: st.DataObject
) -> None:
    """From bytes and from LMDB's views; a bit of the value, the checksum or the key."""
    value = fmt.seal(key, fields)
    assert len(value) == len(fields) + fmt.CRC_BYTES
    assert fmt.unseal(key, value) == fields
    assert fmt.unseal(key, memoryview(value)) == fields
    both = bytearray(key + value)
    bit = data.draw(st.integers(0, len(both) * 8 - 1))
    both[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecord):
        fmt.unseal(bytes(both[: len(key)]), bytes(both[len(key) :]))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (fmt.run_key, (U64, U32)),
        (fmt.frontier_key, (U32, U64)),
        (fmt.ledger_key, (U32, U64)),
        (fmt.acked_key, (U32, U64)),
        (fmt.quarantine_key, (U64, U32)),
        (fmt.partition_key, (U64,)),
        (fmt.log_key, (U32,)),
        (fmt.topic_name_key, (U32,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@given(st.data())
def test_byte_order_is_key_order(
    make: Callable[..., bytes], parts: tuple[st.SearchStrategy[int], ...], data: st.DataObject
) -> None:
    """Keys sort as their numbers do, and all keys of a kind have one length."""
    one, other = (tuple(data.draw(part) for part in parts) for _ in range(2))
    assert (make(*one) < make(*other)) == (one < other)
    assert (make(*one) == make(*other)) == (one == other)
    assert len(make(*one)) == len(make(*other))


@given(U64, U32)
def test_a_run_key_splits_into_what_it_was_made_of(ledger_id: int, entry_id: int) -> None:
    """Also where it is a view, and where only the number at its end is wanted."""
    key = fmt.run_key(ledger_id, entry_id)
    assert fmt.split_run_key(key) == fmt.split_run_key(memoryview(key)) == (ledger_id, entry_id)
    assert (fmt.leading_u64(key), fmt.trailing_u32(key)) == (ledger_id, entry_id)
    assert fmt.trailing_u64(fmt.partition_key(ledger_id)) == ledger_id


@given(U32, U64, st.text(max_size=20))
def test_keys_of_a_table_begin_with_its_prefix(number: int, wide: int, name: str) -> None:
    """So that a range of them is found by the prefix, of one topic or of all."""
    if all(not 0xD800 <= ord(character) <= 0xDFFF for character in name):
        assert fmt.topic_key(name).startswith(fmt.prefix(Table.TOPIC))
        assert fmt.cursor_key(number, name).startswith(fmt.prefix(Table.CURSOR, number))
        assert fmt.name_of(fmt.topic_key(name)) == name
        assert fmt.split_named_key(fmt.cursor_key(number, name)) == (number, name)
    assert fmt.frontier_key(number, wide).startswith(fmt.prefix(Table.FRONTIER, number))
    assert fmt.ledger_key(number, wide).startswith(fmt.prefix(Table.LEDGER, number))
    assert fmt.leading_u32(fmt.ledger_key(number, wide)) == number
    assert fmt.run_key(wide, number).startswith(fmt.RUN_PREFIX)
    assert fmt.run_key(wide, number).startswith(fmt.run_prefix(wide))
    assert fmt.block_key(Table.ADMITTED, wide, number).startswith(fmt.block_prefix(Table.ADMITTED, wide))


@given(U64, U64, U32)
def test_a_key_is_of_a_ledgers_run_or_it_is_not(ledger_id: int, other: int, number: int) -> None:
    """A block or a quarantined entry has a key of the same length, a snapshot's begins with the same number."""
    key = fmt.run_key(ledger_id, number)
    assert fmt.is_run_of(key, ledger_id)
    assert fmt.is_run_of(memoryview(key), ledger_id)
    assert fmt.is_run_of(key, other) == (ledger_id == other)
    for wrong in (
        key[:-1],
        key + b"\0",
        fmt.quarantine_key(ledger_id, number),
        fmt.snapshot_meta_key(ledger_id, other),
    ):
        assert not fmt.is_run_of(wrong, ledger_id)


def test_no_two_tables_share_a_first_byte_runs_come_last_and_the_longest_names_fit() -> None:
    """The runs of the newest ledger are appended at the end of the environment; LMDB takes keys of 511 bytes."""
    assert len({int(table) for table in Table}) == len(Table)
    assert max(Table) is Table.RUN
    assert len(fmt.topic_key("x" * MAX_TOPIC_BYTES)) <= 511
    assert len(fmt.cursor_key(1, "x" * MAX_SUBSCRIPTION_BYTES)) <= 511


def test_at_the_start_nothing_has_fired_and_there_is_no_last_marker() -> None:
    """Not even an entry due at 0, nor one that has no due time to compare; (0, 0) is no position of a marker then."""
    start = FrontierRecord.start(7)
    assert (start.ledger_id, start.last_marker, start.absorbed_end, start.fired) == (7, None, 0, 0)
    fired = start._replace(fired=1, marker_ledger=3, marker_entry=0)
    assert fired.last_marker == (3, 0)
    ids = np.arange(3, dtype=np.uint32)
    dues = np.array([0, HELD, UNREADABLE_DUE])
    assert not start.has_fired(ids, dues).any()
    assert not start.passes(ids, dues).any()


def test_mark_delete_is_the_entry_before_the_next() -> None:
    """A cursor at the beginning of a ledger stands before its first entry."""
    assert fmt.CursorRecord(1, 0, 5, 0, 0).mark_delete == (5, -1)
    assert fmt.CursorRecord(1, 0, 5, 3, 0).mark_delete == (5, 2)


def loaded_anew() -> ModuleType:
    """The module as a process that starts now would have it."""
    spec = present(importlib.util.spec_from_file_location("checksum_anew", checksum.__file__))
    module = importlib.util.module_from_spec(spec)
    present(spec.loader).exec_module(module)
    return module


@given(st.binary(max_size=3_000), st.integers(0, 2**32 - 1))
def test_a_store_does_not_differ_by_what_computes_its_checksums(data: bytes, value: int) -> None:
    """The same number as zlib's, of bytes and of a view, from the start and going on."""
    assert checksum.crc32(data, value) == checksum.crc32(memoryview(data), value) == zlib.crc32(data, value)
    assert checksum.crc32(data) == zlib.crc32(data)


def test_isal_is_used_where_it_is_and_never_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it zlib computes them."""
    isal = pytest.importorskip("isal.isal_zlib")
    assert loaded_anew().crc32 is isal.crc32
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert loaded_anew().crc32 is zlib.crc32


FEW = st.integers(0, 6)
"""Few values, so that due times and entry ids are often those of the frontier."""

LARGE = st.sampled_from([2**31 - 1, 2**31, 2**32 - 2])
ENTRY = FEW | LARGE
DUE = FEW | st.sampled_from([2**53, 253_402_300_799_999])


@given(
    st.lists(st.tuples(ENTRY, DUE), max_size=30, unique_by=lambda pair: pair[0]),
    st.tuples(DUE, ENTRY) | st.just((-1, -1)),
    ENTRY,
    st.booleans(),
)
def test_an_entry_has_fired_if_it_is_below_t_and_at_or_before_c(
    entries: list[tuple[int, int]], c: tuple[int, int], t: int, narrow: bool
) -> None:
    """Whatever the type of the ids, for one entry and for many; those at or before C from T on are late."""
    due_ms, entry_id = c
    frontier = FrontierRecord(7, due_ms, entry_id, t, 0, 0, 0, 0)
    ids: Entries = np.array([entry for entry, _ in entries], dtype=np.uint32 if narrow else np.int64)
    dues = np.array([due for _, due in entries], dtype=np.int64)
    passed = [(due, entry) <= c for entry, due in entries]
    assert frontier.passes(ids, dues).tolist() == passed
    assert frontier.has_fired(ids, dues).tolist() == [
        entry < t and before for (entry, _), before in zip(entries, passed, strict=True)
    ]
