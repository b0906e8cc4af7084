"""Ledgers: appended to in group commits, read by runs, rolled over and trimmed in a main log, as the catalog says."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import MAX_ENTRY_ID, LedgerState, run_key
from duelog.store.codec.run import Run, RunKind, RunLimits
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import LmdbTransaction, Transaction
from duelog.store.errors import CorruptEntry, CorruptRecord, InvalidArgument
from duelog.store.log import catalog
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
from duelog.store.log.managed_ledger import LedgerLimits, ManagedLedger, Segment
from duelog.store.log.scan import RunFinder, runs
from duelog.store.position import Position
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


RUNS = RunLimits(entries=4, bytes=1024)
MAIN_LIMITS = LedgerLimits(entries=10, bytes=1000, age_ms=60_000)
NOW_MS = 1_790_000_000_000


def load(environment: Environment, limits: LedgerLimits = MAIN_LIMITS) -> ManagedLedger:
    """The main log of the one topic, as the catalog has it, made where there is none."""
    record = environment.write(lambda transaction: catalog.add_topic(transaction, "topic", NOW_MS))
    with environment.read() as raw:
        return ManagedLedger.load(raw, "main", record.topic_id, RUNS, limits)


def appending_to_main(
    log: ManagedLedger, bodies: list[bytes], now_ms: int = NOW_MS
) -> Callable[[Transaction], list[Segment]]:
    """A unit of work that appends messages."""
    dues = np.full(len(bodies), now_ms, dtype=np.int64)
    return lambda transaction: log.append_messages(transaction, dues, bodies, now_ms)


def marking_early(log: ManagedLedger, dues: list[int], now_ms: int) -> Callable[[Transaction], list[Segment]]:
    """A unit of work that appends markers, some of which are not visible yet."""
    entries = np.arange(len(dues), dtype=np.uint32)
    column, by_ms = np.array(dues, dtype=np.int64), max(dues)
    return lambda transaction: log.append_markers(transaction, 1000, 0, entries, column, by_ms, now_ms)


def visible(log: ManagedLedger, now_ms: int) -> list[Position]:
    """Every position that may be read."""
    snapshot = log.visible(now_ms)
    found: list[Position] = []
    ledger_id: int | None = log.first_ledger
    while ledger_id is not None:
        found += [Position(ledger_id, entry) for entry in range(snapshot.entries_of(ledger_id) or 0)]
        ledger_id = snapshot.following(ledger_id)
    return found


def content(environment: Environment, segments: list[Segment]) -> list[bytes | int]:
    """The entries at the places of an append: bodies of messages, targets of markers."""
    found: list[bytes | int] = []
    with environment.read() as raw:
        for ledger_id, first, length in segments:
            for run in runs(raw, "main", ledger_id, first, first + length):
                assert isinstance(run, Run)
                for index in range(max(first - run.first_entry, 0), min(first + length - run.first_entry, run.count)):
                    body = run.body(index) if run.kind == 1 else int(run.targets()[index])
                    assert body is not None
                    found.append(body)
    return found


def test_a_ledger_whose_ids_are_used_up_is_rolled_over_whatever_its_limit_is(environment: Environment) -> None:
    """The largest limit that a store takes is above the largest id."""
    log = load(environment, MAIN_LIMITS._replace(entries=(1 << 32) - 1))
    log._view.tail.entries = MAX_ENTRY_ID - 1
    (last,), (first,) = (environment.commit(appending_to_main(log, [b"x"])) for _ in range(2))
    assert (last.first_entry, first.first_entry) == (MAX_ENTRY_ID - 1, 0)
    assert first.ledger_id > last.ledger_id


def test_bytes_roll_a_ledger_over_too(environment: Environment) -> None:
    """A ledger takes entries until it holds `bytes`; one entry larger than that is a ledger of its own."""
    log = load(environment)
    segments = environment.write(appending_to_main(log, [bytes(400)] * 7))
    assert [length for _, _, length in segments] == [3, 3, 1]
    segments = environment.write(appending_to_main(log, [bytes(5000), b"small", bytes(5000)]))
    assert [length for _, _, length in segments] == [1, 2]
    assert [info.entries for info in log.ledgers()] == [3, 3, 2, 2, 0]


def test_a_failed_commit_leaves_the_list_as_it_was(environment: Environment) -> None:
    """Rolls, appends and ledgers trimmed in it are forgotten."""
    log = load(environment)
    environment.write(appending_to_main(log, [b"x"] * 25))
    before = log.ledgers()

    def failing(transaction: Transaction) -> None:
        log.trim(transaction, before[1].ledger_id)
        appending_to_main(log, [b"lost"] * 20)(transaction)
        log.roll(transaction, NOW_MS)
        raise LookupError

    with pytest.raises(LookupError):
        environment.write(failing)
    assert log.ledgers() == before
    assert load(environment).ledgers() == before
    assert environment.write(appending_to_main(log, [b"y"])) == [Segment(before[-1].ledger_id, 5, 1)]


def test_the_open_ledger_is_due_by_its_age_once_it_holds_something(environment: Environment) -> None:
    """Counted from when it was begun."""
    log = load(environment)
    assert log.age_due_ms() is None
    environment.write(appending_to_main(log, [b"x"], NOW_MS + 5))
    assert log.age_due_ms() == NOW_MS + MAIN_LIMITS.age_ms
    environment.write(lambda transaction: log.roll(transaction, NOW_MS + 7))
    assert log.age_due_ms() is None
    environment.write(appending_to_main(log, [b"x"], NOW_MS + 9))
    assert log.age_due_ms() == NOW_MS + 7 + MAIN_LIMITS.age_ms


def test_what_was_trimmed_is_not_in_the_list_and_still_in_the_catalog(environment: Environment) -> None:
    """Its record says that it is being removed, until its runs are."""
    log = load(environment)
    environment.write(appending_to_main(log, [b"x"] * 35))
    ids = [info.ledger_id for info in log.ledgers()]
    assert environment.write(lambda transaction: log.trim(transaction, ids[2])) == ids[:2]
    assert [info.ledger_id for info in log.ledgers()] == ids[2:]
    assert log.first_ledger == ids[2]
    assert (log.entries_of(ids[0]), log.entries_of(ids[2])) == (None, 10)
    assert (log.following(ids[0]), log.following(-1), log.following(ids[-1])) == (ids[2], ids[2], None)
    with environment.read() as raw:
        states = [record.state for _, record in catalog.ledgers(raw, log.topic_id)]
    assert states == [LedgerState.TRIMMING] * 2 + [LedgerState.CLOSED, LedgerState.OPEN]
    assert load(environment).ledgers() == log.ledgers()


def test_what_a_transaction_appends_and_trims_is_visible_when_it_is_committed(environment: Environment) -> None:
    """Where the log ends and begins, while a transaction is under way and after it."""
    log = load(environment)
    environment.write(appending_to_main(log, [b"x"] * 15))
    end, first = log.end, log.first_ledger

    def work(transaction: Transaction) -> int:
        appending_to_main(log, [b"x"] * 7)(transaction)
        log.trim(transaction, end.ledger_id)
        assert (log.end, log.first_ledger) == (end, first)
        return log.first_in(transaction)

    assert environment.write(work) == log.first_ledger != first
    assert log.end > end


def test_a_snapshot_does_not_change(environment: Environment) -> None:
    """A reader of it has one instant of the list."""
    log = load(environment)
    environment.write(appending_to_main(log, [b"x"] * 12))
    snapshot = log.snapshot()
    ids = [info.ledger_id for info in log.ledgers()]
    environment.write(appending_to_main(log, [b"x"] * 20))
    assert (snapshot.entries_of(ids[0]), snapshot.entries_of(ids[1])) == (10, 2)
    assert snapshot.following(ids[1]) is None
    assert (log.entries_of(ids[1]), log.following(ids[1])) == (10, ids[1] + 1)


def test_a_topic_without_an_open_ledger_is_not_loaded(environment: Environment) -> None:
    """A catalog that says so is damaged."""
    with environment.read() as raw, pytest.raises(CorruptRecord, match="no open ledger"):
        ManagedLedger.load(raw, "main", 42, RUNS, MAIN_LIMITS)


class MainLogMachine(RuleBasedStateMachine):
    """A main log against a plain list of (ledger id, entries): appended, rolled, trimmed, loaded again."""

    @initialize()
    def start(self) -> None:
        self.directory = self.paths.mktemp("log")
        self.environment = Environment(self.directory / "main", name="main", durability="none", create=True)
        self.log = load(self.environment)
        self.twin: dict[int, list[bytes]] = {self.log.end.ledger_id: []}
        self.number = 0

    @rule(sizes=st.lists(st.sampled_from([1, 1, 50, 300, 1200]), min_size=1, max_size=25))
    def append(self, sizes: list[int]) -> None:
        bodies = []
        for size in sizes:
            self.number += 1
            bodies.append(b"%06d" % self.number + bytes(size))
        segments = self.environment.write(appending_to_main(self.log, bodies))
        assert sum(segment.length for segment in segments) == len(bodies)
        for ledger_id, first, length in segments:
            ledger = self.twin.setdefault(ledger_id, [])
            assert first == len(ledger)
            ledger.extend(bodies[:length])
            del bodies[:length]
        self.twin.setdefault(self.log.end.ledger_id, [])

    @rule()
    def roll(self) -> None:
        rolled = self.environment.write(lambda transaction: self.log.roll(transaction, NOW_MS))
        assert rolled == (self.log.end.entry_id == 0 and self.log.end.ledger_id not in self.twin)
        self.twin.setdefault(self.log.end.ledger_id, [])

    @rule(kept=st.integers(0, 4))
    def trim(self, kept: int) -> None:
        ids = sorted(self.twin)
        first = ids[max(0, len(ids) - 1 - kept)] if kept else 10**9
        gone = self.environment.write(lambda transaction: self.log.trim(transaction, first))
        assert gone == [ledger_id for ledger_id in ids if ledger_id < min(first, ids[-1])]
        for ledger_id in gone:
            del self.twin[ledger_id]

    @rule()
    def load_again(self) -> None:
        self.environment.close()
        self.environment = Environment(self.directory / "main", name="main", durability="none")
        again = load(self.environment)
        # Bytes of an open ledger are exact once it is loaded again; of a closed one they stay an estimate.
        one, other = ([info._replace(stored_bytes=0) for info in log.ledgers()] for log in (again, self.log))
        assert one == other
        self.log = again

    @invariant()
    def the_list_is_the_twins(self) -> None:
        ledgers = self.log.ledgers()
        assert {info.ledger_id: info.entries for info in ledgers} == {key: len(own) for key, own in self.twin.items()}
        assert all(one.ledger_id < other.ledger_id for one, other in pairwise(ledgers))
        assert [info.closed for info in ledgers] == [True] * (len(ledgers) - 1) + [False]
        assert all(0 < info.entries <= MAIN_LIMITS.entries for info in ledgers[:-1])
        assert self.log.end.entry_id < MAIN_LIMITS.entries
        assert self.log.end == (ledgers[-1].ledger_id, ledgers[-1].entries)

    def teardown(self) -> None:
        everything = [Segment(ledger_id, 0, len(own)) for ledger_id, own in sorted(self.twin.items())]
        expected = [body for _, own in sorted(self.twin.items()) for body in own]
        assert content(self.environment, everything) == expected
        self.environment.close()

    paths: pytest.TempPathFactory


def test_the_latest_is_never_in_a_ledger_that_was_trimmed(environment: Environment) -> None:
    """A topic without subscriptions may lose a ledger with entries that are not due yet."""
    log = load(environment)
    environment.write(marking_early(log, [5] * MAIN_LIMITS.entries + [6], 1))
    assert log.latest(1) == (log.first_ledger, 0)
    last = log.end.ledger_id
    environment.write(lambda transaction: log.trim(transaction, last))
    assert log.latest(1) == (last, 0)
    assert log.latest(5) == (last, 0)
    assert log.latest(6) == (last, 1)


def test_a_main_log_is_what_a_plain_list_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any order of appends, rolls, trims and reopenings."""
    machine = type("Machine", (MainLogMachine,), {"paths": tmp_path_factory})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
    case("runTest").runTest()
