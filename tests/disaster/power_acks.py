"""What a store had acknowledged before a power cut, and whether a store opened after it keeps that.

Acknowledged: every message whose send had returned, once, under an id that is not given out again; that what was
acknowledged durably or cancelled does not come back; that a message handed out before stands where it stood; that each
number of a producer is stored once when all are sent again, one by one, whatever had been stored of their batch.
`durability="relaxed"` may break the guarantees of the last commit to each environment, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from duelog import DelayedStore, DuelogError, ManualClock, Message
from duelog.snapshot.stored import SnapshotState, inspect_snapshots
from duelog.store.codec.format import PartitionState
from tests.disaster.power_child import PRODUCER, SPAN_MS, START_MS, UNHEARD, config, text_of

Listener = tuple[str, str]


class Acknowledged:
    """Everything that the recorded process had said before the cut."""

    def __init__(self, durability: str) -> None:
        self.relaxed = durability == "relaxed"
        self.now_ms = START_MS
        self.listeners: list[Listener] = []
        self.sent: dict[str, set[str]] = {}
        self.ids: dict[tuple[int, int], str] = {}
        self.places: dict[Listener, dict[str, tuple[int, int]]] = {}
        self.maybe_gone: dict[Listener, set[str]] = {}
        self.gone: dict[Listener, set[str]] = {}
        self.maybe_cancelled: set[str] = set()
        self.cancelled: set[str] = set()
        self.numbers: dict[str, dict[int, tuple[int, str]]] = {}
        """By topic and number, due time and text of what a numbered producer was asked to send."""
        self._last: dict[str, set[str]] = {}
        self._new: dict[str, int] = {}

    def take(self, fact: list[Any]) -> None:
        """Note a fact."""
        kind = fact[0]
        if kind == "listen":
            if (fact[1], fact[2]) not in self.listeners:
                self.listeners.append((fact[1], fact[2]))
                self._last["main"] = {"/".join(fact[1:])}
        elif kind == "sent":
            texts = {text for _, _, text in fact[3]}
            if fact[1] != UNHEARD:
                self.sent.setdefault(fact[1], set()).update(texts)
            self.ids.update({(ledger, entry): text for ledger, entry, text in fact[3]})
            self._last[fact[2]] = texts
        elif kind == "moved":
            self.ids[fact[3][0], fact[3][1]] = fact[3][2]
            self._last[fact[2]] = {fact[3][2]}
            self._last["main"] = {fact[3][2]}
        elif kind == "numbering":
            self.numbers.setdefault(fact[1], {}).update(enumerate(map(tuple, fact[3]), fact[2]))
        elif kind == "got":
            places = self.places.setdefault((fact[1], fact[2]), {})
            places.update({text: (ledger, entry) for ledger, entry, text in fact[3]})
        elif kind == "acking":
            self.maybe_gone.setdefault((fact[1], fact[2]), set()).update(fact[3])
        elif kind == "acked":
            self.gone.setdefault((fact[1], fact[2]), set()).update(fact[3])
            self._last["main"] = set(fact[3])
        elif kind == "cancelling":
            self.maybe_cancelled.add(fact[2])
        elif kind == "cancelled":
            self.cancelled.add(fact[2])
            self._last["main"] = {fact[2]}
        elif kind == "clock":
            self.now_ms = fact[1]
        elif kind == "close":
            for listener, texts in self.maybe_gone.items():  # closing persists what was acknowledged
                self.gone.setdefault(listener, set()).update(texts)
            self._last.clear()

    def excused(self, text: str) -> bool:
        """Whether a guarantee about a text may be broken."""
        return self.relaxed and any(text in texts for texts in self._last.values())

    # -- keeping them --------------------------------------------------------------------------------

    def troubles(self, path: Path) -> Iterator[str]:
        """Open what is left, and say every broken guarantee. The store is changed: its messages are received."""
        clock = ManualClock(self.now_ms)
        # Nothing that happens after the cut has to outlive another one, and it need not be done in small pieces.
        settings = replace(config("none"), max_open_partitions=64, fire_batch=5_000, map_bytes=1 << 24)
        try:
            store = DelayedStore.open(path, settings, clock=clock)
        except DuelogError as error:
            yield f"does not open: {type(error).__name__}: {error}"
            return
        try:
            yield from (f"check: {finding}" for finding in store.check(deep=True))
            yield from self._litter(store)
            yield from self._reused(store)
            self._send_again(store)
            clock.advance(5 * SPAN_MS)
            for listener in self.listeners:
                yield from self._listen(store, listener)
            store.close()
        except DuelogError as error:
            yield f"{type(error).__name__}: {error}"

    @staticmethod
    def _litter(store: DelayedStore) -> Iterator[str]:
        if (store.path / "JOURNAL.tmp").exists():
            yield "JOURNAL.tmp is there after opening"
        for folder in ("staging", "trash"):
            for child in (store.path / folder).iterdir():
                yield f"{folder}/ holds {child.name} after opening"
        partitions = store._engine.partitions
        for partition in partitions:
            if partition.state is PartitionState.DELETING:
                yield f"the deletion of {partition.name} was not finished by opening"
                continue
            with partitions.lease(partition):
                for found in inspect_snapshots(partition.environment, read_parts=True):
                    if found.state is SnapshotState.DAMAGED:
                        yield f"snapshot {found.snapshot_id} of ledger {found.ledger_id} is damaged: {found.reason}"

    def _reused(self, store: DelayedStore) -> Iterator[str]:
        """Send to every partition that is there, and see that no id is given out twice."""
        self._new = {}
        for name in {topic for topic, _ in self.listeners}:
            new = [Message(b"new")] + [
                Message(b"new", deliver_at=max(partition.start_ms, self.now_ms) + 1)
                for partition in list(store._engine.partitions)
            ]
            self._new[name] = len(new)
            for id_ in store.topic(name).send_batch(new):
                text = self.ids.get((id_.ledger_id, id_.entry_id))
                if text is not None and not self.excused(text):
                    yield f"{id_} was given out for {text} before the cut, and again"

    def _send_again(self, store: DelayedStore) -> None:
        """Every number is sent again, one by one: from now on each is acknowledged."""
        for name, numbers in self.numbers.items():
            producer = store.topic(name).producer(PRODUCER)
            for number, (due_ms, text) in sorted(numbers.items()):
                producer.send(Message(text.encode(), deliver_at=due_ms), sequence_id=number)
            self.sent.setdefault(name, set()).update(text for _, text in numbers.values())

    def _listen(self, store: DelayedStore, listener: Listener) -> Iterator[str]:
        topic, name = listener
        if not store.topic(topic).exists() or name not in store.topic(topic).subscriptions():
            if not self.excused("/".join(listener)):
                yield f"subscription {listener} is gone"
            return
        subscription = store.topic(topic).subscribe(name)
        places, came, new = self.places.get(listener, {}), set(), 0
        gone = self.gone.get(listener, set())
        while messages := subscription.receive(1000, timeout=0):
            for message in messages:
                text = text_of(message.payload)
                if text == "new":
                    new += 1
                    continue
                if text in came:
                    yield f"{text} was delivered to {listener} twice"
                came.add(text)
                if text in gone and not self.excused(text):
                    yield f"{text} was delivered to {listener} again after its durable acknowledgement"
                if text in self.cancelled and not self.excused(text):
                    yield f"{text} was delivered to {listener}, and had been cancelled"
                place = tuple(message.position)
                if places.get(text, place) != place and not self.relaxed:
                    yield f"{text} was delivered to {listener} from {places[text]} and from {place}"
            subscription.ack(messages)
        if new != self._new[topic]:
            yield f"{listener} gets {new} of {self._new[topic]} messages that were sent after the cut"
        wanted = self.sent.get(topic, set()) - self.maybe_gone.get(listener, set()) - self.maybe_cancelled
        missing = sorted(text for text in wanted - came if not self.excused(text))
        if missing:
            yield f"{listener} never gets {len(missing)} acknowledged sends: {missing[:5]}"
