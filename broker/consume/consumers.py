"""Commands of clients about their consumers, and how each is answered.

Work of the engine goes through the subscription's pump, in order with everything else that concerns the subscription.

The ids of an ACK are those that MESSAGE named. An id that no consumer of a shared type holds goes to the engine as
well, as it may have been delivered over an earlier connection; the engine refuses an id that the topic does not have,
and that id alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from ...store.errors import DuelogError
from ...store.position import BEFORE_FIRST, ENTRY_MASK, MessageId
from ..protocol.commands import (
    Ack,
    AckResponse,
    AckType,
    ConsumerStats,
    ConsumerStatsResponse,
    Error,
    Flow,
    GetLastMessageId,
    MessageIdData,
    Redeliver,
    Seek,
    Success,
    Unsubscribe,
)
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.loop_calls import LoopCalls, Workers
from ..protocol.peer import Peer
from . import feed
from .attached import Attached
from .consumer_record import INDIVIDUAL, Consumer, Dispatched
from .membership import ConsumerSettings, Membership, OpenTopic, SchemaCheck
from .pump import Answer

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
                _ack_cumulative(consumer.group, consumer, command.message_ids, answer)
            else:
                _ack_individual(consumer.group, consumer, command.message_ids, answer)
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
            peer.send(_unknown_stats(command, error))
            return
        peer.send(_stats_of(command, consumer, backlog, self._calls.loop.time()))

    def of_topic(self, topic: str) -> dict[str, list[Consumer]]:
        """The consumers of a topic by subscription."""
        return {name: list(group.consumers) for (of, name), group in self._members.groups.items() if of == topic}

    @property
    def groups(self) -> list[Attached]:
        """The subscriptions that have consumers."""
        return list(self._members.groups.values())

    @property
    def departed(self) -> dict[str, dict[str, Dispatched]]:
        """Figures of closed consumers, by topic and subscription; "" has readers and deleted subscriptions."""
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


_MOST_WAITING = 20_000
"""Acknowledgements of a consumer that wait for a worker, at which its connection is not read."""


def place_of(message_id: MessageIdData) -> int | None:
    """An id as one number; None: no entry can have it."""
    if message_id.entry_id >= ENTRY_MASK or message_id.ledger_id >> 62:
        return None
    return message_id.ledger_id << 32 | message_id.entry_id


def _batch_size(message_id: MessageIdData) -> int | None:
    """Messages of the batch; None: the client does not say, or says what cannot be."""
    return message_id.batch_size if message_id.batch_size > 0 else None


def _ack_individual(group: Attached, consumer: Consumer, ids: Sequence[MessageIdData], answer: Answer | None) -> None:
    """Acknowledge messages one by one. Raises Refused where an id can be none."""
    places: list[int] = []
    shared = consumer.type in INDIVIDUAL
    for each in ids:
        place = place_of(each)
        if place is None:
            raise Refused(ServerError.METADATA, f"{each.ledger_id}:{each.entry_id} is no message")
        consumer.acked += 1
        if each.ack_set:
            size = _batch_size(each)
            if size is None and group.batches.left(place) is None:
                size = consumer.held.get(place)
            left = group.batches.take(place, each.ack_set, size)
            if left:
                group.done_with(consumer, place, left)
                continue
        elif group.batches:
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


def _ack_cumulative(group: Attached, consumer: Consumer, ids: Sequence[MessageIdData], answer: Answer | None) -> None:
    """Acknowledge everything up to a message. Raises Refused."""
    if consumer.type in INDIVIDUAL:
        raise Refused(ServerError.NOT_ALLOWED, f"no cumulative acknowledgement on {consumer.type.name}")
    if len(ids) != 1:
        raise Refused(ServerError.METADATA, f"a cumulative acknowledgement of {len(ids)} ids")
    place = place_of(ids[0])
    if place is None:
        raise Refused(ServerError.METADATA, f"{ids[0].ledger_id}:{ids[0].entry_id} is no message")
    consumer.acked += 1
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


_TYPES = ("Exclusive", "Shared", "Failover", "Key_Shared")


def _unknown_stats(command: ConsumerStats, error: Exception) -> ConsumerStatsResponse:
    """Answer for a consumer that does not exist."""
    return ConsumerStatsResponse(command.request_id, error=server_error(error), message=str(error))


def _stats_of(command: ConsumerStats, consumer: Consumer, backlog: int, now_s: float) -> ConsumerStatsResponse:
    """Answer with a consumer's figures; rates are averages since it was opened."""
    age_s = max(now_s - consumer.opened_at, 0.001)
    since = datetime.now(UTC) - timedelta(seconds=age_s)
    return ConsumerStatsResponse(
        command.request_id,
        rate_out=consumer.messages_out / age_s,
        throughput_out=consumer.bytes_out / age_s,
        rate_redeliver=consumer.redelivered / age_s,
        consumer_name=consumer.name,
        available_permits=max(consumer.permits, 0),
        unacked_messages=consumer.unacked,
        blocked=consumer.blocked,
        address=consumer.peer.address,
        connected_since=since.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        type=_TYPES[consumer.type],
        rate_expired=0.0,
        backlog=backlog,
        ack_rate=consumer.acked / age_s,
    )
