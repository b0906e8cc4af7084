"""A served broker seen from outside: its memory, and connections that show whether it still serves others."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import MessageIdData, SubscriptionType
from tests.broker.server.raw_client import RawClient, blob_of

_requests = count(1)


def resident_bytes(pid: int) -> int:
    """The memory of a process, without pages of mapped files: those the system takes back when it needs them."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


class Talker(RawClient):
    """A client with what these tests say most."""

    async def produce(self, topic: str, producer_id: int = 1) -> None:
        """Open a producer."""
        await self.ask_for(commands.ProducerSuccess, commands.Producer(topic, producer_id, next(_requests)))

    async def subscribe(
        self, topic: str, name: str = "s", kind: SubscriptionType = SubscriptionType.SHARED, consumer_id: int = 1
    ) -> None:
        """Open a consumer; it has no permits."""
        request = next(_requests)
        found = await self.ask(commands.Subscribe(topic, name, kind, consumer_id, request))
        assert found == commands.Success(request), found

    async def send_all(self, payloads: Sequence[bytes], producer_id: int = 1) -> list[MessageIdData]:
        """Send, and wait for the receipts, which come in order."""
        for number, payload in enumerate(payloads):
            self.say(commands.Send(producer_id, number), blob=blob_of(payload, number))
        found = []
        for number in range(len(payloads)):
            receipt = await self.hear_a(commands.SendReceipt)
            assert receipt.sequence_id == number
            assert receipt.message_id is not None
            found.append(receipt.message_id)
        return found

    async def hear_blob(self) -> tuple[commands.Command, bytes] | None:
        """The next command that is no PING; PINGs are answered."""
        while (found := await super().hear_blob()) is not None and isinstance(found[0], commands.Ping):
            self.say(commands.Pong())
        return found

    async def messages(self, count: int) -> list[tuple[commands.Message, bytes]]:
        """The next messages."""
        found: list[tuple[commands.Message, bytes]] = []
        while len(found) < count:
            heard = await self.hear_blob()
            assert heard is not None, f"the connection has ended after {len(found)} of {count}"
            command, blob = heard
            assert isinstance(command, commands.Message), command
            found.append((command, blob))
        return found

    def acknowledge(self, messages: Sequence[tuple[commands.Message, bytes]]) -> None:
        """Acknowledge messages one by one."""
        for command, _ in messages:
            self.say(commands.Ack(command.consumer_id, commands.AckType.INDIVIDUAL, [command.message_id]))


class Others:
    """A producer and a consumer that have nothing to do with what a test does."""

    def __init__(self, producer: Talker, consumer: Talker) -> None:
        self._producer, self._consumer = producer, consumer

    async def flow(self, messages: int = 50) -> None:
        """Messages go from one to the other; each wait is bounded."""
        sent = await self._producer.send_all([b"others %d" % number for number in range(messages)])
        self._consumer.say(commands.Flow(1, messages))
        found = await self._consumer.messages(messages)
        assert [command.message_id for command, _ in found] == sent
        self._consumer.acknowledge(found)


@asynccontextmanager
async def others(port: int) -> AsyncIterator[Others]:
    """Two more connections."""
    topic = f"persistent://public/default/others-{next(_requests)}"
    consumer, producer = await Talker.connected(port), await Talker.connected(port)
    await consumer.subscribe(topic)
    await producer.produce(topic)
    made = Others(producer, consumer)
    await made.flow()
    yield made
    await made.flow()
