"""Parts of a connected store (connected_parts), begun again by threads, and the twin that judges what they told."""

import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from duelog import DelayedStore
from tests.disaster.connected_parts import BEAT, BEAT_S, CONFIG, HELD, RETRIES, SUBSCRIPTION, text_of
from tests.disaster.kill_series import Server

TOPICS = ("t", "first", "last", "poison", HELD)


class Twin:
    """Everything that was told, and what must hold of it. A context manager that ends the parts at its own end.

    Facts come from as many threads as there are parts.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.troubles: list[object] = []
        self.facts: list[tuple[str, list[Any]]] = []
        """By part. Those of one part are in their order, those of several are not."""
        self.ids: dict[tuple[str, str], str] = {}
        """By topic and text, the id of what was handed out."""
        self.parts: list[Part] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self.parts:
            self.parts.pop().close()

    def take(self, part: str, fact: list[Any]) -> None:
        with self.changed:
            if fact[0] == "trouble":
                self.troubles.append(fact)
            elif fact[0] not in ("pid", "exit"):
                self.facts.append((part, fact))
            self.changed.notify_all()

    def wait_for_facts(
        self, count: int, wanted: Callable[[str, list[Any]], bool] = lambda part, fact: True, since: int | None = None
    ) -> bool:
        """Wait until so many more were told that are wanted, or there is trouble; False: they do not come.

        since: how many facts there were before; None: as many as now.
        """
        with self.changed:
            seen, found, deadline = len(self.facts) if since is None else since, 0, time.monotonic() + 300
            while True:
                found += sum(wanted(*row) for row in self.facts[seen:])
                seen = len(self.facts)
                if found >= count or self.troubles:
                    return True
                if time.monotonic() > deadline:
                    return False
                self.changed.wait(1)

    def judge(self, left: set[tuple[str, str]], letters: set[str]) -> str:
        """Look at all facts; figures. left: topic and text of what was received at the end.

        letters: texts of dead letters, which may have had no attempt that began: kills count.
        """
        batches, sent = list[set[str]](), set[str]()
        cancelling, cancelled = set[str](), set[str]()
        attempts_of: dict[tuple[str, str], set[int]] = defaultdict(set)
        """By topic and id, how often it had been handed out before, each time that it was."""
        held: dict[tuple[str, str], tuple[str, int, str]] = {}
        """By part and text: the connection that it came by, or one before; how often it came before; its id."""
        acknowledged, settled = set[str](), dict[str, tuple[int, str]]()
        """settled: what came and was acknowledged by one connection: how often it came before, and its id."""
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
                case ["got", topic, text, id_, attempts, connection, early_ms]:
                    before = self.ids.setdefault((topic, text), id_)
                    assert before == id_ or topic == "poison", (part, fact, before)  # its retries are messages
                    assert early_ms <= 0, (part, fact)
                    assert attempts not in attempts_of[topic, id_], self.about(text)
                    attempts_of[topic, id_].add(attempts)
                    held[part, text] = connection, attempts, id_
                case ["acked", text, connection]:
                    acknowledged.add(text)
                    if held[part, text][0] == connection:
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

    def __init__(self, name: str, twin: Twin, within: Sequence[str] = (), **request: object) -> None:
        """within: a command that runs another, elsewhere. request: as connected_parts has it."""
        super().__init__(name=name)
        twin.parts.append(self)
        self._request = request
        self._twin = twin
        self._forks = Server("tests.disaster.connected_parts", within)
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


def subscribe(path: Path) -> None:
    """Make a store whose topics have their subscriptions."""
    with DelayedStore.open(path, CONFIG) as store:
        for topic in TOPICS:
            store.topic(topic).subscribe(SUBSCRIPTION, type="shared").close()


def judged(path: Path, twin: Twin) -> str:
    """Receive what is left in the store once its parts have ended, and judge all that was told; figures."""
    assert twin.troubles == []
    left = set[tuple[str, str]]()
    with DelayedStore.open(path, CONFIG) as store:
        store.topic("t").remove_schedule(BEAT)
        for name in TOPICS:
            topic = store.topic(name)
            with topic.subscribe(SUBSCRIPTION, type="shared") as consumer:
                while (batch := consumer.receive(1_000, timeout=0)) or topic.stats().pending:
                    for message in batch or consumer.receive(1_000, timeout=0.1):
                        attempts = message.redelivery_count + message.retries
                        twin.take("drain", ["got", name, text_of(message), str(message.message_id), attempts, "", 0])
                        left.add((name, text_of(message)))
                        consumer.ack(message)
        letters = {json.loads(letter.payload)["text"]: letter.attempts for letter in store.dead_letters()}
        assert {letter.topic for letter in store.dead_letters()} <= {store.topic("poison").name}
        assert list(store.check(deep=True)) == []
    assert all(attempts > RETRIES for attempts in letters.values())
    return f"{twin.judge(left, set(letters))}, {len(letters)} dead letters"
