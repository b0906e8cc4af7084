"""Commands of the binary protocol: one dataclass each, encoded and decoded by the table that their annotations make.

On the wire a command is a message with its type in field 1, and its own fields in the field whose number is the type.
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Annotated

from .failures import ServerError
from .fields import (
    BYTES,
    CLASSES,
    DECODERS,
    ENCODERS,
    SIGNED,
    VARINT,
    Command,
    ProtocolError,
    command,
    fields_of,
    part,
    read_varint,
    skip,
    tag,
    varint,
)

__all__ = ["Command", "ServerError"]
"""Names of other modules that this one hands on; its own need no list."""


class SubscriptionType(IntEnum):
    """SUBSCRIBE: who gets messages."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3


class InitialPosition(IntEnum):
    """SUBSCRIBE: where a new subscription begins."""

    LATEST = 0
    EARLIEST = 1


class AccessMode(IntEnum):
    """PRODUCER: whether others may produce beside it."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3


class AckType(IntEnum):
    """ACK: those messages, or all up to one."""

    INDIVIDUAL = 0
    CUMULATIVE = 1


class KeySharedMode(IntEnum):
    """SUBSCRIBE: who divides the range of hashes."""

    AUTO_SPLIT = 0
    STICKY = 1


class LookupKind(IntEnum):
    """LOOKUP's answer."""

    REDIRECT = 0
    CONNECT = 1
    FAILED = 2


class MetadataResult(IntEnum):
    """PARTITIONED_METADATA's answer."""

    SUCCESS = 0
    FAILED = 1


class TopicsMode(IntEnum):
    """GET_TOPICS_OF_NAMESPACE: which topics."""

    PERSISTENT = 0
    NON_PERSISTENT = 1
    ALL = 2


@part
class KeyValue:
    """A property."""

    key: Annotated[str, 1]
    value: Annotated[str, 2]


@part
class MessageIdData:
    """A message's position. An ack_set has a bit for each message of a batch that is not acknowledged."""

    ledger_id: Annotated[int, 1]
    entry_id: Annotated[int, 2]
    partition: Annotated[int, 3, SIGNED] = -1
    batch_index: Annotated[int, 4, SIGNED] = -1
    ack_set: Annotated[Sequence[int], 5, SIGNED] = ()
    batch_size: Annotated[int, 6, SIGNED] = 0


@part
class Schema:
    """A schema; `type` is kept as it came."""

    name: Annotated[str, 1]
    schema_data: Annotated[bytes, 3]
    type: Annotated[int, 4, SIGNED]
    properties: Annotated[Sequence[KeyValue], 5] = ()


@part
class HashRange:
    """Sticky hashes from start to end, both included."""

    start: Annotated[int, 1, SIGNED]
    end: Annotated[int, 2, SIGNED]


@part
class KeySharedMeta:
    """Division of keys in a Key_Shared subscription."""

    mode: Annotated[KeySharedMode, 1]
    ranges: Annotated[Sequence[HashRange], 3] = ()
    allow_out_of_order: Annotated[bool, 4] = False


@part
class FeatureFlags:
    """Capabilities beyond the protocol version."""

    supports_auth_refresh: Annotated[bool, 1] = False
    supports_broker_entry_metadata: Annotated[bool, 2] = False
    supports_partial_producer: Annotated[bool, 3] = False
    supports_topic_watchers: Annotated[bool, 4] = False
    supports_get_partitioned_metadata_without_auto_creation: Annotated[bool, 5] = False
    supports_topic_watcher_reconcile: Annotated[bool, 7] = False


@part
class AuthData:
    """Credentials, or a question for them."""

    method: Annotated[str | None, 1] = None
    data: Annotated[bytes | None, 2] = None


@command(2)
class Connect(Command):
    """The first command of a client."""

    client_version: Annotated[str, 1]
    auth_data: Annotated[bytes | None, 3] = None
    protocol_version: Annotated[int, 4] = 0
    auth_method_name: Annotated[str | None, 5] = None
    proxy_to_broker_url: Annotated[str | None, 6] = None
    original_principal: Annotated[str | None, 7] = None
    feature_flags: Annotated[FeatureFlags | None, 10] = None


@command(4)
class Subscribe(Command):
    """Open a consumer; Success."""

    topic: Annotated[str, 1]
    subscription: Annotated[str, 2]
    type: Annotated[SubscriptionType, 3]
    consumer_id: Annotated[int, 4]
    request_id: Annotated[int, 5]
    consumer_name: Annotated[str | None, 6] = None
    priority_level: Annotated[int, 7, SIGNED] = 0
    durable: Annotated[bool, 8] = True
    start_message_id: Annotated[MessageIdData | None, 9] = None
    metadata: Annotated[Sequence[KeyValue], 10] = ()
    read_compacted: Annotated[bool, 11] = False
    schema: Annotated[Schema | None, 12] = None
    initial_position: Annotated[InitialPosition, 13] = InitialPosition.LATEST
    create_topic: Annotated[bool, 15] = True
    rollback_sec: Annotated[int, 16] = 0
    key_shared: Annotated[KeySharedMeta | None, 17] = None
    epoch: Annotated[int | None, 19] = None


@command(5)
class Producer(Command):
    """Open a producer; ProducerSuccess."""

    topic: Annotated[str, 1]
    producer_id: Annotated[int, 2]
    request_id: Annotated[int, 3]
    producer_name: Annotated[str | None, 4] = None
    metadata: Annotated[Sequence[KeyValue], 6] = ()
    schema: Annotated[Schema | None, 7] = None
    epoch: Annotated[int, 8] = 0
    user_named: Annotated[bool, 9] = True
    access_mode: Annotated[AccessMode, 10] = AccessMode.SHARED
    topic_epoch: Annotated[int | None, 11] = None
    initial_subscription: Annotated[str | None, 13] = None


@command(6)
class Send(Command):
    """A message or a batch: what is behind it is its blob; SendReceipt or SendError."""

    producer_id: Annotated[int, 1]
    sequence_id: Annotated[int, 2]
    num_messages: Annotated[int, 3, SIGNED] = 1
    txn_least: Annotated[int | None, 4] = None
    txn_most: Annotated[int | None, 5] = None
    highest_sequence_id: Annotated[int, 6] = 0
    is_chunk: Annotated[bool, 7] = False


@command(10)
class Ack(Command):
    """Messages are done with; AckResponse if it has a request_id."""

    consumer_id: Annotated[int, 1]
    type: Annotated[AckType, 2]
    message_ids: Annotated[Sequence[MessageIdData], 3] = ()
    validation_error: Annotated[int | None, 4] = None
    txn_least: Annotated[int | None, 6] = None
    txn_most: Annotated[int | None, 7] = None
    request_id: Annotated[int | None, 8] = None


@command(11)
class Flow(Command):
    """Permit more messages to a consumer."""

    consumer_id: Annotated[int, 1]
    permits: Annotated[int, 2]


@command(12)
class Unsubscribe(Command):
    """Delete the subscription of a consumer; Success."""

    consumer_id: Annotated[int, 1]
    request_id: Annotated[int, 2]
    force: Annotated[bool, 3] = False


@command(15)
class CloseProducer(Command):
    """Close a producer; Success. From the broker: it is closed, and the client reopens it."""

    producer_id: Annotated[int, 1]
    request_id: Annotated[int, 2]
    url: Annotated[str | None, 3] = None
    url_tls: Annotated[str | None, 4] = None


@command(16)
class CloseConsumer(Command):
    """Close a consumer; Success. From the broker: it is closed, and the client reopens it."""

    consumer_id: Annotated[int, 1]
    request_id: Annotated[int, 2]
    url: Annotated[str | None, 3] = None
    url_tls: Annotated[str | None, 4] = None


@command(18)
class Ping(Command):
    """Asks for a Pong."""


@command(19)
class Pong(Command):
    """The answer to a Ping."""


@command(20)
class Redeliver(Command):
    """Send again: those messages, or, without any, all that the consumer holds."""

    consumer_id: Annotated[int, 1]
    message_ids: Annotated[Sequence[MessageIdData], 2] = ()
    epoch: Annotated[int | None, 3] = None


@command(21)
class PartitionedMetadata(Command):
    """Ask how many partitions a topic has."""

    topic: Annotated[str, 1]
    request_id: Annotated[int, 2]
    auto_create: Annotated[bool, 6] = True


@command(23)
class Lookup(Command):
    """Ask which broker serves a topic."""

    topic: Annotated[str, 1]
    request_id: Annotated[int, 2]
    authoritative: Annotated[bool, 3] = False
    listener: Annotated[str | None, 7] = None


@command(25)
class ConsumerStats(Command):
    """Figures of a consumer."""

    request_id: Annotated[int, 1]
    consumer_id: Annotated[int, 4]


@command(28)
class Seek(Command):
    """Move a subscription to a message, or to the first published then or later (ms); Success."""

    consumer_id: Annotated[int, 1]
    request_id: Annotated[int, 2]
    message_id: Annotated[MessageIdData | None, 3] = None
    publish_time: Annotated[int | None, 4] = None


@command(29)
class GetLastMessageId(Command):
    """Ask for the topic's last message."""

    consumer_id: Annotated[int, 1]
    request_id: Annotated[int, 2]


@command(32)
class GetTopics(Command):
    """Topics of a namespace."""

    request_id: Annotated[int, 1]
    namespace: Annotated[str, 2]
    mode: Annotated[TopicsMode, 3] = TopicsMode.PERSISTENT
    pattern: Annotated[str | None, 4] = None
    topics_hash: Annotated[str | None, 5] = None


@command(34)
class GetSchema(Command):
    """A schema of a topic, the last one if no version is named."""

    request_id: Annotated[int, 1]
    topic: Annotated[str, 2]
    schema_version: Annotated[bytes | None, 3] = None


@command(37)
class AuthResponse(Command):
    """Credentials."""

    client_version: Annotated[str | None, 1] = None
    response: Annotated[AuthData | None, 2] = None
    protocol_version: Annotated[int, 3] = 0


@command(39)
class GetOrCreateSchema(Command):
    """Store a schema of a topic if it is new."""

    request_id: Annotated[int, 1]
    topic: Annotated[str, 2]
    schema: Annotated[Schema, 3]


@command(64)
class WatchTopicList(Command):
    """List the topics of a namespace, then send every change."""

    request_id: Annotated[int, 1]
    watcher_id: Annotated[int, 2]
    namespace: Annotated[str, 3]
    pattern: Annotated[str, 4]
    topics_hash: Annotated[str | None, 5] = None


@command(67)
class WatchTopicListClose(Command):
    """Stop watching; Success."""

    request_id: Annotated[int, 1]
    watcher_id: Annotated[int, 2]


@command(50)
class NewTxn(Command):
    """Begin a transaction."""

    request_id: Annotated[int, 1]


@part
class TxnCommand(Command):
    """A request in a transaction; every one is refused."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0


@command(62)
class TcClientConnect(Command):
    """Connect to a coordinator of transactions."""

    request_id: Annotated[int, 1]


class BrokerCommand(Command):
    """A command that only a broker sends."""

    __slots__ = ()


@command(3)
class Connected(BrokerCommand):
    """The connection is ready."""

    server_version: Annotated[str, 1]
    protocol_version: Annotated[int, 2] = 0
    max_message_size: Annotated[int | None, 3] = None
    feature_flags: Annotated[FeatureFlags | None, 4] = None


@command(7)
class SendReceipt(BrokerCommand):
    """A message is stored."""

    producer_id: Annotated[int, 1]
    sequence_id: Annotated[int, 2]
    message_id: Annotated[MessageIdData | None, 3] = None
    highest_sequence_id: Annotated[int, 4] = 0


@command(8)
class SendError(BrokerCommand):
    """A message is not stored."""

    producer_id: Annotated[int, 1]
    sequence_id: Annotated[int, 2]
    error: Annotated[ServerError, 3]
    message: Annotated[str, 4]


@command(9)
class Message(BrokerCommand):
    """An entry for a consumer: what is behind it is its blob."""

    consumer_id: Annotated[int, 1]
    message_id: Annotated[MessageIdData, 2]
    redelivery_count: Annotated[int, 3] = 0
    ack_set: Annotated[Sequence[int], 4, SIGNED] = ()
    epoch: Annotated[int | None, 5] = None


@command(13)
class Success(BrokerCommand):
    """The request succeeded."""

    request_id: Annotated[int, 1]


@command(14)
class Error(BrokerCommand):
    """The request failed."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError, 2]
    message: Annotated[str, 3]


@command(17)
class ProducerSuccess(BrokerCommand):
    """A producer is open, or, not ready, waits to be the only one."""

    request_id: Annotated[int, 1]
    producer_name: Annotated[str, 2]
    last_sequence_id: Annotated[int, 3, SIGNED] = -1
    schema_version: Annotated[bytes | None, 4] = None
    topic_epoch: Annotated[int | None, 5] = None
    ready: Annotated[bool, 6] = True


@command(22)
class PartitionedMetadataResponse(BrokerCommand):
    """0 partitions: a plain topic."""

    request_id: Annotated[int, 2]
    partitions: Annotated[int | None, 1] = None
    response: Annotated[MetadataResult | None, 3] = None
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None


@command(24)
class LookupResponse(BrokerCommand):
    """The broker that serves a topic."""

    request_id: Annotated[int, 4]
    url: Annotated[str | None, 1] = None
    url_tls: Annotated[str | None, 2] = None
    response: Annotated[LookupKind | None, 3] = None
    authoritative: Annotated[bool, 5] = False
    error: Annotated[ServerError | None, 6] = None
    message: Annotated[str | None, 7] = None
    through_proxy: Annotated[bool, 8] = False


@command(26)
class ConsumerStatsResponse(BrokerCommand):
    """Rates are messages a second, throughput is bytes a second."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError | None, 2] = None
    message: Annotated[str | None, 3] = None
    rate_out: Annotated[float | None, 4] = None
    throughput_out: Annotated[float | None, 5] = None
    rate_redeliver: Annotated[float | None, 6] = None
    consumer_name: Annotated[str | None, 7] = None
    available_permits: Annotated[int | None, 8] = None
    unacked_messages: Annotated[int | None, 9] = None
    blocked: Annotated[bool | None, 10] = None
    address: Annotated[str | None, 11] = None
    connected_since: Annotated[str | None, 12] = None
    type: Annotated[str | None, 13] = None
    rate_expired: Annotated[float | None, 14] = None
    backlog: Annotated[int | None, 15] = None
    ack_rate: Annotated[float | None, 16] = None


@command(30)
class GetLastMessageIdResponse(BrokerCommand):
    """The last message that may be read now."""

    last_message_id: Annotated[MessageIdData, 1]
    request_id: Annotated[int, 2]
    mark_delete_position: Annotated[MessageIdData | None, 3] = None


@command(31)
class ActiveConsumerChange(BrokerCommand):
    """The change of a Failover consumer's turn: it is served now, or no longer."""

    consumer_id: Annotated[int, 1]
    is_active: Annotated[bool, 2] = False


@command(33)
class GetTopicsResponse(BrokerCommand):
    """The topics; none if their hash has not changed."""

    request_id: Annotated[int, 1]
    topics: Annotated[Sequence[str], 2] = ()
    filtered: Annotated[bool, 3] = False
    topics_hash: Annotated[str | None, 4] = None
    changed: Annotated[bool, 5] = True


@command(35)
class GetSchemaResponse(BrokerCommand):
    """A schema, or why there is none."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError | None, 2] = None
    message: Annotated[str | None, 3] = None
    schema: Annotated[Schema | None, 4] = None
    schema_version: Annotated[bytes | None, 5] = None


@command(36)
class AuthChallenge(BrokerCommand):
    """A request for credentials."""

    server_version: Annotated[str | None, 1] = None
    challenge: Annotated[AuthData | None, 2] = None
    protocol_version: Annotated[int, 3] = 0


@command(38)
class AckResponse(BrokerCommand):
    """The answer to an acknowledgement: taken or refused."""

    consumer_id: Annotated[int, 1]
    txn_least: Annotated[int | None, 2] = None
    txn_most: Annotated[int | None, 3] = None
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None
    request_id: Annotated[int | None, 6] = None


@command(40)
class GetOrCreateSchemaResponse(BrokerCommand):
    """The version of a schema, or why it is not taken."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError | None, 2] = None
    message: Annotated[str | None, 3] = None
    schema_version: Annotated[bytes | None, 4] = None


@command(65)
class WatchTopicListSuccess(BrokerCommand):
    """The topics when the watch begins."""

    request_id: Annotated[int, 1]
    watcher_id: Annotated[int, 2]
    topics_hash: Annotated[str, 4]
    topics: Annotated[Sequence[str], 3] = ()


@command(66)
class WatchTopicUpdate(BrokerCommand):
    """Topics created and deleted since the last update."""

    watcher_id: Annotated[int, 1]
    topics_hash: Annotated[str, 4]
    new_topics: Annotated[Sequence[str], 2] = ()
    deleted_topics: Annotated[Sequence[str], 3] = ()


@part
class TxnRefusal(BrokerCommand):
    """The answer to a request about a transaction: there are none."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None


@command(51)
class NewTxnResponse(TxnRefusal):
    """Refuses NewTxn."""


for _number, _name in ((52, "AddPartitionToTxn"), (54, "AddSubscriptionToTxn"), (56, "EndTxn")):
    command(_number)(type(_name, (TxnCommand,), {"__doc__": TxnCommand.__doc__}))
    command(_number + 1)(type(f"{_name}Response", (TxnRefusal,), {"__doc__": TxnRefusal.__doc__}))


@command(63)
class TcClientConnectResponse(BrokerCommand):
    """Refuses TcClientConnect."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError | None, 2] = None
    message: Annotated[str | None, 3] = None


NO_REQUEST = (1 << 64) - 1
"""The request_id of what answers no request: CLOSE_PRODUCER and CLOSE_CONSUMER of the broker, and some errors."""

_TYPE = tag(1, VARINT)
_BEFORE = {cls: _TYPE + varint(number) + tag(number, BYTES) for number, cls in CLASSES.items()}
_REQUEST_ID = {
    number: tag(field.number, VARINT)[0]
    for number, cls in CLASSES.items()
    for field in fields_of(cls)
    if field.name == "request_id"
}
_BY_TYPE = {number: (number << 3 | BYTES, DECODERS[cls]) for number, cls in CLASSES.items()}


def encode(command: Command, rest: int = 0) -> bytes:
    """Encode a command; `rest` more bytes of its fields follow."""
    cls = type(command)
    body = ENCODERS[cls](command)
    return _BEFORE[cls] + varint(len(body) + rest) + body


_REFUSALS: dict[type[Command], Callable[..., Command]] = {
    Lookup: partial(LookupResponse, response=LookupKind.FAILED),
    PartitionedMetadata: partial(PartitionedMetadataResponse, response=MetadataResult.FAILED),
    GetSchema: GetSchemaResponse,
    GetOrCreateSchema: GetOrCreateSchemaResponse,
    ConsumerStats: ConsumerStatsResponse,
    NewTxn: NewTxnResponse,
    **{CLASSES[number]: CLASSES[number + 1] for number in (52, 54, 56)},
    TcClientConnect: TcClientConnectResponse,
}


def refusal(command: Command, error: ServerError, message: str) -> Command | None:
    """The answer that refuses a request, in the request's own form; None: nothing is answered to it."""
    if isinstance(command, Send):
        return SendError(command.producer_id, command.sequence_id, error, message)
    request_id = getattr(command, "request_id", None)
    if request_id is None:
        return None
    if isinstance(command, Ack):
        return AckResponse(command.consumer_id, error=error, message=message, request_id=request_id)
    ids = {"request_id": request_id}
    if isinstance(command, TxnCommand):
        ids |= {"txn_least": command.txn_least, "txn_most": command.txn_most}
    return _REFUSALS.get(type(command), Error)(**ids, error=error, message=message)


def decode(data: bytes) -> Command:
    """Decode a command; raises ProtocolError, also for an unknown type."""
    try:
        number, start, end = _parts(data)
        command: Command = _BY_TYPE[number][1](data, start, end)
        return command
    except (IndexError, UnicodeDecodeError, struct.error) as error:
        raise ProtocolError(f"malformed command: {error}") from error


def request_of(data: bytes) -> tuple[type[Command], int | None]:
    """The class of a command and its request_id, without decoding the rest; raises ProtocolError."""
    try:
        number, start, end = _parts(data)
        wanted = _REQUEST_ID.get(number)
        while wanted is not None and start < end:
            found, start = read_varint(data, start)
            if found == wanted:
                return CLASSES[number], read_varint(data, start)[0]
            start = skip(data, start, found)
    except IndexError as error:
        raise ProtocolError(f"malformed command: {error}") from error
    return CLASSES[number], None


def _parts(data: bytes) -> tuple[int, int, int]:
    """The type of a command, and where its fields begin and end."""
    at, end, number = 0, len(data), 0
    bodies: dict[int, tuple[int, int]] = {}
    while at < end:
        found, at = read_varint(data, at)
        if found == 8:
            number, at = read_varint(data, at)
        elif found & 7 == BYTES:
            size, start = read_varint(data, at)
            at = start + size
            bodies[found] = (start, at)
        else:
            at = skip(data, at, found)
    if at != end:
        raise ProtocolError("a command is cut off")
    if number not in _BY_TYPE:
        raise ProtocolError(f"there is no command of type {number}")
    start, end = bodies.get(_BY_TYPE[number][0], (end, end))
    return number, start, end
