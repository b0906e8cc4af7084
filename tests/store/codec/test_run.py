"""Runs and columns of bodies: entries come back as they were, one damaged byte costs a run or one entry."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import run_key
from duelog.store.codec.run import (
    HEADER,
    HEADER_BYTES,
    MAX_DUE_SPAN_MS,
    PackedRun,
    Run,
    RunKind,
    RunLimits,
    fields_of_message,
    pack_groups,
    pack_markers,
    seal_run,
    set_apart,
    whole_value,
)
from duelog.store.codec.run_lengths import ScatteredBatch, ShortRun, WholeRun, cut, fits_runs, merged_runs
from duelog.store.errors import BrokenInvariant, CorruptEntry

U32 = st.integers(0, 2**32 - 1)
ADDRESS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 200))
BASE = st.integers(0, 253_402_300_799_999)
BODIES = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=20)


def messages(
    base_ms: int,
    offsets: list[int],
    bodies: list[bytes],
    address: tuple[int, int] = (3, 100),
    conditional: bool = False,
) -> tuple[bytes, bytes]:
    """Key and value of a run of messages; conditional entries replace (1000 + n, n)."""
    key = run_key(*address)
    dues = np.array(offsets, dtype=np.int64) + base_ms
    count = len(bodies)
    replaced = (np.arange(1000, 1000 + count, dtype=np.uint64), np.arange(count, dtype=np.uint32))
    return key, bytes(PackedRun(base_ms, dues, bodies, replaced if conditional else None).sealed(key))


@given(ADDRESS, BASE, BODIES, st.booleans(), st.data())
def test_messages_come_back_as_they_were(
    address: tuple[int, int], base_ms: int, bodies: list[bytes], conditional: bool, data: st.DataObject
) -> None:
    """Due times, bodies and what conditional entries replace, also from a view at an odd offset."""
    offsets = data.draw(st.lists(U32, min_size=len(bodies), max_size=len(bodies)))
    key, value = messages(base_ms, offsets, bodies, address, conditional)
    for stored in (value, memoryview(b"x" + value)[1:]):
        run = Run("here", memoryview(key), stored)
        assert (run.ledger_id, run.first_entry, run.limit) == (*address, address[1] + len(bodies))
        assert (run.kind, run.count, run.conditional) == (RunKind.MESSAGES, len(bodies), conditional)
        assert run.dues().tolist() == [base_ms + offset for offset in offsets]
        assert [run.due(index) for index in range(run.count)] == run.dues().tolist()
        assert [run.body(index) for index in range(run.count)] == bodies
        assert list(run.bodies()) == [(address[1] + index, body) for index, body in enumerate(bodies)]
        assert run.stored_bytes == len(value)
        assert run.ends()[-1] == sum(map(len, bodies))
        if conditional:
            ledgers, entries = run.replaced()
            assert ledgers.tolist() == list(range(1000, 1000 + len(bodies)))
            assert entries.tolist() == list(range(len(bodies)))


@given(
    ADDRESS,
    st.integers(0, 2**64 - 1),
    BASE,
    st.lists(st.tuples(U32, U32), min_size=1, max_size=50),
    st.none() | st.integers(0, MAX_DUE_SPAN_MS),
)
def test_markers_come_back_as_they_were(
    address: tuple[int, int], target: int, base_ms: int, rows: list[tuple[int, int]], after_ms: int | None
) -> None:
    """The ledger they point into, the entries, the due times, and when they were written if that was said."""
    key = run_key(*address)
    entries = np.array([entry for entry, _ in rows], dtype=np.uint32)
    dues = np.array([offset for _, offset in rows], dtype=np.int64) + base_ms
    fired_ms = None if after_ms is None else int(dues.max()) + after_ms
    run = Run("here", key, pack_markers(key, target, base_ms, entries, dues, fired_ms))
    assert (run.kind, run.target, run.base_ms, run.count) == (RunKind.MARKERS, target, base_ms, len(rows))
    assert run.targets().tolist() == entries.tolist()
    assert run.dues().tolist() == dues.tolist()
    assert run.limit == address[1] + len(rows)
    assert run.fired_ms() == fired_ms


def test_the_time_of_a_firing_is_clipped_to_what_fits() -> None:
    """Later than 32 bits of ms is stored as that; a clock that was set back as no time at all."""
    key, entries, dues = run_key(1, 0), np.array([4], np.uint32), np.array([1_000])
    times = (1_000 + MAX_DUE_SPAN_MS + 5, 990)
    found = [Run("here", key, pack_markers(key, 9, 0, entries, dues, fired_ms)).fired_ms() for fired_ms in times]
    assert found == [1_000 + MAX_DUE_SPAN_MS, 1_000]


def test_a_flipped_bit_of_header_or_columns_costs_the_run() -> None:
    """All bits, one after another, of messages and markers; the error has the address of the run's first entry."""
    key, value = messages(5, [0, 7], [b"a", b"bc"])
    _, conditional = messages(5, [0, 7], [b"a", b"bc"], conditional=True)
    markers = pack_markers(key, 9, 5, np.array([1, 2], np.uint32), np.array([5, 6]))
    for whole, head in ((value, len(value) - 3), (conditional, len(conditional) - 3), (markers, len(markers))):
        for bit in range(head * 8):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptEntry) as caught:
                Run("partition x", key, bytes(damaged))
            error = caught.value
            assert (error.environment, error.ledger_id, error.entry_id) == ("partition x", 3, 100)


@given(BODIES, st.data())
def test_a_flipped_bit_of_a_body_costs_one_entry(bodies: list[bytes], data: st.DataObject) -> None:
    """That entry is reported by its own id, and every other one of the run is handed out."""
    key, value = messages(0, [0] * len(bodies), bodies)
    head = len(value) - sum(map(len, bodies))
    bit = data.draw(st.integers(head * 8, len(value) * 8 - 1))
    damaged = bytearray(value)
    damaged[bit // 8] ^= 1 << bit % 8
    victim = int(np.searchsorted(np.cumsum([len(body) for body in bodies]), bit // 8 - head, side="right"))
    run = Run("main", key, bytes(damaged))
    for index, (entry_id, body) in enumerate(run.bodies()):
        if index == victim:
            assert isinstance(body, CorruptEntry)
            assert (body.ledger_id, body.entry_id, entry_id) == (3, 100 + index, 100 + index)
        else:
            assert body == bodies[index]


@given(BODIES, st.data())
def test_a_run_cut_short_never_gives_a_wrong_body(bodies: list[bytes], data: st.DataObject) -> None:
    """Whole bodies are handed out, others are reported."""
    key, value = messages(0, [0] * len(bodies), bodies)
    kept = data.draw(st.integers(0, len(value) - 1))
    try:
        run = Run("main", key, value[:kept])
    except CorruptEntry:
        assert kept < len(value) - sum(map(len, bodies))
        return
    found = [body for _, body in run.bodies()]
    assert isinstance(found[-1], CorruptEntry)
    assert all(isinstance(body, CorruptEntry) or body == bodies[index] for index, body in enumerate(found))


def test_a_run_under_another_key_or_of_a_later_version_is_refused() -> None:
    """The checksum covers the key: a run copied to another place is not taken for one of that place."""
    key, value = messages(0, [0], [b"a"])
    for address in ((3, 101), (4, 100)):
        with pytest.raises(CorruptEntry, match="checksum"):
            Run("main", run_key(*address), value)
    with pytest.raises(CorruptEntry, match="version 9"):
        Run("main", key, value[:4] + b"\x09" + value[5:])


def test_a_dropped_body_is_none_and_moves_no_other() -> None:
    """Compaction drops bodies and keeps entry ids."""
    key, value = messages(0, [0, 1, 2], [b"one", b"", b"three"])
    run = Run("main", key, value)
    assert [run.body(index) for index in range(3)] == [b"one", None, b"three"]


@given(st.integers(0, MAX_DUE_SPAN_MS), st.integers(0, 2**40), st.binary(max_size=300), st.booleans())
def test_the_run_of_a_single_send_is_a_run_like_any(offset: int, base_ms: int, body: bytes, early: bool) -> None:
    """It is packed in a way of its own, to the same bytes."""
    key = run_key(7, 3)
    many = PackedRun(base_ms, np.array([base_ms + offset]), [body], early=early).sealed(key)
    assert seal_run(key, fields_of_message(base_ms, base_ms + offset, body, early=early), [body]) == many


def cuts(dues: list[int], sizes: list[int], **limits: Any) -> list[tuple[int, int]]:
    """`cut` with limits that do not matter unless given."""
    options: dict[str, Any] = {"max_entries": 1000, "max_bytes": 1 << 30, "base_ms": 0, **limits}
    return list(cut(np.array(dues, dtype=np.int64), sizes, **options))


@given(
    st.lists(st.tuples(st.integers(0, 2**34), st.integers(1, 300)), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 1000),
    st.booleans(),
)
def test_a_batch_is_cut_as_late_as_the_rules_allow(
    rows: list[tuple[int, int]], max_entries: int, max_bytes: int, based: bool
) -> None:
    """Greedy: an entry begins a run if and only if the one before cannot take it."""
    dues = [due % 2**32 if based else due for due, _ in rows]
    sizes = [size for _, size in rows]

    def fits(start: int, limit: int) -> bool:
        span = max(dues[start:limit]) - min(dues[start:limit])
        return (
            limit - start <= max_entries
            and (limit - start == 1 or sum(sizes[start:limit]) <= max_bytes)
            and (based or span <= MAX_DUE_SPAN_MS)
        )

    expected = []
    start = 0
    for limit in range(1, len(rows) + 1):
        if limit == len(rows) or not fits(start, limit + 1):
            expected.append((start, limit))
            start = limit
    found = cuts(dues, sizes, max_entries=max_entries, max_bytes=max_bytes, base_ms=0 if based else None)
    assert found == expected


def thin(bodies: list[bytes], conditional: bool = False) -> bytes:
    """The value of a run of these bodies, one ms apart."""
    return messages(1_000, list(range(len(bodies))), bodies, conditional=conditional)[1]


@pytest.mark.parametrize("conditional", [False, True])
def test_what_stays_is_the_same_and_what_goes_is_none(conditional: bool) -> None:
    """Any choice of any bodies, dropped ones and empty choices among them, is as if they had been packed so."""
    source = random.Random(5)
    for count in (1, 2, 7, 192):
        for _ in range(20):
            bodies = [source.randbytes(source.choice((0, 1, 40))) for _ in range(count)]
            keep = np.array([source.random() < source.choice((0.1, 0.5, 1.0)) for _ in range(count)])
            run = Run("a", run_key(3, 100), thin(bodies, conditional))
            expected = [body if kept else b"" for body, kept in zip(bodies, keep, strict=True)]
            assert run.keeping(keep) == thin(expected, conditional)
            assert Run("a", run_key(3, 100), run.keeping(keep)).fixed() == run.fixed()


def test_a_damaged_body_stays_damaged_and_one_outside_its_run_is_found_before() -> None:
    """Its checksum is copied, not computed, so that it is reported from the copy too; nor is a cut run thinned."""
    value = bytearray(thin([b"one", b"two", b"three"]))
    value[-7] ^= 1  # in "two"
    copy = Run("a", run_key(3, 100), Run("a", run_key(3, 100), bytes(value)).keeping(np.array([False, True, True])))
    assert copy.body(0) is None
    assert copy.body(2) == b"three"
    with pytest.raises(CorruptEntry, match="checksum"):
        copy.body(1)
    whole = thin([b"one", b"two"])
    assert Run("a", run_key(3, 100), whole).bodies_fit
    assert not Run("a", run_key(3, 100), whole[:-1]).bodies_fit


@st.composite
def columns(draw: st.DrawFn) -> tuple[Bodies, list[bytes]]:
    """Bodies with and without a shared beginning, of one size and of several; and what they stand for."""
    head = draw(st.sampled_from([b"", b"h", b"head"]))
    size = draw(st.none() | st.integers(0, 40))
    each = st.binary(max_size=40) if size is None else st.binary(min_size=size, max_size=size)
    rests = draw(st.lists(each, max_size=20))
    known = size is not None and draw(st.booleans())
    return Bodies(rests, head, len(head) + (size or 0) if known else None), [head + rest for rest in rests]


@given(columns(), st.data())
def test_columns_of_bodies_are_the_bodies(case: tuple[Bodies, list[bytes]], data: st.DataObject) -> None:
    """Whatever is asked of them whole, of a slice of them, or of some in another order."""
    bodies, plain = case
    bound = st.integers(0, len(plain))
    start, limit = data.draw(bound), data.draw(bound)
    rows = data.draw(st.permutations(range(len(plain))))[: data.draw(bound)]
    for found, expected in (
        (bodies, plain),
        (bodies[start:limit], plain[start:limit]),
        (bodies.pick(rows), [plain[row] for row in rows]),
        (Bodies.of(plain), plain),
    ):
        assert list(found) == expected
        assert [found[place] for place in range(len(found))] == expected
        assert found.sizes().tolist() == [len(body) for body in expected]
        assert found.total() == sum(map(len, expected))
        assert found.ends().tolist() == list(accumulate(map(len, expected)))
        assert found.checksums() == b"".join(crc32(body).to_bytes(4, "little") for body in expected)
        assert b"".join(found.parts()) == b"".join(expected)


@given(ADDRESS, BASE, BODIES, st.booleans(), st.integers(0, 2**40), st.data())
def test_a_run_without_its_bodies_reads_as_the_whole_one(
    address: tuple[int, int], base_ms: int, bodies: list[bytes], conditional: bool, at: int, data: st.DataObject
) -> None:
    """Whatever is asked of it; and whole again it is the same value."""
    key, value = messages(base_ms, list(range(len(bodies))), bodies, address, conditional)
    apart, rest = set_apart(key, value, at)
    read = partial(_read, at, bytes(rest))
    whole, run = Run("here", key, value), Run("here", key, apart, read)
    assert (run.bodies_at, whole.bodies_at) == (at, None)
    assert list(run.bodies()) == list(whole.bodies())
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(bodies), max_size=len(bodies))))
    index = data.draw(st.integers(0, len(bodies) - 1))
    for ask in (
        lambda each: each.body(index),
        lambda each: each.raw_body(index),
        lambda each: each.stored_bytes,
        lambda each: each.bodies_fit,
        lambda each: bytes(each.keeping(keep)),
        lambda each: [bytes(body) for body in each.raw_bodies(keep)],
        lambda each: bytes(each.body_region(index, len(bodies))[2]),
        lambda each: each.dues().tolist(),
    ):
        assert ask(run) == ask(whole)
    assert bytes(run.whole()) == bytes(whole_value(key, apart, read)) == bytes(value)
    assert not WholeRun(run.first_entry, run.limit, apart).is_plain


def _read(at: int, bodies: bytes, ledger_id: int, start: int, length: int) -> memoryview:
    assert start >= at
    return memoryview(bodies)[start - at : start - at + length]


def test_a_body_file_that_ends_too_soon_costs_the_bodies_that_are_not_in_it() -> None:
    """The others are read; the place of all of them is covered by the checksum of the header."""
    key, value = messages(0, [1, 2, 3], [b"one", b"two", b"three"])
    apart, rest = set_apart(key, value, 4096)
    run = Run("here", key, apart, partial(_read, 4096, bytes(rest)[:7]))
    assert not run.bodies_fit
    assert [body for _, body in run.bodies()][:2] == [b"one", b"two"]
    assert [entry for entry, _ in run.damaged_bodies()] == [102]
    with pytest.raises(CorruptEntry):
        Run("here", key, apart[:-1] + b"!", None)
    with pytest.raises(BrokenInvariant):
        Run("here", key, apart).body(0)


Messages = list[tuple[int, bytes]]

MESSAGES = st.lists(st.tuples(st.integers(0, 5_000), st.binary(max_size=60)), min_size=1, max_size=5)
LOGS = st.lists(st.tuples(st.integers(0, 10**12), MESSAGES), min_size=1, max_size=8)
KEY = partial(run_key, 7)


def packed(first: int, base_ms: int, messages: Messages, *, early: bool = False, ledger_id: int = 7) -> bytearray:
    """The run of messages of (ms after the base, body)."""
    dues = base_ms + np.array([due for due, _ in messages], dtype=np.int64)
    return PackedRun(base_ms, dues, [body for _, body in messages], early=early).sealed(run_key(ledger_id, first))


def whole_runs(values: Sequence[bytes | bytearray], first: int = 0) -> list[WholeRun]:
    """Values of runs that follow each other."""
    runs = []
    for value in values:
        limit = first + HEADER.unpack_from(value)[4]
        runs.append(WholeRun(first, limit, value))
        first = limit
    return runs


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(MESSAGES, min_size=1, max_size=12),
    first=st.integers(0, 1_000),
    entries=st.integers(1, 12),
    size=st.integers(100, 2_000),
)
def test_runs_that_are_merged_are_those_that_packing_at_once_gives(
    parts: list[list[tuple[int, bytes]]], first: int, entries: int, size: int
) -> None:
    """Under the keys of their first entries, as few as the limits allow; what is over a limit stays as it is."""
    values, at = [], first
    for part in parts:
        values.append(packed(at, 1_000, part))
        at += len(part)
    found = list(merged_runs(KEY, whole_runs(values, first), RunLimits(entries, size)))
    taken, at = 0, first
    for key, value, count in found:
        members: list[tuple[int, bytes]] = []
        begin = taken
        while len(members) < count:
            members += parts[taken]
            taken += 1
        assert len(members) == count
        assert (key, value) == (KEY(at), packed(at, 1_000, members))
        one = taken - begin == 1
        assert one or (count <= entries and sum(map(len, values[begin:taken])) <= size)
        if taken < len(parts):
            together = sum(map(len, values[begin : taken + 1]))
            assert count + len(parts[taken]) > entries or together > size, "another would have had space"
        at += count
    assert taken == len(parts)


@settings(max_examples=50, deadline=None)
@given(dues=st.lists(st.integers(0, 10**12), min_size=2, max_size=8), early=st.booleans())
def test_single_messages_with_bases_of_their_own_get_the_earliest(dues: list[int], early: bool) -> None:
    """Sends into a main log have such bases; where they lie too far apart they stay single."""
    bodies = [b"%d" % due for due in dues]
    fields = [fields_of_message(due, due, body, early=early) for due, body in zip(dues, bodies, strict=True)]
    values = [seal_run(KEY(at), fields[at], [body]) for at, body in enumerate(bodies)]
    found = list(merged_runs(KEY, whole_runs(values), RunLimits(100, 1 << 20)))
    base_ms = min(dues)
    if max(dues) - base_ms > MAX_DUE_SPAN_MS:
        assert found == [(KEY(at), value, 1) for at, value in enumerate(values)]
    else:
        expected = PackedRun(base_ms, np.array(dues, dtype=np.int64), bodies, early=early).sealed(KEY(0))
        assert [(key, bytes(value), count) for key, value, count in found] == [(KEY(0), bytes(expected), len(dues))]


@pytest.mark.parametrize("first", [1, 3])
def test_runs_that_do_not_follow_each_other_are_not_merged(first: int) -> None:
    """One that is missing, or in the wrong place, would give entries the ids of others."""
    runs = [*whole_runs([packed(0, 0, [(1, b"a"), (2, b"b")])]), *whole_runs([packed(first, 0, [(1, b"c")])], first)]
    with pytest.raises(BrokenInvariant, match=f"entry {first} follows one before 2"):
        list(merged_runs(KEY, runs, RunLimits(10, 1_000)))


def test_bodies_are_not_read_when_runs_are_merged() -> None:
    """A damaged one goes on being found by its own checksum."""
    values = [packed(0, 0, [(1, b"aaaa")]), packed(1, 0, [(2, b"bbbb")])]
    values[0][HEADER_BYTES + 12] ^= 1
    ((_, value, _),) = merged_runs(KEY, whole_runs(values), RunLimits(10, 1_000))
    whole = packed(0, 0, [(1, b"aaaa"), (2, b"bbbb")])
    whole[HEADER_BYTES + 24] ^= 1
    assert value == whole


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(st.tuples(st.integers(-(10**12), 10**12), MESSAGES), min_size=1, max_size=10))
def test_groups_that_are_packed_at_once_are_as_packed_one_by_one(
    groups: list[tuple[int, list[tuple[int, bytes]]]],
) -> None:
    """Each with its own base; under any key."""
    dues = np.array([base + due for base, messages in groups for due, _ in messages], dtype=np.int64)
    bodies = Bodies([body for _, messages in groups for _, body in messages])
    rows, start = [], 0
    for base_ms, messages in groups:
        rows.append((base_ms, start, start + len(messages)))
        start += len(messages)
    for run, (base_ms, low, high) in zip(pack_groups(dues, bodies, rows), rows, strict=True):
        alone = PackedRun(base_ms, dues[low:high], bodies[low:high])
        assert run.count == alone.count == high - low
        for entry_id in (0, 5_000):
            assert bytes(run.sealed(KEY(entry_id))) == bytes(alone.sealed(KEY(entry_id)))


def test_markers_between_messages_stay_runs_of_their_own() -> None:
    """Messages are merged on one side of them only."""
    messages = [packed(at, 1_000, [(at, b"m")]) for at in (0, 1, 4, 5)]
    markers = [pack_markers(KEY(at), 3, 1_000, np.array([at], np.uint32), np.array([1_001], np.int64)) for at in (2, 3)]
    runs = whole_runs([*messages[:2], *markers, *messages[2:]])
    found = list(merged_runs(KEY, runs, RunLimits()))
    assert [count for _, _, count in found] == [2, 1, 1, 2]
    assert [value for _, value, _ in found[1:3]] == markers
    assert [key for key, _, _ in found] == [KEY(0), KEY(2), KEY(3), KEY(4)]


def groups_of(logs: list[tuple[int, Messages]]) -> tuple[np.ndarray, Bodies, list[tuple[int, int, int]]]:
    """Due times and bodies of logs, by (start of the partition, messages), and the groups of them."""
    dues = np.array([start_ms + due for start_ms, messages in logs for due, _ in messages], dtype=np.int64)
    bodies = Bodies([body for _, messages in logs for _, body in messages])
    groups, begin = [], 0
    for start_ms, messages in logs:
        groups.append((start_ms, begin, begin + len(messages)))
        begin += len(messages)
    return dues, bodies, groups


def scattered(logs: list[tuple[int, Messages]], firsts: list[int]) -> ScatteredBatch:
    """A batch for ledgers from 100 on."""
    batch = ScatteredBatch.pack(*groups_of(logs), range(100, 100 + len(logs)))
    batch.place(firsts)
    return batch


@settings(max_examples=60, deadline=None)
@given(logs=LOGS, data=st.data())
def test_the_run_of_each_log_is_that_of_its_messages_alone(
    logs: list[tuple[int, Messages]], data: st.DataObject
) -> None:
    """Both the packed batch and the one that is read back."""
    firsts = [data.draw(st.integers(0, 2**32 - 10)) for _ in logs]
    batch = scattered(logs, firsts)
    for each in (batch, ScatteredBatch(bytes(batch.value))):
        assert len(each.counts) == len(logs)
        found = [(start_ms, ledger_id, each.run_of(ledger_id)) for start_ms, ledger_id, _ in each.by_log()]
        assert found == list(each.by_log())
        for at, (start_ms, ledger_id, run) in enumerate(found):
            expected = packed(firsts[at], *logs[at], ledger_id=100 + at)
            assert (start_ms, ledger_id, run.first) == (logs[at][0], 100 + at, firsts[at])
            assert run.limit - run.first == len(logs[at][1])
            assert (run.value, run.stored_bytes) == (bytes(expected), len(expected))


@settings(max_examples=50, deadline=None)
@given(pieces=st.lists(st.tuples(MESSAGES, st.booleans()), min_size=1, max_size=8), entries=st.integers(1, 12))
def test_runs_of_batches_and_whole_ones_are_merged_alike(pieces: list[tuple[Messages, bool]], entries: int) -> None:
    """They follow each other in any order; limits count them alike."""
    runs: list[ShortRun] = []
    whole: list[ShortRun] = []
    first = 0
    for messages, in_batch in pieces:
        value = packed(first, 1_000, messages, ledger_id=101)
        whole.append(WholeRun(first, first + len(messages), value))
        if in_batch:
            runs.append(
                scattered([(7, [(1, b"other")]), (1_000, messages), (9, [(2, b"")])], [0, first, 5]).run_of(101)
            )
        else:
            runs.append(whole[-1])
        first += len(messages)
    merged = partial(merged_runs, partial(run_key, 101), limits=RunLimits(entries, 400))
    found = [(key, bytes(value), count) for key, value, count in merged(runs)]
    assert found == [(key, bytes(value), count) for key, value, count in merged(whole)]
    assert sum(count for _, _, count in found) == first


def test_a_damaged_body_is_found_in_the_run_of_its_log() -> None:
    """Bodies keep the checksums that their sender computed."""
    batch = scattered([(0, [(1, b"aaaa"), (2, b"bbbb")]), (10, [(3, b"cccc")])], [0, 0])
    value = bytearray(batch.value)
    value[value.index(b"bbbb")] ^= 1
    read = ScatteredBatch(value)
    first, second = (
        Run("e", run_key(ledger_id, 0), memoryview(read.run_of(ledger_id).value)) for ledger_id in (100, 101)
    )
    assert [entry_id for entry_id, _ in first.damaged_bodies()] == [1]
    assert not second.damaged_bodies()


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [([3], True), ([4], False), ([1, 3], True), ([1, 4, 1], False)],
    ids=["most", "more", "each most", "one more"],
)
def test_messages_of_a_log_that_are_more_than_a_run_do_not_fit(sizes: list[int], fits: bool) -> None:
    """By entries, or by bytes where some may have too many."""
    logs = [(0, [(0, b"x" * 100)] * size) for size in sizes]
    _, bodies, groups = groups_of(logs)
    assert fits_runs(bodies, groups, RunLimits(3, 10_000)) == fits
    assert fits_runs(bodies, groups, RunLimits(1_000, 100_000))
    assert not fits_runs(bodies, groups, RunLimits(1_000, 99))
