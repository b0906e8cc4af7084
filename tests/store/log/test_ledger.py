"""Appending to one ledger in group commits, finding its end, and reading its runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import MAX_ENTRY_ID, run_key
from duelog.store.codec.run import Run, RunKind, RunLimits
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import LmdbTransaction, Transaction
from duelog.store.errors import CorruptEntry, InvalidArgument
from duelog.store.log.ledger import (
    MAX_RUN_ENTRIES,
    PackedMessages,
    Replaced,
    find_tail,
    find_tails,
    insert_markers,
    insert_messages,
    insert_packed,
)
from duelog.store.log.scan import RunFinder, runs
from tests.conftest import present
from tests.store.commits import Log, outcomes_of

LIMITS = RunLimits(entries=4, bytes=1024)


def appending(log: Log, bodies: Sequence[bytes], replaced: Replaced | None = None) -> Callable[[Transaction], int]:
    """A unit of work that appends messages; its value is the first entry id."""

    def work(transaction: Transaction) -> int:
        first = log.took(transaction, len(bodies))
        dues = np.zeros(len(bodies), dtype=np.int64)
        insert_messages(transaction, log.ledger.ledger_id, first, dues, bodies, 0, LIMITS, replaced)
        return first

    return work


def stored(environment: Environment, ledger_id: int) -> list[tuple[int, list[bytes | CorruptEntry | None]]]:
    """Every run of a ledger: its first entry id and its bodies."""
    with environment.read() as raw:
        found = list(runs(raw, "main", ledger_id))
        return [(run.first_entry, [body for _, body in run.bodies()]) for run in found if isinstance(run, Run)]


def damage(environment: Environment, ledger_id: int, first_entry: int, at: int) -> None:
    """Flip a bit of a stored run."""
    key = run_key(ledger_id, first_entry)

    def work(transaction: LmdbTransaction) -> None:
        value = present(transaction.raw.get(key))
        changed = bytearray(value)
        changed[at] ^= 1
        transaction.raw.put(key, bytes(changed))

    environment.commit(work)


def tail(environment: Environment, ledger_id: int) -> int:
    """`find_tail` in a transaction of its own."""
    with environment.read() as raw:
        return find_tail(raw, "main", ledger_id)


def test_conditional_entries_are_runs_of_their_own(environment: Environment) -> None:
    """They have two columns more than their neighbours."""
    log = Log(7)
    replaced = Replaced(np.arange(6, dtype=np.uint64), np.arange(6, dtype=np.uint32))
    outcomes_of(
        environment, [appending(log, [b"a"]), appending(log, [b"b"] * 6, replaced=replaced), appending(log, [b"c"])]
    )
    with environment.read() as raw:
        found = [run for run in runs(raw, "main", 7) if isinstance(run, Run)]
        assert [(run.first_entry, run.count, run.conditional) for run in found] == [
            (0, 1, False),
            (1, 4, True),
            (5, 2, True),
            (7, 1, False),
        ]
        assert [run.replaced()[0].tolist() for run in found if run.conditional] == [[0, 1, 2, 3], [4, 5]]


def test_messages_and_markers_of_one_commit_keep_their_order(environment: Environment) -> None:
    """A run holds one kind only."""
    log = Log(7)

    def work(transaction: Transaction) -> None:
        appending(log, [b"a", b"b"])(transaction)
        for target, entries in ((99, [5, 3]), (98, [0])):
            first = log.took(transaction, len(entries))
            dues = np.arange(len(entries), dtype=np.int64)
            insert_markers(transaction, 7, first, target, 0, np.array(entries, np.uint32), dues, None)
        appending(log, [b"c"])(transaction)

    environment.write(work)
    with environment.read() as raw:
        found = [run for run in runs(raw, "main", 7) if isinstance(run, Run)]
        assert [(run.first_entry, run.kind, run.target) for run in found] == [
            (0, RunKind.MESSAGES, 0),
            (2, RunKind.MARKERS, 99),
            (4, RunKind.MARKERS, 98),
            (5, RunKind.MESSAGES, 0),
        ]
        assert found[1].targets().tolist() == [5, 3]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12), min_size=1, max_size=4))
def test_messages_packed_before_the_commit_are_stored_as_any(batches: list[list[bytes]]) -> None:
    """Byte for byte, in one commit with others, at whatever entry ids."""
    with TemporaryDirectory() as folder:
        environment = Environment(Path(folder) / "main", name="main", map_bytes=1 << 20, create=True)
        logs = Log(7), Log(8)
        packed = []
        for number, bodies in enumerate(batches):
            dues = np.arange(len(bodies), dtype=np.int64) + 100 * number
            (messages,) = PackedMessages.each(dues, Bodies(bodies), [(0, 0, len(bodies))], LIMITS)
            packed.append((dues, Bodies(bodies), messages))

        def work(transaction: Transaction) -> None:
            for dues, bodies, messages in packed:
                insert_packed(transaction, 7, logs[0].took(transaction, len(dues)), messages)
                insert_messages(transaction, 8, logs[1].took(transaction, len(dues)), dues, bodies, 0, LIMITS)

        for _ in range(2):
            environment.write(work)
        with environment.read() as raw:
            rows = [
                [(run.first_entry, run.count, run.dues().tolist(), list(run.bodies()), run.stored_bytes)
                 for run in runs(raw, "main", ledger_id) if isinstance(run, Run)]
                for ledger_id in (7, 8)
            ]  # fmt: skip
        assert rows[0] == rows[1]
        assert sum(row[1] for row in rows[0]) == 2 * sum(map(len, batches))
        environment.close()


def test_a_ledger_ends_at_the_last_entry_id_there_can_be(environment: Environment) -> None:
    """An append past it is refused and nothing of it stored; one that just fits is taken."""
    log = Log(7, entries=MAX_ENTRY_ID - 2)
    with pytest.raises(InvalidArgument, match="would pass"):
        environment.write(appending(log, [b"x"] * 3))
    assert log.ledger.entries == MAX_ENTRY_ID - 2
    assert environment.write(appending(log, [b"x"] * 2)) == MAX_ENTRY_ID - 2
    assert tail(environment, 7) == MAX_ENTRY_ID


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 10)), min_size=1, max_size=25))
def test_the_end_of_every_ledger_is_found(
    tmp_path_factory: pytest.TempPathFactory, appends: list[tuple[int, int]]
) -> None:
    """Ledgers of which the runs lie side by side each end where the last append to them ended."""
    environment = Environment(tmp_path_factory.mktemp("ends") / "main", name="main", durability="none", create=True)
    try:
        logs = {ledger_id: Log(ledger_id) for ledger_id in range(1, 5)}
        for ledger_id, count in appends:
            environment.write(appending(logs[ledger_id], [b"x"] * count))
        for ledger_id, log in logs.items():
            expected = sum(count for ledger, count in appends if ledger == ledger_id)
            assert tail(environment, ledger_id) == log.ledger.entries == expected
            assert sum(len(bodies) for _, bodies in stored(environment, ledger_id)) == expected
        damaged = max(ledger for ledger, _ in appends)
        first = max(entry_id for entry_id, _ in stored(environment, damaged))
        damage(environment, damaged, first, at=4)
        with environment.read() as raw:
            found = find_tails(raw, "main", np.arange(6, dtype=np.uint64)).tolist()
        assert found == [tail(environment, ledger_id) for ledger_id in range(6)]
        assert found[damaged] == first + MAX_RUN_ENTRIES
    finally:
        environment.close()


def test_no_id_is_given_out_twice_after_a_damaged_last_run(environment: Environment) -> None:
    """How many entries it held is unknown: the next id is more than the longest run higher."""
    environment.write(appending(Log(7), [b"x"] * 6))
    damage(environment, 7, 4, at=20)
    assert tail(environment, 7) == 4 + MAX_RUN_ENTRIES
    assert environment.write(appending(Log(7, tail(environment, 7)), [b"y"])) == 4 + MAX_RUN_ENTRIES
    assert tail(environment, 7) == 5 + MAX_RUN_ENTRIES


def test_a_damaged_body_or_an_earlier_damaged_run_moves_no_end(environment: Environment) -> None:
    """The last run's header says where the ledger ends."""
    environment.write(appending(Log(7), [b"x"] * 6))
    damage(environment, 7, 4, at=-1)
    damage(environment, 7, 0, at=20)
    assert tail(environment, 7) == 6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_runs_of_a_range_hold_it_and_no_run_besides(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], data: st.DataObject
) -> None:
    """Every run that holds an entry of [start, limit) comes once, in order, and any entry is found by its id."""
    environment = Environment(tmp_path_factory.mktemp("runs") / "main", name="main", durability="none", create=True)
    try:
        logs = [Log(ledger_id) for ledger_id in (6, 7, 8)]
        for count in counts:
            for log in logs:
                environment.write(appending(log, [b"%d" % log.ledger.ledger_id] * count))
        total = sum(counts)
        start = data.draw(st.integers(0, total + 2))
        limit = data.draw(st.none() | st.integers(0, total + 2))
        with environment.read() as raw:
            whole = [(run.first_entry, run.limit) for run in runs(raw, "main", 7) if isinstance(run, Run)]
            found = [(run.first_entry, run.limit) for run in runs(raw, "main", 7, start, limit) if isinstance(run, Run)]
            last = total if limit is None else limit
            assert found == [(first, end) for first, end in whole if end > start and first < last]
            entry_id = data.draw(st.integers(0, total + 2))
            run = RunFinder(raw, "main").find(7, entry_id)
            if entry_id >= total:
                assert run is None
            else:
                assert run is not None
                assert run.body(entry_id - run.first_entry) == b"7"
    finally:
        environment.close()


def test_a_damaged_run_comes_as_its_error_and_the_rest_goes_on(environment: Environment) -> None:
    """The error names environment, ledger and entry."""
    environment.write(appending(Log(7), [b"x"] * 12))
    damage(environment, 7, 4, at=30)
    with environment.read() as raw:
        found = list(runs(raw, "main", 7))
        assert [type(run) for run in found] == [Run, CorruptEntry, Run]
        error = found[1]
        assert isinstance(error, CorruptEntry)
        assert (error.environment, error.ledger_id, error.entry_id) == ("main", 7, 4)
        with pytest.raises(CorruptEntry):
            RunFinder(raw, "main").find(7, 5)
        assert RunFinder(raw, "main").find(7, 8) is not None


def test_the_run_that_follows_is_found_as_any_other(environment: Environment) -> None:
    """It is tried first and told from the right one, whatever lies between two entries: a gap, damage, the end."""
    for ledger_id in (6, 7, 8):
        log = Log(ledger_id)
        for count in (4, 1, 2, 4, 4, 3, 1, 4, 4):
            environment.write(appending(log, [b"x"] * count))
    damage(environment, 7, 7, at=30)
    environment.commit(lambda transaction: transaction.raw.delete(run_key(7, 15)))

    def found(finder: RunFinder, entry_id: int) -> object:
        try:
            run = finder.find(7, entry_id)
        except CorruptEntry as error:
            return str(error)
        return None if run is None else (run.ledger_id, run.first_entry, run.count)

    with environment.read() as raw:
        for before in (entry_id for entry_id in range(27) if entry_id not in (*range(7, 11), *range(15, 18))):
            for entry_id in range(before + 1, 29):
                finder = RunFinder(raw, "main")
                assert finder.find(7, before) is not None
                assert found(finder, entry_id) == found(RunFinder(raw, "main"), entry_id)
