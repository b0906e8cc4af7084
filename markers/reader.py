"""Reading a main log: messages as they lie there, markers resolved to the messages they point at.

Markers are resolved in batches, in order of address in their partition log, each run opened once. An entry that cannot
be read is reported, left out, and holds nothing up: its bytes were read and found wrong, or its partition is missing.
What cannot be read for now (no descriptor is left) raises, and is there the next time. An entry whose body was dropped,
by compaction once every subscription had acknowledged it, or by repair, is gone: its position is told, to be
acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from pyroaring import BitMap

from ..partitions.partition import Partition
from ..partitions.partition_set import PartitionSet
from ..partitions.timespan import partition_start
from ..store.codec.run import Run, RunKind, UInt32s
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.errors import CorruptEntry, DamagedStore
from ..store.log.managed_ledger import ManagedLedger
from ..store.log.scan import RunFinder, runs
from ..store.message import ReceivedMessage
from ..store.position import Place, Position, position_at
from .received import MessageMaker


class Unacknowledged(Protocol):
    """What a subscription has not acknowledged (AckSet)."""

    def is_acked(self, position: Position) -> bool: ...

    def unacked(self, ledger_id: int, start: int, limit: int) -> BitMap: ...


_LOOKED_AT_ONCE = 4_096
"""Entries looked at in one go where all before them are gone."""


class _Markers(NamedTuple):
    """Markers that point into one partition log, as columns; a slot is a place in the batch being read."""

    slots: list[int]
    places: list[Place]
    targets: UInt32s
    dues: list[int]

    def one(self, at: int) -> _Markers:
        """The marker at a place of the columns."""
        return _Markers([self.slots[at]], [self.places[at]], self.targets[at : at + 1], [self.dues[at]])

    @classmethod
    def together(cls, pieces: list[_Markers]) -> _Markers:
        """Pieces as one, so that those of many small firings are resolved run by run too."""
        if len(pieces) == 1:
            return pieces[0]
        slots, places, targets, dues = zip(*pieces, strict=True)
        return cls(
            list(chain.from_iterable(slots)),
            list(chain.from_iterable(places)),
            np.concatenate(targets),
            list(chain.from_iterable(dues)),
        )


@dataclass(eq=False, repr=False)
class MainLogReader:
    """Reads one topic's main log for its subscriptions. Thread-safe; holds nothing between calls.

    `gone` is told positions whose messages no longer exist, inside the call that met them.
    """

    main: Environment
    partitions: PartitionSet
    log: ManagedLedger
    topic: str
    subscription: str
    span_ms: int
    quarantine: Callable[[CorruptEntry], object]
    gone: Callable[[list[Position]], object]

    def hidden_before(self, limit: Position, now_ms: int) -> dict[int, BitMap]:
        """Entries before `limit`, by ledger id, that are not visible to `read` at `now_ms`."""
        found: dict[int, BitMap] = {}
        log = self.log.snapshot()
        ledger_id, start = self.log.visible(now_ms).end
        following: int | None = ledger_id
        while following is not None and (following, start) < limit:
            entries = log.entries_of(following) or 0
            end = min(entries, limit.entry_id) if following == limit.ledger_id else entries
            if start < end:
                found[following] = BitMap(range(start, end))
            following, start = log.following(following), 0
        return found

    def read(
        self, start: Position, max_entries: int, skip: Unacknowledged, now_ms: int
    ) -> tuple[list[ReceivedMessage], Position, bool]:
        """Messages from the first position at or after `start` that are due and not acknowledged, in log order.

        At most `max_entries`; also returns the position to go on from, one past the last looked at, and
        whether an unacknowledged message was passed over because it is not due at `now_ms`.
        """
        passed_over, looked_at = False, max_entries
        while True:
            batch, following, over = self._gather(start, looked_at, skip, now_ms)
            messages = batch.messages()
            passed_over |= over
            if messages or not batch.gone:
                break
            start, looked_at = following, max(max_entries, min(looked_at * 4, _LOOKED_AT_ONCE))
        if len(messages) > max_entries:
            following = messages[max_entries].position
            messages = messages[:max_entries]
        return messages, following, passed_over

    def _gather(
        self, start: Position, max_entries: int, skip: Unacknowledged, now_ms: int
    ) -> tuple[_Batch, Position, bool]:
        passed_over = False
        batch = _Batch(self)
        ledger_id, entry_id = start
        log = self.log.visible(now_ms)  # before the transaction begins, which therefore sees all of it
        with self.main.read() as raw:
            while True:
                committed = log.entries_of(ledger_id)
                if committed is not None:
                    for run in runs(raw, self.main.name, ledger_id, entry_id, committed):
                        if isinstance(run, CorruptEntry):
                            self.quarantine(run)
                            continue
                        first = max(run.first_entry, entry_id)
                        limit = min(run.limit, committed)
                        wanted = skip.unacked(ledger_id, first, limit)
                        if run.early and wanted:
                            due = wanted & _due_entries(run, now_ms)
                            passed_over |= len(due) < len(wanted)
                            wanted = due
                        left = max_entries - len(batch)
                        if len(wanted) > left:
                            wanted = wanted[:left]
                            limit = wanted[-1] + 1 if left else first
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
        return batch, Position(ledger_id, entry_id), passed_over

    def read_at(self, positions: Sequence[Position]) -> list[ReceivedMessage]:
        """The messages at `positions`, in log order; those that are gone or unreadable are left out."""
        batch = _Batch(self)
        by_ledger: dict[int, BitMap] = {}
        for ledger_id, entry_id in positions:
            by_ledger.setdefault(ledger_id, BitMap()).add(entry_id)
        with self.main.read() as raw:
            finder = RunFinder(raw, self.main.name)
            for ledger_id in sorted(by_ledger):
                self._collect(finder, batch, ledger_id, by_ledger[ledger_id])
        return batch.messages()

    def _collect(self, finder: RunFinder, batch: _Batch, ledger_id: int, wanted: BitMap) -> None:
        while wanted:
            entry_id = wanted.min()
            try:
                run = finder.find(ledger_id, entry_id)
            except CorruptEntry as error:
                self.quarantine(CorruptEntry(error.environment, ledger_id, entry_id, error.reason))
                run = None
            if run is None:
                wanted.remove(entry_id)
                continue
            here = wanted & BitMap(range(run.first_entry, run.limit))
            batch.add(run, here)
            wanted -= here

    def _resolve(self, by_target: dict[int, list[_Markers]], batch: _Batch) -> None:
        """Fill the slots of markers, given by the ledger they point into, from the partition logs."""
        for target, pieces in by_target.items():
            markers = _Markers.together(pieces)
            start_ms = partition_start(markers.dues[0], self.span_ms)
            partition = self.partitions.get(start_ms)
            if partition is None:
                self._dangling(markers, f"marker points into partition at {start_ms}, which does not exist")
                continue
            try:
                self.partitions.acquire(partition)
            except DamagedStore as error:
                self._dangling(markers, str(error))
                continue
            try:
                self._resolve_intact(partition, target, markers, batch)
            finally:
                self.partitions.release(partition)

    def _resolve_intact(self, partition: Partition, target: int, markers: _Markers, batch: _Batch) -> None:
        """Resolve markers together; one by one where a page is damaged, so that only what lies on it is quarantined.

        A shortage is raised, and nothing is quarantined for it.
        """
        try:
            with partition.environment.read() as raw:
                self._resolve_in(raw, partition.name, target, markers, batch)
        except DamagedStore as error:
            if len(markers.slots) == 1:
                self._dangling(markers, str(error))
                return
            for at in range(len(markers.slots)):
                self._resolve_intact(partition, target, markers.one(at), batch)

    def _resolve_in(self, raw: Reads, name: str, ledger_id: int, markers: _Markers, batch: _Batch) -> None:
        finder = RunFinder(raw, name)
        slots, make = batch.slots, batch.maker.make
        places, dues, at_slots = markers.places, markers.dues, markers.slots
        order = np.argsort(markers.targets, kind="stable")
        before = ledger_id << 32
        run: Run | None = None
        first = limit = 0  # the entries of `run`; none without one
        for at, entry_id in zip(order.tolist(), markers.targets[order].tolist(), strict=True):
            try:
                if entry_id >= limit:
                    run, limit = None, 0  # where the next cannot be read
                    run = finder.find(ledger_id, entry_id)
                    if run is not None:
                        first, limit = run.first_entry, run.limit
                if run is not None:
                    body = run.body_view(entry_id - first)
                    if body is None:
                        batch.gone.append(position_at(places[at]))
                        continue
                else:
                    reason = f"marker points at entry {ledger_id}:{entry_id}, which does not exist"
                    self._quarantined_at(places[at], reason)
                    continue
                slots[at_slots[at]] = make(body, before | entry_id, places[at], dues[at])
            except CorruptEntry as error:
                self.quarantine(CorruptEntry(error.environment, ledger_id, entry_id, error.reason))
            except ValueError as error:
                self.quarantine(CorruptEntry(name, ledger_id, entry_id, str(error)))

    def _dangling(self, markers: _Markers, reason: str) -> None:
        for place in markers.places:
            self._quarantined_at(place, reason)

    def _quarantined_at(self, place: Place, reason: str) -> None:
        """Quarantine a marker."""
        self.quarantine(CorruptEntry(self.main.name, *position_at(place), reason))


def _due_entries(run: Run, now_ms: int) -> BitMap:
    """Entries of a run that are due at `now_ms`."""
    return BitMap((np.flatnonzero(run.dues() <= now_ms) + run.first_entry).tolist())


class _Batch:
    """Messages gathered in log order, some of them still to be resolved."""

    def __init__(self, reader: MainLogReader) -> None:
        self._reader = reader
        self.maker = MessageMaker(reader.topic, reader.subscription)
        self.slots: list[ReceivedMessage | None] = []
        self.gone: list[Position] = []
        """Positions whose messages do not exist any more; complete once `messages` was called."""
        self._markers: dict[int, list[_Markers]] = {}

    def __len__(self) -> int:
        return len(self.slots)

    def add(self, run: Run, wanted: BitMap) -> None:
        """Take the entries `wanted` of a run, read inside the caller's transaction."""
        if not wanted:
            return
        if run.kind == RunKind.MARKERS:
            at = np.frombuffer(wanted.to_array(), dtype=np.uint32) - np.uint32(run.first_entry)
            slots = list(range(len(self.slots), len(self.slots) + len(wanted)))
            before = run.ledger_id << 32
            places: list[Place] = [before | entry_id for entry_id in wanted]
            piece = _Markers(slots, places, run.targets()[at], run.dues()[at].tolist())
            self._markers.setdefault(run.target, []).append(piece)
            self.slots += [None] * len(slots)
            return
        for entry_id in wanted:
            self.slots.append(self._message(run, entry_id))

    def _message(self, run: Run, entry_id: int) -> ReceivedMessage | None:
        place = run.ledger_id << 32 | entry_id
        index = entry_id - run.first_entry
        try:
            body = run.body_view(index)
            if body is None:
                self.gone.append(Position(run.ledger_id, entry_id))
                return None
            return self.maker.make(body, place, place, run.due(index))
        except CorruptEntry as error:
            self._reader.quarantine(error)
        except ValueError as error:
            self._reader.quarantine(CorruptEntry(run.environment, run.ledger_id, entry_id, str(error)))
        return None

    def messages(self) -> list[ReceivedMessage]:
        """What could be read, in log order. REQUIRES: the caller is done with the main environment."""
        if self._markers:
            self._reader._resolve(self._markers, self)
        if self.gone:
            self._reader.gone(self.gone)
        return [message for message in self.slots if message is not None]
