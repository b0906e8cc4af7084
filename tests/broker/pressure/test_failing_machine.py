"""A clock that is set back, and then a disk that cannot be flushed, under a served store."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog.broker.protocol import commands
from duelog.broker.protocol.failures import ServerError
from tests.broker.clients.conftest import ServedStore
from tests.broker.pressure.served import Talker
from tests.broker.server.raw_client import blob_of

pytestmark = pytest.mark.xdist_group("failing machine")  # one broker for both
TOPIC = "persistent://public/default/"


class FaultyStore(ServedStore):
    """Served on a machine whose `disk` or `clock` fails once there is a file of that name."""

    def command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).parent / "faulty_serve.py"), str(self.folder)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyStore]:
    """One broker for both faults; ends cleanly."""
    with FaultyStore(tmp_path_factory.mktemp("broker")).running() as made:
        yield made


async def test_a_clock_that_is_set_back_loses_nothing_and_makes_nothing_early(served: FaultyStore) -> None:
    """Messages flow on; what was delayed comes when the clock is right again, not before its time."""
    topic, flag = f"{TOPIC}clock", served.folder / "clock"
    client = await Talker.connected(served.port)
    await client.subscribe(topic)
    client.say(commands.Flow(1, 100))
    await client.produce(topic)
    due_ms = time.time_ns() // 1_000_000 + 5_000
    client.say(commands.Send(1, 0), blob=blob_of(b"delayed", 0, deliver_at_time=due_ms))
    assert isinstance(await client.hear(), commands.SendReceipt)
    flag.touch()
    client.say(commands.Send(1, 1), blob=blob_of(b"at once", 1))
    heard = [await client.hear_blob(), await client.hear_blob()]
    kinds = {type(each[0]) for each in heard if each is not None}
    assert kinds == {commands.SendReceipt, commands.Message}
    assert all(b"delayed" not in each[1] for each in heard if each is not None)
    flag.unlink()
    ((_, blob),) = await client.messages(1)
    assert b"delayed" in blob
    assert time.time() * 1_000 >= due_ms


async def test_a_failed_store_closes_producers_and_opens_no_more(served: FaultyStore) -> None:
    """ServiceNotReady until it is started again; then every receipt is there, and sends pass."""
    topic, flag = f"{TOPIC}disk", served.folder / "disk"
    client = await Talker.connected(served.port)
    await client.subscribe(topic)
    await client.produce(topic)
    await client.send_all([b"m"] * 50)
    flag.touch()
    client.say(commands.Send(1, 50), blob=blob_of(b"lost", 50))
    await client.hear_a(commands.CloseProducer)
    refused = await client.ask_for(commands.Error, commands.Producer(topic, 2, 7))
    assert (refused.request_id, refused.error) == (7, ServerError.SERVICE_NOT_READY)
    await client.close()
    served.kill()
    flag.unlink()
    served.start()
    client = await Talker.connected(served.port)
    await client.subscribe(topic)
    await client.produce(topic, 2)
    await client.send_all([b"m"], 2)
    client.say(commands.Flow(1, 100))
    await client.messages(51)
