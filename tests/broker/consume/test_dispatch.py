"""Dispatch to consumers: permits, turns, priorities, limits of unacknowledged messages."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from duelog import DelayedStore, ManualClock, Policies
from duelog.broker.consume.consumers import place_of
from duelog.broker.protocol import commands, entry
from duelog.broker.protocol.entry import decode_metadata
from duelog.broker.protocol.frames import metadata_of
from duelog.store.errors import StoreFull
from tests.broker.consume.consuming import TOPIC, Consuming, entry_of, ids, succeeded, texts
from tests.broker.peers import FakePeer, idle, soon
from tests.broker.server.raw_client import blob_of
from tests.conftest import OpenStore, present

SHARED = commands.SubscriptionType.SHARED


async def test_permits_count_messages_and_go_below_zero_by_a_batch(here: Consuming, peer: FakePeer) -> None:
    """A batch is sent whole where one message is allowed; what follows it waits until FLOW has made up for it."""
    here.send("a", "b", "c", messages=10)
    consumer = await here.subscribe(peer, permits=11)
    assert texts(peer) == ["a", "b"]
    await here.flow(peer, consumer, 9)
    assert texts(peer) == ["a", "b"]
    await here.flow(peer, consumer, 1)
    assert texts(peer) == ["a", "b", "c"]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("kind", [SHARED, commands.SubscriptionType.KEY_SHARED])
async def test_the_parts_of_a_message_in_chunks_go_to_one_consumer(here: Consuming, kind: Any, keyed: bool) -> None:
    """No other could put them together: not one that comes amid them either. Whole messages go to all.

    Where a key moved, the rest waited until clients gave the first parts up, and had lost the message.
    """

    def send(part: int) -> None:
        for message in range(20):
            blob = blob_of(b"%d" % part, message)
            number = entry.hash_of(b"%d" % message) if keyed else 0
            here.topic.send(entry.pack(entry.Header(entry.CHUNK, number, 1, 1), blob))
        here.send(*"abcdef")

    peers = [FakePeer() for _ in range(4)]
    for peer in peers[:3]:
        await here.subscribe(peer, kind, permits=1_000)
    send(0)
    await idle()
    await here.subscribe(peers[3], kind, permits=1_000)
    send(1)
    send(2)
    await idle()
    for peer in peers:
        parts = [
            (decode_metadata(metadata_of(memoryview(blob))).sequence_id, blob[-1:])
            for _, blob in peer.sent if blob is not None and len(blob) > 1
        ]  # fmt: skip
        for message in {message for message, _ in parts}:
            assert [part for each, part in parts if each == message] == [b"0", b"1", b"2"]
    assert sum(blob is not None for peer in peers for _, blob in peer.sent) == 3 * 26


async def test_a_message_that_comes_later_wakes_the_consumers_once(here: Consuming, peer: FakePeer) -> None:
    """Many changes before the loop runs are one hop to it."""
    await here.subscribe(peer, permits=100)
    hops = here.bench.loop.hops
    here.send(*"abcde")
    assert here.bench.loop.hops == hops + 1
    await idle()
    assert texts(peer) == [*"abcde"]


async def test_consumers_take_turns_of_twenty_entries(here: Consuming) -> None:
    """Consumers of one priority get as much as each other."""
    first, second = FakePeer(), FakePeer()
    one, two = await here.subscribe(first, SHARED), await here.subscribe(second, SHARED)
    here.send(*map(str, range(100)))
    await idle()
    here.bench.executor.held = True
    await here.flow(first, one, 1_000)
    await here.flow(second, two, 1_000)
    here.bench.executor.release()
    await idle()
    assert len(texts(first)) + len(texts(second)) == 100
    first.take()
    second.take()
    here.send(*map(str, range(120)))
    await idle()
    assert (len(texts(first)), len(texts(second))) == (60, 60)
    numbers = list(map(int, texts(first)))
    assert {number // 20 % 2 for number in numbers} == {numbers[0] // 20 % 2}


async def test_consumers_without_a_key_hold_none_back(open_store: OpenStore, clock: ManualClock) -> None:
    """Each of sixty key-shared consumers is polled, however many of them have nothing to get."""
    here, peers = Consuming(open_store(), clock), [FakePeer() for _ in range(60)]
    for peer in peers:
        await here.subscribe(peer, commands.SubscriptionType.KEY_SHARED, permits=1_000)
    for number in range(8):
        here.send("a", key=f"key {number}")
        await idle()
        assert sum(len(texts(peer)) for peer in peers) == number + 1


async def test_many_consumers_share_alike(open_store: OpenStore, clock: ManualClock) -> None:
    """More than one job asks: the next one goes on where the last one ended."""
    here, peers = Consuming(open_store(), clock), [FakePeer() for _ in range(75)]
    for peer in peers:
        await here.subscribe(peer, SHARED, permits=60)
    here.topic.send_payloads([entry_of("a")] * 3_000)
    await idle()
    assert {len(texts(peer)) for peer in peers} == {40}


async def test_a_lower_priority_level_is_served_first(here: Consuming) -> None:
    """The next one only when no consumer before it has permits."""
    late, early = FakePeer(), FakePeer()
    await here.subscribe(late, SHARED, permits=10, priority_level=1)
    await here.subscribe(early, SHARED, permits=3, priority_level=0)
    here.send(*"abcde")
    await idle()
    assert texts(early) == ["a", "b", "c"]
    assert texts(late) == ["d", "e"]


async def test_a_connection_that_cannot_take_more_is_sent_nothing(here: Consuming) -> None:
    """Others go on; when it can, it is served again."""
    slow, quick = FakePeer(), FakePeer()
    slow.writable = False
    await here.subscribe(slow, SHARED, permits=10)
    await here.subscribe(quick, SHARED, permits=2)
    here.send(*"abcd")
    await idle()
    assert (texts(slow), texts(quick)) == ([], ["a", "b"])
    slow.become_writable()
    await idle()
    assert texts(slow) == ["c", "d"]


async def test_dispatch_stops_at_the_limit_of_a_consumer_and_goes_on_at_half(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """The limit holds for shared types; another consumer of the subscription is still served."""
    here, peer, other = Consuming(open_store(), clock, max_unacked_messages_per_consumer=4), FakePeer(), FakePeer()
    consumer = await here.subscribe(peer, SHARED, permits=100)
    here.send(*map(str, range(10)))
    await idle()
    assert texts(peer) == ["0", "1", "2", "3"]
    await here.ack(peer, consumer, ids(peer)[0])
    assert len(texts(peer)) == 4
    await here.subscribe(other, SHARED, permits=2)
    assert texts(other) == ["4", "5"]
    await here.ack(peer, consumer, ids(peer)[1])
    assert len(texts(peer)) == 6


async def test_dispatch_stops_at_the_limit_of_a_subscription(open_store: OpenStore, clock: ManualClock) -> None:
    """All its consumers together; a consumer that leaves makes space."""
    here, peers = Consuming(open_store(), clock, max_unacked_messages_per_subscription=4), [FakePeer(), FakePeer()]
    for peer in peers:
        await here.subscribe(peer, SHARED, permits=2)
    here.send(*map(str, range(10)))
    await idle()
    third = FakePeer()
    consumer = await here.subscribe(third, SHARED, permits=10)
    assert texts(third) == []
    here.consumers.gone(peers[0])
    await idle()
    assert len(texts(third)) == 2
    await here.ack(third, consumer, *ids(third))
    assert len(texts(third)) == 4


async def test_an_exclusive_consumer_has_no_such_limit(open_store: OpenStore, clock: ManualClock) -> None:
    """It acknowledges cumulatively, as seldom as it likes."""
    here, peer = (
        Consuming(open_store(), clock, max_unacked_messages_per_consumer=2, max_unacked_messages_per_subscription=2),
        FakePeer(),
    )
    await here.subscribe(peer, permits=10)
    here.send(*"abcde")
    await idle()
    assert texts(peer) == [*"abcde"]


async def test_ids_have_the_partition_of_their_topic(store: DelayedStore, clock: ManualClock) -> None:
    """-1 where the topic is no partition."""
    peer = FakePeer()
    here = Consuming(store, clock, "persistent://public/default/p-partition-3")
    sent = here.send("a")
    await here.subscribe(peer, permits=1)
    assert [(each.ledger_id, each.entry_id, each.partition) for each in ids(peer)] == [(*sent[0], 3)]
    plain = Consuming(store, clock)
    plain.send("b")
    await plain.subscribe(peer, permits=1)
    assert ids(peer)[1].partition == -1


async def test_what_a_program_sent_reads_as_a_message_of_a_client(here: Consuming, peer: FakePeer) -> None:
    """Its key and properties are in the metadata that the broker makes."""
    here.topic.send(b"plain", key="k", properties={"a": "b"})
    await here.subscribe(peer, permits=1)
    ((_, blob),) = [each for each in peer.sent if isinstance(each[0], commands.Message)]
    assert blob is not None
    assert blob.endswith(b"plain")
    assert decode_metadata(metadata_of(memoryview(blob))).partition_key == "k"


async def test_a_full_store_stops_delivery_until_it_is_tried_again(here: Consuming, peer: FakePeer) -> None:
    """Consumers stay; acknowledgements are still taken meanwhile."""
    consumer = await here.subscribe(peer, permits=1)
    here.send("a", "b")
    await idle()
    engine = present(here.consumers.of_topic(here.topic.name)["s"][0].engine)
    real = engine.poll_columns
    engine.poll_columns = full  # type: ignore[method-assign, assignment]
    await here.flow(peer, consumer, 5)
    await here.ack(peer, consumer, ids(peer)[0], request_id=9)
    assert [each.error for each in peer.got(commands.AckResponse)] == [None]
    engine.poll_columns = real  # type: ignore[method-assign]
    await here.flow(peer, consumer, 1)
    assert texts(peer) == ["a"]
    here.bench.loop.advance(1.0)
    await idle()
    assert texts(peer) == ["a", "b"]


def full(_: int) -> NoReturn:
    """Raise the error of a store on a full disk."""
    raise StoreFull(Path("store"), "no space")


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit("odd")])
async def test_a_delivery_that_raises_leaves_no_call_of_its_job_unanswered(
    error: BaseException, here: Consuming, peer: FakePeer, other: FakePeer
) -> None:
    """UNSUBSCRIBE and an ACK are answered; its messages come to those who subscribe again, before which is no gap."""
    consumer = await here.subscribe(peer, permits=1)
    here.send(*"abc")
    await idle()
    leaving = await here.subscribe(other, name="t", permits=1)
    send_frames = peer.send_frames
    peer.send_frames = partial(raising, error)  # type: ignore[method-assign]
    pump = here.consumers._groups[here.topic.name, "s"].pump
    here.bench.executor.held = True
    pump.call(lambda: None, lambda *_: None)  # what comes now is the next job
    here.consumers.flow(peer, commands.Flow(consumer, 9))
    here.consumers.ack(peer, commands.Ack(consumer, commands.AckType.INDIVIDUAL, ids(peer), request_id=9))
    called: list[object] = []
    pump.call(lambda: 1, lambda result, wrong: called.append((result, wrong)))
    here.bench.executor.release()
    await idle()
    assert peer.got(commands.AckResponse) == [commands.AckResponse(consumer, request_id=9)]
    assert called == [(1, None)]
    assert peer.got(commands.CloseConsumer) == [commands.CloseConsumer(consumer, commands.NO_REQUEST)]
    peer.send_frames = send_frames  # type: ignore[method-assign]
    peer.sent.clear()
    await here.subscribe(peer, permits=9)
    assert texts(peer) == ["b", "c"]
    assert [each.redelivery_count for each in peer.got(commands.Message)] == [0, 0]
    await soon(here.ask(other, commands.Unsubscribe(leaving, 8)))
    assert 8 in succeeded(other)


async def test_a_delivery_that_raises_leaves_no_unsubscribe_waiting(
    here: Consuming, peer: FakePeer, other: FakePeer
) -> None:
    """One consumer deletes the subscription while the other's messages cannot be sent."""
    leaving = await here.subscribe(peer, SHARED)
    await here.subscribe(other, SHARED, permits=9)
    other.send_frames = partial(raising, ValueError("odd"))  # type: ignore[method-assign]
    here.bench.executor.held = True
    pump = here.consumers._groups[here.topic.name, "s"].pump
    pump.call(lambda: None, lambda *_: None)  # what comes now is the next job, with a poll
    here.send("a")
    await idle()
    ending = asyncio.ensure_future(here.ask(peer, commands.Unsubscribe(leaving, 8, True)))
    await idle()
    here.bench.executor.release()
    await idle()
    assert ending.done()
    assert 8 in succeeded(peer)
    assert here.topic.subscriptions() == []
    await here.subscribe(peer, SHARED)
    assert here.consumers.count == 1


@pytest.mark.parametrize("at", ["answer", "engine"])
async def test_an_acknowledgement_that_raises_leaves_no_seek_unanswered(
    at: str, here: Consuming, peer: FakePeer
) -> None:
    """In its answer, or in the engine: SEEK succeeds, its lock is given back, the next job begins."""
    here.send(*"ab")
    consumer = await here.subscribe(peer, permits=2)
    group = here.consumers._groups[here.topic.name, "s"]
    engine = present(group.consumers[0].engine)
    here.bench.executor.held = True
    group.pump.call(lambda: None, lambda *_: None)
    answer = partial(raising, ValueError("odd"))
    if at == "engine":
        engine.ack = answer  # type: ignore[method-assign]
    group.pump.ack(group.consumers[0], [place_of(ids(peer)[0]) or 0], answer)
    seeking = asyncio.ensure_future(
        here.consumers.seek(peer, commands.Seek(consumer, 9, commands.MessageIdData(2**64 - 1, 0)))
    )
    await idle()
    here.bench.executor.release()
    await idle()
    assert seeking.done()
    assert 9 in succeeded(peer)
    peer.sent.clear()
    await here.subscribe(peer, permits=9)
    assert texts(peer) == ["a", "b"]


def raising(error: BaseException, *_: object, **__: object) -> NoReturn:
    """Raise the error, whatever is asked."""
    raise error


async def test_a_deleted_subscription_closes_its_consumers(here: Consuming, peer: FakePeer) -> None:
    """With CLOSE_CONSUMER of no request: the client subscribes anew, or learns that there is no topic."""
    consumer = await here.subscribe(peer, permits=1)
    here.store.delete_topic(here.topic.name)
    await idle()
    assert peer.got(commands.CloseConsumer) == [commands.CloseConsumer(consumer, commands.NO_REQUEST)]
    assert here.consumers.count == 0


@pytest.mark.parametrize("kind", [commands.SubscriptionType.SHARED, commands.SubscriptionType.EXCLUSIVE])
async def test_a_consumer_gets_no_more_than_the_limit_of_its_topic(
    kind: commands.SubscriptionType, store: DelayedStore, clock: ManualClock
) -> None:
    """Whatever its permits; another consumer gets what it may not have, and it goes on as it acknowledges."""
    store.set_policies(Policies(max_in_flight=2), topic=TOPIC)
    here, peer, other = Consuming(store, clock), FakePeer(), FakePeer()
    here.send(*"abcde")
    consumer = await here.subscribe(peer, kind, permits=100)
    assert texts(peer) == ["a", "b"]
    if kind == commands.SubscriptionType.SHARED:
        await here.subscribe(other, kind, permits=100)
        assert texts(other) == ["c", "d"]
    await here.ack(peer, consumer, ids(peer)[0])
    await idle()
    assert len(texts(peer)) == 3


async def test_a_paused_subscription_is_sent_nothing(store: DelayedStore, clock: ManualClock) -> None:
    """However many permits there are, until it is resumed, or the time that was said has come."""
    here, peer = Consuming(store, clock), FakePeer()
    await here.subscribe(peer, SHARED, permits=100)
    admin = store.topic(TOPIC).subscription(store.topic(TOPIC).subscriptions()[0])
    admin.pause()
    here.send("a")
    await idle()
    assert texts(peer) == []
    admin.resume()
    await idle()
    assert texts(peer) == ["a"]
    admin.pause(clock.now_ms() + 20)
    here.send("b")
    await idle()
    assert texts(peer) == ["a"]
    clock.advance(20)
    here.send("c")
    for _ in range(100):
        await idle()
    assert texts(peer) == ["a", "b", "c"]
