"""ACK: one by one, all up to a message, some messages of a batch; what is answered, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duelog import ManualClock
from duelog.broker.consume import consumers
from duelog.broker.protocol.commands import (
    Ack,
    AckResponse,
    AckType,
    CloseConsumer,
    Message,
    MessageIdData,
    Redeliver,
    Seek,
    SubscriptionType,
    Unsubscribe,
)
from duelog.broker.protocol.failures import ServerError
from duelog.broker.protocol.fields import Command
from tests.broker.consume.consuming import Consuming, ids, texts
from tests.broker.peers import FakePeer, idle, soon
from tests.conftest import OpenStore

SHARED = SubscriptionType.SHARED


async def reopened(here: Consuming, kind: SubscriptionType = SHARED) -> list[str]:
    """Messages of a consumer that subscribes after all others are gone."""
    peer = FakePeer()
    await here.subscribe(peer, kind, permits=100)
    return texts(peer)


@pytest.mark.parametrize("fields", [{"type": AckType.CUMULATIVE}, {"txn_least": 1, "txn_most": 0}])
async def test_a_cumulative_acknowledgement_on_a_shared_type_and_a_transaction_are_refused(
    fields: dict[str, int], here: Consuming, peer: FakePeer
) -> None:
    """Other consumers hold some of those messages; nothing is acknowledged."""
    here.send("a")
    consumer = await here.subscribe(peer, SHARED, permits=10)
    await here.ack(peer, consumer, ids(peer)[0], request_id=5, **fields)
    assert [each.error for each in peer.got(AckResponse)] == [ServerError.NOT_ALLOWED]
    here.consumers.gone(peer)
    await idle()
    assert await reopened(here) == ["a"]


async def test_the_id_of_a_delayed_messages_receipt_is_refused_alone(
    clock: ManualClock, here: Consuming, peer: FakePeer
) -> None:
    """Acknowledgements accept what MESSAGE named; others of the same moment are taken."""
    here.send("a")
    receipt = here.topic.send(b"late", deliver_at=clock.now_ms() + 60_000)
    consumer = await here.subscribe(peer, SHARED, permits=10)
    wrong = Ack(consumer, AckType.INDIVIDUAL, [MessageIdData(*receipt)], request_id=1)
    here.bench.executor.held = True
    here.consumers.ack(peer, wrong)
    here.consumers.ack(peer, Ack(consumer, AckType.INDIVIDUAL, ids(peer), request_id=2))
    here.consumers.ack(peer, Ack(consumer, AckType.INDIVIDUAL, [MessageIdData(2**64 - 1, 2**64 - 1)], request_id=3))
    here.bench.executor.release()
    await idle()
    answers = {each.request_id: each.error for each in peer.got(AckResponse)}
    assert answers == {1: ServerError.NOT_ALLOWED, 2: None, 3: ServerError.METADATA}
    here.consumers.gone(peer)
    await idle()
    assert await reopened(here) == []


async def test_an_answer_waits_for_the_disk_where_that_is_asked_for(open_store: OpenStore, clock: ManualClock) -> None:
    """Without it, it leaves once the acknowledgement is taken."""
    store = open_store()
    for durable in (False, True):
        here, peer = Consuming(store, clock, ack_response_durable=durable), FakePeer()
        here.send("a")
        consumer = await here.subscribe(peer, name=f"s{durable}", permits=1)
        await here.ack(peer, consumer, *ids(peer), request_id=1)
        assert peer.got(AckResponse) == [AckResponse(consumer, request_id=1)]
        engine = here.consumers.of_topic(here.topic.name)[f"s{durable}"][0].engine
        assert engine is not None
        assert engine._state.acks.changed != durable


@pytest.mark.parametrize("kind", [AckType.INDIVIDUAL, AckType.CUMULATIVE])
async def test_an_unknown_id_has_no_other_acknowledgement_answered_before_it_is_on_disk(
    kind: AckType, open_store: OpenStore, clock: ManualClock
) -> None:
    """One by one, or all up to a message: the unknown id alone is refused, and the others wait for the disk."""
    here, peer = Consuming(open_store(), clock, ack_response_durable=True), FakePeer()
    here.send(*"abc")
    consumer = await here.subscribe(peer, permits=3)
    engine = here.consumers.of_topic(here.topic.name)["s"][0].engine
    assert engine is not None
    unflushed: list[bool] = []
    send = peer.send

    def sent(command: Command, blob: bytes | memoryview | None = None) -> None:
        unflushed.append(engine._state.acks.changed)
        send(command, blob)

    peer.send = sent  # type: ignore[method-assign]
    nothing = MessageIdData(ids(peer)[0].ledger_id + 9, 5)
    here.bench.executor.held = True
    here.consumers.ack(peer, Ack(consumer, AckType.INDIVIDUAL, ids(peer)[1:2], request_id=1))
    here.consumers.ack(peer, Ack(consumer, AckType.INDIVIDUAL, ids(peer)[:1], request_id=2))
    here.consumers.ack(peer, Ack(consumer, kind, ids(peer)[2:], request_id=3))
    here.consumers.ack(peer, Ack(consumer, kind, [nothing], request_id=4))
    here.bench.executor.release()
    await idle()
    answers = {each.request_id: each.error for each in peer.got(AckResponse)}
    assert answers == {1: None, 2: None, 3: None, 4: ServerError.NOT_ALLOWED}
    assert unflushed == [False] * 4
    here.consumers.gone(peer)
    await idle()
    assert await reopened(here, SubscriptionType.EXCLUSIVE) == []


async def test_a_batch_is_acknowledged_when_all_its_messages_are(here: Consuming, peer: FakePeer) -> None:
    """Sets are joined by AND; a redelivery carries what remains, and counts as much."""
    here.send("a", messages=5)
    consumer = await here.subscribe(peer, SHARED, permits=50)
    (sent,) = ids(peer)
    record = here.consumers.of_topic(here.topic.name)["s"][0]
    assert record.unacked == 5
    await here.ack(peer, consumer, MessageIdData(sent.ledger_id, sent.entry_id, ack_set=[0b11110]), request_id=1)
    await here.ack(peer, consumer, MessageIdData(sent.ledger_id, sent.entry_id, ack_set=[0b01111]))
    assert record.unacked == 3
    assert peer.got(AckResponse) == [AckResponse(consumer, request_id=1)]
    here.consumers.redeliver(peer, Redeliver(consumer, [sent]))
    await idle()
    assert [(each.redelivery_count, list(each.ack_set)) for each in peer.got(Message)] == [(0, []), (1, [0b01110])]
    assert record.unacked == 3
    await here.ack(peer, consumer, MessageIdData(sent.ledger_id, sent.entry_id, ack_set=[0b10001]))
    assert record.unacked == 0
    here.consumers.gone(peer)
    await idle()
    assert await reopened(here) == []


@pytest.mark.parametrize("kind", list(SubscriptionType))
async def test_what_was_acknowledged_of_a_batch_counts_when_the_only_consumer_comes_back(
    kind: SubscriptionType, here: Consuming, peer: FakePeer
) -> None:
    """After a reconnect and after a close; not after a seek, an unsubscribe, or an operator's reset."""
    here.send("a", messages=5)

    async def come(permits: int = 50) -> tuple[int, list[list[int]]]:
        peer.sent.clear()
        consumer = await here.subscribe(peer, kind, permits=permits)
        return consumer, [list(each.ack_set) for each in peer.got(Message)]

    async def acknowledge_two(consumer: int) -> None:
        (sent,) = ids(peer)
        await here.ack(peer, consumer, MessageIdData(sent.ledger_id, sent.entry_id, ack_set=[0b11100]))

    consumer, sets = await come()
    assert sets == [[]]
    await acknowledge_two(consumer)
    here.consumers.gone(peer)
    await idle()
    consumer, sets = await come()
    assert sets == [[0b11100]]
    await soon(here.consumers.close(peer, CloseConsumer(consumer, 1)))
    consumer, sets = await come()
    assert sets == [[0b11100]]

    await soon(here.consumers.seek(peer, Seek(consumer, 2, message_id=ids(peer)[0])))
    consumer, sets = await come()
    assert sets == [[]]
    await acknowledge_two(consumer)
    await soon(here.ask(peer, Unsubscribe(consumer, 3)))
    consumer, sets = await come()
    assert sets == [[]]
    await acknowledge_two(consumer)
    here.consumers.gone(peer)
    await idle()
    await soon(here.consumers.alone(here.topic.name, "s", lambda: None, force=False))
    consumer, sets = await come()
    assert sets == [[]]
    await acknowledge_two(consumer)
    await soon(here.consumers.alone(here.topic.name, "s", lambda: None, force=True))
    _, sets = await come()
    assert sets == [[]]


@pytest.mark.parametrize("size", [-1, 1 << 30])
async def test_a_size_of_a_batch_that_cannot_be_is_passed_over(size: int, here: Consuming, peer: FakePeer) -> None:
    """A client says it, in individual and cumulative acknowledgements."""
    here.send("a", messages=3)
    consumer = await here.subscribe(peer, permits=50)
    (sent,) = ids(peer)
    for kind, left in ((AckType.INDIVIDUAL, 0b110), (AckType.CUMULATIVE, 0b100)):
        part = MessageIdData(sent.ledger_id, sent.entry_id, ack_set=[left], batch_size=size)
        await here.ack(peer, consumer, part, type=kind)
    peer.sent.clear()
    here.consumers.redeliver(peer, Redeliver(consumer))
    await idle()
    assert [list(each.ack_set) for each in peer.got(Message)] == [[0b100]]


async def test_a_cumulative_acknowledgement_into_a_batch_leaves_the_rest_of_it(here: Consuming, peer: FakePeer) -> None:
    """Everything before the batch is acknowledged, and the first messages of the batch."""
    here.send("a", "b", messages=3)
    consumer = await here.subscribe(peer, permits=50)
    last = ids(peer)[1]
    part = MessageIdData(last.ledger_id, last.entry_id, ack_set=[0b110])
    await here.ack(peer, consumer, part, type=AckType.CUMULATIVE)
    peer.sent.clear()
    here.consumers.redeliver(peer, Redeliver(consumer))
    await idle()
    assert [(each.message_id, list(each.ack_set)) for each in peer.got(Message)] == [(last, [0b110])]


async def test_a_connection_that_acknowledges_faster_than_is_taken_is_not_read(here: Consuming, peer: FakePeer) -> None:
    """Acknowledgements that wait for a worker are bounded; the connection is read again once they are taken."""
    here.send("a")
    consumer = await here.subscribe(peer, permits=1)
    here.bench.executor.held = True
    for _ in range(22):
        here.consumers.ack(peer, Ack(consumer, AckType.INDIVIDUAL, ids(peer) * 1_000))
    assert peer.paused == {"acks"}
    here.bench.executor.release()
    await idle()
    assert peer.paused == set()


async def test_subscriptions_whose_sets_are_kept_are_bounded(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was left first is forgotten; one without a set takes no place."""
    monkeypatch.setattr(consumers, "MOST_KEPT", 2)

    here = Consuming(open_store(), clock)
    here.send("batch", messages=2)
    for name in "abcd":
        peer = FakePeer()
        consumer = await here.subscribe(peer, SHARED, name=name, permits=2)
        if name != "d":
            (message_id,) = ids(peer)
            await here.ack(peer, consumer, replace(message_id, ack_set=[0b10]))
        here.consumers.gone(peer)
        await idle()
    assert [name for _, name in here.consumers._kept] == ["b", "c"]
