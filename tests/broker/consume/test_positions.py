"""Readers, SEEK, GET_LAST_MESSAGE_ID: places in the log that clients name."""

import asyncio
import dataclasses

import pytest

from duelog import ManualClock
from duelog.broker.protocol import commands
from duelog.broker.protocol.failures import ServerError
from duelog.store.position import MessageId
from tests.broker.consume.consuming import TOPIC, Consuming, entry_of, ids, refused, succeeded, texts
from tests.broker.peers import FakePeer, idle, soon
from tests.conftest import OpenStore

SHARED = commands.SubscriptionType.SHARED
EARLIEST, LATEST = commands.MessageIdData(2**64 - 1, 2**64 - 1), commands.MessageIdData(2**63 - 1, 2**63 - 1)


def named(message_id: MessageId) -> commands.MessageIdData:
    """The id in the form of a client."""
    return commands.MessageIdData(*message_id)


async def test_a_reader_begins_at_the_message_it_names_and_leaves_nothing_behind(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Inclusive: the client drops the first itself; with its connection it is gone."""
    here, peers = Consuming(open_store(), clock), [FakePeer() for _ in range(4)]
    sent = here.send(*"abcd")
    starts = [named(sent[2]), EARLIEST, LATEST, None]
    for number, (peer, start) in enumerate(zip(peers, starts, strict=True)):
        await here.subscribe(
            peer, name=f"r{number}", permits=10, durable=False, start_message_id=start,
            initial_position=commands.InitialPosition.LATEST,
        )  # fmt: skip
    here.send("e")
    await idle()
    assert [texts(peer) for peer in peers] == [["c", "d", "e"], [*"abcde"], ["e"], ["e"]]
    assert here.topic.subscriptions() == []
    for peer in peers:
        here.consumers.gone(peer)
    await idle()
    assert here.consumers._groups == {}


async def test_a_reader_goes_back_in_time(clock: ManualClock, here: Consuming, peer: FakePeer) -> None:
    """`start_message_rollback_duration_sec`."""
    for text in "abc":
        here.send(text, publish_ms=clock.now_ms())
        clock.advance(10_000)
    await here.subscribe(peer, name="r", permits=9, durable=False, rollback_sec=20)
    assert texts(peer) == ["b", "c"]


async def test_a_reader_and_a_subscription_do_not_share_a_name(
    here: Consuming, peer: FakePeer, other: FakePeer
) -> None:
    """While one is attached the other is refused."""
    await here.subscribe(peer)
    await here.subscribe(other, durable=False)
    assert refused(other) == [ServerError.NOT_ALLOWED]


async def test_seeking_closes_every_consumer_and_then_succeeds(
    here: Consuming, peer: FakePeer, other: FakePeer
) -> None:
    """Consumers that subscribe again begin at the named message; nothing is sent in between."""
    sent = here.send(*"abcd")
    consumer = await here.subscribe(peer, SHARED, permits=2)
    second = await here.subscribe(other, SHARED, permits=10)
    for start, expected in [(named(sent[1]), "bcd"), (EARLIEST, "abcd"), (LATEST, "")]:
        peer.sent.clear()
        other.sent.clear()
        await soon(here.consumers.seek(peer, commands.Seek(consumer, 9, start)))
        assert [type(each) for each in peer.take()] == [commands.CloseConsumer, commands.Success]
        assert [each.consumer_id for each in other.got(commands.CloseConsumer)] == [second]
        other.sent.clear()
        consumer = await here.subscribe(peer, SHARED)
        second = await here.subscribe(other, SHARED, permits=10)
        assert texts(other) == [*expected]


async def test_a_seek_to_no_message_changes_nothing(here: Consuming, peer: FakePeer) -> None:
    """MetadataError: neither a message nor a time, a message that is none; the consumer goes on."""
    sent = here.send(*"ab")
    consumer = await here.subscribe(peer, permits=1)
    await soon(here.consumers.seek(peer, commands.Seek(consumer, 5)))
    await soon(here.consumers.seek(peer, commands.Seek(consumer, 6, commands.MessageIdData(sent[0].ledger_id + 9, 0))))
    assert refused(peer) == [ServerError.METADATA] * 2
    await soon(here.consumers.seek(peer, commands.Seek(77, 7, EARLIEST)))
    assert peer.got(commands.Error)[-1].error == ServerError.CONSUMER_NOT_FOUND
    await here.flow(peer, consumer, 5)
    assert texts(peer) == ["a", "b"]


async def test_a_reader_that_seeks_goes_on_there_when_it_subscribes_anew(here: Consuming, peer: FakePeer) -> None:
    """Whatever start it names then; the place is forgotten after a while."""
    sent = here.send(*"abcd")
    for wait_s, expected in [(0.0, ["c", "d"]), (31.0, [])]:
        consumer = await here.subscribe(peer, name="r", durable=False, start_message_id=LATEST)
        await soon(here.consumers.seek(peer, commands.Seek(consumer, 9, named(sent[2]))))
        assert 9 in succeeded(peer)
        here.bench.loop.advance(wait_s)
        peer.sent.clear()
        again = await here.subscribe(peer, name="r", permits=9, durable=False, start_message_id=LATEST)
        assert texts(peer) == expected
        await soon(here.consumers.close(peer, commands.CloseConsumer(again, 10)))
    assert here.consumers._moved == {}


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("kind", [SHARED, commands.SubscriptionType.KEY_SHARED, commands.SubscriptionType.FAILOVER])
async def test_what_any_consumer_acknowledges_during_a_seek_comes_again(
    kind: commands.SubscriptionType, durable: bool, open_store: OpenStore, clock: ManualClock
) -> None:
    """It is of the place before: answered, and not applied."""
    here, peers = Consuming(open_store(), clock, ack_response_durable=durable), [FakePeer(), FakePeer()]
    here.send(*"abcdefgh")
    consumers = [await here.subscribe(peer, kind, permits=4) for peer in peers]
    held = {peer: ids(peer) for peer in peers}
    assert any(held.values())
    here.bench.executor.held = True
    seek = asyncio.ensure_future(here.consumers.seek(peers[0], commands.Seek(consumers[0], 9, EARLIEST)))
    await idle()  # a worker has it now
    for peer, consumer in zip(peers, consumers, strict=True):
        for number, each in enumerate(held[peer]):
            here.consumers.ack(
                peer, commands.Ack(consumer, commands.AckType.INDIVIDUAL, [each], request_id=20 + number)
            )
        if kind == commands.SubscriptionType.FAILOVER and held[peer]:
            here.consumers.ack(
                peer, commands.Ack(consumer, commands.AckType.CUMULATIVE, [held[peer][-1]], request_id=50)
            )
            batch = dataclasses.replace(held[peer][0], ack_set=[2], batch_size=2)
            here.consumers.ack(peer, commands.Ack(consumer, commands.AckType.INDIVIDUAL, [batch], request_id=51))
    here.bench.executor.release()
    await soon(seek)
    for peer in peers:
        answers = peer.got(commands.AckResponse)
        assert len(answers) == len(held[peer]) + 2 * (kind == commands.SubscriptionType.FAILOVER and bool(held[peer]))
        assert [each.error for each in answers] == [None] * len(answers)
        assert len(peer.got(commands.CloseConsumer)) == 1
        peer.sent.clear()
    await here.subscribe(peers[0], kind, permits=20)
    assert sorted(texts(peers[0])) == [*"abcdefgh"]
    assert all(not each.ack_set for each in peers[0].got(commands.Message))


async def test_what_is_acknowledged_during_a_seek_that_fails_is_applied(here: Consuming, peer: FakePeer) -> None:
    """The subscription is where it was, and its consumers stay: so do their acknowledgements."""
    (first, *_) = here.send(*"abc")
    consumer = await here.subscribe(peer, SHARED, permits=3)
    here.bench.executor.held = True
    nowhere = commands.Seek(consumer, 9, commands.MessageIdData(first.ledger_id + 9, 0))
    seek = asyncio.ensure_future(here.consumers.seek(peer, nowhere))
    await idle()
    here.consumers.ack(peer, commands.Ack(consumer, commands.AckType.INDIVIDUAL, ids(peer)[:2], request_id=20))
    here.bench.executor.release()
    await soon(seek)
    assert refused(peer) == [ServerError.METADATA]
    assert peer.got(commands.AckResponse) == [commands.AckResponse(consumer, request_id=20)]
    here.consumers.gone(peer)
    again = FakePeer()
    await here.subscribe(again, SHARED, permits=9)
    assert texts(again) == ["c"]


async def test_what_is_acknowledged_while_a_seek_waits_behind_another_call_does_not_undo_it(
    here: Consuming, peer: FakePeer, other: FakePeer
) -> None:
    """The job of the seek ends with another call, which asks for the next job before the seek has told anybody."""
    here.send(*"abcd")
    consumer = await here.subscribe(peer, SHARED, permits=9)
    leaving = await here.subscribe(other, SHARED)
    here.bench.executor.held = True
    here.consumers._groups[here.topic.name, "s"].pump.call(lambda: None, lambda *_: None)
    closing = asyncio.ensure_future(here.consumers.close(other, commands.CloseConsumer(leaving, 8)))
    await idle()
    seek = asyncio.ensure_future(here.consumers.seek(peer, commands.Seek(consumer, 9, EARLIEST)))
    await idle()
    (begin,) = here.bench.executor.waiting
    here.bench.executor.waiting.clear()
    begin()
    await idle()  # the next job has both calls, and a worker has it
    await here.ack(peer, consumer, *ids(peer))
    here.bench.executor.release()
    await soon(asyncio.gather(closing, seek))
    assert 9 in succeeded(peer)
    peer.sent.clear()
    await here.subscribe(peer, SHARED, permits=9)
    assert sorted(texts(peer)) == [*"abcd"]


async def test_the_last_message_is_the_last_that_may_be_read(open_store: OpenStore, clock: ManualClock) -> None:
    """None in an empty topic; of a batch the index of its last message; what is not due is not there yet."""
    here, peer = Consuming(open_store(), clock, f"{TOPIC}-partition-1"), FakePeer()
    consumer = await here.subscribe(peer, name="r", durable=False, start_message_id=EARLIEST)

    async def last() -> tuple[commands.MessageIdData, commands.MessageIdData | None]:
        await soon(here.ask(peer, commands.GetLastMessageId(consumer, 4)))
        answer = peer.got(commands.GetLastMessageIdResponse)[-1]
        assert answer.request_id == 4
        return answer.last_message_id, answer.mark_delete_position

    assert (await last())[0].entry_id == 2**64 - 1
    (plain,) = here.send("a")
    assert await last() == (commands.MessageIdData(*plain, 1), commands.MessageIdData(plain.ledger_id, 2**64 - 1, 1))
    (batch,) = here.send("b", messages=3)
    here.topic.send(entry_of("late"), deliver_at=clock.now_ms() + 1_000)
    for _ in range(2):
        assert (await last())[0] == commands.MessageIdData(*batch, 1, 2)
    clock.advance(1_000)
    here.store.tick()
    assert (await last())[0] == commands.MessageIdData(batch.ledger_id, batch.entry_id + 1, 1)
    await soon(here.ask(peer, commands.GetLastMessageId(99, 5)))
    assert refused(peer) == [ServerError.CONSUMER_NOT_FOUND]


async def test_a_seek_to_a_delayed_messages_receipt_goes_to_its_marker(clock: ManualClock, here: Consuming) -> None:
    """Once it has fired; before that it is MetadataError. A reader that names it likewise."""
    peer, reader = FakePeer(), FakePeer()
    here.send("a")
    receipt = here.topic.send(entry_of("late"), deliver_at=clock.now_ms() + 1_000)
    consumer = await here.subscribe(peer)
    await soon(here.consumers.seek(peer, commands.Seek(consumer, 5, named(receipt))))
    await here.subscribe(reader, name="r", durable=False, start_message_id=named(receipt))
    assert refused(peer) == refused(reader) == [ServerError.METADATA]
    clock.advance(1_000)
    here.store.tick()
    here.send("b")
    await soon(here.consumers.seek(peer, commands.Seek(consumer, 6, named(receipt))))
    await here.subscribe(peer, permits=9)
    await here.subscribe(reader, name="r", durable=False, start_message_id=named(receipt), permits=9)
    assert texts(peer) == texts(reader) == ["late", "b"]


async def test_seeking_by_time_goes_to_what_was_published_then(
    clock: ManualClock, here: Consuming, peer: FakePeer
) -> None:
    """Not to what was due then: a message that waited was published before others that are read before it."""
    begun_ms = clock.now_ms()
    here.topic.send(entry_of("waited"), deliver_at=begun_ms + 3_000)
    for text in "ab":
        clock.advance(1_000)
        here.send(text)
    clock.advance(1_000)
    here.store.tick()
    here.send("c")
    for published_ms, expected in [(begun_ms + 2_500, ["c"]), (begun_ms + 2_000, ["b", "waited", "c"])]:
        consumer = await here.subscribe(peer)
        await soon(here.consumers.seek(peer, commands.Seek(consumer, 6, publish_time=published_ms)))
        peer.sent.clear()
        consumer = await here.subscribe(peer, permits=9)
        assert texts(peer) == expected
        await soon(here.consumers.close(peer, commands.CloseConsumer(consumer, 9)))
    await here.subscribe(peer, consumer_id=50)
    await soon(here.consumers.seek(peer, commands.Seek(50, 6, publish_time=2**63)))
    assert refused(peer) == [ServerError.METADATA]
