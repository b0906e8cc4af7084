"""The web server with its broker: where it listens, TLS, limits, the end."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duelog.store.errors import InvalidArgument
from tests.broker.admin.rest import Rest, administered
from tests.broker.security.certificates import write_pair


async def test_a_port_in_use_is_named_and_nothing_listens(tmp_path: Path) -> None:
    """The broker does not start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgument, match=f"webServicePort={port}"):
            async with administered(tmp_path / "s", web_service_port=port):
                raise AssertionError


def test_it_is_served_over_tls_with_the_certificate_of_the_broker(tmp_path: Path) -> None:
    """At a port of its own; without a certificate such a port is refused."""
    certificate, key = write_pair(tmp_path)
    settings: dict[str, Any] = {
        "tls_certificate_file_path": certificate,
        "tls_key_file_path": key,
        "broker_service_port_tls": 0,
        "web_service_port_tls": 0,
    }

    async def main() -> None:
        async with administered(tmp_path / "s", **settings) as (broker, rest, _):
            trusting = ssl.create_default_context(cafile=str(certificate))
            trusting.check_hostname = False
            connector = aiohttp.TCPConnector(ssl=trusting)
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get(broker.web_urls.tls + "/lookup/v2/topic/persistent/public/default/t") as answer,
            ):
                found = await answer.json()
            assert found["httpUrlTls"] == broker.web_urls.tls
            assert found["brokerUrlTls"] == broker.urls.tls
            assert found["httpUrl"] == rest.address

    asyncio.run(main())
    with pytest.raises(InvalidArgument, match="webServicePortTls"):
        asyncio.run(_started(tmp_path, web_service_port_tls=0))


async def _started(path: Path, **settings: Any) -> None:
    async with administered(path / "other", **settings):
        pass


async def test_connections_over_the_limit_are_closed_and_those_before_go_on(tmp_path: Path) -> None:
    """maxHttpServerConnections; there is place again when one has ended."""
    async with administered(tmp_path / "s", max_http_server_connections=3) as (_, rest, _):
        assert (await rest.ask("GET", "/status.html")).status == 200  # the session's, kept alive
        port = int(rest.address.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in held:
            writer.write(b"GET /status.html HTTP/1.1\r\nHost: a\r\n\r\n")
        for reader, _ in held:
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
        assert (await rest.ask("GET", "/status.html")).status == 200
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(60):
            while True:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /status.html HTTP/1.1\r\nHost: a\r\n\r\n")
                answered = await reader.readline()
                writer.close()
                if answered:
                    break


async def test_a_body_that_does_not_come_is_408(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its connection is closed."""
    monkeypatch.setattr("duelog.broker.admin.application._BODY_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rest.address.rpartition(":")[2]))
    writer.write(b"PUT /admin/v2/tenants/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
    assert (await reader.readline()).split()[1] == b"408"
    writer.close()
    assert (await rest.ask("GET", "/admin/v2/tenants")).value == ["public"]


async def test_a_broker_that_ends_answers_the_request_under_way(rest: Rest) -> None:
    """And accepts no more."""
    assert rest.broker._web is not None
    runner, heap = rest.broker._web._runner, rest.services.limiter.heap
    held = await heap.acquire(heap.max_permits)
    under_way = asyncio.create_task(rest.ask("GET", "/admin/v2/namespaces/public/default/topics"))
    async with asyncio.timeout(60):
        while not heap.queue_size:
            await asyncio.sleep(0.001)
        ending = asyncio.create_task(rest.broker.stop())
        while runner.sites:
            await asyncio.sleep(0.001)
        heap.release(held)
        assert (await under_way).value == []
        await ending
    with pytest.raises(aiohttp.ClientConnectionError):
        await rest.ask("GET", "/status.html")


BROKEN = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /status.html HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    b"GET /status.html HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
)


async def test_broken_http_is_logged_in_one_line_without_a_traceback(
    rest: Rest, caplog: pytest.LogCaptureFixture
) -> None:
    """It is answered 400, and no error of the broker's."""
    caplog.set_level("INFO")
    for sent in BROKEN:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(rest.address.rpartition(":")[2]))
        writer.write(sent)
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.0 400 ")
        writer.close()
        await writer.wait_closed()
    records = [each for each in caplog.records if each.name == "duelog.broker.http"]
    assert len(records) == len(BROKEN)
    for record in records:
        assert (record.levelname, record.exc_info, "\n" in record.getMessage()) == ("INFO", None, False)
        assert record.getMessage().startswith("Error handling request from 127.0.0.1: 400")
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
