"""Failover subscriptions: which consumer is served, who is told, and what the one before held."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog import Failover, Subscription, Topic
from duelog.delivery.consumer_arguments import chosen
from duelog.store.errors import ClosedError, InvalidArgument
from tests.conftest import raising
from tests.duelog.store_state import received

SEND = [b"%d" % number for number in range(6)]


def by_name(names: Sequence[str]) -> int:
    """The first in order of name."""
    return names.index(min(names))


class Consumers:
    """Consumers of one failover subscription, and what each was told."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.told: list[tuple[str, bool]] = []

    def add(
        self, name: str, priority: int = 0, choose: Callable[[Sequence[str]], int] | None = by_name
    ) -> Subscription:
        def on_change(active: bool) -> None:
            self.told.append((name, active))

        return self.topic.subscribe("s", type="failover", failover=Failover(priority, name, choose, on_change))

    def news(self) -> list[tuple[str, bool]]:
        """The calls since it was last asked."""
        told, self.told = self.told, []
        return told


def test_the_choice_is_made_anew_when_a_consumer_comes_or_goes(topic: Topic) -> None:
    """Each is told when it subscribes and when it changes, and the one that is served says so."""
    consumers = Consumers(topic)
    b = consumers.add("b")
    assert consumers.news() == [("b", True)]
    c = consumers.add("c")
    assert consumers.news() == [("c", False)]
    a = consumers.add("a")
    assert consumers.news() == [("b", False), ("a", True)]
    assert [each.active for each in (a, b, c)] == [True, False, False]
    a.close()
    assert consumers.news() == [("b", True)]
    with pytest.raises(ClosedError):
        assert a.active
    c.close()
    b.close()
    assert consumers.news() == []
    consumers.add("z")
    assert consumers.news() == [("z", True)]


@pytest.mark.parametrize("answer", [-1, 1, "a", None, ZeroDivisionError(), SystemExit()])
def test_a_choice_that_is_none_refuses_the_consumer(topic: Topic, answer: Any) -> None:
    """Nothing has changed; and when a consumer goes the first is served."""

    def choose(names: Sequence[str]) -> int:
        if len(names) == 1 or "bad" not in names:
            return 0
        if isinstance(answer, BaseException):
            raise answer
        return 2 if answer == 1 else answer

    consumers = Consumers(topic)
    a = consumers.add("a", choose=choose)
    consumers.news()
    with pytest.raises(InvalidArgument, match=r"^choose="):
        consumers.add("bad", choose=choose)
    assert (consumers.news(), a.active, a.stats().consumers) == ([], True, 1)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_on_change_that_raises_leaves_no_ghost_consumer(topic: Topic, error: type[BaseException]) -> None:
    """The consumer is added, and known to its caller; when it leaves another gets the messages."""
    topic.send_payloads(SEND)
    first = topic.subscribe("s", type="failover", failover=Failover(on_change=raising(error("made up"))))
    assert (first.active, first.stats().consumers) == (True, 1)
    assert received(first, 2) == SEND[:2]
    consumers = Consumers(topic)
    other = consumers.add("a", 1)
    first.close()
    assert consumers.news() == [("a", False), ("a", True)]
    assert received(other) == SEND


def test_a_choice_that_raises_systemexit_when_a_consumer_leaves_has_the_first_served(topic: Topic) -> None:
    """Those that stay would get nothing."""
    left: list[str] = []

    def choose(names: Sequence[str]) -> int:
        if left:
            raise SystemExit
        return 0

    consumers = Consumers(topic)
    topic.send_payloads(SEND)
    a, b = consumers.add("a", choose=choose), consumers.add("b", choose=choose)
    left.append("a")
    a.close()
    assert b.active
    assert received(b) == SEND


def test_a_waker_that_raises_makes_no_stored_message_an_error(topic: Topic) -> None:
    """It is called by the thread that commits; others are woken."""
    woken: list[bool] = []
    with topic.subscribe("s") as consumer:
        consumer.add_waker(raising(SystemExit()))
        consumer.add_waker(lambda: woken.append(True))
        topic.send(b"a")
        assert woken
        assert received(consumer) == [b"a"]


def test_arguments_that_cannot_be_are_named(topic: Topic) -> None:
    """Also a Failover for another type."""
    for field, value in (("priority", -1), ("priority", 1.0), ("name", 1), ("choose", 1), ("on_change", "x")):
        with pytest.raises(InvalidArgument, match=f"^{field}="):
            Failover(**{field: value})  # type: ignore[arg-type]
    for type_ in ("exclusive", "shared", "key_shared"):
        with pytest.raises(InvalidArgument):
            topic.subscribe("s", type=type_, failover=Failover())
    with pytest.raises(InvalidArgument):
        topic.subscribe("s", type="failover", failover="first")  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcd")), min_size=1, max_size=6))
def test_the_choice_is_among_those_of_the_lowest_number(consumers: list[tuple[int, str]]) -> None:
    """By name among equals, and by arrival among those of one name: sorting is the twin."""
    candidates = {number: Failover(priority, name, by_name) for number, (priority, name) in enumerate(consumers)}
    assert chosen(candidates) == min(range(len(consumers)), key=lambda number: consumers[number])
