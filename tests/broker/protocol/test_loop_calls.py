"""Work for threads, after the broker's end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from duelog.broker.protocol.loop_calls import Workers
from duelog.errors import ClosedError


def test_work_that_comes_after_the_end_is_refused_and_breaks_nothing() -> None:
    """A request may be under way when the broker's threads end."""
    executor = ThreadPoolExecutor(1)
    workers = Workers(executor)
    executor.shutdown()
    workers.start(lambda: pytest.fail("it ran"))
    with pytest.raises(ClosedError):
        asyncio.run(workers(int))
