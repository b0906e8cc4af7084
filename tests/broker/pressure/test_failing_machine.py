"""A disk that cannot be flushed, a clock that is set back, under a served store."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog.broker.protocol import commands
from duelog.broker.protocol.failures import ServerError
from tests.broker.clients.conftest import ServedStore
from tests.broker.pressure.served import Talker, blob_of

HERE = Path(__file__).parent
TOPIC = "persistent://public/default/failing"


class FaultyStore(ServedStore):
    """Served on a machine that fails once `flag` is there."""

    kind = ""

    @property
    def flag(self) -> Path:
        return self.folder / "flag"

    def command(self) -> list[str]:
        return [sys.executable, str(HERE / "faulty_serve.py"), self.kind, str(self.flag)]


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FaultyStore]:
    """A broker, by what of its machine fails."""
    made = FaultyStore(tmp_path / "broker")
    made.kind = request.param
    made.start()
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.parametrize("served", ["disk"], indirect=True)
def test_a_failed_store_closes_producers_and_opens_no_more(served: FaultyStore) -> None:
    """ServiceNotReady until it is started again; then every receipt is there, and sends pass."""

    async def fail() -> None:
        client = await Talker.connected(served.port)
        await client.produce(TOPIC)
        await client.send_all([b"m"] * 50)
        served.flag.touch()
        client.say(commands.Send(1, 50), blob=blob_of(b"lost", 50))
        closed = await client.hear()
        assert isinstance(closed, commands.CloseProducer), closed
        refused = await client.ask(commands.Producer(TOPIC, 2, 7))
        assert isinstance(refused, commands.Error), refused
        assert (refused.request_id, refused.error) == (7, ServerError.SERVICE_NOT_READY)
        await client.close()

    async def go_on() -> None:
        client = await Talker.connected(served.port)
        await client.subscribe(TOPIC, "s")
        await client.produce(TOPIC, 2)
        await client.send_all([b"m"], 2)
        client.say(commands.Flow(1, 100))
        await client.messages(51)
        await client.close()

    async def attach() -> None:
        client = await Talker.connected(served.port)
        await client.subscribe(TOPIC, "s")
        await client.close()

    asyncio.run(attach())
    asyncio.run(fail())
    served.kill()
    served.flag.unlink()
    served.start()
    asyncio.run(go_on())


@pytest.mark.parametrize("served", ["clock"], indirect=True)
def test_a_clock_that_is_set_back_loses_nothing_and_makes_nothing_early(served: FaultyStore) -> None:
    """Messages flow on; what was delayed comes when the clock is right again, not before its time."""

    async def main() -> None:
        client = await Talker.connected(served.port)
        await client.subscribe(TOPIC)
        client.say(commands.Flow(1, 100))
        await client.produce(TOPIC)
        due_ms = time.time_ns() // 1_000_000 + 1_500
        client.say(commands.Send(1, 0), blob=blob_of(b"delayed", 0, deliver_at_time=due_ms))
        assert isinstance(await client.hear(), commands.SendReceipt)
        served.flag.touch()
        client.say(commands.Send(1, 1), blob=blob_of(b"at once", 1))
        heard = [await client.hear_blob(), await client.hear_blob()]
        kinds = {type(each[0]) for each in heard if each is not None}
        assert kinds == {commands.SendReceipt, commands.Message}
        assert all(b"delayed" not in each[1] for each in heard if each is not None)
        served.flag.unlink()
        ((_, blob),) = await client.messages(1)
        assert b"delayed" in blob
        assert time.time() * 1_000 >= due_ms
        await client.close()

    asyncio.run(main())
    assert served.stop() == 0, served.log()
