"""Commands of a directory and of a server: one habit, the same output; and one line for what a server refuses."""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs duelog[broker]")

from duelog import DelayedStore, Message, StoreConfig
from duelog.store.files.directory import DISK_PARTS, disk_parts, size_bytes
from duelog.tools.cli.server import RestClient
from tests.broker.admin.rest import SECURED, administered, token
from tests.broker.security.certificates import write_pair
from tests.tools.command_line import DAY_MS, FUTURE_MS, json_lines_of, json_of, ok, refused, run


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server of another program, which answers each request by `answer`; its address."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{other.server_port}"
        finally:
            other.shutdown()
            thread.join()


def always(status: int, body: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """The same answer to each request."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


@contextmanager
def serving(path: Path, **settings: Any) -> Iterator[str]:
    """The address of a server of a store, in a thread of its own."""
    addresses: list[str] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    end = asyncio.Event()

    async def main() -> None:
        async with administered(path, **settings) as (broker, _, _):
            addresses.append(broker.web_urls.tls or broker.web_urls.plain)
            ready.set()
            await end.wait()

    def work() -> None:
        try:
            loop.run_until_complete(main())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(120)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(30)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that a broker has made, with messages to come and one that has fired."""
    path = tmp_path_factory.mktemp("filled") / "store"
    with serving(path):
        pass
    with DelayedStore.open(path, StoreConfig(background=False)) as store:
        topic = store.topic("reminders")
        topic.subscribe("mailer%2F1").close()
        for number in range(5):
            topic.send(b"%d" % number, deliver_at=FUTURE_MS + number, key=f"k{number}", properties={"n": str(number)})
        topic.send(b"now")
    return path


@pytest.fixture(params=["directory", "server"])
def place(request: pytest.FixtureRequest, filled: Path, tmp_path: Path) -> Iterator[list[object]]:
    """The arguments that name the store."""
    path = shutil.copytree(filled, tmp_path / "store")
    with ExitStack() as stack:
        yield ["--server", stack.enter_context(serving(path))] if request.param == "server" else [path]


def test_topics_and_subscriptions_are_made_listed_and_deleted(place: list[object]) -> None:
    """Names in any form; what is there already stays as it is, and the exit status is 0."""
    assert json_of("topics", "create", *place, "other") == {"created": True}
    assert json_of("topics", "create", *place, "other") == {"created": False}
    names = ["persistent://public/default/other", "persistent://public/default/reminders"]
    assert ok("topics", "list", *place).split() == ["other", "reminders"]
    found = ok("topics", "list", *place, "--namespace", "public/default", "--limit", 1, "--json")
    assert found == f'"{names[0]}"\n'
    assert json_of("subscriptions", "create", *place, "other", "a/b", "--position", "earliest") == {"created": True}
    assert json_of("subscriptions", "create", *place, "other", "a/b") == {"created": False}
    assert ok("subscriptions", "list", *place, "other") == "a/b\n"
    assert json_of("subscriptions", "delete", *place, "other", "a/b") == {"deleted": True}
    assert ok("subscriptions", "list", *place, "other") == ""
    assert json_of("topics", "delete", *place, "other") == {"deleted": True}
    assert ok("topics", "list", *place) == "reminders\n"
    assert "other" in refused("topics", "delete", *place, "other")
    assert "a/b" in refused("subscriptions", "delete", *place, "reminders", "a/b")


def test_figures_have_the_same_names(place: list[object]) -> None:
    """Figures of the store, of a topic and of its partitions, in full of a server too."""
    found = json_of("stats", *place)
    assert (found["topics"], found["pending"], found["set_aside"]) == (1, 5, 0)
    (topic,) = found["shown"]
    assert topic == json_of("stats", *place, "reminders")
    assert (topic.pop("fired"), topic["subscriptions"][0]["consumers"]) == (0, 0)
    topic.pop("stored_bytes")
    subscription = topic["subscriptions"][0]
    assert subscription["name"] == "mailer/1"
    assert (subscription["backlog"], subscription["mark_delete"].count(":")) == (1, 1)
    topic.pop("subscriptions")
    assert topic == {"name": "persistent://public/default/reminders", "pending": 5, "entries": 1, "ledgers": 1}
    assert "reminders" in ok("stats", *place)
    assert "pending" in ok("stats", *place, "reminders")
    (partition,) = json_lines_of("partitions", *place)
    assert (partition["partition"], partition["start_ms"], partition["end_ms"]) == (
        "21000101T000000Z", FUTURE_MS, FUTURE_MS + DAY_MS,
    )  # fmt: skip
    assert (partition["state"], partition["messages"], partition["pending"], partition["holders"]) == (
        "future",
        5,
        5,
        0,
    )
    assert "future" in ok("partitions", *place)


def test_messages_to_come_are_listed_cancelled_and_rescheduled(place: list[object]) -> None:
    """By their ids; exit status 1 where one is unknown or it is too late."""
    found = json_lines_of("scheduled", *place, "reminders")
    assert [(each["payload"], each["key"], each["due_ms"] - FUTURE_MS) for each in found] == [
        (str(at), f"k{at}", at) for at in range(5)
    ]
    assert found[3]["properties"] == {"n": "3"}
    ids = [each["message_id"] for each in found]
    later = json_lines_of("scheduled", *place, "reminders", "--start", FUTURE_MS + 2, "--end", FUTURE_MS + 4)
    assert [each["message_id"] for each in later] == ids[2:4]
    assert "more than 2" in run("scheduled", *place, "reminders", "--limit", 2).stderr
    cancelled = json_lines_of("cancel", *place, "reminders", *ids[:2])
    assert cancelled == [{"message_id": each, "outcome": "cancelled"} for each in ids[:2]]
    result = run("cancel", *place, "reminders", ids[0], "9999:1")
    assert (result.exit_code, result.stdout) == (1, f"{ids[0]}  already cancelled\n9999:1  unknown\n")
    (moved,) = json_lines_of("reschedule", *place, "reminders", ids[2], "--at", FUTURE_MS + DAY_MS)
    assert moved["new_message_id"] not in (*ids, None)
    result = run("reschedule", *place, "reminders", ids[0], "--after", "1h", "--json")
    assert (result.exit_code, json.loads(result.stdout)["new_message_id"]) == (1, None)
    left = json_lines_of("scheduled", *place, "reminders")
    assert [each["message_id"] for each in left] == [ids[3], ids[4], moved["new_message_id"]]
    assert left[2]["due_ms"] == FUTURE_MS + DAY_MS
    assert "ID='x'" in refused("cancel", *place, "reminders", "x")
    assert "ID=[]: expected ids, --dedup-key or --prefix" in refused("cancel", *place, "reminders")
    assert "--at" in refused("reschedule", *place, "reminders", ids[3])


@pytest.mark.parametrize("scope", [["--namespace", "public/default"], ["--topic", "reminders"]])
def test_policies_are_set_shown_and_unset(place: list[object], scope: list[str]) -> None:
    """Those that both have: a field is set alone, the others stay."""
    done = json_of("policies", "set", *place, *scope, "--retention", "2h", "--ttl", "30s", "--max-delay", "7d")
    wanted = {"retention_ms": 7_200_000, "ttl_ms": 30_000, "max_delivery_delay_ms": 7 * DAY_MS}
    assert done.items() >= wanted.items()
    json_of("policies", "set", *place, *scope, "--fixed-delay", "10s", "--retention-bytes", 1 << 20)
    wanted |= {"fixed_delivery_delay_ms": 10_000, "retention_bytes": 1 << 20}
    (found,) = json_lines_of("policies", "get", *place) if scope[0] == "--namespace" else [{}]
    effective = json_of("policies", "get", *place, "--topic", "reminders")["effective"]
    assert effective.items() >= wanted.items()
    if scope[0] == "--namespace":
        assert found.items() >= ({"scope": "namespace public/default"} | wanted).items()
    left = json_of("policies", "unset", *place, *scope, "ttl_ms", "retention_ms", "max_delivery_delay_ms")
    assert [left[name] for name in ("ttl_ms", "max_delivery_delay_ms")] == [None, None]
    assert (left["retention_bytes"], left["fixed_delivery_delay_ms"]) == (1 << 20, 10_000)
    assert json_of("policies", "remove", *place, *scope) == {"removed": True}
    assert json_of("policies", "remove", *place, *scope) == {"removed": False}


def test_a_server_takes_every_policy_and_has_those_of_a_partitioned_topic_for_each_partition(
    filled: Path, tmp_path: Path
) -> None:
    """Those that Pulsar's paths have not, to the millisecond, of a subscription too; asked of the topic or a part."""
    with serving(shutil.copytree(filled, tmp_path / "store")) as url:
        RestClient(url).ask("PUT", "/admin/v2/persistent/public/default/parts/partitions", 2)
        every = ["parts", "parts-partition-0", "parts-partition-1"]
        wanted = {"max_redeliveries": 3, "retention_ms": 61_500, "ttl_ms": None}
        for at in every:
            done = json_of("policies", "set", "--server", url, "--topic", at, "--max-redeliveries", 3, "--retention",
                           "61.5s")  # fmt: skip
            assert done.items() >= wanted.items()
        ok("policies", "set", "--server", url, "--topic", "parts", "-s", "mailer", "--ttl", "1m")
        for at in every:
            shown = json_of("policies", "get", "--server", url, "--topic", at, "-s", "mailer")
            assert (shown["set"]["ttl_ms"], shown["effective"]["max_redeliveries"]) == (60_000, 3)
            assert shown["set_at"]["max_redeliveries"].startswith("topic persistent://public/default/parts")
        assert json_of("policies", "remove", "--server", url, "--topic", every[1]) == {"removed": True}
        ok("topics", "create", "--server", url, "lone-partition-0")
        ok("policies", "set", "--server", url, "--topic", "lone-partition-0", "--max-redeliveries", 4)
    with DelayedStore.open(tmp_path / "store", StoreConfig(background=False)) as store:
        assert {at: store.policies(topic=at) for at in every} == dict.fromkeys(every)
        lone = store.policies(topic="lone-partition-0")
        assert lone is not None
        assert lone.max_redeliveries == 4


def test_a_certificate_that_is_not_trusted_is_one_line(filled: Path, tmp_path: Path) -> None:
    """The server's own, named by --tls-trust, is; a file that is no certificate is refused by its name."""
    certificate, key = write_pair(tmp_path)
    tls = {
        "web_service_port_tls": 0,
        "broker_service_port_tls": 0,
        "tls_certificate_file_path": certificate,
        "tls_key_file_path": key,
    }
    with serving(shutil.copytree(filled, tmp_path / "store"), **tls) as address:
        assert address.startswith("https://")
        url = address.replace("127.0.0.1", "localhost")
        assert ok("topics", "list", "--server", url, "--tls-trust", certificate)
        said = refused("topics", "list", "--server", url)
        assert "self-signed certificate" in said
        assert said.count("\n") == 1
        assert "--tls-trust" in refused("topics", "list", "--server", url, "--tls-trust", key)


def test_a_request_that_another_server_is_to_answer_is_sent_on_with_its_method_and_body(
    filled: Path, tmp_path: Path
) -> None:
    """A cancellation through a server that answers 307; two that send on to each other end, and are told of."""
    onward: list[str] = []

    def elsewhere(request: BaseHTTPRequestHandler) -> None:
        request.send_response(307)
        request.send_header("Location", onward[0] + request.path)
        request.end_headers()

    with answering(elsewhere) as here:
        with serving(shutil.copytree(filled, tmp_path / "store")) as url:
            onward.append(url)
            found = json_lines_of("scheduled", "--server", here, "reminders")
            (done,) = json_lines_of("cancel", "--server", here, "reminders", found[0]["message_id"])
            assert done["outcome"] == "cancelled"
        onward[0] = here
        assert "from server to server" in refused("scheduled", "--server", here, "reminders")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b"<html>welcome</html>", "is no server of duelog: what it answers to"),
        (200, b"[" * 100_000, "is no server of duelog"),
        (500, b'{"reason": "\\u001b[31mred"}', ": 500: \\x1b[31mred\n"),
    ],
)
def test_what_is_no_server_of_duelog_is_one_line(status: int, body: bytes, said: str) -> None:
    """A page of another program behind the address, a text that would move the terminal's cursor."""
    with answering(always(status, body)) as url:
        line = refused("topics", "list", "--server", url)
    assert said in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    "body", [b"[1]", b'{"x": 1}', b"5", b"null", b'"x"', b'{"messages": [{}]}', b'{"messages": []}']
)
def test_json_of_another_shape_is_one_line_that_names_the_server(body: bytes) -> None:
    """An array, a number, an object that lacks what is read: each command ended with a traceback."""
    with answering(always(200, body)) as url:
        for command in (
            "topics list --server {}",
            "topics list --server {} --namespace a/b",
            "subscriptions list --server {} t",
            "stats --server {}",
            "stats --server {} t",
            "partitions --server {}",
            "scheduled --server {} t",
            "cancel --server {} t 1:1",
            "reschedule --server {} t 1:1 --after 1h",
            "policies get --server {} --topic t",
            "policies set --server {} --topic t --ttl 1h",
        ):
            line = refused(*command.format(url).split())
            assert line.startswith(f"duelog: {url}: is no server of duelog, or one of another version: "), command
            assert line.count("\n") == 1


def test_what_a_server_refuses_is_one_line(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing there, no credentials, no rights, an unknown topic, a policy that it has not; a token by environment."""
    monkeypatch.delenv("DUELOG_TOKEN", raising=False)
    assert "Connection refused" in refused("stats", "--server", "http://127.0.0.1:1", "t")
    assert "expected http://host:port" in refused("stats", "--server", "pulsar://localhost:6650")
    assert "expected http://host:port" in refused("stats", "--server", "http://me:secret@localhost:8080")
    assert "Missing argument" in run("topics", "list").stderr
    with serving(shutil.copytree(filled, tmp_path / "store"), **SECURED) as url:
        said = refused("topics", "list", "--server", url)
        assert said.startswith(f"duelog: {url}: 401: ")
        assert said.count("\n") == 1
        assert ": 403: " in refused("topics", "list", f"--server={url}", "--token", token("nobody"))
        monkeypatch.setenv("DUELOG_TOKEN", token("root"))
        assert ok("topics", "list", "--server", url) == "reminders\n"
        assert ok("topics", "list", url) == "reminders\n"
        assert f"{url}: 404: " in refused("stats", "--server", url, "none")
        policies = ["policies", "set", "--server", url]
        assert "name one" in refused(*policies, "--ttl", "1m")
        assert f"{url}: 404: " in refused(*policies, "--namespace", "public/none", "--ttl", "1m")
        assert f"{url}: 404: " in refused(*policies, "--topic", "none", "--ttl", "1m")
        assert run("cancel", tmp_path / "store", "reminders", "17:3").stdout == "17:3  unknown\n"  # by its socket


def test_the_disk_is_one_figure_with_its_parts_everywhere(path: Path) -> None:
    """`stats` of a directory and of a server, `audit`, REST and metrics: the same total, the same parts."""

    def parts_of(found: dict[str, Any], form: str) -> dict[str, int]:
        return {part: found[form.format(part)] for part in DISK_PARTS}

    with DelayedStore.open(path, StoreConfig(background=False)) as store:
        store.topic("t").send_batch([Message(b"x" * 1_000)] * 500)
        stats = asdict(store.stats())
        assert stats["disk_bytes"] == sum(parts_of(stats, "disk_{}_bytes").values()) == size_bytes(path)
        assert stats["disk_wal_bytes"] > 0
    audited, shown = json_of("audit", path), json_of("stats", path)
    for form in ("disk_bytes", *(f"disk_{part}_bytes" for part in DISK_PARTS)):
        assert audited[form] == shown[form], form
    assert audited["disk_bytes"] == sum(parts_of(audited, "disk_{}_bytes").values())
    for text in (ok("audit", path), ok("stats", path)):
        assert [part for part in DISK_PARTS if f"of it {part}" not in text] == []

    async def served() -> None:
        async with administered(path) as (_, rest, _):
            counters = (await rest.ask("GET", "/duelog/v1/counters")).value["store"]
            page = (await rest.ask("GET", "/metrics")).value.decode()
            metrics = dict(re.findall(r'^duelog_store_part_size_bytes\{.*part="(\w+)"\} (\d+)', page, re.MULTILINE))
            assert {name: int(size) for name, size in metrics.items()} == disk_parts(path)
            named = {part: counters[f"disk{part.capitalize()}Bytes"] for part in DISK_PARTS}
            assert named == disk_parts(path)
            assert counters["diskBytes"] == sum(named.values())

    asyncio.run(served())
