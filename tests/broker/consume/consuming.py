"""A topic with consumers of fake connections."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from duelog import DelayedStore, ManualClock
from duelog.broker.configuration import BrokerConfig
from duelog.broker.consume.consumers import Consumers
from duelog.broker.protocol import commands, entry
from duelog.broker.protocol.failures import Refused, ServerError, server_error
from duelog.broker.protocol.fields import Command
from duelog.broker.protocol.peer import Peer
from duelog.errors import DuelogError
from duelog.store.position import MessageId
from duelog.topic import Topic
from tests.broker.peers import Bench, FakePeer, idle, soon

TOPIC = "persistent://public/default/t"


def entry_of(text: str, messages: int = 1, key: str | None = None, publish_ms: int = 1) -> bytes:
    """The stored form of a message, or of a batch."""
    number = entry.hash_of(key.encode()) if key is not None else 0
    return entry.pack(entry.Header(entry.BATCH if messages > 1 else 0, number, messages, publish_ms), text.encode())


class Consuming:
    """Consumers of a store, and what tests do with them."""

    def __init__(self, store: DelayedStore, clock: ManualClock, topic: str = TOPIC, **settings: Any) -> None:
        self.bench = Bench()
        self.store = store
        self.clock = clock
        self.topic = store.topic(topic)
        self.consumers = Consumers(
            self._open,
            cast(Any, self),
            self.bench.workers,
            self.bench.calls,
            store.clock.now_ms,
            BrokerConfig(**settings),
        )
        self.schemas: list[tuple[str, str]] = []
        self._requests = 0
        self._ids = 0

    async def _open(self, peer: Peer, name: str, create: bool) -> tuple[Topic, int]:
        _, mark, number = name.rpartition("-partition-")
        return self.store.topic(name), int(number) if mark else -1

    def check_schema(self, topic: str, schema: commands.Schema) -> None:
        if schema.name == "misfit":
            raise Refused(ServerError.INCOMPATIBLE_SCHEMA, "it does not fit")
        self.schemas.append((topic, schema.name))

    def send(self, *texts: str, **fields: Any) -> list[MessageId]:
        """Store messages as the broker does."""
        return [self.topic.send(entry_of(each, **fields), key=fields.get("key")) for each in texts]

    async def subscribe(
        self, peer: FakePeer, kind: commands.SubscriptionType = commands.SubscriptionType.EXCLUSIVE, name: str = "s",
        permits: int = 0, **fields: Any,
    ) -> int:  # fmt: skip
        """Subscribe, earliest; the consumer's id."""
        self._ids += 1
        fields = {"initial_position": commands.InitialPosition.EARLIEST, **fields}
        consumer_id = int(fields.pop("consumer_id", self._ids))
        topic = fields.pop("topic", self.topic.name)
        await soon(
            self.consumers.open(peer, commands.Subscribe(topic, name, kind, consumer_id, 100 + consumer_id, **fields))
        )
        if permits:
            await self.flow(peer, consumer_id, permits)
        return consumer_id

    async def flow(self, peer: FakePeer, consumer_id: int, permits: int) -> None:
        self.consumers.flow(peer, commands.Flow(consumer_id, permits))
        await idle()

    async def ask(self, peer: FakePeer, command: Command) -> None:
        """Have a request served; what it is refused with is answered as a connection does."""
        serve: dict[type, Callable[..., Awaitable[None]]] = {
            commands.GetLastMessageId: self.consumers.last_message_id,
            commands.Unsubscribe: self.consumers.unsubscribe,
            commands.ConsumerStats: self.consumers.stats,
        }
        try:
            await serve[type(command)](peer, command)
        except (Refused, DuelogError) as error:
            answer = commands.refusal(command, server_error(error), str(error))
            assert answer is not None
            peer.send(answer)

    async def ack(self, peer: FakePeer, consumer_id: int, *ids: commands.MessageIdData, **fields: Any) -> None:
        kind = fields.pop("type", commands.AckType.INDIVIDUAL)
        self.consumers.ack(peer, commands.Ack(consumer_id, kind, ids, **fields))
        await idle()


def texts(peer: FakePeer) -> list[str]:
    """The blobs of the messages that were sent to a connection."""
    return [(blob or b"").decode() for command, blob in peer.sent if isinstance(command, commands.Message)]


def ids(peer: FakePeer) -> list[commands.MessageIdData]:
    """The ids of the messages that were sent to a connection."""
    return [each.message_id for each in peer.got(commands.Message)]


def refused(peer: FakePeer) -> list[int]:
    """The errors of ERROR."""
    return [each.error for each in peer.got(commands.Error)]


def succeeded(peer: FakePeer) -> list[int]:
    """The requests that succeeded."""
    return [each.request_id for each in peer.got(commands.Success)]
