"""Main logs: where appends go, when ledgers roll over, what is trimmed, and that the catalog says the same."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duelog.store.codec.format import MAX_ENTRY_ID, LedgerState
from duelog.store.codec.run import Run, RunLimits
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import CorruptRecord
from duelog.store.log import catalog
from duelog.store.log.managed_ledger import LedgerLimits, ManagedLedger, Segment
from duelog.store.log.scan import runs
from duelog.store.position import Position

RUNS = RunLimits(entries=4, bytes=1024)
LIMITS = LedgerLimits(entries=10, bytes=1000, age_ms=60_000)
NOW_MS = 1_790_000_000_000


def load(environment: Environment, limits: LedgerLimits = LIMITS) -> ManagedLedger:
    """The main log of the one topic, as the catalog has it, made where there is none."""
    record = environment.write(lambda transaction: catalog.add_topic(transaction, "topic", NOW_MS))
    with environment.read() as raw:
        return ManagedLedger.load(raw, "main", record.topic_id, RUNS, limits)


def appending(log: ManagedLedger, bodies: list[bytes], now_ms: int = NOW_MS) -> Callable[[Transaction], list[Segment]]:
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
    log = load(environment, LIMITS._replace(entries=(1 << 32) - 1))
    log._view.tail.entries = MAX_ENTRY_ID - 1
    (last,), (first,) = (environment.commit(appending(log, [b"x"])) for _ in range(2))
    assert (last.first_entry, first.first_entry) == (MAX_ENTRY_ID - 1, 0)
    assert first.ledger_id > last.ledger_id


def test_bytes_roll_a_ledger_over_too(environment: Environment) -> None:
    """A ledger takes entries until it holds `bytes`; one entry larger than that is a ledger of its own."""
    log = load(environment)
    segments = environment.write(appending(log, [bytes(400)] * 7))
    assert [length for _, _, length in segments] == [3, 3, 1]
    segments = environment.write(appending(log, [bytes(5000), b"small", bytes(5000)]))
    assert [length for _, _, length in segments] == [1, 2]
    assert [info.entries for info in log.ledgers()] == [3, 3, 2, 2, 0]


def test_a_failed_commit_leaves_the_list_as_it_was(environment: Environment) -> None:
    """Rolls, appends and ledgers trimmed in it are forgotten."""
    log = load(environment)
    environment.write(appending(log, [b"x"] * 25))
    before = log.ledgers()

    def failing(transaction: Transaction) -> None:
        log.trim(transaction, before[1].ledger_id)
        appending(log, [b"lost"] * 20)(transaction)
        log.roll(transaction, NOW_MS)
        raise LookupError

    with pytest.raises(LookupError):
        environment.write(failing)
    assert log.ledgers() == before
    assert load(environment).ledgers() == before
    assert environment.write(appending(log, [b"y"])) == [Segment(before[-1].ledger_id, 5, 1)]


def test_the_open_ledger_is_due_by_its_age_once_it_holds_something(environment: Environment) -> None:
    """Counted from when it was begun."""
    log = load(environment)
    assert log.age_due_ms() is None
    environment.write(appending(log, [b"x"], NOW_MS + 5))
    assert log.age_due_ms() == NOW_MS + LIMITS.age_ms
    environment.write(lambda transaction: log.roll(transaction, NOW_MS + 7))
    assert log.age_due_ms() is None
    environment.write(appending(log, [b"x"], NOW_MS + 9))
    assert log.age_due_ms() == NOW_MS + 7 + LIMITS.age_ms


def test_what_was_trimmed_is_not_in_the_list_and_still_in_the_catalog(environment: Environment) -> None:
    """Its record says that it is being removed, until its runs are."""
    log = load(environment)
    environment.write(appending(log, [b"x"] * 35))
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
    environment.write(appending(log, [b"x"] * 15))
    end, first = log.end, log.first_ledger

    def work(transaction: Transaction) -> int:
        appending(log, [b"x"] * 7)(transaction)
        log.trim(transaction, end.ledger_id)
        assert (log.end, log.first_ledger) == (end, first)
        return log.first_in(transaction)

    assert environment.write(work) == log.first_ledger != first
    assert log.end > end


def test_a_snapshot_does_not_change(environment: Environment) -> None:
    """A reader of it has one instant of the list."""
    log = load(environment)
    environment.write(appending(log, [b"x"] * 12))
    snapshot = log.snapshot()
    ids = [info.ledger_id for info in log.ledgers()]
    environment.write(appending(log, [b"x"] * 20))
    assert (snapshot.entries_of(ids[0]), snapshot.entries_of(ids[1])) == (10, 2)
    assert snapshot.following(ids[1]) is None
    assert (log.entries_of(ids[1]), log.following(ids[1])) == (10, ids[1] + 1)


def test_a_topic_without_an_open_ledger_is_not_loaded(environment: Environment) -> None:
    """A catalog that says so is damaged."""
    with environment.read() as raw, pytest.raises(CorruptRecord, match="no open ledger"):
        ManagedLedger.load(raw, "main", 42, RUNS, LIMITS)


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
        segments = self.environment.write(appending(self.log, bodies))
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
        assert all(0 < info.entries <= LIMITS.entries for info in ledgers[:-1])
        assert self.log.end.entry_id < LIMITS.entries
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
    environment.write(marking_early(log, [5] * LIMITS.entries + [6], 1))
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
