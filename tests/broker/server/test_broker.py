"""The whole broker in the test's process: conversations, noise from many clients, the end in the middle of sends."""

import asyncio
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore
from duelog.broker.consume import feed
from duelog.broker.protocol import commands, fields
from duelog.broker.protocol.commands import HashRange
from duelog.broker.server.broker import Broker
from tests.broker.admin.rest import administered
from tests.broker.server import raw_client
from tests.broker.server.raw_client import WITHIN_S, RawClient

TOPIC = "persistent://public/default/t"


def blob_of(number: int, **values: Any) -> bytes:
    """A message with its number."""
    return raw_client.blob_of(b"payload %d" % number, number, **values)


@asynccontextmanager
async def broker_at(path: Path, **settings: Any) -> AsyncIterator[tuple[Broker, int]]:
    """A broker at a free port of this machine, and the port."""
    async with administered(path, web_service_port=None, **settings) as (broker, _, _):
        yield broker, int(broker.urls.plain.rpartition(":")[2])


async def test_a_message_goes_from_a_producer_to_a_consumer(tmp_path: Path) -> None:
    """Every command of the way, as clients send them."""
    async with broker_at(tmp_path / "store") as (broker, port):
        client = await RawClient.connected(port)
        metadata = await client.ask(commands.PartitionedMetadata(TOPIC, 1))
        assert metadata == commands.PartitionedMetadataResponse(
            1, partitions=0, response=commands.MetadataResult.SUCCESS
        )
        found = await client.ask_for(commands.LookupResponse, commands.Lookup(TOPIC, 2))
        assert found.url == broker.urls.plain
        kind = commands.SubscriptionType.SHARED
        assert await client.ask(commands.Subscribe(TOPIC, "s", kind, 1, 3)) == commands.Success(3)
        await client.ask_for(commands.ProducerSuccess, commands.Producer(TOPIC, 1, 4))
        client.say(commands.Send(1, 0), blob=blob_of(0))
        receipt = await client.hear_a(commands.SendReceipt)
        client.say(commands.Flow(1, 10))
        message = await client.hear_blob()
        assert message is not None
        assert isinstance(message[0], commands.Message)
        assert (message[0].message_id, message[1]) == (receipt.message_id, blob_of(0))
        ack = commands.Ack(1, commands.AckType.INDIVIDUAL, [message[0].message_id], request_id=5)
        assert await client.ask(ack) == commands.AckResponse(1, request_id=5)
        last = await client.ask_for(commands.GetLastMessageIdResponse, commands.GetLastMessageId(1, 6))
        assert last.last_message_id.entry_id == message[0].message_id.entry_id
        assert await client.ask(commands.CloseConsumer(1, 7)) == commands.Success(7)
        assert await client.ask(commands.CloseProducer(1, 8)) == commands.Success(8)


async def test_acknowledgements_right_behind_a_seek_do_not_undo_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One socket says SEEK and then 40 times ACK: all 40 messages come again."""
    moved, may_end = threading.Event(), threading.Event()
    seek = feed.seek

    def slow_seek(*args: Any) -> Any:
        found = seek(*args)
        moved.set()
        assert may_end.wait(WITHIN_S)
        return found

    monkeypatch.setattr(feed, "seek", slow_seek)

    async with broker_at(tmp_path / "store") as (_, port):
        client = await RawClient.connected(port)
        kind = commands.SubscriptionType.EXCLUSIVE
        assert await client.ask(commands.Subscribe(TOPIC, "s", kind, 1, 1)) == commands.Success(1)
        assert isinstance(await client.ask(commands.Producer(TOPIC, 1, 2)), commands.ProducerSuccess)
        for number in range(40):
            client.say(commands.Send(1, number), blob=blob_of(number))
        for _ in range(40):
            assert isinstance(await client.hear(), commands.SendReceipt)
        client.say(commands.Flow(1, 100))
        messages = [await client.hear() for _ in range(40)]
        client.say(commands.Seek(1, 9, commands.MessageIdData(2**64 - 1, 2**64 - 1)))
        assert await asyncio.to_thread(moved.wait, WITHIN_S)
        for message in messages:
            assert isinstance(message, commands.Message)
            client.say(commands.Ack(1, commands.AckType.INDIVIDUAL, [message.message_id], request_id=10))
        assert isinstance(
            await client.ask(commands.PartitionedMetadata(TOPIC, 7)), commands.PartitionedMetadataResponse
        )
        may_end.set()
        for _ in range(40):
            assert await client.hear() == commands.AckResponse(1, request_id=10)
        assert isinstance(await client.hear(), commands.CloseConsumer)
        assert await client.hear() == commands.Success(9)
        assert await client.ask(commands.Subscribe(TOPIC, "s", kind, 2, 3)) == commands.Success(3)
        client.say(commands.Flow(2, 100))
        again = [await client.hear() for _ in range(40)]
        assert [each.message_id for each in again if isinstance(each, commands.Message)] == [
            each.message_id for each in messages if isinstance(each, commands.Message)
        ]


async def test_the_end_answers_sends_and_tells_clients(tmp_path: Path) -> None:
    """Every SEND that was read has its receipt before its producer is closed, and is in the store."""
    receipts: list[commands.SendReceipt] = []
    async with broker_at(tmp_path / "store") as (broker, port):
        client = await RawClient.connected(port)
        kind = commands.SubscriptionType.EXCLUSIVE
        assert await client.ask(commands.Subscribe(TOPIC, "s", kind, 1, 1)) == commands.Success(1)
        assert isinstance(await client.ask(commands.Producer(TOPIC, 1, 2)), commands.ProducerSuccess)
        for number in range(500):
            client.say(commands.Send(1, number), blob=blob_of(number))
        first = await client.hear_a(commands.SendReceipt)
        receipts.append(first)
        ended = asyncio.ensure_future(broker.stop())
        closed: set[type] = set()
        while (found := await client.hear()) is not None:
            if isinstance(found, commands.SendReceipt):
                assert not closed
                receipts.append(found)
            else:
                closed.add(type(found))
        assert closed == {commands.CloseProducer, commands.CloseConsumer}
        await client.close()
        await ended
    assert [each.sequence_id for each in receipts] == list(range(len(receipts)))
    with DelayedStore.open(tmp_path / "store") as store:
        stored, _ = store.topic(TOPIC).subscribe("s").poll(1_000)
        assert len(stored) >= len(receipts)


class Noise:
    """Commands that may make sense: few ids, few names, all that the protocol allows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wild = False
        self.producers: set[int] = set()
        """Ids that the connection has opened, or tried to."""
        self.seen: list[commands.MessageIdData] = []
        self.classes = [
            cls
            for cls in fields.CLASSES.values()
            if not issubclass(cls, commands.BrokerCommand) and cls not in {commands.Connect, commands.AuthResponse}
        ]

    def command(self) -> commands.Command:
        """Any request; more often than not of producers and consumers, and one that may succeed."""
        usual = (commands.Producer, commands.Subscribe, commands.Send, commands.Send, commands.Flow, commands.Ack)
        self.wild = self.random.random() < 0.1
        cls = self.random.choice(usual if self.random.random() < 0.7 else self.classes)
        if cls is commands.Send and not self.wild and not self.producers:
            cls = commands.Producer
        made: commands.Command = self.make(cls)
        if isinstance(made, commands.Producer):
            self.producers.add(made.producer_id)
        elif isinstance(made, commands.CloseProducer):
            self.producers.discard(made.producer_id)
        elif isinstance(made, commands.Send) and not self.wild:
            made.producer_id = self.random.choice(list(self.producers))
            made.txn_least = made.txn_most = None
        return made

    def make(self, cls: type) -> Any:
        """An instance with any values."""
        found = {}
        if cls is commands.MessageIdData and self.seen and not self.wild:
            return self.random.choice(self.seen)
        for field in fields.fields_of(cls):
            if not field.required and self.random.random() < (0.5 if self.wild else 0.85):
                continue
            if field.repeated:
                found[field.name] = [self.value(field, cls) for _ in range(self.random.randrange(4))]
            else:
                found[field.name] = self.value(field, cls)
        return cls(**found)

    def value(self, field: fields.Field, cls: type) -> Any:
        """A value of a field."""
        choose = self.random.choice
        if field.name in {"request_id", "txn_least", "txn_most"}:
            return self.random.randrange(1 << 20)
        if field.type is bool:
            return choose([True, False])
        if issubclass(field.type, int):
            if field.type is not int:
                return choose(list(field.type))  # type: ignore[call-overload]
            if cls is HashRange:
                return choose([0, 1, 5, 65_535, -1, 70_000])
            if not self.wild:
                return choose([0, 1, 1, 2, 30])
            return choose([0, 1, 3, 100, (1 << 63) - 1, (1 << 64) - 1 if not field.signed else -1])
        if field.type is float:
            return 1.0
        if field.type is bytes:
            return choose([b"", b"{}", b"\xff" * 8, bytes(8)])
        if field.type is str:
            if not self.wild:
                return choose([TOPIC, TOPIC, "u"]) if field.name == "topic" else choose(["a", "b"])
            if field.name in {"topic", "topics"}:
                return choose([TOPIC, "t", "t-partition-0", "public/default/u", "a//b", "non-persistent://public/default/n",
                               "no/where/t", "", "\0", "é" * 300])  # fmt: skip
            if field.name == "namespace":
                return choose(["public/default", "no/where", "", "public"])
            return choose(["", "a", "b", "c/d", ".*", "[", "é", "\n", "x" * 2_000])
        return self.make(field.type)

    def blob(self) -> bytes:
        """The blob that follows a SEND."""
        number = self.random.randrange(4)
        good = blob_of(
            number,
            num_messages_in_batch=self.random.choice([None, None, 1, 3, 0, -1]),
            partition_key=self.random.choice([None, "k", "\xff"]),
            key_is_base64=self.random.random() < 0.2,
            deliver_at_time=self.random.choice([None, None, 0, 1, -1, 1 << 62, 4_000_000_000_000]),
        )
        if not self.wild:
            return good
        return self.random.choice([good[:-1], b"x", good[6:], good[:9], b"\x0e\x01" + bytes(8)])


async def test_nothing_that_clients_say_breaks_the_broker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of commands from several connections at once; the broker answers, or ends that connection."""
    caplog.set_level(logging.WARNING)
    count, seed = int(os.environ.get("DUELOG_NOISE", "1200")), int(os.environ.get("DUELOG_NOISE_SEED", "1"))
    answers = Counter[type]()

    async def talk(noise: Noise, port: int) -> None:
        client: RawClient | None = None
        reading: asyncio.Task[None] | None = None

        async def read(client: RawClient) -> None:
            while (found := await client.hear()) is not None:
                answers[type(found)] += 1
                if isinstance(found, commands.Message):
                    noise.seen = [*noise.seen[-20:], found.message_id]

        for _ in range(count):
            if client is None or reading is None or reading.done():
                if client is not None:
                    await client.close()
                client = await RawClient.connected(port)
                reading = asyncio.ensure_future(read(client))
                noise.producers.clear()
            command = noise.command()
            client.say(command, blob=noise.blob() if isinstance(command, commands.Send) else b"")
            if isinstance(command, (commands.Producer, commands.Subscribe)) or noise.random.random() < 0.1:
                await asyncio.sleep(0.003)
            if noise.random.random() < 0.002:
                await client.close()
        if client is not None and reading is not None:
            reading.cancel()
            await client.close()

    async with broker_at(tmp_path / "store") as (_, port):
        await asyncio.gather(*(talk(Noise(seed * 100 + each), port) for each in range(4)))
        watcher = await RawClient.connected(port)
        assert await watcher.ask(commands.Ping()) == commands.Pong()
    assert [
        record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR
    ] == []
    with DelayedStore.open(tmp_path / "store") as store:
        assert list(store.check(deep=True)) == []
