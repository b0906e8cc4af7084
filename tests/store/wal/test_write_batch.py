"""A write batch: rows for several environments, which are one group, and are in memory once it is durable."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap, BitMap64

from duelog.store.codec.bits import BitChange
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import counter_key, pack_u64, run_key, sequence_key, unpack_u64
from duelog.store.codec.run import HEADER, RunLimits
from duelog.store.codec.run_lengths import ScatteredBatch
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import LedgerRuns, Memtable, Publication
from duelog.store.errors import BrokenInvariant
from duelog.store.log import catalog
from duelog.store.log.ledger import insert_messages
from duelog.store.wal.segment import MAIN, RowKind
from duelog.store.wal.write_batch import EnvironmentBatch, WriteBatch, add_row
from tests.store.commits import Log, NotedLock

LIMITS = RunLimits(entries=4, bytes=1_024)
KEY = counter_key("a")
NUMBERS = sequence_key(1, "p", 0)


class Rig:
    """The main environment, the memtables of two environments, and a batch."""

    def __init__(self, path: Path) -> None:
        publication = Publication()
        self.main, self.partition = Memtable(publication, LIMITS), Memtable(publication, LIMITS)
        self.environment = Environment(path / "main", name="main", create=True, memtable=self.main)
        self.batch = WriteBatch(self.environment, self.main)

    def rows(self) -> tuple[EnvironmentBatch, EnvironmentBatch]:
        """Those of the main environment, and of the partition."""
        return self.batch.main, self.batch.to(3_600, self.partition)


def append(rows: EnvironmentBatch, log: Log, bodies: list[bytes]) -> int:
    """Append messages; returns the id of the first."""
    first = log.took(rows, len(bodies))
    insert_messages(rows, log.ledger.ledger_id, first, np.zeros(len(bodies), dtype=np.int64), bodies, 0, LIMITS)
    return first


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """With nothing in it."""
    rig = Rig(tmp_path)
    yield rig
    rig.batch.close()
    rig.environment.close()


def test_rows_of_several_environments_are_published_with_the_place_of_their_group(rig: Rig) -> None:
    """Nothing is in memory before that; then each memtable has its own, and what was to follow has run."""
    main, partition = rig.rows()
    logs, order = [Log(5), Log(6, entries=10)], list[str]()
    assert append(main, logs[0], [b"a", b"b"]) == 0
    assert append(partition, logs[1], [b"c"] * 5) == 10
    assert append(partition, logs[1], [b"d"]) == 15
    partition.put(KEY, b"fields")
    main.change_bits(KEY, BitChange(BitMap([1, 2]), BitMap([3])))
    main.after_commit(lambda: order.append("main"))
    rig.batch.after_commit(lambda: order.append("group"))
    assert [(each.start_ms, each.kind, each.key) for each in rig.batch.content.rows()] == [
        (MAIN, RowKind.RUN, run_key(5, 0)),
        (3_600, RowKind.RUN, run_key(6, 10)),
        (3_600, RowKind.RUN, run_key(6, 14)),
        (3_600, RowKind.RUN, run_key(6, 15)),
        (3_600, RowKind.RECORD, KEY),
        (MAIN, RowKind.SUBTRACT, KEY),
        (MAIN, RowKind.UNITE, KEY),
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
    assert rig.partition.view.records.items() == [(KEY, b"fields")]
    assert rig.main.view.records.items() == [(KEY, BitChange(BitMap([1, 2]), BitMap([3])))]
    assert [log.ledger.entries for log in logs] == [2, 16]
    assert order == ["main", "group"]


def test_rows_that_are_read_back_fill_a_memtable_as_they_were_published(rig: Rig) -> None:
    """It is the same after a crash."""
    main, _ = rig.rows()
    append(main, Log(5), [b"a", b"b"])
    main.put(KEY, BitMap([1]).serialize())
    main.change_bits(KEY, BitChange(BitMap([1, 5]), BitMap()))
    main.change_bits(NUMBERS, BitChange(BitMap64([1, 1 << 40]), BitMap64()))
    main.change_bits(NUMBERS, BitChange(BitMap64([2]), BitMap64([1])))
    main.put(counter_key("b"), b"")
    main.delete(counter_key("b"))
    rows = list(rig.batch.content.rows())
    rig.batch.publish(1)
    again = Memtable(Publication(), LIMITS)
    for row in rows:
        add_row(again.view, row)
    assert again.view.records.items() == rig.main.view.records.items()
    assert again.view.runs == rig.main.view.runs
    assert HEADER.unpack_from(again.view.runs[5][0].value)[4] == 2


def test_a_group_that_has_read_is_published_inside_no_gate(rig: Rig) -> None:
    """Who loads a partition has the lock of groups, and waits for a backup that waits until nobody is inside."""
    assert rig.batch.main.get(KEY) is None
    assert rig.environment._gate.held
    lock: Any = NotedLock(rig.environment)
    rig.main.publication.lock = lock
    rig.batch.publish(1)
    assert lock.inside == [False]


def test_a_record_is_read_as_the_group_leaves_it(rig: Rig) -> None:
    """Also where it is left empty; before that as it is stored."""
    rig.environment.commit(lambda transaction: transaction.put(KEY, b"stored"))
    main, partition = rig.rows()
    assert main.get(KEY) == b"stored"
    main.put(KEY, b"")
    assert main.get(KEY) == b""
    main.put(KEY, b"new")
    assert main.get(KEY) == b"new"
    assert dict(catalog.rows(main.raw, KEY[:1])) == {KEY: b"new"}
    assert main.delete(KEY)
    assert main.get(KEY) is None
    assert not main.delete(KEY)
    assert not list(catalog.rows(main.raw, KEY[:1]))
    with pytest.raises(BrokenInvariant):
        partition.get(KEY)


def test_numbers_are_allocated_once_in_a_group(rig: Rig) -> None:
    """Those of one unit of work follow those of the one before."""
    rig.environment.commit(lambda transaction: transaction.put(counter_key("ids"), pack_u64(7)))
    main, _ = rig.rows()
    assert [catalog.take_numbers(main, "ids") for _ in range(2)] == [7, 8]
    assert unpack_u64(main.get(counter_key("ids")) or b"") == 9


def test_a_group_leaves_no_garbage_to_the_collector(rig: Rig) -> None:
    """Single sends were 5 % slower for the cycles between a batch and its parts: the collector ran so often."""
    gc.collect()
    gc.disable()
    try:
        main, partition = rig.rows()
        append(partition, Log(6), [b"a"])
        main.put(KEY, b"x")
        bodies = Bodies.of([b"b"])
        scattered = ScatteredBatch.pack(np.zeros(1, dtype=np.int64), bodies, [(0, 0, 1)], [7])
        scattered.place([0])
        rig.batch.add_batch(scattered, [rig.partition])
        rig.batch.publish(1)
        rig.batch.close()
        rig.batch = WriteBatch(rig.environment, rig.main)
        del main, partition
        assert not gc.collect()
    finally:
        gc.enable()
