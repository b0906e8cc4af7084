"""Operations of the exception sweep on a store, each with what makes it matter, and the twin that it keeps.

The twin knows of each message from when on it may come and whether it must: a call that raised leaves in doubt what it
was to do, and nothing else.
"""

import copy
import itertools
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from duelog import (
    DelayedStore,
    Failover,
    KeyShared,
    Message,
    MessageId,
    Policies,
    ReceivedMessage,
    StoreConfig,
    Subscription,
)
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.errors import ClosedError, DuelogError, QuotaExceeded, StoreFailed, TransactionConflict
from duelog.sending.wal_segments import CHECKPOINT_MS
from tests.cleanup.compacting import plan_compaction
from tests.conftest import LeadingClock, present

START_MS = 1_790_000_040_000
"""A whole minute."""
SPAN_MS = 60_000
LEAD_MS = 4
"""How early what is due may be written."""
BASE = StoreConfig(partition_ms=SPAN_MS, bucket_ms=1_000, map_bytes=1 << 24)
CONFIG = replace(BASE, run_entries=3)
SHORT_LEDGERS = replace(BASE, ledger_max_entries=2)
SAVING = replace(BASE, snapshot_every_entries=4)
SERVED_S = 30.0
"""How long the store's own thread has to fire what is due."""
_ROUNDS, _ROUNDS_AFTER_ERRORS = 4, 100
"""How often everything is received at the end, and at most while the store's thread still pauses."""


@dataclass
class Twin:
    """Messages that may come, and those that must; they are told apart by their payload."""

    from_ms: dict[bytes, int] = field(default_factory=dict)
    """When each message may come, at the earliest."""
    must: set[bytes] = field(default_factory=set)
    """Messages that have to come."""
    ids: dict[bytes, MessageId] = field(default_factory=dict)
    transactions: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """What each sends, which is the name of its document, too, and what it takes back or acknowledges."""
    by_key: dict[str, set[bytes]] = field(default_factory=dict)
    """By key, those of which each was to take the place of the one before: one of them comes."""

    def never(self, payload: bytes) -> None:
        """It was cancelled, or acknowledged."""
        del self.from_ms[payload]
        self.must.discard(payload)


class Run:
    """One store and its twin."""

    def __init__(self, path: Path, config: StoreConfig, twin: Twin, now_ms: int, *, background: bool = False) -> None:
        self.path = path
        self.config = config
        self.twin = copy.deepcopy(twin)
        self.clock = LeadingClock(now_ms, LEAD_MS)
        self.wrong: list[str] = []
        self.got: list[bytes] = []
        self.unwritten: list[bytes] = []
        self.store = self._open(background)
        self.consumers: dict[str, Subscription] = {}
        self.guests: list[Subscription] = []
        """Consumers of topic "a" that come and go: one whose leaving was broken off is to leave again."""
        self.beside: list[threading.Thread] = []
        self.halt = threading.Event()
        self.reading: DelayedStore | None = None
        """The store open to read, which is to be closed."""
        self.most_pending = 0
        """The quota of topic "a"; 0: it has none."""

    def _open(self, background: bool) -> DelayedStore:
        return DelayedStore.open(self.path, replace(self.config, background=background), clock=self.clock)

    def consume(self) -> None:
        self.consumers = {name: self.store.topic(name).subscribe("s") for name in ("a", "b")}

    def send(self, topic: str, *messages: tuple[bytes, int], columns: bool = False) -> None:
        """Send a message, or several together, each after so many ms; columns: by `send_payloads`."""
        face, payloads = self.store.topic(topic), [payload for payload, _ in messages]
        dues = [self.clock.now_ms() + after_ms for _, after_ms in messages]
        self.twin.from_ms.update(zip(payloads, dues, strict=True))
        if columns:
            ids = list(face.send_payloads(payloads, deliver_at=dues))
        elif len(messages) == 1:
            ids = [face.send(payloads[0], deliver_at=dues[0])]
        else:
            ids = face.send_batch([Message(row, deliver_at=due_ms) for row, due_ms in zip(payloads, dues, strict=True)])
        self.twin.ids.update(zip(payloads, ids, strict=True))
        self.twin.must.update(payloads)

    def send_keyed(self, payload: bytes, after_ms: int, key: str, replaced: bytes | None = None) -> None:
        """Send a message of topic "a" under a key, in place of the one that has it, if one does."""
        due_ms = self.clock.now_ms() + after_ms
        self.twin.from_ms[payload] = due_ms
        if replaced is not None:
            self.twin.by_key.setdefault(key, {replaced}).add(payload)
            self.twin.must.discard(replaced)
        self.store.topic("a").send(payload, deliver_at=due_ms, dedup_key=key, replace=replaced is not None)
        self.twin.must.add(payload)
        if replaced is not None:
            self.twin.never(replaced)

    def cancel(self, topic: str, payload: bytes) -> None:
        """Take a message back; while it is not known whether it was, it may come."""
        must = payload in self.twin.must
        self.twin.must.discard(payload)
        if self.store.topic(topic).cancel(self.twin.ids[payload]):
            self.twin.never(payload)
        elif must:
            self.twin.must.add(payload)

    def reschedule(self, topic: str, payload: bytes, after_ms: int) -> None:
        """Give a message another time; it comes once at one of the two, whatever is raised."""
        before_ms, due_ms = self.twin.from_ms[payload], self.clock.now_ms() + after_ms
        self.twin.from_ms[payload] = min(before_ms, due_ms)
        moved = self.store.topic(topic).reschedule(self.twin.ids[payload], deliver_at=due_ms)
        self.twin.from_ms[payload] = before_ms if moved is None else due_ms

    def ack(self, topic: str, messages: list[ReceivedMessage], *, durable: bool, cumulative: bool = False) -> None:
        """Acknowledge; while it is not known whether they were, and are on disk, they may come again."""
        payloads = [bytes(message.payload) for message in messages]
        self.twin.must.difference_update(payloads)
        if cumulative:
            self.consumers[topic].ack_cumulative(messages[-1], durable=durable)
        else:
            self.consumers[topic].ack(messages, durable=durable)
        self.unwritten += payloads
        if durable:
            self.flushed()

    def transact(self, name: bytes, received: ReceivedMessage, cancelled: bytes, moved: bytes, key: str | None) -> None:
        """Send, acknowledge, cancel, reschedule, and write a document together: all of it, or nothing.

        `received` is of topic "a", the others are of "b".
        """
        twin, before, now_ms = self.twin, copy.deepcopy(self.twin), self.clock.now_ms()
        away = tuple(each for each in (bytes(received.payload), cancelled) if each in twin.from_ms)
        twin.transactions[name] = away
        twin.must.difference_update(away)
        twin.from_ms |= {name: now_ms + 700, moved: min(twin.from_ms[moved], now_ms + 900)}
        try:
            with self.store.transaction() as tx:
                tx.ack(received, consumer=self.consumers["a"])
                tx.cancel("b", twin.ids[cancelled])
                new_id = tx.reschedule("b", twin.ids[moved], deliver_after=0.9)
                tx.send("b", name, deliver_after=0.7, dedup_key=key)
                tx.put_document(name.decode(), b"stored", expected=None)
        except TransactionConflict:
            self.twin = before
            return
        twin.must.add(name)
        twin.ids[moved] = present(new_id.value)
        twin.from_ms[moved] = now_ms + 900
        for payload in away:
            twin.never(payload)

    def flushed(self) -> None:
        for payload in self.unwritten:
            self.twin.never(payload)
        self.unwritten = []

    def every_minute(self, topic: str) -> None:
        """Keep a schedule; its occurrences are told apart by their times."""
        schedule = self.store.topic(topic).every("minutely", cron="* * * * *", payload=b"minute")
        assert schedule.next_due_ms is not None
        name = b"minute %d" % schedule.next_due_ms
        self.twin.from_ms[name] = schedule.next_due_ms
        self.twin.must.add(name)

    def conclude(self, *, reopen: bool) -> None:
        """Go on, or close and open; have all delivered, check, close, and see that nothing comes again."""
        if reopen or self.store.closed or self.stopped():
            self._reopen()
        self._drain()
        if missing := self.twin.must - set(self.got):
            self.wrong.append(f"lost: {sorted(missing)}")
        for key, payloads in self.twin.by_key.items():
            if len(came := payloads.intersection(self.got)) != 1:
                self.wrong.append(f"{sorted(came)} came of {sorted(payloads)}, of key {key}")
        for name, away in self.twin.transactions.items():
            has_document = self.store.documents.get(name.decode()) is not None
            if {name in self.got, has_document, *(each not in self.got for each in away)} == {True, False}:
                self.wrong.append(f"half of the transaction {name!r} was stored; its document: {has_document}")
        if self.most_pending:
            self._fill_quota()
        self._check("at the end")
        self._reopen()
        self._drain()  # what was in doubt may come now, and nothing twice
        self._check("when opened again")
        self.store.close()

    def _fill_quota(self) -> None:
        """With nothing pending the quota takes as many as it says, and no more."""
        self.store.set_policies(Policies(max_pending=self.most_pending), topic="a")
        for at in range(self.most_pending):
            self.send("a", (b"filling %d" % at, 200_000))
        with suppress(QuotaExceeded):
            self.store.topic("a").send(b"too many", deliver_after=200)
            self.wrong.append("the quota counts what is not pending any more, or not what is")

    def stopped(self) -> bool:
        """True if an environment takes nothing more: memory could not be told of a commit, and the store says so."""
        engine = self.store._engine
        opened = [each.environment for each in engine.storage.partitions if each.is_open]
        return any(environment.failed is not None for environment in (engine.storage.main, *opened))

    def _check(self, when: str) -> None:
        found = [f"{finding.code} {finding.address}" for finding in self.store.check()]
        if when == "at the end":  # what was raised while a directory was discarded leaves it to the next opening
            found = [each for each in found if not each.startswith("orphan-directory ")]
        if found:
            self.wrong.append(f"check {when}: {found}")

    def _reopen(self) -> None:
        with suppress(StoreFailed, ClosedError):
            self.store.close()
        self.store = self._open(background=False)
        self.consumers, self.guests = {}, []

    def _drain(self) -> None:
        """Receive and acknowledge everything, at each time that something may come, and an instant before it."""
        times = sorted({due_ms - early for due_ms in self.twin.from_ms.values() for early in (1, 0)})
        last = max([self.clock.now_ms(), *times]) + 50_000
        stopped: DuelogError | None = None
        ends = (last + 50_000 * round for round in range(_ROUNDS_AFTER_ERRORS))
        for at, time_ms in enumerate((*times, *ends)):
            if stopped is None and at >= len(times) + _ROUNDS:
                break
            self.clock.set(max(time_ms, self.clock.now_ms()))
            try:
                self._receive_all()
                stopped = None
            except StoreFailed:
                self._reopen()
                self._receive_all()
            except DuelogError as error:  # told while the store's thread pauses: it goes on later
                stopped = error
                if self.store._engine.waking.scheduler is not None:
                    self.store._engine.waking.scheduler._thread.join(0.05)
        if stopped is not None:
            self.wrong.append(f"the store does not go on: {stopped!r}")

    def _receive_all(self) -> None:
        self.store.tick()
        if letters := list(self.store.dead_letters("a", "s")):
            self.store.requeue_dead_letters(letters)
        while self.guests:
            self.guests[-1].close()
            self.guests.pop()
        for name in ("a", "b"):
            if name in self.consumers:
                self.consumers.pop(name).close()
            with self.store.topic(name).subscribe("s") as consumer:
                if consumer.paused:
                    consumer.resume()
                while messages := consumer.receive(10, timeout=0):
                    for message in messages:
                        self._deliver(message)
                    consumer.ack(messages, durable=True)

    def _deliver(self, message: ReceivedMessage) -> None:
        payload, now_ms = bytes(message.payload), self.store.clock.now_ms()
        if payload == b"minute":
            payload = b"minute %d" % message.due_ms
            self.twin.from_ms.setdefault(payload, message.due_ms)
        if payload in self.got:
            self.wrong.append(f"doubled: {payload!r}")
        elif payload not in self.twin.from_ms:
            self.wrong.append(f"came though it was taken back or acknowledged: {payload!r}")
        elif self.twin.from_ms[payload] > now_ms:
            self.wrong.append(f"early by {self.twin.from_ms[payload] - now_ms} ms: {payload!r}")
        self.got.append(payload)


class Scenario(NamedTuple):
    """An operation: the store before it (made once), what is made ready, what is done, where exceptions are raised."""

    name: str
    config: StoreConfig
    before: Callable[[Run], None]
    ready: Callable[[Run], None]
    act: Callable[[Run], None]
    background: bool = False
    """True if the store has a thread of its own; exceptions are raised in that instead."""
    after: Callable[[Run], None] = lambda _: None
    """Work at the end, whatever was raised."""


def waiting_messages(run: Run) -> None:
    """Messages of two topics in two partitions."""
    for topic in ("a", "b"):
        run.store.topic(topic).subscribe("s").close()
        for at, after_ms in enumerate((1_000, 1_002, 1_500, 30_000, 61_000)):
            run.send(topic, (b"%s%d" % (topic.encode(), at), after_ms))


def fired_messages(run: Run) -> None:
    """The same; four of a topic have fired."""
    waiting_messages(run)
    run.store.tick()
    run.clock.set(START_MS + 31_000)
    run.store.tick()


def loaded(run: Run) -> None:
    """Consumers, and the first partition in memory."""
    run.consume()
    run.store.tick()


def gone_ahead(run: Run) -> None:
    """Firing is some ms early."""
    loaded(run)
    run.clock.set(START_MS + 998)
    run.store.tick()


def nothing(run: Run) -> None:
    """Nothing is to be made ready."""


def send_large(run: Run) -> None:
    """Two batches whose bodies go to a file for each of three logs."""
    for _ in range(2):
        batch, each = len(run.twin.from_ms), itertools.product((0, 30_000, 61_000), range(2))
        run.send("a", *((b"%d.%d.%d" % (batch, after_ms, at) + bytes(20_000), after_ms) for after_ms, at in each))


def large_messages(run: Run) -> None:
    """Large runs of three logs, and whatever else there is."""
    waiting_messages(run)
    run.store._engine.writer().apply_all()  # vacant partitions set no bodies apart
    send_large(run)


def keyed_messages(run: Run) -> None:
    """Pending messages under keys, beside others."""
    waiting_messages(run)
    for at, after_ms in enumerate((1_010, 2_000, 62_000)):
        run.send_keyed(b"key %d" % at, after_ms, f"k{at}")


def compactable(run: Run) -> None:
    """A closed partition of which topic "a" has acknowledged some."""
    waiting_messages(run)
    run.clock.set(START_MS + SPAN_MS)
    run.store.tick()
    run.consume()
    run.ack("a", run.consumers["a"].receive(2), durable=True)
    run.ack("b", run.consumers["b"].receive(9), durable=True)


def crashed(run: Run) -> None:
    """The files of the store as a crash leaves them, with rows of several environments in the log alone."""
    apply_log(run)
    run.send_keyed(b"keyed", 2_000, "k")
    send_large(run)
    run.cancel("a", b"a3")
    run.reschedule("b", b"b3", 500)
    place = run.path.with_suffix(".crashed")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(run.path, place)
    run.store.close()
    run.path = place


def send(run: Run) -> None:
    """To partitions that are there and one that is not, at once, alone and in batches."""
    run.send("a", (b"soon", 1_001))
    run.send("a", (b"new partition", 5 * SPAN_MS))
    run.send("b", (b"at once", 0))
    run.send("new topic", (b"of nobody", 2_000))
    run.twin.never(b"of nobody")
    run.send("b", (b"one", 700), (b"two", 2 * SPAN_MS), (b"three", 0), (b"four", 701))
    run.send("a", (b"five", 900), (b"six", 0), (b"seven", 7 * SPAN_MS), (b"eight", 901), columns=True)


def begin_beside(run: Run) -> None:
    """Three other threads send, each message once, until they are told to end or the store stops."""
    loaded(run)

    def send_beside(number: int) -> None:
        for count in itertools.count():
            name, after_ms = b"beside %d.%d" % (number, count), 500 + count % 3 * SPAN_MS
            run.twin.from_ms[name] = run.clock.now_ms() + after_ms
            try:
                run.store.topic("ab"[number % 2]).send(name, deliver_at=run.twin.from_ms[name])
            except DuelogError:
                return
            run.twin.must.add(name)
            if run.halt.is_set() or count > 200:
                return

    run.beside = [threading.Thread(target=send_beside, args=(number,)) for number in range(3)]
    for thread in run.beside:
        thread.start()


def end_beside(run: Run) -> None:
    """They have come to their end."""
    run.halt.set()
    for thread in run.beside:
        thread.join()


def apply_log(run: Run) -> None:
    """A checkpoint of the write-ahead log, which has rows of the main environment and of several partitions."""
    run.send("a", (b"in a while", 40_000), (b"later", 2 * SPAN_MS), (b"now", 0))
    run.clock.advance(CHECKPOINT_MS)
    run.store.tick()
    run.send("b", (b"behind it", 50_000))


def fire(run: Run) -> None:
    """Ahead of the time, at it, and the whole backlog of a partition."""
    for time_ms in (997, 1_001, 61_000):
        run.clock.set(START_MS + time_ms)
        run.store.tick()


def fire_beside_sends(run: Run) -> None:
    """Messages due before an early firing's time are late entries."""
    run.clock.set(START_MS + 998)
    run.store.tick()
    run.send("a", (b"late", 2))
    run.store.tick()
    run.clock.set(START_MS + 1_001)
    run.store.tick()


def load(run: Run) -> None:
    """From a snapshot and the due column after it, while something is due."""
    run.clock.set(START_MS + 1_100)
    run.store.tick()


def save(run: Run) -> None:
    """Snapshots, as entries come in."""
    for at in range(6):
        run.send("a", (b"saved %d" % at, 2_000 + at))
    run.store.tick()
    run.store.tick()


def resolve(run: Run) -> None:
    """Few, more, and from the other topic."""
    for topic, count in (("a", 1), ("a", 5), ("b", 5)):
        run.consumers[topic].receive(count)


def acknowledge(run: Run) -> None:
    """One out of order, one to be flushed, the rest durably; one is given back."""
    messages = run.consumers["a"].receive(10)
    run.ack("a", messages[1:2], durable=False)
    run.ack("a", messages[0:1], durable=True)
    run.consumers["a"].nack(messages[2:3], delay=0.0)
    run.ack("a", messages[3:], durable=False)
    run.clock.advance(200)
    run.store.tick()
    run.flushed()
    run.ack("b", run.consumers["b"].receive(10)[:2], durable=True, cumulative=True)
    run.consumers["b"].close()


def trim(run: Run) -> None:
    """Ledgers are trimmed, partitions closed, released and deleted."""
    for time_ms in (31_000, 3 * SPAN_MS):
        run.clock.set(START_MS + time_ms)
        run.store.tick()
        for topic in ("a", "b"):
            run.ack(topic, run.consumers[topic].receive(10), durable=True)
        run.store.tick()


def close(run: Run) -> None:
    """With acknowledgements that are not on disk, a snapshot to be written and consumers that hold messages."""
    run.ack("a", run.consumers["a"].receive(2), durable=False)
    run.store.close()
    run.flushed()


def cancel(run: Run) -> None:
    """Pending messages, fired ones, and those of a partition that is not loaded."""
    for payload in (b"a1", b"a0", b"a4", b"a1"):
        if payload in run.twin.from_ms:
            run.cancel("a", payload)
    run.store.tick()


def reschedule(run: Run) -> None:
    """To behind the frontier, to far away, to another partition, and to now."""
    run.reschedule("a", b"a3", 1)
    run.reschedule("a", b"a2", SPAN_MS)
    run.reschedule("b", b"b4", 20)
    run.reschedule("b", b"b3", 0)
    run.store.tick()
    run.clock.advance(2)
    run.store.tick()


def transact(run: Run) -> None:
    """Two transactions, one with a key, and one between them that conflicts: it stores nothing."""
    first, second = run.consumers["a"].receive(2)
    for at in range(4):
        run.send("b", (b"to change %d" % at, 2_000 + 1_000 * at))
    run.transact(b"first", first, b"to change 0", b"to change 1", None)
    run.transact(b"never", first, b"to change 2", b"to change 3", "k")
    run.transact(b"second", second, b"to change 2", b"to change 3", "k")
    run.store.tick()


def by_key(run: Run) -> None:
    """A key is taken by another message twice, once in another partition; a key is cancelled, and one is new."""
    run.send_keyed(b"instead", 3_000, "k0", b"key 0")
    run.send_keyed(b"instead again", 61_500, "k0", b"instead")
    run.send_keyed(b"elsewhere", 1_003, "k2", b"key 2")
    run.send_keyed(b"fresh", 1_004, "new")
    run.twin.must.discard(b"key 1")
    if run.store.topic("a").cancel_key("k1"):
        run.twin.never(b"key 1")
    run.store.tick()


def bury(run: Run) -> None:
    """Dead letters: one by hand, one by its redeliveries, one that is purged; the first is requeued, and dies again."""
    store, consumer = run.store, run.consumers["a"]
    store.set_policies(Policies(max_redeliveries=0), topic="a", subscription="s")
    first, second, third = consumer.receive(3)
    consumer.dead_letter(first, "by hand")
    consumer.nack(second, delay=0)
    run.twin.must.discard(bytes(third.payload))
    consumer.dead_letter(third)
    store.tick()
    consumer.receive(1)
    letters = list(store.dead_letters("a", "s"))
    store.requeue_dead_letters([letter for letter in letters if letter.payload == first.payload])
    store.purge_dead_letters([letter for letter in letters if letter.payload == third.payload])
    run.twin.never(bytes(third.payload))
    store.tick()
    for message in consumer.receive(1):
        consumer.dead_letter(message, "again")


def fill_quota(run: Run) -> None:
    """Sends up to the quota and past it, beside cancelling, rescheduling, keys and firing."""
    run.most_pending = 9
    run.store.set_policies(Policies(max_pending=9), topic="a")
    run.send("a", (b"one", 700))
    run.send("a", (b"two", 701), (b"three", 2 * SPAN_MS))
    run.send_keyed(b"four", 2_000, "k")
    for payload in (b"too many", b"still"):
        with suppress(QuotaExceeded):
            run.twin.from_ms[payload] = START_MS
            run.store.topic("a").send(payload, deliver_after=1)
        run.twin.from_ms.pop(payload)
    run.cancel("a", b"a1")
    run.reschedule("a", b"a2", 40_000)
    run.send_keyed(b"five", 1_000, "k", b"four")
    run.clock.advance(1_600)
    run.store.tick()
    run.send("a", (b"six", 700), (b"seven", 61_000))


def attend(run: Run) -> None:
    """Consumers come and go, of each type; a subscription is made, paused, sought back, and removed."""

    def come(name: str, **how: Any) -> Subscription:
        run.guests.append(topic.subscribe(name, **how))
        return run.guests[-1]

    def go() -> None:
        for guest in run.guests:
            guest.close()
        run.guests.clear()

    run.guests.append(run.consumers.pop("a"))
    go()
    topic = run.store.topic("a")
    one, two = come("s", type="shared"), come("s", type="shared")
    one.receive(2)
    two.pause(run.clock.now_ms() + 1_000)
    one.resume()
    two.receive(1)
    go()
    one, two = (come("s", type="failover", failover=Failover(priority=priority)) for priority in (1, 0))
    two.receive(2)
    go()
    one, two = (come("s", type="key_shared", key_shared=KeyShared()) for _ in range(2))
    one.receive(2)
    two.seek("earliest")
    two.receive(1)
    go()
    come("other", initial_position="latest").receive(1, timeout=0)
    go()
    topic.unsubscribe("other")
    run.guests.append(topic.reader())
    run.guests[0].receive(2)
    go()


def large_life(run: Run) -> None:
    """Large runs fire, are received, and go with their ledgers and their partition."""
    for time_ms in (0, 31_000, 3 * SPAN_MS):
        run.clock.set(START_MS + time_ms)
        run.store.tick()
        for topic in ("a", "b"):
            run.ack(topic, run.consumers[topic].receive(20), durable=True)
        run.store.tick()


def compact(run: Run) -> None:
    """A generation without the bodies that are acknowledged is made, handed over, and adopted; the partition read."""
    partitions = run.store._engine.storage.partitions
    partition = present(partitions.get(START_MS - START_MS % SPAN_MS))
    with partitions.lease(partition):
        plan = plan_compaction(run.store._engine.storage.main, partition)
        hand_over(run.store.path, stage_generation(run.store.path, partition.environment, plan))
    run.store.tick()
    run.consumers["a"].receive(2)


def reopen(run: Run) -> None:
    """A store is opened that a crash left."""
    run.store = run._open(background=False)


def read_beside(run: Run) -> None:
    """A store that a crash left is opened to read; what is asked again after an error is answered in full."""

    def look() -> tuple[list[bytes], list[bytes], str]:
        topic = reading.topic("a")
        waiting = sorted(bytes(message.payload)[:9] for message in topic.scheduled())
        seen = [bytes(message.payload)[:9] for message in topic.subscription("s").peek(20)]
        return waiting, seen, topic.state(run.twin.ids[b"a3"])

    reading = run.reading = DelayedStore.open(run.path, run.config, clock=run.clock, read_only=True)
    try:
        look()
    finally:
        waiting, seen, state = look()
        wanted = {payload[:9] for payload in run.twin.must if payload[:1] != b"b"}
        if missing := wanted - {*waiting, *seen}:
            run.wrong.append(f"not seen by a reader beside: {missing}")
        if state != "cancelled":
            run.wrong.append(f"a cancelled message is told as {state}")
    reading.close()


def end_reading(run: Run) -> None:
    """Close it, if need be once more."""
    if run.reading is not None:
        run.reading.close()


def pause_schedule(run: Run) -> None:
    """A schedule is made, paused, goes on, and is removed."""
    topic = run.store.topic("a")
    run.every_minute("a")
    payload = next(iter(name for name in run.twin.must if name.startswith(b"minute")))
    run.twin.must.discard(payload)
    topic.pause_schedule("minutely")
    run.store.tick()
    topic.resume_schedule("minutely")
    run.store.tick()
    topic.remove_schedule("minutely")
    run.clock.set(START_MS + 2 * SPAN_MS)
    run.store.tick()


def recur(run: Run) -> None:
    """A schedule is made, comes to its first time, and is made anew."""
    run.clock.set(START_MS + SPAN_MS - 3)
    run.store.tick()
    run.every_minute("a")
    run.store.tick()
    run.clock.set(START_MS + SPAN_MS)
    run.store.tick()


def serve(run: Run) -> None:
    """The store's own thread fires what is due, though it may have to try again."""
    seen: set[bytes] = set()
    for time_ms in (1_001, 30_001, 61_001):
        run.clock.set(max(START_MS + time_ms, run.clock.now_ms()))
        wanted = {name for name, from_ms in run.twin.from_ms.items() if from_ms <= START_MS + time_ms}
        scheduler = present(run.store._engine.waking.scheduler)
        for _ in range(int(SERVED_S / 0.002)):
            for consumer in run.consumers.values():
                with suppress(DuelogError):
                    seen.update(bytes(message.payload) for message in consumer.poll(10)[0])
            if wanted <= seen or not scheduler._thread.is_alive() or run.stopped():
                break
            scheduler._thread.join(0.002)
            run.clock.advance(100)  # what failed is tried again after a pause
        if run.stopped():
            return
        if not scheduler._thread.is_alive():
            run.wrong.append("the scheduler has ended")
        elif not wanted <= seen:
            run.wrong.append(f"not served: {sorted(wanted - seen)}")


_ALL = (
    Scenario("send", CONFIG, waiting_messages, loaded, send),
    Scenario("send_large", CONFIG, large_messages, loaded, send_large),
    Scenario("large_life", SHORT_LEDGERS, large_messages, loaded, large_life),
    Scenario("send_beside", CONFIG, waiting_messages, begin_beside, send, after=end_beside),
    Scenario("apply", CONFIG, waiting_messages, loaded, apply_log),
    Scenario("fire", CONFIG, waiting_messages, loaded, fire),
    Scenario("fire_late", CONFIG, waiting_messages, loaded, fire_beside_sends),
    Scenario("load", SAVING, waiting_messages, nothing, load),
    Scenario("save", SAVING, waiting_messages, loaded, save),
    Scenario("resolve", CONFIG, fired_messages, loaded, resolve),
    Scenario("acknowledge", SHORT_LEDGERS, fired_messages, loaded, acknowledge),
    Scenario("trim", SHORT_LEDGERS, fired_messages, loaded, trim),
    Scenario("close", SAVING, fired_messages, loaded, close),
    Scenario("cancel", CONFIG, waiting_messages, gone_ahead, cancel),
    Scenario("reschedule", CONFIG, waiting_messages, gone_ahead, reschedule),
    Scenario("transact", CONFIG, fired_messages, loaded, transact),
    Scenario("by_key", CONFIG, keyed_messages, gone_ahead, by_key),
    Scenario("bury", CONFIG, fired_messages, loaded, bury),
    Scenario("fill_quota", CONFIG, waiting_messages, loaded, fill_quota),
    Scenario("attend", CONFIG, fired_messages, loaded, attend),
    Scenario("compact", CONFIG, compactable, loaded, compact),
    Scenario("reopen", CONFIG, large_messages, crashed, reopen),
    Scenario("read_beside", CONFIG, large_messages, crashed, read_beside, after=end_reading),
    Scenario("recur", CONFIG, waiting_messages, loaded, recur),
    Scenario("pause_schedule", CONFIG, waiting_messages, loaded, pause_schedule),
    Scenario("serve", CONFIG, waiting_messages, Run.consume, serve, background=True),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
