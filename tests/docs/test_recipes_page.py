"""docs/recipes.md: every recipe does what it says, on a clock that the test moves."""

import ast
import importlib.util
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from tests.broker.clients.conftest import free_port
from tests.conftest import OpenStore
from tests.duelog.workers.test_worker import Log
from tests.packaging.tree import ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FIRING = StoreConfig(background=True)


@pytest.fixture
def recipes() -> dict[str, Any]:
    """Names that the blocks define, but those that are files of their own."""
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if not block.startswith("# "):
            exec(compile(block, "docs/recipes.md", "exec", dont_inherit=True), names)
    return names


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store that fires by itself, on a clock that tests move."""
    return open_store(config=FIRING)


def section(heading: str) -> str:
    """The text of a recipe."""
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def files(heading: str, folder: Path) -> None:
    """Write the files of a recipe: blocks whose first line is a name."""
    for name, text in re.findall(r"^```python\n# (\S+)\n(.*?)^```$", section(heading), re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")


def test_an_order_that_is_not_paid_in_time_is_cancelled_and_a_paid_one_is_not(
    recipes: dict[str, Any], store: DelayedStore, clock: ManualClock
) -> None:
    """Also where it was placed twice; paying after that is too late."""
    log = Log()
    for order in ("a", "b", "a"):
        recipes["place_order"](store, order)
    assert recipes["pay_order"](store, "b") is True
    with recipes["order_timeouts"](store, lambda order: log.add(order.encode())):
        clock.advance(30 * 60_000)
        log.wait(1)
    assert log.seen == [b"a"]
    assert recipes["pay_order"](store, "a") is False


class Receiver(BaseHTTPRequestHandler):
    """Answers with the statuses of its path, one a request: /503/200."""

    requests: Log
    keys: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Idempotency-Key"])
        statuses = self.path.strip("/").split("/")
        self.send_response(int(statuses[min(self.requests.seen.count(body), len(statuses) - 1)]))
        self.end_headers()
        self.requests.add(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def receiver() -> Iterator[tuple[str, type[Receiver]]]:
    """Its address, and what it was sent."""
    handler = type("Handler", (Receiver,), {"requests": Log(), "keys": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


def test_a_webhook_is_tried_again_until_it_is_taken_and_not_if_it_never_will_be(
    recipes: dict[str, Any], store: DelayedStore, clock: ManualClock, receiver: tuple[str, type[Receiver]]
) -> None:
    """Twice unavailable, then taken; one that is not found is a dead letter at once, with that as its reason."""
    url, handler = receiver
    recipes["send_webhook"](store, f"{url}/503/503/200", "event-1", b"patient")
    with recipes["webhooks"](store):
        for tries in (1, 2, 3):
            handler.requests.wait(tries)
            while tries < 3 and not list(store.topic("webhooks").scheduled()):
                pass  # the answer is on its way to the worker
            clock.advance(12_000)
        recipes["send_webhook"](store, f"{url}/404", "event-2", b"wrong")
        handler.requests.wait(4)
    assert handler.requests.seen == [b"patient"] * 3 + [b"wrong"]
    assert handler.keys == ["event-1"] * 3 + ["event-2"]
    (dead,) = store.dead_letters()
    assert "404" in str(dead)


def test_the_wait_before_a_webhook_grows_to_an_hour(recipes: dict[str, Any]) -> None:
    """Five seconds, doubled, give or take a tenth."""
    waits = [recipes["wait_before"](failures, OSError("refused")) for failures in range(1, 13)]
    assert all(0.9 <= wait / min(3600, 5 * 2**place) <= 1.1 for place, wait in enumerate(waits))


class Databases:
    """Connections to one database, of each kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._server: Any = None
        if kind == "POSTGRESQL":
            pytest.importorskip("psycopg")
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(ROOT)
                from benchmarks.peers.postgres_peer import PostgresPeer  # noqa: PLC0415 - beside the package, not in it
            missing = PostgresPeer.missing()
            if missing is not None:
                pytest.skip(missing)
            self._folder = Path(tempfile.mkdtemp(prefix="duelog-outbox-"))
            self._folder.chmod(0o755)  # the server's user is another where this one is root
            self._server = PostgresPeer()
            self._server.open(self._folder, 0)

    def connect(self) -> Any:
        if self._server is None:
            return sqlite3.connect(self._folder / "shop.db")
        return self._server._psycopg.connect(self._server._url)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            shutil.rmtree(self._folder)


@pytest.mark.parametrize("kind", ["SQLITE", "POSTGRESQL"])
def test_what_an_sql_transaction_puts_into_the_outbox_is_sent_once_or_never(
    recipes: dict[str, Any], store: DelayedStore, clock: ManualClock, tmp_path: Path, kind: str
) -> None:
    """A row of a transaction that is rolled back is never sent; one whose relay dies before the deletion is not twice.

    Against a real server, too, where PostgreSQL is installed.
    """
    databases = Databases(kind, tmp_path)
    try:
        with closing(databases.connect()) as database:
            cursor = database.cursor()
            cursor.execute(recipes[kind])
            database.commit()

            def place(order: int, due_ms: int | None) -> None:
                due = "NULL" if due_ms is None else due_ms
                cursor.execute(
                    f"INSERT INTO outbox (topic, payload, due_ms) SELECT 'orders', payload, {due} FROM new_orders"
                    f" WHERE number = {order}"
                )

            bytes_ = "BLOB" if kind == "SQLITE" else "BYTEA"
            cursor.execute(f"CREATE TABLE new_orders (number INTEGER, payload {bytes_})")
            for order in range(4):
                literal = f"x'{order:02x}'" if kind == "SQLITE" else f"decode('{order:02x}', 'hex')"
                cursor.execute(f"INSERT INTO new_orders VALUES ({order}, {literal})")
            database.commit()
            place(0, None)
            place(1, clock.now_ms() + 60_000)
            database.commit()
            place(2, None)
            database.rollback()

            class Died(Exception):
                """The process dies before the rows are deleted for good."""

            class Dying:
                cursor = staticmethod(database.cursor)

                @staticmethod
                def commit() -> None:
                    raise Died

            with pytest.raises(Died):
                recipes["relay"](Dying, store)
            database.rollback()
        with closing(databases.connect()) as database:
            assert recipes["relay"](database, store) == 2
            assert recipes["relay"](database, store) == 0
            cursor = database.cursor()
            place(3, None)
            database.commit()
            assert recipes["relay"](database, store) == 1
    finally:
        databases.close()
    clock.advance(60_000)
    with store.topic("orders").subscribe("s") as consumer:
        found: list[int] = []
        while len(found) < 3:
            found += [message.payload[0] for message in consumer.receive(10, timeout=60)]
        assert sorted(found) == [0, 1, 3]
        assert consumer.receive(10, timeout=0) == []


def test_reminders_move_with_their_appointment(recipes: dict[str, Any], store: DelayedStore) -> None:
    """Two, at the new times; none once it is cancelled; a schedule beside them that is there once."""
    topic, at = store.topic("reminders"), datetime(2026, 12, 1, 15, tzinfo=UTC)
    for moved in (at, at + timedelta(days=2)):
        recipes["remind"](store, "dentist", moved)
    times = [datetime.fromtimestamp(found.due_ms / 1000, UTC) for found in topic.scheduled()]
    assert times == [at + timedelta(days=1), at + timedelta(days=2, hours=-1)]
    recipes["cancel_appointment"](store, "dentist")
    assert list(topic.scheduled()) == []
    for _ in range(2):
        recipes["weekly_summary"](store)
    assert [each.name for each in topic.schedules()] == ["weekly"]
    assert [found.payload for found in topic.scheduled()] == [b"summary"]


def test_urgent_messages_do_not_wait_for_others(recipes: dict[str, Any], store: DelayedStore) -> None:
    """Though all others are being run, and more of them wait."""
    log, gate = Log(), threading.Event()
    for number in range(10):
        store.topic("mails").send(b"slow-%d" % number)

    def send_mail(payload: bytes) -> None:
        if payload.startswith(b"slow"):
            gate.wait(60)
        log.add(payload)

    with recipes["mails"](store, send_mail):
        store.topic("mails-urgent").send(b"now")
        log.wait(1)
        assert log.seen == [b"now"]
        gate.set()
        log.wait(11)


def test_calls_are_paced_over_all_threads(recipes: dict[str, Any], store: DelayedStore) -> None:
    """Ten a second, from the first on; nothing is lost."""
    log, sleeps = Log(), []

    def sleep(seconds: float) -> None:
        sleeps.append(round(seconds, 3))

    for number in range(5):
        store.topic("calls").send(b"%d" % number)
    with recipes["paced"](store, log.add, recipes["Pace"](10, lambda: 50.0, sleep)):
        log.wait(5)
    assert sorted(sleeps) == [0, 0.1, 0.2, 0.3, 0.4]
    assert sorted(log.seen) == [b"%d" % number for number in range(5)]


DRIVE_ASGI = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from app import app

async def call(method, path):
    sent, body = [], {"type": "http.request", "body": b"", "more_body": False}
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
             "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
             "client": ("test", 1), "server": ("test", 80)}
    async def receive(): return body
    async def send(message): sent.append(message)
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent[1:]))

async def main():
    async with app.router.lifespan_context(app):
        print(await call("POST", "/jobs/one"))
        done = []
        while "one" not in done:
            await asyncio.sleep(0)
            status, done = await call("GET", "/done")
        print(status, done)
        jobs = await app.state.store.topic("jobs").subscription("web")
        while (await jobs.stats()).backlog:
            pass

asyncio.run(asyncio.wait_for(main(), 40))
"""


@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="FastAPI is not installed")
def test_the_fastapi_application_takes_a_job_and_does_it(tmp_path: Path) -> None:
    """From the start of its lifespan to the end, which closes the store."""
    files("FastAPI", tmp_path)
    command = [sys.executable, "-c", DRIVE_ASGI, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "200 ['one']"
    with DelayedStore.open(tmp_path / "data") as store:
        assert store.topic("jobs").subscription("web").stats().backlog == 0
        assert list(store.check()) == []


@pytest.mark.skipif(importlib.util.find_spec("gunicorn") is None, reason="gunicorn is not installed")
def test_gunicorn_serves_from_one_store_over_a_reload(tmp_path: Path) -> None:
    """The worker after the reload waits for the one before; at the end the store is closed and has both messages."""
    files("gunicorn", tmp_path)
    command = [sys.executable, "-m", "gunicorn", "-c", "gunicorn.conf.py", "-b", "127.0.0.1:0", "app:application"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = iter(server.stderr.readline, "")
            url = next(match[1] for line in lines if (match := re.search(r"Listening at: (\S+)", line)))
            assert _get(f"{url}/first")
            server.send_signal(signal.SIGHUP)
            next(line for line in lines if "Booting worker" in line and "Handling signal: hup" not in line)
            next(line for line in lines if "Worker exiting" in line)
            assert _get(f"{url}/second")
        finally:
            server.send_signal(signal.SIGTERM)
            rest = server.stderr.read()
    assert server.returncode == 0, rest
    with DelayedStore.open(tmp_path / "data") as store:
        assert [found.payload for found in store.topic("jobs").scheduled()] == [b"first", b"second"]
        assert list(store.check()) == []


CURE = "a worker of this same program: one process opens a store, so run one worker (gunicorn -w 1 --threads 16, "


@pytest.mark.skipif(importlib.util.find_spec("gunicorn") is None, reason="gunicorn is not installed")
def test_gunicorn_with_four_workers_ends_at_once_with_a_line_that_names_the_cure(tmp_path: Path) -> None:
    """By the recipe before any worker begins; of a program that opens the store as it is imported, by StoreLocked."""
    gunicorn = [sys.executable, "-m", "gunicorn", "-w", "4", "-b", "127.0.0.1:0"]
    files("gunicorn", tmp_path)
    run: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 50}
    by_recipe = subprocess.run([*gunicorn, "-c", "gunicorn.conf.py", "app:application"], check=False, **run)
    assert by_recipe.returncode != 0
    assert "run gunicorn with -w 1, and --threads" in by_recipe.stderr.splitlines()[-1]
    assert "Booting worker" not in by_recipe.stderr
    (tmp_path / "gunicorn.conf.py").unlink()
    (tmp_path / "app.py").write_text("import duelog\nstore = duelog.DelayedStore.open('data')\napplication = None")
    done = subprocess.run([*gunicorn, "app:application"], check=False, **run)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith(f"{tmp_path}/data: ") and CURE in line]


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn")), reason="uvicorn is not installed"
)
def test_fastapi_with_four_workers_says_at_once_in_one_line_what_the_cure_is(tmp_path: Path) -> None:
    """One of uvicorn's processes has the store, and each of the others ends with that line."""
    files("FastAPI", tmp_path)
    command = [sys.executable, "-m", "uvicorn", "--workers", "4", "--port", "0", "app:app"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            said = next(line for line in iter(server.stderr.readline, "") if "StoreLocked" in line)
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
    assert CURE in said


SERVE = (
    "import sys; from duelog import DelayedStore; s = DelayedStore.open('data'); print(1, flush=True); sys.stdin.read()"
)
COMMAND = "from duelog.tools.cli.main import main; main()"


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn")), reason="uvicorn is not installed"
)
def test_payment_cancels_in_four_web_processes_and_the_rest_times_out_in_two_workers(tmp_path: Path) -> None:
    """Also after the process that has the store open was killed and begun again; all of them end in order."""
    files("Several processes", tmp_path)
    port = free_port()
    web = [sys.executable, "-m", "uvicorn", "--workers", "4", "--port", str(port), "app:app"]
    work = [sys.executable, "-c", COMMAND, "worker", "tasks:worker", "--connect", "data", "--processes", "2"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": tmp_path}

    def serving() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", SERVE], **pipes)
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        return process

    served = serving()
    with (
        subprocess.Popen(web, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server,
        subprocess.Popen(work, **pipes, stderr=subprocess.DEVNULL) as workers,
    ):
        assert server.stderr is not None
        assert workers.stdout is not None
        lines = iter(server.stderr.readline, "")
        for _ in range(4):
            next(line for line in lines if "startup complete" in line)

        def post(path: str) -> bytes:
            with urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{port}/orders/{path}", method="POST"), timeout=60
            ) as found:
                return bytes(found.read())

        try:
            for number in range(8):
                post(f"paid-{number}")
            post("late?minutes=0")
            assert workers.stdout.readline() == b"cancelled late\n"
            served.kill()
            served.communicate()
            served = serving()
            assert {post(f"paid-{number}/payment") for number in range(8)} == {b'{"in_time":true}'}
            post("later?minutes=0")
            while (
                line := workers.stdout.readline()
            ) == b"cancelled late\n":  # once more: its acknowledgement was killed
                pass
            assert line == b"cancelled later\n"
        finally:
            for process in (server, workers):
                process.send_signal(signal.SIGTERM)
            server.stderr.read()
    served.communicate()
    assert (server.returncode, workers.returncode, served.returncode) == (0, 0, 0)
    with DelayedStore.open(tmp_path / "data") as store:
        assert list(store.topic("order-timeouts").keys()) == []
        assert list(store.check()) == []


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        body: bytes = answer.read()
    return body


def test_every_recipe_is_run() -> None:
    """A heading of the page is in the name or the first line of a test of this file."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    said = " ".join(f"{node.name} {ast.unparse(node)}" for node in tests)
    used = {
        "Order timeout": "place_order",
        "Webhook with backoff": "send_webhook",
        "Outbox of an SQL database": "relay",
        "Reminders": "remind",
        "Priorities": "mails",
        "Rate limits": "paced",
        "FastAPI": "'FastAPI'",
        "gunicorn": "'gunicorn'",
        "Several processes": "'Several processes'",
    }
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == list(used)
    assert [heading for heading, name in used.items() if name not in said] == []
