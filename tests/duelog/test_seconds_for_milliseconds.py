"""A due time that was given in seconds is refused, and not taken for one that is long past."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duelog import DelayedStore, ManualClock, Message, Topic, aio
from duelog.errors import InvalidMessage
from tests.conftest import START_MS, OpenStore

SECONDS = START_MS // 1_000 + 3_600
EARLIEST = datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)
FIRST_MS = 10**12

Send = Callable[..., Any]


def ways(store: DelayedStore) -> dict[str, tuple[str, Send]]:
    """Every call that takes a due time, and what its errors call the field."""
    topic = store.topic("t")
    producer = topic.producer("p")
    waiting = topic.send(b"waits", deliver_after=60)
    return {
        "send": ("deliver_at", lambda at, **past: topic.send(b"x", deliver_at=at, **past)),
        "send with a key": ("deliver_at", lambda at, **past: topic.send(b"x" * 600, deliver_at=at, key="k", **past)),
        "send_async": ("deliver_at", lambda at, **past: topic.send_async(b"x", deliver_at=at, **past).result()),
        "send_batch": (
            "messages[1].deliver_at",
            lambda at, **past: topic.send_batch([Message(b"x"), Message(b"x", deliver_at=at)], **past),
        ),
        "send_payloads": ("deliver_at", lambda at, **past: topic.send_payloads([b"x"], deliver_at=at, **past)),
        "producer": (
            "messages[0].deliver_at",
            lambda at, **past: producer.send(Message(b"x", deliver_at=at), **past),
        ),
        "reschedule": ("deliver_at", lambda at, **past: topic.reschedule(waiting, deliver_at=at, **past)),
    }


@pytest.mark.parametrize("way", ["send", "send with a key", "send_async", "send_batch", "send_payloads", "producer",
                                 "reschedule"])  # fmt: skip
def test_a_due_time_in_seconds_is_refused_with_what_it_was_meant_to_be(store: DelayedStore, way: str) -> None:
    """By each call, which stores nothing; with `allow_past` it is due at once. Whatever the store's clock says."""
    field, send = ways(store)[way]
    before = store.topic("t").stats()
    with pytest.raises(InvalidMessage) as caught:
        send(SECONDS)
    assert (caught.value.field, caught.value.value) == (field, SECONDS)
    assert "2026-09-21T15:13:20Z" in caught.value.reason
    assert "allow_past" in caught.value.reason
    for at in (0, 5, FIRST_MS - 1, EARLIEST - timedelta(milliseconds=1)):
        with pytest.raises(InvalidMessage, match="before 2001-09-09T01:46:40Z"):
            send(at)
    assert store.topic("t").stats() == before
    assert store.topic("t").producer("p").last_sequence_id == -1
    assert send(FIRST_MS) is not None
    if way != "reschedule":
        for at in (0, SECONDS, datetime(1999, 12, 31, tzinfo=timezone(timedelta(hours=2)))):
            assert send(at, allow_past=True) is not None
    with pytest.raises(InvalidMessage, match="1970"):
        send(-1, allow_past=True)


def test_rescheduling_to_a_time_before_2001_is_done_where_it_is_allowed(topic: Topic) -> None:
    """The message is due at once, as with any time that has passed."""
    with topic.subscribe("s") as consumer:
        assert topic.reschedule(topic.send(b"x", deliver_after=60), deliver_at=SECONDS, allow_past=True) is not None
        assert [message.payload for message in consumer.receive()] == [b"x"]


@pytest.mark.parametrize("column", [list, np.array, lambda times: np.array(times, dtype=np.uint64)])
def test_a_column_of_due_times_is_refused_for_its_first_in_seconds(
    topic: Topic, column: Callable[[list[int]], Any]
) -> None:
    """Its place is named; lists and arrays alike."""
    times = column([FIRST_MS, START_MS + 1, SECONDS, 7])
    with pytest.raises(InvalidMessage, match="seconds for milliseconds") as caught:
        topic.send_payloads([b"x"] * 4, deliver_at=times)
    assert (caught.value.field, caught.value.value) == ("deliver_at[2]", SECONDS)
    assert len(topic.send_payloads([b"x"] * 4, deliver_at=times, allow_past=True)) == 4


def test_a_clock_near_zero_changes_nothing(open_store: OpenStore) -> None:
    """The rule is about the value alone; a delay counts from whatever the clock says."""
    topic = open_store(clock_=ManualClock(1_000)).topic("t")
    with pytest.raises(InvalidMessage, match="allow_past"):
        topic.send(b"x", deliver_at=5_000)
    topic.send(b"x", deliver_after=4)
    topic.send(b"x")
    topic.send(b"x", deliver_at=5_000, allow_past=True)
    assert [found.due_ms for found in topic.scheduled(0, 10_000)] == [5_000, 5_000]


def test_the_face_for_asyncio_has_the_same_rule(tmp_path: Path, clock: ManualClock) -> None:
    """Each of its calls refuses and allows."""

    async def main() -> None:
        async with aio.DelayedStore.open(tmp_path / "s", clock=clock) as store:
            topic = store.topic("t")
            producer = await topic.producer("p")
            waiting = await topic.send(b"waits", deliver_after=60)
            message = Message(b"x", deliver_at=SECONDS)
            calls: list[Callable[..., Any]] = [
                lambda **past: topic.send(b"x", deliver_at=SECONDS, **past),
                lambda **past: topic.send_batch([message], **past),
                lambda **past: topic.send_payloads([b"x"], deliver_at=SECONDS, **past),
                lambda **past: producer.send(message, **past),
                lambda **past: producer.send_batch([message], **past),
                lambda **past: topic.reschedule_batch([waiting], deliver_at=SECONDS, **past),
                lambda **past: topic.reschedule(waiting, deliver_at=SECONDS, **past),
            ]
            for call in calls:
                with pytest.raises(InvalidMessage, match="seconds for milliseconds"):
                    await call()
                await call(allow_past=True)

    asyncio.run(main())
