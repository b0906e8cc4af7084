"""`duelog serve --standby` as two processes: clients come to either, and go on with the one that leads."""

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import pytest

import duelog
from duelog import DelayedStore
from tests.tools.command_line import DUELOG, json_of, ok, refused

pytest.importorskip("crc32c", reason="needs duelog[broker]")
pytest.importorskip("obstore", reason="needs duelog[replica]")

WITHIN_S = 60
DAY_S = 86_400


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("localhost", 0)) as taken:
        return int(taken.getsockname()[1])


class Machine:
    """A process of a pair; it keeps its directory and its ports when it is begun again."""

    def __init__(self, directory: Path, name: str) -> None:
        self.store = directory / name
        self.port, self.listen = free_port(), free_port()
        self.connect = f"duelog://localhost:{self.listen}"
        self._command = [*DUELOG, "serve", str(self.store), "--config", str(directory / "settings.toml"), "--standby",
                         "--replica", (directory / "copy").as_uri(), "--port", str(self.port),
                         "--listen", f"localhost:{self.listen}"]  # fmt: skip
        self._lines: Queue[str] = Queue()
        self._readers: list[threading.Thread] = []
        self.begin()

    def begin(self) -> None:
        """Begin the process."""
        self.process = process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    self._lines.put(line)

        self._readers.append(threading.Thread(target=read))
        self._readers[-1].start()

    def hear(self, words: str) -> None:
        """Wait until it prints a line with some words."""
        said: list[str] = []
        while not said or words not in said[-1]:
            try:
                said.append(self._lines.get(timeout=WITHIN_S))
            except Empty:
                raise TimeoutError(f"it did not say {words!r}: {said}") from None

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the process, and wait for it."""
        self.process.send_signal(number)
        assert self.process.wait(WITHIN_S) in (0, -signal.SIGKILL)
        for reader in self._readers:
            reader.join()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, the first of which leads, and the second follows."""
    settings = "[store]\nlease_ms = 1000\nship_ms = 50\ndurability = 'replicated'\n"
    (tmp_path / "settings.toml").write_text(settings, encoding="utf-8")
    ok("init", tmp_path / "one")
    ok("replica", "init", tmp_path / "one", (tmp_path / "copy").as_uri(), "--no-probe")
    one = Machine(tmp_path, "one")
    one.hear("is served at")
    two = Machine(tmp_path, "two")
    yield one, two
    for machine in (one, two):
        if machine.process.poll() is None:
            machine.end()


def send(machine: Machine, payload: bytes) -> None:
    """Send a message by way of a machine."""
    with duelog.connect(machine.connect) as store:
        store.topic("a").send(payload, deliver_after=DAY_S)


@pytest.mark.kill
def test_clients_go_on_with_the_machine_that_leads(pair: tuple[Machine, Machine]) -> None:
    """By way of either; after a kill, and after an end that hands over."""
    one, two = pair
    two.hear(f"follows pulsar://localhost:{one.port},{one.connect}")
    send(one, b"1")
    send(two, b"2")
    one.end()
    two.hear("is served at")
    send(two, b"3")
    one.begin()
    one.hear(f"follows pulsar://localhost:{two.port}")
    send(one, b"4")
    two.end(signal.SIGTERM)
    one.hear("is served at")
    send(one, b"5")
    assert json_of("replica", "diverged", one.store) == {"messages": [], "sent": 0}
    one.end(signal.SIGTERM)
    with DelayedStore.open(one.store) as store:
        assert list(store.check(deep=True)) == []
        assert sorted(bytes(message.payload) for message in store.topic("a").scheduled()) == [
            b"1",
            b"2",
            b"3",
            b"4",
            b"5",
        ]


@pytest.mark.kill
def test_pulsar_clients_find_the_leader(pair: tuple[Machine, Machine]) -> None:
    """By the address of a standby; and one that has both addresses goes on after a takeover, without a call of its."""
    pulsar = pytest.importorskip("pulsar", reason="pulsar-client is not installed")
    one, two = pair
    two.hear("follows pulsar://")
    client = pulsar.Client(f"pulsar://localhost:{two.port}", operation_timeout_seconds=WITHIN_S)
    try:
        consumer = client.subscribe("t", "s", pulsar.ConsumerType.Shared)
        producer = client.create_producer("t", send_timeout_millis=WITHIN_S * 1000)
        producer.send(b"before")
        message = consumer.receive(WITHIN_S * 1000)
        assert message.data() == b"before"
        consumer.acknowledge(message)
        one.end()
        two.hear("is served at")
        producer.send(b"after")
        while message.data() != b"after":
            message = consumer.receive(WITHIN_S * 1000)
    finally:
        client.close()


def test_a_standby_without_a_copy_is_refused(tmp_path: Path) -> None:
    """With the option that is missing."""
    assert "--replica" in refused("serve", tmp_path / "store", "--standby")
