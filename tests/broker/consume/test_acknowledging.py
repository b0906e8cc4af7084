"""ACK and REDELIVER: single messages, all up to one, parts of a batch; consumers that leave; counts of deliveries."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog import DelayedStore, ManualClock, Policies
from duelog.broker.consume import attached, consumers
from duelog.broker.consume.attached import BatchAcks
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
from tests.broker.consume.consuming import Consuming, ids, succeeded, texts
from tests.broker.peers import FakePeer, idle, soon
from tests.conftest import OpenStore, present

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


async def test_an_answer_waits_for_the_disk_where_that_is_asked_for(store: DelayedStore, clock: ManualClock) -> None:
    """Without it, it leaves once the acknowledgement is taken."""
    for durable in (False, True):
        here, peer = Consuming(store, clock, ack_response_durable=durable), FakePeer()
        here.send("a")
        consumer = await here.subscribe(peer, name=f"s{durable}", permits=1)
        await here.ack(peer, consumer, *ids(peer), request_id=1)
        assert peer.got(AckResponse) == [AckResponse(consumer, request_id=1)]
        engine = present(here.consumers.of_topic(here.topic.name)[f"s{durable}"][0].engine)
        assert engine._state.acks.changed != durable


@pytest.mark.parametrize("kind", [AckType.INDIVIDUAL, AckType.CUMULATIVE])
async def test_an_unknown_id_has_no_other_acknowledgement_answered_before_it_is_on_disk(
    kind: AckType, open_store: OpenStore, clock: ManualClock
) -> None:
    """One by one, or all up to a message: the unknown id alone is refused, and the others wait for the disk."""
    here, peer = Consuming(open_store(), clock, ack_response_durable=True), FakePeer()
    here.send(*"abc")
    consumer = await here.subscribe(peer, permits=3)
    engine = present(here.consumers.of_topic(here.topic.name)["s"][0].engine)
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


def words_of(left: set[int]) -> list[int]:
    """Bits as signed 64-bit words, trailing zeros left out, as clients send them."""
    number = sum(1 << each for each in left)
    words = []
    while number:
        word = number & 2**64 - 1
        words.append(word - 2**64 if word >> 63 else word)
        number >>= 64
    return words


@given(st.integers(1, 200), st.lists(st.sets(st.integers(0, 199)), min_size=1, max_size=5))
def test_what_remains_is_what_remains_in_every_set(messages: int, sets: list[set[int]]) -> None:
    """Until nothing does; then the batch is forgotten."""
    acks, expected = BatchAcks(), set(range(messages))
    for left in sets:
        expected &= left
        assert acks.take(7, words_of(left), messages) == len(expected)
        assert list(acks.words(7)) == words_of(expected)
        assert acks.count(7) == (len(expected) or None)
        if not expected:
            assert len(acks.left) == 0
            break


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten: it is delivered whole when it comes again."""
    monkeypatch.setattr(attached, "MOST_BATCHES", 3)
    acks = BatchAcks()
    for place in range(5):
        acks.take(place, [1], 2)
    assert len(acks.left) == 3
    assert acks.count(1) is None
    assert acks.count(2) == 1
    assert acks.take(2, [2], 2) == 0


def test_a_set_or_size_that_no_batch_has_takes_no_memory() -> None:
    """No batch has so many messages; a client's size of one counts only as far as its set has words."""
    acks = BatchAcks()
    assert acks.take(1, [1] * 1_025, None) == 1
    assert len(acks.left) == 0
    batches = BatchAcks()
    assert batches.take(1, [0b101], 1 << 62) == 2
    assert batches.words(1) == [0b101]


def test_forgetting_by_place() -> None:
    """One entry, all up to one, all."""
    acks = BatchAcks()
    for place in range(6):
        acks.take(place, [1], 2)
    acks.forget(5)
    acks.forget_through(2)
    assert [place for place in range(6) if acks.count(place)] == [3, 4]
    acks.clear()
    assert len(acks.left) == 0


async def test_what_another_consumer_holds_is_not_given_back(here: Consuming, peer: FakePeer, other: FakePeer) -> None:
    """REDELIVER is about what its own consumer has."""
    here.send(*"ab")
    await here.subscribe(peer, SHARED, permits=1)
    consumer = await here.subscribe(other, SHARED, permits=10)
    here.consumers.redeliver(other, Redeliver(consumer, ids(peer)))
    await idle()
    assert (texts(peer), texts(other)) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("kind", "named"),
    [*((kind, 0) for kind in SubscriptionType), (SubscriptionType.EXCLUSIVE, 1), (SubscriptionType.FAILOVER, 1)],
)
async def test_without_ids_everything_held_comes_again_in_order(
    kind: SubscriptionType, named: int, here: Consuming, peer: FakePeer
) -> None:
    """From mark-delete on, before anything new, with the consumer's epoch; with ids, too, where order counts."""
    here.send(*"abcd")
    consumer = await here.subscribe(peer, kind, permits=3)
    await here.ack(peer, consumer, ids(peer)[1])
    last = ids(peer)[2:]
    peer.sent.clear()
    here.consumers.redeliver(peer, Redeliver(consumer, last * named, epoch=7))
    await here.flow(peer, consumer, 10)
    assert texts(peer) == ["a", "c", "d"]
    assert {each.epoch for each in peer.got(Message)} == {7}


async def test_what_is_on_its_way_when_all_is_given_back_is_not_sent_before_it(here: Consuming, peer: FakePeer) -> None:
    """A job that has polled already sends nothing, and its messages come in their turn."""
    here.send(*"ab")
    consumer = await here.subscribe(peer, permits=2)
    here.send(*"cd")
    await idle()
    here.bench.executor.held = True
    await here.flow(peer, consumer, 2)
    peer.sent.clear()
    here.consumers.redeliver(peer, Redeliver(consumer))
    here.bench.executor.release()
    await here.flow(peer, consumer, 10)
    assert texts(peer) == [*"abcd"]


async def test_what_a_consumer_held_goes_to_the_others_when_it_leaves(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """By CLOSE_CONSUMER or with its connection, counted as delivered."""
    here, first, second, third = Consuming(open_store(), clock), FakePeer(), FakePeer(), FakePeer()
    here.send(*"abc")
    one = await here.subscribe(first, SHARED, permits=1)
    await here.subscribe(second, SHARED, permits=1)
    await here.subscribe(third, SHARED, permits=10)
    assert (texts(first), texts(second), texts(third)) == (["a"], ["b"], ["c"])
    first.sent.clear()
    await soon(here.consumers.close(first, CloseConsumer(one, 50)))
    assert succeeded(first) == [50]
    here.consumers.gone(second)
    await idle()
    assert texts(third) == ["c", "a", "b"]
    assert [each.redelivery_count for each in third.got(Message)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("client", "kind", "counts"),
    [
        ("Pulsar-CPP-v4.0.0", SubscriptionType.EXCLUSIVE, [0, 1, 1, 1]),
        ("Pulsar-Java-v4.0.0", SubscriptionType.FAILOVER, [0, 1, 1, 1]),
        ("Pulsar-Java-v4.0.0", SHARED, [0, 1, 2, 3]),
        ("Pulsar Go v0.14.0", SubscriptionType.EXCLUSIVE, [0, 1, 2, 3]),
    ],
)
async def test_clients_whose_dead_letter_policy_would_ask_for_ever_are_told_one_redelivery(
    here: Consuming, client: str, kind: SubscriptionType, counts: list[int]
) -> None:
    """More than the policy's count, they keep it from the program, and ask for it again; Pulsar tells them none."""
    peer = FakePeer(client)
    here.send("bad")
    consumer = await here.subscribe(peer, kind, permits=9)
    for _ in range(3):
        here.consumers.redeliver(peer, Redeliver(consumer))
        await idle()
    assert [each.redelivery_count for each in peer.got(Message)] == counts


async def test_counts_survive_a_restart_that_is_not_counted_itself(open_store: OpenStore, clock: ManualClock) -> None:
    """Messages that the client gave back count; those that it held at the broker's shutdown do not."""
    store = open_store()
    here, peer = Consuming(store, clock), FakePeer()
    here.send("a")
    consumer = await here.subscribe(peer, SHARED, permits=9)
    here.consumers.redeliver(peer, Redeliver(consumer, ids(peer)))
    await idle()
    await here.consumers.close_all()
    store.close()
    again, later = Consuming(open_store(), clock), FakePeer()
    await again.subscribe(later, SHARED, permits=9)
    assert [each.redelivery_count for each in later.got(Message)] == [1]


async def test_commands_for_unknown_consumers(here: Consuming, peer: FakePeer) -> None:
    """REDELIVER, ACK and FLOW are dropped; CLOSE_CONSUMER succeeds, as it is closed already."""
    here.consumers.redeliver(peer, Redeliver(9))
    await here.ack(peer, 9, MessageIdData(1, 1), request_id=1)
    await here.flow(peer, 9, 5)
    assert peer.sent == []
    await soon(here.consumers.close(peer, CloseConsumer(9, 3)))
    assert succeeded(peer) == [3]


async def test_what_the_store_takes_back_is_held_by_its_new_consumer_alone(
    store: DelayedStore, clock: ManualClock
) -> None:
    """If the subscription has an acknowledgement timeout of its own; the first one's place is free again."""
    store.set_policies(Policies(ack_timeout_ms=1_000), topic="t", subscription="s")
    here, first, second = Consuming(store, clock, max_unacked_messages_per_consumer=1), FakePeer(), FakePeer()
    here.send("a", "b")
    one = await here.subscribe(first, SHARED, permits=9)
    assert texts(first) == ["a"]
    clock.advance(1_000)
    two = await here.subscribe(second, SHARED, permits=9)
    assert texts(second) == ["a"]
    consumers = here.consumers.of_topic(here.topic.name)["s"]
    here.bench.loop.advance(1)
    await idle()
    assert texts(first) == ["a", "b"]
    await here.ack(second, two, ids(second)[0])
    await here.ack(first, one, ids(first)[1])
    assert [each.unacked for each in consumers] == [0, 0]
