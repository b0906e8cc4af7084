"""The disk under a served store is full: sends are refused, each with its answer, and go on once there is space."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog.broker.protocol import commands
from duelog.broker.protocol.failures import ServerError
from tests.broker.clients.conftest import ServedStore
from tests.broker.pressure.served import Talker
from tests.broker.server.raw_client import blob_of
from tests.disaster.loop_disk import full_soon

pytestmark = pytest.mark.fault
TOPIC = "persistent://public/default/full"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    """A broker on a file system of 32 MiB; skips where none can be mounted."""
    with full_soon(tmp_path / "disk", 32) as path:
        made = ServedStore(path)
        try:
            made.start()
            yield made
        finally:
            made.kill()


def test_a_full_disk_refuses_sends_and_passes_when_there_is_space(served: ServedStore) -> None:
    """PersistenceError for each SEND, in order, over a connection that stays; every receipt is delivered at the end."""
    ballast = served.folder / "ballast"

    async def main() -> None:
        client, consumer = await Talker.connected(served.port), await Talker.connected(served.port)
        await consumer.subscribe(TOPIC)
        await client.produce(TOPIC)
        receipts, number = [], 0

        async def send(payload: bytes) -> bool:
            """Send; True: there is a receipt, False: it is refused."""
            nonlocal number
            client.say(commands.Send(1, number), blob=blob_of(payload, number))
            answer = await client.hear()
            assert isinstance(answer, commands.SendReceipt | commands.SendError), answer
            assert answer.sequence_id == number
            number += 1
            if isinstance(answer, commands.SendReceipt):
                receipts.append(answer.message_id)
                return True
            assert answer.error == ServerError.PERSISTENCE, answer
            return False

        assert await send(b"before")
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        while await send(bytes(100_000)):
            assert number < 1_000
        assert not await send(bytes(100_000))
        ballast.unlink()
        assert await send(b"after")
        consumer.say(commands.Flow(1, 1_000))
        found = await consumer.messages(len(receipts))
        assert [command.message_id for command, _ in found] == receipts
        consumer.acknowledge(found)
        await client.close()
        await consumer.close()

    asyncio.run(main())
    assert served.stop() == 0, served.log()
