"""The program that the kill test kills: it works on a store and says after each step what was acknowledged.

Started once as a fork server. Each line on its standard input is one round as JSON; the server, which has
imported everything and opened no store, forks a child that runs the round, waits for it, and says how it
ended. What a child says goes to standard output as one JSON array a line, each with a single write(2), so
that a line that the child wrote is read whatever kills it afterwards:

    ["pid", n]                              the first line of a child
    ["opened"]                              the store is open, what a crash left is finished
    ["hit", point]                          a failpoint was reached; the child may die right after it
    ["clock", ms]                           the simulated clock was moved
    ["sent", topic, [[ledger, entry, payload], ...]]        send or send_batch has returned
    ["numbering", topic, first, [[due, payload], ...]]      a numbered producer is about to send these
    ["numbered", topic, first, count]                       it has returned: each of them is stored
    ["got", topic, subscription, [[ledger, entry, at ledger, at entry, payload], ...]]
    ["acked", topic, subscription, [[ledger, entry], ...]]  ack(durable=True) has returned
    ["taking", topic, [ledger, entry], payload, "cancel" or "move"]   about to be cancelled or rescheduled
    ["taken", topic, [ledger, entry], payload, new id or null, bool]  it was: never delivered under this id
    ["left", partitions, pending]           a drain is over
    ["trouble", text]                       what must never be
    ["done"]                                the child was not killed
    ["exit", status]                        from the server: what waitpid(2) said

Time is an argument: a round is given the time at which its clock begins, and how early firing is.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duelog import (
    DelayedDeliveryPolicies,
    DelayedStore,
    ManualClock,
    Message,
    MessageId,
    ReceivedMessage,
    StoreConfig,
    Subscription,
    Topic,
)
from duelog.cleanup.claims import claims_of_logs, read_claims
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.cleanup.compaction_plan import partition_logs, plan_generation
from duelog.store.codec.format import PartitionState
from duelog.store.errors import DamagedStore
from duelog.store.files import failpoints

SPAN_MS = 60_000
TOPICS = ("mail", "shop/eu/orders")
INLINE_MS = 3_000
"""Where more than the plainest is asked for, shorter delays than this wait in the main log."""

BEAT, BEAT_S = "beat", 45
"""The schedule of each topic, where more is asked for."""

UNHEARD = "nobody-listens"
"""A topic without subscriptions: what it fires is trimmed, and its partitions go all the same."""
DURABLE, LAZY = "durable", "lazy"
"""Subscriptions of each topic: one waits for the disk with every acknowledgement, one never does."""

_saying = threading.Lock()


def config(request: dict[str, Any]) -> StoreConfig:
    """Everything tiny, so that every round rolls, trims, closes and deletes, and the maps grow."""
    return StoreConfig(
        partition_ms=SPAN_MS,
        durability=request.get("durability", "commit"),
        background=request.get("background", False),
        bucket_ms=5_000,
        preload_ms=10_000,
        fire_batch=5,
        ack_flush_ms=2_000,
        ledger_max_entries=7,
        ledger_max_age_ms=90_000,
        snapshot_every_entries=10,
        snapshot_part_bytes=1024,
        max_open_partitions=3 + request["round"] % 2 * 5,  # few; or so many that most sends can have an id reserved
        map_bytes=1 << 20,
        run_entries=4,
        run_bytes=1024,
        journal_bytes=16 << 10,  # sixteen small groups, then it is begun anew
        max_clock_jump_ms=None,
        inline_delay_ms=INLINE_MS if request.get("more") else 0,
    )


def say(*fact: object) -> None:
    """Tell the parent one fact."""
    with _saying:
        os.write(1, json.dumps(fact, separators=(",", ":")).encode() + b"\n")


def arm(point: str | None, count: int, among_numbers: bool) -> None:
    """Have every failpoint say that it was hit, and `point` kill this process the `count`-th time.

    among_numbers: only hits while a numbered producer sends are counted.
    """
    left = [count]

    def hit(name: str) -> None:
        say("hit", name)
        if name == point and (Worker.numbering or not among_numbers):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    for name in failpoints.POINTS:
        failpoints.arm(name, functools.partial(hit, name))


def look_for_litter(store: DelayedStore) -> None:
    """What an opened store must not have: leftovers of a crash, and findings."""
    with store._engine.maintenance.lock:  # the scheduler may be at work already
        for folder in ("staging", "trash"):
            for child in sorted((store.path / folder).iterdir()):
                say("trouble", f"{folder}/ holds {child.name} after opening")
        partitions = store._engine.partitions
        registered = {str(partition.path.relative_to(store.path / "partitions")) for partition in partitions}
        found = {
            f"{directory.name}/{generation.name}"
            for directory in (store.path / "partitions").iterdir()
            for generation in directory.iterdir()
        }
        for name in sorted(registered ^ found):
            say("trouble", f"partition {name} is {'not registered' if name in found else 'missing'} after opening")
        for partition in partitions:
            if partition.state is PartitionState.DELETING:
                say("trouble", f"the deletion of {partition.name} was not finished by opening")
    for finding in store.check(deep=True):
        say("trouble", f"check: {finding}")


class LeadingClock(ManualClock):
    """A clock that is moved, and lets be written what is due in a moment."""

    def __init__(self, now_ms: int, lead_ms: int) -> None:
        super().__init__(now_ms)
        self.lead_ms = lead_ms


class Worker:
    """One round's work on an open store."""

    numbering = False
    """Whether a numbered producer is sending."""

    def __init__(self, store: DelayedStore, clock: ManualClock, request: dict[str, Any]) -> None:
        self.store = store
        self.clock = clock
        self.random = random.Random(f"{request['seed']}/{request['round']}")
        self.tag = f"{request['seed']}/{request['round']}"
        self.aside = random.Random(f"compaction {self.tag}")
        self.sent = 0
        self.recent: list[tuple[str, MessageId, str]] = []
        """Topic, id and payload of messages that were sent in this round, and have not been taken back."""
        self.numbers = random.Random(f"numbers {self.tag}")
        self.following: dict[str, int] = request.get("following", {})
        """By topic, the first number of its producer that was never used."""
        self.topics = [store.topic(name) for name in TOPICS]
        self.wal_writer = store._engine.wal_writer
        self.unheard = store.topic(UNHEARD)
        self.more = bool(request.get("more"))
        self.subscriptions: list[tuple[str, Subscription]] = [
            (name, topic.subscribe(kind, type="exclusive" if kind == DURABLE else "shared"))
            for name, topic in zip(TOPICS, self.topics, strict=True)
            for kind in (DURABLE, LAZY)
        ]

    def run(self, steps: int, threads: int) -> None:
        """Send, move the clock, receive and acknowledge at random; with `threads` producers beside it."""
        seeds = [self.random.random() for _ in range(threads)]
        producers = [
            threading.Thread(target=self._produce, args=(number, seeds[number], steps)) for number in range(threads)
        ]
        for producer in producers:
            producer.start()
        if self.more:
            self._set_up_more()
        for step in range(steps):
            if self.numbers.random() < 0.25:
                self._send_new_numbers()
            if not threads or self.random.random() < 0.3:
                self._send(self.random, self.tag)
            if self.random.random() < 0.6:
                self._move_clock(self.random.randrange(1, 30_000))
            if self.recent and self.random.random() < 0.4:
                self._take_back(*self.recent.pop(self.random.randrange(len(self.recent))))
            self._receive(*self.random.choice(self.subscriptions))
            if self.aside.random() < 0.5:
                self._compact()
            if self.more and self.random.random() < 0.2:
                self._seek_back()
            if step % 6 == 5:
                while self._receive_from_all():
                    pass
        for producer in producers:
            producer.join()

    def drain(self) -> None:
        """Receive and acknowledge everything that there is, however late it is due."""
        if self.more:
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
        say("left", stats.partitions, stats.pending)

    def _set_up_more(self) -> None:
        """A schedule in each topic, which is there already but for the first time, and policies that change."""
        for topic in self.topics:
            topic.every(BEAT, interval=BEAT_S, payload=BEAT.encode())
        tick_ms = self.random.choice((None, 1_000, 7_000))
        self.store.set_policies(DelayedDeliveryPolicies(tick_time_ms=tick_ms), namespace="public/default")

    def _end_schedules(self) -> None:
        """Before a drain, which would not end: each schedule must have its next occurrence waiting."""
        self.store.tick()
        for name, topic in zip(TOPICS, self.topics, strict=True):
            for schedule in topic.schedules() if topic.exists() else ():
                if schedule.next_id is None or topic.state(schedule.next_id) != "scheduled":
                    say("trouble", f"schedule {schedule.name} of {name} waits for {schedule.next_id}, which does not")
                topic.remove_schedule(schedule.name)

    def _seek_back(self) -> None:
        """A subscription of which nothing is acknowledged durably goes back to the beginning."""
        _, subscription = self.random.choice([row for row in self.subscriptions if row[1].name == LAZY])
        subscription.seek("earliest")

    def _move_clock(self, ms: int) -> None:
        self.clock.advance(ms)
        say("clock", self.clock.now_ms())

    def _produce(self, number: int, seed: float, steps: int) -> None:
        try:
            rng = random.Random(seed)
            for _ in range(steps):
                self._send(rng, f"{self.tag}/{number}")
        except Exception:
            say("trouble", traceback.format_exc())

    def _send(self, rng: random.Random, tag: str) -> None:
        topic = self.unheard if rng.random() < 0.15 else rng.choice(self.topics)
        messages = [self._message(rng, tag) for _ in range(rng.choice((1, 1, 1, 2, 5, 25)))]
        if len(messages) > 1 and rng.random() < 0.5:
            self._tell_sent(topic, messages, topic.send_batch(messages))
            return
        for one in messages:
            if self.wal_writer is not None:  # through the WAL, or only beside another producer
                self.wal_writer.together = rng.choice((1, 1, 1, 2))
            id_ = topic.send(one.payload, deliver_at=one.deliver_at, deliver_after=one.deliver_after, key=one.key)
            self._tell_sent(topic, [one], [id_])

    def _tell_sent(self, topic: Topic, messages: Sequence[Message], ids: Sequence[MessageId]) -> None:
        if topic is not self.unheard:
            name = TOPICS[self.topics.index(topic)]
            rows = [(id_, _text(message)) for id_, message in zip(ids, messages, strict=True)]
            say("sent", name, [[*id_, text] for id_, text in rows])
            self.recent.extend((name, id_, text) for id_, text in rows)

    def _send_new_numbers(self) -> None:
        """A batch of a numbered producer, for the main log and several partitions."""
        name = self.numbers.choice(TOPICS)
        first = self.following.get(name, 0)
        rows: list[tuple[int, str]] = []
        for number in range(first, first + self.numbers.choice((2, 5, 8))):
            wait_ms = self.numbers.choice((0, 1_000, self.numbers.randrange(1, 4 * SPAN_MS)))
            rows.append((self.clock.now_ms() + wait_ms, f"{name} number {number}"))
        self.following[name] = first + len(rows)
        self._send_numbers(name, first, rows)

    def send_again(self, unanswered: dict[str, list[tuple[int, int, str]]]) -> None:
        """Send every number again of which it is not known whether it is stored, in other batches than before."""
        for name, rows in unanswered.items():
            at = 0
            while at < len(rows):
                few = rows[at : at + self.numbers.choice((1, 1, 1, 3))]
                together = [row for ahead, row in enumerate(few) if row[0] == few[0][0] + ahead]
                at += len(together)
                self._send_numbers(name, together[0][0], [(due_ms, text) for _, due_ms, text in together])

    def _send_numbers(self, name: str, first: int, rows: list[tuple[int, str]]) -> None:
        say("numbering", name, first, rows)
        messages = [Message(text.encode(), deliver_at=due_ms) for due_ms, text in rows]
        Worker.numbering = True
        ids = self.store.topic(name).producer("numbered").send_batch(messages, first_sequence_id=first)
        Worker.numbering = False
        say("sent", name, [[*id_, text] for id_, (_, text) in zip(ids, rows, strict=True) if id_ is not None])
        say("numbered", name, first, len(rows))

    def _take_back(self, topic_name: str, message_id: MessageId, text: str) -> None:
        topic = self.topics[TOPICS.index(topic_name)]
        if self.random.random() < 0.5:
            say("taking", topic_name, message_id, text, "cancel")
            say("taken", topic_name, message_id, text, None, topic.cancel(message_id))
            return
        say("taking", topic_name, message_id, text, "move")
        after = self.random.choice((0.0, 0.002, 1.0, 45.0, 200.0))
        new = topic.reschedule(message_id, deliver_after=after)
        say("taken", topic_name, message_id, text, new, new is not None)
        if new is not None:
            self.recent.append((topic_name, new, text))

    def _compact(self) -> None:
        """Finish the next generation of a closed partition, worth it or not; the store adopts it at a later tick."""
        engine = self.store._engine
        with engine.maintenance.lock:  # the snapshots of one that is being closed are still removed from it
            closed = [partition for partition in engine.partitions if partition.state is PartitionState.CLOSED]
        if not closed:
            return
        partition = self.aside.choice(closed)
        try:
            engine.partitions.acquire(partition)
        except DamagedStore:  # the scheduler has deleted it
            return
        try:
            source = partition.environment
            with source.read() as raw:
                logs = partition_logs(raw)
            with engine.main.read() as raw:
                known = read_claims(raw, "main", [partition.start_ms])[partition.start_ms]
                claims = claims_of_logs(raw, known, logs)
            plan = plan_generation(source, claims)
            hand_over(self.store.path, stage_generation(self.store.path, source, plan))
        except FileNotFoundError:  # the scheduler has adopted a generation made before, and removed this one
            if source.path.exists():
                raise
        finally:
            engine.partitions.release(partition)

    def _message(self, rng: random.Random, tag: str) -> Message:
        with _saying:
            self.sent += 1
            number = self.sent
        payload = f"{tag}-{number}".encode() + b"." * rng.choice((0, 0, 20, 900))
        key = rng.choice((None, "k"))
        when = rng.random()
        if when < 0.2:
            return Message(payload, key=key)
        if when < 0.3:
            return Message(payload, deliver_at=self.clock.now_ms() - rng.randrange(100_000), key=key)
        return Message(payload, deliver_after=rng.randrange(1, 4 * SPAN_MS) / 1000, key=key)

    def _receive_from_all(self, *, durable: bool = False) -> int:
        """Receive once from each subscription; how many of them had something."""
        return sum(self._receive(name, subscription, durable=durable) for name, subscription in self.subscriptions)

    def _receive(self, topic: str, subscription: Subscription, *, durable: bool = False) -> bool:
        messages = subscription.receive(self.random.randrange(1, 9), timeout=0)
        if not messages:
            return False
        now_ms = self.store.clock.now_ms()
        for message in messages:
            # What went into the main log directly was due then; the clock may have been set back while it was closed.
            if message.due_ms > now_ms and tuple(message.message_id) != tuple(message.position):
                say("trouble", f"{message.message_id} of {topic} was delivered {message.due_ms - now_ms} ms early")
        say("got", topic, subscription.name, [[*m.message_id, *m.position, _text(m)] for m in messages])
        if subscription.name == DURABLE or durable:
            subscription.ack(messages, durable=True)
            say("acked", topic, subscription.name, [list(message.message_id) for message in messages])
        elif self.random.random() < 0.1:
            subscription.nack(messages, delay=self.random.choice((0.0, 5.0)))
        else:
            self.random.shuffle(messages)
            subscription.ack(messages)
        return True


def _text(message: Message | ReceivedMessage) -> str:
    if message.payload == BEAT.encode() and isinstance(message, ReceivedMessage):
        return f"{BEAT} at {message.due_ms}"  # each occurrence is a message of its own, and comes once
    return bytes(message.payload).rstrip(b".").decode()


def run(request: dict[str, Any]) -> None:
    """One round: open, look, work, and close or just end."""
    say("pid", os.getpid())
    clock = LeadingClock(request["now_ms"], request.get("lead_ms", 0))
    if request.get("mutant"):
        sys.path.insert(0, str(Path(__file__).parent))
        import kill_mutants  # type: ignore[import-not-found]  # noqa: PLC0415  # patches this process only, if asked to

        kill_mutants.apply(request["mutant"])
    arm(request.get("point"), request.get("count", 1), request.get("among_numbers", False))
    store = DelayedStore.open(request["path"], config(request), clock=clock)
    look_for_litter(store)
    say("opened")
    worker = Worker(store, clock, request)
    worker.send_again(request.get("unanswered", {}))
    if request.get("drain"):
        worker.drain()
        look_for_litter(store)
    else:
        worker.run(request["steps"], request.get("threads", 0))
    if request.get("close", True):
        store.close()
    say("done")


def serve() -> None:
    """Fork a child for each request."""
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if not child:
            try:
                run(json.loads(line))
            except BaseException:
                say("trouble", traceback.format_exc())
            os._exit(0)
        say("exit", os.waitpid(child, 0)[1])


if __name__ == "__main__":
    serve()
