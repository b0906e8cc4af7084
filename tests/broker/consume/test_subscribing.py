"""SUBSCRIBE: the four types, who is admitted, who is served, what is refused."""

import asyncio

import pytest

from duelog import DelayedStore, ManualClock
from duelog.broker.protocol import commands
from duelog.broker.protocol.entry import hash_of
from duelog.broker.protocol.failures import ServerError
from tests.broker.consume.consuming import TOPIC, Consuming, refused, succeeded, texts
from tests.broker.peers import FakePeer, idle, soon
from tests.conftest import OpenStore

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = commands.SubscriptionType


async def test_a_new_subscription_begins_where_it_is_asked_to(open_store: OpenStore, clock: ManualClock) -> None:
    """At the latest message or the earliest; one that is there goes on where it is."""
    here, peers = Consuming(open_store(), clock), [FakePeer(), FakePeer(), FakePeer()]
    here.send("a")
    await here.subscribe(peers[0], name="l", permits=9, initial_position=commands.InitialPosition.LATEST)
    await here.subscribe(peers[1], name="e", permits=9, initial_position=commands.InitialPosition.EARLIEST)
    here.send("b")
    await idle()
    assert [texts(peer) for peer in peers] == [["b"], ["a", "b"], []]
    here.consumers.gone(peers[0])
    await idle()
    await here.subscribe(peers[2], name="l", permits=9, initial_position=commands.InitialPosition.EARLIEST)
    assert texts(peers[2]) == ["b"]


async def test_an_exclusive_subscription_has_one_consumer(here: Consuming) -> None:
    """A second one is ConsumerBusy while the first one's connection answers; if it does not, it is closed."""
    first, second = FakePeer(), FakePeer()
    here.send("a")
    await here.subscribe(first, permits=5)
    await here.subscribe(second)
    assert refused(second) == [ServerError.CONSUMER_BUSY]
    assert first.pings == 1
    await here.subscribe(first)
    assert refused(first) == [ServerError.CONSUMER_BUSY]
    assert first.pings == 1
    first.alive = False
    await here.subscribe(second, permits=5)
    assert first.closed
    assert texts(second) == ["a"]


async def test_a_type_changes_only_when_no_consumer_is_attached(here: Consuming) -> None:
    """ConsumerBusy until then."""
    first, second = FakePeer(), FakePeer()
    consumer = await here.subscribe(first, SHARED)
    await here.subscribe(second, FAILOVER)
    assert refused(second) == [ServerError.CONSUMER_BUSY]
    await soon(here.consumers.close(first, commands.CloseConsumer(consumer, 9)))
    number = await here.subscribe(second, FAILOVER)
    assert succeeded(second) == [100 + number]


def changes(peer: FakePeer) -> list[bool]:
    """Take the ACTIVE_CONSUMER_CHANGEs that a consumer was sent."""
    told = [each.is_active for each in peer.got(commands.ActiveConsumerChange)]
    peer.sent.clear()
    return told


async def test_the_first_by_name_serves_a_failover_subscription(here: Consuming) -> None:
    """The highest priority comes first; consumers hear of every change, and nobody sees a gap."""
    b, a, low = FakePeer(), FakePeer(), FakePeer()
    here.send("1", "2")
    await here.subscribe(b, FAILOVER, consumer_name="b", permits=10)
    assert texts(b) == ["1", "2"]
    assert changes(b) == [True]
    await here.subscribe(low, FAILOVER, consumer_name="0", priority_level=1, permits=10)
    assert (changes(b), changes(low)) == ([], [False])
    await here.subscribe(a, FAILOVER, consumer_name="a", permits=10)
    assert texts(a) == ["1", "2"]
    assert (changes(b), changes(a), changes(low)) == ([False], [True], [False])
    here.send("3")
    await idle()
    assert (texts(a), texts(b)) == (["3"], [])
    here.consumers.gone(a)
    await idle()
    assert texts(b) == ["1", "2", "3"]
    assert changes(b) == [True]


async def test_partitions_are_served_by_consumers_in_turn(store: DelayedStore, clock: ManualClock) -> None:
    """Partition N by the (N mod count)-th in order of name."""
    for number in range(4):
        here = Consuming(store, clock, f"{TOPIC}-partition-{number}")
        peers = [FakePeer() for _ in range(3)]
        for name, peer in zip("cab", peers, strict=True):
            await here.subscribe(peer, FAILOVER, consumer_name=name)
        active = [peer.got(commands.ActiveConsumerChange)[-1].is_active for peer in peers]
        assert [name for name, each in zip("cab", active, strict=True) if each] == ["abc"[number % 3]]


async def test_an_old_client_is_not_told_who_is_served(open_store: OpenStore, clock: ManualClock) -> None:
    """It would take the command for a broken protocol."""
    here, old = Consuming(open_store(), clock), FakePeer(protocol_version=11)
    await here.subscribe(old, FAILOVER)
    assert old.got(commands.ActiveConsumerChange) == []


def sticky(*ranges: tuple[int, int]) -> commands.KeySharedMeta:
    """Ranges that a consumer names."""
    return commands.KeySharedMeta(commands.KeySharedMode.STICKY, [commands.HashRange(*each) for each in ranges])


@pytest.mark.parametrize(
    "ranges",
    [[], [(5, 4)], [(0, 65_536)], [(-1, 4)], [(0, 10), (10, 20)]],
    ids=["none", "back", "over", "under", "twice"],
)
async def test_ranges_that_are_none_are_refused(ranges: list[tuple[int, int]], here: Consuming, peer: FakePeer) -> None:
    """With ConsumerAssign."""
    await here.subscribe(peer, KEY_SHARED, key_shared=sticky(*ranges))
    assert refused(peer) == [ServerError.CONSUMER_ASSIGN]


async def test_consumers_of_one_subscription_divide_keys_in_one_way(
    here: Consuming, peer: FakePeer, other: FakePeer
) -> None:
    """Ranges that overlap are ConsumerAssign, another way of dividing is ConsumerBusy."""
    await here.subscribe(peer, KEY_SHARED, key_shared=sticky((0, 100)))
    await here.subscribe(other, KEY_SHARED, key_shared=sticky((100, 200)))
    await here.subscribe(other, KEY_SHARED)
    assert refused(other) == [ServerError.CONSUMER_ASSIGN, ServerError.CONSUMER_BUSY]
    number = await here.subscribe(other, KEY_SHARED, key_shared=sticky((101, 200)))
    assert succeeded(other) == [100 + number]


async def test_a_key_goes_to_the_consumer_that_named_its_range(here: Consuming) -> None:
    """Inclusive; what lies in no range waits for a consumer that names it; an ordering key is as good as another."""
    low, high = FakePeer(), FakePeer()
    keys = sorted("abcdefgh", key=lambda key: hash_of(key.encode()))
    numbers = [hash_of(key.encode()) for key in keys]
    await here.subscribe(low, KEY_SHARED, permits=100, key_shared=sticky((0, numbers[2])))
    await here.subscribe(high, KEY_SHARED, permits=100, key_shared=sticky((numbers[3], numbers[5])))
    for key in keys:
        here.send(key, key=key)
    await idle()
    assert sorted(texts(low)) == sorted(keys[:3])
    assert sorted(texts(high)) == sorted(keys[3:6])
    rest = FakePeer()
    await here.subscribe(rest, KEY_SHARED, permits=100, key_shared=sticky((numbers[6], 65_535)))
    assert sorted(texts(rest)) == sorted(keys[6:])


async def test_out_of_order_delivery_does_not_wait_for_the_consumer_before(
    store: DelayedStore, clock: ManualClock
) -> None:
    """A key that another consumer has taken over comes to it at once; with order it waits for what is held."""
    for out_of_order in (True, False):
        here, first = Consuming(store, clock, f"{TOPIC}{out_of_order}"), FakePeer()
        asked = commands.KeySharedMeta(commands.KeySharedMode.AUTO_SPLIT, allow_out_of_order=out_of_order)
        await here.subscribe(first, KEY_SHARED, permits=100, key_shared=asked)
        for key in "abcdefgh":
            here.send(f"{key}1", key=key)
        await idle()
        assert len(texts(first)) == 8
        others = [FakePeer() for _ in range(3)]
        for other in others:
            await here.subscribe(other, KEY_SHARED, permits=100, key_shared=asked)
        for key in "abcdefgh":
            here.send(f"{key}2", key=key)
        await idle()
        assert any(texts(other) for other in others) == out_of_order


async def test_a_number_that_is_in_use(here: Consuming, peer: FakePeer) -> None:
    """Succeeds again where it is open, and is ServiceNotReady while it is being opened."""
    await here.subscribe(peer, consumer_id=1)
    await here.subscribe(peer, consumer_id=1)
    assert succeeded(peer) == [101, 101]
    here.bench.executor.held = True
    opening = soon(here.consumers.open(peer, commands.Subscribe(TOPIC, "other", SHARED, 2, 7)))
    task = asyncio.ensure_future(opening)
    await idle()
    await here.consumers.open(peer, commands.Subscribe(TOPIC, "other", SHARED, 2, 8))
    assert refused(peer) == [ServerError.SERVICE_NOT_READY]
    here.bench.executor.release()
    await task
    assert succeeded(peer)[-1] == 7


async def test_what_comes_of_a_subscribe_that_was_closed_meanwhile_is_thrown_away(
    here: Consuming, peer: FakePeer, other: FakePeer
) -> None:
    """CLOSE_CONSUMER succeeds; the subscription is free for another."""
    here.bench.executor.held = True
    task = asyncio.ensure_future(here.consumers.open(peer, commands.Subscribe(TOPIC, "s", EXCLUSIVE, 1, 5)))
    await idle()
    await soon(here.consumers.close(peer, commands.CloseConsumer(1, 6)))
    here.bench.executor.release()
    await task
    await idle()
    assert [type(each) for each in peer.take()] == [commands.Success]
    number = await here.subscribe(other)
    assert succeeded(other) == [100 + number]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"metadata": [commands.KeyValue("k", "v" * 1_024)]}, ServerError.METADATA),
        ({"name": "s\x00"}, ServerError.NOT_ALLOWED),
        ({"schema": commands.Schema("misfit", b"", 1)}, ServerError.INCOMPATIBLE_SCHEMA),
    ],
)
async def test_what_is_refused(fields: dict[str, object], error: ServerError, here: Consuming, peer: FakePeer) -> None:
    """Metadata over 1,024 bytes, names that the store does not take, schemas that do not fit."""
    await here.subscribe(peer, **fields)  # type: ignore[arg-type]
    assert refused(peer) == [error]
    assert here.consumers.count == 0


async def test_a_connection_has_a_bounded_number_of_consumers(open_store: OpenStore, clock: ManualClock) -> None:
    """NotAllowedError beyond it."""
    here, peer = Consuming(open_store(), clock, max_consumers_per_connection=2), FakePeer()
    for _ in range(3):
        await here.subscribe(peer, SHARED)
    assert refused(peer) == [ServerError.NOT_ALLOWED]


async def test_unsubscribing_deletes_the_subscription(here: Consuming) -> None:
    """For its only consumer; with `force` the others are closed."""
    first, second = FakePeer(), FakePeer()
    one, two = await here.subscribe(first, SHARED), await here.subscribe(second, SHARED)
    await soon(here.ask(first, commands.Unsubscribe(one, 5)))
    assert refused(first) == [ServerError.METADATA]
    assert here.topic.subscriptions() == ["s"]
    await soon(here.ask(first, commands.Unsubscribe(one, 6, force=True)))
    assert succeeded(first)[-1] == 6
    assert [each.consumer_id for each in second.got(commands.CloseConsumer)] == [two]
    assert here.topic.subscriptions() == []
    await soon(here.ask(first, commands.Unsubscribe(99, 7)))
    assert first.got(commands.Error)[-1].error == ServerError.CONSUMER_NOT_FOUND


async def test_figures_of_a_consumer(here: Consuming, peer: FakePeer) -> None:
    """An unknown consumer is answered ConsumerNotFound, inside the answer."""
    here.send("a", "b")
    consumer = await here.subscribe(peer, SHARED, permits=1, consumer_name="c")
    await soon(here.ask(peer, commands.ConsumerStats(3, consumer)))
    await soon(here.ask(peer, commands.ConsumerStats(4, 99)))
    found, missing = peer.got(commands.ConsumerStatsResponse)
    assert (found.consumer_name, found.available_permits, found.unacked_messages, found.backlog) == ("c", 0, 1, 2)
    assert (found.type, found.address, found.blocked) == ("Shared", peer.address, False)
    assert missing.error == ServerError.CONSUMER_NOT_FOUND
