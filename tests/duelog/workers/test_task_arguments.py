"""Tasks with arguments: checked when they are sent, run with what was sent, by a worker here or elsewhere."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duelog import DelayedStore, FollowUp, Message, ReceivedMessage, TaskFunction, Worker
from duelog.errors import ClosedError, InvalidArgument
from tests.store.commits import until

WAIT_S = 30


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
        ({"user": 7, "text": None}, "text", "Expected `str`, got `null`"),
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
