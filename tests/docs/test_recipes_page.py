"""docs/recipes.md: every recipe does what it says, on a clock that the test moves."""

import ast
import importlib.util
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from tests.broker.clients.conftest import ServedStore
from tests.conftest import OpenStore, present
from tests.duelog.workers.test_worker import Log
from tests.packaging.tree import ROOT
from tests.proof import length
from tests.tools.command_line import json_lines_of, ok

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FIRING = StoreConfig(background=True, control=True)


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
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
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
            while tries < 3 and not any(each.retries == tries for each in store.topic("webhooks").scheduled()):
                pass  # the answer is on its way to the worker
            clock.advance(12_000)
        recipes["send_webhook"](store, f"{url}/404", "event-2", b"wrong")
        handler.requests.wait(4)
    assert handler.requests.seen == [b"patient"] * 3 + [b"wrong"]
    assert handler.keys == ["event-1"] * 3 + ["event-2"]
    assert "404" in json_lines_of("dead-letters", "list", store.path)[0]["reason"]
    with recipes["webhooks"](store):
        assert "1" in ok("dead-letters", "requeue", store.path, "--all", "--topic", "webhooks")
        handler.requests.wait(5)
    ok("dead-letters", "purge", store.path, "--all", "--topic", "webhooks")
    assert list(store.dead_letters()) == []


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


@pytest.mark.series
def test_a_million_users_have_one_reminder_each_wherever_they_move(
    recipes: dict[str, Any], store: DelayedStore, clock: ManualClock
) -> None:
    """DUELOG_REMINDERS=1000000 says how many; times and sizes are printed (pytest -s)."""
    users, topic, begun = length("DUELOG_REMINDERS", 2_000, 200_000), store.topic("daily"), time.perf_counter()
    nine, took = datetime.fromtimestamp(clock.now_ms() // 1_000, UTC) + timedelta(hours=1), dict[str, float]()

    def timed(name: str) -> None:
        nonlocal begun
        took[name], begun = time.perf_counter() - begun, time.perf_counter()

    def zoned(user: int) -> tuple[int, datetime]:
        return user, nine + timedelta(minutes=15 * (user % 96))

    with topic.subscribe("s") as consumer:
        timed("open")
        assert recipes["remind_all"](store, map(zoned, range(users))) == users
        timed("set")
        assert recipes["remind_all"](store, ((user, nine) for user in range(0, users, 10))) == users // 10
        timed("move a tenth")
        assert recipes["forget_user"](store, 7)
        assert topic.count() == users - 1
        timed("count")
        found: list[int] = []
        clock.advance(25 * 3_600_000)
        while len(found) < users - 1:
            batch = consumer.receive(1_000, timeout=60)
            found += [int(message.payload) for message in batch]
            consumer.ack(batch)
        timed("deliver, all due at once")
    assert sorted(found) == [user for user in range(users) if user != 7]
    print(f"\n{users} users:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items()))


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

asyncio.run(asyncio.wait_for(main(), 150))
"""


@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="FastAPI is not installed")
def test_the_fastapi_application_takes_a_job_and_does_it(tmp_path: Path) -> None:
    """From the start of its lifespan to the end, which closes the store."""
    files("FastAPI", tmp_path)
    command = [sys.executable, "-c", DRIVE_ASGI, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180)
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
    run: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 180}
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


def following(pipe: Any, pattern: str) -> Log:
    """What a process prints that matches, in a log; read to its end by a thread."""
    log = Log()

    def follow() -> None:
        for line in pipe:  # of several processes, and may have parts of several prints
            for found in re.findall(pattern, line):
                log.add(found)
        pipe.close()

    threading.Thread(target=follow).start()
    return log


@pytest.mark.series
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fastapi", "gunicorn")),
    reason="FastAPI and gunicorn are not installed",
)
@pytest.mark.proof  # half a minute of two processors; the page's programs run in the tests of the guide
def test_under_load_each_part_of_several_processes_is_restarted_and_no_order_is_lost_or_stored_twice(
    tmp_path: Path,
) -> None:
    """Web processes, two workers and the server: no request fails, payment cancels, the rest times out.

    DUELOG_WEB_PROCESSES=4 as the recipe has them.
    """
    files("Several processes", tmp_path)
    processes = length("DUELOG_WEB_PROCESSES", 2, 4)
    web = [sys.executable, "-m", "gunicorn", "-w", str(processes), "-k", "asgi", "-b", "127.0.0.1:0", "app:app"]
    work = [sys.executable, "-c", COMMAND, "worker", "tasks:worker", "--connect", "data", "--processes", "2"]
    broker, placed, failed, stop = ServedStore(tmp_path), Log(), list[BaseException](), threading.Event()
    (tmp_path / "data").symlink_to("store")
    with DelayedStore.open(tmp_path / "store") as store:
        store.topic("order-timeouts").subscribe("audit").close()
    broker.start()
    home = {**os.environ, "HOME": str(tmp_path)}  # where gunicorn has a socket of its own
    server = subprocess.Popen(web, cwd=tmp_path, env=home, stderr=subprocess.PIPE, text=True)
    started = following(server.stderr, r"(?:Listening at: |Booting worker with pid: )(\S+)")

    def working() -> tuple[subprocess.Popen[str], Log]:
        process = subprocess.Popen(work, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return process, following(process.stdout, r"shop\d+-\d+-late")

    def post(path: str) -> Any:
        request = urllib.request.Request(f"{started.seen[0]}/orders/{path}", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def shop(name: str) -> None:
        try:
            for number in itertools.count():
                order = f"{name}-{number}-{'paid' if number % 2 else 'late'}"
                post(f"{order}?minutes={30 if number % 2 else 0}")
                if number % 2:
                    assert post(f"{order}/payment") == {"in_time": True}
                placed.add(order)
                if stop.is_set():
                    return
        except BaseException as error:
            failed.append(error)

    shops = [threading.Thread(target=shop, args=[f"shop{number}"]) for number in range(3)]
    workers, ran = working()
    try:
        started.wait(1 + processes)
        for thread in shops:
            thread.start()
        placed.wait(10)
        assert broker.stop() == 0
        broker.start()
        placed.wait(len(placed.seen) + 10)
        server.send_signal(signal.SIGHUP)
        started.wait(1 + 2 * processes)
        placed.wait(len(placed.seen) + 10)
        os.kill(int(started.seen[-1]), signal.SIGTERM)
        started.wait(2 + 2 * processes)
        workers.send_signal(signal.SIGTERM)
        assert workers.wait(60) == 0
        workers, ran_later = working()
        placed.wait(len(placed.seen) + 10)
        stop.set()
        for thread in shops:
            thread.join(60)
        assert failed == []
        late = {order for order in placed.seen if order.endswith("late")}
        while not late <= {*ran.seen, *ran_later.seen}:
            ran_later.wait(len(ran_later.seen) + 1)
    finally:
        stop.set()
        for process in (server, workers):
            process.send_signal(signal.SIGTERM)
        statuses = [process.wait(60) for process in (server, workers)]
        statuses.append(broker.stop())
    assert statuses == [0, 0, 0]
    assert {*ran.seen, *ran_later.seen} == late
    with DelayedStore.open(tmp_path / "store") as store:
        topic = store.topic("order-timeouts")
        assert list(topic.keys()) == []
        with topic.subscribe("audit") as audit:
            stored = [message.payload.decode() for message in audit.receive(10_000, timeout=0)]
        assert sorted(stored) == sorted(late)
        assert list(store.check()) == []


@pytest.mark.skipif(importlib.util.find_spec("flask") is None, reason="Flask is not installed")
def test_a_cart_of_flask_is_remembered_once_and_not_after_its_order(
    store: DelayedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is changed; the application connects to the process that has the store open."""
    files("Flask", tmp_path)
    (tmp_path / "data").symlink_to(store.path)
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path("shop.py")
    browser = names["app"].test_client()
    for name in ("a", "b", "a"):
        assert browser.put(f"/carts/{name}").status_code == 204
    assert browser.post("/carts/b/order").json == {"in_time": True}
    assert browser.post("/carts/b/order").json == {"in_time": False}
    assert [found.payload for found in store.topic("abandoned-carts").scheduled()] == [b"a"]
    names["carts"]()._connection.close()


DJANGO = {
    "settings.py": """
        SECRET_KEY, ALLOWED_HOSTS, ROOT_URLCONF, USE_TZ = "x", ["*"], "urls", True
        INSTALLED_APPS = ["shop"]
        DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
        DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
    """,
    "urls.py": """
        from django.urls import path
        from shop import views
        urlpatterns = [path("place/<int:minutes>", views.place), path("pay/<int:order>", views.pay)]
    """,
    "shop/models.py": """
        from django.db import models
        class Order(models.Model):
            state = models.TextField()
    """,
    "drive.py": """
        import django
        django.setup()
        from django.core.management import call_command
        from django.test import Client
        call_command("migrate", run_syncdb=True, verbosity=0)
        client = Client()
        late, paid = (client.get(f"/place/{minutes}").json()["order"] for minutes in (0, 30))
        assert client.get(f"/pay/{paid}").json() == {"paid": True}
        print(late, flush=True)
    """,
}


@pytest.mark.skipif(importlib.util.find_spec("django") is None, reason="Django is not installed")
def test_an_order_of_django_expires_by_the_command_and_a_paid_one_does_not(store: DelayedStore, tmp_path: Path) -> None:
    """Messages are sent after the database's transactions; the command ends in order on SIGTERM."""
    for name, text in DJANGO.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    files("Django", tmp_path)
    (tmp_path / "data").symlink_to(store.path)
    settings = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "settings",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    run: dict[str, Any] = {"cwd": tmp_path, "env": settings, "stdout": subprocess.PIPE, "text": True}
    late = subprocess.run([sys.executable, "drive.py"], check=True, timeout=180, **run).stdout
    with subprocess.Popen([sys.executable, "-m", "django", "run_tasks"], **run) as command:
        assert present(command.stdout).readline() == f"expired {late}"
        command.send_signal(signal.SIGTERM)
    assert command.returncode == 0
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT state FROM shop_order ORDER BY id").fetchall() == [("expired",), ("paid",)]
    assert list(store.topic("expiries").keys()) == []


COMMAND = "from duelog.tools.cli.main import main; main()"


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
        "Reminders for a million users": "remind_all",
        "Priorities": "mails",
        "Rate limits": "paced",
        "FastAPI": "'FastAPI'",
        "gunicorn": "'gunicorn'",
        "Several processes": "'Several processes'",
        "Flask": "'Flask'",
        "Django": "'Django'",
    }
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == list(used)
    assert [heading for heading, name in used.items() if name not in said] == []
