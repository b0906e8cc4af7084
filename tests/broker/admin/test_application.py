"""Administration over HTTP: credentials, rights, routes, bodies, errors; the broker's settings and health; lookups."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duelog.broker.admin.application import MAX_BODY_BYTES, Application, WebServer
from duelog.broker.admin.http_request import HttpError, Reply, Request
from duelog.broker.admin.routing import Need, Route, Router
from duelog.broker.configuration import BrokerConfig
from duelog.broker.listing.memory_limits import NAMES
from duelog.broker.security.authentication import Authentication, TokenMethod
from duelog.broker.security.permissions import Action, Permissions
from duelog.store import errors
from duelog.store.errors import InvalidArgument
from tests.broker.admin.rest import KEY, SECURED, Rest, administered, token
from tests.broker.security.certificates import write_pair


class Grants:
    """One tenant with one administrator, one namespace in which `reader` may consume."""

    def administrators(self, tenant: str) -> list[str]:
        return ["boss"] if tenant == "shop" else []

    def granted(self, namespace: str) -> dict[str, list[Action]]:
        return {"reader": [Action.CONSUME]} if namespace == "shop/mail" else {}


async def echo(request: Request) -> Any:
    """Give back what came of the path and the query."""
    return {
        "path": dict(request.path),
        "query": dict(request.query),
        "body": request.body.decode(),
        "role": request.role,
    }


async def failing(request: Request) -> Any:
    """Raises what the path says."""
    raise {
        "topic": errors.UnknownTopic("t"),
        "argument": errors.InvalidArgument("field", 3, "no"),
        "own": HttpError(409, "it is not empty"),
        "bug": ZeroDivisionError("secret"),
    }[request.path["what"]]


async def bytes_of(request: Request) -> Reply:
    """No JSON."""
    return Reply(b"\0\1", headers={"X-Pulsar-Message-ID": "1:2"})


async def nothing(request: Request) -> None:
    """Takes an object."""
    request.object()


ROUTES = [
    Route("GET", "/open", echo, "", Need.NOTHING),
    Route("GET", "/login", echo, "", Need.LOGIN, query=("a",)),
    Route("GET", "/super", echo, "", Need.SUPERUSER),
    Route("GET", "/t/{tenant}", echo, "", Need.TENANT),
    Route("GET", "/c/{tenant}/{namespace}", echo, "", Need.CONSUME),
    Route("POST", "/c/{tenant}/{namespace}", echo, "", Need.PRODUCE),
    Route("PUT", "/c/{tenant}/{namespace}/{topic}", echo, "", Need.EITHER),
    Route("GET", "/c/{tenant}/{namespace}/partitioned", nothing, "", Need.EITHER),
    Route("GET", "/fail/{what}", failing, "", Need.LOGIN),
    Route("GET", "/bytes", bytes_of, "", Need.LOGIN),
    Route("PUT", "/object", nothing, "", Need.LOGIN),
]


@asynccontextmanager
async def served(owner: str | None = None, anonymous: str | None = None) -> AsyncIterator[Rest]:
    """The routes above, for tokens."""
    authentication = Authentication({"token": TokenMethod(BrokerConfig(token_secret_key=KEY)).prove}, anonymous)
    permissions = Permissions(Grants(), ["root"])
    application = Application(ROUTES, authentication, permissions, lambda namespace: owner)
    server = WebServer(application)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.serve([listener])
    try:
        async with aiohttp.ClientSession() as session:
            yield Rest(session, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        await server.close()


MAY = (
    ("GET", "/open", None, 200),
    ("GET", "/login", None, 401),
    ("GET", "/login", "anybody", 200),
    ("GET", "/super", "boss", 403),
    ("GET", "/super", "root", 200),
    ("GET", "/t/shop", "boss", 200),
    ("GET", "/t/other", "boss", 403),
    ("GET", "/c/shop/mail", "reader", 200),
    ("GET", "/c/shop/other", "reader", 403),
    ("POST", "/c/shop/mail", "reader", 403),
    ("POST", "/c/shop/mail", "boss", 200),
    ("PUT", "/c/shop/mail/t", "reader", 200),
    ("PUT", "/c/shop/mail/t", "other", 403),
    ("GET", "/nowhere", None, 401),
    ("GET", "/nowhere", "reader", 404),
    ("GET", "/admin/v2/functions/a/b", "reader", 405),
    ("DELETE", "/login", "reader", 405),
    ("HEAD", "/open", None, 200),
    ("OPTIONS", "/open", "reader", 405),
)


async def test_a_role_may_do_what_the_route_says() -> None:
    """401 without credentials, 403 without the right, and only then what is there."""
    async with served() as rest:
        for method, path, role, status in MAY:
            answered = await rest.ask(method, path, role=role)
            assert answered.status == status, (method, path, answered)
            assert status < 400 or answered.reason


async def test_wrong_credentials_are_refused_also_where_none_would_do() -> None:
    """The anonymous role is for those who show nothing."""
    async with served(anonymous="somebody") as rest:
        for other in ({}, {"Authorization": "Basic dXNlcjpw"}, {"Authorization": "Digest x"}):
            assert (await rest.ask("GET", "/login", headers=other)).value["role"] == "somebody"
        for given in ("Bearer x", "Bearer", "Bearer %", "Bearer \u00e9",
                      f"Bearer {token('a', exp=1)}"):  # fmt: skip
            answered = await rest.ask("GET", "/login", headers={"Authorization": given})
            assert answered.status == 401, given
            assert answered.headers["WWW-Authenticate"] == "Bearer"


async def test_names_come_as_they_were_before_they_were_encoded() -> None:
    """A name may have a slash, a space as Java writes it, and a percent sign; unknown queries are dropped."""
    async with served() as rest:
        answered = await rest.ask("PUT", "/c/shop/mail/a%2Fb+c%20d%25%C3%A9", role="boss")
        assert answered.value["path"] == {"tenant": "shop", "namespace": "mail", "topic": "a/b c d%\u00e9"}
        assert (await rest.ask("PUT", "/c/shop/mail/%ff", role="boss")).status == 412
        assert (await rest.ask("PUT", "/c/shop/mail/", role="boss")).status == 405
        assert (await rest.ask("GET", "/login?a=1&a=2&b=3", role="boss")).value["query"] == {"a": "1"}
        assert (await rest.ask("PUT", "/c/shop/mail/partitioned", role="boss")).value["path"]["topic"] == "partitioned"
        assert (await rest.ask("GET", "/c/shop/mail/partitioned", role="boss")).status == 412


async def test_errors_have_a_status_and_a_reason_and_tell_nothing_of_the_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors that the store raises, that a handler raises, and that nobody expected."""
    async with served() as rest:
        found = {what: await rest.ask("GET", f"/fail/{what}", role="x") for what in ("topic", "argument", "own", "bug")}
        assert {what: each.status for what, each in found.items()} == {
            "topic": 404, "argument": 412, "own": 409, "bug": 500}  # fmt: skip
        assert "field" in found["argument"].reason
        assert found["own"].reason == "it is not empty"
        assert "secret" not in found["bug"].reason
    assert "ZeroDivisionError" in caplog.text


async def test_a_body_has_to_be_what_the_route_takes() -> None:
    """Not JSON: 400; another value: 412; too long: 413; and the server goes on."""
    async with served() as rest:
        for data, status in (
            (b"{}", 204), (b"{", 400), (b"\xff", 400), (b"[" * 100_000, 400), (b"NaN", 400), (b"9" * 5_000, 400),
            (b"3", 412), (b"", 412), (b"x" * (MAX_BODY_BYTES + 1), 413),
        ):  # fmt: skip
            answered = await rest.ask("PUT", "/object", data=data, role="x")
            assert answered.status == status, data[:10]
        assert (await rest.ask("GET", "/bytes", role="x"))[:2] == (200, b"\0\1")


async def test_a_namespace_of_another_broker_is_redirected_to_it_with_path_and_query() -> None:
    """Credentials are asked for first; the right is the other broker's to judge."""
    async with served(owner="http://other:8080") as rest:
        answered = await rest.ask("PUT", "/c/shop/mail/a%2Fb?force=true", role="nobody")
        assert answered.status == 307
        assert answered.headers["Location"] == "http://other:8080/c/shop/mail/a%2Fb?force=true"
        assert (await rest.ask("PUT", "/c/shop/mail/t")).status == 401
        assert (await rest.ask("GET", "/t/shop", role="boss")).status == 200


async def test_requests_that_are_no_http_do_not_stop_the_server() -> None:
    """Each is answered or closed."""
    async with served() as rest:
        port = int(rest.address.rpartition(":")[2])
        for raw in (b"GET\r\n\r\n", b"\0" * 100, b"GET http://[ HTTP/1.1\r\n\r\n",
                    b"GET * HTTP/1.1\r\nHost: a\r\n\r\n",
                    b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
                    b"GET //[ HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /?%ff=%fe HTTP/1.1\r\n\r\n"):  # fmt: skip
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            writer.write_eof()
            assert b" 500 " not in (await asyncio.wait_for(reader.read(), 60))[:20], raw
            writer.close()
        assert (await rest.ask("GET", "/open")).status == 200


async def test_a_page_of_another_site_changes_nothing() -> None:
    """Its browser would send what needs no credentials, or has them; reading shows the page nothing."""
    async with served(anonymous="root") as rest:
        here = {"Origin": rest.address}
        other = {"Origin": "http://evil.example"}
        assert (await rest.ask("POST", "/c/shop/mail", headers=other)).status == 403
        assert (await rest.ask("POST", "/c/shop/mail", headers={"Origin": "null"})).status == 403
        assert (await rest.ask("POST", "/c/shop/mail", headers=here)).status == 200
        assert "Access-Control-Allow-Origin" not in (await rest.ask("GET", "/login", headers=other)).headers


def test_two_routes_of_one_shape_are_refused() -> None:
    """They would answer by chance."""
    with pytest.raises(ValueError, match="two routes are one"):
        Router([Route("GET", "/a/{b}", echo, "", Need.LOGIN), Route("GET", "/a/{c}", echo, "", Need.LOGIN)])


CONFIGURATION = "/admin/v2/brokers/configuration"
HEAP = "maxTopicListInFlightHeapMemSizeMB"


async def test_a_setting_changes_at_once_and_over_a_restart_until_it_is_deleted(tmp_path: Path) -> None:
    """POST and DELETE; the limiter follows."""

    async with administered(tmp_path / "s") as (_, rest, _):
        assert (await rest.ask("GET", CONFIGURATION)).value == sorted(NAMES)
        assert (await rest.ask("GET", f"{CONFIGURATION}/values")).value == {}
        assert (await rest.ask("POST", f"{CONFIGURATION}/{HEAP}/3")).status == 204
        assert (await rest.ask("GET", f"{CONFIGURATION}/runtime")).value[HEAP] == "3"
        assert rest.services.limiter.heap.max_permits == 3 << 20
    async with administered(tmp_path / "s") as (_, rest, _):
        assert (await rest.ask("GET", f"{CONFIGURATION}/values")).value == {HEAP: "3"}
        assert rest.services.limiter.heap.max_permits == 3 << 20
        assert (await rest.ask("DELETE", f"{CONFIGURATION}/{HEAP}")).status == 204
        assert (await rest.ask("GET", f"{CONFIGURATION}/values")).value == {}
        assert rest.services.limiter.heap.max_permits == 100 << 20


async def test_the_broker_tells_its_addresses_version_and_settings_but_no_secret(tmp_path: Path) -> None:
    """Pulsar's tools ask so."""
    async with administered(tmp_path / "s", **SECURED) as (broker, rest, _):
        here = rest.address.removeprefix("http://")
        assert (await rest.ask("GET", "/admin/v2/brokers", role="root")).value == [here]
        assert (await rest.ask("GET", "/admin/v2/brokers/standalone", role="root")).value == [here]
        leader = (await rest.ask("GET", "/admin/v2/brokers/leaderBroker", role="root")).value
        assert leader == {"serviceUrl": rest.address, "brokerId": here}
        cluster = (await rest.ask("GET", "/admin/v2/clusters/standalone", role="any")).value
        assert (cluster["serviceUrl"], cluster["brokerServiceUrl"]) == (rest.address, broker.urls.plain)
        assert (await rest.ask("GET", "/admin/v2/brokers/health", role="any")).value == b"ok"
        assert (await rest.ask("GET", "/admin/v2/brokers/ready", role="any")).value == b"ok"
        assert (await rest.ask("GET", "/admin/v2/brokers/version", role="any")).value.startswith(b"duelog-")
        settings = (await rest.ask("GET", f"{CONFIGURATION}/runtime", role="root")).value
        assert settings["superUserRoles"] == "root"
        assert settings["authorizationEnabled"] == "true"
        assert settings["tokenSecretKey"] == "*****"
        assert all(isinstance(each, str) for each in settings.values())


async def test_lookup_tells_the_addresses_of_the_broker_and_of_its_listeners(tmp_path: Path) -> None:
    """By the paths of later and of earlier clients."""
    settings: dict[str, Any] = {"advertised_listeners": ("outside:pulsar://broker.example:6650",)}

    async with administered(tmp_path / "s", **settings) as (broker, rest, _):
        for kind in ("topic", "destination"):
            path = f"/lookup/v2/{kind}/persistent/public/default/t"
            assert (await rest.ask("GET", path)).value == {
                "brokerUrl": broker.urls.plain,
                "brokerUrlTls": "",
                "httpUrl": rest.address,
                "httpUrlTls": "",
                "nativeUrl": broker.urls.plain,
            }
            found = (await rest.ask("GET", path + "?listenerName=outside")).value
            assert found["brokerUrl"] == "pulsar://broker.example:6650"
            assert (await rest.ask("GET", path + "/bundle")).value == b"0x00000000_0xffffffff"
        assert (await rest.ask("GET", "/lookup/v2/topic/persistent/no/no/t")).status == 404
        assert (await rest.ask("GET", "/lookup/v2/topic/non-persistent/public/default/t")).status == 405


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
        async with asyncio.timeout(120):
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
    async with asyncio.timeout(120):
        while not heap.queue_size:
            await asyncio.sleep(0)
        ending = asyncio.create_task(rest.broker.stop())
        while runner.sites:
            await asyncio.sleep(0)
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
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.0 400 ")
        writer.close()
        await writer.wait_closed()
    records = [each for each in caplog.records if each.name == "duelog.broker.http"]
    assert len(records) == len(BROKEN)
    for record in records:
        assert (record.levelname, record.exc_info, "\n" in record.getMessage()) == ("INFO", None, False)
        assert record.getMessage().startswith("Error handling request from 127.0.0.1: 400")
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
