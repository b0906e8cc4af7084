"""`duelog serve` as a process: what it prints, how it ends, and the one line it says when it cannot start."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import duelog
from duelog import DelayedStore, StoreConfig
from tests.broker.security.certificates import write_pair
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
        assert process.stdout is not None
        yield process, [process.stdout.readline() for _ in range(5)]
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
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(WITHIN_S) == 0
    with DelayedStore.open(store) as opened:
        assert list(opened.check(deep=True)) == []


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """With the setting and the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", tmp_path / "store", "--port", port, "--host", "127.0.0.1")
        assert said == f"duelog: brokerServicePort={port}: another program listens there, at 127.0.0.1\n"


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
    """A setting of the file, of the store in it, of the command."""
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
    """`--listen`; what is no address is refused in one line."""
    with served(tmp_path / "store", "--port", 0, "--listen", "localhost:0") as (_, lines):
        (place,) = re.findall(r" and (duelog://localhost:[0-9]+)$", lines[0].rstrip())
        with duelog.connect(place) as connected:
            connected.topic("t").send(b"x")
    said = refused("serve", tmp_path / "store", "--port", 0, "--listen", "localhost")
    assert "--listen='localhost': expected HOST:PORT" in said


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
