"""Facts that processes told of their work on a store (see working), and the rules that they break.

The rules:

- an acknowledged send is delivered to every subscription, with the payload that was sent;
- no id is given out twice;
- of a batch or a transaction that a crash cut off all is there or nothing;
- nothing is delivered twice without a crash or a nack between, under two ids, or from two positions of a main log;
- what was cancelled is never delivered, and what was rescheduled once, whether or not the answer was heard;
- what was acknowledged durably is never delivered again, nor what was acknowledged before a close;
- each number of a producer is delivered once, though after a crash it was sent again in another batch;
- a topic that was created is there;
- a document is as it was last changed, or as it was being changed;
- a store opens after every crash, `check` finds nothing in it, and nothing lies in staging/ and trash/;
- once everything is acknowledged, no partition is left.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from duelog import DelayedStore
from duelog.markers.lookup import find_partition
from duelog.snapshot.snapshot_format import SnapshotState, inspect_snapshots
from duelog.store.codec.format import PartitionState
from duelog.store.codec.sent_ids import dedup_key_of
from duelog.store.log.scan import RunFinder
from duelog.store.names import TopicName
from tests.disaster.working import DURABLE, START_MS, TRANSACTED

Id = tuple[int, ...]
Listener = tuple[str, str]


@dataclass
class _Together:
    """Changes that are done together: a batch that is sent, or a transaction."""

    sent: Mapping[str, set[str]]
    """Texts by topic."""
    listener: Listener = ("", "")
    acked: set[str] = field(default_factory=set)
    """Texts that the listener acknowledges."""
    again: set[str] = field(default_factory=set)
    """Those of them that came to it afterwards."""
    document: str | None = None
    put: bool | None = None
    """True if opening has found the document as this put it."""


class Told:
    """Everything that was told, and the rules that it broke."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self.hits: Counter[str] = Counter()
        self.now_ms = START_MS
        self.listeners: set[Listener] = set()
        self.sent: dict[str, dict[Id, str]] = defaultdict(dict)
        self._numbers: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
        """By topic and number, due time and text of what a numbered producer was asked to send."""
        self._answered: dict[str, set[int]] = defaultdict(set)
        self._together: list[_Together] = []
        """Each batch and transaction that was begun."""
        self._lost: set[str] = set()
        """Texts that a power cut may have lost."""
        self._unflushed: list[tuple[str, set[str]]] = []
        """Topic and texts of what was sent since the write-ahead log was last flushed, in order."""
        self._unflushed_at_cut: list[tuple[str, set[str]]] = []
        self._cancelled: set[str] = set()
        """Texts that were cancelled, or may have been."""
        self._taken: dict[str, set[Id]] = defaultdict(set)
        """Ids under which nothing may ever be delivered."""
        self._acking: dict[Listener, set[str]] = defaultdict(set)
        self._acked: dict[Listener, set[str]] = defaultdict(set)
        self._sought: set[Listener] = set()
        self._delivered: dict[Listener, dict[str, tuple[Id, Id]]] = defaultdict(dict)
        """By text, id and position."""
        self._came: dict[Listener, set[str]] = defaultdict(set)
        """Texts delivered since the store was opened."""
        self._created: set[str] = set()
        self._documents: dict[str, list[str | None]] = defaultdict(lambda: [None])
        """The values that each may have: as it was last changed, then as it is being changed."""
        self._draining = False
        self._since_flush: set[str] = set()
        """Texts, topics and listeners that changes were about since the write-ahead log was last flushed."""

    def begin(self, *, draining: bool) -> None:
        """A store is opened. draining: all is received and acknowledged durably, so that nothing comes twice."""
        self._came.clear()
        self._draining = draining

    def power_goes(self, *, relaxed: bool) -> None:
        """Every number is in doubt.

        relaxed: so is all that was done since the last flush.
        """
        self._answered.clear()
        if not relaxed:
            return
        self._unflushed_at_cut = list(self._unflushed)
        self._lost = lost = self._since_flush.union(*(texts for _, texts in self._unflushed))
        gone = {id_ for ids in self.sent.values() for id_, text in ids.items() if text in lost}
        for ids in self.sent.values():
            for id_ in gone & ids.keys():
                del ids[id_]
        for ids_taken in self._taken.values():
            ids_taken.difference_update(gone)
        for texts in self._acked.values():
            texts.difference_update(lost)
        self.listeners = {listener for listener in self.listeners if "/".join(listener) not in lost}
        self._created -= lost
        self._delivered.clear()

    def flushed(self) -> None:
        self._unflushed.clear()
        self._since_flush.clear()

    def unanswered(self) -> dict[str, list[tuple[int, int, str]]]:
        """By topic, the numbers of which it is not known whether they are stored, with due time and text."""
        return {
            topic: [(number, *row) for number, row in sorted(numbers.items()) if number not in self._answered[topic]]
            for topic, numbers in self._numbers.items()
        }

    def look_for_missing(self, listeners: set[Listener]) -> None:
        """After a drain: all that was sent has come, or was acknowledged or cancelled before."""
        for listener in listeners:
            topic = listener[0]
            owed = {*self.sent[topic].values(), *(text for _, text in self._numbers[topic].values())}
            missing = owed - self._cancelled - self._acking[listener] - self._came[listener]
            if missing:
                self.troubles.append(f"{listener} never got {len(missing)} acknowledged sends: {sorted(missing)[:5]}")
            excused = self._arrived(listener) | self._acking[listener] | self._cancelled
            excused |= {text for _, text in self._numbers[topic].values()}  # sent again
            lost: set[str] = set()
            for texts in (texts for sent_to, texts in self._unflushed_at_cut if sent_to == topic):
                if lost and texts & self._came[listener] - {text for _, text in self._numbers[topic].values()}:
                    self.troubles.append(f"{listener} got {texts}, and not {lost}, which was sent before")
                lost |= texts - excused
        for together in self._together:
            self._look_for_parts(together, listeners)

    def _arrived(self, listener: Listener) -> set[str]:
        return self._came[listener] | self._delivered[listener].keys()

    def _look_for_parts(self, together: _Together, listeners: set[Listener]) -> None:
        """Find effects of what was done together, and effects that are missing: there must not be both."""
        there, missing = set[str](), set[str]()
        for listener in listeners:
            texts, came = together.sent.get(listener[0], set()), self._arrived(listener)
            there |= texts & came
            missing |= texts - came - self._acking[listener] - self._cancelled
        there |= together.acked - together.again - self._lost
        missing |= together.again
        if together.put is not None:
            (there if together.put else missing).add(f"document {together.document}")
        if there and missing:
            self.troubles.append(f"a part of what was done together: {sorted(there)}, not {sorted(missing)}")

    def take(self, fact: Sequence[Any]) -> None:
        match fact:
            case ["hit", str(point)]:
                self.hits[point] += 1
            case ["clock", int(ms)]:
                self.now_ms = ms
            case ["listen", str(topic), str(name)]:
                if (topic, name) not in self.listeners:
                    self.listeners.add((topic, name))
                    self._since_flush.add(f"{topic}/{name}")
            case ["sending", str(topic), [*texts]]:
                self._together.append(_Together({topic: set(texts)}))
            case ["transacting", [*sent], str(topic), [*acked], str(document)]:
                by_topic = {to: set(texts) for to, texts in sent}
                self._together.append(_Together(by_topic, (topic, DURABLE), set(acked), document=document))
            case ["sent", str(topic), str(), [*rows]]:
                self._unflushed.append((topic, {text for _, _, text in rows}))
                for ledger, entry, text in rows:
                    self._sent(topic, (ledger, entry), text)
            case ["numbering", str(topic), int(first), [*rows]]:
                self._numbers[topic].update(enumerate(map(tuple, rows), first))
            case ["numbered", str(topic), int(first), int(count)]:
                self._answered[topic].update(range(first, first + count))
            case ["got", str(topic), str(name), [*rows]]:
                for ledger, entry, at_ledger, at_entry, text in rows:
                    self._got((topic, name), (ledger, entry), (at_ledger, at_entry), text)
            case ["acking", str(topic), str(name), [*texts]]:
                self._acking[topic, name].update(texts)
            case ["acked", str(topic), str(name), [*texts]]:
                self._acked[topic, name].update(texts)
                self._since_flush.update(texts)
            case ["seeking", str(topic), str(name)]:
                self._sought.add((topic, name))
                self._acked[topic, name].clear()
            case ["cancelling", str(text)]:
                self._cancelled.add(text)
            case ["refused", str(text)]:
                self._cancelled.discard(text)
            case ["cancelled", str(topic), id_, str(text)]:
                self._since_flush.add(text)
                self._took(topic, tuple(id_))
            case ["moved", str(topic), id_, str(text), str(), new]:
                self._since_flush.add(text)
                self._took(topic, tuple(id_))
                self._sent(topic, tuple(new), text)
            case ["replaced", str(topic), id_, str(text), str(), new, str(by)]:
                self._since_flush.update((text, by))
                if id_ is not None:
                    self._took(topic, tuple(id_))
                self._sent(topic, tuple(new), by)
            case ["topics", [*names]] if not self._created <= set(names):
                self.troubles.append(f"the topics {sorted(self._created - set(names))} are gone")
            case ["created", str(name)]:
                self._created.add(name)
                self._since_flush.add(name)
            case ["document", str(key), text]:
                if text not in self._documents[key]:
                    self.troubles.append(f"document {key} is {text!r}, expected one of {self._documents[key]}")
                if key == TRANSACTED:
                    last = next((each for each in reversed(self._together) if each.document is not None), None)
                    if last is not None:
                        last.put = text == last.document
                self._documents[key] = [text]
            case ["changing", str(key), text]:
                self._documents[key].append(text)
            case ["changed", str(key), text]:
                self._documents[key] = [text]
                self.flushed()  # whatever the durability
            case ["close"]:
                for listener in self._acking.keys() - self._sought:  # closing persists what was acknowledged
                    self._acked[listener] |= self._acking[listener]
                self._since_flush.clear()
            case ["left", int(partitions), int(pending)] if partitions or pending:
                self.troubles.append(f"{partitions} partitions with {pending} pending messages are left")
            case ["trouble", str(what)]:
                self.troubles.append(what)

    def _sent(self, topic: str, id_: Id, text: str) -> None:
        before = self.sent[topic].setdefault(id_, text)
        if before != text:
            self.troubles.append(f"{id_} of {topic} was given out for {text!r}, and had been for {before!r}")

    def _took(self, topic: str, id_: Id) -> None:
        self._taken[topic].add(id_)
        for listener, delivered in self._delivered.items():
            if listener[0] == topic and id_ in (under for under, _ in delivered.values()):
                self.troubles.append(f"{id_} was taken back after {listener} had got it")

    def _got(self, listener: Listener, id_: Id, position: Id, text: str) -> None:
        topic = listener[0]
        under, there = self._delivered[listener].setdefault(text, (id_, position))
        sent = self.sent[topic].get(id_, text)
        again = text in self._came[listener] and (self._draining or listener[1] == DURABLE)
        wrong = {
            f"as {under} and as {id_}": under != id_,
            f"from {there} and from {position}": there != position,
            f"as {text!r}, and sent as {sent!r}": sent != text,
            "again after its durable acknowledgement": text in self._acked[listener],
            "and had been taken back": id_ in self._taken[topic],
            "twice while a store was open": again,
        }
        self.troubles += [f"{text} ({id_}) was delivered to {listener} {how}" for how, so in wrong.items() if so]
        self._came[listener].add(text)
        for together in self._together:
            if listener == together.listener and text in together.acked:
                together.again.add(text)


def litter(store: DelayedStore) -> Iterator[str]:
    """Faults of an opened store: leftovers of a crash, damaged snapshots, and findings."""
    for unmade in sorted((store.path / "wal").glob("*.tmp")):
        yield f"wal/{unmade.name} is there after opening"
    with store._engine.upkeep.maintenance.lock:  # the scheduler may be at work already
        for folder in ("staging", "trash"):
            for child in sorted((store.path / folder).iterdir()):
                yield f"{folder}/ holds {child.name} after opening"
        partitions = store._engine.storage.partitions
        vacant = {str(each.path.relative_to(store.path / "partitions")): each.vacant for each in partitions}
        found = {
            f"{directory.name}/{generation.name}"
            for directory in (store.path / "partitions").iterdir()
            for generation in directory.iterdir()
        }
        for name in sorted(found - vacant.keys()):
            yield f"partition {name} is not registered after opening"
        for name in sorted({name for name in vacant if not vacant[name]} - found):
            yield f"partition {name} is missing after opening"
        for partition in partitions:
            if partition.state is PartitionState.DELETING:
                yield f"the deletion of {partition.name} was not finished by opening"
                continue
            with partitions.lease(partition):
                for snapshot in inspect_snapshots(partition.environment, read_parts=True):
                    if snapshot.state is SnapshotState.DAMAGED:
                        yield f"snapshot {snapshot.snapshot_id} of ledger {snapshot.ledger_id}: {snapshot.reason}"
    for finding in store.check(deep=True):
        yield f"check: {finding}"
    yield from lost_keys(store)


def lost_keys(store: DelayedStore) -> Iterator[str]:
    """Pending messages that were sent with a deduplication key, and are not found by it."""
    partitions = store._engine.storage.partitions
    for topic in store.topics():
        for message in topic.scheduled():
            ledger_id, entry_id = message.message_id
            state = store._engine.topics.get(TopicName.parse(topic.name))
            partition = find_partition(partitions, state.topic_id, ledger_id)
            if partition is None:
                continue
            with partitions.lease(partition), partition.environment.read() as raw:
                run = RunFinder(raw, partition.name).find(ledger_id, entry_id)
                body = None if run is None else run.body(entry_id - run.first_entry)
                key = None if body is None else dedup_key_of(bytes(body))
            found = None if key is None else topic.find(key)
            if key is None or (found is not None and found.message_id == message.message_id):
                continue
            if topic.state(message.message_id) == "scheduled":  # the scheduler may have fired it meanwhile
                yield f"{message.message_id} was sent with the key {key!r}, which is of {found}"
