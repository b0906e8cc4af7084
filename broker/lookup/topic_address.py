"""Names of topics, namespaces and subscriptions as clients give them.

Owns which names are refused with which error, what `-partition-N` means, and how a subscription's name is written in
the store. It does not know what exists.

Source of the rules: Apache Pulsar's TopicName.
"""

import re
from typing import NamedTuple, Self

from ...store.errors import InvalidArgument
from ...store.names import TopicName, validate_namespace_name, validate_subscription_name
from ..protocol.failures import Refused, ServerError

PARTITION_MARK = "-partition-"

_PARTITION = re.compile(rf"(.+){PARTITION_MARK}(0|[1-9][0-9]{{0,8}})", re.DOTALL)


class TopicAddress(NamedTuple):
    """The topic that a name means.

    >>> TopicAddress.parse("orders-partition-3").partition
    3
    >>> str(TopicAddress.parse("orders-partition-3").base)
    'persistent://public/default/orders'
    """

    name: TopicName
    partition: int = -1
    """N of a name that ends in `-partition-N`, else -1."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a full or short name; Refused: InvalidTopicName, or NotAllowed for a topic that is not persistent."""
        if text.startswith("non-persistent://"):
            raise Refused(ServerError.NOT_ALLOWED, f"{text}: topics are persistent here")
        try:
            name = TopicName.parse(text)
        except InvalidArgument as error:
            raise Refused(ServerError.INVALID_TOPIC_NAME, str(error)) from error
        match = _PARTITION.fullmatch(name.local_name)
        return cls(name, -1 if match is None else int(match[2]))

    @property
    def base(self) -> TopicName:
        """The partitioned topic that it is a partition of; of any other topic, itself."""
        if self.partition < 0:
            return self.name
        return self.name._replace(local_name=self.name.local_name.rpartition(PARTITION_MARK)[0])


def partition_name(base: TopicName, partition: int) -> TopicName:
    """The topic that holds a partition. Raises Refused where the name becomes too long."""
    return TopicAddress.parse(f"{base}{PARTITION_MARK}{partition}").name


def namespace_of(text: str) -> str:
    """`tenant/namespace` as a client gives it; Refused: InvalidTopicName."""
    try:
        return validate_namespace_name(text)
    except InvalidArgument as error:
        raise Refused(ServerError.INVALID_TOPIC_NAME, str(error)) from error


def stored_name(name: str) -> str:
    """The name of a producer or a subscription as the store has it: `/`, which it does not take, and `%` escaped."""
    return name.replace("%", "%25").replace("/", "%2F")


def stored_subscription(name: str) -> str:
    """A subscription's name as the store has it. Refused: NotAllowed."""
    try:
        return validate_subscription_name(stored_name(name))
    except InvalidArgument as error:
        raise Refused(ServerError.NOT_ALLOWED, str(error)) from error


def shown_subscription(stored: str) -> str:
    """A subscription's name as clients know it."""
    return stored.replace("%2F", "/").replace("%25", "%")
