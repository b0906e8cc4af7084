"""Reading a main log: messages as they lie there, markers resolved to the messages they point at.

Markers are resolved in batches, in order of address in their partition log, each run opened once. An entry that cannot
be read is reported, left out, and holds nothing up: its bytes were read and found wrong, or its partition is missing.
What cannot be read for now (no descriptor is left) raises, and is there the next time. Where a partition is away
(partitions/away.py) and the reader does not wait for it, reading ends before its first message. An entry whose body was
dropped, by compaction once every subscription had acknowledged it, or by repair, is gone: its position is told, to be
acknowledged.

`MessageMaker` makes the messages that are handed out from the bodies of their entries: the hottest path of receiving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ..partitions.away import is_rest
from ..partitions.partition import Partition
from ..partitions.partition_set import PartitionSet
from ..partitions.timespan import partition_start
from ..store.codec.body import decode_body, occurrence_of, retry_of
from ..store.codec.run import Run, RunKind, UInt32s
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.errors import CorruptEntry, DamagedStore, DayAway
from ..store.log.managed_ledger import ManagedLedger
from ..store.log.scan import RunFinder, runs
from ..store.position import MessageId, Place, Position, position_at
from ..store.received_messages import Facts, ReceivedMessages

_SMALL_BYTES = 16_384
"""Bodies up to this size are worth a second copy where that saves decoding them."""


class MessageMaker:
    """Makes the messages of one batch, in slots that are reserved before. Not thread-safe.

    Bare bodies (nothing but publish time and payload) of one size that were published together begin with the same
    bytes: what stands before the payload is decoded for the first of them, and compared for the others.
    """

    __slots__ = ("_head", "_head_bytes", "_made", "_payloads", "_publish_ms", "_published", "_size", "limit")

    def __init__(self, topic: str, subscription: str) -> None:
        self._made = ReceivedMessages(topic, subscription)
        self._payloads: list[bytes | None] = self._made.payloads  # type: ignore[assignment]  # None: not made
        self._published = self._made.publish_ms
        self._head = b""
        self._head_bytes = self._publish_ms = 0
        self._size = -1
        """Size of the last bare body that was decoded."""
        self.limit: int | None = None
        """The first slot whose message is away; None: there is none."""

    def __len__(self) -> int:
        return len(self._payloads)

    def reserve(self, places: Sequence[Place], id_places: Sequence[Place], dues: Sequence[int]) -> int:
        """Slots for messages at `places` with these ids and due times; returns the first."""
        made, first, count = self._made, len(self._payloads), len(places)
        made.places += places
        made.id_places += id_places
        made.due_ms += dues
        made.keys += [None] * count
        made.redelivery_counts += [0] * count
        self._published += [0] * count
        self._payloads += [None] * count
        return first

    def place(self, slot: int) -> Place:
        return self._made.places[slot]

    def make(self, slot: int, body: bytes | memoryview) -> None:
        """Make a message of a body whose checksum was checked. Raises ValueError as `decode_body` does."""
        if len(body) == self._size and (data := bytes(body)).startswith(self._head):
            self._payloads[slot] = data[self._head_bytes :]
            self._published[slot] = self._publish_ms
            return
        made = self._made
        publish_ms, payload, key, properties, extra = decode_body(body)
        if extra is not None:
            retries, addressee, failure = retry_of(extra)
            first_try = _first_try(extra["first"]) if "first" in extra else None
            expires_ms = made.due_ms[slot] + _ttl_ms(extra["ttl"]) if "ttl" in extra else None
            facts = Facts(properties, retries, addressee, first_try, expires_ms, occurrence_of(extra), failure)
            made.facts[made.places[slot]] = facts
        elif properties is not None:
            made.facts[made.places[slot]] = Facts(properties)
        elif key is None and len(body) <= _SMALL_BYTES:
            self._size = len(body)
            self._head_bytes = self._size - len(payload)  # the payload is the last of a bare body
            self._head = bytes(body[: self._head_bytes])
            self._publish_ms = publish_ms
        made.keys[slot] = key
        self._published[slot] = publish_ms
        self._payloads[slot] = payload

    def messages(self) -> ReceivedMessages:
        """Those that were made, in slots before `limit`."""
        if self.limit is None and None not in self._payloads:
            return self._made
        return self._made.pick([slot for slot, each in enumerate(self._payloads[: self.limit]) if each is not None])


def _ttl_ms(ttl_ms: object) -> int:
    if type(ttl_ms) is not int:
        raise ValueError(f"time to live {ttl_ms!r} of a body is malformed")
    return ttl_ms


def _first_try(first: object) -> tuple[MessageId, int]:
    if type(first) is not list or [type(part) for part in first] != [int, int, int]:
        raise ValueError(f"retry facts {first!r} of a body are malformed")
    ledger_id, entry_id, first_ms = first
    return MessageId(ledger_id, entry_id), first_ms


class Unacknowledged(Protocol):
    """The unacknowledged positions of a subscription (AckSet)."""

    def is_acked(self, position: Position) -> bool: ...

    def unacked(self, ledger_id: int, start: int, limit: int) -> BitMap: ...


Slots = npt.NDArray[np.intp]

_LOOKED_AT_ONCE = 4_096
"""Entries looked at in one go where all before them are gone."""


class _Markers(NamedTuple):
    """Markers that point into one partition log, as columns; a slot is a place in the batch being read."""

    slots: Slots
    targets: UInt32s
    due_ms: int
    """When one of them is due."""

    def one(self, at: int) -> _Markers:
        return _Markers(self.slots[at : at + 1], self.targets[at : at + 1], self.due_ms)

    def before(self, slot: int) -> _Markers:
        kept = self.slots < slot
        return _Markers(self.slots[kept], self.targets[kept], self.due_ms)

    @classmethod
    def together(cls, pieces: list[_Markers]) -> _Markers:
        """Pieces as one in order of target, so that those of many small firings are resolved run by run too."""
        slots = np.concatenate([piece.slots for piece in pieces])
        targets = np.concatenate([piece.targets for piece in pieces])
        order = np.argsort(targets, kind="stable")
        return cls(slots[order], targets[order], pieces[0].due_ms)


@dataclass(eq=False, repr=False)
class MainLogReader:
    """Reads one topic's main log for its subscriptions. Thread-safe; holds nothing between calls.

    `gone` is told positions whose messages no longer exist, inside the call that met them. `acquire` takes a lease on a
    partition whose messages are read; False: it is away, and they are read another time.
    """

    main: Environment
    partitions: PartitionSet
    log: ManagedLedger
    topic: str
    subscription: str
    span_ms: int
    quarantine: Callable[[CorruptEntry], object]
    gone: Callable[[list[Position]], object]
    acquire: Callable[[Partition], bool]

    def hidden_before(self, limit: Position, now_ms: int) -> dict[int, BitMap]:
        """Entries before `limit`, by ledger id, that are not visible to `read` at `now_ms`."""
        hidden = self.log.snapshot().ranges(self.log.visible(now_ms).end, limit)
        return {ledger_id: BitMap(range(first, end)) for ledger_id, first, end in hidden if first < end}

    def read(
        self, start: Position, max_entries: int, skip: Unacknowledged, now_ms: int
    ) -> tuple[ReceivedMessages, Position, bool]:
        """Messages from the first position at or after `start` that are due and not acknowledged, in log order.

        At most `max_entries`; also returns the position to go on from, one past the last looked at, and
        whether an unacknowledged message was passed over because it is not due at `now_ms`. Messages end before the
        first whose partition is away; without one the position is where that is, or where the log ends.
        """
        passed_over, looked_at = False, max_entries
        while True:
            batch, following, over = self._gather(start, looked_at, skip, now_ms)
            messages = batch.messages()
            passed_over |= over
            if batch.limit is not None:
                following = position_at(batch.place(batch.limit))
            if messages or batch.limit is not None or not batch.gone:
                break
            start, looked_at = following, max(max_entries, min(looked_at * 4, _LOOKED_AT_ONCE))
        if len(messages) > max_entries:
            following = position_at(messages.places[max_entries])
            messages = messages.part(0, max_entries)
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

    def read_at(self, positions: Sequence[Position]) -> tuple[ReceivedMessages, Position | None]:
        """The messages at `positions`, in log order; those that are gone or unreadable are left out.

        They end before the first whose partition is away, which is returned with them.
        """
        batch = _Batch(self)
        by_ledger: dict[int, BitMap] = {}
        for ledger_id, entry_id in positions:
            by_ledger.setdefault(ledger_id, BitMap()).add(entry_id)
        with self.main.read() as raw:
            finder = RunFinder(raw, self.main.name)
            for ledger_id in sorted(by_ledger):
                self._collect(finder, batch, ledger_id, by_ledger[ledger_id])
        messages = batch.messages()
        return messages, None if batch.limit is None else position_at(batch.place(batch.limit))

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
            if batch.limit is not None:  # its first is before those of the targets that follow
                markers = markers.before(batch.limit)
                if not len(markers.slots):
                    continue
            start_ms = partition_start(markers.due_ms, self.span_ms)
            partition = self.partitions.get(start_ms)
            if partition is None:
                self._dangling(markers, batch, f"marker points into partition at {start_ms}, which does not exist")
                continue
            while True:
                try:
                    if not self.acquire(partition):
                        batch.limit = int(markers.slots.min())
                        break
                except DamagedStore as error:
                    self._dangling(markers, batch, str(error))
                    break
                try:
                    self._resolve_intact(partition, target, markers, batch)
                    break
                except DayAway:  # it went behind its lease
                    continue
                finally:
                    self.partitions.release(partition)

    def _resolve_intact(self, partition: Partition, target: int, markers: _Markers, batch: _Batch) -> None:
        """Resolve markers together; one by one where a page is damaged, so that only what lies on it is quarantined.

        A shortage is raised, and nothing is quarantined for it; nor for a day that has gone since its lease: DayAway.
        """
        environment = partition.environment
        if is_rest(environment.path):
            raise DayAway(environment.path, "went as it was read")
        try:
            with environment.read() as raw:
                self._resolve_in(raw, partition.name, target, markers, batch)
        except DamagedStore as error:
            if len(markers.slots) == 1:
                self._dangling(markers, batch, str(error))
                return
            for at in range(len(markers.slots)):
                self._resolve_intact(partition, target, markers.one(at), batch)

    def _resolve_in(self, raw: Reads, name: str, ledger_id: int, markers: _Markers, batch: _Batch) -> None:
        finder = RunFinder(raw, name)
        targets, slots = markers.targets.tolist(), markers.slots.tolist()
        limit = 0
        while limit < len(slots):
            at, entry_id = limit, targets[limit]
            limit += 1
            try:
                run = finder.find(ledger_id, entry_id)
            except CorruptEntry as error:
                self.quarantine(CorruptEntry(error.environment, ledger_id, entry_id, error.reason))
            else:
                if run is None:
                    reason = f"marker points at entry {ledger_id}:{entry_id}, which does not exist"
                    self._quarantined_at(batch.place(slots[at]), reason)
                else:
                    limit = bisect_left(targets, run.limit, limit)
                    first = run.first_entry
                    batch.fill(run, [entry_id - first for entry_id in targets[at:limit]], slots[at:limit])

    def _dangling(self, markers: _Markers, batch: _Batch, reason: str) -> None:
        for slot in np.sort(markers.slots).tolist():
            self._quarantined_at(batch.place(slot), reason)

    def _quarantined_at(self, place: Place, reason: str) -> None:
        self.quarantine(CorruptEntry(self.main.name, *position_at(place), reason))


def _due_entries(run: Run, now_ms: int) -> BitMap:
    return BitMap((np.flatnonzero(run.dues() <= now_ms) + run.first_entry).tolist())


class _Batch(MessageMaker):
    """Messages gathered in log order, some of them still to be resolved; complete once `messages` was called."""

    def __init__(self, reader: MainLogReader) -> None:
        super().__init__(reader.topic, reader.subscription)
        self._reader = reader
        self.gone: list[Position] = []
        """Positions whose messages do not exist any more."""
        self._markers: dict[int, list[_Markers]] = {}

    def add(self, run: Run, wanted: BitMap) -> None:
        """Take the entries `wanted` of a run, read inside the caller's transaction."""
        if not wanted:
            return
        entries = np.frombuffer(wanted.to_array(), dtype=np.uint32)
        at = entries - np.uint32(run.first_entry)
        before = run.ledger_id << 32
        places: list[Place] = [before | entry_id for entry_id in entries.tolist()]
        dues = (run.due_offsets()[at].astype(np.int64) + run.base_ms).tolist()
        if run.kind == RunKind.MARKERS:
            targets = run.targets()[at]
            before = run.target << 32
            first = self.reserve(places, [before | entry_id for entry_id in targets.tolist()], dues)
            piece = _Markers(np.arange(first, first + len(places)), targets, dues[0])
            self._markers.setdefault(run.target, []).append(piece)
        else:
            first = self.reserve(places, places, dues)
            self.fill(run, at.tolist(), range(first, first + len(places)))

    def fill(self, run: Run, indices: Sequence[int], slots: Sequence[int]) -> None:
        """Make the messages of bodies of a run; unreadable ones are quarantined, dropped ones are `gone`."""
        make = self.make
        for index, slot, body in zip(indices, slots, run.body_views(indices), strict=True):
            if body is None:
                self.gone.append(position_at(self.place(slot)))
            elif isinstance(body, CorruptEntry):
                self._reader.quarantine(body)
            else:
                try:
                    make(slot, body)
                except ValueError as error:
                    entry = run.environment, run.ledger_id, run.first_entry + index
                    self._reader.quarantine(CorruptEntry(*entry, str(error)))

    def messages(self) -> ReceivedMessages:
        """Return the readable messages, in log order. REQUIRES: the caller is done with the main environment."""
        if self._markers:
            self._reader._resolve(self._markers, self)
        if self.gone:
            self._reader.gone(self.gone)
        return super().messages()
