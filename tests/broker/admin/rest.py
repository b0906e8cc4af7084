"""A broker with administration, and a client of it: for tests of routes."""

import io
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import jwt
from yarl import URL

from duelog import Clock, DelayedStore
from duelog.broker.configuration import BrokerConfig
from duelog.broker.server.broker import Broker, Services, store_config
from tests.broker.server.raw_client import RawClient, end_clients

KEY = "data:;base64,c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0MTI="

SECURED: dict[str, Any] = {
    "authentication_providers": ("token",),
    "token_secret_key": KEY,
    "authorization_enabled": True,
    "super_user_roles": ("root",),
}
"""Settings of a broker that asks for tokens; `root` may do everything."""


def token(role: str, **claims: Any) -> str:
    """A token of a role, for SECURED."""
    return jwt.encode({"sub": role, **claims}, b"secretsecretsecretsecretsecret12", algorithm="HS256")


class Answered(NamedTuple):
    """An answer; `value` is its JSON, its bytes where it is none, None where it has no body."""

    status: int
    value: Any
    headers: Mapping[str, str]

    @property
    def reason(self) -> str:
        """The reason of an error."""
        return str(self.value["reason"])


class Rest:
    """Sends requests, each path as it is written."""

    broker: Broker
    store: DelayedStore
    """Those behind the address, where they are in this process."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self.address = address

    @property
    def services(self) -> Services:
        """The broker's."""
        found = self.broker._services
        assert found is not None
        return found

    async def client(self) -> RawClient:
        """A connection of the binary protocol."""
        return await RawClient.connected(int(self.broker.urls.plain.rpartition(":")[2]))

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = ...,
        *,
        role: str | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        """Send a request with a JSON body, or `data` as it is, as a role."""
        sent = dict(headers or {})
        if role is not None:
            sent["Authorization"] = f"Bearer {token(role)}"
        if body is not ...:
            data = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        url = URL(self.address + path, encoded=True)
        async with self._session.request(
            method, url, data=data and io.BytesIO(data), headers=sent, allow_redirects=False
        ) as answer:
            found = await answer.read()
            is_json = answer.content_type == "application/json"
            value = json.loads(found) if is_json and found else (found or None)
            return Answered(answer.status, value, answer.headers.copy())

    async def refuses(self, rows: "Rows", base: str = "") -> None:
        """Check the status of each answer, and that its reason has the text."""
        for method, path, body, status, text in rows:
            answered = await self.ask(method, base + path, body)
            assert (answered.status, text in answered.reason) == (status, True), (method, path, body, answered)


Rows = Iterable[tuple[str, str, Any, int, str]]
"""Method, path, body, status, and what the reason says."""


@asynccontextmanager
async def administered(
    path: Path, *, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[tuple[Broker, Rest, DelayedStore]]:
    """A broker with administration at free ports of this machine, and a client of it.

    clock: the store's; None: the machine's.
    """
    values: dict[str, Any] = {
        "bind_address": "127.0.0.1",
        "broker_service_port": 0,
        "web_service_port": 0,
        "worker_threads": 4,
    }
    config = BrokerConfig(**{**values, **settings})
    with DelayedStore.open(path, store_config(config), clock=clock) as store:
        broker = Broker(store, config)
        await broker.start()
        try:
            async with aiohttp.ClientSession() as session:
                rest = Rest(session, broker.web_urls.plain)
                rest.broker, rest.store = broker, store
                yield broker, rest, store
                end_clients()
        finally:
            await broker.stop()
