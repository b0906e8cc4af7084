"""Work for threads after the broker's end, and files that a running broker follows."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from duelog.broker.protocol.loop_calls import Workers, keep_refreshing
from duelog.errors import ClosedError


def test_work_that_comes_after_the_end_is_refused_and_breaks_nothing() -> None:
    """A request may be under way when the broker's threads end."""
    executor = ThreadPoolExecutor(1)
    workers = Workers(executor)
    executor.shutdown()
    workers.start(lambda: pytest.fail("it ran"))
    with pytest.raises(ClosedError):
        asyncio.run(workers(int))


async def test_a_look_that_fails_is_logged_and_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """A file that goes away between two steps of a look must not leave an old certificate in use for ever."""
    looks: list[bool | None] = [None, False, True]
    done = asyncio.Event()

    def look() -> bool:
        found = looks.pop(0)
        if found is None:
            raise FileNotFoundError("broker.pem")
        return found

    task = asyncio.create_task(keep_refreshing(look, 0, done.set))
    await asyncio.wait_for(done.wait(), 30)
    task.cancel()
    await asyncio.wait([task])
    assert looks == []
    assert "broker.pem" in caplog.text
