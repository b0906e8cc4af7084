"""Late entries: appended when the frontier had passed their due time already, and fired all the same."""

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Topic
from duelog.markers.firing.pending_log import PendingLog
from duelog.store.codec.run import Int64s, UInt32s
from tests.conftest import START_MS, OpenStore

CONFIG = StoreConfig(partition_ms=3_600_000, fire_batch=3)


def overtaken(store: DelayedStore, clock: ManualClock) -> tuple[Topic, list[bytes]]:
    """A batch whose sender was held up between looking at the clock and its commit, while others fired."""
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    held_up, sent_ms = topic.sender.encode(
        [Message(b"late-%d" % number, deliver_after=number + 1) for number in range(7)]
    )
    topic.send_batch([Message(b"first", deliver_after=20), Message(b"after", deliver_after=40)])
    clock.set(START_MS + 30_000)
    got = [message.payload for message in consumer.receive(10)]
    store._engine.sending.sender.send(topic.sender.topic(sent_ms), held_up, sent_ms)
    clock.set(START_MS + 60_000)
    while messages := consumer.receive(10):
        got += [message.payload for message in messages]
    return topic, got


EXPECTED = [b"first", *(b"late-%d" % number for number in range(7)), b"after"]


def test_a_sender_that_was_overtaken_loses_nothing(open_store: OpenStore, clock: ManualClock) -> None:
    """Its messages fire in order of due time, in batches, before anything later does."""
    _, got = overtaken(open_store(config=CONFIG), clock)
    assert got == EXPECTED


def test_without_the_clamp_of_late_entries_messages_are_lost(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong engine that takes all at or before the frontier for fired is found out above, and by `check`."""

    def no_clamp(self: PendingLog, entries: UInt32s, dues: Int64s) -> None:
        ahead = ~self.frontier.passes(entries, dues)
        if ahead.any():
            self._index.add(entries[ahead], dues[ahead])

    monkeypatch.setattr(PendingLog, "_place", no_clamp)
    store = open_store(config=CONFIG)
    _, got = overtaken(store, clock)
    assert got == [b"first", b"after"]
    assert [finding.code for finding in store.check()] == ["fired-count"]
    store.close()
