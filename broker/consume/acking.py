"""ACK: from the ids of a command to what the engine is told; batches of which only some messages are meant.

Ids are those that MESSAGE named. What no consumer of a shared type holds is told to the engine as well, as it may have
been delivered over an earlier connection; an id that the topic does not have is refused by the engine, alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...store.position import BEFORE_FIRST, ENTRY_MASK, MessageId
from ..protocol.commands import MessageIdData
from ..protocol.failures import Refused, ServerError
from .attached import Attached
from .consumer_record import INDIVIDUAL, Consumer
from .pump import Answer

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


def individual(group: Attached, consumer: Consumer, ids: Sequence[MessageIdData], answer: Answer | None) -> None:
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


def cumulative(group: Attached, consumer: Consumer, ids: Sequence[MessageIdData], answer: Answer | None) -> None:
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
