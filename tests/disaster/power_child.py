"""The program whose writes are recorded: it works on a store and says what was acknowledged.

Facts go to standard output as one JSON array a line, each with one write(2), which stands in the recording between
the writes and syncs of the store: so for every cut it is known what had been acknowledged before it. Payloads are
unique texts; a message is named by its text.

    ["listen", topic, subscription]          subscribe has returned
    ["sent", topic, environment, [[ledger, entry, text], ...]]    send or send_batch has returned; per environment
    ["numbering", topic, first, [[due, text], ...]]    a numbered producer is about to send these
    ["numbered", topic, first, count]        it has returned
    ["got", topic, subscription, [[at ledger, at entry, text], ...]]
    ["acking", topic, subscription, texts]   about to be acknowledged: from now on it may be gone
    ["acked", topic, subscription, texts]    ack(durable=True) has returned
    ["cancelling", topic, text]              likewise
    ["cancelled", topic, text]               cancel has returned True
    ["moved", topic, environment, [ledger, entry, text]]    reschedule has returned the new id
    ["clock", ms]
    ["hit", point]                           a failpoint of the engine was reached
    ["close"]                                close has returned

Arguments: path of the store, and a JSON object with seed, durability, steps, mutant (see power_mutants).
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, Subscription, Topic
from duelog.cleanup.claims import claims_of_logs, read_claims
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.cleanup.compaction_plan import partition_logs, plan_generation
from duelog.store.codec.format import PartitionState
from duelog.store.config import Durability
from duelog.store.files import failpoints

START_MS = 1_790_000_000_000
SPAN_MS = 60_000
TOPICS = ("mail", "shop/eu/orders")
UNHEARD = "nobody-listens"
DURABLE, LAZY = "durable", "lazy"


def config(durability: Durability, open_partitions: int = 3) -> StoreConfig:
    """Everything tiny, so that a short run rolls, trims, saves, closes and deletes, and maps grow."""
    return StoreConfig(
        partition_ms=SPAN_MS,
        durability=durability,
        bucket_ms=5_000,
        preload_ms=10_000,
        fire_batch=5,
        ack_flush_ms=2_000,
        ledger_max_entries=9,
        ledger_max_age_ms=90_000,
        snapshot_every_entries=6,
        snapshot_part_bytes=1024,
        max_open_partitions=open_partitions,
        map_bytes=1 << 20,
        run_entries=4,
        run_bytes=1024,
        journal_bytes=16 << 10,
    )


LEAD_MS = 3_000
"""How early firing is in the second session."""

PRODUCER = "numbered"


class LeadingClock(ManualClock):
    """A clock that is moved, and lets be written what is due in a moment."""

    lead_ms = 0


def say(*fact: object) -> None:
    """Tell one fact."""
    os.write(1, json.dumps(fact, separators=(",", ":")).encode() + b"\n")


class Worker:
    """Random work on an open store, driven by one thread; now and then four send at the same time."""

    def __init__(self, store: DelayedStore, clock: ManualClock, rng: random.Random, tag: str) -> None:
        self.store = store
        self.clock = clock
        self.random = rng
        self.in_wal = store._engine.config.durability == "commit"
        self.tag = tag
        self.sent = 0
        self.numbers = random.Random(f"numbers {tag}")
        self.pending: list[tuple[Topic, Any, str]] = []
        self.unheard = store.topic(UNHEARD)
        self.topics = dict(zip(TOPICS, map(store.topic, TOPICS), strict=True))
        self.subscriptions: list[tuple[str, Subscription]] = []
        for name, topic in self.topics.items():
            for kind in (DURABLE, LAZY):
                subscription = topic.subscribe(kind, type="exclusive" if kind == DURABLE else "shared")
                say("listen", name, kind)
                self.subscriptions.append((name, subscription))

    def step(self, number: int) -> None:
        """One send, perhaps time passing, some receiving, now and then a message taken back."""
        self.send()
        if self.random.random() < 0.6:
            self.clock.advance(self.random.randrange(1, 25_000))
            say("clock", self.clock.now_ms())
        if self.pending and self.random.random() < 0.3:
            self.take_back(*self.pending.pop(self.random.randrange(len(self.pending))))
        self.receive(*self.random.choice(self.subscriptions))
        if number % 4 == 3:
            self.send_numbers()
        if number % 2 and self.in_wal:  # else it would not be known what the last commit of an environment was
            self.send_together()
        if number % 3 == 2:
            self.compact()
        if number % 6 == 5:
            while sum(self.receive(name, subscription) for name, subscription in self.subscriptions):
                pass

    def send(self) -> None:
        """A message or a batch, with and without delays, over several partitions."""
        name, topic = self.random.choice([*self.topics.items(), (UNHEARD, self.unheard)][: self.random.choice((2, 3))])
        now_ms = self.clock.now_ms()
        messages, environments = [], []
        for _ in range(self.random.choice((1, 1, 2, 5, 12))):
            self.sent += 1
            payload = f"{self.tag}-{self.sent}".encode() + b"." * self.random.choice((0, 0, 20, 900))
            due_ms = now_ms if self.random.random() < 0.25 else now_ms + self.random.randrange(1, 4 * SPAN_MS)
            environments.append("main" if due_ms <= now_ms else str(due_ms // SPAN_MS * SPAN_MS))
            messages.append(Message(payload, deliver_at=due_ms))
        if len(messages) > 1 and self.random.random() < 0.5:
            self.tell_sent(name, topic, environments, messages, topic.send_batch(messages))
            return
        for environment, message in zip(environments, messages, strict=True):
            self.send_from(self.random.choice((1, 2)))  # through the WAL, or not
            id_ = topic.send(message.payload, deliver_at=message.deliver_at)
            self.tell_sent(name, topic, [environment], [message], [id_])

    def send_numbers(self) -> None:
        """A batch of a numbered producer, for the main log and several partitions."""
        name, topic = self.numbers.choice(list(self.topics.items()))
        producer, now_ms = topic.producer(PRODUCER), self.clock.now_ms()
        first = producer.last_sequence_id + 1
        rows = []
        for number in range(first, first + 5):
            due_ms = now_ms + self.numbers.choice((0, 1_000, self.numbers.randrange(1, 4 * SPAN_MS)))
            rows.append((due_ms, f"{name} number {number}"))
        say("numbering", name, first, rows)
        messages = [Message(text.encode(), deliver_at=due_ms) for due_ms, text in rows]
        ids = producer.send_batch(messages, first_sequence_id=first)
        sent: dict[str, list[list[object]]] = {}
        for id_, (due_ms, text) in zip(ids, rows, strict=True):
            assert id_ is not None
            sent.setdefault("main" if due_ms <= now_ms else str(due_ms // SPAN_MS * SPAN_MS), []).append([*id_, text])
        for environment, row in sent.items():
            say("sent", name, environment, row)
        say("numbered", name, first, len(rows))

    def send_from(self, together: int) -> None:
        """From how many sends under way on the next ones go through the WAL, where there is one."""
        wal_writer = self.store._engine.wal_writer
        if wal_writer is not None:
            wal_writer.together = together

    def send_together(self) -> None:
        """Four messages for three partitions, each by a thread of its own: a group of the WAL may have several."""
        self.send_from(1)
        name, topic = self.random.choice(list(self.topics.items()))
        senders = []
        all_there = threading.Barrier(4)
        for span in (2, 3, 4, 2):
            self.sent += 1
            payload = f"{self.tag}-{self.sent}".encode() + b"." * 700
            due_ms = self.clock.now_ms() + span * SPAN_MS
            senders.append(threading.Thread(target=self._send_one, args=(all_there, name, topic, due_ms, payload)))
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

    def _send_one(self, all_there: threading.Barrier, name: str, topic: Topic, due_ms: int, payload: bytes) -> None:
        all_there.wait()
        id_ = topic.send(payload, deliver_at=due_ms)
        self.tell_sent(name, topic, [str(due_ms // SPAN_MS * SPAN_MS)], [Message(payload)], [id_])

    def tell_sent(
        self,
        name: str,
        topic: Topic,
        environments: Sequence[str],
        messages: Sequence[Message],
        ids: Sequence[MessageId],
    ) -> None:
        """Say what has been sent, and where to."""
        rows: dict[str, list[list[object]]] = {}
        for id_, environment, message in zip(ids, environments, messages, strict=True):
            rows.setdefault(environment, []).append([*id_, text_of(message.payload)])
            if environment != "main" and name != UNHEARD:
                self.pending.append((topic, id_, text_of(message.payload)))
        for environment, row in rows.items():
            say("sent", name, environment, row)

    def take_back(self, topic: Topic, id_: Any, text: str) -> None:
        """Cancel a message or give it another time."""
        name = next(name for name, known in self.topics.items() if known is topic)
        if self.random.random() < 0.4:
            say("cancelling", name, text)
            if topic.cancel(id_):
                say("cancelled", name, text)
            return
        due_ms = self.clock.now_ms() + self.random.choice((2, 1_500, self.random.randrange(1, 2 * SPAN_MS)))
        new = topic.reschedule(id_, deliver_at=due_ms)
        if new is not None:
            say("moved", name, str(due_ms // SPAN_MS * SPAN_MS), [*new, text])

    def compact(self) -> None:
        """Finish the next generation of the oldest closed partition; a later tick adopts it."""
        engine = self.store._engine
        for partition in engine.partitions.held(lambda each: each.state is PartitionState.CLOSED):
            with partition.environment.read() as raw:
                logs = partition_logs(raw)
            with engine.main.read() as raw:
                known = read_claims(raw, "main", [partition.start_ms])[partition.start_ms]
                claims = claims_of_logs(raw, known, logs)
            plan = plan_generation(partition.environment, claims)
            hand_over(self.store.path, stage_generation(self.store.path, partition.environment, plan))
            return

    def receive(self, name: str, subscription: Subscription) -> bool:
        """Receive some messages and acknowledge them; whether there were any."""
        messages = subscription.receive(self.random.randrange(1, 9), timeout=0)
        if not messages:
            return False
        texts = [text_of(message.payload) for message in messages]
        rows = [[*message.position, text] for message, text in zip(messages, texts, strict=True)]
        say("got", name, subscription.name, rows)
        say("acking", name, subscription.name, texts)
        if subscription.name == DURABLE:
            subscription.ack(messages, durable=True)
            say("acked", name, subscription.name, texts)
        else:
            self.random.shuffle(messages)
            subscription.ack(messages)
        return True


def text_of(payload: bytes | bytearray | memoryview) -> str:
    """The unique part of a payload."""
    return bytes(payload).rstrip(b".").decode()


def main() -> None:
    """Two sessions on one store: one ends with a close, one with the end of the process."""
    path, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    if options.get("mutant"):
        from tests.disaster import power_mutants  # noqa: PLC0415  # patches this process only, if asked to

        power_mutants.apply(options["mutant"])
    for point in failpoints.POINTS:
        if not point.startswith("commit."):
            failpoints.arm(point, functools.partial(say, "hit", point))
    rng = random.Random(options["seed"])
    clock = LeadingClock(START_MS)
    for session in range(2):
        clock.lead_ms = LEAD_MS * session
        store = DelayedStore.open(path, config(options["durability"], 3 + 5 * session), clock=clock)
        worker = Worker(store, clock, rng, f"{options['seed']}/{session}")
        for number in range(options["steps"] // 2):
            worker.step(number)
        if session == 0:
            store.close()
            say("close")
    os._exit(0)


if __name__ == "__main__":
    main()
