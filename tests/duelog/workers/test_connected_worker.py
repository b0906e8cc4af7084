"""A worker that is connected to the process that has the store open: in this process, and in several of the command."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

import duelog
from duelog import DelayedStore, MessageId, TaskMessage, Worker
from duelog.errors import InvalidArgument
from duelog.operations.face_table import FACE
from duelog.topics.task_activity import Attempt, TaskActivity
from tests.packaging.tree import ROOT
from tests.store.commits import until

WAIT_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DelayedStore]:
    """A store that is open in this process, on the machine's clock."""
    with DelayedStore.open(tmp_path / "store") as opened:
        yield opened


def test_what_a_connected_worker_runs_is_told_by_the_process_that_has_the_store_open(store: DelayedStore) -> None:
    """Who it is, what runs, what failed; gone with its connection; a pause reaches it, and is kept without it."""
    connection = duelog.connect(store.path)
    worker, gate = Worker(connection, name="w"), threading.Event()

    @worker.task("t", retries=0)
    def handle(message: TaskMessage) -> None:
        if message.payload == b"bad":
            raise ValueError("no")
        gate.wait(WAIT_S)

    def told(enough: Callable[[list[TaskActivity]], object]) -> list[TaskActivity]:
        for _ in range(WAIT_S * 200):
            if enough(found := store.topic("t").subscription("w").tasks()):
                return found
            threading.Event().wait(0.005)
        raise AssertionError(found)

    store.topic("t").send(b"bad")
    running = store.topic("t").send(b"good")
    with worker:
        (task,) = told(lambda found: found and found[0].running and found[0].failed)
        assert (task.worker, task.process, [each.message_id for each in task.attempts]) == ("w", os.getpid(), [running])
        assert [(each.reason, each.again_ms) for each in task.failures] == [("ValueError: no", None)]
        assert connection.topic("t").subscription("w").tasks() == [task]
        assert store.topic("t").subscription("w").stats().longest_running_ms is not None
        store.topic("t").subscription("w").pause()
        gate.set()
        told(lambda found: found[0].acknowledged)
        store.topic("t").send(b"paused")
    assert store.topic("t").subscription("w").tasks() == []
    stats = store.topic("t").subscription("w").stats()
    assert (stats.paused, stats.backlog, stats.unacknowledged) == (True, 1, 0)
    connection.close()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("process", {"process": "1"}),
        ("worker", {"worker": "w" * 1_001}),
        ("attempts", {"attempts": (Attempt(MessageId(1, 1), 1, 0, hangs=False),) * 101}),
        ("failures", {"failures": ("none",)}),
    ],
)
def test_what_another_process_tells_is_checked(store: DelayedStore, field: str, change: dict[str, Any]) -> None:
    """A type or a size that figures do not expect is refused by name, and figures go on."""
    good = TaskActivity("w", "f", "host", 1, 0, 8, 0, 0, 0)
    with duelog.connect(store.path) as connection, connection.topic("t").subscribe("s") as consumer:
        bad = copy(good)
        for name, value in change.items():
            object.__setattr__(bad, name, value)
        with pytest.raises(InvalidArgument, match=f"^{field}="):
            consumer._ask(FACE["Subscription.report_task"], [bad])  # type: ignore[attr-defined]
        assert store.topic("t").subscription("s").tasks() == []
        consumer._ask(FACE["Subscription.report_task"], [good])  # type: ignore[attr-defined]
        assert store.topic("t").subscription("s").tasks() == [good]


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
            end = time.monotonic() + 120
            while time.monotonic() < end:
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
        until(lambda: dead.stats().dead_lettered)
    assert sorted(seen) == [(b"bad", 0), (b"bad", 1), (b"good", 0)]
    (letter,) = store.dead_letters()
    assert (letter.payload, letter.reason, letter.attempts) == (b"bad", "ValueError: no", 2)
    assert store.topic("t").subscription("worker").stats().backlog == 0
