"""Random work on a store, and the facts that it tells: what the kill test kills and a power cut cuts off.

Each fact is told before the next call of the store. Texts are payloads, which are unique; a message is named by its
text, and by its id, which changes when it is rescheduled:

    ["listen", topic, subscription]         subscribe has returned
    ["clock", ms]                           the simulated clock was moved
    ["sending", topic, texts]               about to be sent as a batch: all of them are stored, or none
    ["sent", topic, environment, [[ledger, entry, text], ...]]   send or send_batch has returned; for each environment
    ["numbering", topic, first, [[due, text], ...]]              a numbered producer is about to send these
    ["numbered", topic, first, count]       it has returned: each of them is stored
    ["got", topic, subscription, [[ledger, entry, at ledger, at entry, text], ...]]
    ["acking", topic, subscription, texts]  about to be acknowledged: from now on they may be gone
    ["acked", topic, subscription, texts]   ack(durable=True) has returned
    ["seeking", topic, subscription]        about to go back to the beginning
    ["cancelling", text]                    about to be cancelled
    ["cancelled", topic, [ledger, entry], text]                  it was: never delivered
    ["moved", topic, [ledger, entry], text, environment, new id] it was rescheduled: never delivered under the old id
    ["replaced", topic, old id, text, environment, new id, new text]   another was sent in its place, by their key
    ["refused", text]                       it is too late to cancel or to reschedule it
    ["document", key, text]                 opening has found a document, or none (null)
    ["changing", key, text]                 about to be put, or deleted (null)
    ["changed", key, text]                  it was
    ["transacting", [[topic, texts], ...], topic, texts, text]   about to be done at once: sent, acknowledged (durable),
                                            and the document TRANSACTED put; these are told as above, too
    ["topics", names]                       opening has found these topics
    ["created", name]                       a topic was
    ["left", partitions, pending]           a drain is over
    ["trouble", text]                       what must never be

The programs that work tell these too:

    ["pid", n]                              the first fact of a process
    ["opened"]                              the store is open, what a crash left is finished
    ["hit", point]                          a failpoint was reached; the process may die right after it
    ["close"]                               close has returned
    ["done"]                                the process was not killed
"""

import itertools
import json
import os
import random
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from duelog import (
    DelayedDeliveryPolicies,
    DelayedStore,
    Duplicate,
    ManualClock,
    Message,
    MessageId,
    ReceivedMessage,
    ScheduledMessage,
    StoreConfig,
    Subscription,
    Topic,
)
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.cleanup.compaction_plan import partition_logs, plan_generation
from duelog.cleanup.log_claims import claims_of_logs, read_claims
from duelog.store.codec.format import PartitionState
from duelog.store.errors import DamagedStore
from duelog.store.files import failpoints
from tests.conftest import in_threads

START_MS = 1_790_000_000_000
SPAN_MS = 60_000
TOPICS = ("mail", "shop/eu/orders")
UNHEARD = "nobody-listens"
"""A topic without subscriptions: what it fires is trimmed, and its partitions go all the same."""
DURABLE, LAZY = "durable", "lazy"
"""Subscriptions of each topic: one waits for the disk with every acknowledgement, one never does."""
KEYS = ("one", "two", "three")
"""Deduplication keys, in each topic."""
PRODUCER = "numbered"
DOCUMENTS = ("setting", "shop/eu")
TRANSACTED = "transacted"
"""The document that every transaction puts, and nothing else."""
BEAT, BEAT_S = "beat", 45
"""The schedule of each topic, where more is asked for."""

CONFIG = StoreConfig(
    partition_ms=SPAN_MS,
    bucket_ms=5_000,
    preload_ms=10_000,
    fire_batch=5,
    ack_flush_ms=2_000,
    ledger_max_entries=7,
    ledger_max_age_ms=90_000,
    snapshot_every_entries=6,
    snapshot_part_bytes=1024,
    map_bytes=1 << 20,
    run_entries=4,
    run_bytes=1024,
    wal_bytes=16 << 10,  # twenty small groups, then the next segment is begun
    max_clock_jump_ms=None,
)
"""Everything tiny, so that every run rolls, trims, closes and deletes, and the maps grow."""

POINTS = tuple(point for point in failpoints.POINTS if not point.startswith("away."))
"""The failpoints that a store without a copy reaches; power_tiers has the others."""

LARGE_BYTES = 512
"""Half of a run: with this in place of `write_batch.LARGE_BYTES` about every second batch has bodies in a body file."""

Tell = Callable[..., object]
_saying = threading.Lock()


def say(*fact: object) -> None:
    """Tell the parent one fact: a JSON array in a line, with one write(2), so that no kill takes it back."""
    with _saying:
        os.write(1, json.dumps(fact, separators=(",", ":")).encode() + b"\n")


class Worker:
    """Works on an open store: sends, moves the clock, receives, acknowledges, takes back and compacts, at random."""

    numbering = False
    """True while a numbered producer of this process sends."""

    def __init__(self, store: DelayedStore, clock: ManualClock, tag: str, tell: Tell, *, more: bool = False) -> None:
        """`tag` is the seed, and begins every text. more: short delays, schedules, policies and seeks too."""
        self.store = store
        self.clock = clock
        self.random = random.Random(tag)
        self._puts = random.Random(f"{tag}/puts")
        self._tag = tag
        self._tell = tell
        self._more = more
        self._count = itertools.count(1)
        self._changes = random.Random(f"{tag}/documents")
        self._keys = random.Random(f"{tag}/keys")
        self._transactions = random.Random(f"{tag}/transactions")
        self._recent: list[tuple[str, MessageId, str]] = []
        """Topic, id and text of messages that were sent by this worker, and have not been taken back."""
        self._subscriptions: list[tuple[str, Subscription]] = []
        for name in TOPICS:
            for kind in (DURABLE, LAZY):
                subscription = store.topic(name).subscribe(kind, type="exclusive" if kind == DURABLE else "shared")
                self._subscriptions.append((name, subscription))
                tell("listen", name, kind)
        tell("topics", [topic.name for topic in store.topics()])
        for key in (*DOCUMENTS, TRANSACTED):
            found = store.documents.get(key)
            tell("document", key, None if found is None else found.value.decode())

    def run(self, steps: int, threads: int = 0, *, together: bool = False) -> None:
        """So many steps, with `threads` producers beside it; with `together` four messages are sent at once as well."""
        producers = [threading.Thread(target=self._produce, args=(number, steps)) for number in range(threads)]
        for producer in producers:
            producer.start()
        if self._more:
            self._set_up_more()
        for step in range(steps):
            if self.random.random() < 0.25:
                self._send_new_numbers()
            if not threads or self.random.random() < 0.3:
                self._send(self.random)
            if together and step % 2:
                self._send_together()
            if self.random.random() < 0.6:
                self._move_clock(self.random.randrange(1, 30_000))
            if self._recent and self.random.random() < 0.4:
                self._take_back(*self._recent.pop(self.random.randrange(len(self._recent))))
            self._receive(*self.random.choice(self._subscriptions))
            if self._changes.random() < 0.3:
                self._change_document()
            if self._keys.random() < 0.4:
                self._work_by_key()
            if self._transactions.random() < 0.4:
                self._transact()
            if self._changes.random() < 0.1:
                made = self.store.topic(f"made/empty/{self._changes.randrange(20)}")
                made.create()
                self._tell("created", made.name)
            if self.random.random() < 0.5:
                self._compact()
            if self._more and self.random.random() < 0.2:
                self._seek_back()
            if step % 6 == 5:
                while self._receive_from_all():
                    pass
        for producer in producers:
            producer.join()

    def drain(self) -> None:
        if self._more:
            self._end_schedules()
        for _ in range(10_000):
            received = self._receive_from_all(durable=True)
            result = self.store.tick()
            if received or result.fired:
                continue
            if result.next_due_ms is None or not self.store.partitions():
                break
            self._move_clock(max(0, result.next_due_ms - self.clock.now_ms()))
        self.store.flush()
        stats = self.store.stats()
        self._tell("left", stats.partitions, stats.pending)

    # -- more --------------------------------------------------------------------------------------

    def _set_up_more(self) -> None:
        """A schedule in each topic, which is there already but for the first time, and policies that change."""
        for name in TOPICS:
            self.store.topic(name).every(BEAT, interval=BEAT_S, payload=BEAT.encode())
        tick_ms = self.random.choice((None, 1_000, 7_000))
        self.store.set_policies(DelayedDeliveryPolicies(tick_time_ms=tick_ms), namespace="public/default")

    def _end_schedules(self) -> None:
        """Before a drain, which would not end: each schedule must have its next occurrence waiting."""
        self.store.tick()
        for topic in map(self.store.topic, TOPICS):
            for schedule in topic.schedules() if topic.exists() else ():
                if schedule.next_id is None or topic.state(schedule.next_id) != "scheduled":
                    self._tell("trouble", f"schedule {schedule.name} waits for {schedule.next_id}, which does not")
                topic.remove_schedule(schedule.name)

    def _change_document(self) -> None:
        """Put or delete one by compare-and-set; nothing else changes it meanwhile."""
        key, text = self._changes.choice(DOCUMENTS), self._text().decode() if self._changes.random() < 0.8 else None
        before = self.store.documents.get(key)
        expected = None if before is None else before.version
        self._tell("changing", key, text)
        if text is not None:
            self.store.documents.put(key, text.encode(), expected=expected)
        elif self.store.documents.delete(key, expected=expected) != (before is not None):
            self._tell("trouble", f"deleting {key} does not tell whether it was there")
        self._tell("changed", key, text)

    def _seek_back(self) -> None:
        """A subscription of which nothing is acknowledged durably goes back to the beginning."""
        name, subscription = self.random.choice([row for row in self._subscriptions if row[1].name == LAZY])
        self._tell("seeking", name, LAZY)
        subscription.seek("earliest")

    def _move_clock(self, ms: int) -> None:
        self.clock.advance(ms)
        self._tell("clock", self.clock.now_ms())

    # -- sending -----------------------------------------------------------------------------------

    def _produce(self, number: int, steps: int) -> None:
        try:
            rng = random.Random(f"{self._tag}/{number}")
            for _ in range(steps):
                self._send(rng)
        except Exception:
            self._tell("trouble", traceback.format_exc())

    def _send(self, rng: random.Random) -> None:
        """A message or a batch: late, at once, and to several partitions."""
        name = UNHEARD if rng.random() < 0.15 else rng.choice(TOPICS)
        topic, now_ms = self.store.topic(name), self.clock.now_ms()
        messages = []
        for _ in range(rng.choice((1, 1, 1, 2, 5, 25))):
            when = rng.random()
            due_ms = now_ms + rng.randrange(1, 4 * SPAN_MS)
            if when < 0.3:
                due_ms = now_ms if when < 0.2 else now_ms - rng.randrange(100_000)
            payload = self._text() + b"." * rng.choice((0, 0, 20, 900))
            messages.append(Message(payload, deliver_at=due_ms, key=rng.choice((None, "k"))))
        if len(messages) > 1 and rng.random() < 0.4:
            self._tell("sending", name, [text_of(message) for message in messages])
            self._tell_sent(name, messages, topic.send_batch(messages))
            return
        if self._puts.random() < 0.2:
            self._tell_sent(name, messages, self._put(name, messages))
            return
        for one in messages:
            self._tell_sent(name, [one], [topic.send(one.payload, deliver_at=one.deliver_at, key=one.key)])

    def _put(self, name: str, messages: Sequence[Message], first: int | None = None) -> list[MessageId | None]:
        """Put messages in and wait; the ids, None: a duplicate. `first`: they are numbered from here on."""
        ids: list[MessageId | None] = []
        heard = threading.Semaphore(0)

        def done(results: list[tuple[int, MessageId | Duplicate | Exception]]) -> None:
            for token, outcome in results:
                if isinstance(outcome, Exception) or token != len(ids):
                    self._tell("trouble", f"{token} after {len(ids)}: {outcome!r}")
                ids.append(outcome if isinstance(outcome, MessageId) else None)
                heard.release()

        for token, one in enumerate(messages):
            numbers = None if first is None else (PRODUCER, first + token, first + token)
            self.store.topic(name).put(
                one.payload, deliver_at=one.deliver_at, key=one.key, numbers=numbers, token=token, done=done
            )
        for _ in messages:
            heard.acquire()
        return ids

    def _text(self) -> bytes:
        return f"{self._tag}-{next(self._count)}".encode()

    def _send_together(self) -> None:
        """Four messages for three partitions, each by a thread of its own: a group of the WAL may have several."""
        name, all_there = self.random.choice(TOPICS), threading.Barrier(4)

        def send(message: Message) -> None:
            all_there.wait()
            id_ = self.store.topic(name).send(message.payload, deliver_at=message.deliver_at)
            self._tell_sent(name, [message], [id_])

        dues = [self.clock.now_ms() + span * SPAN_MS for span in (2, 3, 4, 2)]
        messages = [Message(self._text() + b"." * 700, deliver_at=due_ms) for due_ms in dues]
        in_threads(partial(send, message) for message in messages)

    def send_everywhere(self) -> None:
        """Send to the main log and to every partition that is there, in each topic."""
        now_ms = self.clock.now_ms()
        dues = [now_ms, *(max(each.start_ms, now_ms) + 1 for each in list(self.store._engine.storage.partitions))]
        for name in TOPICS:
            messages = [Message(self._text(), deliver_at=due_ms) for due_ms in dues]
            self._tell_sent(name, messages, self.store.topic(name).send_batch(messages))

    def _tell_sent(self, name: str, messages: Sequence[Message], ids: Sequence[MessageId | None]) -> None:
        """Say what has been sent, and to which environments."""
        rows: dict[str, list[tuple[int, int, str]]] = {}
        for id_, message in zip(ids, messages, strict=True):
            assert isinstance(message.deliver_at, int)
            text = text_of(message)
            if id_ is not None:
                rows.setdefault(self._environment(message.deliver_at), []).append((*id_, text))
                if name != UNHEARD and not Worker.numbering:
                    self._recent.append((name, id_, text))
        for environment, sent in rows.items():
            self._tell("sent", name, environment, sent)

    def _environment(self, due_ms: int) -> str:
        return "main" if due_ms <= self.clock.now_ms() else str(due_ms // SPAN_MS * SPAN_MS)

    def _send_new_numbers(self) -> None:
        """A batch of a numbered producer, for the main log and several partitions."""
        name = self.random.choice(TOPICS)
        first = self.store.topic(name).producer(PRODUCER).last_sequence_id + 1
        rows: list[tuple[int, str]] = []
        for number in range(first, first + self.random.choice((2, 5, 8))):
            wait_ms = self.random.choice((0, 1_000, self.random.randrange(1, 4 * SPAN_MS)))
            rows.append((self.clock.now_ms() + wait_ms, f"{name} number {number}"))
        self._send_numbers(name, first, rows)

    def send_again(self, unanswered: Mapping[str, Sequence[tuple[int, int, str]]]) -> None:
        """Send numbers (with due time and text) again, in other batches than before."""
        for name, rows in unanswered.items():
            at = 0
            while at < len(rows):
                few = rows[at : at + self.random.choice((1, 1, 1, 3))]
                together = [row for ahead, row in enumerate(few) if row[0] == few[0][0] + ahead]
                at += len(together)
                self._send_numbers(name, together[0][0], [(due_ms, text) for _, due_ms, text in together])

    def _send_numbers(self, name: str, first: int, rows: Sequence[tuple[int, str]]) -> None:
        self._tell("numbering", name, first, rows)
        messages = [Message(text.encode(), deliver_at=due_ms) for due_ms, text in rows]
        Worker.numbering = True
        if self._puts.random() < 0.5:
            ids = self._put(name, messages, first)
        else:
            ids = self.store.topic(name).producer(PRODUCER).send_batch(messages, first_sequence_id=first)
        self._tell_sent(name, messages, ids)
        Worker.numbering = False
        self._tell("numbered", name, first, len(rows))

    def _work_by_key(self) -> None:
        """Send under a key, replace, cancel or move what is pending under it. No other thread uses keys."""
        name, key = self._keys.choice(TOPICS), self._keys.choice(KEYS)
        topic = self.store.topic(name)
        found = topic.find(key) if topic.exists() else None
        if found is not None:  # so that it is not taken back a second time, by its id
            self._recent = [each for each in self._recent if each[1] != found.message_id]
        old = "" if found is None else text_of(found)
        what = self._keys.choice(("send", "send", "replace", "replace", "cancel", "move"))
        if found is not None and what == "cancel":
            self._tell("cancelling", old)
            if topic.cancel_key(key):
                self._tell("cancelled", name, found.message_id, old)
            else:
                self._tell("refused", old)
        elif found is not None and what == "move":
            self._take_back(name, found.message_id, old)
        else:
            self._send_under_key(topic, key, what == "replace", found)

    def _send_under_key(self, topic: Topic, key: str, replaces: bool, found: ScheduledMessage | None) -> None:
        """Say what has become of it, and of the message whose place it takes."""
        name = next(name for name in TOPICS if self.store.topic(name).name == topic.name)
        old = "" if found is None else text_of(found)
        due_ms = self.clock.now_ms() + self._keys.randrange(1, 4 * SPAN_MS)
        one = Message(self._text(), deliver_at=due_ms)
        if replaces and found is not None:
            self._tell("cancelling", old)
        hold = self._keys.choice((None, 30))
        id_ = topic.send(one.payload, deliver_at=due_ms, dedup_key=key, dedup_for=hold, replace=replaces)
        stored = topic.get(id_)
        if not replaces and (stored is None or text_of(stored) != text_of(one)):
            return  # the key held: nothing was stored
        if replaces and found is not None:
            taken = topic.state(found.message_id) == "cancelled"
            if not taken:
                self._tell("refused", old)
            environment = self._environment(due_ms)
            self._tell("replaced", name, found.message_id if taken else None, old, environment, id_, text_of(one))
        else:
            self._tell_sent(name, [one], [id_])

    # -- what becomes of messages ------------------------------------------------------------------

    def _take_back(self, name: str, id_: MessageId, text: str) -> None:
        topic = self.store.topic(name)
        if self.random.random() < 0.5:
            self._tell("cancelling", text)
            if topic.cancel(id_):
                self._tell("cancelled", name, id_, text)
            else:
                self._tell("refused", text)
            return
        due_ms = self.clock.now_ms() + self.random.choice((0, 2, 1_000, 45_000, 200_000))
        new = topic.reschedule(id_, deliver_at=due_ms)
        if new is None:
            self._tell("refused", text)
        else:
            self._tell("moved", name, id_, text, self._environment(due_ms), new)
            self._recent.append((name, new, text))

    def _transact(self) -> None:
        """At once: acknowledge, send to both topics, take a message back, and put the document."""
        chance, now_ms = self._transactions, self.clock.now_ms()
        name, subscription = chance.choice([row for row in self._subscriptions if row[1].name == DURABLE])
        acked = self._get(name, subscription)
        sends: list[tuple[str, Message]] = []
        for topic in TOPICS:
            for _ in range(chance.choice((1, 1, 2, 6))):
                due_ms = now_ms + chance.choice((0, chance.randrange(1, 4 * SPAN_MS)))
                sends.append((topic, Message(self._text() + b"." * chance.choice((0, 300)), deliver_at=due_ms)))
        texts = [(topic, [text_of(each) for to, each in sends if to == topic]) for topic in TOPICS]
        acked_texts, document = [text_of(each) for each in acked], self._text().decode()
        taken = self._recent.pop(chance.randrange(len(self._recent))) if self._recent else None
        if taken is not None:
            self._tell("cancelling", taken[2])
        self._tell("acking", name, DURABLE, acked_texts)
        self._tell("changing", TRANSACTED, document)
        self._tell("transacting", texts, name, acked_texts, document)
        with self.store.transaction() as transaction:
            transaction.ack(acked)
            ids = [transaction.send(to, each.payload, deliver_at=each.deliver_at) for to, each in sends]
            cancelled = None if taken is None else transaction.cancel(taken[0], taken[1], required=False)
            transaction.put_document(TRANSACTED, document.encode())
        for (to, each), id_ in zip(sends, ids, strict=True):
            self._tell_sent(to, [each], [id_.value])
        self._tell("acked", name, DURABLE, acked_texts)
        self._tell("changed", TRANSACTED, document)
        if taken is not None and cancelled is not None:
            self._tell(*(("cancelled", *taken) if cancelled.value else ("refused", taken[2])))

    def _compact(self) -> None:
        """Finish the next generation of a closed partition, worth it or not; the store adopts it at a later tick."""
        engine = self.store._engine
        with engine.upkeep.maintenance.lock:  # the snapshots of one that is being closed are still removed from it
            closed = [partition for partition in engine.storage.partitions if partition.state is PartitionState.CLOSED]
        if not closed:
            return
        partition = self.random.choice(closed)
        try:
            engine.storage.partitions.acquire(partition)
        except DamagedStore:  # the scheduler has deleted it
            return
        try:
            source = partition.environment
            with source.read() as raw:
                logs = partition_logs(raw)
            with engine.storage.main.read() as raw:
                known = read_claims(raw, "main", [partition.start_ms])[partition.start_ms]
                claims = claims_of_logs(raw, known, logs)
            plan = plan_generation(source, claims)
            hand_over(self.store.path, stage_generation(self.store.path, source, plan))
        except FileNotFoundError:  # the scheduler has adopted a generation made before, and removed this one
            if source.path.exists():
                raise
        finally:
            engine.storage.partitions.release(partition)

    def _receive_from_all(self, *, durable: bool = False) -> int:
        """Receive once from each subscription; how many of them had something."""
        return sum(self._receive(name, subscription, durable=durable) for name, subscription in self._subscriptions)

    def _receive(self, topic: str, subscription: Subscription, *, durable: bool = False) -> bool:
        messages, where = self._get(topic, subscription), (topic, subscription.name)
        if not messages:
            return False
        texts = [text_of(message) for message in messages]
        if subscription.name == DURABLE or durable:
            self._tell("acking", *where, texts)
            subscription.ack(messages, durable=True)
            self._tell("acked", *where, texts)
        elif self.random.random() < 0.1:
            subscription.nack(messages, delay=self.random.choice((0.0, 5.0)))
        else:
            self.random.shuffle(messages)
            self._tell("acking", *where, texts)
            subscription.ack(messages)
        return True

    def _get(self, topic: str, subscription: Subscription) -> list[ReceivedMessage]:
        """Receive a few, if there are some."""
        messages, now_ms = subscription.receive(self.random.randrange(1, 9), timeout=0), self.store.clock.now_ms()
        for message in messages:
            # What went into the main log directly was due then; the clock may have been set back while it was closed.
            if message.due_ms > now_ms and tuple(message.message_id) != tuple(message.position):
                self._tell("trouble", f"{message.message_id} was delivered {message.due_ms - now_ms} ms early")
        rows = [[*each.message_id, *each.position, text_of(each)] for each in messages]
        if rows:
            self._tell("got", topic, subscription.name, rows)
        return messages


def text_of(message: Message | ReceivedMessage | ScheduledMessage) -> str:
    """The unique part of a payload; of an occurrence of a schedule, which is a message of its own, with its time."""
    if isinstance(message, ReceivedMessage) and message.payload == BEAT.encode():
        return f"{BEAT} at {message.due_ms}"
    return bytes(message.payload).rstrip(b".").decode()
