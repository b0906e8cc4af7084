"""Messages inside commands, and the values of their enumerations."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

from .fields import SIGNED, part


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
    """Where a message stands. An ack_set has a bit for each message of a batch that is not acknowledged."""

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
    """How a Key_Shared subscription divides keys."""

    mode: Annotated[KeySharedMode, 1]
    ranges: Annotated[Sequence[HashRange], 3] = ()
    allow_out_of_order: Annotated[bool, 4] = False


@part
class FeatureFlags:
    """What a side can do beyond its protocol version."""

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
