"""Rounds of the kill test: the fork server, the facts that its children told, and what they must agree on.

A series keeps one store over several rounds, so that what one round left is recovered by the next one,
which may be killed in the middle of that. A drain at the end receives whatever is left. The rules:

- an acknowledged send is delivered to every subscription, with the payload that was sent;
- no id is given out twice;
- nothing is delivered twice without a crash or a nack between, and no message stands at two positions of a main log;
- what was cancelled is never delivered, and what was rescheduled once, whether or not the answer was heard;
- what was acknowledged durably is never delivered again;
- each number of a producer is delivered once, though after a crash it was sent again in another batch;
- a store opens after every crash, `check` finds nothing in it, and nothing lies in staging/ and trash/;
- once everything is acknowledged, no partition is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("kill_child.py")
LEADS_MS = (0, 4, 3_000)
"""How early firing is, round after round."""

START_MS = 1_790_000_000_000
KILLED = -signal.SIGKILL

Id = tuple[int, int]


class Server:
    """A process that forks the children; started once for many series."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._rest = b""

    def run(self, request: dict[str, Any], kill_after: int | None = None) -> Iterator[list[Any]]:
        """Facts of one round as they come; the child is killed when `kill_after` of them have been read."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        child = -1
        for count, fact in enumerate(self._facts()):
            if fact[0] == "pid":
                child = os.pidfd_open(fact[1])
            if count == kill_after:
                signal.pidfd_send_signal(child, signal.SIGKILL)
            yield fact
            if fact[0] == "exit":
                os.close(child)
                return

    def _facts(self) -> Iterator[list[Any]]:
        assert self.process.stdout is not None
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                yield json.loads(line)
                continue
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                raise EOFError("the fork server has ended")
            self._rest += more

    def close(self) -> None:
        """End the server."""
        self.process.communicate()


class Series:
    """Rounds on one store, and everything that they told."""

    def __init__(self, server: Server, path: Path, seed: str, **options: object) -> None:
        """`options` go into every request (see kill_child)."""
        self.random = random.Random(seed)
        self.troubles: list[str] = []
        self.hits: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.rounds = 0
        self.sent: dict[str, dict[Id, str]] = {}
        self.delivered: dict[tuple[str, str], dict[Id, Id]] = {}
        self.taken: dict[str, set[Id]] = {}
        """Ids under which nothing may ever be delivered."""
        self.doubtful: dict[str, dict[Id, tuple[str, str]]] = {}
        """Payload and "cancel" or "move" of those whose taking back was begun, and not answered."""
        self.acked: dict[tuple[str, str], set[Id]] = {}
        self.numbers: dict[str, dict[int, tuple[int, str]]] = {}
        """By topic and number, due time and payload of what a numbered producer was asked to send."""
        self._answered: dict[str, set[int]] = {}
        self._server = server
        self._base = {"path": str(path), "seed": seed, "steps": 14, **options}
        self._now_ms = START_MS
        self._payloads: dict[tuple[str, str], dict[str, Id]] = {}
        self._in_round: set[tuple[str, Id]] = set()

    def round(self, point: str | None = None, count: int = 1, kill_after: int | None = None, **more: object) -> bool:
        """Run one round; True when its child was killed."""
        self.rounds += 1
        self._in_round.clear()
        request = {**self._base, "round": self.rounds, "now_ms": self._now_ms, "point": point, "count": count, **more}
        request["lead_ms"] = LEADS_MS[self.rounds % len(LEADS_MS)]
        request["following"] = {topic: max(numbers) + 1 for topic, numbers in self.numbers.items()}
        request["unanswered"] = {
            topic: [
                (number, *row) for number, row in sorted(numbers.items()) if number not in self._answered.get(topic, ())
            ]
            for topic, numbers in self.numbers.items()
        }
        request["close"] = self.random.random() < 0.5
        last = ""
        status = 0
        for fact in self._server.run(request, kill_after):
            kind = fact[0]
            if kind == "exit":
                status = os.waitstatus_to_exitcode(fact[1])
            elif kind == "hit":
                last = fact[1]
            self._take(kind, fact)
        if status == KILLED:
            self.kills[point or last] += 1
        elif status:
            self.troubles.append(f"round {self.rounds} ended with {status}")
        # A clock that stood still, ran on, or was set back while the store was closed.
        self._now_ms += self.random.choice((-30_000, 0, 1, 20_000, 100_000))
        return status == KILLED

    def drain(self) -> None:
        """Receive what is left, and see that nothing is missing."""
        if self.round(drain=True):
            self.troubles.append("the drain was killed")
        for (topic, subscription), delivered in self.delivered.items():
            doubtful = self.doubtful.get(topic, {})
            missing = (
                self.sent.get(topic, {}).keys() - delivered.keys() - self.taken.get(topic, set()) - doubtful.keys()
            )
            if missing:
                self.troubles.append(
                    f"{subscription} of {topic} never got {len(missing)} acknowledged sends: {sorted(missing)[:5]}"
                )

            numbered = {text for _, text in self.numbers.get(topic, {}).values()}
            gaps = numbered - self._payloads.get((topic, subscription), {}).keys()
            if gaps:
                self.troubles.append(
                    f"{subscription} of {topic} never got {sorted(gaps)}, all of them sent until answered"
                )

            moved = {text for text, kind in doubtful.values() if kind == "move"}
            lost = moved - self._payloads.get((topic, subscription), {}).keys()
            if lost:
                self.troubles.append(
                    f"{subscription} of {topic} never got {sorted(lost)}, which were being rescheduled"
                )

    @property
    def facts(self) -> str:
        """A line for a failed test: seed and figures."""
        sent = sum(map(len, self.sent.values()))
        return f"seed {self._base['seed']}, {self.rounds} rounds, {sent} sends, killed at {dict(self.kills)}"

    def _take(self, kind: str, fact: list[Any]) -> None:
        if kind == "hit":
            self.hits[fact[1]] += 1
        elif kind == "clock":
            self._now_ms = fact[1]
        elif kind == "sent":
            for ledger, entry, text in fact[2]:
                self._sent(fact[1], (ledger, entry), text)
        elif kind == "numbering":
            self.numbers.setdefault(fact[1], {}).update(enumerate(map(tuple, fact[3]), fact[2]))
        elif kind == "numbered":
            self._answered.setdefault(fact[1], set()).update(range(fact[2], fact[2] + fact[3]))
        elif kind == "got":
            self._got(fact[1], fact[2], fact[3])
        elif kind == "acked":
            self.acked.setdefault((fact[1], fact[2]), set()).update(map(tuple, fact[3]))
        elif kind == "taking":
            self.doubtful.setdefault(fact[1], {})[tuple(fact[2])] = (fact[3], fact[4])
        elif kind == "taken":
            self._taken(fact[1], tuple(fact[2]), fact[3], fact[4], fact[5])
        elif kind == "left" and (fact[1] or fact[2]):
            self.troubles.append(f"{fact[1]} partitions with {fact[2]} pending messages are left after the drain")
        elif kind == "trouble":
            self.troubles.append(f"round {self.rounds}: {fact[1]}")

    def _sent(self, topic: str, id_: Id, text: str) -> None:
        before = self.sent.setdefault(topic, {}).setdefault(id_, text)
        if before != text:
            self.troubles.append(f"{id_} of {topic} was given out for {text!r}, and had been for {before!r}")

    def _taken(self, topic: str, id_: Id, text: str, new: list[int] | None, success: bool) -> None:
        del self.doubtful[topic][id_]
        if not success:
            return
        self.taken.setdefault(topic, set()).add(id_)
        if new is not None:
            self._sent(topic, (new[0], new[1]), text)
        for (of, subscription), delivered in self.delivered.items():
            if of == topic and id_ in delivered:
                self.troubles.append(f"{id_} of {topic} was taken back after {subscription} had got it")

    def _got(self, topic: str, subscription: str, rows: list[Any]) -> None:
        where = (topic, subscription)
        delivered = self.delivered.setdefault(where, {})
        acked = self.acked.setdefault(where, set())
        sent = self.sent.get(topic, {})
        for ledger, entry, at_ledger, at_entry, text in rows:
            id_, position = (ledger, entry), (at_ledger, at_entry)
            if id_ in acked:
                self.troubles.append(f"{id_} was delivered to {where} again after its durable acknowledgement")
            if delivered.setdefault(id_, position) != position:
                self.troubles.append(f"{id_} was delivered to {where} from {delivered[id_]} and from {position}")
            if id_ in self.taken.get(topic, ()):
                self.troubles.append(f"{id_} was delivered to {where}, and had been taken back")
            if self._payloads.setdefault(where, {}).setdefault(text, id_) != id_:
                self.troubles.append(f"{text!r} was delivered to {where} as {self._payloads[where][text]} and as {id_}")
            if sent.get(id_, text) != text:
                self.troubles.append(f"{id_} was delivered to {where} as {text!r}, sent as {sent[id_]!r}")
            if subscription == "durable":
                if (topic, id_) in self._in_round:
                    self.troubles.append(f"{id_} was delivered to {where} twice in round {self.rounds}")
                self._in_round.add((topic, id_))
