"""Clients of a peer in processes of their own: each with a connection, all told to begin at once.

The child is `python -m benchmarks.peers.client_process`. Its first line of input says what it is to do; it connects,
says so, and begins when it is told. Times are of the machine's monotonic clock, which all processes share.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..harness import load
from . import make
from .peer import Peer

_CHUNK = 1_000
_IDLE_SECONDS = 2.0
"""A consumer that has got nothing for so long is done."""

_MOST_SECONDS = 600.0


class ClientProcess:
    """One client."""

    def __init__(self, subject: str, port: int, number: int, work: str, **arguments: Any) -> None:
        """Start it. work: the name of a function below."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.client_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        request = {"subject": subject, "port": port, "number": number, "work": work, "arguments": arguments}
        self._tell(json.dumps(request))

    def wait_ready(self) -> None:
        """Wait until it is connected."""
        self._read()

    def begin(self, **arguments: Any) -> None:
        """Have it begin, with these arguments besides those it has."""
        self._tell(json.dumps(arguments))

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a client ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def result(self) -> dict[str, Any]:
        """Wait for its end and return its figures."""
        answer = self._read()
        self._process.wait(_MOST_SECONDS)
        return answer

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def run_clients(clients: Sequence[ClientProcess], lead_ms: int | None = None) -> list[dict[str, Any]]:
    """Have all begin at once, when all are connected; what each has done.

    lead_ms: they are told an instant, `first_ms`, so long from when they begin.
    """
    try:
        for client in clients:
            client.wait_ready()
        told = {} if lead_ms is None else {"first_ms": time.time_ns() // 1_000_000 + lead_ms}
        for client in clients:
            client.begin(**told)
        return [client.result() for client in clients]
    finally:
        for client in clients:
            client.kill()


# -- in the child ----------------------------------------------------------------------------------


def produce(peer: Peer, n: int) -> dict[str, Any]:
    """Send `n` messages that are due at once, and wait until all are durable."""
    payloads = load.payloads(_CHUNK)
    began = time.monotonic()
    for at in range(0, n, _CHUNK):
        some = payloads[: min(_CHUNK, n - at)]
        peer.schedule_batch(some, [0] * len(some))
    peer.settle()
    return {"began": began, "ended": time.monotonic(), "n": n}


def consume(peer: Peer) -> dict[str, Any]:
    """Receive and acknowledge until nothing comes any more."""
    began = ended = time.monotonic()
    n = 0
    while True:
        found = peer.fetch_and_ack(0, _CHUNK, _IDLE_SECONDS)
        if not found:
            return {"began": began, "ended": ended, "n": n}
        n += len(found)
        ended = time.monotonic()


def schedule(peer: Peer, offsets_ms: list[int], first_ms: int) -> dict[str, Any]:
    """Send messages that say when they are due: so long after the first instant."""
    began = time.monotonic()
    dues = [first_ms + offset_ms for offset_ms in offsets_ms]
    peer.schedule_batch([due_ms.to_bytes(8, "big") + bytes(1_016) for due_ms in dues], dues)
    peer.settle()
    return {"began": began, "ended": time.monotonic(), "n": len(dues)}


def lateness(peer: Peer, idle_seconds: float, first_ms: int) -> dict[str, Any]:
    """Receive until nothing has come for so long after the first instant; how many ms late each message was."""
    idle_seconds += first_ms / 1_000 - time.time()
    late: list[float] = []
    while True:
        found = peer.fetch_and_ack(0, 100, idle_seconds)
        now_ms = time.time() * 1_000
        if not found:
            return {"late": late}
        late += [now_ms - int.from_bytes(payload[:8], "big") for payload in found]


_WORK = {each.__name__: each for each in (produce, consume, schedule, lateness)}


def main() -> int:
    """Do what the first line of the input says."""
    request = json.loads(sys.stdin.readline())
    peer = make(request["subject"])
    peer.connect(request["port"], request["number"])
    if request["work"] in ("produce", "schedule"):
        peer.produce()
    else:
        peer.consume()
    print("{}", flush=True)
    begin = sys.stdin.readline()
    if begin:
        answer = _WORK[request["work"]](peer, **request["arguments"], **json.loads(begin))
        peer.close()
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
