"""A subscription peeked at, skipped, expired and reset from outside; seeking by publish time. See the model, too."""

from datetime import UTC, datetime
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message, PublishedAt, StoreConfig, Topic
from duelog.markers import reader
from duelog.store.errors import ClosedError, InvalidArgument, UnknownSubscription, UnknownTopic
from duelog.store.log import scan
from duelog.store.position import Position
from tests.conftest import START_MS, OpenStore
from tests.duelog.store_state import payloads, received

FACES = True

SEND = [b"%d" % number for number in range(6)]
CONFIG = StoreConfig(ledger_max_entries=3, partition_ms=60_000, inline_delay_ms=2_000)


def test_a_delayed_message_is_found_by_when_it_was_published(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Its marker stands after messages published later: they come again too, and it does."""
    topic.subscribe("keeps").close()
    clock.advance(1_000)
    topic.send(b"delayed", deliver_after=7_200)
    clock.advance(1_000)
    topic.send(b"later")
    clock.advance(7_200_000)
    store.tick()
    topic.send(b"last")
    with topic.subscribe("s") as consumer:
        assert payloads(consumer) == [b"later", b"delayed", b"last"]
        for time_ms, expected in (
            (START_MS, [b"later", b"delayed", b"last"]),
            (START_MS + 1_000, [b"later", b"delayed", b"last"]),
            (START_MS + 2_000, [b"later", b"delayed", b"last"]),
            (START_MS + 2_001, [b"last"]),
            (START_MS + 9_000_000, []),
        ):
            consumer.seek(PublishedAt(time_ms))
            assert received(consumer) == expected
            with topic.reader(PublishedAt(time_ms)) as reader:
                assert received(reader) == expected
        position = consumer.seek(PublishedAt(datetime.fromtimestamp((START_MS + 7_202_000) / 1000, UTC)))
        assert received(consumer) == [b"last"]
        assert topic.get(position) is not None
        for wrong in (-1, 1.5, "now", datetime(2026, 1, 1), None):
            with pytest.raises(InvalidArgument):
                consumer.seek(PublishedAt(wrong))  # type: ignore[arg-type]


def test_whole_ledgers_closed_before_the_time_are_not_read(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a hundred ledgers is read."""
    topic = open_store(config=StoreConfig(ledger_max_entries=1)).topic("t")
    topic.subscribe("s").close()
    for number in range(100):
        topic.send(b"%d" % number)
        clock.advance(10)
    looked: list[int] = []

    def noting(raw: Any, name: str, ledger_id: int, *rest: Any) -> Any:
        looked.append(ledger_id)
        return scan.runs(raw, name, ledger_id, *rest)

    monkeypatch.setattr(reader, "runs", noting)
    topic.subscription("s").reset(PublishedAt(START_MS + 985))
    assert len(looked) <= 3
    assert received(topic.subscribe("s")) == [b"99"]


def test_peeking_far_ahead_reads_what_lies_before(topic: Topic) -> None:
    """More than are read at once; a wrong number is named."""
    topic.subscribe("s").close()
    payloads = [b"%d" % number for number in range(200)]
    topic.send_payloads(payloads)
    admin = topic.subscription("s")
    for after in (0, 63, 64, 65, 129, 199):
        assert [message.payload for message in admin.peek(2, after=after)] == payloads[after : after + 2]
    assert admin.peek(after=200) == []
    for wrong in (-1, True, "1"):
        with pytest.raises(InvalidArgument, match="after="):
            admin.peek(after=wrong)  # type: ignore[arg-type]


def test_bad_input_and_what_is_gone_have_their_answers(store: DelayedStore, topic: Topic) -> None:
    """Nothing is acknowledged."""
    with pytest.raises(UnknownTopic):
        topic.subscription("s")
    topic.subscribe("s").close()
    with pytest.raises(UnknownSubscription):
        topic.subscription("other")
    admin = topic.subscription("s")
    topic.send_payloads(SEND)
    for wrong in (0, -1, True, 1.0, "1"):
        for call in (admin.peek, admin.skip):
            with pytest.raises(InvalidArgument):
                call(wrong)  # type: ignore[arg-type]
    for time in (-1, 1.5, "yesterday", datetime(2026, 1, 1)):
        with pytest.raises(InvalidArgument):
            admin.expire(time)  # type: ignore[arg-type]
    for place in ("middle", Position(2**30, 0), -5):
        with pytest.raises(InvalidArgument):
            admin.reset(place)
    assert admin.stats().backlog == 6
    topic.unsubscribe("s")
    for gone in (admin.peek, lambda: admin.skip(1), lambda: admin.expire(0), lambda: admin.reset("latest")):
        with pytest.raises(UnknownSubscription):
            gone()
    store.close()
    with pytest.raises(ClosedError):
        admin.peek()


def test_peeking_and_skipping_beside_consumers(topic: Topic) -> None:
    """Messages that a consumer holds are shown, and skipped: they do not come again, and the next do."""
    consumer = topic.subscribe("s", type="key_shared")
    topic.send_batch([Message(payload, key="k") for payload in SEND])
    held = consumer.receive(2)
    admin = topic.subscription("s")
    assert [message.payload for message in admin.peek(3)] == SEND[:3]
    assert admin.skip(3) == 3
    assert consumer.nack(held, delay=0) == 0
    assert received(consumer) == SEND[3:]
    assert (admin.name, admin.topic) == ("s", topic.name)
