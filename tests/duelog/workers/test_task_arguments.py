"""Tasks with arguments: checked when they are sent, run with what was sent, by a worker here or elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ReceivedMessage, TaskFunction, Worker
from duelog.errors import ClosedError, InvalidArgument

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


def test_a_coroutine_and_a_schedule_have_arguments_too(store: DelayedStore) -> None:
    """The payload of each occurrence has them."""
    worker, done = Worker(store), threading.Event()

    @worker.task("t")
    async def remind(user: int) -> None:
        assert user == 7
        done.set()

    schedule = remind.every("hourly", cron="@hourly", user=7)
    assert schedule.payload == b'{"user":7}'
    remind.send(7)
    with worker:
        assert done.wait(WAIT_S)


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
        for _ in range(WAIT_S * 200):
            if store.topic("t").subscription("worker").stats().dead_lettered:
                break
            threading.Event().wait(0.005)
    (letter,) = store.dead_letters()
    assert "Expected `int`, got `str`" in letter.reason


def test_a_worker_that_neither_runs_nor_connects_sends_nothing(tmp_path: Path) -> None:
    """Its store is not open here."""
    worker = Worker(tmp_path / "store")

    @worker.task("t")
    def remind(user: int) -> None: ...

    with pytest.raises(ClosedError):
        remind.send(7)
