"""A topic with producers of fake connections."""

import threading
from typing import Any, cast

from duelog import DelayedStore
from duelog.broker.configuration import BrokerConfig
from duelog.broker.produce.producers import Producers
from duelog.broker.protocol import commands
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.protocol.fields import Command
from duelog.broker.protocol.peer import Peer
from duelog.topic import Topic
from tests.broker.peers import Bench, FakePeer, idle, soon
from tests.broker.server import raw_client

TOPIC = "persistent://public/default/t"


def blob_of(text: str, sequence_id: int = 0, **fields: Any) -> memoryview:
    """The blob of a text."""
    return memoryview(raw_client.blob_of(text.encode(), sequence_id, **fields))


class Producing:
    """Producers of a store, and what tests do with them."""

    def __init__(self, store: DelayedStore, topic: str = TOPIC, *, numbered: bool = False, **settings: Any) -> None:
        self.bench = Bench()
        self.store = store
        self.topic = store.topic(topic)
        self.numbered = numbered
        self.epochs: dict[str, int] = {}
        self.epoch_error: Exception | None = None
        self.producers = Producers(
            self._open,
            cast(Any, self),
            self.bench.workers,
            self.bench.calls,
            store.clock.now_ms,
            BrokerConfig(**settings),
        )
        self._requests = 0

    async def _open(self, peer: Peer, name: str) -> tuple[Topic, int]:
        if name == "refused":
            raise Refused(ServerError.TOPIC_NOT_FOUND, "there is no such topic")
        _, mark, number = name.rpartition("-partition-")
        topic = self.store.topic(name)
        topic.sender.topic(self.store.clock.now_ms())
        return topic, int(number) if mark else -1

    def deduplicates(self, topic: str) -> bool:
        return self.numbered

    def epoch(self, topic: str) -> int | None:
        return self.epochs.get(topic)

    def set_epoch(self, topic: str, epoch: int) -> None:
        if self.epoch_error is not None:
            raise self.epoch_error
        self.epochs[topic] = epoch

    def schema_version(self, topic: str, schema: commands.Schema) -> bytes:
        if schema.name == "misfit":
            raise Refused(ServerError.INCOMPATIBLE_SCHEMA, "it does not fit")
        return bytes(8)

    async def open(self, peer: FakePeer, producer_id: int = 1, name: str | None = "p", **fields: Any) -> list[Command]:
        """Open a producer; what is answered."""
        self._requests += 1
        peer.sent.clear()
        topic = fields.pop("topic", self.topic.name)
        request = commands.Producer(topic, producer_id, self._requests, name, **fields)
        await soon(self.producers.open(peer, request))
        return [command for command, _ in peer.sent]

    async def opened(
        self, peer: FakePeer, producer_id: int = 1, name: str | None = "p", **fields: Any
    ) -> commands.ProducerSuccess:
        """Open a producer that is admitted."""
        (success,) = await self.open(peer, producer_id, name, **fields)
        assert isinstance(success, commands.ProducerSuccess), success
        return success

    def put(self, peer: FakePeer, sequence_id: int, text: str = "", producer_id: int = 1, **fields: Any) -> None:
        """SEND, without waiting for anything."""
        send = {name: fields.pop(name) for name in ("highest_sequence_id", "is_chunk", "txn_least") if name in fields}
        blob = fields.pop("blob", None) or blob_of(text or str(sequence_id), sequence_id, **fields)
        self.producers.send(peer, commands.Send(producer_id, sequence_id, **send), blob)

    async def stored(self) -> None:
        """Wait for what was sent to be on disk, and answered."""
        for _ in range(1_000):
            await idle()
            if not any(each.unanswered for each in self.producers._connections.values()):
                return
            self.written()
        raise AssertionError("SENDs stay unanswered")

    def written(self) -> None:
        """Wait until the engine has reported everything that it took so far.

        The outbox writes and reports in the order of `put`; a `send` of this thread may overtake what its thread has
        taken and not yet written.
        """
        reported = threading.Event()
        self.store.topic("flush").put(b"", done=lambda _: reported.set())
        assert reported.wait(60), "the outbox does not write"


def exclusive(mode: commands.AccessMode, **fields: Any) -> dict[str, Any]:
    """Fields of PRODUCER."""
    return {"access_mode": mode, **fields}


def receipts(peer: FakePeer) -> list[int]:
    """Sequence ids of the receipts."""
    return [each.sequence_id for each in peer.got(commands.SendReceipt)]


def answers(peer: FakePeer) -> list[tuple[int, ServerError | None]]:
    """Sequence ids of receipts and errors, in order, with the error."""
    found: list[tuple[int, ServerError | None]] = []
    for command, _ in peer.sent:
        if isinstance(command, commands.SendReceipt):
            found.append((command.sequence_id, None))
        elif isinstance(command, commands.SendError):
            found.append((command.sequence_id, command.error))
    return found


def errors(peer: FakePeer) -> list[ServerError]:
    """The errors of ERROR."""
    return [each.error for each in peer.got(commands.Error)]


def closed(peer: FakePeer) -> list[int]:
    """The producers that the broker closed."""
    return [each.producer_id for each in peer.got(commands.CloseProducer)]
