"""Commands of the binary protocol: one dataclass each, encoded and decoded by the table that their annotations make.

On the wire a command is a message with its type in field 1, and its own fields in the field whose number is the type.
"""

from __future__ import annotations

import struct

from .answers import (
    AckResponse,
    ActiveConsumerChange,
    AddPartitionToTxnResponse,
    AddSubscriptionToTxnResponse,
    AuthChallenge,
    Connected,
    ConsumerStatsResponse,
    EndTxnResponse,
    Error,
    GetLastMessageIdResponse,
    GetOrCreateSchemaResponse,
    GetSchemaResponse,
    GetTopicsResponse,
    LookupResponse,
    Message,
    NewTxnResponse,
    PartitionedMetadataResponse,
    ProducerSuccess,
    SendError,
    SendReceipt,
    Success,
    TcClientConnectResponse,
    WatchTopicListSuccess,
    WatchTopicUpdate,
)
from .failures import ServerError
from .fields import CLASSES, DECODERS, ENCODERS, Command, fields_of
from .parts import (
    AccessMode,
    AckType,
    AuthData,
    FeatureFlags,
    HashRange,
    InitialPosition,
    KeySharedMeta,
    KeySharedMode,
    KeyValue,
    LookupKind,
    MessageIdData,
    MetadataResult,
    Schema,
    SubscriptionType,
    TopicsMode,
)
from .requests import (
    Ack,
    AddPartitionToTxn,
    AddSubscriptionToTxn,
    AuthResponse,
    CloseConsumer,
    CloseProducer,
    Connect,
    ConsumerStats,
    EndTxn,
    Flow,
    GetLastMessageId,
    GetOrCreateSchema,
    GetSchema,
    GetTopics,
    Lookup,
    NewTxn,
    PartitionedMetadata,
    Ping,
    Pong,
    Producer,
    Redeliver,
    Seek,
    Send,
    Subscribe,
    TcClientConnect,
    Unsubscribe,
    WatchTopicList,
    WatchTopicListClose,
)
from .wire import BYTES, VARINT, ProtocolError, read_varint, skip, tag, varint

__all__ = [
    "NO_REQUEST",
    "AccessMode",
    "Ack",
    "AckResponse",
    "AckType",
    "ActiveConsumerChange",
    "AddPartitionToTxn",
    "AddPartitionToTxnResponse",
    "AddSubscriptionToTxn",
    "AddSubscriptionToTxnResponse",
    "AuthChallenge",
    "AuthData",
    "AuthResponse",
    "CloseConsumer",
    "CloseProducer",
    "Command",
    "Connect",
    "Connected",
    "ConsumerStats",
    "ConsumerStatsResponse",
    "EndTxn",
    "EndTxnResponse",
    "Error",
    "FeatureFlags",
    "Flow",
    "GetLastMessageId",
    "GetLastMessageIdResponse",
    "GetOrCreateSchema",
    "GetOrCreateSchemaResponse",
    "GetSchema",
    "GetSchemaResponse",
    "GetTopics",
    "GetTopicsResponse",
    "HashRange",
    "InitialPosition",
    "KeySharedMeta",
    "KeySharedMode",
    "KeyValue",
    "Lookup",
    "LookupKind",
    "LookupResponse",
    "Message",
    "MessageIdData",
    "MetadataResult",
    "NewTxn",
    "NewTxnResponse",
    "PartitionedMetadata",
    "PartitionedMetadataResponse",
    "Ping",
    "Pong",
    "Producer",
    "ProducerSuccess",
    "Redeliver",
    "Schema",
    "Seek",
    "Send",
    "SendError",
    "SendReceipt",
    "ServerError",
    "Subscribe",
    "SubscriptionType",
    "Success",
    "TcClientConnect",
    "TcClientConnectResponse",
    "TopicsMode",
    "Unsubscribe",
    "WatchTopicList",
    "WatchTopicListClose",
    "WatchTopicListSuccess",
    "WatchTopicUpdate",
    "decode",
    "encode",
    "refusal",
    "request_of",
]

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
    """The bytes of a command; `rest`: but for so many of fields that follow."""
    cls = type(command)
    body = ENCODERS[cls](command)
    return _BEFORE[cls] + varint(len(body) + rest) + body


def refusal(command: Command, error: ServerError, message: str) -> Command | None:
    """The answer that refuses a request, in the request's own form; None: nothing is answered to it."""
    if isinstance(command, Lookup):
        return LookupResponse(command.request_id, response=LookupKind.FAILED, error=error, message=message)
    if isinstance(command, PartitionedMetadata):
        return PartitionedMetadataResponse(
            command.request_id, response=MetadataResult.FAILED, error=error, message=message
        )
    if isinstance(command, GetSchema):
        return GetSchemaResponse(command.request_id, error, message)
    if isinstance(command, GetOrCreateSchema):
        return GetOrCreateSchemaResponse(command.request_id, error, message)
    if isinstance(command, ConsumerStats):
        return ConsumerStatsResponse(command.request_id, error, message)
    if isinstance(command, Send):
        return SendError(command.producer_id, command.sequence_id, error, message)
    if isinstance(command, Ack):
        if command.request_id is None:
            return None
        return AckResponse(command.consumer_id, None, None, error, message, command.request_id)
    if isinstance(command, NewTxn):
        return NewTxnResponse(command.request_id, error=error, message=message)
    if isinstance(command, AddPartitionToTxn):
        least, most = command.txn_least, command.txn_most
        return AddPartitionToTxnResponse(command.request_id, least, most, error, message)
    if isinstance(command, AddSubscriptionToTxn):
        least, most = command.txn_least, command.txn_most
        return AddSubscriptionToTxnResponse(command.request_id, least, most, error, message)
    if isinstance(command, EndTxn):
        return EndTxnResponse(command.request_id, command.txn_least, command.txn_most, error, message)
    if isinstance(command, TcClientConnect):
        return TcClientConnectResponse(command.request_id, error, message)
    request_id = getattr(command, "request_id", None)
    return None if request_id is None else Error(request_id, error, message)


def decode(data: bytes) -> Command:
    """The command that bytes are; raises ProtocolError, also for a type that is not known."""
    try:
        return _decode(data)
    except (IndexError, UnicodeDecodeError, struct.error) as error:
        raise ProtocolError(f"malformed command: {error}") from error


def request_of(data: bytes) -> tuple[type[Command], int | None]:
    """What a command is, and the request that it belongs to, without decoding the rest of it; raises ProtocolError."""
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


def _decode(data: bytes) -> Command:
    number, start, end = _parts(data)
    command: Command = _BY_TYPE[number][1](data, start, end)
    return command


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
