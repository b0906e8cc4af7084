"""beanstalkd with its write-ahead log. Delays are whole seconds of the machine's clock."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .peer import Peer, has_module, module
from .server import Server, accepts, free_port, program

_TTR_SECONDS = 3_600


class BeanstalkdPeer(Peer):
    """fsync: after every write, which survives a power cut; else as installed, every 50 ms."""

    own_clock = True

    def __init__(self, *, fsync: bool) -> None:
        self._fsync = fsync
        self._server: Server | None = None

    @classmethod
    def missing(cls) -> str | None:
        if program("beanstalkd") is None:
            return "apt-get install beanstalkd"
        return None if has_module("greenstalk") else "pip install greenstalk"

    def open(self, directory: Path, now_ms: int) -> None:
        port = self.port = free_port()
        log = directory / "binlog"
        log.mkdir(exist_ok=True)
        command = [program("beanstalkd") or "", "-l", "127.0.0.1", "-p", str(port), "-b", str(log)]
        if self._fsync:
            command += ["-f", "0"]
        self._server = Server(command, directory, lambda: accepts(port))
        self._now_ms = now_ms
        self._client: Any = module("greenstalk").Client(("127.0.0.1", port), encoding=None)

    def connect(self, port: int, number: int) -> None:
        self._now_ms = time.time_ns() // 1_000_000
        self._client = module("greenstalk").Client(("127.0.0.1", port), encoding=None)

    def _delay(self, due_ms: int) -> int:
        return max(0, -((self._now_ms - due_ms) // 1_000))

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self._client.put(payload, delay=self._delay(due_ms), ttr=_TTR_SECONDS)

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        """All puts in one write, then all answers: the client library waits for each."""
        parts = []
        for payload, due_ms in zip(payloads, dues, strict=True):
            parts.append(b"put 65536 %d %d %d\r\n" % (self._delay(due_ms), _TTR_SECONDS, len(payload)))
            parts += (payload, b"\r\n")
        self._send(parts)
        for _ in payloads:
            self._answer(b"INSERTED")

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        """Reserve and delete with the same pipelining; the server itself waits for the first."""
        found: list[bytes] = []
        numbers: list[bytes] = []
        until = time.monotonic() + wait_seconds
        while not found:
            left = max(until - time.monotonic(), 0.0)
            asked = 1 if left else limit
            self._send([b"reserve-with-timeout %d\r\n" % (min(1, int(left) + 1) if left else 0)] * asked)
            for _ in range(asked):
                line = self._reader.readline()
                if line.startswith(b"RESERVED"):
                    _, number, size = line.split()
                    found.append(self._reader.read(int(size) + 2)[:-2])
                    numbers.append(number)
                elif not line.startswith((b"TIMED_OUT", b"DEADLINE_SOON")):
                    raise RuntimeError(line.decode())
            if not left:
                break
        self._send([b"delete %s\r\n" % number for number in numbers])
        for _ in numbers:
            self._answer(b"DELETED")
        return found

    def wait_until_due(self) -> None:
        """Return once no message is delayed any more."""
        while int(self._client.stats()["current-jobs-delayed"]):
            time.sleep(0.05)

    @property
    def _reader(self) -> BinaryIO:
        reader: BinaryIO = self._client._reader
        return reader

    def _send(self, parts: list[bytes]) -> None:
        self._client._sock.sendall(b"".join(parts))

    def _answer(self, expected: bytes) -> None:
        line = self._reader.readline()
        if not line.startswith(expected):
            raise RuntimeError(f"expected {expected.decode()}, got {line.decode()}")

    def remove_due_before(self, limit_ms: int) -> None:
        """Delayed messages are deleted one by one, the next to be due first."""
        self._client.use("default")
        while True:
            try:
                job = self._client.peek_delayed()
            except module("greenstalk").NotFoundError:
                return
            if int.from_bytes(job.body[:8], "big") >= limit_ms:
                return
            self._client.delete(job)

    def processes(self) -> list[int]:
        return [] if self._server is None else self._server.processes

    def close(self) -> None:
        self._client.close()
        if self._server is not None:
            self._server.stop()
