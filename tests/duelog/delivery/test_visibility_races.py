"""What becomes visible while a consumer looks is not waited for in vain."""

from __future__ import annotations

from typing import Any

import pytest

from duelog.delivery.dispatcher import Dispatcher
from tests.conftest import START_MS, LeadingClock, OpenStore


def test_a_message_that_becomes_visible_between_a_read_and_the_next_wait_is_told(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written ahead of its time and not read: the time told is not later than its own, and not none."""
    clock = LeadingClock(START_MS)
    store = open_store(clock_=clock)
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    due_ms = START_MS + 100_000
    topic.send(b"x", deliver_at=due_ms)
    clock.advance(99_998)
    store.tick()
    next_batch = Dispatcher.next_batch

    def slow(*arguments: Any) -> Any:
        batch = next_batch(*arguments)
        clock.advance(5)
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "next_batch", slow)
        batch, again_ms = consumer.poll()
    assert (batch, again_ms) == ([], due_ms)
    assert consumer.poll()[0][0].payload == b"x"
