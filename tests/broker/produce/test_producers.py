"""PRODUCER, CLOSE_PRODUCER, SEND: names, access modes, epochs; what is stored, answered in which order, refused."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, MessageId, Policies, StoreConfig
from duelog.broker.protocol import entry
from duelog.broker.protocol.commands import (
    AccessMode,
    CloseProducer,
    Error,
    Producer,
    ProducerSuccess,
    Schema,
    SendReceipt,
    Success,
)
from duelog.broker.protocol.failures import ServerError
from duelog.broker.protocol.fields import Command
from duelog.errors import StoreFailed, StoreFull
from duelog.sending.outbox import PutOutcome
from tests.broker.peers import FakePeer, idle
from tests.broker.produce.producing import TOPIC, Producing, answers, blob_of, closed, errors, exclusive, receipts
from tests.conftest import OpenStore
from tests.duelog.sending.putting import together

SHARED, EXCLUSIVE, WAIT, FENCING = AccessMode


def error_of(answer: list[Command]) -> ServerError:
    """The error of an answer that is one."""
    (error,) = answer
    assert isinstance(error, Error), error
    return error.error


async def test_a_producer_gets_a_name_and_the_topic_comes_into_being(here: Producing, peer: FakePeer) -> None:
    """A name of its own if it brings none; the initial subscription is made at the earliest message."""
    first = await here.opened(peer, 1, None, initial_subscription="first")
    second = await here.opened(peer, 2, "")
    assert (first.request_id, first.last_sequence_id, first.topic_epoch, first.ready) == (1, -1, None, True)
    assert first.producer_name
    assert first.producer_name != second.producer_name
    here.put(peer, 0, "a")
    await here.stored()
    assert len(here.topic.subscribe("first", type="shared").receive(5)) == 1
    assert (await here.opened(peer, 3, "named", initial_subscription="first")).producer_name == "named"


async def test_what_is_refused_leaves_nothing_behind(open_store: OpenStore) -> None:
    """A topic that may not be, a schema that does not fit, more producers than a connection may have."""
    here, peer = Producing(open_store(), max_producers_per_connection=1), FakePeer()
    assert error_of(await here.open(peer, topic="refused")) == ServerError.TOPIC_NOT_FOUND
    assert error_of(await here.open(peer, schema=Schema("misfit", b"", 1))) == ServerError.INCOMPATIBLE_SCHEMA
    assert here.producers._topics == {}
    assert (await here.opened(peer, schema=Schema("fits", b"", 1))).schema_version == bytes(8)
    assert error_of(await here.open(peer, 2, "q")) == ServerError.NOT_ALLOWED


async def test_a_number_that_is_in_use(here: Producing, peer: FakePeer) -> None:
    """Succeeds again where it is open, and is ServiceNotReady while it is being opened."""
    await here.opened(peer, 1)
    assert (await here.opened(peer, 1)).request_id == 2
    here.bench.executor.held = True
    opening = asyncio.ensure_future(here.producers.open(peer, Producer(here.topic.name, 2, 7, "q")))
    await idle()
    assert error_of(await here.open(peer, 2, "q")) == ServerError.SERVICE_NOT_READY
    here.bench.executor.release()
    await opening
    assert peer.got(ProducerSuccess)[-1].request_id == 7


@pytest.mark.parametrize("by", ["close", "gone"])
async def test_what_comes_of_a_producer_that_was_closed_meanwhile_is_thrown_away(
    by: str, here: Producing, peer: FakePeer
) -> None:
    """CLOSE_PRODUCER of an unfinished one succeeds; its place is free."""
    here.bench.executor.held = True
    request = Producer(here.topic.name, 1, 7, "p", access_mode=EXCLUSIVE)
    opening = asyncio.ensure_future(here.producers.open(peer, request))
    await idle()
    if by == "close":
        here.producers.close(peer, CloseProducer(1, 8))
    else:
        here.producers.gone(peer)
    here.bench.executor.release()
    await opening
    await idle()
    assert [type(each) for each in peer.take()] == ([Success] if by == "close" else [])
    assert here.producers._topics == {}
    assert (await here.opened(FakePeer(), **exclusive(EXCLUSIVE))).ready


async def test_a_producer_that_is_closed_while_its_epoch_is_recorded_leaves_its_place(
    here: Producing, peer: FakePeer, other: FakePeer
) -> None:
    """The one that waits is next."""
    await here.opened(FakePeer(), 1, "first")
    here.producers.close_topic(here.topic.name)
    executor = here.bench.executor
    request = Producer(here.topic.name, 1, 7, "p", access_mode=EXCLUSIVE)
    opening = asyncio.ensure_future(here.producers.open(peer, request))
    real = here.set_epoch

    def set_epoch(topic: str, epoch: int) -> None:
        here.producers.gone(peer)
        real(topic, epoch)

    here.set_epoch = set_epoch  # type: ignore[method-assign]
    await opening
    assert not executor.held
    assert peer.got(ProducerSuccess) == []
    here.set_epoch = real  # type: ignore[method-assign]
    assert (await here.opened(other, 1, "q", **exclusive(EXCLUSIVE))).topic_epoch == 1


async def test_an_exclusive_producer_shares_with_none(here: Producing, peer: FakePeer, other: FakePeer) -> None:
    """Others are there: ProducerFenced; it is there: Shared is ProducerBusy, Exclusive is ProducerFenced."""
    await here.opened(peer, 1, "a")
    await here.opened(peer, 2, "b")
    assert error_of(await here.open(other, 1, "c", **exclusive(EXCLUSIVE))) == ServerError.PRODUCER_FENCED
    here.producers.gone(peer)
    assert (await here.opened(other, 1, "c", **exclusive(EXCLUSIVE))).topic_epoch == 0
    assert error_of(await here.open(peer, 1, "a")) == ServerError.PRODUCER_BUSY
    assert error_of(await here.open(peer, 1, "a", **exclusive(EXCLUSIVE))) == ServerError.PRODUCER_FENCED


async def test_waiting_producers_have_their_turn_in_order(open_store: OpenStore) -> None:
    """PRODUCER_SUCCESS that is not ready, and a second one when the producer before is gone; epochs rise."""
    here, peers = Producing(open_store()), [FakePeer() for _ in range(3)]
    await here.opened(peers[0], 1, "a", **exclusive(EXCLUSIVE))
    for peer, name in zip(peers[1:], "bc", strict=True):
        assert not (await here.opened(peer, 1, name, **exclusive(WAIT))).ready
    assert error_of(await here.open(FakePeer(), 1, "d")) == ServerError.PRODUCER_BUSY
    here.producers.close(peers[0], CloseProducer(1, 9))
    await idle()
    assert [(each.ready, each.topic_epoch) for each in peers[1].got(ProducerSuccess)] == [(False, None), (True, 1)]
    assert len(peers[2].got(ProducerSuccess)) == 1
    here.put(peers[1], 0)
    await here.stored()
    assert receipts(peers[1]) == [0]
    here.producers.gone(peers[1])
    await idle()
    assert peers[2].got(ProducerSuccess)[-1].topic_epoch == 2
    assert here.epochs == {here.topic.name: 2}


async def test_a_producer_that_stops_waiting_is_passed_over(open_store: OpenStore) -> None:
    """By CLOSE or with its connection."""
    here, peers = Producing(open_store()), [FakePeer() for _ in range(4)]
    await here.opened(peers[0], 1, "a")
    for peer, name in zip(peers[1:], "bcd", strict=True):
        await here.opened(peer, 1, name, **exclusive(WAIT))
    here.producers.gone(peers[1])
    here.producers.close(peers[2], CloseProducer(1, 4))
    here.producers.gone(peers[0])
    await idle()
    assert [each.ready for each in peers[3].got(ProducerSuccess)] == [False, True]


async def test_fencing_closes_the_others_and_raises_the_epoch(open_store: OpenStore) -> None:
    """Waiting producers are ProducerFenced; one that comes back with a lower epoch is, too."""
    here, first, waiting, fencing = Producing(open_store()), FakePeer(), FakePeer(), FakePeer()
    epoch = (await here.opened(first, 1, "a", **exclusive(EXCLUSIVE))).topic_epoch
    await here.opened(waiting, 1, "b", **exclusive(WAIT))
    assert (await here.opened(fencing, 1, "c", **exclusive(FENCING))).topic_epoch == 1
    assert closed(first) == [1]
    assert errors(waiting) == [ServerError.PRODUCER_FENCED]
    for mode in (EXCLUSIVE, WAIT, FENCING):
        answer = await here.open(first, 1, "a", **exclusive(mode, topic_epoch=epoch))
        assert error_of(answer) == ServerError.PRODUCER_FENCED
    here.put(first, 5)
    assert not first.closed
    here.put(fencing, 0)
    await here.stored()
    assert receipts(fencing) == [0]


async def test_what_a_fenced_producer_had_waiting_is_not_stored(here: Producing) -> None:
    """Messages not yet taken by the engine are dropped with the producer: they would come after the new one's."""
    first, fencing = FakePeer(), FakePeer()
    await here.opened(first, 1, "a")
    real = here.topic.put
    record = here.producers.of_topic(here.topic.name)[0]
    record.topic.put = lambda *_, **__: False  # type: ignore[method-assign]
    here.put(first, 0)
    assert first.paused == {"capacity"}
    record.topic.put = real  # type: ignore[method-assign]
    await here.opened(fencing, 1, "c", **exclusive(FENCING))
    here.bench.loop.advance(1)
    here.put(fencing, 0)
    await here.stored()
    assert answers(first) == []
    assert first.paused == set()
    assert len(here.topic.subscribe("s").receive(9)) == 1


async def test_an_epoch_survives_a_restart(store: DelayedStore) -> None:
    """It is recorded before the producer hears that it is admitted."""
    before, peer = Producing(store), FakePeer()
    await before.opened(peer, **exclusive(EXCLUSIVE))
    after = Producing(store)
    after.epochs = before.epochs
    assert (await after.opened(FakePeer(), **exclusive(EXCLUSIVE))).topic_epoch == 1
    assert error_of(await after.open(FakePeer(), 1, "x", **exclusive(FENCING, topic_epoch=0))) == (
        ServerError.PRODUCER_FENCED
    )


async def test_a_client_cannot_end_the_epochs_of_a_topic(here: Producing, peer: FakePeer) -> None:
    """An epoch that no topic has had is refused: the one after 2**64 - 1 could not be told to any producer."""
    for epoch in (2**64 - 1, 2**48 + 1):
        refused = await here.open(peer, 1, "a", access_mode=EXCLUSIVE, topic_epoch=epoch)
        assert error_of(refused) == ServerError.NOT_ALLOWED
    assert (await here.opened(peer, 1, "a", **exclusive(EXCLUSIVE))).topic_epoch == 0


async def test_an_epoch_that_cannot_be_recorded_admits_no_producer(here: Producing, peer: FakePeer) -> None:
    """The place is free again."""
    here.epoch_error = StoreFull(Path("store"), "no space")
    assert error_of(await here.open(peer, **exclusive(EXCLUSIVE))) == ServerError.PERSISTENCE
    here.epoch_error = None
    assert (await here.opened(peer, **exclusive(EXCLUSIVE))).ready


async def test_the_same_name_again(open_store: OpenStore) -> None:
    """ProducerBusy, unless its epoch is greater or the connection of the one that has it does not answer."""
    here, first, second, third = Producing(open_store()), FakePeer(), FakePeer(), FakePeer()
    await here.opened(first)
    assert error_of(await here.open(second)) == ServerError.PRODUCER_BUSY
    assert first.pings == 1
    assert error_of(await here.open(first, 2)) == ServerError.PRODUCER_BUSY
    assert first.pings == 1
    assert (await here.opened(second, epoch=1)).producer_name == "p"
    assert closed(first) == [1]
    second.alive = False
    assert (await here.opened(third)).producer_name == "p"
    assert second.closed
    assert here.producers.of_topic(here.topic.name)[0].connection.peer is third


async def test_an_exclusive_producer_comes_back_over_a_new_connection(here: Producing) -> None:
    """With its name, a greater epoch of its own and the topic's epoch: it is not fenced by itself."""
    before, after = FakePeer(), FakePeer()
    epoch = (await here.opened(before, **exclusive(EXCLUSIVE))).topic_epoch
    back = await here.opened(after, epoch=1, **exclusive(EXCLUSIVE, topic_epoch=epoch))
    assert back.topic_epoch == epoch


async def test_a_topic_that_is_closed_has_its_producers_opened_anew(here: Producing) -> None:
    """CLOSE_PRODUCER to those that are ready; those that wait are refused."""
    peer, waiting = FakePeer(), FakePeer()
    await here.opened(peer)
    await here.opened(waiting, 1, "w", **exclusive(WAIT))
    here.producers.close_all()
    await idle()
    assert closed(peer) == [1]
    assert here.producers._topics == {}
    await here.producers.answered()


NONE = 2**64 - 1


async def test_a_blob_is_stored_as_it_came_and_its_receipt_names_it(open_store: OpenStore) -> None:
    """With the header that dispatch needs, and the key as the message's."""
    here, peer = Producing(open_store(), topic="persistent://public/default/t-partition-2"), FakePeer()
    await here.opened(peer)
    blob = blob_of("hello", 4, partition_key="k", num_messages_in_batch=3)
    here.put(peer, 4, blob=blob, highest_sequence_id=6)
    await here.stored()
    (receipt,) = peer.got(SendReceipt)
    assert (receipt.producer_id, receipt.sequence_id, receipt.highest_sequence_id) == (1, 4, 6)
    assert receipt.message_id is not None
    assert receipt.message_id.partition == 2
    (message,) = here.topic.subscribe("s").receive(5)
    assert message.message_id == (receipt.message_id.ledger_id, receipt.message_id.entry_id)
    assert entry.unpack(message.payload) == (entry.BATCH, entry.hash_of(b"k"), 3, 1_000)
    assert message.payload[entry.HEADER_BYTES :] == blob
    assert message.key == "k"


async def test_receipts_of_one_commit_are_one_hop(here: Producing, peer: FakePeer) -> None:
    """In the order of the SENDs."""
    await here.opened(peer)
    hops = here.bench.loop.hops

    def put() -> None:
        for sequence_id in range(500):
            here.put(peer, sequence_id)

    together(here.store, put)
    await here.stored()
    assert receipts(peer) == list(range(500))
    assert here.bench.loop.hops - hops < 5


async def test_answers_leave_in_the_order_of_the_sends_whatever_they_are(
    store: DelayedStore, clock: ManualClock
) -> None:
    """A refusal that is known at once waits for the receipts before it."""
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=1_000), topic="t")
    here, peer = Producing(store), FakePeer()
    await here.opened(peer)
    for sequence_id in range(9):
        late = clock.now_ms() + (5_000 if sequence_id % 3 == 1 else 500 if sequence_id % 3 == 2 else 0)
        here.put(peer, sequence_id, deliver_at_time=late)
    await here.stored()
    expected = [(each, ServerError.NOT_ALLOWED if each % 3 == 1 else None) for each in range(9)]
    assert answers(peer) == expected


async def test_no_answer_is_early_and_none_is_lost_however_outcomes_come(here: Producing, peer: FakePeer) -> None:
    """After each outcome those leave whose turn it is: the longest run from the first on."""
    await here.opened(peer)
    tokens: list[object] = []

    def put(*_: object, token: object, **__: object) -> bool:
        tokens.append(token)
        return True

    here.producers.of_topic(here.topic.name)[0].topic.put = put  # type: ignore[method-assign, assignment]
    for sequence_id in range(12):
        here.put(peer, sequence_id)
    known: set[int] = set()
    for number in Random(1).sample(range(12), 12):
        here.producers.sends._heard([(tokens[number], MessageId(1, number))])
        await idle()
        known.add(number)
        assert receipts(peer) == list(range(next(each for each in range(13) if each not in known)))


@pytest.mark.parametrize(
    ("version", "error"),
    [
        ("Pulsar-CPP-v3.5.1", ServerError.CHECKSUM),
        ("Pulsar-CPP-v3.1.0-py", ServerError.CHECKSUM),
        ("Pulsar-Java-v3.0.0", ServerError.NOT_ALLOWED),
        ("Pulsar Go 0.13", ServerError.NOT_ALLOWED),
    ],
)
async def test_a_refused_message_is_answered_as_its_client_family_needs(
    version: str, error: ServerError, open_store: OpenStore, clock: ManualClock
) -> None:
    """Anything else makes the client send it again for ever; what is too large, without metadata or no batch, too."""
    store = open_store(config=StoreConfig(max_message_bytes=2_000))
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=1_000), topic="t")
    here, peer = Producing(store), FakePeer(version)
    await here.opened(peer)
    here.put(peer, 0, deliver_at_time=clock.now_ms() + 1_001)
    here.put(peer, 1, "x" * 3_000)
    here.put(peer, 2, blob=memoryview(b"\x00\x00\x00\x05no"))
    here.put(peer, 3, num_messages_in_batch=0)
    here.put(peer, 4, "good")
    await here.stored()
    assert answers(peer) == [(0, error), (1, error), (2, error), (3, error), (4, None)]
    assert sum(here.producers.sends.errors.values()) == 4


async def test_a_wrong_checksum_and_a_transaction_are_refused_as_such(here: Producing, peer: FakePeer) -> None:
    """To every client; a blob without a checksum is taken."""
    await here.opened(peer)
    broken = bytearray(blob_of("hello"))
    broken[-1] ^= 1
    here.put(peer, 0, blob=memoryview(broken))
    here.put(peer, 1, blob=blob_of("hello")[6:])
    here.put(peer, 2, txn_least=0)
    await here.stored()
    assert answers(peer) == [(0, ServerError.CHECKSUM), (1, None), (2, ServerError.NOT_ALLOWED)]


async def test_a_due_time_of_the_client_holds(store: DelayedStore, clock: ManualClock) -> None:
    """Absent, zero or past: at once; the longest allowed where that is configured, a fixed delay of the topic wins."""
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=3_000), topic="t")
    here, peer = Producing(store, delay_rejection="clamp"), FakePeer()
    await here.opened(peer)
    for sequence_id, late in enumerate([None, 0, 5, *(clock.now_ms() + delay for delay in (-1, 2_000, 60_000))]):
        here.put(peer, sequence_id, deliver_at_time=late)
    store.set_policies(DelayedDeliveryPolicies(fixed_delivery_delay_ms=9_000), topic="t")
    here.put(peer, 6)
    await here.stored()
    scheduled = [each.due_ms - clock.now_ms() for each in here.topic.scheduled()]
    assert receipts(peer) == [*range(7)]
    assert scheduled == [2_000, 3_000, 9_000]


async def test_a_stored_number_is_answered_with_no_id(store: DelayedStore) -> None:
    """A batch is the range of its numbers; the producer hears of the highest when it is opened."""
    here, peer = Producing(store, numbered=True), FakePeer()
    assert (await here.opened(peer)).last_sequence_id == -1
    here.put(peer, 0)
    here.put(peer, 1, highest_sequence_id=4, num_messages_in_batch=4)
    here.put(peer, 1, highest_sequence_id=4, num_messages_in_batch=4)
    here.put(peer, 0)
    here.put(peer, 5)
    await here.stored()
    found = [each.message_id for each in peer.got(SendReceipt)]
    duplicates = [each is not None and (each.ledger_id, each.entry_id) == (NONE, NONE) for each in found]
    assert duplicates == [False, False, True, True, False]
    assert (await here.opened(FakePeer(), 2, "q")).last_sequence_id == -1
    here.producers.gone(peer)
    assert (await here.opened(FakePeer())).last_sequence_id == 5
    assert here.producers.departed[here.topic.name].duplicates == 2
    assert (await here.opened(FakePeer(), 1, "a/b%")).producer_name == "a/b%"


async def test_chunks_of_a_message_share_their_number(open_store: OpenStore) -> None:
    """All of them are stored."""
    here, peer = Producing(open_store(), numbered=True), FakePeer()
    await here.opened(peer)
    for _ in range(3):
        here.put(peer, 0, is_chunk=True)
    await here.stored()
    assert len({str(each.message_id) for each in peer.got(SendReceipt)}) == 3
    assert {entry.unpack(each.payload).flags for each in here.topic.subscribe("s").receive(9)} == {entry.CHUNK}


async def test_a_connection_with_many_unanswered_sends_is_not_read(open_store: OpenStore) -> None:
    """It is again when half of them are answered; others are not held back."""
    here, peer, other = Producing(open_store(), max_pending_publish_requests_per_connection=10), FakePeer(), FakePeer()
    await here.opened(peer)
    await here.opened(other, 1, "q")
    held: list[object] = []
    here.bench.loop.call_soon_threadsafe = lambda *call: held.append(call)  # type: ignore[method-assign]
    for sequence_id in range(10):
        here.put(peer, sequence_id)
    here.put(other, 0)
    assert peer.paused == {"unanswered"}
    assert other.paused == set()
    here.written()
    assert peer.paused == {"unanswered"}
    here.producers.sends._deliver()
    assert peer.paused == set()
    assert receipts(peer) == [*range(10)]


async def test_without_capacity_what_was_read_waits_in_order(open_store: OpenStore) -> None:
    """The connection is not read until the engine has taken it; nothing is dropped."""
    here, peer = Producing(open_store(config=StoreConfig(max_in_flight_bytes=4_000))), FakePeer()
    await here.opened(peer)
    with here.store._engine.sending.outbox._condition.lock:  # the thread that writes waits
        for sequence_id in range(20):
            here.put(peer, sequence_id, "x" * 900)
        assert peer.paused == {"capacity"}
        assert here.producers.sends.blocked_entries > 10
    for _ in range(2_000):
        here.bench.loop.advance(0.01)
        await idle()
        here.written()
        if len(receipts(peer)) == 20:
            break
    assert receipts(peer) == [*range(20)]
    assert peer.paused == set()
    assert here.producers.sends.blocked_entries == 0


async def test_a_full_store_refuses_and_goes_on(here: Producing, peer: FakePeer) -> None:
    """PersistenceError to the SENDs that were not stored; the producer stays open."""
    await here.opened(peer)
    sends = here.producers.sends
    real = here.producers.of_topic(here.topic.name)[0].topic.put
    fail(here, StoreFull(Path("store"), "no space"))
    here.put(peer, 0)
    here.producers.of_topic(here.topic.name)[0].topic.put = real  # type: ignore[method-assign]
    here.put(peer, 1)
    await here.stored()
    assert answers(peer) == [(0, ServerError.PERSISTENCE), (1, None)]
    assert sends.errors == {ServerError.PERSISTENCE: 1}


def fail(here: Producing, error: Exception) -> None:
    """Have the engine answer SENDs of the topic's producers with an error."""

    def put(payload: bytes, *, token: object, done: object, **_: object) -> bool:
        done([(token, error)])  # type: ignore[operator]
        return True

    for producer in here.producers.of_topic(here.topic.name):
        producer.topic.put = put  # type: ignore[method-assign, assignment]


async def test_a_send_whose_write_is_broken_off_is_answered_and_those_after_it_are_stored(
    here: Producing, peer: FakePeer
) -> None:
    """A client that got no answer would wait for ever."""
    await here.opened(peer)
    outbox = here.store._engine.sending.outbox
    write = outbox._write

    def broken_off(items: object) -> list[PutOutcome]:
        outbox._write = write
        raise SystemExit

    outbox._write = broken_off
    here.put(peer, 0)
    await here.stored()
    here.put(peer, 1)
    await here.stored()
    assert answers(peer) == [(0, ServerError.UNKNOWN), (1, None)]


async def test_a_failed_store_closes_its_producers(here: Producing, peer: FakePeer) -> None:
    """SENDs that come after that are dropped for a while, then end the connection."""
    await here.opened(peer)
    fail(here, StoreFailed(Path("store"), "a commit is in doubt"))
    here.put(peer, 0)
    await idle()
    assert closed(peer) == [1]
    assert answers(peer) == []
    here.put(peer, 1)
    assert not peer.closed
    here.bench.loop.advance(31)
    here.put(peer, 2)
    assert peer.closed


async def test_what_waits_of_one_producer_is_put_once_when_another_is_closed(here: Producing, peer: FakePeer) -> None:
    """Both of one connection: the first one's store fails as it is tried again."""
    await here.opened(peer, 1, "a")
    await here.opened(peer, 2, "b")
    first, second = here.producers.of_topic(here.topic.name)
    taken: list[object] = []

    def refuse(*_: object, **__: object) -> bool:
        return False

    def fail_put(*_: object, **__: object) -> bool:
        raise StoreFailed(Path("store"), "a commit is in doubt")

    def take(*_: object, token: object, **__: object) -> bool:
        taken.append(token)
        return True

    first.topic.put = second.topic.put = refuse  # type: ignore[method-assign]
    here.put(peer, 0, producer_id=1)
    here.put(peer, 0, producer_id=2)
    first.topic.put, second.topic.put = fail_put, take  # type: ignore[method-assign, assignment]
    here.bench.loop.advance(0.01)
    assert closed(peer) == [1]
    assert peer.paused == set()
    here.put(peer, 1, producer_id=2)
    assert len(taken) == 2


async def test_a_send_for_an_unknown_producer_ends_the_connection(
    here: Producing, peer: FakePeer, other: FakePeer
) -> None:
    """Also for one that the client closed itself."""
    here.put(peer, 0)
    assert peer.closed
    await here.opened(other)
    here.producers.close(other, CloseProducer(1, 5))
    here.put(other, 0)
    assert other.closed


async def test_closing_waits_for_the_answers(here: Producing, peer: FakePeer) -> None:
    """The receipts of what was sent before leave first."""
    await here.opened(peer)
    peer.sent.clear()
    here.put(peer, 0)
    here.put(peer, 1)
    here.producers.close(peer, CloseProducer(1, 5))
    await here.stored()
    assert [type(each) for each in peer.take()] == [SendReceipt, SendReceipt, Success]
    assert here.producers.count == 0


async def test_a_lost_connection_takes_its_answers_with_it(here: Producing, peer: FakePeer) -> None:
    """Messages that the engine took are stored; those that waited for capacity are not, and nothing stays behind."""
    await here.opened(peer)
    here.put(peer, 0)
    peer.closed = True
    here.producers.gone(peer)
    here.written()
    await idle()
    assert len(here.topic.subscribe("s").receive(5)) == 1
    assert here.producers.count == 0
    assert here.producers._topics == {}


async def test_a_producer_over_its_quota_is_closed_and_opened_again_when_there_is_place(
    store: DelayedStore, clock: ManualClock
) -> None:
    """Opening says ProducerBlockedQuotaExceededException until then, and its client fails what waits.

    Another producer is opened, and what is due at once is taken of it.
    """
    store.set_policies(Policies(max_pending=2), topic=TOPIC)
    here, peer = Producing(store), FakePeer()
    await here.opened(peer)
    for number in range(3):
        here.put(peer, number, deliver_at_time=clock.now_ms() + 60_000)
    here.put(peer, 3, "due")
    await here.stored()
    assert answers(peer) == [(0, None), (1, None)]
    assert len(peer.got(CloseProducer)) == 1
    (refused,) = await here.open(peer)
    assert isinstance(refused, Error)
    assert refused.error == ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION
    other = FakePeer()
    await here.opened(other, name="another")
    here.put(other, 0, "due")
    store.topic(TOPIC).cancel(next(iter(store.topic(TOPIC).scheduled())).message_id)
    await here.opened(peer)
    here.put(peer, 4, deliver_at_time=clock.now_ms() + 60_000)
    await here.stored()
    assert (answers(other), answers(peer)) == ([(0, None)], [(4, None)])
