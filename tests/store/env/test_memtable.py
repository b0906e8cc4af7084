"""The memtable of an environment: its rows are read behind those of LMDB, and applied exactly once."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from pyroaring import BitMap, BitMap64
from sortedcontainers import SortedSet

from duelog.store.codec.bits import BitChange, bits_of
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import (
    Table,
    block_key,
    copy_key,
    counter_key,
    document_key,
    run_key,
    sequence_key,
    sequence_prefix,
    unseal,
)
from duelog.store.codec.run import PackedRun, Run, RunLimits
from duelog.store.codec.run_lengths import ScatteredBatch, WholeRun
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import (
    ABSENT,
    APPLIED_KEY,
    PAST,
    Entry,
    LedgerRow,
    LedgerRuns,
    Memtable,
    Publication,
    Reads,
    Records,
    Unapplied,
    applied_position,
)
from duelog.store.env.transaction import Transaction
from duelog.store.errors import StoreFull
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail, find_tails
from duelog.store.log.scan import RunFinder, runs
from duelog.store.wal.segment import Row
from duelog.store.wal.write_batch import WriteBatch, add_row
from tests.conftest import present, raising
from tests.proof import length
from tests.store.commits import NotedLock, beside

LIMITS = RunLimits(entries=6, bytes=4_096)
KEY = counter_key("a")
NUMBERS = sequence_key(1, "p", 0)


@pytest.fixture
def memtable() -> Memtable:
    """An empty one."""
    return Memtable(Publication(), LIMITS)


@pytest.fixture
def opened(tmp_path: Path, memtable: Memtable) -> Iterator[Environment]:
    """The environment of `memtable`."""
    with closing(Environment(tmp_path / "e", name="e", create=True, memtable=memtable)) as made:
        yield made


def add(memtable: Memtable, ledger_id: int, first: int, count: int) -> None:
    """Messages that say their entry ids."""
    dues = np.arange(count, dtype=np.int64)
    value = PackedRun(0, dues, [b"%d" % entry for entry in range(first, first + count)]).sealed(
        run_key(ledger_id, first)
    )
    memtable.view.add_run(ledger_id, WholeRun(first, first + count, value))


def add_batch(memtable: Memtable, ends: dict[int, int], counts: dict[int, int]) -> None:
    """Add runs of several ledgers in one batch."""
    bodies = [b"%d" % (ends[ledger_id] + at) for ledger_id, count in counts.items() for at in range(count)]
    limits = list(accumulate(counts.values()))
    groups = [(0, limit - count, limit) for limit, count in zip(limits, counts.values(), strict=True)]
    batch = ScatteredBatch.pack(np.zeros(len(bodies), dtype=np.int64), Bodies(bodies), groups, list(counts))
    batch.place([ends[ledger_id] for ledger_id in counts])
    for ledger_id in counts:
        memtable.view.add_run(ledger_id, batch)


def entries(raw: Reads, ledger_id: int, start: int = 0, limit: int | None = None) -> list[int]:
    """The entries of a ledger's runs."""
    found: list[int] = []
    for run in runs(raw, "e", ledger_id, start, limit):
        assert isinstance(run, Run)
        assert [int(body) for _, body in run.bodies() if isinstance(body, bytes)] == list(
            range(run.first_entry, run.limit)
        )
        found += range(run.first_entry, run.limit)
    return found


@contextmanager
def applied(environment: Environment) -> Iterator[lmdb.Transaction]:
    """The rows of LMDB."""
    held = environment.hold()
    try:
        yield held.raw
    finally:
        held.release()


def runs_in_lmdb(environment: Environment, ledger_id: int) -> list[tuple[int, int]]:
    """The applied runs of a ledger: [first, limit) of each."""
    with applied(environment) as raw:
        return [(run.first_entry, run.limit) for run in runs(raw, "e", ledger_id) if isinstance(run, Run)]


def test_a_read_of_one_instant_waits_for_no_group_inside_the_gate(opened: Environment, memtable: Memtable) -> None:
    """Who has the lock of groups may wait for the gate, where another waits until nobody is inside: all stood still."""
    lock: Any = NotedLock(opened)
    memtable.publishing = lock
    with opened.read(frozen=True):
        pass
    assert lock.inside == [False]


def test_rows_that_are_applied_are_forgotten_with_the_lock_of_groups(tmp_path: Path) -> None:
    """Else what a group adds meanwhile goes to a view that nobody has any more."""
    locked: list[bool] = []

    class Watched(Memtable):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "view" and "view" in vars(self):
                locked.append(self.publishing.locked())
            super().__setattr__(name, value)

    memtable = Watched(Publication(), LIMITS)

    def publish(entry: int) -> None:
        add(memtable, 7, entry, 1)
        memtable.position += 1

    with closing(Environment(tmp_path / "e", name="e", create=True, memtable=memtable)) as opened:
        publish(0)
        opened.apply()
        publish(1)
        opened.before_commit = lambda: publish(2)  # too late for the commit, which leaves it
        opened.apply()
        assert [run.first for run in LedgerRuns(7, memtable.view.runs[7])] == [2]
    assert locked == [True, True]


def test_reading_the_last_of_many_unapplied_runs_looks_at_few_of_them(opened: Environment, memtable: Memtable) -> None:
    """A subscription that keeps up with single sends reads after each: it took as long as there were rows."""

    class Counted(list[LedgerRow]):
        looked_at = 0

        def __getitem__(self, at: Any) -> Any:
            self.looked_at += 1
            return super().__getitem__(at)

    for entry in range(1_000):
        add(memtable, 7, entry, 1)
    rows = memtable.view.runs[7] = Counted(memtable.view.runs[7])
    with opened.read() as raw:
        assert entries(raw, 7, 998, 1_000) == [998, 999]
    assert rows.looked_at < 20


def test_a_commit_goes_through_unapplied_records_once(
    opened: Environment, memtable: Memtable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint took three rounds: what is there, what came meanwhile, what is left."""
    rounds: list[int] = []
    items = Records.items

    def noted(self: Records) -> list[tuple[bytes, Entry]]:
        rounds.append(len(self))
        return items(self)

    monkeypatch.setattr(Records, "items", noted)
    for at in range(100):
        memtable.view.add_record(document_key(b"%04d" % at), b"x")
    opened.apply()
    assert (rounds, bool(memtable)) == ([100], False)
    with opened.read() as raw:
        assert raw.get(document_key(b"0099")) is not None


def test_records_of_both_come_in_order(opened: Environment, memtable: Memtable) -> None:
    """Each once, the unapplied one in place of the applied, between any bounds."""
    for name, fields in (("b", b"1"), ("d", b"2"), ("f", b"3")):
        opened.write(lambda transaction, name=name, fields=fields: transaction.put(counter_key(name), fields))  # type: ignore[misc]
    for name, fields in (("a", b"4"), ("d", b"5"), ("e", b"6"), ("g", b"7")):
        memtable.view.add_record(counter_key(name), fields)
    expected = [("a", b"4"), ("b", b"1"), ("d", b"5"), ("e", b"6"), ("f", b"3"), ("g", b"7")]
    with opened.read() as raw:
        rows = [(counter_key(name), fields) for name, fields in expected]
        assert list(catalog.rows(raw, KEY[:1])) == rows
        for low in range(6):
            for high in range(low, 6):
                assert list(catalog.rows(raw, KEY[:1], rows[low][0], rows[high][0])) == rows[low:high]


def test_a_scan_of_one_prefix_takes_few_of_many_unapplied_records(opened: Environment, memtable: Memtable) -> None:
    """Each listing of a small table looked at every document that was not applied."""
    looked_at: list[bytes] = []

    class Counted(Records):
        def between(self, start: bytes, limit: bytes) -> Iterator[tuple[bytes, Entry]]:
            for row in super().between(start, limit):
                looked_at.append(row[0])
                yield row

    memtable.view = memtable.view._replace(records=Counted())
    for at in range(3_000):
        memtable.view.add_record(document_key(b"%04d" % at), b"x")
    memtable.view.add_record(KEY, b"1")
    with opened.read() as raw:
        assert list(catalog.rows(raw, KEY[:1])) == [(KEY, b"1")]
        assert list(catalog.keys(raw, document_key(b"17"))) == [
            document_key(b"%04d" % at) for at in range(1_700, 1_800)
        ]
        assert list(islice(catalog.keys(raw, document_key(b"")), 3)) == [document_key(b"%04d" % at) for at in range(3)]
    assert len(looked_at) < 110


def test_a_scan_goes_on_beside_groups_and_after_one_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds all that was there when it began, each once, in order; an interrupt amid sorting loses no key."""
    records = Records((b"%04d" % at, b"") for at in range(0, 1_000, 2))
    found: list[bytes] = []
    for at, (key, _) in enumerate(records.between(b"", PAST)):
        found.append(key)
        records[b"%04d" % min(2 * at + 1, 999)] = b""
        records[b"0500"] = b"again"
    assert found == sorted(set(found))
    assert set(found) >= {b"%04d" % at for at in range(0, 1_000, 2)}
    with monkeypatch.context() as patched:
        patched.setattr(SortedSet, "update", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            next(records.between(b"", PAST))
    assert [key for key, _ in records.between(b"", PAST)] == [b"%04d" % at for at in range(1_000)]


@pytest.mark.parametrize("before", [[], [(b"b", b"")]])
def test_the_records_of_a_group_are_there_together(before: list[tuple[bytes, Entry]]) -> None:
    """A reader had found some without the others; a scan beside finds none of them, and loses no key for the next."""
    records, found = Records(before), list[object]()
    with beside(records, lambda: found.append((list(records.between(b"", PAST)), records.get(b"a", ABSENT)))):
        records.update({b"c": b"", b"a": b""})
    assert found == [(before, ABSENT)]
    assert list(records.between(b"", PAST)) == sorted([(b"a", b""), (b"c", b""), *before])


def test_a_key_that_a_scan_found_before_its_record_is_in_those_after_an_interrupted_one() -> None:
    """It was among the sorted keys alone, which an interrupt gives up."""
    records = Records([(b"b", b"")])

    class Slow(dict[bytes, Entry]):
        def update(self, *entries: Any, **_: Any) -> None:
            assert [key for key, _ in records.between(b"", PAST)] == [b"b"]
            records._keys = None  # an interrupt amid sorting
            assert [key for key, _ in records.between(b"", PAST)] == [b"b"]
            super().update(*entries)

    records._entries = Slow(records._entries)
    records.update({b"a": b""})
    assert [key for key, _ in records.between(b"", PAST)] == [b"a", b"b"]


def test_a_record_that_is_deleted_is_read_nowhere_and_gone_with_its_copy_once_that_is_applied(
    opened: Environment, memtable: Memtable
) -> None:
    """LMDB or the memtable had it; what is put after its deletion is there."""
    stored, unapplied, again = (counter_key(name) for name in "abc")
    for key in (stored, again):
        opened.write(lambda transaction, key=key: transaction.put(key, b"1"))  # type: ignore[misc]
    memtable.view.add_record(unapplied, b"2")
    for key in (stored, unapplied, again):
        memtable.view.add_record(key, None)
    memtable.view.add_record(again, b"3")
    for _ in range(2):
        with opened.read() as raw:
            assert [key for key, _ in catalog.rows(raw, KEY[:1]) if key != APPLIED_KEY] == [again]
            assert [raw.get(key) for key in (stored, unapplied)] == [None, None]
        assert (opened.get(stored), opened.get(again)) == (None, b"3")
        opened.apply()
        assert not memtable
    with applied(opened) as raw:
        assert raw.get(copy_key(stored)) is None
        assert raw.get(copy_key(again)) is not None


def test_a_deletion_that_comes_while_a_commit_works_is_not_taken_for_applied(
    opened: Environment, memtable: Memtable
) -> None:
    """Nor one that came before it, for the row that came behind."""

    def publish(fields: bytes | None) -> None:
        memtable.view.add_record(KEY, fields)
        memtable.position += 1

    for before, meanwhile in ((b"1", None), (b"2", None), (None, b"3")):
        publish(before)
        opened.write(lambda _, fields=meanwhile: publish(fields))  # type: ignore[misc]
        assert opened.get(KEY) == meanwhile


@pytest.mark.parametrize("where", ["work", "map"])
def test_a_commit_that_fails_leaves_everything_unapplied(
    opened: Environment, memtable: Memtable, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is applied by the next one, once."""
    add(memtable, 7, 0, 2)
    memtable.view.add_record(KEY, b"new")
    memtable.view.change_bits(NUMBERS, BitChange(BitMap64([1]), BitMap64()))
    if where == "work":
        with pytest.raises(LookupError):
            opened.write(raising(LookupError()))
    else:
        monkeypatch.setattr(opened, "_grow", lambda: False)
        with pytest.raises(StoreFull):
            opened.write(fill)
    assert runs_in_lmdb(opened, 7) == []
    with opened.read() as raw:
        assert entries(raw, 7) == [0, 1]
    opened.apply()
    assert runs_in_lmdb(opened, 7) == [(0, 2)]
    assert opened.get(KEY) == b"new"


def fill(transaction: Transaction) -> None:
    """A work for which no map is large enough."""
    raise lmdb.MapFullError("full")


class Views(RuleBasedStateMachine):
    """Readers that begin at any time beside groups and commits: each finds all rows there were, each once, in order."""

    def __init__(self) -> None:
        """An environment, and what is in it: ends of its logs, a record, numbers."""
        super().__init__()
        self.stack = ExitStack()
        path = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.memtable = Memtable(Publication(), LIMITS)
        self.environment = self.stack.enter_context(
            closing(Environment(path / "e", name="e", create=True, durability="none", memtable=self.memtable))
        )
        self.ends = {7: 0, 8: 0}
        self.record = b"0"
        self.numbers: set[int] = set()
        self.view: tuple[Unapplied | None, dict[int, int], bytes, set[int]] | None = None

    @rule(ledger=st.sampled_from((7, 8)), count=st.integers(1, 4), with_record=st.booleans())
    def group(self, ledger: int, count: int, with_record: bool) -> None:
        """A group of the write-ahead log is durable."""
        add(self.memtable, ledger, self.ends[ledger], count)
        self.ends[ledger] += count
        self.memtable.position += 1
        if with_record:
            self.record = b"%d" % self.memtable.position
            self.memtable.view.add_record(KEY, self.record)
            self.numbers.add(self.memtable.position)
            self.memtable.view.change_bits(NUMBERS, BitChange(BitMap64([self.memtable.position]), BitMap64()))

    @rule(counts=st.dictionaries(st.sampled_from((7, 8)), st.integers(1, 4), min_size=1))
    def batch(self, counts: dict[int, int]) -> None:
        """A group of messages for several logs is durable."""
        add_batch(self.memtable, self.ends, counts)
        for ledger, count in counts.items():
            self.ends[ledger] += count
        self.memtable.position += 1

    @rule()
    def apply(self) -> None:
        """A commit applies what there is."""
        self.environment.apply()

    @precondition(lambda self: self.view is None)
    @rule()
    def look(self) -> None:
        """A reader takes the view, and begins its transaction later (`Environment.read`)."""
        view = self.memtable.view if self.memtable else None
        self.view = view, dict(self.ends), self.record, set(self.numbers)

    @precondition(lambda self: self.view is not None)
    @rule()
    def read(self) -> None:
        """It finds what there was when it looked, and perhaps what came since, without a gap."""
        assert self.view is not None
        view, ends, record, numbers = self.view
        self.view = None
        memtable, self.environment._memtable = self.environment._memtable, Memtable(Publication(), LIMITS)
        try:
            if view is not None:
                self.environment._memtable.view = view
            with self.environment.read() as raw:
                self.check(raw, ends, record, numbers)
        finally:
            self.environment._memtable = memtable

    @rule()
    def read_at_once(self) -> None:
        """A reader that is not held up finds exactly what there is."""
        with self.environment.read() as raw:
            self.check(raw, self.ends, self.record, self.numbers)
            assert {ledger: find_tail(raw, "e", ledger) for ledger in self.ends} == self.ends
            ledgers = sorted(self.ends)
            assert find_tails(raw, "e", np.array(ledgers, np.uint64)).tolist() == [self.ends[each] for each in ledgers]

    def check(self, raw: Reads, ends: dict[int, int], record: bytes, numbers: set[int]) -> None:
        """A reader finds the rows there were, or more."""
        for ledger, end in ends.items():
            tail = find_tail(raw, "e", ledger)
            assert end <= tail <= self.ends[ledger]
            assert entries(raw, ledger) == list(range(tail))
            for start in range(tail):
                for limit in (start + 1, tail, None):
                    read = entries(raw, ledger, start, limit)
                    assert read == list(range(read[0], read[-1] + 1))
                    assert read[0] <= start < (limit or tail) <= read[-1] + 1
            finder = RunFinder(raw, "e")
            for entry in range(tail):
                run = present(finder.find(ledger, entry))
                assert run.body(entry - run.first_entry) == b"%d" % entry
        value = raw.get(KEY)
        assert int(b"0" if value is None else unseal(KEY, value)) >= int(record)
        stored = raw.get(NUMBERS)
        found = set() if stored is None else set(BitMap64.deserialize(unseal(NUMBERS, stored)))
        listed = list(catalog.rows(raw, sequence_prefix(1, "p")))
        assert listed == ([] if stored is None else [(NUMBERS, unseal(NUMBERS, stored))])
        assert numbers <= found <= self.numbers

    @rule()
    def place(self) -> None:
        """The place says what is applied: all rows of the groups up to it, and none of a later one."""
        with applied(self.environment) as raw:
            assert isinstance(applied_position(raw), int)
            stored = raw.get(NUMBERS)
            found = set() if stored is None else set(BitMap64.deserialize(unseal(NUMBERS, stored)))
            assert found == {number for number in self.numbers if number <= applied_position(raw)}

    def teardown(self) -> None:
        """Close and remove all."""
        self.stack.close()


Views.TestCase.settings = settings(
    max_examples=length("DUELOG_VIEWS", 60, 300), stateful_step_count=25, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestViews = pytest.mark.series(Views.TestCase)


def test_bits_are_changed_of_the_copy_where_the_record_is_damaged(opened: Environment, memtable: Memtable) -> None:
    """Else no checkpoint would come to its end, and sends would stop with the segment."""
    opened.commit(lambda transaction: transaction.change_bits(BITS, BitChange(BitMap([1]), BitMap())))
    opened.commit(lambda transaction: transaction.raw.put(BITS, b"damaged"))
    memtable.view.change_bits(BITS, BitChange(BitMap([2]), BitMap()))
    opened.apply()
    with opened.read() as raw:
        assert BitMap.deserialize(present(catalog.fields_of(raw, BITS))) == BitMap([1, 2])


BITS = block_key(Table.CANCELLED, 7, 0)
SOME = st.sets(st.integers(0, 5)).map(BitMap)
CHANGES = st.tuples(SOME, SOME).map(lambda both: BitChange(both[0], both[1] - both[0]))
STEPS = CHANGES | st.sampled_from(("delete", "apply", "crash")) | SOME.filter(bool).map(lambda bits: bits.serialize())


@pytest.mark.series
@settings(max_examples=length("DUELOG_VIEWS", 60, 300), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=12))
def test_bits_that_are_changed_are_those_of_a_set(steps: list[Any]) -> None:
    """Whatever was written whole, deleted or applied between; by key, in a scan, in a group, and after a replay."""
    twin: set[int] | None = None
    since: list[Row] = []
    with tempfile.TemporaryDirectory() as path:
        memtable = Memtable(Publication(), LIMITS)
        opened = Environment(Path(path), name="e", create=True, durability="none", memtable=memtable)
        batch = WriteBatch(opened, memtable)
        for step in [*steps, "group", "apply"]:
            if step == "apply":
                opened.apply()
                since.clear()
            elif step == "crash":
                memtable.view = Unapplied.nothing()
                for row in since:
                    add_row(memtable.view, row)
            elif step == "delete":
                batch.main.delete(BITS)
                twin = None
            elif isinstance(step, BitChange):
                if step.taken or len(step.united) % 2:
                    batch.main.change_bits(BITS, step)
                else:
                    assert set(batch.main.unite(BITS, step.united)) == set(step.united) - (twin or set())
                twin = ((twin or set()) - set(step.taken)) | set(step.united) or None
            elif step != "group":
                batch.main.put(BITS, step)
                twin = set(BitMap.deserialize(step))
            if twin is None:
                assert batch.main.get(BITS) is None
            assert set(bits_of(BITS, batch.main.get(BITS))) == (twin or set())
            since += batch.content.rows()
            batch.end_reads()
            batch.publish(memtable.position + 1)
            batch.close()
            batch = WriteBatch(opened, memtable)
            with opened.read() as raw:
                listed = list(catalog.rows(raw, BITS[:1]))
                assert list(catalog.keys(raw, BITS[:1])) == [key for key, _ in listed]
                assert catalog.fields_of(raw, BITS) == (listed[0][1] if listed else None)
            assert (set(BitMap.deserialize(listed[0][1])) if listed else None) == twin
        assert not memtable
        batch.close()
        opened.close()
