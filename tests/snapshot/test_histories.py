"""Whatever has happened to a store, the index restored from its snapshots is the index of a full replay.

A random history of sends, late appends, cancellations, reschedulings, firings, packing, snapshots (complete, torn,
damaged) and crashes. At each crash the index in memory is dropped and made twice from disk: with the snapshots, and
without.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.markers.firing import loaded
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.pending_log import PendingLog
from duelog.partitions import due_column
from duelog.partitions.index import buckets
from duelog.snapshot.snapshot_format import inspect_snapshots, snapshot_keys
from duelog.snapshot.writer import write_snapshots
from duelog.store.codec.format import Table
from duelog.store.codec.run import RunLimits
from duelog.store.env.transaction import Transaction
from duelog.store.log.scan import runs
from tests.conftest import present
from tests.partitions.packing_all import buckets_of
from tests.proof import length

HOUR_MS = 3_600_000
START_MS = 1_790_000_000_000 - 1_790_000_000_000 % HOUR_MS
BUCKET_MS = 50
TOPIC = "history"

offsets = st.lists(st.integers(1, 400), min_size=1, max_size=12)


def _no_snapshot(*_: Any, **__: Any) -> Any:
    return None
    yield


class History(RuleBasedStateMachine):
    """One partition, one topic, a small grid of due times."""

    @initialize(part_bytes=st.sampled_from([1_024, 1 << 20]))
    def begin(self, part_bytes: int) -> None:
        """A store in the first second of its partition, with one message so that the partition is there."""
        self.path = Path(tempfile.mkdtemp(prefix="duelog-history-"))
        self.clock = ManualClock(START_MS)
        self.config = StoreConfig(
            partition_ms=HOUR_MS,
            bucket_ms=BUCKET_MS,
            durability="none",
            run_entries=5,
            fire_batch=7,
            snapshot_part_bytes=part_bytes,
            ledger_max_entries=1_000,
        )
        self.ids: list[Any] = []
        self.store = DelayedStore.open(self.path / "store", self.config, clock=self.clock)
        self.topic = self.store.topic(TOPIC)
        self.topic.subscribe("keeper").close()
        self.send([HOUR_MS // 2])
        self.store.tick()

    @rule(after_ms=offsets)
    def send(self, after_ms: list[int]) -> None:
        """Messages due soon."""
        now_ms = self.clock.now_ms()
        self.ids += self.topic.send_batch([Message(b"m", deliver_at=now_ms + ms) for ms in after_ms])

    @rule(before_ms=offsets)
    def append_late(self, before_ms: list[int]) -> None:
        """Messages that reach the partition after their time has come."""
        dues = np.maximum(self.clock.now_ms() - np.array(before_ms), START_MS)
        partition = present(self.store._engine.storage.partitions.get(START_MS))
        body = self._some_body()
        log, limits = partition.log(self._log().topic_id), RunLimits(5, 1 << 16)
        assert log is not None

        def append(transaction: Transaction) -> None:
            rows = transaction.to(partition.start_ms, partition.memtable)
            partition.add(rows, log, dues, [body] * len(dues), limits)

        self.store._engine.storage.main.write(append)

    @rule(ms=st.integers(1, 150))
    def advance(self, ms: int) -> None:
        """Time passes, and what is due fires."""
        self.clock.advance(ms)
        self.store.tick()

    @rule(ms=st.integers(1, 150))
    def fire_one_batch(self, ms: int) -> None:
        """Time passes, and only some of what is due fires."""
        self.clock.advance(ms)
        self._firing().fire(self.clock.now_ms())

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A message sent before is cancelled, fired or not."""
        self.topic.cancel(data.draw(st.sampled_from(self.ids)))

    @rule(data=st.data(), after_ms=st.integers(1, 400))
    def reschedule(self, data: st.DataObject, after_ms: int) -> None:
        """A message sent before gets another time: a conditional entry."""
        moved = self.topic.reschedule(data.draw(st.sampled_from(self.ids)), deliver_at=self.clock.now_ms() + after_ms)
        if moved is not None:
            self.ids.append(moved)

    @rule(slices=st.integers(1, 3) | st.just(1_000))
    def pack(self, slices: int) -> None:
        """Buckets of the index are packed, two at once."""
        with patch.object(buckets, "_PACKED_AT_ONCE", 2):
            for _ in range(slices):
                if not self._log().pack():
                    break

    @rule()
    def snapshot(self) -> None:
        """A complete snapshot of this instant."""
        self._snapshot(1_000)

    @rule(steps=st.integers(0, 3))
    def torn_snapshot(self, steps: int) -> None:
        """A snapshot that the process does not live to finish."""
        self._snapshot(steps)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A byte of a snapshot is changed."""
        environment = self._environment()
        with environment.read() as raw:
            tables = (Table.SNAPSHOT_META, Table.SNAPSHOT_PART)
            keys = [key for table in tables for key, _ in snapshot_keys(raw, table)]
            if not keys:
                return
            key = data.draw(st.sampled_from(keys))
            value = bytearray(raw.get(key) or b"")
        value[data.draw(st.integers(0, len(value) - 1))] ^= 0x10
        environment.commit(lambda transaction: transaction.raw.put(key, bytes(value)))

    @rule()
    def crash(self) -> None:
        """The index is lost; what is made of the disk with snapshots is what is made of it without."""
        with patch.object(loaded, "restore_steps", _no_snapshot):
            replayed = self._load_anew()
        restored = self._load_anew()
        assert self._state(restored) == self._state(replayed)
        restored._check()

    @rule(data=st.data(), after_ms=offsets)
    def load_in_steps(self, data: st.DataObject, after_ms: list[int]) -> None:
        """The index is lost, and messages are sent, cancelled and rescheduled between the steps of loading it."""
        firing = self._unloaded()
        between = {"send": lambda: self.send(after_ms), "cancel": lambda: self.cancel(data), "nothing": lambda: None,
                   "reschedule": lambda: self.reschedule(data, after_ms[0])}  # fmt: skip
        with patch.object(loaded, "_LOAD_SLICE_S", 0.0), patch.object(due_column, "_RUNS_A_TRANSACTION", 1):
            while firing.loaded.load(self.clock.now_ms()):
                between[data.draw(st.sampled_from(sorted(between)))]()
        found = self._log()
        found._check()
        assert self._state(found) == self._state(self._load_anew())

    @rule()
    def close_and_open(self) -> None:
        """The store is closed in order."""
        self.store.close()
        self.store = DelayedStore.open(self.path / "store", self.config, clock=self.clock)
        self.topic = self.store.topic(TOPIC)
        self.store.tick()

    @invariant()
    def at_most_one_is_unfinished(self) -> None:
        """The remains of snapshots that crashes leave do not gather."""
        assert sum(info.state.value == "torn" for info in list(inspect_snapshots(self._environment()))) <= 1

    def teardown(self) -> None:
        """Every store ends with a check, which finds nothing but the snapshots that were damaged."""
        if hasattr(self, "store"):
            try:
                self.store.tick()
                assert [finding for finding in self.store.check() if finding.code != "snapshot"] == []
            finally:
                self.store.close()
                shutil.rmtree(self.path)

    def _firing(self) -> Firing:
        return self.store._engine.delivery.firing

    def _log(self) -> PendingLog:
        (log,) = self._firing().loaded.logs[START_MS].values()
        return log

    def _environment(self) -> Any:
        partition = present(self.store._engine.storage.partitions.get(START_MS))
        return partition.environment

    def _some_body(self) -> bytes:
        with self._environment().read() as raw:
            run = next(runs(raw, "partition", self._log().ledger_id))
            body = run.body(0)  # type: ignore[union-attr]
        assert body is not None
        return body

    def _snapshot(self, most_steps: int) -> None:
        cut = present(self._log().cut())
        steps = write_snapshots(self._environment(), [cut], self.config.snapshot_part_bytes, self.clock.now_ms())
        for _ in range(most_steps):
            if next(steps, self) is self:
                break

    def _unloaded(self) -> Firing:
        firing = self._firing()
        partition = present(self.store._engine.storage.partitions.get(START_MS))
        firing.loaded.unload(partition)
        return firing

    def _load_anew(self) -> PendingLog:
        firing = self._unloaded()
        while firing.loaded.load(self.clock.now_ms()):
            pass
        return self._log()

    @staticmethod
    def _state(log: PendingLog) -> tuple[object, ...]:
        buckets = [(start_ms, list(ids)) for start_ms, ids in buckets_of(log._index)]
        late = list(zip(log._late.entries.tolist(), log._late.dues.tolist(), strict=True))
        return buckets, late, log.tail, log.frontier, len(log)


History.TestCase.settings = settings(
    max_examples=length("DUELOG_HISTORIES", 8, 40), stateful_step_count=30, deadline=None
)
TestHistory = pytest.mark.series(History.TestCase)
