"""Consumers that come, go, acknowledge and give back at random: what must hold at every moment, and at the end."""

import asyncio
import random

import pytest

from duelog import ManualClock
from duelog.broker.protocol import commands
from tests.broker.consume.consuming import Consuming, entry_of
from tests.broker.peers import FakePeer, idle
from tests.conftest import OpenStore

SHARED_TYPES = (commands.SubscriptionType.SHARED, commands.SubscriptionType.KEY_SHARED)


class Member:
    """A consumer as its client sees it."""

    def __init__(self, peer: FakePeer, consumer_id: int) -> None:
        self.peer = peer
        self.consumer_id = consumer_id
        self.permits = 0
        self.held: dict[tuple[int, int], tuple[str, int]] = {}

    def take(self, sizes: dict[str, int], *, taken_back: bool) -> list[str]:
        """Take the received messages; checks that no permits were overrun but by a part of a batch.

        taken_back: what it holds may have been taken back meanwhile, as another consumer was the active one.
        """
        came = []
        for command, blob in self.peer.sent:
            if isinstance(command, commands.Message):
                text = (blob or b"").decode()
                assert self.permits > 0, "sent without a permit"
                self.permits -= sizes[text]
                place = command.message_id.ledger_id, command.message_id.entry_id
                assert place not in self.held or (taken_back and command.redelivery_count), "sent twice"
                self.held[place] = text, sizes[text]
                came.append(text)
        self.peer.sent.clear()
        return came


@pytest.mark.parametrize("kind", list(commands.SubscriptionType))
@pytest.mark.parametrize("seed", range(3))
async def test_every_message_is_acknowledged_in_the_end(
    kind: commands.SubscriptionType, seed: int, open_store: OpenStore, clock: ManualClock
) -> None:
    """Nothing is lost, no message is with two consumers, permits hold, and figures agree with the clients'."""
    chance = random.Random(f"{kind.name}{seed}")
    here = Consuming(
        open_store(), clock, max_unacked_messages_per_consumer=30, max_unacked_messages_per_subscription=50
    )
    sizes: dict[str, int] = {}
    done: set[str] = set()
    members: list[Member] = []
    closing: list[asyncio.Future[None]] = []
    for turn in range(150):
        action = chance.random()
        if action < 0.25:
            for _ in range(chance.randrange(1, 8)):
                text, size = f"m{len(sizes)}", chance.choice([1, 1, 1, 5])
                sizes[text] = size
                key = chance.choice([None, *"abcd"])
                here.topic.send(entry_of(text, size, key), key=key)
        elif action < 0.4 and len(members) < (1 if kind == commands.SubscriptionType.EXCLUSIVE else 4):
            if here.bench.executor.held:
                here.bench.executor.release()
            peer = FakePeer()
            members.append(Member(peer, await here.subscribe(peer, kind, consumer_name=f"c{turn % 7}")))
            peer.sent.clear()
        elif action < 0.45 and members:
            gone = members.pop(chance.randrange(len(members)))
            if chance.random() < 0.5:
                here.consumers.gone(gone.peer)
            else:
                closing.append(
                    asyncio.ensure_future(here.consumers.close(gone.peer, commands.CloseConsumer(gone.consumer_id, 1)))
                )
        elif action < 0.65 and members:
            member = chance.choice(members)
            permits = chance.randrange(1, 12)
            member.permits += permits
            here.consumers.flow(member.peer, commands.Flow(member.consumer_id, permits))
        elif action < 0.9 and members:
            member = chance.choice(members)
            places = [each for each in member.held if chance.random() < 0.6]
            message_ids = [command(each) for each in places]
            for each in places:
                done.add(member.held.pop(each)[0])
            here.consumers.ack(member.peer, commands.Ack(member.consumer_id, commands.AckType.INDIVIDUAL, message_ids))
        elif members:
            member = chance.choice(members)
            if kind in SHARED_TYPES and chance.random() < 0.7:
                places = [each for each in member.held if chance.random() < 0.5]
                if places:
                    for each in places:
                        del member.held[each]
                    here.consumers.redeliver(
                        member.peer, commands.Redeliver(member.consumer_id, list(map(command, places)))
                    )
            else:
                member.held.clear()
                here.consumers.redeliver(member.peer, commands.Redeliver(member.consumer_id))
        if chance.random() < 0.3:
            here.bench.executor.held = not here.bench.executor.held
        if not here.bench.executor.held:
            here.bench.executor.release()
        await idle()
        for member in members:
            for text in member.take(sizes, taken_back=kind == commands.SubscriptionType.FAILOVER):
                # of Failover it may be on its way to the next active consumer when it is acknowledged
                assert text not in done or kind == commands.SubscriptionType.FAILOVER, "came after it was acknowledged"
        if kind in SHARED_TYPES:
            held = [place for member in members for place in member.held]
            assert len(held) == len(set(held)), "with two consumers"
            for record in here.consumers.of_topic(here.topic.name).get("s", []):
                (member,) = [each for each in members if each.peer is record.peer]
                assert record.unacked == sum(size for _, size in member.held.values())
    here.bench.executor.release()
    await asyncio.gather(*closing)
    for member in members:
        here.consumers.gone(member.peer)
    await idle()
    last = FakePeer()
    number = await here.subscribe(last, kind)
    final = Member(last, number)
    while done != sizes.keys():
        final.permits += 10
        await here.flow(last, number, 10)
        came = final.take(sizes, taken_back=False)
        assert came, f"{len(sizes) - len(done)} messages do not come"
        assert done.isdisjoint(came)
        done |= set(came)
        here.consumers.ack(
            last, commands.Ack(number, commands.AckType.INDIVIDUAL, [command(each) for each in final.held])
        )
        final.held.clear()
        await idle()


def command(place: tuple[int, int]) -> commands.MessageIdData:
    """The position as an id of the wire."""
    return commands.MessageIdData(*place)
