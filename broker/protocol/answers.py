"""Commands that the broker sends.

A field without a default is required, as clients have it; one whose default is None is written whenever it is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from .failures import ServerError
from .fields import SIGNED, Command, command
from .parts import AuthData, FeatureFlags, LookupKind, MessageIdData, MetadataResult, Schema


@command(3)
class Connected(Command):
    """The connection is ready."""

    server_version: Annotated[str, 1]
    protocol_version: Annotated[int, 2] = 0
    max_message_size: Annotated[int | None, 3] = None
    feature_flags: Annotated[FeatureFlags | None, 4] = None


@command(7)
class SendReceipt(Command):
    """A message is stored."""

    producer_id: Annotated[int, 1]
    sequence_id: Annotated[int, 2]
    message_id: Annotated[MessageIdData | None, 3] = None
    highest_sequence_id: Annotated[int, 4] = 0


@command(8)
class SendError(Command):
    """A message is not stored."""

    producer_id: Annotated[int, 1]
    sequence_id: Annotated[int, 2]
    error: Annotated[ServerError, 3]
    message: Annotated[str, 4]


@command(9)
class Message(Command):
    """An entry for a consumer: what is behind it is its blob."""

    consumer_id: Annotated[int, 1]
    message_id: Annotated[MessageIdData, 2]
    redelivery_count: Annotated[int, 3] = 0
    ack_set: Annotated[Sequence[int], 4, SIGNED] = ()
    epoch: Annotated[int | None, 5] = None


@command(13)
class Success(Command):
    """Done."""

    request_id: Annotated[int, 1]


@command(14)
class Error(Command):
    """Not done."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError, 2]
    message: Annotated[str, 3]


@command(17)
class ProducerSuccess(Command):
    """A producer is open, or, not ready, waits to be the only one."""

    request_id: Annotated[int, 1]
    producer_name: Annotated[str, 2]
    last_sequence_id: Annotated[int, 3, SIGNED] = -1
    schema_version: Annotated[bytes | None, 4] = None
    topic_epoch: Annotated[int | None, 5] = None
    ready: Annotated[bool, 6] = True


@command(22)
class PartitionedMetadataResponse(Command):
    """0 partitions: a plain topic."""

    request_id: Annotated[int, 2]
    partitions: Annotated[int | None, 1] = None
    response: Annotated[MetadataResult | None, 3] = None
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None


@command(24)
class LookupResponse(Command):
    """Where a topic is."""

    request_id: Annotated[int, 4]
    url: Annotated[str | None, 1] = None
    url_tls: Annotated[str | None, 2] = None
    response: Annotated[LookupKind | None, 3] = None
    authoritative: Annotated[bool, 5] = False
    error: Annotated[ServerError | None, 6] = None
    message: Annotated[str | None, 7] = None
    through_proxy: Annotated[bool, 8] = False


@command(26)
class ConsumerStatsResponse(Command):
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
class GetLastMessageIdResponse(Command):
    """The last message that may be read now."""

    last_message_id: Annotated[MessageIdData, 1]
    request_id: Annotated[int, 2]
    mark_delete_position: Annotated[MessageIdData | None, 3] = None


@command(31)
class ActiveConsumerChange(Command):
    """Whether a Failover consumer is the one that is served."""

    consumer_id: Annotated[int, 1]
    is_active: Annotated[bool, 2] = False


@command(33)
class GetTopicsResponse(Command):
    """The topics; none if their hash has not changed."""

    request_id: Annotated[int, 1]
    topics: Annotated[Sequence[str], 2] = ()
    filtered: Annotated[bool, 3] = False
    topics_hash: Annotated[str | None, 4] = None
    changed: Annotated[bool, 5] = True


@command(35)
class GetSchemaResponse(Command):
    """A schema, or why there is none."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError | None, 2] = None
    message: Annotated[str | None, 3] = None
    schema: Annotated[Schema | None, 4] = None
    schema_version: Annotated[bytes | None, 5] = None


@command(36)
class AuthChallenge(Command):
    """Credentials, please."""

    server_version: Annotated[str | None, 1] = None
    challenge: Annotated[AuthData | None, 2] = None
    protocol_version: Annotated[int, 3] = 0


@command(38)
class AckResponse(Command):
    """An acknowledgement is taken, or refused."""

    consumer_id: Annotated[int, 1]
    txn_least: Annotated[int | None, 2] = None
    txn_most: Annotated[int | None, 3] = None
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None
    request_id: Annotated[int | None, 6] = None


@command(40)
class GetOrCreateSchemaResponse(Command):
    """The version of a schema, or why it is not taken."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError | None, 2] = None
    message: Annotated[str | None, 3] = None
    schema_version: Annotated[bytes | None, 4] = None


@command(65)
class WatchTopicListSuccess(Command):
    """The topics as they are."""

    request_id: Annotated[int, 1]
    watcher_id: Annotated[int, 2]
    topics_hash: Annotated[str, 4]
    topics: Annotated[Sequence[str], 3] = ()


@command(66)
class WatchTopicUpdate(Command):
    """What changed."""

    watcher_id: Annotated[int, 1]
    topics_hash: Annotated[str, 4]
    new_topics: Annotated[Sequence[str], 2] = ()
    deleted_topics: Annotated[Sequence[str], 3] = ()


@command(51)
class NewTxnResponse(Command):
    """Refused: there are no transactions."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None


@command(53)
class AddPartitionToTxnResponse(Command):
    """Refused: there are no transactions."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None


@command(55)
class AddSubscriptionToTxnResponse(Command):
    """Refused: there are no transactions."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None


@command(57)
class EndTxnResponse(Command):
    """Refused: there are no transactions."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0
    error: Annotated[ServerError | None, 4] = None
    message: Annotated[str | None, 5] = None


@command(63)
class TcClientConnectResponse(Command):
    """Refused: there are no transactions."""

    request_id: Annotated[int, 1]
    error: Annotated[ServerError | None, 2] = None
    message: Annotated[str | None, 3] = None
