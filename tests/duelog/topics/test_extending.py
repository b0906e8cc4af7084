"""Extending the acknowledgement timeout of messages that a consumer holds."""

from __future__ import annotations

from datetime import timedelta

import pytest

from duelog import DelayedStore, ManualClock, Policies, Subscription
from duelog.errors import ClosedError, InvalidArgument
from tests.conftest import START_MS
from tests.duelog.consuming import received


def holding(store: DelayedStore, count: int = 2, timeout_ms: int = 1_000) -> Subscription:
    """A consumer of so many messages that may be held for so long."""
    store.set_policies(Policies(ack_timeout_ms=timeout_ms))
    consumer = store.topic("t").subscribe("s", type="shared")
    store.topic("t").send_payloads([b"%d" % number for number in range(count)])
    return consumer


def test_what_is_extended_comes_again_when_that_is_over(store: DelayedStore, clock: ManualClock) -> None:
    """The others by the timeout; a second extension takes the place of the first."""
    consumer = holding(store)
    first, _ = consumer.receive(2)
    clock.advance(900)
    assert consumer.extend(first) == 1
    clock.advance(100)
    assert received(consumer) == [b"1"]
    clock.advance(800)
    assert consumer.extend([first], timedelta(seconds=5)) == 1
    clock.advance(4_999)
    assert received(consumer) == [b"1"]
    clock.advance(1)
    assert [message.redelivery_count for message in consumer.receive(2)] == [1]


def test_a_shorter_time_than_the_timeout_counts_too(store: DelayedStore, clock: ManualClock) -> None:
    """A consumer knows better; who waits is told when to look."""
    consumer = holding(store)
    messages = consumer.receive(2)
    assert consumer.extend(messages, 0.01) == 2
    assert consumer.poll() == ([], START_MS + 10)
    clock.advance(10)
    assert received(consumer) == [b"0", b"1"]


def test_only_what_is_still_held_is_extended(store: DelayedStore, clock: ManualClock) -> None:
    """Not what was acknowledged, given back, taken back, or is another's; and the next delivery has the timeout."""
    consumer = holding(store, 4)
    acked, given, overdue, kept = consumer.receive(4)
    with store.topic("t").subscribe("s", type="shared") as other:
        assert other.extend(kept) == 0
    consumer.ack(acked)
    consumer.extend(given, 60)
    consumer.nack(given, delay=0)
    assert consumer.extend([acked, given]) == 0
    consumer.extend([kept], 60)
    clock.advance(1_000)
    assert received(consumer) == [b"1", b"2"]
    clock.advance(1_000)
    assert received(consumer) == [b"1", b"2"]
    assert consumer.extend([overdue, kept]) == 2
    assert consumer.ack(kept) == 1


def test_without_a_timeout_there_is_nothing_to_extend(store: DelayedStore, clock: ManualClock) -> None:
    """It is held for ever as it is, and says how many it holds."""
    consumer = holding(store, timeout_ms=0)
    messages = consumer.receive(2)
    assert consumer.extend(messages, 0.001) == 2
    clock.advance(1_000_000)
    assert consumer.receive() == []


def test_what_cannot_be_extended_is_refused_by_name(store: DelayedStore) -> None:
    """And changes nothing."""
    consumer = holding(store)
    messages = consumer.receive(2)
    for wrong in (-1, "1", float("nan")):
        with pytest.raises(InvalidArgument, match="timeout"):
            consumer.extend(messages, wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="messages"):
        consumer.extend([b"0"])  # type: ignore[list-item]
    consumer.close()
    with pytest.raises(ClosedError):
        consumer.extend(messages)
