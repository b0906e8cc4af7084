"""What clients ask of consumers: the commands, and how each is answered.

What the engine does for a command is asked of its subscription's pump, in order with everything else that concerns that
subscription.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ...store.errors import DuelogError
from ..protocol.commands import (
    Ack,
    AckResponse,
    AckType,
    ConsumerStats,
    Error,
    Flow,
    GetLastMessageId,
    Redeliver,
    Seek,
    Success,
    Unsubscribe,
)
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.loop_calls import LoopCalls, Workers
from ..protocol.peer import Peer
from . import acking, feed, figures
from .attached import Attached
from .consumer_record import INDIVIDUAL, Consumer, Dispatched
from .membership import ConsumerSettings, Membership, OpenTopic, SchemaCheck

if TYPE_CHECKING:
    from ...store.received_messages import ReceivedMessages

_log = logging.getLogger("duelog.broker")


class Consumers:
    """All consumers. Of the event loop's thread."""

    def __init__(
        self,
        open_topic: OpenTopic,
        schemas: SchemaCheck,
        workers: Workers,
        calls: LoopCalls,
        clock: Callable[[], int],
        settings: ConsumerSettings | None = None,
    ) -> None:
        """clock: the store's, in ms."""
        self.settings = settings or ConsumerSettings()
        self._workers = workers
        self._calls = calls
        members = Membership(open_topic, schemas, workers, calls, clock, self.settings)
        self._members = members
        self.open = members.open
        self.close = members.close
        self.gone = members.gone
        self.alone = members.alone
        self.close_topic = members.close_topic
        self.close_all = members.close_all
        self.forget_batches = members.forget_batches

    # -- messages ------------------------------------------------------------------------------------

    def _ready(self, peer: Peer, consumer_id: int) -> tuple[Consumer, Attached]:
        """A consumer that is open. Raises Refused."""
        consumer = self._members.find(peer, consumer_id)
        if consumer is None or consumer.state != "ready" or consumer.group is None:
            raise Refused(ServerError.CONSUMER_NOT_FOUND, f"consumer {consumer_id} is not open")
        return consumer, consumer.group

    def flow(self, peer: Peer, command: Flow) -> None:
        """FLOW. For an unknown consumer it is dropped."""
        consumer = self._members.find(peer, command.consumer_id)
        if consumer is not None and consumer.group is not None:
            consumer.permits += command.permits
            consumer.group.send_surplus(consumer)
            consumer.group.pump.turn()

    def ack(self, peer: Peer, command: Ack) -> None:
        """ACK. For an unknown consumer it is dropped."""
        consumer = self._members.find(peer, command.consumer_id)
        if consumer is None or consumer.group is None or consumer.state != "ready":
            return
        answer = None
        if command.request_id is not None:
            answer = partial(_answer_ack, peer, command)
        try:
            if command.txn_least is not None or command.txn_most is not None:
                raise Refused(ServerError.NOT_ALLOWED, "transactions are not offered")
            if command.type == AckType.CUMULATIVE:
                acking.cumulative(consumer.group, consumer, command.message_ids, answer)
            else:
                acking.individual(consumer.group, consumer, command.message_ids, answer)
        except Refused as refused:
            if answer is not None:
                answer(refused)
            else:
                _log.info("an acknowledgement of consumer %s is refused: %s", consumer.name, refused)

    def redeliver(self, peer: Peer, command: Redeliver) -> None:
        """REDELIVER. For an unknown consumer it is dropped."""
        consumer = self._members.find(peer, command.consumer_id)
        if consumer is None or consumer.group is None or consumer.state != "ready":
            return
        group = consumer.group
        if command.message_ids and consumer.type in INDIVIDUAL:
            places = [acking.place_of(each) for each in command.message_ids]
            released = group.release(consumer, [each for each in places if each is not None])
            if released:
                group.pump.give_back(consumer, released)
            return
        if command.epoch is not None:
            consumer.epoch = command.epoch
        group.release(consumer, None)
        group.pump.give_back(consumer, None)

    # -- positions -----------------------------------------------------------------------------------

    async def seek(self, peer: Peer, command: Seek) -> None:
        """SEEK: every consumer of the subscription is closed, then SUCCESS.

        What any of them acknowledges from the move until it is told belongs to the place before: it is answered, and
        not applied. After a move that failed it is applied.
        """
        try:
            consumer, group = self._ready(peer, command.consumer_id)
            async with group.lock:
                if consumer.state != "ready" or consumer.engine is None:
                    raise Refused(ServerError.CONSUMER_NOT_FOUND, f"consumer {command.consumer_id} is not open")
                group.moving = True
                try:
                    work = partial(feed.seek, group.topic, consumer.engine, command)
                    await group.pump.run(work, partial(self._moved, group))
                finally:
                    group.moving = False
                    group.pump.turn()
        except (Refused, DuelogError) as error:
            code = error.error if isinstance(error, Refused) else ServerError.METADATA
            peer.send(Error(command.request_id, code, str(error)))
            return
        peer.send(Success(command.request_id))

    def _moved(self, group: Attached, start: feed.Start) -> None:
        """The subscription has moved: tell its consumers, before anything else is done for it."""
        group.pump.drop_acks()
        group.batches.clear()
        if not group.durable:
            self._remember(group, start)
        self._members.close_group(group, lambda *_: None)

    def _remember(self, group: Attached, start: feed.Start) -> None:
        key = group.topic.name, group.name
        self._members.moved[key] = start

        def forget() -> None:
            if self._members.moved.get(key) is start:
                del self._members.moved[key]

        self._calls.loop.call_later(self._members.settings.keep_alive_s, forget)

    async def last_message_id(self, peer: Peer, command: GetLastMessageId) -> None:
        """GET_LAST_MESSAGE_ID."""
        try:
            consumer, group = self._ready(peer, command.consumer_id)
            engine = consumer.engine
            if engine is None:
                raise Refused(ServerError.CONSUMER_NOT_FOUND, f"consumer {command.consumer_id} is not open")
            group.last = await self._workers(partial(feed.last_entry, group.topic, group.last))
            mark_delete = (await self._workers(engine.stats)).mark_delete
        except (Refused, DuelogError) as error:
            peer.send(Error(command.request_id, server_error(error), str(error)))
            return
        peer.send(feed.last_message_id(group.last, mark_delete, group.partition, command.request_id))

    async def unsubscribe(self, peer: Peer, command: Unsubscribe) -> None:
        """UNSUBSCRIBE: only a subscription's only consumer may, unless it says `force`."""
        try:
            consumer, group = self._ready(peer, command.consumer_id)
            async with group.lock:
                if len(group.consumers) > 1 and not command.force:
                    raise Refused(ServerError.METADATA, "the subscription has other consumers")
                self._members.forget(consumer)
                others = [each for each in group.consumers if each is not consumer]
                if consumer in group.consumers:
                    await self._members.left(group, [consumer])
                if others:
                    self._members.close_group(group, lambda *_: None)
                if group.durable:
                    await group.pump.run(partial(group.topic.unsubscribe, group.name))
                    self.forget_subscription(group.topic.name, group.name)
        except (Refused, DuelogError) as error:
            peer.send(Error(command.request_id, server_error(error), str(error)))
            return
        peer.send(Success(command.request_id))

    async def stats(self, peer: Peer, command: ConsumerStats) -> None:
        """CONSUMER_STATS."""
        try:
            consumer, _ = self._ready(peer, command.consumer_id)
            backlog = 0
            if consumer.engine is not None:
                backlog = (await self._workers(consumer.engine.stats)).backlog
        except (Refused, DuelogError) as error:
            peer.send(figures.unknown(command, error))
            return
        peer.send(figures.of_consumer(command, consumer, backlog, self._calls.loop.time()))

    def of_topic(self, topic: str) -> dict[str, list[Consumer]]:
        """The consumers of a topic by subscription."""
        return {name: list(group.consumers) for (of, name), group in self._members.groups.items() if of == topic}

    @property
    def groups(self) -> list[Attached]:
        """The subscriptions that have consumers."""
        return list(self._members.groups.values())

    @property
    def departed(self) -> dict[str, dict[str, Dispatched]]:
        """What consumers were sent that are no more, by topic and subscription; "": by readers and what was deleted."""
        return self._members.departed

    def forget_subscription(self, topic: str, name: str) -> None:
        """The subscription was deleted: what it was sent counts for the topic alone."""
        self.forget_batches(topic, name)
        of_topic = self._members.departed.get(topic)
        if of_topic is not None and name and (figures := of_topic.pop(name, None)) is not None:
            of_topic.setdefault("", Dispatched()).add(figures)

    def tell_dispatched(self, call: Callable[[ReceivedMessages], object]) -> None:
        """Have a call hear of entries that consumers are sent, of subscriptions that get their first from now on."""
        self._members.dispatched = call

    @property
    def count(self) -> int:
        """Consumers of all connections."""
        return sum(map(len, self._members.connections.values()))


def _answer_ack(peer: Peer, command: Ack, error: BaseException | None) -> None:
    if error is None:
        peer.send(AckResponse(command.consumer_id, request_id=command.request_id))
    else:
        code = server_error(error)
        peer.send(AckResponse(command.consumer_id, error=code, message=str(error), request_id=command.request_id))
