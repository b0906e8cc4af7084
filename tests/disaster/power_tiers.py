"""Power cuts amid days that are given back to the copy, take sends there, go again, are fetched to fire and to be read.

    python -m tests.disaster.power_cut power_tiers [--states 500] [--mutant gone_before_the_rest]

The copy lies beside the recorded directory, and outlives every cut. On each disk that a cut could have left, every
message that was said to be sent, and not said to be cancelled or acknowledged, is delivered once, and none early.
"""

import functools
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from duelog import DelayedStore, ManualClock, Message
from duelog.partitions import relocation
from duelog.replica import tiers
from duelog.store.config import SendDurability
from duelog.store.files import directory, failpoints
from tests.conftest import present
from tests.disaster.power_story import Facts
from tests.disaster.working import CONFIG, SPAN_MS, START_MS, say

POINTS = [point for point in failpoints.POINTS if point.startswith("away.")]
STEPS = 40


def work(path: Path, seed: int, durability: SendDurability) -> None:
    """Two sessions on one store; the first ends with a close, the second with the process."""
    for point in POINTS:
        failpoints.arm(point, functools.partial(say, "hit", point))
    give_back_all()
    source, clock = random.Random(seed), ManualClock(START_MS)
    url = (path.parent.parent / "bucket").as_uri()
    config = replace(CONFIG, durability=durability, replica=url, max_local_bytes=1)
    for session in range(2):
        store = DelayedStore.open(path, config, clock=clock)
        go_on(store, clock, source, str(session), STEPS)
        if session == 0:
            store.close()
    os._exit(0)


def give_back_all() -> None:
    """Have any day go that may, and any rest, with a manifest for it whenever one is wanted."""
    tiers.LEAST_BYTES = tiers.LOOK_MS = tiers.MANIFEST_MS = 0


def go_on(store: DelayedStore, clock: ManualClock, source: random.Random, session: str, steps: int) -> None:
    """Send to days, cancel, acknowledge and let time pass, and say so. session: begins each text."""
    topic = store.topic("t")
    topic.subscribe("s").close()
    for step in range(steps):
        texts = [f"{session}-{step}-{at}" for at in range(source.randrange(1, 6))]
        dues = [clock.now_ms() + source.randrange(1, 6 * SPAN_MS) for _ in texts]
        say("sending", dict(zip(texts, dues, strict=True)))
        ids = topic.send_batch(
            [Message(text.encode(), deliver_at=due_ms) for text, due_ms in zip(texts, dues, strict=True)]
        )
        say("sent", texts)
        if step % 7 == 3:
            say("cancelling", texts[0])
            topic.cancel(ids[0])
            say("cancelled", texts[0])
        if step % 6 == 5:
            with topic.subscribe("s") as consumer:
                messages = consumer.receive(count := source.randrange(1, 8), timeout=0)
                if not messages:
                    store.tick()  # fetches the day that it has got to
                    messages = consumer.receive(count, timeout=0)
                say("acknowledging", taken := [message.payload.decode() for message in messages])
                consumer.ack(messages, durable=True)
                say("acknowledged", taken)
        if step % 3 == 2:
            engine = store._engine
            engine.writer().apply_all()
            present(engine.shipping).make_manifest()
            present(engine.shipping).step()
        if step % 8 == 7:
            clock.advance(SPAN_MS)
            say("clock", clock.now_ms())
        store.tick()


class Told(Facts):
    """The messages that were sent, with their due times, and those that are taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"partition_ms": SPAN_MS}
        self.due: dict[str, int] = {}
        self.sent: set[str] = set()
        self.removing: set[str] = set()
        self.removed: set[str] = set()
        """Cancelled, or acknowledged."""

    def take(self, fact: list[Any]) -> None:
        match fact:
            case ["sending", dues]:
                self.due |= dues
            case ["sent", texts]:
                self.sent.update(texts)
            case ["cancelling", text]:
                self.removing.add(text)
            case ["cancelled", text]:
                self.removed.add(text)
            case ["acknowledging", texts]:
                self.removing.update(texts)
            case ["acknowledged", texts]:
                self.removed.update(texts)
            case ["clock", ms]:
                self.now_ms = ms

    def look(self, store: DelayedStore, clock: ManualClock, *, relaxed: bool) -> list[str]:
        found, got, topic = list[str](), Counter[str](), store.topic("t")
        if not self.sent:
            return found
        with topic.subscribe("s") as consumer:
            for _ in range(8):
                store.tick()
                while messages := consumer.receive(10_000, timeout=0):
                    consumer.ack(messages)
                    got.update(message.payload.decode() for message in messages)
                    found += [f"{each.payload!r} is early" for each in messages if each.due_ms > clock.now_ms()]
                    found += [f"{each.payload!r} has another due time" for each in messages
                              if each.due_ms != self.due.get(each.payload.decode())]  # fmt: skip
                clock.advance(SPAN_MS)
        for text in self.due:
            least, most = text in self.sent - self.removing and not relaxed, text not in self.removed
            if not least <= got[text] <= most:
                found.append(f"{text} was delivered {got[text]} times")
        return found


def gone_before_the_rest() -> None:
    """The directory of a generation goes before that of the rest has its name."""
    moves: list[tuple[Path, Path]] = []

    def later(source: Path, target: Path) -> None:
        if target.name.startswith("a") and not list(target.parent.glob("a*")):
            moves.append((source, target))
        else:
            directory.move(source, target)

    def first(store: Path, before: Path) -> None:
        directory.move_to_trash(store, before)
        directory.move(*moves.pop())

    setattr(relocation, "move", later)  # noqa: B010 - what mypy does not follow
    setattr(relocation, "move_to_trash", first)  # noqa: B010


MUTANTS: dict[str, Callable[[], None]] = {"gone_before_the_rest": gone_before_the_rest}
TOLD = Told
