"""A write batch: rows for several environments, which are one group, in memory once it is durable; and claims."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from pyroaring import BitMap64

from duelog.store.codec.format import counter_key, pack_u64, run_key, unpack_u64
from duelog.store.codec.run import HEADER, RunLimits
from duelog.store.env.claims import Claims, Conflict
from duelog.store.env.memtable import LedgerRuns, Memtable
from duelog.store.log import catalog
from duelog.store.log.ledger import Ledger, end_after, insert_messages
from duelog.store.wal.segment import MAIN, RowKind
from duelog.store.wal.write_batch import EnvironmentBatch, WriteBatch, add_row
from tests.store.group_commits import until

LIMITS = RunLimits(entries=4, bytes=1_024)
KEY = counter_key("a")


class Rig:
    """Claims, the memtables of two environments, and a batch."""

    def __init__(self) -> None:
        self.claims = Claims()
        self.main, self.partition = Memtable(self.claims, LIMITS), Memtable(self.claims, LIMITS)
        self.records: dict[bytes, bytes] = {}
        self.batch = WriteBatch(self.claims)

    def rows(self) -> tuple[EnvironmentBatch, EnvironmentBatch]:
        """Those of the main environment, and of the partition."""
        return self.batch.to(MAIN, self.main, self.records.get), self.batch.to(3_600, self.partition)


class Log:
    """A log of one ledger."""

    def __init__(self, ledger_id: int, entries: int = 0) -> None:
        self.ledger = Ledger(ledger_id, entries)


def append(rows: EnvironmentBatch, log: Log, bodies: list[bytes]) -> int:
    """Append messages; returns the id of the first."""
    first, ledger_id = rows.end_of(log), log.ledger.ledger_id
    insert_messages(rows, ledger_id, first, np.zeros(len(bodies), dtype=np.int64), bodies, 0, LIMITS)
    end = end_after(ledger_id, first, len(bodies))
    rows.move_end(log, end)
    rows.appended(lambda: setattr(log.ledger, "entries", end))
    return first


@pytest.fixture
def rig() -> Rig:
    """With nothing in it."""
    return Rig()


def test_rows_of_several_environments_are_published_with_the_place_of_their_group(rig: Rig) -> None:
    """Nothing is in memory before that; then each memtable has its own, and what was to follow has run."""
    main, partition = rig.rows()
    logs, order = [Log(5), Log(6, entries=10)], list[str]()
    assert append(main, logs[0], [b"a", b"b"]) == 0
    assert append(partition, logs[1], [b"c"] * 5) == 10
    assert append(partition, logs[1], [b"d"]) == 15
    partition.put(KEY, b"fields")
    main.add_numbers(KEY, BitMap64([1, 2]))
    main.after_commit(lambda: order.append("main"))
    rig.batch.after_commit(lambda: order.append("group"))
    assert [(each.start_ms, each.kind, each.key) for each in rig.batch.rows] == [
        (MAIN, RowKind.RUN, run_key(5, 0)),
        (3_600, RowKind.RUN, run_key(6, 10)),
        (3_600, RowKind.RUN, run_key(6, 14)),
        (3_600, RowKind.RUN, run_key(6, 15)),
        (3_600, RowKind.RECORD, KEY),
        (MAIN, RowKind.NUMBERS, KEY),
    ]
    assert rig.batch.entries == 8
    assert not rig.main
    assert not rig.partition
    assert not order
    assert [log.ledger.entries for log in logs] == [0, 10]
    rig.batch.publish(77)
    assert (rig.main.position, rig.partition.position) == (77, 77)
    assert [(run.first, run.limit) for run in LedgerRuns(5, rig.main.view.runs[5])] == [(0, 2)]
    assert [(run.first, run.limit) for run in LedgerRuns(6, rig.partition.view.runs[6])] == [
        (10, 14),
        (14, 15),
        (15, 16),
    ]
    assert rig.partition.view.records == {KEY: b"fields"}
    assert rig.main.view.numbers == [(KEY, BitMap64([1, 2]))]
    assert [log.ledger.entries for log in logs] == [2, 16]
    assert order == ["main", "group"]


def test_rows_that_are_read_back_fill_a_memtable_as_they_were_published(rig: Rig) -> None:
    """It is the same after a crash."""
    main, _ = rig.rows()
    append(main, Log(5), [b"a", b"b"])
    main.put(KEY, b"")
    main.add_numbers(KEY, BitMap64([1, 1 << 40]))
    main.put(counter_key("b"), b"")
    main.delete(counter_key("b"))
    rows = rig.batch.rows
    rig.batch.publish(1)
    again = Memtable(Claims(), LIMITS)
    for row in rows:
        add_row(again, row)
    assert again.view == rig.main.view
    assert HEADER.unpack_from(again.view.runs[5][0].value)[4] == 2


def test_a_record_is_read_as_the_group_leaves_it(rig: Rig) -> None:
    """Also where it is left empty; before that as it is stored."""
    main, partition = rig.rows()
    rig.records[KEY] = b"stored"
    assert (main.get(KEY), partition.get(KEY)) == (b"stored", None)
    main.put(KEY, b"")
    assert main.get(KEY) == b""
    main.put(KEY, b"new")
    assert main.get(KEY) == b"new"
    assert main.delete(KEY)
    assert main.get(KEY) is None
    assert not main.delete(KEY)
    assert not partition.delete(KEY)


def test_numbers_are_allocated_in_a_group_alone(rig: Rig) -> None:
    """The counter is claimed, so that no commit gives out the same ones."""
    main, _ = rig.rows()
    rig.records[counter_key("ids")] = pack_u64(7)
    assert [catalog.take_numbers(main, "ids") for _ in range(2)] == [7, 8]
    assert unpack_u64(main.get(counter_key("ids")) or b"") == 9
    with pytest.raises(Conflict):
        catalog.take_numbers(WriteBatch(rig.claims).to(MAIN, rig.main, rig.records.get), "ids")


def test_claims_of_a_group_are_given_back_whatever_becomes_of_it(rig: Rig) -> None:
    """Where it meets one of a commit too, and twice is as once."""
    commit, logs = object(), [Log(5), Log(6), Log(7)]
    main, partition = rig.rows()
    append(main, logs[0], [b"a"])
    append(partition, logs[1], [b"b"])
    append(partition, logs[1], [b"b"])
    rig.claims.take(logs[2], commit)
    with pytest.raises(Conflict) as caught:
        append(partition, logs[2], [b"c"])
    assert caught.value.owner is logs[2]
    for _ in range(2):
        rig.batch.release()
        assert all(rig.claims.is_taken(log, commit) for log in logs)


COMMIT, GROUP = object(), object()


def waiting(claims: Claims) -> int:
    """Threads that wait for a claim."""
    return claims._waiting


def test_a_group_meets_the_claim_of_a_commit() -> None:
    """It is told which log it was; once the commit has ended it has the log."""
    claims = Claims()
    claims.take("log", COMMIT)
    claims.take("log", COMMIT)  # it has it already
    with pytest.raises(Conflict) as caught:
        claims.try_take("log", GROUP)
    assert caught.value.owner == "log"
    claims.try_take("another", GROUP)
    claims.release(COMMIT, ["log"])
    claims.try_take("log", GROUP)
    claims.try_take("log", GROUP)


def test_a_claim_is_given_back_by_the_one_that_has_it() -> None:
    """A group that gave all back, and whose attempt gives them back again, takes none from a commit."""
    claims = Claims()
    claims.try_take("log", GROUP)
    claims.release(GROUP, ["log", "never taken"])
    claims.take("log", COMMIT)
    claims.release(GROUP, ["log"])
    with pytest.raises(Conflict):
        claims.try_take("log", GROUP)


@pytest.mark.parametrize("waits", ["commit", "group"])
def test_what_waits_for_a_claim_goes_on_when_it_is_given_back(waits: str) -> None:
    """The commit with the claim, the group without one."""
    claims = Claims()
    claims.take("log", COMMIT)
    other = object()

    def wait() -> None:
        if waits == "commit":
            claims.take("log", other)
        else:
            claims.wait("log")

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: waiting(claims) == 1)
    assert thread.is_alive()
    claims.release(COMMIT, ["log"])
    thread.join(20)
    assert not thread.is_alive()
    assert waiting(claims) == 0
    if waits == "commit":
        assert not claims.is_taken("log", GROUP)
    claims.release(other, ["log"])
    claims.wait("log")
    assert claims.is_taken("log", GROUP)
