"""Tests that are coroutine functions run on an event loop of their own, with what their fixtures begin on it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.broker.peers import FakePeer, OnLoop
from tests.broker.server.raw_client import RawClient, end_clients

if TYPE_CHECKING:
    from tests.broker.admin.rest import Rest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function to its end with its fixtures; other tests are pytest's."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(_run(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names}))
    return True


async def _run(test: Any, fixtures: dict[str, Any]) -> None:
    """What is to be made on the loop is made, asynchronous context managers are entered until the test's end."""
    async with AsyncExitStack() as stack:
        for name, value in fixtures.items():
            if isinstance(value, OnLoop):
                fixtures[name] = value.make()
            elif isinstance(value, AbstractAsyncContextManager):
                fixtures[name] = await stack.enter_async_context(value)
        RawClient.open_ones.clear()
        try:
            await test(**fixtures)
        finally:
            end_clients()


@pytest.fixture
def peer() -> FakePeer:
    """A connection that records what it is sent."""
    return FakePeer()


@pytest.fixture
def other() -> FakePeer:
    """Another one."""
    return FakePeer()


@pytest.fixture
def rest(tmp_path: Path) -> AbstractAsyncContextManager[Rest]:
    """A broker with administration, and a client of it."""
    from tests.broker.admin.rest import administered  # noqa: PLC0415 (needs what is installed for a broker)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Rest]:
        async with administered(tmp_path / "store") as (_, found, _):
            yield found

    return opened()
