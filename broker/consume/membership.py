"""SUBSCRIBE and CLOSE_CONSUMER: who is attached to which subscription, and what ends that.

A consumer is opened in three steps: the topic is made ready; then, one at a time for each subscription, it is admitted
beside the others; then the engine attaches it, and it is answered. What happens meanwhile (CLOSE, a lost connection) is
looked at after each.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...delivery.consumer_arguments import Failover
from ...store.errors import DuelogError
from ..lookup.topic_address import stored_subscription
from ..protocol.commands import CloseConsumer, Error, Schema, Subscribe, SubscriptionType, Success
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.loop_calls import LoopCalls, Workers
from ..protocol.peer import Peer
from . import feed
from .attached import MAX_UNACKED_CONSUMER, MAX_UNACKED_SUBSCRIPTION, Attached, KeptBatchAcks
from .consumer_record import Consumer, Dispatched, KeySharing

if TYPE_CHECKING:
    from ...store.received_messages import ReceivedMessages
    from ...topic import Topic

_log = logging.getLogger("duelog.broker")

T = TypeVar("T")

_ALIVE_S = 5.0
"""Seconds in which the connection of an exclusive consumer must answer a PING when another wants its place."""

OpenTopic = Callable[[Peer, str, bool], Awaitable[tuple["Topic", int]]]
"""A peer may consume from a topic: the topic, made where that is asked for, and its partition or -1. Raises Refused."""


class SchemaCheck(Protocol):
    """Checks of schemas. May wait for the disk: workers call."""

    def check_schema(self, topic: str, schema: Schema) -> None:
        """Check a consumer's schema, and store the first of a topic. Raises Refused."""
        ...


@dataclass(slots=True)
class ConsumerSettings:
    """Settings of consumers; a change while running holds for consumers opened later."""

    durable_acks: bool = False
    """ACK_RESPONSE leaves once the acknowledgement is on disk, not once it is taken."""
    max_consumers: int = 10_000
    """Consumers of a connection."""
    max_metadata_bytes: int = 1_024
    max_unacked_consumer: int = MAX_UNACKED_CONSUMER
    max_unacked_subscription: int = MAX_UNACKED_SUBSCRIPTION
    keep_alive_s: float = 30.0
    """Seconds for which the position of a reader that has moved is kept until it subscribes again."""


class OpenedConsumer(Consumer):
    """A consumer and its subscription; None until it is ready."""

    __slots__ = ("group",)

    def __init__(self, peer: Peer, command: Subscribe, name: str, opened_at: float) -> None:
        super().__init__(peer, command, name, opened_at)
        self.group: Attached | None = None


class Membership:
    """The consumers of every connection, by subscription. Of the event loop's thread."""

    def __init__(
        self,
        open_topic: OpenTopic,
        schemas: SchemaCheck,
        workers: Workers,
        calls: LoopCalls,
        clock: Callable[[], int],
        settings: ConsumerSettings,
    ) -> None:
        """clock: the store's, in ms."""
        self.settings = settings
        self._open_topic = open_topic
        self._schemas = schemas
        self._workers = workers
        self._calls = calls
        self._clock = clock
        self.connections: dict[int, dict[int, OpenedConsumer]] = {}
        self.groups: dict[tuple[str, str], Attached] = {}
        self._kept = KeptBatchAcks()
        self.moved: dict[tuple[str, str], feed.Start] = {}
        """Positions of readers that have moved and not yet subscribed again."""
        self.departed: dict[str, dict[str, Dispatched]] = {}
        """Figures of closed consumers, by topic and subscription; "" has the topic's readers."""
        self.dispatched: Callable[[ReceivedMessages], object] | None = None
        """Called with the entries sent to consumers."""

    async def open(self, peer: Peer, command: Subscribe) -> None:
        """SUBSCRIBE."""
        if peer.closed:
            return
        mine = self.connections.setdefault(peer.number, {})
        known = mine.get(command.consumer_id)
        if known is not None:
            if known.state == "ready":
                peer.send(Success(command.request_id))
            else:
                message = f"consumer {command.consumer_id} is being opened"
                peer.send(Error(command.request_id, ServerError.SERVICE_NOT_READY, message))
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
            self.forget(consumer)
            consumer.state = "closed"
            consumer.peer.send(Error(consumer.command.request_id, server_error(error), str(error)))

    async def _open(self, consumer: OpenedConsumer) -> None:
        command, peer = consumer.command, consumer.peer
        if len(self.connections[peer.number]) > self.settings.max_consumers:
            raise Refused(ServerError.NOT_ALLOWED, f"the connection has {self.settings.max_consumers} consumers")
        size = sum(len(each.key.encode()) + len(each.value.encode()) for each in command.metadata)
        if size > self.settings.max_metadata_bytes:
            message = f"metadata of {size} bytes, over {self.settings.max_metadata_bytes}"
            raise Refused(ServerError.METADATA, message)
        consumer.sharing = KeySharing.of(command.key_shared)
        topic, partition = await self._open_topic(peer, command.topic, command.create_topic)
        schema = command.schema
        if schema is not None:
            await self._workers(lambda: self._schemas.check_schema(topic.name, schema))
        key = topic.name, stored_subscription(command.subscription)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Attached(
                topic, partition, key[1], self._calls, self._workers, self._clock, self._failed
            )
            group.durable = command.durable
            if command.durable:
                group.batches = self._kept.take(key)
            departed = self.departed.setdefault(topic.name, {})
            group.departed = departed.setdefault(key[1] if command.durable else "", Dispatched())
            group.dispatched = self.dispatched
            group.pump.durable_acks = self.settings.durable_acks
            group.max_unacked_consumer = self.settings.max_unacked_consumer
            group.max_unacked = self.settings.max_unacked_subscription
        group.opening += 1
        try:
            async with group.lock:
                await self._admit(group, consumer)
                failover = None
                if command.type == SubscriptionType.FAILOVER:
                    changed = partial(self._active_changed, group, consumer)
                    failover = Failover(max(command.priority_level, 0), consumer.name, group.choose, changed)
                start = None
                if not command.durable:
                    start = self.moved.pop(key, None) or feed.start_of(command, self._clock())
                consumer.engine = await group.pump.run(
                    partial(feed.attach, group.topic, group.name, command, consumer.sharing, failover, start)
                )
                if consumer.state == "closed":
                    group.pump.call(consumer.engine.close, lambda *_: None)
                    return
                if not group.consumers:
                    consumer.engine.add_waker(group.pump.wake)
                    group.waking = consumer.engine
                group.join(consumer)
                consumer.group = group
                peer.send(Success(command.request_id))
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
                message = f"the subscription's consumers are {SubscriptionType(group.type or 0).name}"
                raise Refused(ServerError.CONSUMER_BUSY, message)
            if command.type == SubscriptionType.KEY_SHARED:
                consumer.sharing.check_beside(each.sharing for each in group.consumers)
            if command.type != SubscriptionType.EXCLUSIVE:
                return
            other = group.consumers[0].peer
            if not other.closed and (other.number == consumer.peer.number or await other.ping(_ALIVE_S)):
                raise Refused(ServerError.CONSUMER_BUSY, "the subscription is exclusive and has a consumer")
            other.close("the connection does not answer")
            self.gone(other)
        group.durable = command.durable

    async def close(self, peer: Peer, command: CloseConsumer) -> None:
        """CLOSE_CONSUMER. One that is not there is closed already."""
        consumer = self.find(peer, command.consumer_id)
        if consumer is not None:
            self.forget(consumer)
            if consumer.state == "ready" and consumer.group is not None:
                await self.left(consumer.group, [consumer])
            consumer.state = "closed"
        peer.send(Success(command.request_id))

    def gone(self, peer: Peer) -> None:
        """The connection is gone."""
        for consumer in list(self.connections.pop(peer.number, {}).values()):
            if consumer.state == "ready" and consumer.group is not None:
                self._detach(consumer.group, [consumer], lambda *_: None)
            consumer.state = "closed"

    async def left(self, group: Attached, consumers: Sequence[Consumer]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._detach(group, consumers, lambda *_: None if done.done() else done.set_result(None))
        await done

    def _detach(
        self, group: Attached, consumers: Sequence[Consumer], done: Callable[..., object], *, failed: bool = True
    ) -> None:
        """Have the engine forget consumers; what they hold is delivered again, and counts as `failed` deliveries."""
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

        def left(*result: Any) -> None:
            group.leaving -= 1
            done(*result)
            group.pump.turn()
            self._drop_unused(group)

        group.pump.call(partial(feed.detach, engines, failed), left)

    def forget(self, consumer: Consumer) -> None:
        mine = self.connections.get(consumer.peer.number)
        if mine is not None and mine.get(consumer.consumer_id) is consumer:
            del mine[consumer.consumer_id]

    def _drop_unused(self, group: Attached) -> None:
        key = group.topic.name, group.name
        if group.is_unused and self.groups.get(key) is group:
            del self.groups[key]
            group.pump.close()
            if group.durable:
                self._kept.keep(key, group.batches)

    def forget_batches(self, topic: str, subscription: str) -> None:
        """A subscription, as it is stored, has moved or is deleted: forget its partly acknowledged batches."""
        group = self.groups.get((topic, subscription))
        if group is not None:
            group.batches.clear()
        self._kept.take((topic, subscription))

    def _failed(self, group: Attached, error: Exception) -> None:
        """The subscription was deleted, or the store has failed."""
        _log.warning("subscription %s of %s is closed: %s", group.name, group.topic.name, error)
        group.batches.clear()
        self.close_group(group, lambda *_: None)

    def close_group(self, group: Attached, done: Callable[..., object]) -> None:
        """Close the consumers of a subscription, which is not for what they did: their deliveries do not count."""
        consumers = group.close_consumers()
        for consumer in consumers:
            self.forget(consumer)
        self._detach(group, consumers, done, failed=False)

    async def alone(self, topic: str, name: str, work: Callable[[], T], *, force: bool) -> T:
        """Have a worker do something to a subscription that has no consumer: with `force` they are closed before.

        name: as stored. Clients whose consumers are closed subscribe again, and wait until it is done. Refused:
        ConsumerBusy, without `force`. Raises what `work` does.
        """
        group = self.groups.get((topic, name))
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
                self.close_group(group, lambda *_: None)
                found = await group.pump.run(work)
                group.batches.clear()
                return found
        finally:
            group.opening -= 1
            self._drop_unused(group)

    def close_topic(self, topic: str) -> None:
        """Close every consumer of a topic, by its full name: clients subscribe again."""
        for (name, _), group in list(self.groups.items()):
            if name == topic:
                self.close_group(group, lambda *_: None)

    async def close_all(self) -> None:
        """Close every consumer, as the broker is shutting down, once what was acknowledged is taken."""
        groups = list(self.groups.values())
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in groups]
        for group, future in zip(groups, futures, strict=True):
            self.close_group(group, lambda *_, future=future: future.done() or future.set_result(None))
        await asyncio.gather(*futures)

    def find(self, peer: Peer, consumer_id: int) -> OpenedConsumer | None:
        """A consumer of a connection."""
        return self.connections.get(peer.number, {}).get(consumer_id)
