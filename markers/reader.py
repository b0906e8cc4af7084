"""Reading a main log: messages as they lie there, markers resolved to the messages they point at.

Markers are resolved in batches, in order of address in their partition log, each run opened once. An
entry that cannot be read is reported, left out, and holds nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import lmdb
import numpy as np
from pyroaring import BitMap

from ..partitions.partition_set import PartitionSet
from ..partitions.timespan import partition_start
from ..store.body import decode_body
from ..store.environment import Environment
from ..store.errors import CorruptEntry, DamagedStore
from ..store.managed_ledger import ManagedLedger
from ..store.message import ReceivedMessage
from ..store.position import MessageId, Position
from ..store.run import Run, RunKind
from ..store.scan import find_run, runs


class Unacknowledged(Protocol):
    """What a subscription has not acknowledged (AckSet)."""

    def unacked(self, ledger_id: int, start: int, limit: int) -> BitMap: ...


class _Address:
    """A place in the batch being read whose message lies in a partition log."""

    __slots__ = ("due_ms", "entry_id", "ledger_id", "position", "slot")

    def __init__(self, slot: int, position: Position, ledger_id: int, entry_id: int, due_ms: int) -> None:
        self.slot = slot
        self.position = position
        self.ledger_id = ledger_id
        self.entry_id = entry_id
        self.due_ms = due_ms


class MainLogReader:
    """Reads one topic's main log for its subscriptions. Thread-safe; holds nothing between calls."""

    def __init__(
        self,
        main: Environment,
        partitions: PartitionSet,
        log: ManagedLedger,
        *,
        topic: str,
        subscription: str,
        span_ms: int,
        set_aside: Callable[[CorruptEntry], object],
    ) -> None:
        self._main = main
        self._partitions = partitions
        self._log = log
        self._topic = topic
        self._subscription = subscription
        self._span_ms = span_ms
        self.set_aside = set_aside

    def read(
        self, start: Position, max_entries: int, skip: Unacknowledged, now_ms: int
    ) -> tuple[list[ReceivedMessage], Position, bool]:
        """Messages from the first position at or after `start` that are due and not acknowledged, in log order.

        At most `max_entries`; also returns the position to go on from, one past the last looked at, and
        whether an unacknowledged message was passed over because it is not due at `now_ms`.
        """
        passed_over = False
        batch = _Batch(self)
        ledger_id, entry_id = start
        log = self._log.snapshot()  # before the transaction begins, which therefore sees all of it
        with self._main.read() as raw:
            while True:
                committed = log.entries_of(ledger_id)
                if committed is not None:
                    for run in runs(raw, self._main.name, ledger_id, entry_id, committed):
                        if isinstance(run, CorruptEntry):
                            self.set_aside(run)
                            continue
                        first = max(run.first_entry, entry_id)
                        limit = min(run.limit, committed)
                        wanted = skip.unacked(ledger_id, first, limit)
                        if run.ahead and wanted:
                            due = wanted & _due_entries(run, now_ms)
                            passed_over |= len(due) < len(wanted)
                            wanted = due
                        room = max_entries - len(batch)
                        if len(wanted) > room:
                            wanted = wanted[:room]
                            limit = wanted[-1] + 1 if room else first
                        batch.add(run, wanted)
                        entry_id = limit
                        if len(batch) >= max_entries:
                            break
                    else:
                        entry_id = max(entry_id, committed)
                    if len(batch) >= max_entries or entry_id < committed:
                        break
                following = log.following(ledger_id)
                if following is None:
                    break
                ledger_id, entry_id = following, 0
        return batch.messages(), Position(ledger_id, entry_id), passed_over

    def read_at(self, positions: Sequence[Position]) -> list[ReceivedMessage]:
        """The messages at `positions`, in log order; those that are gone or unreadable are left out."""
        batch = _Batch(self)
        by_ledger: dict[int, BitMap] = {}
        for ledger_id, entry_id in positions:
            by_ledger.setdefault(ledger_id, BitMap()).add(entry_id)
        with self._main.read() as raw:
            cursor = raw.cursor()
            for ledger_id in sorted(by_ledger):
                self._collect(cursor, batch, ledger_id, by_ledger[ledger_id])
        return batch.messages()

    def _collect(self, cursor: lmdb.Cursor, batch: _Batch, ledger_id: int, wanted: BitMap) -> None:
        while wanted:
            entry_id = wanted.min()
            try:
                run = find_run(cursor, self._main.name, ledger_id, entry_id)
            except CorruptEntry as error:
                self.set_aside(CorruptEntry(error.environment, ledger_id, entry_id, error.reason))
                run = None
            if run is None:
                wanted.remove(entry_id)
                continue
            here = wanted & BitMap(range(run.first_entry, run.limit))
            batch.add(run, here)
            wanted -= here

    def _received(self, body: bytes, message_id: MessageId, position: Position, due_ms: int) -> ReceivedMessage:
        publish_ms, payload, key, properties, _ = decode_body(body)
        return ReceivedMessage(
            payload, key, properties or {}, message_id, position, due_ms, publish_ms, 0, self._topic, self._subscription
        )

    def _resolve(self, addresses: list[_Address], slots: list[ReceivedMessage | None]) -> None:
        """Fill the slots of markers from the partition logs they point into."""
        by_partition: dict[int, list[_Address]] = {}
        for address in addresses:
            by_partition.setdefault(partition_start(address.due_ms, self._span_ms), []).append(address)
        for start_ms, wanted in by_partition.items():
            partition = self._partitions.get(start_ms)
            if partition is None:
                for address in wanted:
                    self._dangling(address, f"marker points into partition at {start_ms}, which does not exist")
                continue
            wanted.sort(key=_by_target)
            try:
                with self._partitions.lease(partition), partition.environment.read() as raw:
                    self._resolve_in(raw, partition.name, wanted, slots)
            except DamagedStore as error:
                for address in wanted:
                    self._dangling(address, str(error))

    def _resolve_in(
        self, raw: lmdb.Transaction, name: str, wanted: list[_Address], slots: list[ReceivedMessage | None]
    ) -> None:
        cursor = raw.cursor()
        run: Run | None = None
        for address in wanted:
            ledger_id, entry_id = address.ledger_id, address.entry_id
            try:
                if run is None or run.ledger_id != ledger_id or entry_id >= run.limit:
                    run = find_run(cursor, name, ledger_id, entry_id)
                body = run.body(entry_id - run.first_entry) if run is not None else None
                if body is None:
                    self._dangling(address, f"marker points at entry {ledger_id}:{entry_id}, which does not exist")
                    continue
                slots[address.slot] = self._received(
                    body, MessageId(ledger_id, entry_id), address.position, address.due_ms
                )
            except CorruptEntry as error:
                run = None
                self.set_aside(CorruptEntry(error.environment, ledger_id, entry_id, error.reason))
            except ValueError as error:
                self.set_aside(CorruptEntry(name, ledger_id, entry_id, str(error)))

    def _dangling(self, address: _Address, reason: str) -> None:
        self.set_aside(CorruptEntry(self._main.name, address.position.ledger_id, address.position.entry_id, reason))


def _due_entries(run: Run, now_ms: int) -> BitMap:
    """Entries of a run that are due at `now_ms`."""
    return BitMap((np.flatnonzero(run.dues() <= now_ms) + run.first_entry).tolist())


def _by_target(address: _Address) -> tuple[int, int]:
    return address.ledger_id, address.entry_id


class _Batch:
    """Messages gathered in log order, some of them still to be resolved."""

    def __init__(self, reader: MainLogReader) -> None:
        self._reader = reader
        self._slots: list[ReceivedMessage | None] = []
        self._addresses: list[_Address] = []

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, run: Run, wanted: BitMap) -> None:
        """Take the entries `wanted` of a run, read inside the caller's transaction."""
        if not wanted:
            return
        if run.kind == RunKind.MARKERS:
            at = np.frombuffer(wanted.to_array(), dtype=np.uint32) - np.uint32(run.first_entry)
            targets = run.targets()[at].tolist()
            dues = run.dues()[at].tolist()
            for entry_id, target, due_ms in zip(wanted, targets, dues, strict=True):
                position = Position(run.ledger_id, entry_id)
                self._addresses.append(_Address(len(self._slots), position, run.target, target, due_ms))
                self._slots.append(None)
            return
        for entry_id in wanted:
            self._slots.append(self._message(run, entry_id))

    def _message(self, run: Run, entry_id: int) -> ReceivedMessage | None:
        position = Position(run.ledger_id, entry_id)
        index = entry_id - run.first_entry
        try:
            body = run.body(index)
            if body is None:
                raise CorruptEntry(run.environment, run.ledger_id, entry_id, "its body was dropped")
            return self._reader._received(body, position, position, run.due(index))
        except CorruptEntry as error:
            self._reader.set_aside(error)
        except ValueError as error:
            self._reader.set_aside(CorruptEntry(run.environment, run.ledger_id, entry_id, str(error)))
        return None

    def messages(self) -> list[ReceivedMessage]:
        """What could be read, in log order. REQUIRES: the caller is done with the main environment."""
        if self._addresses:
            self._reader._resolve(self._addresses, self._slots)
        return [message for message in self._slots if message is not None]
