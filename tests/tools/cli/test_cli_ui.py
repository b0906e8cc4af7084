"""`duelog ui` and `duelog demo --ui` as processes: what they show, to whom, and how they end."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from duelog import DelayedStore
from tests.disaster.running import module

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
        assert process.stdout is not None
        line = process.stdout.readline()
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


def test_what_is_no_store_is_told_in_a_line(tmp_path: Path) -> None:
    """As by other commands."""
    done = subprocess.run(
        module("duelog.tools.cli.main", "ui", str(tmp_path / "none")),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n"), "no such directory" in done.stderr) == (2, 1, True)


def test_the_live_demo_sends_and_receives_as_the_trace_did(tmp_path: Path) -> None:
    """Compressed, on the system's clock: messages come and go while the page is open."""
    with shown("demo", tmp_path / "store", "--ui", "--speed", 10_000_000) as page:
        sent = 0
        while not (sent and page.ask("overview")["acknowledged"]):
            sent = page.ask("overview")["sent"]
    with DelayedStore.open(tmp_path / "store") as store:
        assert store.topic("git").subscriptions() == ["demo"]
