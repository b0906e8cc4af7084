"""One broker for the tests of a module that change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore
from duelog.broker.admin.routing import Route
from tests.broker.admin.rest import Answered, Rest, administered


class RestRunner:
    """Sends requests from code that does not wait in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rest: Rest, store: DelayedStore, routes: list[Route]) -> None:
        self.loop = loop
        self.rest = rest
        self.store = store
        self.routes = routes

    def ask(self, method: str, path: str, body: Any = ..., **values: Any) -> Answered:
        """See `Rest.ask`."""
        return self.loop.run_until_complete(self.rest.ask(method, path, body, **values))


@pytest.fixture(scope="module")
def rest_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestRunner]:
    """A broker with tenant my-tenant and namespace my-tenant/my-ns."""
    path: Path = tmp_path_factory.mktemp("broker") / "store"
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        stack = AsyncExitStack()
        broker, rest, store = loop.run_until_complete(stack.enter_async_context(administered(path)))
        assert broker.application is not None
        found = RestRunner(loop, rest, store, broker.application.router.routes)
        found.ask("PUT", "/admin/v2/tenants/my-tenant", {"adminRoles": []})
        found.ask("PUT", "/admin/v2/namespaces/my-tenant/my-ns")
        yield found
        loop.run_until_complete(stack.aclose())
