"""Tasks with arguments, checked when they are sent; workers connected to the process that has the store open."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

import duelog
from duelog import DelayedStore, FollowUp, Message, MessageId, ReceivedMessage, TaskFunction, TaskMessage, Worker
from duelog.errors import ClosedError, InvalidArgument
from duelog.operations.face_table import FACE
from duelog.topics.task_activity import Attempt, TaskActivity
from tests.packaging.tree import ROOT
from tests.store.commits import until

WAIT_S = 60


class Colour(Enum):
    """An enumeration among arguments."""

    RED = "red"


@dataclass
class Order:
    """A dataclass among arguments."""

    number: int
    due: datetime


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DelayedStore]:
    """A store that is open in this process, on the machine's clock."""
    with DelayedStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.mark.parametrize("connects", [False, True])
def test_a_function_runs_with_the_arguments_that_were_sent(store: DelayedStore, connects: bool) -> None:
    """Also before the worker runs, where it connects; defaults, dataclasses, enumerations; called, it runs at once."""
    worker = Worker(store.path, connect=True) if connects else Worker(store)
    seen: list[tuple[Any, ...]] = []
    done = threading.Event()

    @worker.task("t")
    def remind(user: int, order: Order, colour: Colour = Colour.RED, texts: list[str] | None = None) -> str:
        seen.append((user, order, colour, texts))
        done.set()
        return "done"

    assert isinstance(remind, TaskFunction)
    order = Order(17, datetime(2026, 11, 26, tzinfo=UTC))
    assert remind(1, order) == "done"
    done.clear()
    remind.send(user=7, order=order, texts=["pay"])
    later = remind.send(8, order, deliver_after=timedelta(hours=1), dedup_key="bill-7")
    assert remind.send(9, order, deliver_after=5, dedup_key="bill-7") == later
    with worker:
        assert done.wait(WAIT_S)
    assert seen == [(1, order, Colour.RED, None), (7, order, Colour.RED, ["pay"])]
    assert [message.dedup_key for message in store.topic("t").scheduled()] == ["bill-7"]
    assert (remind.cancel_key("bill-7"), remind.cancel_key("bill-7")) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "field", "said"),
    [
        ({"user": "7", "text": "pay"}, "user", "Expected `int`, got `str`"),
        ({"user": 7, "text": object()}, "arguments", "Encoding objects of type object"),
        ({"user": 7, "text": "\ud800"}, "arguments", "surrogates not allowed"),
        ({"user": 7, "text": None}, "text", "Expected `str`, got `null`"),
        ({"user": 7, "text": b"pay"}, "text", "Expected `str`, got `bytes`"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_when_it_is_sent(
    store: DelayedStore, arguments: dict[str, Any], field: str, said: str
) -> None:
    """By its name and value; a missing or unknown one as of a call; nothing is sent."""
    worker = Worker(store)

    @worker.task("t")
    def remind(user: int, text: str) -> None: ...

    with pytest.raises(InvalidArgument, match=said) as caught:
        remind.send(**arguments)
    assert caught.value.field == field
    for wrong in ({"user": 7}, {"user": 7, "text": "x", "other": 1}):
        with pytest.raises(TypeError):
            remind.send(**wrong)
    assert list(store.topics()) == []


def test_a_function_of_a_message_stays_as_it_is(store: DelayedStore) -> None:
    """Annotated as such, or with one parameter that is not annotated; one with a name that `send` has is refused."""
    worker = Worker(store)

    def plain(message): ...  # type: ignore[no-untyped-def]

    def typed(message: ReceivedMessage) -> None: ...

    assert worker.task("a")(plain) is plain
    assert worker.task("b")(typed) is typed

    def taken(key: str, user: int) -> None: ...

    with pytest.raises(InvalidArgument, match=r"send\(\) or every\(\) has arguments key"):
        worker.task("c")(taken)


def test_a_payload_that_has_other_arguments_becomes_a_dead_letter_that_says_so(store: DelayedStore) -> None:
    """As any attempt that fails."""
    worker = Worker(store)

    @worker.task("t", retries=0)
    def remind(user: int) -> None: ...

    store.topic("t").subscribe("worker", type="shared").close()
    store.topic("t").send(b'{"user": "x"}')
    with worker:
        until(lambda: store.topic("t").subscription("worker").stats().dead_lettered)
    (letter,) = store.dead_letters()
    assert "Expected `int`, got `str`" in letter.reason


def test_a_worker_that_neither_runs_nor_connects_sends_nothing(tmp_path: Path) -> None:
    """Its store is not open here."""
    worker = Worker(tmp_path / "store")

    @worker.task("t")
    def remind(user: int) -> None: ...

    with pytest.raises(ClosedError):
        remind.send(7)


def test_what_a_task_returns_is_sent_when_its_message_is_acknowledged(store: DelayedStore) -> None:
    """A chain of tasks, raw messages, a list of both; a coroutine too. What cannot be sent is a failed attempt."""
    worker, seen, done = Worker(store), list[str](), threading.Event()

    @worker.task("end")
    def end(text: str) -> None:
        seen.append(text)
        done.set()

    @worker.task("middle")
    async def middle(number: int) -> list[FollowUp]:
        seen.append(f"middle {number}")
        return [FollowUp("archive", Message(b"x", deliver_after=60)), end.message("end", dedup_key="e")]

    @worker.task("begin", backoff=0)
    def begin(message: ReceivedMessage) -> Any:
        seen.append("begin")
        return [middle.message(number=7)] if message.retries else [middle.message(number=7), "none"]

    store.topic("begin").send(b"x")
    with worker:
        assert done.wait(WAIT_S)
    assert seen == ["begin", "begin", "middle 7", "end"]
    assert [message.payload for message in store.topic("archive").scheduled()] == [b"x"]
    assert all(store.topic(name).subscription("worker").stats().backlog == 0 for name in ("begin", "middle", "end"))


def test_what_a_task_only_made_and_nobody_runs_is_a_failed_attempt(store: DelayedStore) -> None:
    """A generator, by `yield` in place of `return`, and a coroutine were acknowledged, and nothing of them had run."""
    worker = Worker(store)

    async def pause() -> None: ...

    begun_by_nobody = pause()

    async def steps(message: ReceivedMessage) -> Any:
        yield message

    @worker.task("numbers", retries=0)
    def count(number: int) -> Any:
        yield number

    worker.task("coroutine", retries=0)(lambda message: begun_by_nobody)
    worker.task("steps", retries=0)(steps)
    with worker:
        count.send(7)
        store.topic("coroutine").send(b"x")
        store.topic("steps").send(b"x")
        until(lambda: len(list(store.dead_letters())) == 3)
    assert all("the task has not run" in str(letter.reason) for letter in store.dead_letters())
    begun_by_nobody.close()


def test_hooks_hear_of_each_attempt_and_what_they_raise_is_logged(
    store: DelayedStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A start each, then a retry, a dead letter or a success."""
    worker, heard, done = Worker(store), list[Any](), threading.Event()

    def buried(message: ReceivedMessage, error: BaseException | None) -> None:
        heard.append(("dead", message.payload, repr(error)))
        done.set()
        raise LookupError("a hook")

    hooks: Any = {
        "on_start": lambda message: heard.append(("start", message.payload)),
        "on_success": lambda message: heard.append(("success", message.payload)),
        "on_retry": lambda message, error: heard.append(("retry", message.payload, repr(error))),
        "on_dead_letter": buried,
    }

    @worker.task("t", retries=1, backoff=0, concurrency=1, **hooks)
    def handle(message: ReceivedMessage) -> None:
        if message.payload == b"bad":
            raise ValueError("no")

    with pytest.raises(InvalidArgument, match="on_start=5"):
        worker.task("u", on_start=5)(handle)  # type: ignore[arg-type]
    store.topic("t").send(b"good")
    store.topic("t").send(b"bad")
    with worker:
        assert done.wait(WAIT_S)
    error = "ValueError('no')"
    assert heard == [
        ("start", b"good"), ("success", b"good"), ("start", b"bad"), ("retry", b"bad", error), ("start", b"bad"),
        ("dead", b"bad", error),
    ]  # fmt: skip
    assert "callback test_hooks_hear" in caplog.text


class Mailer:
    """A class whose method is a task."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.done = threading.Event()

    def mail(self, user: int) -> None:
        """Note the user."""
        self.sent.append(user)
        self.done.set()


def test_a_method_of_an_object_is_a_task_and_another_codec_writes_its_arguments(store: DelayedStore) -> None:
    """Called with its object; a schedule has its name where it is given none."""
    worker, mailer = Worker(store), Mailer()
    mail = worker.task("t", codec=msgspec.msgpack)(mailer.mail)
    assert isinstance(mail, TaskFunction)
    assert mail.every(cron="@daily", user=8).name == "Mailer.mail"
    with pytest.raises(InvalidArgument, match="user='7'"):
        mail.send("7")
    mail.send(user=7)
    with worker:
        assert mailer.done.wait(WAIT_S)
    assert mailer.sent == [7]
    assert [schedule.payload for schedule in store.topic("t").schedules()] == [msgspec.msgpack.encode({"user": 8})]


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


def two_processes(store: DelayedStore) -> list[str]:
    """The command that runs the tasks of a directory in two."""
    main = f"import sys; sys.path.append({str(ROOT)!r}); from duelog.tools.cli.main import main; main()"
    return [sys.executable, "-c", main, "worker", "tasks:worker", "--connect", str(store.path), "--processes", "2"]


@pytest.mark.kill
def test_processes_whose_parent_is_killed_end(store: DelayedStore, tmp_path: Path) -> None:
    """They ran on beside those that the next command began, with the program as it was."""
    (tmp_path / "tasks.py").write_text(TASKS.format(out=str(tmp_path)))
    store.topic("t").subscribe("w", type="shared").close()
    with subprocess.Popen(two_processes(store), cwd=tmp_path, stderr=subprocess.PIPE) as process:
        until(lambda: store.topic("t").subscription("w").stats().consumers == 2)
        process.kill()
        _, said = process.communicate(timeout=WAIT_S)  # to the end of all that have it
    assert said.count(b"worker w ends") == 2


@pytest.mark.kill
def test_processes_of_the_command_share_the_work_and_one_that_is_killed_is_begun_again(
    store: DelayedStore, tmp_path: Path
) -> None:
    """SIGTERM drains all of them, and the status is 0."""
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "tasks.py").write_text(TASKS.format(out=str(out)))
    store.topic("t").subscribe("w", type="shared").close()
    with subprocess.Popen(two_processes(store), cwd=tmp_path, stderr=subprocess.PIPE) as process:
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
