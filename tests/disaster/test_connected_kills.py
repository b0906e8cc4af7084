"""The process that has a store open, its clients and its workers are killed over and over, each while the others run.

DUELOG_CONNECTED_KILLS says how often. The programs that are killed are in connected_parts.
"""

import os
import random
import signal
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore
from tests.disaster.connected_parts import BEAT, BEAT_S, CONFIG, RETRIES, SUBSCRIPTION, text_of
from tests.disaster.kill_series import Server
from tests.proof import length

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_CONNECTED_KILLS", 10, 300)
MOST_FACTS = 80
"""The most facts that all parts tell between two kills."""
TOPICS = ("t", "first", "last", "poison")
PARTS = {"server": "server", "c1": "client", "c2": "client", "r1": "receiver", "r2": "receiver"}


class Twin:
    """Everything that was told, and what must hold of it. Facts come from as many threads as there are parts."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.troubles: list[object] = []
        self.facts: list[tuple[str, list[Any]]] = []
        """By part. Those of one part are in their order, those of several are not."""
        self.ids: dict[tuple[str, str], str] = {}
        """By topic and text, the id of what was handed out."""

    def take(self, part: str, fact: list[Any]) -> None:
        with self.changed:
            if fact[0] == "trouble":
                self.troubles.append(fact)
            elif fact[0] not in ("pid", "exit"):
                self.facts.append((part, fact))
            self.changed.notify_all()

    def wait_for_facts(self, count: int) -> bool:
        """Wait until so many more were told, or there is trouble; False: they do not come."""
        with self.changed:
            wanted = len(self.facts) + count
            return self.changed.wait_for(lambda: len(self.facts) >= wanted or bool(self.troubles), 60)

    def judge(self, left: set[tuple[str, str]], letters: set[str]) -> str:
        """Look at all facts; figures. left: topic and text of what was received at the end.

        letters: texts of dead letters, which may have had no attempt that began: kills count.
        """
        batches, sent = list[set[str]](), set[str]()
        cancelling, cancelled = set[str](), set[str]()
        attempts_of: dict[tuple[str, str], set[int]] = defaultdict(set)
        """By topic and id, how often it had been handed out before, each time that it was."""
        held: dict[tuple[str, str], tuple[int, int, str]] = {}
        """By part and text: the server that handed it out, or one before; how often it was before; its id."""
        acknowledged, settled = set[str](), dict[str, tuple[int, str]]()
        """settled: what one server handed out, and heard of the acknowledgement: attempts before that, and id."""
        for part, fact in self.facts:
            match fact:
                case ["sending", [*texts]]:
                    batches.append(set(texts))
                case ["sent", [*texts]]:
                    sent.update(texts)
                case ["late", text]:
                    sent.add(text)
                case ["cancelling", text]:
                    cancelling.add(text)
                case ["cancelled", text]:
                    cancelled.add(text)
                case ["got", topic, text, id_, attempts, server, early_ms]:
                    before = self.ids.setdefault((topic, text), id_)
                    assert before == id_ or topic == "poison", (part, fact, before)  # its retries are messages
                    assert early_ms <= 0, (part, fact)
                    assert attempts not in attempts_of[topic, id_], self.about(text)
                    attempts_of[topic, id_].add(attempts)
                    held[part, text] = server, attempts, id_
                case ["acked", text, server]:
                    acknowledged.add(text)
                    if held[part, text][0] == server:
                        settled[text] = held[part, text][1:]
        for text, (attempts, id_) in settled.items():
            assert max(attempts_of["t", id_]) == attempts, self.about(text)
        came = {text for _, text in self.ids}
        assert sent - cancelling - came - letters == set()
        assert (sent & cancelling) - came == set()
        assert cancelled & came == set()
        for batch in batches:
            assert batch <= came or not batch & came
        beats = sorted(int(text.partition("@")[2]) for text in came if text.startswith(BEAT))
        assert beats == list(range(beats[0], beats[-1] + 1, BEAT_S * 1_000)), self.about(BEAT)
        done = {text for topic, text in self.ids.keys() - left if topic == "first"}
        assert done == {text for topic, text in self.ids if topic == "last"}
        return f"{len(self.ids)} messages, {len(acknowledged) - len(settled)} acknowledged over a kill"

    def about(self, text: str) -> str:
        """What was told of a text."""
        return "\n".join(str(row) for row in self.facts if text in str(row[1]))


class Part(threading.Thread):
    """A part that is begun again whenever it has ended, until it is closed."""

    def __init__(self, name: str, path: Path, twin: Twin) -> None:
        super().__init__(name=name)
        self._request = {"part": PARTS[name], "path": str(path)}
        self._twin = twin
        self._forks = Server("tests.disaster.connected_parts")
        self._process = -1
        self._ended = False
        self.start()

    def run(self) -> None:
        rounds = 0
        while not self._ended:
            rounds += 1
            for fact in self._forks.run({**self._request, "name": f"{self.name}.{rounds}"}):
                with self._twin.changed, suppress(ProcessLookupError):  # it has ended already
                    if fact[0] in ("pid", "exit") and self._process >= 0:
                        os.close(self._process)
                        self._process = -1
                    if fact[0] == "pid":
                        self._process = os.pidfd_open(fact[1])
                        if self._ended:
                            signal.pidfd_send_signal(self._process, signal.SIGKILL)
                self._twin.take(f"{self.name}.{rounds}", fact)

    def kill(self) -> bool:
        """Kill it; False: it is not there."""
        with self._twin.changed, suppress(ProcessLookupError):
            if self._process >= 0:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
                return True
        return False

    def close(self) -> None:
        self._ended = True
        self.kill()
        self.join()
        self._forks.close()


def test_nothing_is_lost_doubled_early_or_brought_back_though_each_part_is_killed(places: Path) -> None:
    """Sends by number and key, batches, transactions, tasks, a schedule, cancels: at any kill of server or client.

    What is stored is stored once and comes, or was cancelled and never does; an acknowledgement that its server has
    answered is final; each time that a message comes again its attempts are one more.
    """
    path, chance, twin = places / "store", random.Random(KILLS), Twin()
    with DelayedStore.open(path, CONFIG) as store:
        for topic in TOPICS:
            store.topic(topic).subscribe(SUBSCRIPTION, type="shared").close()
    parts = [Part(name, path, twin) for name in PARTS]
    kills = 0
    while kills < KILLS and not twin.troubles:
        assert twin.wait_for_facts(chance.randrange(1, MOST_FACTS))
        kills += chance.choice([parts[0], *parts]).kill()
    for part in reversed(parts):
        part.close()
    assert twin.troubles == []
    with DelayedStore.open(path, CONFIG) as store:
        left = drain(store, twin)
        letters = {letter.payload.decode(): letter for letter in store.dead_letters()}
        assert list(store.check(deep=True)) == []
    figures = twin.judge(left, set(letters))
    assert all(letter.attempts > RETRIES for letter in letters.values())
    print(f"\n{kills} kills, {figures}, {len(letters)} dead letters")


def drain(store: DelayedStore, twin: Twin) -> set[tuple[str, str]]:
    """Receive what is left, once it is due; topics and texts."""
    left = set[tuple[str, str]]()
    store.topic("t").remove_schedule(BEAT)
    for name in TOPICS:
        topic = store.topic(name)
        with topic.subscribe(SUBSCRIPTION, type="shared") as consumer:
            while (batch := consumer.receive(1_000, timeout=0)) or topic.stats().pending:
                for message in batch or consumer.receive(1_000, timeout=0.1):
                    attempts = message.redelivery_count + message.retries
                    twin.take("drain", ["got", name, text_of(message), str(message.message_id), attempts, 0, 0])
                    left.add((name, text_of(message)))
                    consumer.ack(message)
    return left
