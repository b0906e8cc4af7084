"""REDELIVER, consumers that leave, and what their messages count when they come again."""

from __future__ import annotations

import pytest

from duelog import ManualClock, Policies
from duelog.broker.protocol.commands import CloseConsumer, Message, MessageIdData, Redeliver, SubscriptionType
from tests.broker.consume.consuming import Consuming, ids, succeeded, texts
from tests.broker.peers import FakePeer, idle, soon
from tests.conftest import OpenStore

SHARED = SubscriptionType.SHARED


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
    open_store: OpenStore, clock: ManualClock
) -> None:
    """If the subscription has an acknowledgement timeout of its own; the first one's place is free again."""
    store = open_store()
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
