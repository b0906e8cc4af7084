"""Rounds of the kill test on one store: the fork server, and what its children told.

A series keeps one store over several rounds, so that what one round left is recovered by the next one,
which may be killed in the middle of that. A drain at the end receives whatever is left. The rules are in told.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import present
from tests.disaster.running import module
from tests.disaster.told import Told

LEADS_MS = (0, 4, 3_000)
"""How early firing is, round after round."""

KILLED = -signal.SIGKILL


class Server:
    """A process that forks the children; started once for many series."""

    def __init__(self, children: str = "tests.disaster.kill_child", within: Sequence[str] = ()) -> None:
        """children: the module that is started, and forks them. within: a command that runs another, elsewhere."""
        self.process = subprocess.Popen(
            [*within, *module(children)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._rest = b""

    def run(self, request: dict[str, Any], kill_after: int | None = None) -> Iterator[list[Any]]:
        """Facts of one round as they come; the child is killed when `kill_after` of them have been read."""
        present(self.process.stdin).write(json.dumps(request).encode() + b"\n")
        child = -1
        for count, fact in enumerate(self._facts()):
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the server has waited for it
                if kill_after is not None and fact[0] == "pid":
                    child = os.pidfd_open(fact[1])
                if count == kill_after and child >= 0:
                    signal.pidfd_send_signal(child, signal.SIGKILL)
            yield fact
            if fact[0] == "exit":
                if child >= 0:
                    os.close(child)
                return

    def _facts(self) -> Iterator[list[Any]]:
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                yield json.loads(line)
                continue
            more = os.read(present(self.process.stdout).fileno(), 1 << 16)
            if not more:
                raise EOFError("the fork server has ended")
            self._rest += more

    def close(self) -> None:
        self.process.communicate()


class Series(Told):
    """Rounds on one store, and everything that they told."""

    def __init__(self, server: Server, path: Path, seed: str, **options: object) -> None:
        """`options` go into every request (see kill_child)."""
        super().__init__()
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.rounds = 0
        self._server = server
        self._base = {"path": str(path), "seed": seed, "steps": 14, **options}

    def round(self, point: str | None = None, count: int = 1, kill_after: int | None = None, **more: object) -> bool:
        """Run one round; True when its child was killed."""
        self.rounds += 1
        self.begin(draining="drain" in more)
        request = {**self._base, "round": self.rounds, "now_ms": self.now_ms, "point": point, "count": count, **more}
        request["lead_ms"] = LEADS_MS[self.rounds % len(LEADS_MS)]
        request["unanswered"] = self.unanswered()
        request.setdefault("close", self.random.random() < 0.5)
        last, status = "", 0
        for fact in self._server.run(request, kill_after):
            if fact[0] == "exit":
                status = os.waitstatus_to_exitcode(fact[1])
            elif fact[0] == "hit":
                last = fact[1]
            self.take(fact)
        if status == KILLED:
            self.kills[point or last] += 1
        elif status:
            self.troubles.append(f"round {self.rounds} ended with {status}")
        # A clock that stood still, ran on, or was set back while the store was closed.
        self.now_ms += self.random.choice((-30_000, 0, 1, 20_000, 100_000))
        return status == KILLED

    def drain(self) -> None:
        if self.round(drain=True):
            self.troubles.append("the drain was killed")
        self.look_for_missing(self.listeners)

    @property
    def facts(self) -> str:
        """A line for a failed test: seed and figures."""
        sent = sum(map(len, self.sent.values()))
        return f"seed {self._base['seed']}, {self.rounds} rounds, {sent} sends, killed at {dict(self.kills)}"
