"""Clients that take nothing, take little, or give too much: others go on, and the broker's memory has a bound.

Raw frames against `duelog serve` in a process of its own. DUELOG_BROKER_CONNECTIONS=10000 asks for as many idle ones.
"""

import asyncio
import resource
import socket
from collections.abc import Iterator

import pytest

from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import SubscriptionType
from tests.broker.clients.conftest import ServedStore
from tests.broker.pressure.served import Talker, others, resident_bytes
from tests.broker.server.raw_client import blob_of
from tests.proof import length

pytestmark = [pytest.mark.series, pytest.mark.xdist_group("pressure")]  # one broker for all

CONNECTIONS = length("DUELOG_BROKER_CONNECTIONS", 500, 10_000)
CONSUMERS = length("DUELOG_BROKER_CONSUMERS", 200, 1_000)
MEMORY = 384 << 20
"""Bytes that the broker may have resident, whatever one client does."""

CONNECTION_MEMORY = 24 << 10
"""Bytes that an idle connection may cost."""

UNACKED = 200
KIB = 1 << 10
TOPIC = "persistent://public/default/"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    """A broker for all tests of the module; ends cleanly, with its memory bounded."""
    made = ServedStore(
        tmp_path_factory.mktemp("broker"), brokerMaxConnectionsPerIp=15_000, maxUnackedMessagesPerConsumer=UNACKED
    )
    with made.running():
        yield made


def small_buffer(client: Talker) -> None:
    """Have the system keep little for a client that does not read."""
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * KIB)


async def test_a_slow_consumer_gets_everything_in_order_and_holds_up_nobody(served: ServedStore) -> None:
    """32 MiB for a client that reads 64 KiB at a time, and the flow of others between."""
    async with others(served.port) as flowing:
        slow, producer = await Talker.connected(served.port), await Talker.connected(served.port)
        small_buffer(slow)
        topic = f"{TOPIC}slow"
        await slow.subscribe(topic, kind=SubscriptionType.EXCLUSIVE)
        slow.say(commands.Flow(1, 1_000))
        await producer.produce(topic)
        sent = []
        for _ in range(8):
            sent += await producer.send_all([bytes(64 * KIB)] * 64)
            await flowing.flow(20)
        assert resident_bytes(served.pid) < MEMORY
        found = []
        for _ in range(8):
            found += await slow.messages(64)
            await flowing.flow(20)
        assert [command.message_id for command, _ in found] == sent
        assert all(not command.redelivery_count for command, _ in found)


async def test_a_consumer_that_acknowledges_nothing_is_sent_no_more_than_it_may_hold(served: ServedStore) -> None:
    """The other consumer of the subscription gets the rest, and at the end what the first one held."""
    stuck, working = await Talker.connected(served.port), await Talker.connected(served.port)
    producer = await Talker.connected(served.port)
    topic = f"{TOPIC}stuck"
    await stuck.subscribe(topic)
    stuck.say(commands.Flow(1, 10_000))
    await producer.produce(topic)
    sent = await producer.send_all([b"m"] * 500)
    held = await stuck.messages(UNACKED)
    await working.subscribe(topic)
    working.say(commands.Flow(1, 10_000))
    # A poll may have been under way as the limit was reached: what it gave is sent, no more.
    rest: list[tuple[commands.Message, bytes]] = []
    while len(rest) < 500 - len(held):
        more = await working.messages(1)
        working.acknowledge(more)
        rest += more
    await stuck.close()
    again = await working.messages(len(held))
    working.acknowledge(again)
    assert sorted(command.message_id.entry_id for command, _ in again) == sorted(
        command.message_id.entry_id for command, _ in held
    )
    everything = {command.message_id.entry_id for command, _ in rest + again}
    assert everything == {each.entry_id for each in sent}


async def test_a_client_that_never_reads_costs_little_and_what_it_held_goes_to_others(served: ServedStore) -> None:
    """It asks for all messages and for a hundred thousand answers; the broker keeps little of either."""
    async with others(served.port) as flowing:
        deaf, producer = await Talker.connected(served.port), await Talker.connected(served.port)
        small_buffer(deaf)
        topic = f"{TOPIC}deaf"
        await deaf.subscribe(topic)
        deaf.say(commands.Flow(1, 100_000))
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await producer.produce(topic)
        sent = await producer.send_all([bytes(64 * KIB)] * 256)
        question = [commands.GetLastMessageId(1, number) for number in range(1_000)]

        async def ask() -> None:
            for _ in range(100):
                deaf.say(*question)
                await deaf.writer.drain()

        asking = asyncio.ensure_future(ask())
        working = await Talker.connected(served.port)
        await working.subscribe(topic)
        working.say(commands.Flow(1, 1_000))
        found: set[int] = set()
        while len(found) < len(sent) - UNACKED:
            more = await working.messages(1)
            working.acknowledge(more)
            found.add(more[0][0].message_id.entry_id)
            assert resident_bytes(served.pid) < MEMORY
        await flowing.flow()
        asking.cancel()
        deaf.writer.transport.abort()
        while len(found) < len(sent):
            more = await working.messages(1)
            working.acknowledge(more)
            found.add(more[0][0].message_id.entry_id)


async def test_a_producer_that_floods_is_not_read_until_it_reads_its_receipts(served: ServedStore) -> None:
    """All is stored once, receipts are in order, others flow meanwhile."""
    count = 20_000
    async with others(served.port) as flowing:
        flood = await Talker.connected(served.port)
        small_buffer(flood)
        await flood.produce(f"{TOPIC}flood")
        blob = blob_of(bytes(KIB))

        async def write() -> None:
            for number in range(count):
                flood.say(commands.Send(1, number), blob=blob)
                if number % 100 == 0:
                    await flood.writer.drain()

        flood.writer.transport.pause_reading()  # type: ignore[attr-defined]
        writing = asyncio.ensure_future(write())
        for _ in range(5):
            await flowing.flow()
            assert resident_bytes(served.pid) < MEMORY
        flood.writer.transport.resume_reading()  # type: ignore[attr-defined]
        heard = 0
        while heard < count:
            receipt = await flood.hear_a(commands.SendReceipt)
            assert receipt.sequence_id == heard
            heard += 1
        await writing


async def test_a_thousand_consumers_share_a_topic(served: ServedStore) -> None:
    """Each message goes to one of them, and all get some."""
    async with asyncio.timeout(300), others(served.port) as flowing:
        clients = [await Talker.connected(served.port) for _ in range(10)]
        topic = f"{TOPIC}thousand"

        async def attach(client: Talker) -> None:
            for number in range(CONSUMERS // 10):
                await client.subscribe(topic, consumer_id=number)
                client.say(commands.Flow(number, 1_000))

        await asyncio.gather(*map(attach, clients))
        producer = await Talker.connected(served.port)
        await producer.produce(topic)
        found: list[tuple[commands.MessageIdData, int, int]] = []

        async def consume(place: int, client: Talker) -> None:
            while True:
                (message,) = await client.messages(1)
                client.acknowledge([message])
                found.append((message[0].message_id, place, message[0].consumer_id))

        consuming = [asyncio.ensure_future(consume(*pair)) for pair in enumerate(clients)]
        sent: list[commands.MessageIdData] = []
        while len({pair[1:] for pair in found}) < CONSUMERS and len(sent) < 60_000:
            sent += await producer.send_all([b"m"] * 2_000)
            await flowing.flow(20)
        while len(found) < len(sent):
            await asyncio.sleep(0.01)
        for task in consuming:
            task.cancel()
        assert len({pair[1:] for pair in found}) == CONSUMERS
        places = sorted((each.ledger_id, each.entry_id) for each, _, _ in found)
        assert places == [(each.ledger_id, each.entry_id) for each in sent]
        assert resident_bytes(served.pid) < MEMORY


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Descriptors for all connections; skips where a process may not have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + 500
    if hard < wanted:
        pytest.skip(f"a process may have {hard} descriptors here; {wanted} are wanted")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
async def test_idle_connections_cost_little(served: ServedStore) -> None:
    """Others flow between them, and all are there after PINGs that they answer."""
    async with others(served.port) as flowing:
        before = resident_bytes(served.pid)
        clients: list[Talker] = []
        ended: list[Talker] = []

        async def stay(client: Talker) -> None:
            while (heard := await client.reader.read(KIB)) and heard:
                client.say(commands.Pong())
            ended.append(client)

        staying = []
        for _ in range(CONNECTIONS // 50):
            more = await asyncio.gather(*(Talker.connected(served.port) for _ in range(50)))
            clients += more
            staying += [asyncio.ensure_future(stay(each)) for each in more]
            await flowing.flow(5)
        assert not ended
        grown = resident_bytes(served.pid) - before
        print(f"{CONNECTIONS} connections: {grown / CONNECTIONS:.0f} bytes each")
        assert grown < CONNECTIONS * CONNECTION_MEMORY + (16 << 20)
        await flowing.flow()
        for task in staying:
            task.cancel()
