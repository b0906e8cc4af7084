"""PRODUCER and CLOSE_PRODUCER: names, access modes, epochs, what a connection may have."""

import asyncio
from pathlib import Path

import pytest

from duelog import DelayedStore
from duelog.broker.protocol.commands import AccessMode, CloseProducer, Error, Producer, ProducerSuccess, Schema, Success
from duelog.broker.protocol.failures import ServerError
from duelog.broker.protocol.fields import Command
from duelog.errors import StoreFull
from tests.broker.peers import FakePeer, idle
from tests.broker.produce.producing import Producing, answers, closed, errors, exclusive, receipts
from tests.conftest import OpenStore

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
