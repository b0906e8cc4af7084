"""Commands of clients about their consumers, how each is answered, and who is attached to which subscription.

A consumer is opened in three steps: the topic is made ready; then, one at a time for each subscription, it is admitted
beside the others; then the engine attaches it, and it is answered. What happens meanwhile (CLOSE, a lost connection) is
looked at after each.

Work of the engine goes through the subscription's pump, in order with everything else that concerns the subscription.

The ids of an ACK are those that MESSAGE named. An id that no consumer of a shared type holds goes to the engine as
well, as it may have been delivered over an earlier connection; the engine refuses an id that the topic does not have,
and that id alone.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from ...delivery.consumer_arguments import Failover
from ...store.errors import DuelogError
from ...store.position import BEFORE_FIRST, ENTRY_MASK, MessageId
from ...store.received_messages import ReceivedMessages
from ...subscription import Subscription
from ...topic import Topic
from ..configuration import BrokerConfig
from ..lookup.topic_address import stored_subscription
from ..lookup.topic_facts import TopicFacts
from ..protocol import commands
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.loop_calls import LoopCalls, Workers
from ..protocol.peer import Peer
from . import feed
from .attached import MOST_KEPT, Attached, BatchAcks
from .pump import INDIVIDUAL, Answer, Consumer, Dispatched

_log = logging.getLogger("duelog.broker")

T = TypeVar("T")

_MAX_METADATA_BYTES = 1_024
_ALIVE_S = 5.0
"""Seconds in which the connection of an exclusive consumer must answer a PING when another wants its place."""

OpenTopic = Callable[[Peer, str, bool], Awaitable[tuple["Topic", int]]]
"""A peer may consume from a topic: the topic, made where that is asked for, and its partition or -1. Raises Refused."""


class OpenedConsumer(Consumer):
    """A consumer and its subscription; None until it is ready."""

    __slots__ = ("group",)

    def __init__(self, peer: Peer, command: commands.Subscribe, name: str, opened_at: float) -> None:
        super().__init__(peer, command, name, opened_at)
        self.group: Attached | None = None


@dataclass(eq=False)
class Consumers:
    """All consumers. Of the event loop's thread. clock: the store's, in ms."""

    _open_topic: OpenTopic
    _schemas: TopicFacts
    _workers: Workers
    _calls: LoopCalls
    _clock: Callable[[], int]
    _config: BrokerConfig

    def __post_init__(self) -> None:
        self._most = self._config.max_consumers_per_connection
        self._connections: dict[int, dict[int, OpenedConsumer]] = {}
        self._groups: dict[tuple[str, str], Attached] = {}
        self._kept: dict[tuple[str, str], BatchAcks] = {}
        """Sets of subscriptions that have no consumer for now, the one that was left first in front."""
        self._moved: dict[tuple[str, str], feed.Start] = {}
        """Positions of readers that have moved and not yet subscribed again."""
        self.departed: dict[str, dict[str, Dispatched]] = {}
        """Figures of closed consumers, by topic and subscription; "" has the topic's readers."""
        self.dispatched: Callable[[ReceivedMessages], object] | None = None
        """Called with the entries sent to consumers."""

    # -- who is attached ---------------------------------------------------------------------------

    async def open(self, peer: Peer, command: commands.Subscribe) -> None:
        if peer.closed:
            return
        mine = self._connections.setdefault(peer.number, {})
        known = mine.get(command.consumer_id)
        if known is not None:
            if known.state == "ready":
                peer.send(commands.Success(command.request_id))
            else:
                message = f"consumer {command.consumer_id} is being opened"
                peer.send(commands.Error(command.request_id, ServerError.SERVICE_NOT_READY, message))
            return
        name = command.consumer_name or f"duelog-{secrets.token_hex(4)}"
        consumer = OpenedConsumer(peer, command, name, self._calls.loop.time())
        mine[command.consumer_id] = consumer
        try:
            await self._open(consumer)
        except (Refused, DuelogError) as error:
            self._answer_failed(consumer, error)
        except BaseException:
            self._answer_failed(consumer, Refused(ServerError.UNKNOWN, "the consumer could not be opened"))
            raise

    def _answer_failed(self, consumer: OpenedConsumer, error: Exception) -> None:
        if consumer.state != "closed":
            self._forget(consumer)
            consumer.state = "closed"
            consumer.peer.send(commands.Error(consumer.command.request_id, server_error(error), str(error)))

    async def _open(self, consumer: OpenedConsumer) -> None:
        command, peer = consumer.command, consumer.peer
        if len(self._connections[peer.number]) > self._most:
            raise Refused(ServerError.NOT_ALLOWED, f"the connection has {self._most} consumers")
        size = sum(len(each.key.encode()) + len(each.value.encode()) for each in command.metadata)
        if size > _MAX_METADATA_BYTES:
            message = f"metadata of {size} bytes, over {_MAX_METADATA_BYTES}"
            raise Refused(ServerError.METADATA, message)
        consumer.sharing = feed.sharing_of(command.key_shared)
        topic, partition = await self._open_topic(peer, command.topic, command.create_topic)
        schema = command.schema
        if schema is not None:
            await self._workers(lambda: self._schemas.check_schema(topic.name, schema))
        key = topic.name, stored_subscription(command.subscription)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Attached(
                topic, partition, key[1], self._config, self._calls, self._workers, self._clock, self._failed
            )
            group.durable = command.durable
            if command.durable:
                group.batches = self._kept.pop(key, BatchAcks())
            departed = self.departed.setdefault(topic.name, {})
            group.departed = departed.setdefault(key[1] if command.durable else "", Dispatched())
            group.dispatched = self.dispatched
        group.opening += 1
        try:
            async with group.lock:
                await self._admit(group, consumer)
                failover = None
                if command.type == commands.SubscriptionType.FAILOVER:
                    changed = partial(self._active_changed, group, consumer)
                    failover = Failover(max(command.priority_level, 0), consumer.name, group.choose, changed)
                start = None
                if not command.durable:
                    start = self._moved.pop(key, None) or feed.start_of(command, self._clock())
                consumer.engine = await group.pump.run(
                    partial(feed.attach, group.topic, group.name, command, consumer.sharing, failover, start)
                )
                if consumer.state == "closed":
                    group.pump.call(consumer.engine.close)
                    return
                if not group.consumers:
                    consumer.engine.add_waker(group.pump.wake)
                    group.waking = consumer.engine
                group.consumers.append(consumer)
                consumer.state = "ready"
                consumer.group = group
                peer.send(commands.Success(command.request_id))
                group.tell_active(consumer)
                group.pump.turn()
        finally:
            group.opening -= 1
            self._drop_unused(group)

    def _active_changed(self, group: Attached, consumer: Consumer, active: bool) -> None:
        """A thread of the engine tells, inside its locks."""
        self._calls.post(lambda: group.active_changed(consumer, active))

    async def _admit(self, group: Attached, consumer: Consumer) -> None:
        """Raise Refused unless a consumer may be attached beside those that are there."""
        command = consumer.command
        while group.consumers:
            if group.durable != command.durable:
                raise Refused(ServerError.NOT_ALLOWED, "a reader and a subscription have one name")
            if group.type != command.type:
                message = f"the subscription's consumers are {commands.SubscriptionType(group.type or 0).name}"
                raise Refused(ServerError.CONSUMER_BUSY, message)
            if command.type != commands.SubscriptionType.EXCLUSIVE:
                return
            other = group.consumers[0].peer
            if not other.closed and (other.number == consumer.peer.number or await other.ping(_ALIVE_S)):
                raise Refused(ServerError.CONSUMER_BUSY, "the subscription is exclusive and has a consumer")
            other.close("the connection does not answer")
            self.gone(other)
        group.durable = command.durable

    async def close(self, peer: Peer, command: commands.CloseConsumer) -> None:
        """CLOSE_CONSUMER. One that is not there is closed already."""
        consumer = self._find(peer, command.consumer_id)
        if consumer is not None:
            self._forget(consumer)
            if consumer.state == "ready" and consumer.group is not None:
                await self._detach(consumer.group, [consumer])
            consumer.state = "closed"
        peer.send(commands.Success(command.request_id))

    def gone(self, peer: Peer) -> None:
        for consumer in list(self._connections.pop(peer.number, {}).values()):
            if consumer.state == "ready" and consumer.group is not None:
                self._detach(consumer.group, [consumer])
            consumer.state = "closed"

    def _detach(self, group: Attached, consumers: Sequence[Consumer], *, failed: bool = True) -> asyncio.Future[None]:
        """Have the engine forget consumers; what they hold is delivered again, and counts as `failed` deliveries.

        The future is done once the engine has.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.leaving += 1
        engines = [each.engine for each in consumers if each.engine is not None]
        for consumer in consumers:
            if consumer in group.consumers:
                group.leave(consumer)
        heir = group.consumers[0].engine if group.consumers else None
        if group.waking in engines:
            group.waking.remove_waker(group.pump.wake)
            group.waking = heir
            if heir is not None:
                heir.add_waker(group.pump.wake)

        def left(*_: Any) -> None:
            group.leaving -= 1
            if not done.done():
                done.set_result(None)
            group.pump.turn()
            self._drop_unused(group)

        group.pump.call(partial(feed.detach, engines, failed), left)
        return done

    def _forget(self, consumer: Consumer) -> None:
        mine = self._connections.get(consumer.peer.number)
        if mine is not None and mine.get(consumer.consumer_id) is consumer:
            del mine[consumer.consumer_id]

    def _drop_unused(self, group: Attached) -> None:
        key = group.topic.name, group.name
        in_use = group.consumers or group.opening or group.leaving
        if not in_use and self._groups.get(key) is group:
            del self._groups[key]
            group.pump.close()
            if group.durable and group.batches.left:
                self._kept[key] = group.batches
                if len(self._kept) > MOST_KEPT:
                    del self._kept[next(iter(self._kept))]

    def forget_batches(self, topic: str, subscription: str) -> None:
        """A subscription, as it is stored, has moved or is deleted: forget its partly acknowledged batches."""
        group = self._groups.get((topic, subscription))
        if group is not None:
            group.batches.clear()
        self._kept.pop((topic, subscription), None)

    def _failed(self, group: Attached, error: Exception) -> None:
        """The subscription was deleted, or the store has failed."""
        _log.warning("subscription %s of %s is closed: %s", group.name, group.topic.name, error)
        group.batches.clear()
        self._close_group(group)

    def _close_group(self, group: Attached) -> asyncio.Future[None]:
        """Close the consumers of a subscription, which is not for what they did: their deliveries do not count."""
        consumers = list(group.consumers)
        for consumer in consumers:
            group.leave(consumer)
            consumer.peer.send(commands.CloseConsumer(consumer.consumer_id, commands.NO_REQUEST))
            self._forget(consumer)
        return self._detach(group, consumers, failed=False)

    async def alone(self, topic: str, name: str, work: Callable[[], T], *, force: bool) -> T:
        """Have a worker do something to a subscription that has no consumer: with `force` they are closed before.

        name: as stored. Clients whose consumers are closed subscribe again, and wait until it is done. Refused:
        ConsumerBusy, without `force`. Raises what `work` does.
        """
        group = self._groups.get((topic, name))
        if group is None:
            found = await self._workers(work)
            self.forget_batches(topic, name)
            return found
        group.opening += 1
        try:
            async with group.lock:
                if group.consumers and not force:
                    message = f"subscription {name} has {len(group.consumers)} consumers"
                    raise Refused(ServerError.CONSUMER_BUSY, message)
                self._close_group(group)
                found = await group.pump.run(work)
                group.batches.clear()
                return found
        finally:
            group.opening -= 1
            self._drop_unused(group)

    def close_topic(self, topic: str) -> None:
        """Close every consumer of a topic, by its full name: clients subscribe again."""
        for (name, _), group in list(self._groups.items()):
            if name == topic:
                self._close_group(group)

    async def close_all(self) -> None:
        """Close every consumer, as the broker is shutting down, once what was acknowledged is taken."""
        await asyncio.gather(*map(self._close_group, list(self._groups.values())))

    def _find(self, peer: Peer, consumer_id: int) -> OpenedConsumer | None:
        return self._connections.get(peer.number, {}).get(consumer_id)

    # -- messages ------------------------------------------------------------------------------------

    def _ready(self, peer: Peer, consumer_id: int) -> tuple[Consumer, Attached, Subscription]:
        """A consumer that is open, with its subscription. Raises Refused, which the connection answers."""
        consumer = self._find(peer, consumer_id)
        if consumer is None or consumer.state != "ready" or consumer.group is None or consumer.engine is None:
            raise Refused(ServerError.CONSUMER_NOT_FOUND, f"consumer {consumer_id} is not open")
        return consumer, consumer.group, consumer.engine

    def flow(self, peer: Peer, command: commands.Flow) -> None:
        """FLOW. For an unknown consumer it is dropped."""
        consumer = self._find(peer, command.consumer_id)
        if consumer is not None and consumer.group is not None:
            consumer.permits += command.permits
            consumer.group.send_surplus(consumer)
            consumer.group.pump.turn()

    def ack(self, peer: Peer, command: commands.Ack) -> None:
        """ACK. For an unknown consumer it is dropped."""
        consumer = self._find(peer, command.consumer_id)
        if consumer is None or consumer.group is None or consumer.state != "ready":
            return
        answer = None
        if command.request_id is not None:
            answer = partial(_answer_ack, peer, command)
        try:
            if command.txn_least is not None or command.txn_most is not None:
                raise Refused(ServerError.NOT_ALLOWED, "transactions are not offered")
            if command.type == commands.AckType.CUMULATIVE:
                _ack_cumulative(consumer.group, consumer, command.message_ids, answer)
            else:
                _ack_individual(consumer.group, consumer, command.message_ids, answer)
        except Refused as refused:
            if answer is not None:
                answer(refused)
            else:
                _log.info("an acknowledgement of consumer %s is refused: %s", consumer.name, refused)

    def redeliver(self, peer: Peer, command: commands.Redeliver) -> None:
        """REDELIVER. For an unknown consumer it is dropped."""
        consumer = self._find(peer, command.consumer_id)
        if consumer is None or consumer.group is None or consumer.state != "ready":
            return
        group = consumer.group
        if command.message_ids and consumer.type in INDIVIDUAL:
            places = [place_of(each) for each in command.message_ids]
            released = group.release(consumer, [each for each in places if each is not None])
            if released:
                group.pump.give_back(consumer, released)
            return
        if command.epoch is not None:
            consumer.epoch = command.epoch
        group.release(consumer, None)
        group.pump.give_back(consumer, None)

    # -- positions -----------------------------------------------------------------------------------

    async def seek(self, peer: Peer, command: commands.Seek) -> None:
        """SEEK: every consumer of the subscription is closed, then SUCCESS.

        What any of them acknowledges from the move until it is told belongs to the place before: it is answered, and
        not applied. After a move that failed it is applied.
        """
        try:
            _, group, engine = self._ready(peer, command.consumer_id)
            async with group.lock:
                self._ready(peer, command.consumer_id)  # another command may have closed it meanwhile
                group.moving = True
                try:
                    work = partial(feed.seek, group.topic, engine, command)
                    await group.pump.run(work, partial(self._drop_place, group))
                finally:
                    group.moving = False
                    group.pump.turn()
        except (Refused, DuelogError) as error:
            code = error.error if isinstance(error, Refused) else ServerError.METADATA
            peer.send(commands.Error(command.request_id, code, str(error)))
            return
        peer.send(commands.Success(command.request_id))

    def _drop_place(self, group: Attached, start: feed.Start) -> None:
        """The subscription has moved: tell its consumers, before anything else is done for it."""
        group.pump.drop_acks()
        group.batches.clear()
        if not group.durable:
            key = group.topic.name, group.name
            self._moved[key] = start

            def forget() -> None:
                if self._moved.get(key) is start:
                    del self._moved[key]

            self._calls.loop.call_later(self._config.keep_alive_interval_seconds, forget)
        self._close_group(group)

    async def last_message_id(self, peer: Peer, command: commands.GetLastMessageId) -> None:
        _, group, engine = self._ready(peer, command.consumer_id)
        group.last = await self._workers(partial(feed.last_entry, group.topic, group.last))
        mark_delete = (await self._workers(engine.stats)).mark_delete
        peer.send(feed.last_message_id(group.last, mark_delete, group.partition, command.request_id))

    async def unsubscribe(self, peer: Peer, command: commands.Unsubscribe) -> None:
        """UNSUBSCRIBE: only a subscription's only consumer may, unless it says `force`."""
        consumer, group, _ = self._ready(peer, command.consumer_id)
        async with group.lock:
            if len(group.consumers) > 1 and not command.force:
                raise Refused(ServerError.METADATA, "the subscription has other consumers")
            self._forget(consumer)
            others = [each for each in group.consumers if each is not consumer]
            if consumer in group.consumers:
                await self._detach(group, [consumer])
            if others:
                self._close_group(group)
            if group.durable:
                await group.pump.run(partial(group.topic.unsubscribe, group.name))
                self.forget_subscription(group.topic.name, group.name)
        peer.send(commands.Success(command.request_id))

    async def stats(self, peer: Peer, command: commands.ConsumerStats) -> None:
        consumer, _, engine = self._ready(peer, command.consumer_id)
        backlog = (await self._workers(engine.stats)).backlog
        peer.send(_stats_of(command, consumer, backlog, self._calls.loop.time()))

    def of_connection(self, number: int) -> list[OpenedConsumer]:
        """Consumers of a connection, those that are not ready among them."""
        return list(self._connections.get(number, {}).values())

    def of_topic(self, topic: str) -> dict[str, list[Consumer]]:
        return {name: list(group.consumers) for (of, name), group in self._groups.items() if of == topic}

    @property
    def groups(self) -> list[Attached]:
        return list(self._groups.values())

    def forget_subscription(self, topic: str, name: str) -> None:
        """The subscription was deleted: what it was sent counts for the topic alone."""
        self.forget_batches(topic, name)
        of_topic = self.departed.get(topic)
        if of_topic is not None and name and (figures := of_topic.pop(name, None)) is not None:
            of_topic.setdefault("", Dispatched()).add(figures)

    @property
    def count(self) -> int:
        return sum(map(len, self._connections.values()))


def _answer_ack(peer: Peer, command: commands.Ack, error: BaseException | None) -> None:
    if error is None:
        peer.send(commands.AckResponse(command.consumer_id, request_id=command.request_id))
    else:
        code = server_error(error)
        peer.send(
            commands.AckResponse(command.consumer_id, error=code, message=str(error), request_id=command.request_id)
        )


_MOST_WAITING = 20_000
"""Acknowledgements of a consumer that wait for a worker, at which its connection is not read."""


def place_of(message_id: commands.MessageIdData) -> int | None:
    """An id as one number; None: no entry can have it."""
    if message_id.entry_id >= ENTRY_MASK or message_id.ledger_id >> 62:
        return None
    return message_id.ledger_id << 32 | message_id.entry_id


def _batch_size(message_id: commands.MessageIdData) -> int | None:
    """Messages of the batch; None: the client does not say, or says what cannot be."""
    return message_id.batch_size if message_id.batch_size > 0 else None


def _ack_individual(
    group: Attached, consumer: Consumer, ids: Sequence[commands.MessageIdData], answer: Answer | None
) -> None:
    """Acknowledge messages one by one. Raises Refused where an id can be none."""
    places: list[int] = []
    shared = consumer.type in INDIVIDUAL
    for each in ids:
        place = place_of(each)
        if place is None:
            raise Refused(ServerError.METADATA, f"{each.ledger_id}:{each.entry_id} is no message")
        consumer.figures.acked += 1
        if each.ack_set:
            size = _batch_size(each)
            if size is None and group.batches.count(place) is None:
                size = consumer.held.get(place)
            left = group.batches.take(place, each.ack_set, size)
            if left:
                group.done_with(consumer, place, left)
                continue
        elif group.batches.left:
            group.batches.forget(place)
        if shared:
            group.done_with(consumer, place)
        places.append(place)
    if not places:
        if answer is not None:
            answer(None)
        return
    if group.pump.ack(consumer, places, answer) > _MOST_WAITING:
        peer = consumer.peer
        peer.pause_reading("acks")
        group.pump.call(lambda: None, lambda *_: peer.resume_reading("acks"))


def _ack_cumulative(
    group: Attached, consumer: Consumer, ids: Sequence[commands.MessageIdData], answer: Answer | None
) -> None:
    """Acknowledge everything up to a message. Raises Refused."""
    if consumer.type in INDIVIDUAL:
        raise Refused(ServerError.NOT_ALLOWED, f"no cumulative acknowledgement on {consumer.type.name}")
    if len(ids) != 1:
        raise Refused(ServerError.METADATA, f"a cumulative acknowledgement of {len(ids)} ids")
    place = place_of(ids[0])
    if place is None:
        raise Refused(ServerError.METADATA, f"{ids[0].ledger_id}:{ids[0].entry_id} is no message")
    consumer.figures.acked += 1
    position = MessageId(place >> 32, place & ENTRY_MASK)
    group.batches.forget_through(place - 1)
    if ids[0].ack_set and group.batches.take(place, ids[0].ack_set, _batch_size(ids[0])):
        position = MessageId(position.ledger_id, position.entry_id - 1)
        if position.entry_id == BEFORE_FIRST:
            if answer is not None:
                answer(None)
            return
    else:
        group.batches.forget(place)
    group.pump.ack_through(consumer, position, answer)


def _stats_of(
    command: commands.ConsumerStats, consumer: Consumer, backlog: int, now_s: float
) -> commands.ConsumerStatsResponse:
    """Answer with a consumer's figures; rates are averages since it was opened."""
    age_s = max(now_s - consumer.opened_at, 0.001)
    since = datetime.now(UTC) - timedelta(seconds=age_s)
    return commands.ConsumerStatsResponse(
        command.request_id,
        rate_out=consumer.figures.messages / age_s,
        throughput_out=consumer.figures.bytes / age_s,
        rate_redeliver=consumer.figures.redelivered / age_s,
        consumer_name=consumer.name,
        available_permits=max(consumer.permits, 0),
        unacked_messages=consumer.unacked,
        blocked=consumer.blocked,
        address=consumer.peer.address,
        connected_since=since.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        type=consumer.type.name.title(),
        rate_expired=0.0,
        backlog=backlog,
        ack_rate=consumer.figures.acked / age_s,
    )
