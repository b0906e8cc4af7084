"""Operations of the table over HTTP: who may ask for which, what comes, and what changes as it is watched."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

import duelog
from duelog.broker.admin import application
from duelog.broker.admin.http_request import HttpError
from duelog.broker.page.operation_resource import MOST_PAGES, Watching
from duelog.broker.page.page_server import NOT_BUILT, POLICY, PageFiles
from duelog.broker.protocol import commands
from duelog.operations.operation import Right
from duelog.operations.operations import OPERATIONS
from tests.broker.admin.rest import SECURED, Rest, administered, token
from tests.broker.server.raw_client import blob_of

PATH = "/duelog/v1/operations"


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """What is told, as it comes."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_an_operation_is_done_with_arguments_and_result_in_json(rest: Rest) -> None:
    """A topic is made, sent to, listed and looked at; a sequence says whether there is more."""
    sent = await rest.ask(
        "POST", f"{PATH}/send", {"topic": "t", "payload": "cGF5", "deliver_after": 60, "create": True}
    )
    assert sent.status == 200
    listed = await rest.ask("POST", f"{PATH}/scheduled", {"topic": "t"})
    assert [each["payload"] for each in listed.value["items"]] == ["cGF5"]
    assert listed.value["more"] is False
    assert (await rest.ask("POST", f"{PATH}/overview")).value["pending"] == 1
    assert (await rest.ask("POST", f"{PATH}/cancel", {"topic": "t", "ids": [sent.value["message_id"]]})).value == [
        "cancelled"
    ]


async def test_what_cannot_be_asked_is_refused_by_name(rest: Rest) -> None:
    """No such operation, one of an attached consumer, an argument that it does not take, a body that is none."""
    await rest.refuses(
        [
            ("POST", "/backup", {}, 404, "'backup' is no operation"),
            ("POST", "/receive", {}, 404, "'receive' is no operation"),
            ("POST", "/topics", {"size": 1}, 412, "unexpected keyword argument 'size'"),
            ("POST", "/scheduled", {"topic": "a/b"}, 412, "topic='a/b'"),
            ("POST", "/topic_figures", {"topic": "none"}, 404, "does not exist"),
            ("POST", "/topics", [], 412, "expected a JSON object"),
            ("POST", "/transaction", {"operations": None}, 412, "operations=None: expected a list"),
        ],
        PATH,
    )
    await rest.refuses(
        [
            ("POST", "", [["tick", {}]], 412, "tick changes something"),
            ("POST", "", {}, 412, "expected 1 to 16"),
            ("POST", "", [["topics"]], 412, "expected [operation, arguments]"),
        ],
        "/duelog/v1/watch",
    )


async def test_a_large_sequence_is_cut_and_says_so(rest: Rest) -> None:
    """After 4 MiB of payloads, as base64, no more are read."""
    for _ in range(6):
        rest.store.topic("t").send(bytes(1 << 20), deliver_after=60)
    listed = (await rest.ask("POST", f"{PATH}/scheduled", {"topic": "t"})).value
    assert (len(listed["items"]), listed["more"]) == (3, True)
    assert base64.b64decode(listed["items"][0]["payload"]) == bytes(1 << 20)


async def test_a_role_asks_for_what_it_was_granted_and_a_viewer_only_looks(tmp_path: Path) -> None:
    """By namespace, by the right of the operation; the server refuses what the page does not show."""
    settings = {**SECURED, "viewer_roles": ("guest",)}
    async with administered(tmp_path / "store", **settings) as (_, rest, store):
        store.topic("a/b/t").create()
        await rest.ask("PUT", "/admin/v2/tenants/a", {"adminRoles": [], "allowedClusters": ["standalone"]}, role="root")
        await rest.ask("PUT", "/admin/v2/namespaces/a/b", {}, role="root")
        await rest.ask("POST", "/admin/v2/namespaces/a/b/permissions/web", ["produce"], role="root")
        assert (await rest.ask("POST", f"{PATH}/overview", {})).status == 401
        statuses: dict[str, list[int]] = {}
        for role in ("root", "web", "guest", "nobody"):
            for name, given in (("send", {"topic": "a/b/t", "payload": ""}), ("scheduled", {"topic": "a/b/t"}),
                                ("scheduled", {"topic": "t"}), ("overview", {}), ("tick", {})):  # fmt: skip
                answered = await rest.ask("POST", f"{PATH}/{name}", given, role=role)
                statuses.setdefault(role, []).append(answered.status)
            watched = (
                await rest.ask("POST", "/duelog/v1/watch", [["overview", {}]], role=role) if role == "web" else None
            )
            assert watched is None or watched.status == 403
        assert statuses == {
            "root": [200, 200, 404, 200, 200], "web": [200, 200, 403, 403, 403],
            "guest": [403, 200, 404, 200, 403], "nobody": [403] * 5,
        }  # fmt: skip
        known = (await rest.ask("GET", PATH, role="guest")).value
        assert known["role"] == "guest"
        allowed = {name for name, each in known["operations"].items() if each["allowed"]}
        assert allowed == {name for name, each in OPERATIONS.items() if each.looks}
        granted = await allowed_to(rest, "web", "a/b")
        assert granted == {
            name
            for name, each in OPERATIONS.items()
            if each.right in (Right.READ, Right.PRODUCE) and each.parameters.keys() & {"topic", "namespace"}
        }


async def allowed_to(rest: Rest, role: str, namespace: str | None = None) -> set[str]:
    """The operations that a role hears that it may ask, in a namespace or of the whole store."""
    known = await rest.ask("GET", PATH if namespace is None else f"{PATH}?namespace={namespace}", role=role)
    return {name for name, each in known.value["operations"].items() if each["allowed"]}


async def test_a_role_of_one_namespace_sees_and_does_nothing_outside_it(tmp_path: Path) -> None:
    """Lists are of the namespace alone; two namespaces in one question, or none, are refused; so is what changes more.

    An administrator of a tenant may what REST lets it: make topics and set policies, in that tenant.
    """
    async with administered(tmp_path / "store", **SECURED) as (_, rest, store):
        for tenant, admins in (("a", []), ("shop", ["chief"])):
            await rest.ask(
                "PUT",
                f"/admin/v2/tenants/{tenant}",
                {"adminRoles": admins, "allowedClusters": ["standalone"]},
                role="root",
            )
        for namespace in ("a/b", "a/c", "shop/x"):
            await rest.ask("PUT", f"/admin/v2/namespaces/{namespace}", {}, role="root")
            with store.topic(f"{namespace}/t").subscribe("s") as consumer:
                consumer.dead_letter(store.topic(f"{namespace}/t").send(b"x") and consumer.receive(1)[0], "no")
        await rest.ask("POST", "/admin/v2/namespaces/a/b/permissions/desk", ["consume"], role="root")
        assert (await rest.ask("GET", PATH, role="desk")).value["namespaces"] == ["a/b"]
        assert (await rest.ask("GET", PATH, role="root")).value["namespaces"] is None
        assert await allowed_to(rest, "desk") == await allowed_to(rest, "desk", "a/c") == set()
        assert not await allowed_to(rest, "desk", "a/b") & {"overview", "connections", "tick", "send", "create_topic"}

        async def ask(name: str, role: str = "desk", **given: Any) -> Any:
            answered = await rest.ask("POST", f"{PATH}/{name}", given, role=role)
            return answered.value if answered.status == 200 else answered.status

        listed = await ask("topic_rows", namespace="a/b")
        assert ([row["name"] for row in listed["rows"]], listed["known"]) == (
            ["persistent://a/b/t", "persistent://a/b/t-s-DLQ"], 2,
        )  # fmt: skip
        with store.topic("a/b/t").subscribe("s"), store.topic("a/c/t").subscribe("s"):
            assert [each["topic"] for each in await ask("receiving", namespace="a/b")] == ["persistent://a/b/t"]
        page = await ask("dead_letter_page", namespace="a/b")
        assert [each["topic"] for each in page["letters"]] == ["persistent://a/b/t"]
        for name in ("topic_rows", "receiving", "dead_letter_page", "requeue_dead_letters", "purge_dead_letters"):
            assert await ask(name) == await ask(name, namespace="a/c") == 403, name
        assert await ask("purge_dead_letters", topic="a/b/t", namespace="a/c") == 403
        assert await ask("send", topic="a/b/t", payload="") == 403
        assert await ask("overview", namespace="a/b") == 403
        assert await ask("purge_dead_letters", namespace="a/b") == 1
        assert len(list(store.dead_letters())) == 2
        assert (await rest.ask("POST", "/duelog/v1/watch", [["receiving", {}]], role="desk")).status == 403
        assert await ask("create_topic", "chief", topic="shop/x/u") is True
        assert (await ask("update_policies", "chief", topic="shop/x/u", values={"ttl_ms": 1_000}))["ttl_ms"] == 1_000
        assert await ask("create_topic", "chief", topic="a/b/u") == await ask("tick", "chief", topic="shop/x/u") == 403
        assert await allowed_to(rest, "chief", "shop/x") >= {"create_topic", "send", "purge_dead_letters", "effective"}
        assert not await allowed_to(rest, "chief", "shop/x") & {"tick", "overview", "figures", "transaction"}


async def test_another_site_changes_nothing(rest: Rest) -> None:
    """By Origin, by Sec-Fetch-Site, and by a name that was made to lead to this machine."""
    for headers in (
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        for path in (f"{PATH}/tick", "/duelog/v1/watch", "/admin/v2/tenants/x"):
            answered = await rest.ask("POST", path, {}, headers=headers)
            assert (answered.status, "may change nothing here" in answered.reason) == (403, True)
    for method, path in (("GET", PATH), ("POST", f"{PATH}/tick")):
        answered = await rest.ask(method, path, headers={"Host": "evil.example:8080"})
        assert (answered.status, "asked as localhost" in answered.reason) == (403, True)
    assert (await rest.ask("POST", f"{PATH}/tick", {}, headers={"Sec-Fetch-Site": "same-origin"})).status == 200


async def test_a_watch_tells_each_answer_once_and_again_when_it_has_changed(rest: Rest) -> None:
    """Two questions, an error among them; nothing is told again while nothing changes; stopping ends it."""
    body = [["topics", {}], ["subscriptions", {"topic": "t"}]]
    async with aiohttp.ClientSession() as session, session.post(rest.address + "/duelog/v1/watch", json=body) as answer:
        assert (answer.content_type, answer.headers["X-Content-Type-Options"]) == ("text/event-stream", "nosniff")
        told = events(answer)
        assert await anext(told) == {"at": 0, "result": {"items": [], "more": False}}
        assert "does not exist" in (await anext(told))["reason"]
        rest.store.topic("t").create()
        assert await anext(told) == {"at": 0, "result": {"items": ["persistent://public/default/t"], "more": False}}
        assert await anext(told) == {"at": 1, "result": []}
        assert rest.services.operations.watching.pages == 1
        rest.services.operations.watching.close()
        assert [each async for each in told] == []
    assert rest.services.operations.watching.pages == 0


async def test_a_watch_tells_nothing_once_its_right_was_taken_or_its_token_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on with the rights that it began with."""
    async with administered(tmp_path / "store", **SECURED) as (_, rest, store), aiohttp.ClientSession() as session:

        async def ask(method: str, path: str, body: Any) -> None:
            assert (await rest.ask(method, f"/admin/v2/{path}", body, role="root")).status in (200, 204)

        def watched(**claims: int) -> Any:
            headers = {"Authorization": f"Bearer {token('web', **claims)}"}
            return session.post(
                f"{rest.address}/duelog/v1/watch", json=[["subscriptions", {"topic": "a/b/t"}]], headers=headers
            )

        store.topic("a/b/t").create()
        await ask("PUT", "tenants/a", {"adminRoles": [], "allowedClusters": ["standalone"]})
        await ask("PUT", "namespaces/a/b", {})
        await ask("POST", "namespaces/a/b/permissions/web", ["consume"])
        expires_s = int(time.time()) + 600
        async with watched(exp=expires_s) as answer:
            told = events(answer)
            assert await anext(told) == {"at": 0, "result": []}
            monkeypatch.setattr(application, "time", SimpleNamespace(time=lambda: expires_s))
            store.topic("a/b/t").subscribe("s").close()
            assert [each async for each in told] == []
        async with watched() as answer:
            told = events(answer)
            assert len((await anext(told))["result"]) == 1
            await ask("DELETE", "namespaces/a/b/permissions/web", None)
            assert "role 'web' may not ask" in (await anext(told))["reason"]


async def test_too_many_pages_are_refused() -> None:
    """One closed makes room for another."""

    async def look() -> tuple[bytes, float]:
        return b"1", 0.0

    watching = Watching()
    opened = [watching.events([look]) for _ in range(MOST_PAGES)]
    for each in opened:
        await anext(each)
    with pytest.raises(HttpError, match="64 pages are open"):
        await anext(watching.events([look]))
    await opened.pop().aclose()
    assert await anext(watching.events([look])) == b"retry: 2000\n\n"
    for each in opened:
        await each.aclose()


async def test_files_forbid_all_that_is_not_theirs(tmp_path: Path) -> None:
    """Each has the policy; none is found outside the directory; without any, the page says how they are built."""
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "app.js").write_text("1")
    files = PageFiles(tmp_path)
    index = await files.index(None)  # type: ignore[arg-type]  # it looks at nothing of it
    assert (index.status, index.body, index.headers["Content-Security-Policy"]) == (200, b"<!doctype html>", POLICY)
    assert "'unsafe" not in POLICY
    unbuilt = await PageFiles(tmp_path / "none").index(None)  # type: ignore[arg-type]
    assert (unbuilt.status, unbuilt.body) == (404, NOT_BUILT.encode())


async def test_the_page_is_served_without_credentials_and_its_data_is_not(tmp_path: Path) -> None:
    """The page itself tells nothing; a file that is none, or lies elsewhere, is 404."""
    async with administered(tmp_path / "store", **SECURED) as (_, rest, _):
        assert (await rest.ask("GET", "/")).status in (200, 404)
        for path in ("/page/none.js", "/page/..%2Fpage_server.py", "/page/%2Fetc%2Fpasswd"):
            assert (await rest.ask("GET", path)).status == 404
        assert (await rest.ask("GET", PATH)).status == 401
        assert (await rest.ask("GET", PATH, headers={"Authorization": f"Bearer {token('root')}"})).status == 200


async def test_clients_of_the_broker_and_who_receives_are_told(rest: Rest) -> None:
    """With the memory of topic lists; a consumer that has left is told no more."""
    client = await rest.client()
    with rest.store.topic("t").subscribe("s"):
        receiving = (await rest.ask("POST", f"{PATH}/receiving")).value
        assert [(each["topic"], each["subscription"]["name"]) for each in receiving] == [
            ("persistent://public/default/t", "s")
        ]
    told = (await rest.ask("POST", f"{PATH}/connections")).value
    assert [(each["producers"], each["consumers"], each["address"][:10]) for each in told["connections"]] == [
        (0, 0, "127.0.0.1:")
    ]
    assert [(each["used"], each["most"]) for each in told["limits"]] == [(0, 100 << 20)] * 2
    assert (await rest.ask("POST", f"{PATH}/receiving")).value == []
    await client.close()


async def test_producers_and_consumers_are_told_with_permits_and_the_rates_of_rest(rest: Rest) -> None:
    """Of a Pulsar client, with its version; of a connected program its name, version, kind and what it holds."""
    name, kind = "persistent://public/default/t", commands.SubscriptionType.SHARED
    client = await rest.client()
    await client.ask_for(commands.Success, commands.Subscribe(name, "s", kind, 1, 1, "c"))
    await client.ask_for(commands.ProducerSuccess, commands.Producer(name, 1, 2, "p"))
    client.say(commands.Flow(1, 7))
    for number in range(3):
        client.say(commands.Send(1, number), blob=blob_of(b"x", number))
    heard = [await client.hear() for _ in range(6)]
    assert sum(isinstance(each, commands.Message) for each in heard) == 3
    rest.services.rates.sample()

    def connected() -> duelog.DelayedStore:
        return duelog.connect(rest.store.path, name="web app")

    with await asyncio.to_thread(connected) as program:

        def work() -> None:
            topic = program.topic("u")
            topic.send(b"y")
            assert topic.subscribe("v", type="shared", initial_position="earliest").receive(1, timeout=20)

        await asyncio.to_thread(work)
        told = (await rest.ask("POST", f"{PATH}/connections")).value
        mine, theirs = told["connections"]
        assert (told["total"], mine["name"], mine["client"], mine["kind"], mine["held"], mine["consumers"]) == (
            2, "web app", f"duelog {duelog.__version__}", "program", 1, 1,
        )  # fmt: skip
        assert (theirs["client"], theirs["kind"], theirs["permits"], theirs["held"]) == ("test", "pulsar", 4, 3)
        parts = {(each["topic"][-1], each["subscription"]): each for each in told["parts"]}
        assert parts.keys() == {("u", None), ("u", "v"), ("t", None), ("t", "s")}
        producer, consumer = parts["t", None], parts["t", "s"]
        assert (producer["name"], producer["messages"], consumer["name"], consumer["messages"]) == ("p", 3, "c", 3)
        assert (consumer["permits"], consumer["held"], parts["u", "v"]["held"]) == (4, 3, 1)
        stats = (await rest.ask("GET", "/admin/v2/persistent/public/default/t/stats")).value
        (publisher,), (subscriber,) = stats["publishers"], stats["subscriptions"]["s"]["consumers"]
        assert 0 < producer["rate"] == publisher["msgRateIn"]
        assert 0 < consumer["rate"] == subscriber["msgRateOut"]
        assert consumer["bytes_rate"] == subscriber["msgThroughputOut"]
    await client.close()
