"""Calls of the engine for a subscription. They may wait for the disk or a lock: workers make them.

Positions on the wire are two numbers: the largest there are stand for the earliest message, the largest with a sign for
the latest, and an entry of 2^64-1 for none.
"""

from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import NamedTuple, cast

from ...delivery.consumer_arguments import Failover
from ...delivery.dispatcher import SubscriptionType as EngineType
from ...delivery.key_slots import KeyShared, Parts, PartsOfKey
from ...store.errors import CorruptRecord, InvalidArgument
from ...store.message import MAX_DUE_MS
from ...store.position import MAX_ID, MessageId
from ...store.received_messages import ReceivedMessages
from ...subscription import Subscription
from ...topic import Topic
from ...topics.seeking import PublishedAt, SeekTarget
from ..protocol import commands, entry
from ..protocol.failures import Refused, ServerError
from ..protocol.fields import Command, ProtocolError
from ..protocol.frames import metadata_of

_UNSIGNED = 2**64 - 1

Start = str | MessageId | PublishedAt
"""The start of a reader: "earliest", "latest", an id, or the first message published at a time."""


def start_of(command: commands.Subscribe, now_ms: int) -> Start:
    """Read the start of a reader from its SUBSCRIBE."""
    if command.rollback_sec:
        return PublishedAt(max(now_ms - command.rollback_sec * 1_000, 0))
    if command.start_message_id is None:
        return command.initial_position.name.lower()
    return _position(command.start_message_id)


def _position(message_id: commands.MessageIdData) -> str | MessageId:
    if message_id.ledger_id == _UNSIGNED:
        return "earliest"
    if message_id.ledger_id >= MAX_ID:
        return "latest"
    return MessageId(message_id.ledger_id, 0 if message_id.entry_id == _UNSIGNED else message_id.entry_id)


def attach(
    topic: Topic,
    name: str,
    command: commands.Subscribe,
    sharing: KeyShared,
    failover: Failover | None,
    start: Start | None,
) -> Subscription:
    """Attach a consumer; start: of a reader. The subscription is made where there is none. Raises Refused."""
    kind = cast(EngineType, command.type.name.lower())
    keys = sharing if command.type == commands.SubscriptionType.KEY_SHARED else None
    if command.type == commands.SubscriptionType.SHARED:
        keys = _TOGETHER
    try:
        if start is not None:
            return topic.reader(existing(topic, start), name=name, type=kind, failover=failover, key_shared=keys)
        initial = command.initial_position.name.lower()
        return topic.subscribe(name, type=kind, initial_position=initial, failover=failover, key_shared=keys)
    except InvalidArgument as error:
        if error.field == "ranges":  # they overlap those of another consumer
            raise Refused(ServerError.CONSUMER_ASSIGN, str(error)) from error
        raise


def sharing_of(asked: commands.KeySharedMeta | None) -> KeyShared:
    """A consumer's request for a share of the keys. Raises Refused."""
    if asked is None:
        return KeyShared(order_by)
    ranges = None
    if asked.mode == commands.KeySharedMode.STICKY:
        ranges = [(each.start, each.end) for each in asked.ranges]
    try:
        return KeyShared(order_by, ranges, asked.allow_out_of_order)
    except InvalidArgument as error:
        raise Refused(ServerError.CONSUMER_ASSIGN, str(error)) from error


def order_by(payload: bytes, key: str | None) -> int | str | None:
    """The sticky hash of a stored message; None: it has no key, and is no part of another one."""
    try:
        number = entry.unpack(payload).sticky_hash or message_in_chunks(payload, key)
        return PartsOfKey(number) if isinstance(number, int) and entry.is_chunk(payload) else number
    except CorruptRecord:  # a program sent it, not a client
        return None if key is None else entry.hash_of(key.encode())


def message_in_chunks(payload: bytes, _: str | None = None) -> Parts | None:
    """The message that a stored one is a part of, which one consumer puts together; None: it is whole."""
    if not entry.is_chunk(payload):
        return None
    try:
        metadata = entry.decode_metadata(metadata_of(memoryview(payload)[entry.HEADER_BYTES :]))
    except ProtocolError:
        return None
    return Parts(f"{metadata.producer_name} {metadata.sequence_id}")


def may_be_in_chunks(payloads: Sequence[bytes]) -> bool:
    """Return False if no stored message is a part of another one: most polls have none, and each message would cost."""
    try:
        return any(flags & entry.CHUNK for flags in set(map(itemgetter(1), payloads)))
    except IndexError:  # a program sent it
        return True


_TOGETHER = KeyShared(message_in_chunks, may_order=may_be_in_chunks)


def detach(engines: Sequence[Subscription], failed: bool) -> None:
    """Consumers are gone; failed: what they held counts as delivered."""
    for engine in engines:
        engine.close(failed=failed)


def seek(topic: Topic, engine: Subscription, command: commands.Seek) -> Start:
    """Move a subscription; where to."""
    if command.message_id is not None:
        return engine.seek(existing(topic, _position(command.message_id)))
    if command.publish_time is None:
        raise Refused(ServerError.METADATA, "SEEK names neither a message nor a time")
    if command.publish_time > MAX_DUE_MS:
        raise Refused(ServerError.METADATA, f"{command.publish_time} ms is no time")
    return engine.seek(PublishedAt(command.publish_time))


def existing(topic: Topic, start: Start) -> Start:
    """A start whose id may be the receipt of a delayed message: then where that is read. Raises Refused."""
    if not isinstance(start, MessageId):
        return start
    found = topic.position_of(start)
    if found is None and topic.state(start) in ("scheduled", "cancelled"):
        raise Refused(ServerError.METADATA, f"message {start} is not due yet, or was cancelled")
    return start if found is None else found


class LastEntry(NamedTuple):
    """The last entry of a topic that may be read, and the index of its last message, -1 where it is no batch."""

    position: MessageId
    batch_index: int


_NO_ENTRY = LastEntry(MessageId(0, -1), -1)


def last_entry(topic: Topic, known: LastEntry | None) -> LastEntry:
    """The last entry; `known` is what was found before."""
    position = topic.positions().last
    if position is None:
        return _NO_ENTRY
    if known is not None and known.position == position:
        return known
    header = header_at(topic, position)
    return LastEntry(position, header.messages - 1 if header is not None and header.flags & entry.BATCH else -1)


def header_at(topic: Topic, position: MessageId) -> entry.Header | None:
    """The header of an entry; None: it may not be read, or a program sent it, not a client."""
    messages = read_from(topic, position)
    if messages and messages.positions[0] == position:
        with suppress(CorruptRecord):
            return entry.unpack(messages.payloads[0])
    return None


def read_from(topic: Topic, start: SeekTarget) -> ReceivedMessages:
    """The first messages from a place on that may be read; it takes none of them."""
    with topic.reader(start) as reader:
        return reader.poll_columns(fetches=True)[0]


def last_message_id(last: LastEntry, mark_delete: MessageId, partition: int, request_id: int) -> Command:
    """GET_LAST_MESSAGE_ID's answer."""
    return commands.GetLastMessageIdResponse(
        _id_of(last.position, partition, last.batch_index), request_id, _id_of(mark_delete, partition)
    )


def _id_of(position: MessageId, partition: int, batch_index: int = -1) -> commands.MessageIdData:
    return commands.MessageIdData(position.ledger_id, position.entry_id % (_UNSIGNED + 1), partition, batch_index)
