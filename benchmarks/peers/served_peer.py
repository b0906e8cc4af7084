"""duelog behind its network front: `duelog serve` in a process of its own, and the ordinary client of Apache Pulsar."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .peer import Peer, has_module, module
from .server import Server, accepts, free_port

_NEEDED = ("pulsar", "aiohttp", "crc32c", "re2", "jwt")
SERVE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from duelog.tools.cli.main import main; main()"
_IN_FLIGHT = 1_000


class ServedPeer(Peer):
    """One topic, one shared subscription. Sends do not wait: up to 1,000 messages of a producer are unanswered.

    batching: the client joins messages to batches of its own, which are stored as one entry each; messages with a due
    time stay single ones. The client acknowledges in groups, ten times a second.
    """

    topic = "benchmark"

    def __init__(self, *, batching: bool = False) -> None:
        self._batching = batching
        self._server: Server | None = None
        self._producer: Any = None
        self._consumer: Any = None
        self._refused = 0

    @classmethod
    def missing(cls) -> str | None:
        if all(map(has_module, _NEEDED)):
            return None
        return "pip install pulsar-client 'duelog[broker]'"

    def open(self, directory: Path, now_ms: int) -> None:
        self.port = free_port()
        command = [sys.executable, "-c", SERVE, os.getcwd(), "serve", str(directory / "store")]
        self._server = Server([*command, "--port", str(self.port)], directory, lambda: accepts(self.port))
        self.connect(self.port, 0)
        self.consume()  # messages are kept for subscriptions that there are
        self._consumer.close()
        self._consumer = None

    def connect(self, port: int, number: int) -> None:
        self._pulsar = pulsar = module("pulsar")
        logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        self._client: Any = pulsar.Client(f"pulsar://127.0.0.1:{port}", io_threads=1, logger=logger)

    def produce(self) -> None:
        if self._producer is None:
            self._producer = self._client.create_producer(
                self.topic, block_if_queue_full=True, max_pending_messages=_IN_FLIGHT, batching_enabled=self._batching
            )

    def consume(self) -> None:
        if self._consumer is None:
            pulsar = self._pulsar
            start = pulsar.InitialPosition.Earliest
            kind = pulsar.ConsumerType.Shared
            self._consumer = self._client.subscribe(self.topic, "reader", consumer_type=kind, initial_position=start)

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self.produce()
        self._producer.send(payload, deliver_at=due_ms)

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        self.produce()
        send, answered = self._producer.send_async, self._answered
        for payload, due_ms in zip(payloads, dues, strict=True):
            send(payload, answered, deliver_at=due_ms or None)

    def _answered(self, result: Any, _: Any) -> None:
        if result != self._pulsar.Result.Ok:
            self._refused += 1

    def settle(self) -> None:
        self._producer.flush()
        if self._refused:
            raise RuntimeError(f"{self._refused} messages were refused")

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        """One message at a time: the client itself has fetched more."""
        self.consume()
        try:
            message = self._consumer.receive(max(round(wait_seconds * 1_000), 1))
        except self._pulsar.Timeout:
            return []
        self._consumer.acknowledge(message)
        data: bytes = message.data()
        return [data]

    def processes(self) -> list[int]:
        return [] if self._server is None else self._server.processes

    def close(self) -> None:
        self._client.close()
        if self._server is not None:
            self._server.stop()
