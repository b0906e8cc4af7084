"""Scattered batches: what each log has of one is, byte for byte, the run that packing its messages alone gives."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import run_key
from duelog.store.codec.run import Run, RunLimits, pack_messages
from duelog.store.codec.run_lengths import ShortRun, WholeRun, fits_runs, merged_runs
from duelog.store.codec.scattered import ScatteredBatch, logs_in

Messages = list[tuple[int, bytes]]

MESSAGES = st.lists(st.tuples(st.integers(0, 5_000), st.binary(max_size=60)), min_size=1, max_size=5)
LOGS = st.lists(st.tuples(st.integers(0, 10**12), MESSAGES), min_size=1, max_size=8)


def groups_of(logs: list[tuple[int, Messages]]) -> tuple[np.ndarray, Bodies, list[tuple[int, int, int]]]:
    """Due times and bodies of logs, by (start of the partition, messages), and the groups of them."""
    dues = np.array([start_ms + due for start_ms, messages in logs for due, _ in messages], dtype=np.int64)
    bodies = Bodies([body for _, messages in logs for _, body in messages])
    groups, begin = [], 0
    for start_ms, messages in logs:
        groups.append((start_ms, begin, begin + len(messages)))
        begin += len(messages)
    return dues, bodies, groups


def packed(logs: list[tuple[int, Messages]], firsts: list[int]) -> ScatteredBatch:
    """A batch for ledgers from 100 on."""
    batch = ScatteredBatch.pack(*groups_of(logs), range(100, 100 + len(logs)))
    batch.place(firsts)
    return batch


def alone(ledger_id: int, first: int, start_ms: int, messages: Messages) -> bytes:
    """The run of messages of (ms after the start, body)."""
    dues = start_ms + np.array([due for due, _ in messages], dtype=np.int64)
    return bytes(pack_messages(run_key(ledger_id, first), start_ms, dues, [body for _, body in messages]))


@settings(max_examples=200, deadline=None)
@given(logs=LOGS, data=st.data())
def test_the_run_of_each_log_is_that_of_its_messages_alone(
    logs: list[tuple[int, Messages]], data: st.DataObject
) -> None:
    """Both the packed batch and the one that is read back."""
    firsts = [data.draw(st.integers(0, 2**32 - 10)) for _ in logs]
    batch = packed(logs, firsts)
    for each in (batch, ScatteredBatch(bytes(batch.value))):
        assert logs_in(each.value) == len(logs)
        assert list(each.limits()) == [first + len(messages) for first, (_, messages) in zip(firsts, logs, strict=True)]
        found = [(start_ms, ledger_id, each.run_of(ledger_id)) for start_ms, ledger_id, _ in each.by_log()]
        assert found == list(each.by_log())
        for at, (start_ms, ledger_id, run) in enumerate(found):
            expected = alone(100 + at, firsts[at], *logs[at])
            assert (start_ms, ledger_id, run.first) == (logs[at][0], 100 + at, firsts[at])
            assert run.limit - run.first == len(logs[at][1])
            assert (run.value, run.stored_bytes) == (expected, len(expected))
    begin = 0
    for at, (_, messages) in enumerate(logs):
        assert batch.rows_of(at) == slice(begin, begin + len(messages))
        begin += len(messages)


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.tuples(MESSAGES, st.booleans()), min_size=1, max_size=8), entries=st.integers(1, 12))
def test_runs_of_batches_and_whole_ones_are_merged_alike(pieces: list[tuple[Messages, bool]], entries: int) -> None:
    """They follow each other in any order; limits count them alike."""
    runs: list[ShortRun] = []
    whole: list[ShortRun] = []
    first = 0
    for messages, in_batch in pieces:
        value = alone(101, first, 1_000, messages)
        whole.append(WholeRun(first, first + len(messages), value))
        if in_batch:
            runs.append(packed([(7, [(1, b"other")]), (1_000, messages), (9, [(2, b"")])], [0, first, 5]).run_of(101))
        else:
            runs.append(whole[-1])
        first += len(messages)
    merged = partial(merged_runs, partial(run_key, 101), limits=RunLimits(entries, 400))
    found = [(key, bytes(value), count) for key, value, count in merged(runs)]
    assert found == [(key, bytes(value), count) for key, value, count in merged(whole)]
    assert sum(count for _, _, count in found) == first


def test_a_damaged_body_is_found_in_the_run_of_its_log() -> None:
    """Bodies keep the checksums that their sender computed."""
    batch = packed([(0, [(1, b"aaaa"), (2, b"bbbb")]), (10, [(3, b"cccc")])], [0, 0])
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
