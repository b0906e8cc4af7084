"""A worker that is connected to the process that has the store open: in this process, and in several of the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import duelog
from duelog import DelayedStore, TaskMessage, Worker
from tests.packaging.tree import ROOT

WAIT_S = 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DelayedStore]:
    """A store that is open in this process, on the machine's clock."""
    with DelayedStore.open(tmp_path / "store") as opened:
        yield opened


def test_a_connected_worker_runs_retries_buries_and_stops(store: DelayedStore) -> None:
    """As one of an open store: its attempts are counted, its last error is the dead letter's reason."""
    worker, seen, done = Worker(store.path, connect=True), list[tuple[bytes, int]](), threading.Event()

    @worker.task("t", retries=1, backoff=0.01)
    def handle(message: TaskMessage) -> None:
        seen.append((message.payload, message.retries))
        if message.payload == b"bad":
            raise ValueError("no")
        done.set()

    for payload in (b"bad", b"good"):
        store.topic("t").send(payload)
    with worker:
        assert done.wait(WAIT_S)
        dead = store.topic("t").subscription("worker")
        for _ in range(WAIT_S * 200):
            if dead.stats().dead_lettered:
                break
            threading.Event().wait(0.005)
    assert sorted(seen) == [(b"bad", 0), (b"bad", 1), (b"good", 0)]
    (letter,) = store.dead_letters()
    assert (letter.payload, letter.reason, letter.attempts) == (b"bad", "ValueError: no", 2)
    assert store.topic("t").subscription("worker").stats().backlog == 0


def test_a_coroutine_and_a_transaction_of_a_connected_worker(store: DelayedStore) -> None:
    """The message is acknowledged with what it sends on."""
    worker, moved = Worker(duelog.connect(store.path)), threading.Event()

    @worker.task("a")
    async def move(message: TaskMessage) -> None:
        with message.transaction() as transaction:
            transaction.send("b", message.payload)

    @worker.task("b")
    def end(message: TaskMessage) -> None:
        moved.set()

    store.topic("a").send(b"x")
    with worker:
        assert moved.wait(WAIT_S)
    assert [store.topic(name).subscription("worker").stats().backlog for name in "ab"] == [0, 0]


TASKS = """
import os
from pathlib import Path
from duelog import ReceivedMessage, Worker
worker = Worker("nowhere", name="w")
@worker.task("t", concurrency=2)
def handle(message: ReceivedMessage) -> None:
    Path({out!r}, f"{{os.getpid()}}-{{message.payload.decode()}}").touch()
"""


@pytest.mark.kill
def test_processes_of_the_command_share_the_work_and_one_that_is_killed_is_begun_again(
    store: DelayedStore, tmp_path: Path
) -> None:
    """SIGTERM drains all of them, and the status is 0."""
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "tasks.py").write_text(TASKS.format(out=str(out)))
    store.topic("t").subscribe("w", type="shared").close()
    main = f"import sys; sys.path.append({str(ROOT)!r}); from duelog.tools.cli.main import main; main()"
    command = [
        sys.executable, "-c", main,
        "worker", "tasks:worker", "--connect", str(store.path), "--processes", "2",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        numbers = iter(range(10_000))

        def workers(besides: frozenset[int] = frozenset()) -> set[int]:
            """The processes that have run something, once there are two."""
            found: set[int] = set()
            for _ in range(2_000):
                store.topic("t").send(b"%d" % next(numbers))
                threading.Event().wait(0.005)
                found = {int(path.name.partition("-")[0]) for path in out.iterdir()} - besides
                if len(found) == 2 - bool(besides):
                    break
            return found

        first = workers()
        assert len(first) == 2
        os.kill(min(first), signal.SIGKILL)
        (third,) = workers(frozenset(first))
        assert third not in first
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count(b"worker w starts") == 3
    assert said.count(b"worker w ends") == 2
    assert b"has ended with status -9: another takes its place" in said
