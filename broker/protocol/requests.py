"""Commands that clients send; CloseProducer, CloseConsumer, Ping and Pong go both ways.

A field without a default is required, as clients have it; one whose default is None is written whenever it is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from .fields import SIGNED, Command, command
from .parts import (
    AccessMode,
    AckType,
    AuthData,
    FeatureFlags,
    InitialPosition,
    KeySharedMeta,
    KeyValue,
    MessageIdData,
    Schema,
    SubscriptionType,
    TopicsMode,
)


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
    """The consumer may be sent so many messages more."""

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
    """Close a producer; Success. From the broker: it is closed, open it anew."""

    producer_id: Annotated[int, 1]
    request_id: Annotated[int, 2]
    url: Annotated[str | None, 3] = None
    url_tls: Annotated[str | None, 4] = None


@command(16)
class CloseConsumer(Command):
    """Close a consumer; Success. From the broker: it is closed, open it anew."""

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
    """How many partitions has a topic?"""

    topic: Annotated[str, 1]
    request_id: Annotated[int, 2]
    auto_create: Annotated[bool, 6] = True


@command(23)
class Lookup(Command):
    """Which broker has a topic?"""

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
    """Where does the topic end?"""

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
    """Topics of a namespace, and from then on what changes."""

    request_id: Annotated[int, 1]
    watcher_id: Annotated[int, 2]
    namespace: Annotated[str, 3]
    pattern: Annotated[str, 4]
    topics_hash: Annotated[str | None, 5] = None


@command(67)
class WatchTopicListClose(Command):
    """Watch no longer; Success."""

    request_id: Annotated[int, 1]
    watcher_id: Annotated[int, 2]


@command(50)
class NewTxn(Command):
    """Begin a transaction."""

    request_id: Annotated[int, 1]


@command(52)
class AddPartitionToTxn(Command):
    """Produce in a transaction."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0


@command(54)
class AddSubscriptionToTxn(Command):
    """Acknowledge in a transaction."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0


@command(56)
class EndTxn(Command):
    """End a transaction."""

    request_id: Annotated[int, 1]
    txn_least: Annotated[int, 2] = 0
    txn_most: Annotated[int, 3] = 0


@command(62)
class TcClientConnect(Command):
    """Connect to a coordinator of transactions."""

    request_id: Annotated[int, 1]
