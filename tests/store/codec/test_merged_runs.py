"""Runs made of others, of many logs at once, or taken from scattered batches: each is the run of its messages."""

from collections.abc import Sequence
from functools import partial

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
    RunLimits,
    fields_of_message,
    pack_groups,
    pack_markers,
    pack_messages,
    seal_run,
)
from duelog.store.codec.run_lengths import ScatteredBatch, ShortRun, WholeRun, fits_runs, merged_runs
from duelog.store.errors import BrokenInvariant

Messages = list[tuple[int, bytes]]

MESSAGES = st.lists(st.tuples(st.integers(0, 5_000), st.binary(max_size=60)), min_size=1, max_size=5)
LOGS = st.lists(st.tuples(st.integers(0, 10**12), MESSAGES), min_size=1, max_size=8)
KEY = partial(run_key, 7)


def packed(first: int, base_ms: int, messages: Messages, *, early: bool = False, ledger_id: int = 7) -> bytearray:
    """The run of messages of (ms after the base, body)."""
    dues = base_ms + np.array([due for due, _ in messages], dtype=np.int64)
    return pack_messages(run_key(ledger_id, first), base_ms, dues, [body for _, body in messages], early=early)


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
        expected = pack_messages(KEY(0), base_ms, np.array(dues, dtype=np.int64), bodies, early=early)
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
