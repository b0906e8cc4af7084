"""`duelog serve`, `worker` and `ui` as processes: what they print and show, how they end, why they cannot start."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import duelog
from duelog import DelayedStore, StoreConfig
from tests.broker.security.certificates import write_pair
from tests.conftest import present
from tests.disaster.running import module
from tests.docs.code_blocks import blocks
from tests.packaging.tree import ROOT
from tests.tools.command_line import DUELOG, refused

pytest.importorskip("crc32c", reason="needs duelog[broker]")

WITHIN_S = 30


@contextmanager
def served(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """(the process, the lines that it prints at the start)."""
    process = subprocess.Popen(
        [*DUELOG, "serve", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, [present(process.stdout).readline() for _ in range(5)]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_keeps_its_store_and_ends_at_a_signal(tmp_path: Path, number: int) -> None:
    """A directory is enough; `--http 0`: at a port that is free; the store is whole afterwards."""
    store = tmp_path / "store"
    with served(store, "--port", 0, "--http", 0) as (process, lines):
        assert lines[0].startswith(f"{store} is served at pulsar://localhost:")
        url = lines[0].split()[-1]
        assert f"pulsar.Client('{url}')" in lines[3]
        assert lines[4].startswith("client.create_producer")
        web = lines[1].removeprefix("administration is at ").strip()
        with urllib.request.urlopen(f"{web}/admin/v2/namespaces/public", timeout=WITHIN_S) as answer:
            assert answer.read() == b'["public/default"]'
        said = refused("serve", store, "--port", 0)
        taken = f"duelog: {store}: another process has this store open for writing: process {process.pid}"
        assert said.startswith(f"{taken} (")
        assert said.endswith("); a broker has its store for itself: end that process first\n")
        with socket.create_connection(("localhost", int(url.rpartition(":")[2]))) as client:
            client.sendall(b"\0\0")
            process.send_signal(number)
            assert client.recv(10) == b""
        assert present(process.stderr).read() == ""
        assert process.wait(WITHIN_S) == 0
    with DelayedStore.open(store) as opened:
        assert list(opened.check(deep=True)) == []


def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    """Not there, no certificate, a key of another one, no key."""
    certificate, key = write_pair(tmp_path)
    (tmp_path / "text").write_text("no certificate", encoding="utf-8")
    store = tmp_path / "store"
    missing = tmp_path / "missing.pem"
    said = refused("serve", store, "--port", 0, "--tls-cert", missing, "--tls-key", key)
    assert said == f"duelog: {missing} cannot be read: No such file or directory\n"
    said = refused("serve", store, "--port", 0, "--tls-cert", tmp_path / "text", "--tls-key", key)
    assert "are not a certificate and its key in PEM" in said
    assert said.count("\n") == 1
    said = refused("serve", store, "--port", 0, "--tls-cert", certificate)
    assert said == "duelog: tlsKeyFilePath: a certificate and its key go together\n"


def test_settings_that_cannot_be_are_one_line(tmp_path: Path) -> None:
    """A setting of the file, of the store in it, of the command; a port in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", tmp_path / "store", "--port", port, "--host", "127.0.0.1")
        assert said == f"duelog: brokerServicePort={port}: another program listens there, at 127.0.0.1\n"
    file = tmp_path / "broker.toml"
    for text, says in (
        ("keepAlive = 1", "not known"),
        ("[store]\nspeed = 3", "store.speed=3: no setting of a store"),
        ('[store]\ndurability = "maybe"', "durability='maybe'"),
        ('authenticationProviders = ["token"]', "tokens need a secret key or a public key"),
    ):
        file.write_text(text, encoding="utf-8")
        said = refused("serve", tmp_path / "store", "--port", 0, "--config", file)
        assert says in said
        assert said.count("\n") == 1
    assert "no-such.toml" in refused("serve", tmp_path / "store", "--config", tmp_path / "no-such.toml")
    assert "--log='loud'" in refused("serve", tmp_path / "store", "--log", "loud")


def test_duelog_connect_is_served_at_the_address_that_is_printed(tmp_path: Path) -> None:
    """`--listen`, of IPv6 too; what is no address, or taken, is refused in one line."""
    for host in ("localhost", "[::1]"):
        with served(tmp_path / "store", "--port", 0, "--listen", f"{host}:0") as (_, lines):
            (place,) = re.findall(r" and (duelog://.+:[0-9]+)$", lines[0].rstrip())
            assert f"//{host}:" in place
            with duelog.connect(place) as connected:
                connected.topic("t").send(b"x")
    said = refused("serve", tmp_path / "store", "--port", 0, "--listen", "localhost")
    assert "--listen='localhost': expected HOST:PORT" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused("serve", tmp_path / "store", "--port", 0, "--listen", place)
        assert said == f"duelog: --listen='{place}': another program listens there, at 127.0.0.1\n"
    said = refused("serve", tmp_path / "store", "--port", 0, "--listen", "no.such.invalid:0")
    assert "--listen='no.such.invalid:0': no address to listen at" in said


def test_a_store_with_partitions_of_another_span_is_served_as_it_is(tmp_path: Path) -> None:
    """It was made by a program with an hour; a configuration that asks for something else is refused."""
    DelayedStore.open(tmp_path / "store", StoreConfig(partition_ms=3_600_000)).close()
    with served(tmp_path / "store", "--port", 0) as (_, lines):
        assert " is served at pulsar://" in lines[0]
    file = tmp_path / "broker.toml"
    file.write_text("[store]\npartition_ms = 60_000\n", encoding="utf-8")
    assert "partition_ms is 3600000, expected 60000" in refused("serve", tmp_path / "store", "--config", file)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    """`import duelog` and all other commands go without."""
    program = (
        "import sys; sys.modules['crc32c'] = None\n"
        "from duelog.tools.cli.main import main\n"
        "sys.argv[1:] = ['serve', sys.argv[1]]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 2
    assert "pip install 'duelog[broker]'" in done.stderr
    assert done.stderr.count("\n") == 1


MODULE = """
import duelog, os, sys
worker = duelog.Worker("data", name="mailer")
other = 5

@worker.task("reminders")
async def remind(message: duelog.ReceivedMessage) -> None:
    print(message.payload.decode(), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module `mails`, and a message for its worker; it is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mails", raising=False)
    (tmp_path / "mails.py").write_text(MODULE)
    with DelayedStore.open(tmp_path / "data") as store:
        store.topic("reminders").send(b"pay the bill")
    return tmp_path


@pytest.mark.parametrize("source", ["of its own", "README.md"])
def test_a_worker_from_a_shell_runs_until_it_is_told_to_stop(program: Path, source: str) -> None:
    """It does what is due; SIGTERM ends it with status 0, and what it did is acknowledged; it logs both, with times."""
    if source == "README.md":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        text = next(block for block in blocks(readme, "python") if "@worker.task" in block)
        (program / "mails.py").write_text(text)
    command, pipe = [*DUELOG, "worker", "mails:worker"], subprocess.PIPE
    with subprocess.Popen(command, cwd=program, stdout=pipe, stderr=pipe, text=True) as running:
        assert present(running.stdout).readline() == "pay the bill\n"
        running.send_signal(signal.SIGTERM)
        _, logged = running.communicate(timeout=60)
        assert running.returncode == 0
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO duelog.worker"
    begin, end = logged.splitlines()
    assert re.match(
        rf"{time}: worker mailer starts: duelog {version('duelog')}, store {program}/data: remind for", begin
    )
    assert re.match(rf"{time}: worker mailer ends after [\d.]+ s: 1 message acknowledged, 0 attempts failed", end)
    with DelayedStore.open(program / "data") as store:
        assert store.topic("reminders").subscription("mailer").stats().backlog == 0


PROCESSES = """
import os, signal, threading, time
from duelog.tools.cli.cli_serve import Processes

begun, begins = os.pipe()

def work():
    os.write(begins, b"x")
    signal.pause()

def tell():
    os.read(begun, 1)
    while open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "S":
        time.sleep(0)
    signal.raise_signal(signal.SIGTERM)

threading.Thread(target=tell).start()
Processes(work, 1).run()
"""


def test_a_signal_that_does_not_wake_the_parent_of_several_workers_is_passed_on_all_the_same() -> None:
    """One that comes as it falls asleep was lost; here a thread takes it. A child that had not begun is no error."""
    command = [sys.executable, "-W", "ignore", "-c", PROCESSES]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        try:
            assert (running.communicate(timeout=30)[1], running.returncode) == ("", 0)
        finally:
            if running.returncode is None:
                os.killpg(running.pid, signal.SIGKILL)


ENDING = """
import itertools, logging, types
from duelog.errors import DuelogError
from duelog.tools.cli import cli_serve

times = itertools.count(0, {step_s})
cli_serve.time = types.SimpleNamespace(monotonic=lambda: next(times))
cli_serve._FIRST_PAUSE_S = 0.01

def work():
    raise DuelogError("nobody serves this store")

logging.basicConfig()
cli_serve.Processes(work, 1).run()
"""


@pytest.mark.parametrize(
    ("step_s", "pauses"), [(0, ["0.01", "0.02", "0.04", "0.08"]), (60, ["0.01"] * 4)], ids=["at once", "after a while"]
)
def test_workers_that_end_at_once_are_begun_again_after_pauses_that_double(step_s: int, pauses: list[str]) -> None:
    """A worker without a process that serves its store wrote an error each second."""
    command, told = [sys.executable, "-W", "ignore", "-c", ENDING.format(step_s=step_s)], list[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        try:
            for line in present(running.stderr):
                told += re.findall(r"another takes its place in (\S+) s$", line)
                if len(told) == len(pauses):
                    break
            running.send_signal(signal.SIGTERM)
            running.communicate(timeout=30)
        finally:
            if running.returncode is None:
                os.killpg(running.pid, signal.SIGKILL)
    assert told == pauses


NO_WORKERS: list[tuple[str, str]] = [
    ("mails", "expected the form"),
    ("mails:", "expected the form"),
    ("../mails:worker", "expected the form"),
    ("letters:worker", "no module 'letters'"),
    ("mails.sub:worker", "no module 'mails.sub'"),
    ("mails:nobody", "it is None"),
    ("mails:other", "it is 5"),
]


def test_what_is_no_worker_is_refused_in_one_line(program: Path) -> None:
    """With status 2, the value and why."""
    for target, reason in NO_WORKERS:
        said = refused("worker", target)
        assert re.fullmatch(rf"duelog: MODULE:WORKER='{re.escape(target)}': .*{re.escape(reason)}.*\n", said)
    assert "--log=" in refused("worker", "mails:worker", "--log", "loud")


pytest.importorskip("aiohttp")


class Asked:
    """The address of a page, asked as its browser does."""

    def __init__(self, printed: str) -> None:
        found = re.search(r"(http://\S+/)#token=(\S+)", printed)
        assert found is not None, printed
        self.address, self.token = found.groups()

    def ask(self, operation: str, token: str | None = None, **given: Any) -> Any:
        """The result of an operation; the status of a refusal."""
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        url = f"{self.address}duelog/v1/operations/{operation}"
        try:
            with urlopen(Request(url, json.dumps(given).encode(), headers), timeout=60) as answer:
                return json.load(answer)
        except HTTPError as error:
            with error:
                return error.code


@contextmanager
def shown(*arguments: object) -> Iterator[Asked]:
    """A command that shows a page, ended by SIGTERM, without a traceback."""
    command = module("duelog.tools.cli.main", *map(str, arguments))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = present(process.stdout).readline()
        yield Asked(line or process.communicate(timeout=60)[1])
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_directory_is_shown_by_who_has_it_open_else_by_the_command_itself(tmp_path: Path) -> None:
    """What is sent from the page is in the store; another token, and none, are refused."""
    with DelayedStore.open(tmp_path / "store") as store:
        store.topic("t").create()
        with shown("ui", store.path) as page:
            assert page.ask("send", topic="t", payload="cGF5", deliver_after=60)["topic"].endswith("/t")
            assert [each.payload for each in store.topic("t").scheduled()] == [b"pay"]
            assert page.ask("overview", token="wrong") == 401
            assert "duelog ui" in [each["name"] for each in page.ask("connections")["connections"]]
    with shown("ui", tmp_path / "store") as page:
        assert page.ask("overview")["pending"] == 1
        with pytest.raises(Exception, match="another process"):
            DelayedStore.open(tmp_path / "store")


def test_with_only_look_nothing_is_changed(tmp_path: Path) -> None:
    """By the server, and the store is opened read-only."""
    with DelayedStore.open(tmp_path / "store") as store:
        store.topic("t").send(b"pay", deliver_after=60)
    with shown("ui", tmp_path / "store", "--only-look") as page:
        assert page.ask("overview")["pending"] == 1
        assert [page.ask(name, topic="t", **more) for name, more in
                (("send", {"payload": ""}), ("delete_topic", {}), ("create_topic", {}))] == [403] * 3  # fmt: skip
        with DelayedStore.open(tmp_path / "store") as store:
            store.topic("t").send(b"more", deliver_after=60)
            assert page.ask("overview")["pending"] == 2


def test_the_live_demo_sends_and_receives_as_the_trace_did(tmp_path: Path) -> None:
    """Compressed, on the system's clock: messages come and go while the page is open."""
    with shown("demo", tmp_path / "store", "--ui", "--speed", 10_000_000) as page:
        sent = 0
        while not (sent and page.ask("overview")["acknowledged"]):
            sent = page.ask("overview")["sent"]
    with DelayedStore.open(tmp_path / "store") as store:
        assert store.topic("git").subscriptions() == ["demo"]
