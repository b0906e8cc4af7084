"""The disk under a served store is full: sends are refused, each with its answer, and go on once there is space."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog.broker.protocol import commands
from duelog.broker.protocol.failures import ServerError
from tests.broker.clients.conftest import ServedStore
from tests.broker.pressure.served import Talker
from tests.broker.server.raw_client import blob_of

pytestmark = pytest.mark.fault
TOPIC = "persistent://public/default/full"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    """A broker on a file system of 32 MiB; skips where none can be mounted."""
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("mounting needs root and mount(8)")
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    made = ServedStore(path)
    try:
        made.start()
        yield made
    finally:
        made.kill()
        subprocess.run(["umount", "-l", str(path)], check=True)


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
