"""Power cuts amid failing deliveries: counts of attempts, dead letters moved, requeued for later, purged.

    python -m tests.disaster.power_cut power_letters [--states 500] [--mutant letter_apart]

The recorded process sends, gives back, and moves letters about; its facts say what was durable. On each
disk that a cut could have left, every message is in one place: its subscription's backlog, pending, or among the
letters; and what is in the backlog has failed at least as often as was said to be on disk.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from duelog import DelayedStore, ManualClock, Message
from duelog.store.config import SendDurability
from duelog.topics.ack_flusher import AckFlusher
from duelog.topics.topic_state import SubscriptionState
from tests.disaster.power_story import Facts
from tests.disaster.working import CONFIG, START_MS, say

TOPIC, SUBSCRIPTION = "fails", "worker"
SETTINGS: dict[str, Any] = {"max_redeliveries": 1, "run_entries": 4, "ledger_max_entries": 12}
STEPS = 14


def work(path: Path, seed: int, durability: SendDurability) -> None:
    """Two sessions on one store; the first ends with a close, the second with the process."""
    source = random.Random(seed)
    clock = ManualClock(START_MS)
    for session in range(2):
        store = DelayedStore.open(path, replace(CONFIG, durability=durability, **SETTINGS), clock=clock)
        topic = store.topic(TOPIC)
        consumer = topic.subscribe(SUBSCRIPTION, type="shared")
        for step in range(STEPS):
            texts = [f"{session}-{step}-{at}" for at in range(source.randrange(1, 5))]
            topic.send_batch([Message(text.encode(), deliver_after=source.choice((0, 0, 7))) for text in texts])
            say("sent", texts)
            held = consumer.receive(source.randrange(2, 9))
            done = [each for each in held if source.random() < 0.2]
            say("taking", [each.payload.decode() for each in done])
            consumer.ack(done, durable=True)
            say("taken", [each.payload.decode() for each in done])
            failed = [each for each in held if each not in done]
            consumer.nack(failed, delay=0)
            store.flush()
            say("failed", [[each.payload.decode(), each.redelivery_count + 1] for each in failed])
            letters = list(store.dead_letters())
            if letters and step % 2:
                chosen = source.sample(letters, source.randrange(1, len(letters) + 1))
                names = [each.payload.decode() for each in chosen]
                if source.random() < 0.3:
                    say("taking", names)
                    store.purge_dead_letters(chosen)
                    say("taken", names)
                else:
                    say("requeuing", names)
                    store.requeue_dead_letters(chosen, delay=source.choice((0, 5, 40)))
                    say("requeued", names)
            clock.advance(source.randrange(20_000))
            say("clock", clock.now_ms())
            store.tick()
        if session == 0:
            consumer.close(failed=False)
            store.close()
    os._exit(0)


class Told(Facts):
    """Facts before a cut."""

    settings = SETTINGS

    def __init__(self) -> None:
        super().__init__()
        self.sent: set[str] = set()
        self.may_be_gone: set[str] = set()
        self.gone: set[str] = set()
        self.failed: dict[str, int] = {}

    def take(self, fact: list[Any]) -> None:
        match fact:
            case ["sent", texts]:
                self.sent.update(texts)
            case ["taking", texts]:
                self.may_be_gone.update(texts)
            case ["taken", texts]:
                self.gone.update(texts)
            case ["failed", rows]:
                self.failed.update(rows)
            case ["requeuing", texts]:  # their deliveries count from 0
                for text in texts:
                    self.failed.pop(text, None)
            case ["clock", ms]:
                self.now_ms = ms

    def look(self, store: DelayedStore, clock: ManualClock, *, relaxed: bool) -> list[str]:
        found, topic = list[str](), store.topic(TOPIC)
        if not self.sent:
            return found
        backlog = topic.subscription(SUBSCRIPTION).peek(10_000)
        places = Counter(each.payload.decode() for each in backlog)
        places += Counter(each.payload.decode() for each in store.dead_letters())
        places += Counter(each.payload.decode() for each in topic.scheduled())
        for text in self.sent:
            least, most = text not in self.may_be_gone, text not in self.gone
            if not least <= places[text] <= most:
                found.append(f"{text} is in {places[text]} places")
        with topic.subscribe(SUBSCRIPTION, type="shared") as consumer:
            for each in consumer.receive(10_000):
                if each.redelivery_count < self.failed.get(each.payload.decode(), 0):
                    found.append(f"{each.payload!r} has failed more often than {each.redelivery_count} times")
        return found


def letter_apart() -> None:
    """A message is among the letters, or back in its topic, in a transaction before that which takes it away."""
    together = AckFlusher.acknowledge_with

    def apart(self: AckFlusher, entries: Any, moves: Any) -> int:
        self._main.write(lambda transaction: moves(transaction, [each[2] for each in entries]))
        return together(self, entries, lambda transaction, fresh: None)

    setattr(AckFlusher, "acknowledge_with", apart)  # noqa: B010 - what mypy does not follow


def attempts_not_written() -> None:
    """Failed deliveries are counted in memory alone."""
    write = SubscriptionState.write_changes

    def acknowledgements_alone(self: SubscriptionState, transaction: Any, changes: Any, attempts: Any = None) -> None:
        write(self, transaction, changes)

    setattr(SubscriptionState, "write_changes", acknowledgements_alone)  # noqa: B010


MUTANTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (letter_apart, attempts_not_written)}
TOLD = Told
