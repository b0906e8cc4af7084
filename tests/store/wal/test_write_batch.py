"""A write batch: rows for several environments, which are one group, and are in memory once it is durable."""

from __future__ import annotations

import numpy as np
import pytest
from pyroaring import BitMap64

from duelog.store.codec.format import counter_key, pack_u64, run_key, unpack_u64
from duelog.store.codec.run import HEADER, RunLimits
from duelog.store.env.claims import Claims, Conflict
from duelog.store.env.memtable import LedgerRuns, Memtable
from duelog.store.log import catalog
from duelog.store.log.ledger import Ledger, StagedLedger
from duelog.store.wal.segment import MAIN, RowKind
from duelog.store.wal.write_batch import EnvironmentBatch, WriteBatch, add_row

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


def append(rows: EnvironmentBatch, ledger: Ledger, bodies: list[bytes]) -> int:
    """Stage messages."""
    staged = rows.stage(ledger, lambda: StagedLedger(ledger, LIMITS))
    return staged.add_messages(np.zeros(len(bodies), dtype=np.int64), bodies, 0)


@pytest.fixture
def rig() -> Rig:
    """With nothing in it."""
    return Rig()


def test_rows_of_several_environments_are_published_with_the_place_of_their_group(rig: Rig) -> None:
    """Nothing is in memory before that; then each memtable has its own, and what was to follow has run."""
    main, partition = rig.rows()
    ledgers, order = [Ledger(5), Ledger(6, entries=10)], list[str]()
    assert append(main, ledgers[0], [b"a", b"b"]) == 0
    assert append(partition, ledgers[1], [b"c"] * 5) == 10
    assert append(partition, ledgers[1], [b"d"]) == 15
    partition.put(KEY, b"fields")
    main.add_numbers(KEY, BitMap64([1, 2]))
    main.after_commit(lambda: order.append("main"))
    rig.batch.after_commit(lambda: order.append("group"))
    rows = rig.batch.flush()
    assert [(each.start_ms, each.kind, each.key) for each in rows] == [
        (MAIN, RowKind.NUMBERS, KEY),
        (MAIN, RowKind.RUN, run_key(5, 0)),
        (3_600, RowKind.RECORD, KEY),
        (3_600, RowKind.RUN, run_key(6, 10)),
        (3_600, RowKind.RUN, run_key(6, 14)),
    ]
    assert rig.batch.entries == 8
    assert not rig.main
    assert not rig.partition
    assert not order
    assert [ledger.entries for ledger in ledgers] == [0, 10]
    rig.batch.publish(77)
    assert (rig.main.position, rig.partition.position) == (77, 77)
    assert [(run.first, run.limit) for run in LedgerRuns(5, rig.main.view.runs[5])] == [(0, 2)]
    assert [(run.first, run.limit) for run in LedgerRuns(6, rig.partition.view.runs[6])] == [(10, 14), (14, 16)]
    assert rig.partition.view.records == {KEY: b"fields"}
    assert rig.main.view.numbers == [(KEY, BitMap64([1, 2]))]
    assert [ledger.entries for ledger in ledgers] == [2, 16]
    assert order == ["main", "group"]


def test_rows_that_are_read_back_fill_a_memtable_as_they_were_published(rig: Rig) -> None:
    """It is the same after a crash."""
    main, _ = rig.rows()
    append(main, Ledger(5), [b"a", b"b"])
    main.put(KEY, b"")
    main.add_numbers(KEY, BitMap64([1, 1 << 40]))
    rows = rig.batch.flush()
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
    commit, ledgers = object(), [Ledger(5), Ledger(6), Ledger(7)]
    main, partition = rig.rows()
    append(main, ledgers[0], [b"a"])
    append(partition, ledgers[1], [b"b"])
    append(partition, ledgers[1], [b"b"])
    rig.claims.take(ledgers[2], commit)
    with pytest.raises(Conflict) as caught:
        append(partition, ledgers[2], [b"c"])
    assert caught.value.owner is ledgers[2]
    for _ in range(2):
        rig.batch.release()
        assert all(rig.claims.is_taken(ledger, commit) for ledger in ledgers)
