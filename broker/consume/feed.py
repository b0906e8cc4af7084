"""What is asked of the engine for a subscription. All of it may wait for the disk or a lock: workers call.

Positions on the wire are two numbers: the largest there are stand for the earliest message, the largest with a sign for
the latest, and an entry of 2^64-1 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...store.position import MAX_ID, MessageId
from ..protocol.commands import (
    GetLastMessageIdResponse,
    InitialPosition,
    MessageIdData,
    Seek,
    Subscribe,
    SubscriptionType,
)
from ..protocol.failures import Refused, ServerError
from .sticky import KeySharing

if TYPE_CHECKING:
    from ...delivery.dispatcher import SubscriptionType as EngineType
    from ...subscription import Subscription
    from ...topic import Topic

_UNSIGNED = 2**64 - 1
_TYPES: dict[SubscriptionType, EngineType] = {
    SubscriptionType.EXCLUSIVE: "exclusive",
    SubscriptionType.SHARED: "shared",
    SubscriptionType.FAILOVER: "failover",
    SubscriptionType.KEY_SHARED: "key_shared",
}
_INITIAL = {InitialPosition.LATEST: "latest", InitialPosition.EARLIEST: "earliest"}


class Start(NamedTuple):
    """Where a reader begins: "earliest", "latest" or an id; or so many seconds before now."""

    at: str | MessageId
    rollback_sec: int = 0


def start_of(command: Subscribe) -> Start:
    """Where a reader is to begin."""
    if command.start_message_id is None:
        return Start(_INITIAL[command.initial_position], command.rollback_sec)
    return Start(_position(command.start_message_id), command.rollback_sec)


def _position(message_id: MessageIdData) -> str | MessageId:
    if message_id.ledger_id == _UNSIGNED:
        return "earliest"
    if message_id.ledger_id >= MAX_ID:
        return "latest"
    return MessageId(message_id.ledger_id, 0 if message_id.entry_id == _UNSIGNED else message_id.entry_id)


def attach(topic: Topic, name: str, command: Subscribe, sharing: KeySharing, start: Start | None) -> Subscription:
    """Attach a consumer; start: of a reader. The subscription is made where there is none."""
    if start is not None:
        raise Refused(ServerError.NOT_ALLOWED, "readers are not offered yet")
    initial = _INITIAL[command.initial_position]
    return topic.subscribe(name, type=_TYPES[command.type], initial_position=initial)


def detach(engines: Sequence[Subscription]) -> None:
    """Consumers are gone."""
    for engine in engines:
        engine.close()


def activate(engine: Subscription) -> None:
    """Serve this consumer of a Failover subscription, and no other."""


def seek(topic: Topic, engine: Subscription, command: Seek) -> Start:
    """Move a subscription; where to."""
    if command.message_id is not None:
        to = _position(command.message_id)
        return Start(engine.seek(to))
    if command.publish_time is None:
        raise Refused(ServerError.METADATA, "SEEK names neither a message nor a time")
    return Start(engine.seek(command.publish_time))


def last_message_id(topic: Topic, engine: Subscription | None, partition: int) -> GetLastMessageIdResponse:
    """The last entry that may be read now, and what is acknowledged before anything else."""
    raise NotImplementedError
